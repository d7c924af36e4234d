"""Paged attention by the Mosaic GPU kernels: decode rows and prefill rows of one batch into one output."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.paged_decode import paged_decode
from pallas_kernels.paged_prefill import paged_prefill

_STATIC = ("scale", "sliding_window", "logits_soft_cap", "decode_config", "prefill_config", "interpret")


def _as_bfloat16(pool: jax.Array) -> jax.Array:
    """uint16 means the bits of bfloat16."""
    return lax.bitcast_convert_type(pool, jnp.bfloat16) if pool.dtype == jnp.uint16 else pool


@functools.partial(jax.jit, static_argnames=_STATIC)
def paged_attention_mosaic_gpu(
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
    decode_config=None,
    prefill_config=None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Attention of every token over the cached keys and values of its row, causal.

    Two launches for decode; with query_start_loc one more, which takes the rows with several queries.
    Arguments as for `paged_jax.attention.paged_attention`, which validates them.

    Args:
        decode_config, prefill_config: `paged_decode.Config` and `paged_prefill.Config`; None: by shape and chip.
        interpret: run in Mosaic's interpreter on a CPU, with race detection.

    Returns:
        out: [T, N, H] in query's dtype; zeros where a token sees nothing.
        lse: float32[T, N], natural logarithm of the softmax denominator, the sink included.

    Raises:
        NotImplementedError: no kernel for this shape, dtype or chip.
    """
    arguments = {
        "block_tables": block_tables,
        "seq_lens": seq_lens,
        "scale": scale,
        "sliding_window": sliding_window,
        "logits_soft_cap": logits_soft_cap,
        "sinks": sinks,
        "k_scale": k_scale,
        "v_scale": v_scale,
        "interpret": interpret,
    }
    pools = _as_bfloat16(key_cache), _as_bfloat16(value_cache)
    out = jax.new_ref(lax.empty(query.shape, query.dtype))
    if query_start_loc is None:
        lse = paged_decode(query, *pools, out=out, config=decode_config, **arguments)
        return jax.freeze(out), lse
    arguments |= {"query_start_loc": query_start_loc, "out": out}
    lse = paged_prefill(query, *pools, config=prefill_config, **arguments)
    decode_lse = paged_decode(query, *pools, config=decode_config, **arguments)
    is_decode = query_start_loc[1:] - query_start_loc[:-1] == 1
    token = jnp.where(is_decode, query_start_loc[:-1], query.shape[0])
    lse = lse.at[token].set(decode_lse, mode="drop")
    if sinks is not None:  # padding sees the sink alone
        lse = jnp.where(jnp.arange(query.shape[0])[:, None] < query_start_loc[-1], lse, sinks.astype(jnp.float32)[None])
    return jax.freeze(out), lse
