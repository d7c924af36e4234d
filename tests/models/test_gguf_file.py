"""GGUF files: what is read, and everything that can be wrong with them."""

import dataclasses
import struct
from pathlib import Path

import chex
import numpy as np
import pytest

from models import LoadError, gemma3, load, load_model
from models.checkpoint import GGUF_FAMILIES
from models.llama import unpermute
from models.settings import GgufSettings

HF_TO_GGUF = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}
GEMMA3_TO_GGUF = HF_TO_GGUF | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3_text": "gemma3"}


def gguf_name(name, table=HF_TO_GGUF):
    prefix, _, rest = name.removeprefix("model.layers.").partition(".") if "layers" in name else ("", "", name)
    stem, _, suffix = rest.rpartition(".")
    return f"{f'blk.{prefix}.' if prefix else ''}{table[stem]}.{suffix}"


def interleave(weight, heads):
    """Rows of each head from halves to pairs: what llama.cpp's converter does to Q and K."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


def gguf_metadata(config):
    letters = [chr(97 + i) for i in range(26)]
    tokens = ["<unk>", "<s>", "</s>", "<|tool|>", *letters, "ab", "Ġ", "1", "2", "12"]
    tokens += [f"spare{i}" for i in range(config["vocab_size"] - len(tokens))]
    sizes = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "attention.key_length": config["head_dim"],
        "rope.dimension_count": config["head_dim"],
        "rope.freq_base": config["rope_theta"],
    }
    if config["model_type"] in ("mistral", "gemma3_text"):
        sizes["attention.sliding_window"] = config["sliding_window"]
    if config["model_type"] == "gemma3_text":
        sizes["attention.sliding_window_pattern"] = config["sliding_window_pattern"]
        sizes["rope.freq_base_swa"] = config["rope_local_base_freq"]
        if "rope_scaling" in config:
            sizes |= {"rope.scaling.type": "linear", "rope.scaling.factor": config["rope_scaling"]["factor"]}
    architecture = ARCHITECTURES[config["model_type"]]
    return {
        "general.architecture": architecture,
        **{f"{architecture}.{key}": value for key, value in sizes.items()},
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3, 4] + [1] * (len(tokens) - 4),
        "tokenizer.ggml.merges": ["a b", "1 2"],  # the second one never applies: digits are split first
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": "{{ eos_token }}",
    }


def pack_text(text):
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def pack_value(value):
    if isinstance(value, str):
        return struct.pack("<I", 8) + pack_text(value)
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<Ii", 5, value)
    if isinstance(value, float):
        return struct.pack("<Id", 12, value)
    items = b"".join(pack_value(item)[4:] for item in value)
    return struct.pack("<I", 9) + pack_value(value[0])[:4] + struct.pack("<Q", len(value)) + items


def gguf_bytes(metadata, tensors, *, entry=None, counts=None, magic=b"GGUF", version=3):
    """A GGUF file, written independently of the code under test.

    entry(name, fields) may change (name, shape, type, offset) of the tensor table, counts the two numbers of entries.
    """
    body, table = b"", b""
    for name, value in tensors.items():
        fields = (name, value.shape[::-1], {np.float32: 0, np.float16: 1}[value.dtype.type], len(body))
        name, shape, kind, offset = entry(*fields) if entry else fields
        table += (
            pack_text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape) + struct.pack("<IQ", kind, offset)
        )
        body += value.tobytes() + bytes(-value.nbytes % 32)
    pairs = b"".join(pack_text(key) + pack_value(value) for key, value in metadata.items())
    num_tensors, num_pairs = counts or (len(tensors), len(metadata))
    head = magic + struct.pack("<IQQ", version, num_tensors, num_pairs) + pairs + table
    return head + bytes(-len(head) % 32) + body


def gguf_tensors(model):
    """The tensors as llama.cpp's converter writes them."""
    config = model.config_json
    family = config["model_type"]
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    tensors = {}
    for name, value in model.weights.items():
        part = name.split(".")[-2]
        if family in ("llama", "mistral") and part in heads:
            value = interleave(value, heads[part])
        if family == "gemma3_text" and part.endswith("norm"):
            value = value + 1
        tensors[gguf_name(name, GEMMA3_TO_GGUF if family == "gemma3_text" else HF_TO_GGUF)] = value
    return tensors


@pytest.fixture
def gguf(tiny, tiny_family, tmp_path):
    """gguf(variant, metadata changes (None removes), tensors, cut, options of gguf_bytes) -> path of a tiny file."""

    def write(variant="plain", changes=None, tensors=None, cut=None, **options):
        model = tiny_family(variant) if variant in FAMILY_VARIANTS else tiny(variant)
        metadata = gguf_metadata(model.config_json) | (changes or {})
        metadata = {key: value for key, value in metadata.items() if value is not None}
        content = gguf_bytes(metadata, gguf_tensors(model) if tensors is None else tensors, **options)
        path = tmp_path / "model.gguf"
        path.write_bytes(content if cut is None else content[:cut])
        return path

    return write


