"""Paged attention in plain XLA: the path for CPUs, correct on every backend.

One inner step serves prefill and decode: gather a chunk of a row's blocks, score it, fold it into a running softmax.

* Decode maps that step over all rows and repeats it up to the longest visible range, so one executable serves all
  lengths and a wide block table costs nothing.
* Prefill walks a work list of (row, tile of queries), each tile up to its own causal limit. Rows with one query in a
  mixed batch take the decode path.

Pools are never converted or copied: every conversion happens after the gather, on one chunk. Scales of 8-bit formats
are applied to the scores and to the weights, of which there are fewer than elements of K and V.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.reference import MASK_VALUE

CHUNK_TOKENS = 64  # cached tokens per step of the running softmax
TILE_TOKENS = 64  # queries per work item of the prefill path
MAX_FOLDED_KV_HEADS = 8  # block-diagonal queries cost K times the flops: beyond this a transposed copy is safer


class _Options(NamedTuple):
    """What is static, and the number of blocks in one chunk."""

    sliding_window: int | None
    logits_soft_cap: float | None
    chunk_blocks: int
    tile_tokens: int


class _Pools(NamedTuple):
    """Pools [num_blocks, block_size, K, H], their scales [num_blocks, K, block_size] or None, their storage format."""

    k: jax.Array
    v: jax.Array
    k_scale: jax.Array | None
    v_scale: jax.Array | None
    dtype: str


class _Work(NamedTuple):
    """Queries of one row, and the range of positions that they see together.

    queries: float32, scaled: [K, N / K, Q, H] by kv head, or [N, Q, K * H] block-diagonal. Called [..., Q, E] below.
    positions: int32[Q], -1 for a query that sees nothing.
    first, last: int32[], inclusive; (0, -1) when empty.
    table: int32[M].
    """

    queries: jax.Array
    positions: jax.Array
    first: jax.Array
    last: jax.Array
    table: jax.Array


class _Softmax(NamedTuple):
    """A running softmax: highest score and denominator float32[..., Q], unnormalised output float32[..., Q, E]."""

    highest: jax.Array
    total: jax.Array
    out: jax.Array


def _load(pool: jax.Array, dtype: str, ids: jax.Array) -> jax.Array:
    """Gathers blocks and converts their numbers to float32[len(ids), block_size, K, H], scales not applied."""
    numbers = pool.at[ids].get(mode="clip")
    if numbers.dtype == dtype:
        return numbers.astype(jnp.float32)
    return _DECODE[dtype](numbers)


def _from_bfloat16(bits: jax.Array) -> jax.Array:
    """The upper half of the bits of a float32 whose lower half is zero."""
    return lax.bitcast_convert_type(bits.astype(jnp.uint32) << jnp.uint32(16), jnp.float32)


def _from_e5m2(bits: jax.Array) -> jax.Array:
    """The upper half of the bits of a float16 whose lower half is zero."""
    return lax.bitcast_convert_type(bits.astype(jnp.uint16) << jnp.uint16(8), jnp.float16).astype(jnp.float32)


def _from_e4m3fn(bits: jax.Array) -> jax.Array:
    """By float16, whose exponent has one bit more and a bias larger by 8; its subnormals serve for those of e4m3fn.

    Faster than XLA's own conversion on CPUs, which works through every case for each element. 0x7f is NaN.
    """
    extended = lax.bitcast_convert_type(bits, jnp.int8).astype(jnp.int16)  # the sign in bits 7 to 15
    half = (extended << jnp.int16(7)) & jnp.int16(~0x4000)  # the sign in bit 15, the magnitude in bits 7 to 13
    values = lax.bitcast_convert_type(half, jnp.float16).astype(jnp.float32) * 256.0
    return jnp.where((extended & jnp.int16(0x7F)) == 0x7F, jnp.nan, values)


_DECODE = {"bfloat16": _from_bfloat16, "float8_e4m3fn": _from_e4m3fn, "float8_e5m2": _from_e5m2}


def _scales(scale: jax.Array, ids: jax.Array, ndim: int, num_heads: int) -> jax.Array:
    """Scales of the slots of blocks `ids`, to be multiplied with scores of `ndim` axes: [K, 1, 1, C] or [N, 1, C]."""
    by_head = scale.at[ids].get(mode="clip").swapaxes(0, 1).reshape(scale.shape[1], -1)
    if ndim == 4:
        return by_head[:, None, None]
    return jnp.repeat(by_head, num_heads // scale.shape[1], axis=0)[:, None]  # by query head


def _precision() -> str | None:
    """Full float32 products. CPUs have no others, and there naming the precision costs 10 % (another dot is chosen)."""
    return None if jax.default_backend() == "cpu" else "highest"


def _num_chunks(first: jax.Array, last: jax.Array, block_size: int, options: _Options) -> jax.Array:
    """Chunks that cover the blocks of positions first..last, starting with the block of `first`."""
    blocks = last // block_size - first // block_size + 1  # an empty range is (0, -1): -1 - 0 + 1 = 0 blocks
    return (blocks + options.chunk_blocks - 1) // options.chunk_blocks


def _chunk_ids(work: _Work, chunk: jax.Array, block_size: int, num_blocks: int) -> tuple[jax.Array, jax.Array]:
    """Physical ids int32[num_blocks] of a chunk's blocks and positions int32[num_blocks * block_size] of its slots."""
    column = work.first // block_size + chunk * num_blocks + jnp.arange(num_blocks, dtype=jnp.int32)
    # Table entries past the live blocks may hold anything: they become the null block, which is never looked at.
    ids = jnp.where(column <= work.last // block_size, work.table.at[column].get(mode="clip"), 0)
    offset = jnp.arange(block_size, dtype=jnp.int32)
    return ids, (column[:, None] * block_size + offset[None]).reshape(-1)


def _masked_scores(
    options: _Options, scores: jax.Array, slot: jax.Array, positions: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Capped scores [..., Q, C], MASK_VALUE where a query does not see the slot; and which it sees [1, ..., Q, C]."""
    if options.logits_soft_cap is not None:
        scores = options.logits_soft_cap * jnp.tanh(scores / options.logits_soft_cap)
    visible = slot[None] <= positions[:, None]
    if options.sliding_window is not None:
        visible &= slot[None] > positions[:, None] - options.sliding_window
    visible = jnp.expand_dims(visible, range(scores.ndim - 2))
    return jnp.where(visible, scores, MASK_VALUE), visible


def _attend_chunk(options: _Options, pools: _Pools, work: _Work, state: _Softmax, chunk: jax.Array) -> _Softmax:
    """Folds one chunk of a row's cached tokens into the running softmax."""
    by_head = work.queries.ndim == 4
    ids, slot = _chunk_ids(work, chunk, pools.k.shape[1], options.chunk_blocks)
    shape = (slot.shape[0], *(pools.k.shape[2:] if by_head else work.queries.shape[-1:]))
    k = _load(pools.k, pools.dtype, ids).reshape(shape)
    v = _load(pools.v, pools.dtype, ids).reshape(shape)
    # 0 * NaN is NaN: values of dead slots are selected away, not multiplied by a weight of zero.
    live = (slot >= work.first) & (slot <= work.last)
    v = jnp.where(jnp.expand_dims(live, range(1, v.ndim)), v, 0.0)
    score, mix = ("kaqe,cke->kaqc", "kaqc,cke->kaqe") if by_head else ("aqe,ce->aqc", "aqc,ce->aqe")
    scores = jnp.einsum(score, work.queries, k, precision=_precision())
    if pools.k_scale is not None:
        scores = scores * _scales(pools.k_scale, ids, scores.ndim, scores.shape[0])
    scores, visible = _masked_scores(options, scores, slot, work.positions)
    highest = jnp.maximum(state.highest, scores.max(axis=-1))
    weights = jnp.where(visible, jnp.exp(scores - highest[..., None]), 0.0)
    shrink = jnp.exp(state.highest - highest)
    total = state.total * shrink + weights.sum(axis=-1)
    if pools.v_scale is not None:  # selected: the scale of a slot that a query does not see may be NaN
        weights = jnp.where(visible, weights * _scales(pools.v_scale, ids, weights.ndim, weights.shape[0]), 0.0)
    out = state.out * shrink[..., None] + jnp.einsum(mix, weights, v, precision=_precision())
    return _Softmax(highest, total, out)


def _start(queries: jax.Array, sink: jax.Array) -> _Softmax:
    """The softmax before the first chunk: only the sink [N], which thus counts once."""
    sink = jnp.broadcast_to(sink.reshape(*queries.shape[:-2], 1), queries.shape[:-1])
    highest = jnp.maximum(sink, MASK_VALUE)
    return _Softmax(highest, jnp.exp(sink - highest), jnp.zeros_like(queries))


def _finish(state: _Softmax, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Normalised output [..., Q, E] and lse [..., Q]; exact zeros for a query that sees nothing."""
    sees = jnp.expand_dims(positions >= 0, range(state.total.ndim - 1))
    total = jnp.where(sees, state.total, 1.0)[..., None]
    out = jnp.where(sees[..., None], state.out / total, 0.0)
    return out, state.highest + jnp.log(state.total)


def _fold(query: jax.Array, num_kv_heads: int) -> jax.Array:
    """[N, H] -> [N, 1, K * H]: block-diagonal queries, which score K/V as stored, without a transposed copy."""
    num_heads, head_dim = query.shape
    own = jnp.repeat(jnp.eye(num_kv_heads, dtype=bool), num_heads // num_kv_heads, axis=0)
    return jnp.where(own[..., None], query[:, None], 0.0).reshape(num_heads, 1, num_kv_heads * head_dim)


def _unfold(out: jax.Array, num_kv_heads: int) -> jax.Array:
    """[N, 1, K * H] -> [N, H]: of every query head the part that belongs to its own kv head."""
    num_heads = out.shape[0]
    own = jnp.repeat(jnp.eye(num_kv_heads, dtype=bool), num_heads // num_kv_heads, axis=0)
    return jnp.where(own[..., None], out.reshape(num_heads, num_kv_heads, -1), 0.0).sum(axis=1)


def _decode(
    query: jax.Array, pools: _Pools, tables: jax.Array, seq_lens: jax.Array, sink: jax.Array, options: _Options
) -> tuple[jax.Array, jax.Array]:
    """One query per row, at position seq_lens - 1: query float32[S, N, H] -> out [S, N, H], lse [S, N]."""
    num_seqs, num_heads, head_dim = query.shape
    block_size, num_kv_heads = pools.k.shape[1:3]
    fold = num_kv_heads <= MAX_FOLDED_KV_HEADS
    split = (num_kv_heads, num_heads // num_kv_heads, 1, head_dim)
    queries = jax.vmap(lambda q: _fold(q, num_kv_heads) if fold else q.reshape(split))(query)
    last = seq_lens - 1
    first = (
        jnp.zeros_like(last) if options.sliding_window is None else jnp.maximum(seq_lens - options.sliding_window, 0)
    )
    work = _Work(queries, last[:, None], first, last, tables)
    chunk_step = jax.vmap(functools.partial(_attend_chunk, options, pools), in_axes=(0, 0, None))
    state = lax.fori_loop(
        0,
        _num_chunks(first, last, block_size, options).max(initial=0),
        lambda chunk, state: chunk_step(work, state, chunk),
        jax.vmap(_start, in_axes=(0, None))(queries, sink),
    )
    out, lse = jax.vmap(_finish)(state, work.positions)
    out = jax.vmap(lambda o: _unfold(o, num_kv_heads) if fold else o)(out)
    return out.reshape(query.shape), lse.reshape(num_seqs, num_heads)


def _attend_tile(
    query: jax.Array, positions: jax.Array, pools: _Pools, table: jax.Array, sink: jax.Array, options: _Options
) -> tuple[jax.Array, jax.Array]:
    """A tile of queries of one row: query float32[Q, N, H], positions int32[Q] -> out [Q, N, H], lse [Q, N]."""
    num_queries, num_heads, head_dim = query.shape
    block_size, num_kv_heads = pools.k.shape[1:3]
    queries = query.reshape(num_queries, num_kv_heads, -1, head_dim).transpose(1, 2, 0, 3)
    last = positions.max()
    first = jnp.zeros_like(last)
    if options.sliding_window is not None:
        lowest = jnp.where(positions < 0, last, positions).min()
        first = jnp.maximum(lowest - options.sliding_window + 1, 0)
    work = _Work(queries, positions, first, last, table)
    state = lax.fori_loop(
        0,
        _num_chunks(first, last, block_size, options),
        lambda chunk, state: _attend_chunk(options, pools, work, state, chunk),
        _start(queries, sink),
    )
    out, lse = _finish(state, positions)
    return out.transpose(2, 0, 1, 3).reshape(query.shape), lse.transpose(2, 0, 1).reshape(num_queries, num_heads)


def _ragged(
    query: jax.Array,
    pools: _Pools,
    tables: jax.Array,
    seq_lens: jax.Array,
    starts: jax.Array,
    sink: jax.Array,
    options: _Options,
) -> tuple[jax.Array, jax.Array]:
    """Any number of queries per row, the last ones of the row: query float32[T, N, H], starts int32[S + 1]."""
    num_tokens, tile = query.shape[0], min(options.tile_tokens, query.shape[0])
    padded = jnp.pad(query, ((0, tile), (0, 0), (0, 0)))  # a tile may reach past the last token
    result = jnp.zeros_like(padded), jnp.broadcast_to(sink[None], (num_tokens + tile, sink.shape[0]))

    counts = starts[1:] - starts[:-1]
    target = jnp.where(counts == 1, starts[:-1], num_tokens + tile)  # other rows: past the end, dropped
    single_lens = jnp.where(counts == 1, seq_lens, 0)
    single = _decode(padded.at[target].get(mode="clip"), pools, tables, single_lens, sink, options)
    result = jax.tree.map(lambda old, new: old.at[target].set(new, mode="drop"), result, single)

    num_tiles = jnp.where(counts > 1, (counts + tile - 1) // tile, 0)
    tile_ends = jnp.cumsum(num_tiles, dtype=jnp.int32)

    def attend_tile(index: jax.Array, result: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        row = (tile_ends <= index).sum(dtype=jnp.int32)
        query_index = (index - tile_ends[row] + num_tiles[row]) * tile + jnp.arange(tile, dtype=jnp.int32)
        inside = query_index < counts[row]
        positions = jnp.where(inside, jnp.maximum(seq_lens[row] - counts[row] + query_index, -1), -1)
        start = starts[row] + query_index[0]
        queries = lax.dynamic_slice_in_dim(padded, start, tile)
        new = _attend_tile(queries, positions, pools, tables[row], sink, options)
        return jax.tree.map(lambda old, new: _put(old, new, start, inside), result, new)

    out, lse = lax.fori_loop(0, tile_ends[-1], attend_tile, result)
    return out[:num_tokens], lse[:num_tokens]


def _put(old: jax.Array, new: jax.Array, start: jax.Array, inside: jax.Array) -> jax.Array:
    """Writes the rows of new [Q, ...] for which inside [Q] is True into old [T, ...], from row start on."""
    kept = lax.dynamic_slice_in_dim(old, start, new.shape[0])
    new = jnp.where(jnp.expand_dims(inside, range(1, new.ndim)), new, kept)
    return lax.dynamic_update_slice_in_dim(old, new, start, axis=0)


@functools.partial(
    jax.jit,
    static_argnames=("scale", "sliding_window", "logits_soft_cap", "cache_dtype", "chunk_tokens", "tile_tokens"),
)
def paged_attention_xla(
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
    chunk_tokens: int = CHUNK_TOKENS,
    tile_tokens: int = TILE_TOKENS,
) -> tuple[jax.Array, jax.Array]:
    """Attention of every token over the cached keys and values of its row, causal, with a running softmax.

    Arguments as for `paged_jax.attention.paged_attention`, which validates them; nothing is validated here.
    The time grows with the visible tokens, not with the width of the table or the size of the pool.

    Args:
        cache_dtype: storage format of the pools. None: their own dtype (uint16: bfloat16).
        chunk_tokens: cached tokens per step, rounded down to whole blocks, at least one block.
        tile_tokens: queries per work item when query_start_loc is given.

    Returns:
        out: [T, N, H] in query's dtype; zeros where a token sees nothing.
        lse: float32[T, N], natural logarithm of the softmax denominator, the sink included.
    """
    block_size, max_blocks = key_cache.shape[1], block_tables.shape[1]
    chunk_blocks = max(1, min(chunk_tokens // block_size, max_blocks))
    options = _Options(sliding_window, logits_soft_cap, chunk_blocks, tile_tokens)
    dtype = cache_dtype or ("bfloat16" if key_cache.dtype == jnp.uint16 else key_cache.dtype.name)
    pools = _Pools(key_cache, value_cache, k_scale, v_scale, dtype)
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    sink = jnp.full(query.shape[1:2], -jnp.inf, jnp.float32) if sinks is None else sinks.astype(jnp.float32)
    scaled = query.astype(jnp.float32) * scale
    if query_start_loc is None:
        out, lse = _decode(scaled, pools, block_tables, seq_lens, sink, options)
    else:
        out, lse = _ragged(scaled, pools, block_tables, seq_lens, query_start_loc, sink, options)
    return out.astype(query.dtype), lse
