"""The oracle: paged attention in plain jax.numpy and float32, written to be read, not to be fast.

Every token gathers the whole block table of its row and takes one dense masked softmax over it. All other
implementations are compared with this one; this one is compared with a float64 NumPy formula in the tests.
"""

import functools
import math

import jax
import jax.numpy as jnp

# Score of an invisible slot. Finite, because -inf - (-inf) is NaN when a whole row is invisible; far below every
# score that float32 inputs of sane size can produce (a sentinel such as -5e4 would lie above valid scores of -524288),
# and with room to subtract a maximum without overflowing to -inf.
MASK_VALUE = -0.7 * float(jnp.finfo(jnp.float32).max)


def _to_float32(values: jax.Array, dtype: str, scale: jax.Array | None) -> jax.Array:
    """Dequantises gathered slots [..., block_size, K, H] of storage format `dtype`; scale is [..., K, block_size]."""
    if values.dtype != dtype:  # the bits of such numbers, as integers
        values = jax.lax.bitcast_convert_type(values, dtype)
    values = values.astype(jnp.float32)
    return values if scale is None else values * jnp.swapaxes(scale, -1, -2)[..., None]


def _row_and_position(
    num_tokens: int, seq_lens: jax.Array, query_start_loc: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """The row and the position of every token, both int32[T]; position -1 (sees nothing) for padding tokens."""
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    if query_start_loc is None:
        return token, seq_lens - 1
    row = jnp.searchsorted(query_start_loc, token, side="right").astype(jnp.int32) - 1
    inside = (row >= 0) & (row < seq_lens.shape[0])
    row = jnp.clip(row, 0, seq_lens.shape[0] - 1)
    position = seq_lens[row] - (query_start_loc[row + 1] - token)
    return row, jnp.where(inside, position, -1)


@functools.partial(jax.jit, static_argnames=("scale", "sliding_window", "logits_soft_cap", "cache_dtype"))
def paged_attention_reference(
    query: jax.Array,
    key_cache: jax.Array,
    value_cache: jax.Array,
    *,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_start_loc: jax.Array | None = None,
    scale: float | None = None,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    cache_dtype: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention of every token over the cached keys and values of its row, causal, by the dense formula.

    Arguments as for `paged_jax.attention.paged_attention`, which validates them; nothing is validated here.

    Args:
        cache_dtype: storage format of the pools. None: their own dtype (uint16: bfloat16).

    Returns:
        out: [T, N, H] in query's dtype; zeros where a token sees nothing.
        lse: float32[T, N], natural logarithm of the softmax denominator, the sink included.
    """
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = key_cache.shape[2]
    dtype = cache_dtype or ("bfloat16" if key_cache.dtype == jnp.uint16 else key_cache.dtype.name)
    scale = 1.0 / math.sqrt(head_dim) if scale is None else scale
    sink = jnp.full((num_heads,), -jnp.inf, jnp.float32) if sinks is None else sinks.astype(jnp.float32)

    def gather(pool: jax.Array, pool_scale: jax.Array | None, row: jax.Array) -> jax.Array:
        ids = block_tables[row]
        values = _to_float32(pool[ids], dtype, None if pool_scale is None else pool_scale[ids])
        values = values.reshape(-1, num_kv_heads, head_dim)
        return jnp.repeat(values, num_heads // num_kv_heads, axis=1)  # [slots, N, H]

    def attend_token(q: jax.Array, row: jax.Array, position: jax.Array) -> tuple[jax.Array, jax.Array]:
        k, v = gather(key_cache, k_scale, row), gather(value_cache, v_scale, row)
        slot = jnp.arange(k.shape[0], dtype=jnp.int32)
        visible = slot <= position
        if sliding_window is not None:
            visible &= slot > position - sliding_window
        # Dead slots may hold anything. 0 * NaN is NaN, so they are selected away, not multiplied by zero.
        k = jnp.where(visible[:, None, None], k, 0.0)
        v = jnp.where(visible[:, None, None], v, 0.0)
        scores = jnp.einsum("nh,snh->ns", q.astype(jnp.float32), k, precision="highest") * scale
        if logits_soft_cap is not None:
            scores = logits_soft_cap * jnp.tanh(scores / logits_soft_cap)
        scores = jnp.where(visible[None], scores, MASK_VALUE)
        highest = jnp.maximum(scores.max(axis=1), sink)
        weights = jnp.where(visible[None], jnp.exp(scores - highest[:, None]), 0.0)
        total = weights.sum(axis=1) + jnp.exp(sink - highest)
        out = jnp.einsum("ns,snh->nh", weights, v, precision="highest")
        return jnp.where(visible.any(), out / total[:, None], 0.0), highest + jnp.log(total)

    row, position = _row_and_position(num_tokens, seq_lens, query_start_loc)
    out, lse = jax.vmap(attend_token)(query, row, position)
    return out.astype(query.dtype), lse
