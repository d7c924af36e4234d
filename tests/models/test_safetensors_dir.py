"""Folders in Hugging Face's layout: what is read, and everything that can be wrong with them."""

import json
import os
import struct

import chex
import numpy as np
import pytest
from safetensors.numpy import save_file

from models import LoadError, load_model


def write_json(path, value):
    path.write_text(json.dumps(value))


def shard(folder, tensors, num_shards=2):
    """Replaces the single file by shards and an index; returns the index."""
    (folder / "model.safetensors").unlink(missing_ok=True)
    index = {"metadata": {}, "weight_map": {}}
    for number in range(num_shards):
        name = f"model-{number}.safetensors"
        part = {key: tensors[key] for key in sorted(tensors)[number::num_shards]}
        save_file(part, folder / name)
        index["weight_map"] |= dict.fromkeys(part, name)
    write_json(folder / "model.safetensors.index.json", index)
    return index


def change_json(path, **changes):
    value = json.loads(path.read_text()) | changes
    write_json(path, {key: item for key, item in value.items() if item is not None})


@pytest.mark.parametrize("variant", ["plain", "biased", "tied", "scaled_rope"])
def test_load_folder_restores_config_and_params(tiny, tmp_path, variant):
    model = tiny(variant)
    save_file(model.weights, tmp_path / "model.safetensors")
    write_json(tmp_path / "config.json", model.config_json)
    loaded = load_model(tmp_path, dtype="float32")
    assert loaded.config == model.config
    assert loaded.forward == model.forward
    chex.assert_trees_all_equal(loaded.params, model.params())


def test_load_params_fuse_and_transpose_the_stored_matrices(folder, tiny):
    weights, layer = tiny("plain").weights, load_model(folder).params["layers"][1]
    names = [f"model.layers.1.self_attn.{part}_proj.weight" for part in "qkv"]
    expected = np.concatenate([weights[name] for name in names]).T
    chex.assert_trees_all_equal(np.asarray(layer["attention"]["qkv"]["kernel"]), expected)


def test_load_folder_with_shards_equals_single_file(folder, tiny):
    single = load_model(folder).params
    shard(folder, tiny("plain").weights, num_shards=3)
    chex.assert_trees_all_equal(load_model(folder).params, single)


def test_load_folder_reads_tokenizer_files(folder):
    loaded = load_model(folder)
    assert loaded.config.eos_token_ids == (2, 7)
    assert (loaded.bos_token, loaded.eos_token, loaded.chat_template) == ("<s>", "</s>", "{{ bos_token }}!")
    assert loaded.tokenizer.encode("ab</s>").ids == [3, 4, 2]


def test_load_with_config_of_another_model_says_which_shapes(folder, refused):
    change_json(folder / "config.json", vocab_size=41)
    with refused(r"model.embed_tokens.weight has shape \[40, 32\], the config asks for \[41, 32\]"):
        load_model(folder)


PICKLED = b"cpytest\nfail\n(S'the weights were unpickled'\ntR."  # a pickle that fails the test when it is loaded


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_load_pickled_weights_are_refused_unopened(folder, name, refused):
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(PICKLED)
    with refused("convert them to safetensors"):
        load_model(folder)


def test_load_folder_without_config_says_so(folder, refused):
    (folder / "config.json").unlink()
    with refused("has no config.json"):
        load_model(folder)


def test_load_folder_without_weights_says_so(folder, refused):
    (folder / "model.safetensors").unlink()
    with refused(r"has neither model.safetensors nor model.safetensors.index.json"):
        load_model(folder)


def test_load_folder_without_tokenizer_files_has_none(folder):
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).unlink()
    loaded = load_model(folder)
    assert (loaded.tokenizer, loaded.chat_template, loaded.config.eos_token_ids) == (None, None, (2,))


def test_load_folder_prefers_template_file_and_default_of_named_ones(folder):
    named = [{"name": "tools", "template": "no"}, {"name": "default", "template": "yes"}]
    change_json(folder / "tokenizer_config.json", chat_template=named)
    assert load_model(folder).chat_template == "yes"
    (folder / "chat_template.jinja").write_text("file")
    assert load_model(folder).chat_template == "file"


