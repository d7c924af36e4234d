"""Attention over the paged KV cache: `paged_attention` for any caller, `attend` for the models."""

import math
from numbers import Real

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Integer, Shaped

from paged_jax._typing import typed
from paged_jax.batch import StepBatch
from paged_jax.config import CACHE_DTYPES, SCALED_CACHE_DTYPES
from paged_jax.dispatch import dispatch, require_mosaic
from paged_jax.kv_cache import LayerCache, storage_format, write_kv
from pallas_kernels.reference import paged_attention_reference
from pallas_kernels.xla import paged_attention_xla

_QUERY_DTYPES = ("float32", "bfloat16", "float16")


@typed
def attend(
    layer_cache: LayerCache,
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"] | None,
    v: Float[Array, "T K H"] | None,
    batch: StepBatch,
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    implementation: str | None = None,
) -> tuple[Array, LayerCache]:
    """Stores this step's K and V of one layer, then attends: the one call that a model's attention layer makes.

    Args:
        layer_cache: the layer's K/V, e.g. `cache.layer(i)`; its group selects block table and slots in the batch.
        q: [T, N, H] queries, after rotary embedding. float32, bfloat16 or float16.
        k, v: [T, K, H] this step's keys (after rotary embedding) and values; rows of padding tokens land in the null
            block. Both None: the layer shares the K/V that another layer has already written, nothing is stored.
        batch: the step's StepBatch.
        scale, sliding_window, logits_soft_cap, sinks: as for `paged_attention`.
        implementation: as for `paged_attention`. None: batch.implementation, and if that is None too, by device.

    Returns:
        out: [T, N, H] in q's dtype; zeros for padding tokens of a ragged batch and for rows of length 0.
        layer_cache: with k and v stored.

    Raises:
        ValueError: an argument does not fit; the message says which, and what to do.
        NotImplementedError: the implementation asked for cannot run here.
    """
    kept = layer_cache.sliding_window
    if kept is not None and (sliding_window is None or sliding_window > kept):
        raise ValueError(
            f"the layer attends with sliding_window={sliding_window}, but cache group {layer_cache.group} keeps only a "
            f"window of {kept} tokens: make CacheConfig.sliding_windows agree with the model"
        )
    if (k is None) != (v is None):
        given, missing = ("v", "k") if k is None else ("k", "v")
        raise ValueError(f"{given} is given but {missing} is None: pass both, or None for both to share K/V")
    if k is not None and v is not None:
        if k.shape != v.shape or k.shape[0] != q.shape[0]:
            raise ValueError(f"k is {k.shape} and v is {v.shape}: both must be [T, K, H] with T = {q.shape[0]} as in q")
        layer_cache = write_kv(layer_cache, k, v, batch.slot_mapping[layer_cache.group])
    block_size = layer_cache.k.shape[1]
    if batch.block_size not in (None, block_size):
        raise ValueError(
            f"the batch's block tables name blocks of {batch.block_size} tokens, the layer's have {block_size}: build "
            "the batch with kernel_block_size=cache.kernel_block_size"
        )
    out = paged_attention(
        q,
        layer_cache.k,
        layer_cache.v,
        block_tables=batch.block_tables[layer_cache.group],
        seq_lens=batch.seq_lens,
        query_start_loc=batch.query_start_loc,
        scale=scale,
        sliding_window=sliding_window,
        logits_soft_cap=logits_soft_cap,
        sinks=sinks,
        k_scale=layer_cache.k_scale,
        v_scale=layer_cache.v_scale,
        kv_cache_dtype=layer_cache.dtype,
        implementation=implementation or batch.implementation,
    )
    # A layer of another group may write to the same arrays: XLA copies them unless it sees that it comes later.
    return jax.lax.optimization_barrier((out, layer_cache))  # pyright: ignore[reportReturnType]