FAMILY_VARIANTS = ["mistral", "qwen2", "qwen3", "qwen3_biased", "gemma3", "gemma3_scaled"]
# What a GGUF file cannot say: scores are scaled by the head's width.
GGUF_CONFIG = {"gemma3": {"query_pre_attn_scalar": 8.0}, "gemma3_scaled": {"query_pre_attn_scalar": 8.0}}


@pytest.mark.parametrize("variant", FAMILY_VARIANTS)
def test_load_gguf_of_each_family_equals_its_folder(gguf, tiny_family, tmp_path, variant):
    folder = load_model(tiny_family(variant).save(tmp_path))
    loaded = load_model(gguf(variant))
    assert loaded.config == dataclasses.replace(folder.config, **GGUF_CONFIG.get(variant, {}))
    assert type(loaded.forward) is type(folder.forward)
    # 1 + weight was rounded when the file was written.
    chex.assert_trees_all_close(loaded.params, folder.params, rtol=0, atol=1.2e-7 if "gemma3" in variant else 0)


def test_load_gguf_of_gemma3_with_listed_windows_equals_that_with_an_interval(gguf):
    key = "gemma3.attention.sliding_window_pattern"
    listed = load_model(gguf("gemma3", changes={key: [True, True, False, True, True]})).config
    assert listed == load_model(gguf("gemma3")).config
    with pytest.raises(LoadError, match="must come at equal intervals"):
        load_model(gguf("gemma3", changes={key: [False, True, False, True, True]}))


def test_load_gguf_of_gemma3_27b_scales_scores_by_hidden_size_over_heads(tiny_family):
    """The one size that is scaled so is told by its number of layers."""
    sizes = {"num_hidden_layers": 62, "hidden_size": 5376, "num_attention_heads": 32, "head_dim": 128}
    metadata = gguf_metadata({**tiny_family("gemma3").config_json, **sizes})
    settings = GgufSettings(path=Path("x"), metadata=metadata, tensor_names=frozenset())
    assert gemma3.FAMILY.config_from_gguf(settings).query_pre_attn_scalar == 168


@pytest.mark.parametrize("variant", ["plain", "biased", "tied"])
def test_load_gguf_restores_config_and_params(gguf, tiny, variant):
    model = tiny(variant)
    loaded = load_model(gguf(variant))
    assert loaded.config == model.config
    chex.assert_trees_all_equal(loaded.params, model.params())


def test_load_gguf_of_float16_is_exact(gguf, tiny):
    tensors = {name: value.astype(np.float16) for name, value in gguf_tensors(tiny("plain")).items()}
    params = load_model(gguf(tensors=tensors)).params
    expected = tensors["token_embd.weight"].astype(np.float32)
    chex.assert_trees_all_equal(np.asarray(params["embedding"]), expected)


def test_unpermute_of_two_heads_turns_pairs_into_halves():
    rows = np.array([0, 2, 1, 3, 10, 12, 11, 13])  # halves (0 1 | 2 3) stored as pairs 0 2, 1 3
    assert unpermute(rows, 2).tolist() == [0, 1, 2, 3, 10, 11, 12, 13]


def test_load_gguf_tokenizer_parses_special_tokens_digits_and_merges(gguf):
    loaded = load_model(gguf())
    ids = loaded.tokenizer.encode("ab<|tool|>c 12</s>").ids
    assert [loaded.tokenizer.id_to_token(i) for i in ids] == ["ab", "<|tool|>", "c", "Ġ", "1", "2", "</s>"]
    assert loaded.tokenizer.decode(ids) == "ab<|tool|>c 12"
    assert (loaded.bos_token, loaded.eos_token, loaded.chat_template) == ("<s>", "</s>", "{{ eos_token }}")


def test_load_gguf_with_add_bos_token_puts_it_first_once(gguf):
    tokenizer = load_model(gguf(changes={"tokenizer.ggml.add_bos_token": True})).tokenizer
    assert tokenizer.encode("c").ids == [1, 6]
    assert tokenizer.encode("c", add_special_tokens=False).ids == [6]


def test_load_gguf_with_end_of_turn_token_ends_on_both(gguf):
    assert load_model(gguf(changes={"tokenizer.ggml.eot_token_id": 3})).config.eos_token_ids == (2, 3)


HUGE = 2**60


def huge_shape(name, shape, kind, offset):
    return name, (HUGE, HUGE), kind, offset


def past_the_end(name, shape, kind, offset):
    return name, shape, kind, offset + 2**40


def all_at_start(name, shape, kind, offset):
    return name, shape, kind, 0