def test_load_config_of_transformers_5_reads_rope_parameters(folder, tiny):
    config = tiny("scaled_rope").config_json
    parameters = config.pop("rope_scaling") | {"rope_theta": config.pop("rope_theta")}
    write_json(folder / "config.json", config | {"rope_parameters": parameters})
    loaded = load_model(folder).config
    assert (loaded.rope_theta, loaded.rope_scaling) == (10000.0, tiny("scaled_rope").config.rope_scaling)


def test_load_config_without_optional_sizes_derives_them(folder, refused):
    change_json(folder / "config.json", head_dim=None, num_key_value_heads=None)
    with refused(r"k_proj.weight has shape \[16, 32\], the config asks for \[32, 32\]"):
        load_model(folder)  # as many kv heads as heads, of hidden_size / heads: not what this file holds


def test_load_ignores_rotation_tables_and_a_tied_head(tiny, tmp_path):
    model = tiny("tied")
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    extra["lm_head.weight"] = model.weights["model.embed_tokens.weight"]
    save_file(model.weights | extra, tmp_path / "model.safetensors")
    write_json(tmp_path / "config.json", model.config_json)
    chex.assert_trees_all_equal(load_model(tmp_path).params, model.params())


def test_load_weights_linked_into_the_hub_cache_is_allowed(folder, tmp_path_factory):
    repository = tmp_path_factory.mktemp("models--x--y")
    (repository / "blobs").mkdir()
    (repository / "snapshots").mkdir()
    snapshot = (folder).rename(repository / "snapshots" / "abc")
    for path in list(snapshot.iterdir()):
        target = path.rename(repository / "blobs" / f"hash-{path.name}")
        path.symlink_to(os.path.relpath(target, snapshot))
    assert load_model(snapshot).tokenizer is not None


def test_load_with_several_conversion_problems_lists_all(folder, tiny):
    weights = tiny("plain").weights
    weights["model.extra.weight"] = np.zeros(3, np.float32)
    weights["model.norm.weight"] = np.zeros(31, np.float32)
    weights["lm_head.weight"] = weights["lm_head.weight"].astype(np.float64)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(LoadError) as caught:
        load_model(folder)
    problems = str(caught.value).split("\n  - ")[1:]
    assert problems == [
        "lm_head.weight has dtype F64, which cannot be read",
        "missing tensor model.layers.1.mlp.up_proj.weight [48, 32]",
        "model.norm.weight has shape [31], the config asks for [32]",
        "unexpected tensor model.extra.weight [3]",
    ]


def test_load_with_very_many_problems_shortens_the_list(folder, refused):
    save_file({"x": np.zeros(1, np.float32)}, folder / "model.safetensors")
    change_json(folder / "config.json", num_hidden_layers=1)
    with refused("missing tensor"):
        load_model(folder)
    save_file({f"x{i}": np.zeros(1, np.float32) for i in range(99)}, folder / "model.safetensors")
    with refused(r"and \d+ more"):
        load_model(folder)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported, only llama, mistral, qwen2, qwen3, gemma3_text"),
        ({"model_type": None}, "model_type None is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu', supported is 'silu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope type 'yarn' is not supported"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor must be a finite number"),
        ({"rope_scaling": [1]}, "rope_scaling must be an object"),
        ({"rope_theta": "big"}, "rope_theta must be a finite number"),
        ({"hidden_size": None}, "hidden_size must be a whole number"),
        ({"hidden_size": -32}, "hidden_size must be"),
        ({"num_attention_heads": "4"}, "num_heads must be"),
        ({"num_hidden_layers": 10**9}, "says 1000000000 layers, the files hold 21 tensors"),
        ({"hidden_size": 2**31 - 1, "vocab_size": 2**31 - 1}, "the config asks for"),
        ({"hidden_size": 2**62}, "hidden_size must be .* below 2"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings must be True or False"),
        ({"eos_token_id": 40}, "eos and bos token ids .* got 40"),
    ],
)
def test_load_with_unsupported_or_absurd_config_names_the_field(folder, changes, match, refused):
    (folder / "generation_config.json").unlink()
    change_json(folder / "config.json", **changes)
    with refused(match):
        load_model(folder)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (b'{"a": ', "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[1]", "expected a JSON object, got list"),
        (b"[" * 200_000, "not valid JSON"),
        (b'{"model_type": "llama", "model_type": "llama"}', "duplicate key 'model_type'"),
    ],
)
def test_load_with_broken_config_json_says_so(folder, text, match, refused):
    (folder / "config.json").write_bytes(text)
    with refused(match):
        load_model(folder)