@typed
def paged_attention(
    query: Float[Array, "T N H"],
    key_cache: Shaped[Array, "B block K H"],
    value_cache: Shaped[Array, "B block K H"],
    *,
    block_tables: Integer[Array, "S M"],
    seq_lens: Integer[Array, " S"],
    query_start_loc: Integer[Array, " S1"] | None = None,
    scale: float | None = None,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    k_scale: Float32[Array, "B K block"] | None = None,
    v_scale: Float32[Array, "B K block"] | None = None,
    kv_cache_dtype: str | None = None,
    return_residual: bool = False,
    implementation: str | None = None,
    interpret: bool = False,
) -> Array | tuple[Array, Array]:
    """Causal attention of queries over keys and values that live in blocks of a pool.

    Row s holds seq_lens[s] tokens; token p of it is in block block_tables[s, p // block_size] at offset
    p % block_size. Query heads n * K // N share kv head n * K // N (grouped-query attention). The queries' own keys and
    values must have been written before the call. Everything is computed in float32.

    Args:
        query: [T, N, H] float32, bfloat16 or float16.
        key_cache, value_cache: [num_blocks, block_size, K, H], N a multiple of K. float32, bfloat16, float16; uint16
            for the bits of bfloat16 values; int8, float8_e4m3fn or float8_e5m2 with k_scale and v_scale; uint8 for the
            bits of either float8.
        block_tables: integer [S, M] physical block ids. Entries past a row's last block, and those wholly before its
            window, are never looked at: any value will do.
        seq_lens: integer [S] tokens of each row, the queries' tokens included, at most M * block_size. 0: the row is
            inactive, its output is exactly zero.
        query_start_loc: integer [S + 1], non-decreasing: tokens query_start_loc[s] ... query_start_loc[s + 1] - 1 of
            query are the last ones of row s. Tokens from query_start_loc[S] on are padding, their output is exactly
            zero. None: decode, T must equal S and query s is the last token of row s.
        scale: factor on the scores; None: 1 / sqrt(H). (JAX's own `paged_attention` for GPUs applies no scale at all:
            pass scale=1.0 to get its numbers.)
        sliding_window: W > 0: the token at position p sees positions p - W + 1 ... p. None: all up to p.
        logits_soft_cap: c > 0: scaled scores s become c * tanh(s / c). None: off.
        sinks: float [N], a learned logit per query head that enters the softmax denominator once and has no value.
        k_scale, v_scale: float32 [num_blocks, K, block_size]: the value of a slot is its stored number times the scale.
            Required for int8 and float8 pools, refused for the others. Scales of slots that the queries see must be
            finite and > 0. Outside jit others are refused; inside jit nobody looks: NaN makes every output NaN that
            sees its slot, any other scale is the factor that it is.
        kv_cache_dtype: what the pools hold, "float8_e4m3fn" or "float8_e5m2"; required if they are uint8. For other
            pools it may be left out, and must agree with their dtype.
        return_residual: also return lse.
        implementation: "mosaic_gpu" (the Pallas kernels, NVIDIA GPUs from sm_80 on), "xla" (any device) or "reference"
            (slow, the oracle). None: by device: on a GPU "mosaic_gpu", and "xla" with a warning where the kernels
            cannot do what is asked; else "xla".
        interpret: run the Mosaic kernels in the interpreter; only valid with implementation="mosaic_gpu".

    Returns:
        out: [T, N, H] in query's dtype.
        lse: only with return_residual: float32 [T, N], the natural logarithm of the softmax denominator, sink included.
            Where a token sees nothing (length 0, padding) it is -inf, or the sink if there are sinks.

    Raises:
        ValueError: an argument does not fit; the message says which, and what to do.
        NotImplementedError: implementation="mosaic_gpu" cannot do this: the message says why.
    """
    if interpret and implementation != "mosaic_gpu":
        raise ValueError(
            f"interpret=True has no meaning for implementation={implementation!r}: only 'mosaic_gpu' has one, "
            "so pass interpret=False"
        )
    _check_heads(query, key_cache, value_cache)
    _check_rows(query, block_tables, seq_lens, query_start_loc)
    _check_options(scale, sliding_window, logits_soft_cap)
    cache_dtype = _check_format(key_cache, kv_cache_dtype)
    _check_scale("key_cache", key_cache, cache_dtype, "k_scale", k_scale)
    _check_scale("value_cache", value_cache, cache_dtype, "v_scale", v_scale)
    for name, scales in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scales is not None:
            _check_live_scales(name, scales, block_tables, seq_lens, query_start_loc, sliding_window)
    arguments = {
        "block_tables": block_tables.astype(jnp.int32),
        "seq_lens": seq_lens.astype(jnp.int32),
        "query_start_loc": None if query_start_loc is None else query_start_loc.astype(jnp.int32),
        "scale": None if scale is None else float(scale),
        "sliding_window": sliding_window,
        "logits_soft_cap": None if logits_soft_cap is None else float(logits_soft_cap),
        "sinks": sinks,
        "k_scale": k_scale,
        "v_scale": v_scale,
    }
    pools = query, key_cache, value_cache
    candidates = {
        "xla": lambda: paged_attention_xla(*pools, cache_dtype=cache_dtype, **arguments),
        "reference": lambda: paged_attention_reference(*pools, cache_dtype=cache_dtype, **arguments),
        "mosaic_gpu": lambda: _mosaic_gpu(*pools, interpret=interpret, **arguments),
    }
    out, lse = dispatch(implementation, candidates)
    return (out, lse) if return_residual else out


def _mosaic_gpu(*args, **kwargs) -> tuple[Array, Array]:
    require_mosaic()
    from pallas_kernels.mosaic_gpu import paged_attention_mosaic_gpu

    return paged_attention_mosaic_gpu(*args, **kwargs)


def _check_heads(query: Array, key_cache: Array, value_cache: Array) -> None:
    num_heads, num_kv_heads = query.shape[1], key_cache.shape[2]
    if query.dtype.name not in _QUERY_DTYPES:
        raise ValueError(f"query has dtype {query.dtype}; supported are {', '.join(_QUERY_DTYPES)}: convert it")
    if key_cache.dtype != value_cache.dtype:
        raise ValueError(
            f"key_cache has dtype {key_cache.dtype} and value_cache {value_cache.dtype}: both must have the same"
        )
    if num_heads == 0 or num_kv_heads == 0 or num_heads % num_kv_heads:
        raise ValueError(
            f"query has N = {num_heads} heads, key_cache has K = {num_kv_heads}: N must be a positive multiple of K, "
            "because every kv head serves N / K query heads"
        )


