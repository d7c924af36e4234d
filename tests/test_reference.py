"""The oracle itself, against numbers worked out by hand."""

import math

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.reference import MASK_VALUE, paged_attention_reference


def attention(query, keys, values, **options):
    """One row whose tokens lie in one block (id 1) of a pool with K = H = 1."""
    size = len(keys)
    pools = [jnp.stack([jnp.full((size, 1, 1), jnp.nan), jnp.asarray(x).reshape(-1, 1, 1)]) for x in (keys, values)]
    out, lse = paged_attention_reference(
        jnp.asarray(query).reshape(-1, 1, 1),
        *pools,
        block_tables=jnp.asarray([[1]], jnp.int32),
        **({"seq_lens": jnp.asarray([size], jnp.int32)} | options),
    )
    return np.asarray(out).ravel(), np.asarray(lse).ravel()


def test_two_tokens_by_hand():
    # Weights e^0 and e^log(3), normalised: 1/4 and 3/4.
    out, lse = attention([1.0], [0.0, math.log(3)], [8.0, 16.0])
    np.testing.assert_allclose(out, [0.25 * 8 + 0.75 * 16], rtol=1e-6)
    np.testing.assert_allclose(lse, [math.log(4)], rtol=1e-6)


def test_default_scale_is_one_over_square_root_of_head_dim():
    pool = jnp.zeros((2, 1, 1, 4)).at[1].set(1.0)
    _, lse = paged_attention_reference(
        jnp.ones((1, 1, 4)),
        pool,
        pool,
        block_tables=jnp.asarray([[1]], jnp.int32),
        seq_lens=jnp.asarray([1], jnp.int32),
    )
    np.testing.assert_allclose(lse, [[4 / 2]])


def test_prefill_is_causal_and_padding_tokens_are_zero():
    start = jnp.asarray([0, 2], jnp.int32)
    out, lse = attention([1.0, 1.0, 1.0], [0.0, 0.0, 0.0], [3.0, 6.0, 12.0], query_start_loc=start)
    np.testing.assert_allclose(out, [4.5, 7.0, 0.0])
    np.testing.assert_allclose(lse, [math.log(2), math.log(3), -math.inf])


def test_window_keeps_the_token_itself_and_those_just_before():
    out, _ = attention([1.0], [0.0, 0.0, 0.0], [3.0, 6.0, 12.0], sliding_window=2)
    np.testing.assert_allclose(out, [9.0])


def test_soft_cap_applies_after_the_scale():
    out, lse = attention([1.0], [5.0], [2.0], scale=2.0, logits_soft_cap=4.0)
    np.testing.assert_allclose(lse, [4 * math.tanh(10 / 4)], rtol=1e-6)
    np.testing.assert_allclose(out, [2.0])


def test_sink_takes_its_share_once():
    out, lse = attention([1.0], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0], sinks=jnp.zeros(1))
    np.testing.assert_allclose(out, [3 / 4])
    np.testing.assert_allclose(lse, [math.log(4)], rtol=1e-6)


@pytest.mark.parametrize(("sinks", "lse"), [(None, -math.inf), ([2.5], 2.5)])
def test_row_of_length_zero_is_zero_and_its_lse_the_sink(sinks, lse):
    options = {} if sinks is None else {"sinks": jnp.asarray(sinks)}
    out, actual = attention([1.0], [jnp.nan], [jnp.nan], seq_lens=jnp.zeros(1, jnp.int32), **options)
    np.testing.assert_array_equal(out, [0.0])
    np.testing.assert_array_equal(actual, [lse])


def test_scores_far_below_usual_mask_values_still_count():
    assert MASK_VALUE < -1e30
    out, lse = attention([-524288.0], [1.0, 1.0], [1.0, 1.0])
    np.testing.assert_array_equal(out, [1.0])
    np.testing.assert_array_equal(lse, [-524288.0 + np.float32(math.log(2))])


def test_scales_multiply_stored_numbers():
    pools = [jnp.asarray([0, value], jnp.int8).reshape(2, 1, 1, 1) for value in (4, 3)]
    out, lse = paged_attention_reference(
        jnp.ones((1, 1, 1)),
        *pools,
        block_tables=jnp.asarray([[1]], jnp.int32),
        seq_lens=jnp.asarray([1], jnp.int32),
        k_scale=jnp.asarray([jnp.nan, 0.5]).reshape(2, 1, 1),
        v_scale=jnp.asarray([jnp.nan, 10.0]).reshape(2, 1, 1),
    )
    np.testing.assert_array_equal(lse, [[4 * 0.5]])
    np.testing.assert_array_equal(out, [[[30.0]]])


def test_uint16_is_read_as_bfloat16_bits():
    pool = jnp.asarray([0, 0x4040], jnp.uint16).reshape(2, 1, 1, 1)  # 0x4040 = 3.0
    out, lse = paged_attention_reference(
        jnp.ones((1, 1, 1)), pool, pool, block_tables=jnp.ones((1, 1), jnp.int32), seq_lens=jnp.ones(1, jnp.int32)
    )
    chex.assert_trees_all_equal((out, lse), (jnp.full((1, 1, 1), 3.0), jnp.full((1, 1), 3.0)))