def safetensors_bytes(header, body):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


A, B = ({"dtype": "F32", "shape": [2], "data_offsets": [start, start + 8]} for start in (0, 8))
DUPLICATE = json.dumps({"a": A, "b": B})[:-1].encode() + b', "a": ' + json.dumps(A).encode() + b"}"


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"\x08\x00\x00", id="cut inside the header length"),
        pytest.param(safetensors_bytes({"a": A, "b": B}, bytes(15)), id="cut inside the weights"),
        pytest.param(safetensors_bytes({"a": A, "b": B}, bytes(16))[:20], id="cut inside the header"),
        pytest.param(struct.pack("<Q", 2**60) + b"{}", id="absurd header length"),
        pytest.param(struct.pack("<Q", 90_000_000) + b"{}", id="header longer than the file"),
        pytest.param(safetensors_bytes(b'{"a": ', bytes(16)), id="header is not JSON"),
        pytest.param(
            safetensors_bytes({"a": {**A, "data_offsets": [2**40, 2**40 + 8]}}, bytes(8)), id="offset outside"
        ),
        pytest.param(safetensors_bytes({"a": {**A, "data_offsets": [8, 0]}}, bytes(8)), id="offsets reversed"),
        pytest.param(safetensors_bytes({"a": A, "b": {**B, "data_offsets": [4, 12]}}, bytes(12)), id="overlap"),
        pytest.param(safetensors_bytes({"a": A}, bytes(16)), id="gap"),
        pytest.param(safetensors_bytes({"a": {**A, "shape": [2**62, 4]}}, bytes(8)), id="shape overflows"),
        pytest.param(safetensors_bytes({"a": {**A, "dtype": "F99"}}, bytes(8)), id="unknown dtype"),
        pytest.param(safetensors_bytes(DUPLICATE, bytes(16)), id="duplicate names"),
    ],
)
def test_load_damaged_safetensors_says_so(folder, content, refused):
    (folder / "model.safetensors").write_bytes(content)
    with refused("not a valid safetensors file|not valid JSON: duplicate key"):
        load_model(folder)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/hostname", "a/b.safetensors", "..", "", 7, "a\0b"])
def test_load_index_that_names_a_path_outside_is_refused(folder, tiny, name, refused):
    index = shard(folder, tiny("plain").weights)
    index["weight_map"]["lm_head.weight"] = name
    write_json(folder / "model.safetensors.index.json", index)
    with refused("expected the name of a file in this folder"):
        load_model(folder)


@pytest.mark.parametrize("name", ["model-1.safetensors", "config.json", "tokenizer.json"])
def test_load_file_that_links_outside_the_folder_is_refused(folder, tiny, tmp_path_factory, name, refused):
    shard(folder, tiny("plain").weights)
    outside = (folder / name).rename(tmp_path_factory.mktemp("outside") / name)
    (folder / name).symlink_to(outside)
    with refused("outside the model's folder"):
        load_model(folder)


def test_load_with_missing_shard_names_it(folder, tiny, refused):
    shard(folder, tiny("plain").weights)
    (folder / "model-1.safetensors").unlink()
    with refused("names files that are missing: model-1.safetensors"):
        load_model(folder)


def test_load_with_tensor_in_two_shards_names_it(folder, tiny, refused):
    weights = tiny("plain").weights
    shard(folder, weights)
    save_file({"lm_head.weight": weights["lm_head.weight"]}, folder / "model-0.safetensors")
    save_file({"lm_head.weight": weights["lm_head.weight"]}, folder / "model-1.safetensors")
    with refused("tensor lm_head.weight is in an earlier file too"):
        load_model(folder)