def _check_rows(query: Array, block_tables: Array, seq_lens: Array, query_start_loc: Array | None) -> None:
    num_tokens, num_seqs = query.shape[0], seq_lens.shape[0]
    if num_tokens == 0 or block_tables.shape[1] == 0:
        raise ValueError(
            f"query has {num_tokens} tokens and block_tables {block_tables.shape[1]} columns: pass at least one of each"
        )
    if query_start_loc is None and num_tokens != num_seqs:
        raise ValueError(
            f"query has T = {num_tokens} tokens for S = {num_seqs} rows: without query_start_loc T must equal S; "
            "pass query_start_loc for several queries per row"
        )
    if query_start_loc is not None and query_start_loc.shape[0] != num_seqs + 1:
        raise ValueError(
            f"query_start_loc has {query_start_loc.shape[0]} entries for S = {num_seqs} rows: it must have S + 1"
        )


def _check_options(scale: float | None, sliding_window: int | None, logits_soft_cap: float | None) -> None:
    if scale is not None and not (isinstance(scale, Real) and math.isfinite(scale)):
        raise ValueError(f"scale is {scale!r}: it must be a finite Python number, or None for 1 / sqrt(head_dim)")
    if sliding_window is not None and (type(sliding_window) is not int or sliding_window <= 0):
        raise ValueError(f"sliding_window is {sliding_window!r}: it must be a Python int > 0, or None for no window")
    if logits_soft_cap is not None and not (isinstance(logits_soft_cap, Real) and 0 < logits_soft_cap < math.inf):
        raise ValueError(f"logits_soft_cap is {logits_soft_cap!r}: it must be a finite number > 0, or None for no cap")


def _check_format(key_cache: Array, kv_cache_dtype: str | None) -> str:
    """The storage format of the pools, one of CACHE_DTYPES."""
    if kv_cache_dtype is None and key_cache.dtype == jnp.uint8:
        raise ValueError(
            "key_cache has dtype uint8, the bits of float8_e4m3fn or float8_e5m2: pass kv_cache_dtype to say of which"
        )
    if kv_cache_dtype not in (None, *CACHE_DTYPES):
        raise ValueError(f"kv_cache_dtype is {kv_cache_dtype!r}; choose one of {', '.join(CACHE_DTYPES)}, or None")
    cache_dtype = storage_format(key_cache.dtype, kv_cache_dtype)
    if cache_dtype not in CACHE_DTYPES:
        supported = ", ".join((*CACHE_DTYPES, "uint16", "uint8"))
        raise ValueError(f"key_cache and value_cache have dtype {key_cache.dtype}; supported are {supported}")
    return cache_dtype


def _check_scale(pool_name: str, pool: Array, cache_dtype: str, scale_name: str, scale: Array | None) -> None:
    is_scaled = cache_dtype in SCALED_CACHE_DTYPES
    if is_scaled and scale is None:
        num_blocks, block_size, num_kv_heads, _ = pool.shape
        raise ValueError(
            f"{pool_name} has dtype {pool.dtype} but {scale_name} is None: pass float32 "
            f"[{num_blocks}, {num_kv_heads}, {block_size}] (num_blocks, K, block_size), ones if the values are unscaled"
        )
    if not is_scaled and scale is not None:
        raise ValueError(f"{pool_name} has dtype {pool.dtype}, which has no scales: {scale_name} must be None")


def _check_live_scales(
    name: str,
    scale: Array,
    block_tables: Array,
    seq_lens: Array,
    query_start_loc: Array | None,
    sliding_window: int | None,
) -> None:
    """Raises ValueError if the scale of a slot that queries see is not finite and > 0; traced arrays pass."""
    try:
        tables, lens = np.asarray(block_tables), np.asarray(seq_lens)
        counts = np.minimum(lens, 1) if query_start_loc is None else np.diff(np.asarray(query_start_loc))
        scale_values = np.asarray(scale)
    except jax.errors.TracerArrayConversionError:
        return
    first = np.zeros_like(lens) if sliding_window is None else np.maximum(lens - counts - sliding_window + 1, 0)
    position = np.arange(tables.shape[1] * scale.shape[2]).reshape(1, tables.shape[1], 1, scale.shape[2])
    low, high = (x.reshape(-1, 1, 1, 1) for x in (first, np.where(counts > 0, lens, 0)))
    values = scale_values[np.clip(tables, 0, len(scale_values) - 1)]  # [S, M, K, block_size]; dead entries: any value
    bad = (position >= low) & (position < high) & ~((values > 0) & np.isfinite(values))
    if bad.any():
        row, column, head, offset = np.argwhere(bad)[0]
        raise ValueError(
            f"{name} is {values[row, column, head, offset]} for kv head {head} of token "
            f"{column * scale.shape[2] + offset} of row {row}: scales must be finite and > 0; look for NaN or inf in "
            "the values that were stored there"
        )
