"""The Llama modules against values recorded from transformers (tests/data/record_llama.py), and their contracts."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models import llama
from models.layers import RMSNorm, rope_angles, rotate, structure
from models.llama import LlamaConfig, LlamaForward, RopeScaling
from paged_jax.kv_cache import storage_dtype

VARIANTS = ["plain", "biased", "tied", "scaled_rope"]


def assert_close(actual, expected, tolerance=1e-5):
    chex.assert_shape(actual, np.shape(expected))
    chex.assert_trees_all_close(np.asarray(actual), np.asarray(expected), rtol=tolerance, atol=tolerance)


@pytest.fixture
def biased(tiny):
    model = tiny("biased")
    modules = nnx.merge(structure(llama.Llama, model.config)[0], model.params())
    return model, modules


def test_norm_on_recorded_input_equals_transformers(biased):
    model, modules = biased
    assert_close(modules.layers[0].attention_norm(jnp.asarray(model.expected["norm.in"])), model.expected["norm"])


def test_norm_in_bfloat16_divides_in_float32():
    x = jax.random.normal(jax.random.key(0), (8, 64), jnp.bfloat16)
    x64 = np.asarray(x, np.float64)
    expected = x64 / np.sqrt((x64**2).mean(axis=1, keepdims=True) + 1e-5)
    actual = RMSNorm(64, 1e-5, jnp.bfloat16)(x)
    chex.assert_trees_all_equal(np.asarray(actual), expected.astype(np.float32).astype(jnp.bfloat16))


@pytest.mark.parametrize("variant", ["plain", "scaled_rope"])
def test_rotate_at_spread_positions_equals_transformers(tiny, variant):
    model = tiny(variant)
    heads = jnp.asarray(model.expected["rotate.in"].reshape(10, 4, 8))
    angles = rope_angles(llama.rope_frequencies(model.config), jnp.arange(10, dtype=jnp.int32) * 5)
    assert_close(rotate(heads, angles).reshape(10, 32), model.expected["rotate"])


def test_rope_frequencies_with_scaling_keep_blend_and_slow(tiny):
    plain, scaled = (llama.rope_frequencies(tiny(v).config) for v in ("plain", "scaled_rope"))
    ratio = scaled / plain
    assert_close(ratio[[0, 2, 3]], [1.0, 1 / 8, 1 / 8])
    assert 1 / 8 < ratio[1] < 1


def test_mlp_with_biases_equals_transformers(biased):
    model, modules = biased
    assert_close(modules.layers[0].mlp(jnp.asarray(model.expected["mlp.in"])), model.expected["mlp"])


def test_attention_through_paged_cache_equals_transformers(biased, paged):
    model, modules = biased
    state = paged(model.config)
    batch = state.ragged([model.token_ids], [0])
    angles = modules.angles(batch.positions)
    x = jnp.asarray(model.expected["attention.in"])
    out, _ = modules.layers[0].attention(x, angles, batch, state.cache.layer(0))
    assert_close(out, model.expected["attention"])


def test_each_layer_on_the_one_before_equals_transformers(biased, paged):
    model, modules = biased
    state = paged(model.config)
    batch = state.ragged([model.token_ids], [0])
    angles = modules.angles(batch.positions)
    x = modules.embedding[...][batch.token_ids]
    for index in range(2):
        x, _ = modules.layers[index](x, angles, batch, state.cache.layer(index))
        assert_close(x, model.expected[f"layer{index}"])


@pytest.mark.parametrize("variant", VARIANTS)
def test_forward_of_whole_prompt_equals_transformers(tiny, paged, variant):
    model = tiny(variant)
    state = paged(model.config)
    batch = state.ragged([model.token_ids], [0], logits_indices=list(range(10)))
    logits, _ = model.forward(model.params(), batch, state.cache)
    assert_close(logits, model.expected["logits"])


def test_forward_jitted_on_chunks_then_decode_steps_equals_transformers(tiny, paged):
    model = tiny("biased")
    step = jax.jit(model.forward)
    state, params, ids = paged(model.config), model.params(), model.token_ids
    _, cache = step(params, state.ragged([ids[:3]], [0]), state.cache)
    logits, cache = step(params, state.ragged([ids[3:6]], [3]), cache)
    rows = [logits]
    for position in range(6, 10):
        logits, cache = step(params, state.decode([ids[position]], position), cache)
        rows.append(logits)
    assert_close(jnp.concatenate(rows), model.expected["logits"][5:])


def test_forward_of_rows_side_by_side_equals_each_alone(tiny, paged):
    model = tiny("plain")
    params, ids = model.params(), model.token_ids
    both = paged(model.config, num_rows=2)
    together, _ = model.forward(params, both.ragged([ids[:7], ids], [0, 0]), both.cache)
    assert_close(together, model.expected["logits"][[6, 9]])


def test_forward_returns_float32_logits_in_order_of_logits_indices(tiny, paged):
    model = tiny("plain")
    state = paged(model.config)
    batch = state.ragged([model.token_ids], [0], logits_indices=[8, 2, 2])
    logits, _ = model.forward(model.params(), batch, state.cache)
    chex.assert_type(logits, jnp.float32)
    assert_close(logits, model.expected["logits"][[8, 2, 2]])


@pytest.mark.parametrize("variant", ["plain", "tied"])
def test_forward_in_bfloat16_stays_near_float32(tiny, paged, variant):
    model = tiny(variant)
    state = paged(model.config, dtype=jnp.bfloat16)
    batch = state.ragged([model.token_ids], [0], logits_indices=list(range(10)))
    logits, cache = model.forward(model.params(jnp.bfloat16), batch, state.cache)
    chex.assert_type([logits, cache.k[0]], [jnp.float32, storage_dtype("bfloat16")])
    error = np.abs(np.asarray(logits) - model.expected["logits"])
    assert error.max() < 0.15
    assert error.max() > 1e-4, "nothing was rounded to bfloat16"


def test_forward_of_equal_configs_is_one_static_argument(tiny, paged):
    model = tiny("plain")
    state, params = paged(model.config), model.params()
    batch = state.ragged([model.token_ids], [0])
    traced = []

    def traced_step(forward, *rest):
        traced.append(forward)
        return forward(*rest)

    jitted = jax.jit(traced_step, static_argnums=0)
    for config in (model.config, dataclasses.replace(model.config)):
        jitted.trace(LlamaForward(config), params, batch, state.cache)
    assert len(traced) == 1


def test_forward_of_different_configs_differ():
    config = LlamaConfig(**SIZES)
    assert LlamaForward(config) != LlamaForward(dataclasses.replace(config, rope_theta=500.0))


def test_forward_is_differentiable_in_its_params(tiny, paged):
    model = tiny("tied")
    state, params = paged(model.config), model.params()
    batch = state.ragged([model.token_ids], [0])
    batch = dataclasses.replace(batch, implementation="reference")  # loops of a traced length have no gradient
    grads = jax.jit(jax.grad(lambda p: model.forward(p, batch, state.cache)[0].sum()))(params)
    chex.assert_trees_all_equal_shapes_and_dtypes(grads, params)
    assert all(np.any(np.asarray(leaf) != 0) for leaf in jax.tree.leaves(grads))


SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
}


def test_init_params_with_one_seed_repeats_and_with_another_differs():
    config = LlamaConfig(**SIZES)
    first, again, other = (llama.init_params(config, nnx.Rngs(seed)) for seed in (0, 0, 1))
    chex.assert_trees_all_equal(first, again)
    assert np.any(np.asarray(first["embedding"]) != np.asarray(other["embedding"]))


def test_init_params_are_plain_arrays_of_the_dtype():
    params = llama.init_params(LlamaConfig(**SIZES), nnx.Rngs(0), jnp.bfloat16)
    assert {(type(leaf).__name__, leaf.dtype.name) for leaf in jax.tree.leaves(params)} == {("ArrayImpl", "bfloat16")}


def test_abstract_params_have_the_shapes_of_init_params():
    config = LlamaConfig(**SIZES, attention_bias=True)
    chex.assert_trees_all_equal_shapes_and_dtypes(llama.abstract_params(config), llama.init_params(config, nnx.Rngs(0)))


def test_params_of_tied_model_hold_the_embedding_once():
    params = llama.init_params(LlamaConfig(**SIZES, tie_word_embeddings=True), nnx.Rngs(0))
    assert "head" not in params


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"num_layers": 0}, "num_layers must be a whole number > 0"),
        ({"hidden_size": 32.0}, "hidden_size must be a whole number"),
        ({"vocab_size": True}, "vocab_size must be a whole number"),
        ({"vocab_size": 2**31}, "vocab_size must be .* below 2\\*\\*31"),
        ({"num_kv_heads": 3}, "multiple of num_kv_heads = 3"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a finite number"),
        ({"rope_theta": "10000"}, "rope_theta must be a finite number"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be True or False"),
        ({"eos_token_ids": [2]}, "eos_token_ids must be a tuple"),
        ({"eos_token_ids": (2, 40)}, "must lie in 0 ... 39, got 40"),
        ({"bos_token_id": -1}, "got -1"),
        ({"sliding_window": 0}, "sliding_window must be a whole number > 0"),
        ({"sliding_window": 4096.0}, "sliding_window must be a whole number > 0"),
    ],
)
def test_config_with_bad_field_names_it(change, match):
    with pytest.raises(ValueError, match=match):
        LlamaConfig(**{**SIZES, **change})


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"factor": 0.5}, "factor must be >= 1"),
        ({"low_freq_factor": 4.0}, "must exceed low_freq_factor"),
        ({"original_max_position": 64.5}, "original_max_position must be a whole number"),
    ],
)
def test_rope_scaling_with_bad_field_names_it(change, match):
    good = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position": 64}
    with pytest.raises(ValueError, match=match):
        RopeScaling(**{**good, **change})
