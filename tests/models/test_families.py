"""Gemma 3, Qwen 2, Qwen 3 and Mistral against logits recorded from transformers (tests/data/record_families.py)."""

import dataclasses
import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models import gemma3, load_model, qwen3
from models.gemma3 import Gemma3Config
from models.qwen3 import Qwen3Config
from paged_jax import LLM, SamplingParams

VARIANTS = ["mistral", "qwen2", "qwen2_window", "qwen3", "qwen3_biased", "gemma3", "gemma3_scaled"]
WINDOWED = ["mistral", "qwen2_window", "gemma3"]
WINDOW = 8


def assert_close(actual, expected, tolerance=2e-5):
    chex.assert_shape(actual, np.shape(expected))
    chex.assert_trees_all_close(np.asarray(actual), np.asarray(expected), rtol=tolerance, atol=tolerance)


@pytest.fixture(scope="module")
def load(tiny_family, tmp_path_factory):
    """load(variant) -> (recorded, loaded), each loaded once."""
    loaded = {}

    def load_once(variant):
        if variant not in loaded:
            model = tiny_family(variant)
            loaded[variant] = model, load_model(model.save(tmp_path_factory.mktemp(variant)), dtype="float32")
        return loaded[variant]

    return load_once


def all_logits(model, loaded, paged, config=None):
    """Logits of every token of the recorded prompt, in one step."""
    ids = model.token_ids
    state = paged(loaded.config, max_len=len(ids))
    forward = loaded.forward if config is None else dataclasses.replace(loaded.forward, config=config)
    batch = state.ragged([ids], [0], logits_indices=list(range(len(ids))))
    return jax.jit(forward)(loaded.params, batch, state.cache)[0]


@pytest.mark.parametrize("variant", VARIANTS)
def test_forward_of_prompt_beyond_the_window_equals_transformers(load, paged, variant):
    model, loaded = load(variant)
    assert_close(all_logits(model, loaded, paged), model.logits)


@pytest.mark.parametrize("variant", VARIANTS)
def test_forward_in_chunks_then_decode_steps_equals_transformers(load, paged, variant):
    model, loaded = load(variant)
    ids, step = model.token_ids, jax.jit(loaded.forward)
    state = paged(loaded.config, max_len=len(ids))
    cache, rows, start = state.cache, [], 0
    for end in (5, 14, 20):
        batch = state.ragged([ids[start:end]], [start], logits_indices=list(range(end - start)))
        logits, cache = step(loaded.params, batch, cache)
        rows.append(logits)
        start = end
    for position in range(start, len(ids)):
        logits, cache = step(loaded.params, state.decode([ids[position]], position), cache)
        rows.append(logits)
    assert_close(jnp.concatenate(rows), model.logits)


@pytest.mark.parametrize("variant", WINDOWED)
def test_forward_without_its_window_differs_from_the_first_token_beyond_it(load, paged, variant):
    model, loaded = load(variant)
    error = np.abs(
        all_logits(model, loaded, paged, dataclasses.replace(loaded.config, sliding_window=64)) - model.logits
    )
    assert error[:WINDOW].max() < 1e-4
    assert error[WINDOW:].max(axis=1).min() > 1e-3


@pytest.mark.parametrize(
    ("variant", "windows"),
    [
        ("mistral", (8, 8, 8)),
        ("qwen2", (None, None, None)),
        ("qwen2_window", (None, 8, 8)),
        ("qwen3", (None, None, None)),
        ("gemma3", (8, 8, None, 8, 8)),
    ],
)
def test_layer_windows_of_loaded_config(load, variant, windows):
    assert load(variant)[1].config.layer_windows == windows


def test_layer_windows_of_gemma3_270m_are_five_local_to_one_full():
    config = Gemma3Config(**{**SIZES, "num_layers": 18})
    assert [i for i, window in enumerate(config.layer_windows) if window is None] == [5, 11, 17]
    assert set(config.layer_windows) == {512, None}


@pytest.mark.parametrize("variant", VARIANTS)
def test_load_config_as_transformers_5_saves_it_equals_the_published_form(load, variant, tmp_path):
    model, loaded = load(variant)
    model.save(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(model.saved_config_json))
    assert load_model(tmp_path).config == loaded.config


@pytest.mark.parametrize("variant", ["qwen3", "gemma3"])
def test_forward_in_bfloat16_stays_near_float32(load, paged, variant):
    model, loaded = load(variant)
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), loaded.params)
    error = np.abs(np.asarray(all_logits(model, dataclasses.replace(loaded, params=params), paged)) - model.logits)
    assert 1e-4 < error.max() < 0.25


def test_gemma3_norm_in_bfloat16_multiplies_in_float32():
    """1 + weight is no bfloat16 number here: rounding it first would be off by more than one rounding of the result."""
    x = jax.random.normal(jax.random.key(0), (8, 64), jnp.bfloat16)
    weight = jnp.full(64, 0.00390625 * 1.5, jnp.bfloat16)
    norm = gemma3.Norm(64, 1e-6, jnp.bfloat16)
    norm.weight.set_value(weight)
    x64 = np.asarray(x, np.float64)
    expected = x64 / np.sqrt((x64**2).mean(axis=1, keepdims=True) + 1e-6) * (1 + np.asarray(weight, np.float64))
    chex.assert_trees_all_equal(np.asarray(norm(x)), expected.astype(np.float32).astype(jnp.bfloat16))