@pytest.mark.parametrize("weight_map", [None, [], {"a": ["x"]}])
def test_load_with_malformed_index_says_so(folder, weight_map, refused):
    (folder / "model.safetensors").unlink()
    write_json(folder / "model.safetensors.index.json", {"weight_map": weight_map})
    with refused("has no 'weight_map' object|expected the name of a file"):
        load_model(folder)


FAMILY_VARIANTS = ["mistral", "qwen2", "qwen2_window", "qwen3", "qwen3_biased", "gemma3", "gemma3_scaled"]


@pytest.mark.parametrize(
    ("variant", "changes", "match"),
    [
        ("mistral", {"sliding_window": 0}, "sliding_window must be a whole number > 0"),
        ("mistral", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope type 'linear' is not supported"),
        ("qwen2", {"rope_scaling": {"rope_type": "yarn"}}, "rope type 'yarn' is not supported, only 'default'"),
        ("qwen2_window", {"max_window_layers": -1}, "num_full_layers must be a whole number >= 0"),
        ("qwen2_window", {"layer_types": ["sliding_attention", "full_attention", "full_attention"]}, "full layers in"),
        ("qwen2_window", {"layer_types": ["full_attention"]}, "layer_types must list one of"),
        ("qwen3", {"hidden_act": "gelu"}, "hidden_act = 'gelu', supported is 'silu'"),
        ("qwen3", {"attention_bias": True}, "missing tensor model.layers.0.self_attn.k_proj.bias"),
        ("gemma3", {"hidden_activation": "gelu"}, "hidden_activation = 'gelu', supported is 'gelu_pytorch_tanh'"),
        ("gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0, supported is None"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
        ("gemma3", {"model_type": "gemma3"}, "model_type 'gemma3' is not supported"),
        ("gemma3", {"sliding_window_pattern": 0}, "full_layer_interval must be a whole number > 0"),
        ("gemma3", {"layer_types": ["linear_attention"] * 5}, "layer_types must list one of"),
        (
            "gemma3",
            {"layer_types": [*["full_attention"] * 2, *["sliding_attention"] * 3]},
            "must come at equal intervals",
        ),
        ("gemma3", {"rope_scaling": {"rope_type": "linear"}}, "rope_factor must be a finite number > 0"),
        ("gemma3", {"rope_local_base_freq": "low"}, "rope_local_theta must be a finite number > 0"),
        ("gemma3", {"rope_parameters": {"full_attention": "x"}}, "must be an object"),
        ("gemma3", {"rope_parameters": {"rope_theta": 1e4}}, "must have an entry 'full_attention'"),
        ("gemma3", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be a finite number > 0"),
    ],
)
def test_load_family_with_unsupported_or_absurd_config_names_the_field(tiny_family, tmp_path, variant, changes, match):
    tiny_family(variant).save(tmp_path)
    change_json(tmp_path / "config.json", **changes)
    with pytest.raises(LoadError, match=match):
        load_model(tmp_path)


ABSURD = [None, 0, -1, 2**62, 3, "x", 0.5, True, [], [1, 2], {}, {"full_attention": 1}]


@pytest.mark.parametrize("variant", FAMILY_VARIANTS)
def test_load_family_with_any_absurd_setting_loads_or_says_so(tiny_family, tmp_path, variant, load_error):
    """Whatever a field says: a LoadError that names the file, or a model; never another error."""
    model = tiny_family(variant)
    for config in (model.config_json, model.saved_config_json):
        model.save(tmp_path)
        for name in config:
            for value in ABSURD:
                write_json(tmp_path / "config.json", {**config, name: value})
                error = load_error(tmp_path)
                assert not error or error.startswith(str(tmp_path)), (name, value)


@pytest.mark.parametrize("variant", ["mistral", "qwen2", "qwen3", "gemma3"])
def test_load_family_without_any_one_tensor_names_it(tiny_family, tmp_path, variant):
    model = tiny_family(variant)
    model.save(tmp_path)
    for name in model.weights:
        save_file({key: value for key, value in model.weights.items() if key != name}, tmp_path / "model.safetensors")
        with pytest.raises(LoadError, match=f"missing tensor {name}"):
            load_model(tmp_path)