def unaligned(name, shape, kind, offset):
    return name, shape, kind, offset + 4


def same_name(name, shape, kind, offset):
    return "token_embd.weight", shape, kind, offset


def five_axes(name, shape, kind, offset):
    return name, (1, 1, 1, 1, *shape), kind, offset


def unknown_type(name, shape, kind, offset):
    return name, shape, 999, offset


def odd_row(name, shape, kind, offset):
    return name, shape, 3, offset  # Q4_1 packs 32 values; 48-wide rows do not divide


def empty_axis(name, shape, kind, offset):
    return name, (0, *shape[1:]), kind, offset


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"version": 1}, "version is 1, supported are 2 and 3"),
        ({"version": 3 << 24}, "version is"),  # big endian
        ({"counts": (HUGE, 18)}, "number of tensors is 1152921504606846976, more than the rest of the file"),
        ({"counts": (21, HUGE)}, "number of metadata entries is 1152921504606846976, more than"),
        ({"counts": (22, 18)}, "past the end|more than|unknown type|axes|UTF-8"),
        ({"entry": huge_shape}, "past the end of the file"),
        ({"entry": past_the_end}, "past the end of the file"),
        ({"entry": all_at_start}, "overlaps"),
        ({"entry": unaligned}, "not aligned"),
        ({"entry": same_name}, "duplicate tensor 'token_embd.weight'"),
        ({"entry": five_axes}, "axes, expected 1 to 4"),
        ({"entry": unknown_type}, "unknown type 999"),
        ({"entry": odd_row}, "of type Q4_1 cannot have shape"),
        ({"entry": empty_axis}, "cannot have shape"),
        ({"cut": 6}, "past the end of the file"),
        ({"cut": 700}, "past the end of the file|more than the rest"),
        ({"cut": -40}, "past the end of the file"),
    ],
)
def test_load_damaged_gguf_says_where(gguf, options, match, refused):
    path = gguf(**options)
    with refused(match):
        load_model(path)


@pytest.mark.parametrize("variant", ["plain", *FAMILY_VARIANTS])
@pytest.mark.parametrize("cut", range(4, 1600, 197))
def test_load_gguf_cut_anywhere_in_the_header_is_refused(gguf, variant, cut, refused):
    path = gguf(variant, cut=cut)
    with refused("not a valid GGUF file"):
        load_model(path)


@pytest.mark.parametrize(
    ("record", "match"),
    [
        (struct.pack("<Q", HUGE), "length of metadata key is"),
        (pack_text("k") + struct.pack("<IQ", 8, HUGE), "length of 'k' is"),
        (pack_text("k") + struct.pack("<IIQ", 9, 8, HUGE), "length of 'k' is"),
        (pack_text("k") + struct.pack("<IIQ", 9, 12, 2**61), "length of 'k' is"),
        (pack_text("k") + struct.pack("<IIQQ", 9, 8, 2, HUGE), "length of 'k' is"),
        (pack_text("k") + struct.pack("<IIQ", 9, 8, 6) + bytes(8) + struct.pack("<Q", 62), "length of 'k' is"),
        (pack_text("k") + struct.pack("<IIQQ", 9, 8, 1, 1) + b"\xff", "'k' is not UTF-8"),
        (pack_text("k") + struct.pack("<IIQ", 9, 9, 1), "array of unsupported type 9"),
        (pack_text("k") + struct.pack("<I", 99), "unknown type 99"),
        (struct.pack("<Q", 2) + b"\xff\xff" + struct.pack("<I", 0), "not UTF-8"),
        (
            pack_text("k") + struct.pack("<IB", 0, 1) + pack_text("k") + struct.pack("<IB", 0, 1),
            "duplicate metadata key",
        ),
    ],
)
def test_load_gguf_with_hostile_metadata_is_refused(tmp_path, record, match, refused):
    path = tmp_path / "hostile.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + record + bytes(64))
    with refused(match):
        load_model(path)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"general.architecture": "gpt2"}, "architecture 'gpt2' is not supported, only llama, qwen2, qwen3, gemma3"),
        ({"general.architecture": ["llama"]}, r"'general.architecture' is \['llama'\], expected str"),
        ({"general.architecture": "gemma3"}, "'gemma3.attention.head_count' is missing"),
        ({"general.architecture": None}, "'general.architecture' is missing"),
        ({"llama.embedding_length": None}, "'llama.embedding_length' is missing"),
        ({"llama.embedding_length": "wide"}, "'llama.embedding_length' is 'wide', expected int"),
        ({"llama.block_count": 2**31 - 1}, "says 2147483647 layers"),
        ({"llama.block_count": 1}, "unexpected tensor blk.1"),
        ({"llama.block_count": 3}, r"missing tensor blk.2.attn_q.weight \[32, 32\]"),
        ({"llama.attention.head_count": 0}, "num_heads must be a whole number > 0"),
        ({"llama.attention.head_count": 3}, "num_heads must be a multiple of num_kv_heads = 2, got 3"),
        ({"llama.expert_count": 8}, "llama.expert_count = 8, supported is 0"),
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type = 'yarn'"),
        ({"general.alignment": 0}, "general.alignment is 0"),
        ({"llama.attention.sliding_window": 0}, "sliding_window must be a whole number > 0"),
        (
            {"tokenizer.ggml.model": "bert"},
            "tokenizer 'bert' .* only 'llama', and 'gpt2' with smollm, qwen2;",
        ),
        ({"tokenizer.ggml.pre": "tekken"}, "pre-tokenizer 'tekken' is not supported, only 'llama', and 'gpt2' with"),
        ({"tokenizer.ggml.tokens": None}, "'tokenizer.ggml.tokens' is missing"),
        ({"tokenizer.ggml.tokens": ["a"] * 40}, "duplicate tokens"),
        ({"tokenizer.ggml.tokens": [f"t{i}" for i in range(41)]}, r"token_embd.weight has shape \[40, 32\]|41 tokens"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "eos and bos token ids|must be a list of str"),
        ({"tokenizer.ggml.merges": ["a zz"]}, "merges do not fit the vocabulary"),
        ({"tokenizer.ggml.merges": ["ab"]}, "merges do not fit the vocabulary"),
        ({"tokenizer.ggml.eos_token_id": 40}, "got 40"),
        ({"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": None}, "bos_token_id is None"),
    ],
)
def test_load_gguf_with_bad_metadata_value_names_the_key(gguf, changes, match, refused):
    path = gguf(changes=changes)
    with refused(match):
        load_model(path)