def test_gemma3_embedding_scale_is_rounded_to_the_compute_dtype():
    config = Gemma3Config(**{**SIZES, "hidden_size": 640})
    model = gemma3.Gemma3(config, nnx.Rngs(0), jnp.bfloat16)
    model.embedding.set_value(jnp.ones((40, 640), jnp.bfloat16))
    assert float(model.embed(jnp.zeros(1, jnp.int32))[0, 0]) == 25.25  # sqrt(640) = 25.298


def dense_greedy(loaded, paged, prompt, num_tokens):
    """Greedy continuation, the whole sequence computed anew for every token."""
    step = jax.jit(loaded.forward)
    ids = list(prompt)
    length = len(prompt) + num_tokens
    for _ in range(num_tokens):
        state = paged(loaded.config, max_len=length)
        padded = ids + [0] * (length - len(ids))
        batch = state.ragged([padded], [0], logits_indices=[len(ids) - 1])
        ids.append(int(step(loaded.params, batch, state.cache)[0].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("variant", ["mistral", "gemma3"])
def test_engine_on_prompts_shorter_and_longer_than_the_window_equals_dense(load, paged, variant):
    model, loaded = load(variant)
    prompts = [model.token_ids[:3], model.token_ids]
    llm = LLM.from_pretrained(loaded.path, max_num_seqs=2, block_size=4, max_num_batched_tokens=6, decode_steps=3)
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == [dense_greedy(loaded, paged, p, 5) for p in prompts]


SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
}
FORWARDS = [
    pytest.param(gemma3.Gemma3Forward, Gemma3Config(**SIZES), id="gemma3"),
    pytest.param(qwen3.Qwen3Forward, Qwen3Config(**SIZES, qkv_bias=True, qk_norm=False), id="qwen2"),
    pytest.param(qwen3.Qwen3Forward, Qwen3Config(**SIZES), id="qwen3"),
]


@pytest.mark.parametrize(("forward", "config"), FORWARDS)
def test_abstract_params_have_the_shapes_of_init_params(forward, config):
    params = forward.init_params(config, nnx.Rngs(0))
    chex.assert_trees_all_equal_shapes_and_dtypes(forward.abstract_params(config), params)


@pytest.mark.parametrize(("forward", "config"), FORWARDS)
def test_forward_is_differentiable_in_its_params(forward, config, paged):
    params, state = forward.init_params(config, nnx.Rngs(0)), paged(config)
    batch = dataclasses.replace(state.ragged([[3, 1, 4, 1, 5]], [0]), implementation="reference")
    grads = jax.jit(jax.grad(lambda p: forward(config)(p, batch, state.cache)[0].sum()))(params)
    chex.assert_trees_all_equal_shapes_and_dtypes(grads, params)
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
        assert np.any(np.asarray(leaf) != 0), path


def test_forwards_of_equal_and_different_configs_and_families():
    config = Qwen3Config(**SIZES)
    assert qwen3.Qwen3Forward(config) == qwen3.Qwen3Forward(dataclasses.replace(config))
    assert hash(qwen3.Qwen3Forward(config)) == hash(qwen3.Qwen3Forward(dataclasses.replace(config)))
    assert qwen3.Qwen3Forward(config) != qwen3.Qwen3Forward(dataclasses.replace(config, sliding_window=4))
    assert gemma3.Gemma3Forward(config) != qwen3.Qwen3Forward(config)


@pytest.mark.parametrize(
    ("config_type", "change", "match"),
    [
        (Gemma3Config, {"sliding_window": None}, "sliding_window must be a whole number > 0"),
        (Gemma3Config, {"full_layer_interval": 0}, "full_layer_interval must be a whole number > 0"),
        (Gemma3Config, {"rope_factor": 0.0}, "rope_factor must be a finite number > 0"),
        (Gemma3Config, {"rope_local_theta": float("inf")}, "rope_local_theta must be a finite number > 0"),
        (Gemma3Config, {"query_pre_attn_scalar": -1}, "query_pre_attn_scalar must be a finite number > 0"),
        (Gemma3Config, {"head_dim": 7}, "Gemma3Config: head_dim must be even"),
        (Qwen3Config, {"sliding_window": -4}, "sliding_window must be a whole number > 0"),
        (Qwen3Config, {"num_full_layers": -1}, "num_full_layers must be a whole number >= 0"),
        (Qwen3Config, {"qk_norm": 1}, "Qwen3Config: qk_norm must be True or False"),
    ],
)
def test_config_with_bad_field_names_it(config_type, change, match):
    with pytest.raises(ValueError, match=match):
        config_type(**{**SIZES, **change})