ABSURD = [None, 0, -1, 2**31 - 1, 3, "x", 0.5, True, [1, 2], float("nan")]


@pytest.mark.parametrize("variant", ["plain", "qwen2", "qwen3", "gemma3_scaled"])
def test_load_gguf_with_any_absurd_setting_loads_or_says_so(gguf, tiny, tiny_family, variant, load_error):
    """Whatever a key of the family says: a LoadError that names the file, or a model; never another error."""
    model = tiny_family(variant) if variant in FAMILY_VARIANTS else tiny(variant)
    keys = [key for key in gguf_metadata(model.config_json) if key.startswith(("general", *GGUF_FAMILIES))]
    for key in keys:
        errors = []
        for value in ABSURD:
            path = gguf(variant, changes={key: value})
            errors.append(load_error(path))
            assert not errors[-1] or errors[-1].startswith(str(path)), (key, value)
        assert any(errors), f"{key} may have any value"


@pytest.mark.parametrize("variant", ["qwen2", "qwen3", "gemma3"])
def test_load_gguf_without_any_one_tensor_names_it(gguf, tiny_family, variant):
    tensors = gguf_tensors(tiny_family(variant))
    telling = ("output.weight", "blk.0.attn_q.bias", "blk.0.attn_output.bias")  # their absence describes another model
    for name in tensors:
        path = gguf(variant, tensors={key: value for key, value in tensors.items() if key != name})
        expected = "unexpected tensor blk.1" if name in telling else f"missing tensor {name}"
        if name != "output.weight":
            with pytest.raises(LoadError, match=expected):
                load_model(path)


@pytest.mark.parametrize("variant", ["qwen2", "qwen3", "gemma3"])
def test_load_gguf_with_any_one_tensor_of_another_shape_names_it(gguf, tiny_family, variant):
    tensors = gguf_tensors(tiny_family(variant))
    for name, value in tensors.items():
        path = gguf(variant, tensors={**tensors, name: np.concatenate([value, value])})
        with pytest.raises(LoadError, match=f"{name} has shape"):
            load_model(path)


def test_load_gguf_in_parts_joins_them_in_order(gguf, tiny_family, tmp_path, monkeypatch):
    """As the wheels of Gemma 3 hold it; tensors lie across the cuts."""
    path = gguf("gemma3")
    content, folder = path.read_bytes(), tmp_path / "some_parts"
    folder.mkdir()
    for index in range(3):
        (folder / f"part{index}").write_bytes(content[index * 7001 : (index + 1) * 7001 if index < 2 else None])
    monkeypatch.syspath_prepend(tmp_path)
    wheel = load.Wheel(files=tuple(("some_parts", f"part{index}") for index in range(3)), install="pip install parts")
    monkeypatch.setitem(load.WHEELS, "parts", wheel)
    chex.assert_trees_all_equal(load_model("parts").params, load_model(path).params)
    (folder / "part1").unlink()
    with pytest.raises(LoadError, match="not installed: pip install parts"):
        load_model("parts")
