"""Paged attention of many queries per row (ragged, causal) on Pallas' Mosaic GPU backend, for sm_90.

One program takes one tile of queries of one row and one kv head: 128 rows, which are the heads of the group times the
tokens of the tile, in two compute warpgroups; a third warpgroup brings K and V through a ring in shared memory. Tiles
lie on the multiples of 8 of the packed queries, so that the rows need no padding; only the rows' own lines are stored.
Tiles of keys wholly in the past of all queries are not masked.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from pallas_kernels.mosaic import LOG2E, columns_to, rows_to
from pallas_kernels.reference import MASK_VALUE
from pallas_kernels.work_list import TILE_END, TILE_FIRST, TILE_POSITION, TILE_ROW, TILE_TOKEN, prefill_work

_ROWS = 64  # of one compute warpgroup
_LOADER = 2  # index of the warpgroup that brings K and V
_WGMMA = plgpu.Layout.WGMMA


@dataclass(frozen=True, kw_only=True)
class Config:
    """How paged_prefill uses the chip.

    Attributes:
        tile_tokens: cached tokens per step, a multiple of 32.
        num_stages: steps of K and V in the ring.
    """

    tile_tokens: int = 64
    num_stages: int = 2

    def __post_init__(self):
        if self.tile_tokens < 32 or self.tile_tokens % 32 or self.num_stages < 1:
            raise ValueError(
                f"Config.tile_tokens is {self.tile_tokens} and num_stages {self.num_stages}; they must be a positive "
                "multiple of 32 and at least 1"
            )


@dataclass(frozen=True, kw_only=True)
class _Problem(mosaic.Problem):
    config: Config

    @property
    def query_tile(self) -> int:
        """Tokens of one tile: the power of two with which the group fills the rows best."""
        return 1 << int(math.log2(2 * _ROWS // self.group))

    @property
    def query_piece(self) -> int:
        """Tokens of one head in one warpgroup."""
        return min(self.query_tile, _ROWS)

    @property
    def copies(self) -> int:
        """Copies that bring the K, or the V, of one step."""
        return self.config.tile_tokens // math.gcd(self.block_size, self.config.tile_tokens)

    @property
    def num_raw(self) -> int:
        """Buffers for 8-bit K and V as they are stored: one serves both in turn where memory is short."""
        return 0 if not self.is_quantised else 1 if self.head_dim > 192 else 2

    @property
    def part(self) -> tuple[int, int]:
        """Rows and columns of K or V that are rewritten at once: as few as layouts and tiling allow."""
        return (16 if self.head_dim % 32 == 0 else 32), math.gcd(128 if self.is_quantised else 64, self.head_dim)

    @property
    def part_layout(self):
        return plgpu.Layout.MMA_ACC(jnp.float32, m_warps=self.part[0] // 16)

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a thread that computes, and of one that loads: 504 for the three warpgroups together."""
        return (232, 40)

    @property
    def shared_memory_bytes(self) -> int:
        """Shared memory of one program: `_scratch`, and what alignment and barriers add."""
        dim, tokens, stages = self.head_dim, self.config.tile_tokens, self.config.num_stages
        eight_bit = self.num_raw * tokens * dim + 8 * stages * tokens if self.is_quantised else 0
        return 2 * dim * (4 * _ROWS + 2 * stages * tokens) + eight_bit + 2048


def _scratch(p: _Problem) -> dict[str, Any]:
    tokens, stages, dim = p.config.tile_tokens, p.config.num_stages, p.head_dim
    tiling = mosaic.tiled(dim, p.dtype, max_bytes=2 * tokens)
    ring = plgpu.SMEM((stages, tokens, dim), p.dtype, transforms=tiling)
    raw = plgpu.SMEM((tokens, dim), p.cache_dtype, transforms=mosaic.tiled(dim, p.cache_dtype))
    scales = plgpu.SMEM((stages, tokens), jnp.float32)
    ready = plgpu.Barrier(num_arrivals=1 if p.is_quantised else p.copies, num_barriers=stages)
    free = plgpu.Barrier(num_arrivals=2, num_barriers=stages)
    landed = plgpu.Barrier(num_arrivals=2 * p.copies if p.is_quantised else p.copies)
    return {
        "queries": plgpu.SMEM((2, _ROWS, dim), p.dtype, transforms=tiling),
        "staged": plgpu.SMEM((2, _ROWS, dim), p.dtype),
        "ring": [ring, ring],
        "raw": [raw] * p.num_raw,
        "scales": [scales, scales] if p.is_quantised else [],
        "ready": [ready, ready],
        "free": [free, free],
        "landed": [landed, landed],
        "query_ready": plgpu.Barrier(num_arrivals=_ROWS // p.query_piece, num_barriers=2),
    }


class _Refs(NamedTuple):
    """Arrays in device memory, and the shared memory and barriers of one program."""

    q: Any  # [T, N, H]
    pools: tuple  # K and V [B, block_size, K, H]
    pool_scales: tuple  # of K and of V [B, K, block_size], or ()
    tables: Any  # int32[S, M]
    queries: Any
    ring: tuple
    raw: tuple
    scales: tuple
    ready: tuple
    free: tuple
    landed: tuple
    query_ready: Any


class _Tile(NamedTuple):
    """One entry of the work list and the kv head, and the tiles of keys that its queries see."""

    row: jax.Array
    token: jax.Array
    position: jax.Array  # of `token`
    first: jax.Array  # position of the first query of the row in the tile
    last: jax.Array  # position of the last one
    low: jax.Array
    unmasked: jax.Array  # first tile of keys that need no mask
    masked: jax.Array  # first tile after those
    high: jax.Array
    head: jax.Array


def _tile(p: _Problem, items, index: jax.Array, head: jax.Array) -> _Tile:
    token, position = items[index, TILE_TOKEN], items[index, TILE_POSITION]
    first = position + items[index, TILE_FIRST] - token
    last = position + items[index, TILE_END] - 1 - token
    step = p.config.tile_tokens
    high = lax.div(jnp.maximum(last + 1, 0) + (step - 1), step)
    masked = lax.div(jnp.maximum(first + 1, 0), step)
    low = unmasked = jnp.int32(0)
    if p.sliding_window is not None:
        low = lax.div(jnp.maximum(first - p.sliding_window + 1, 0), step)
        unmasked = lax.div(jnp.maximum(last - p.sliding_window + 1, 0) + (step - 1), step)
    masked = jnp.maximum(masked, low)
    unmasked = jnp.minimum(jnp.maximum(unmasked, low), masked)
    return _Tile(items[index, TILE_ROW], token, position, first, last, low, unmasked, masked, high, head)


def _wait_until_free(p: _Problem, refs: _Refs, which: int, step: jax.Array) -> jax.Array:
    """Waits until both compute warpgroups have read what was in the ring; returns the place."""
    slot = lax.rem(step, p.config.num_stages)
    pl.when(step >= p.config.num_stages)(lambda: plgpu.barrier_wait(refs.free[which].at[slot]))
    return slot


def _live_values(p: _Problem, tile: _Tile, start: jax.Array, row: jax.Array, values: jax.Array) -> jax.Array:
    """V with the rows set to zero that no query of the tile sees: 0 * NaN is NaN, and dead slots hold anything."""
    position = start + row + plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=p.part_layout)
    live = position <= tile.last
    if p.sliding_window is not None:
        live &= position > tile.first - p.sliding_window
    return jnp.where(live, values, jnp.zeros_like(values))


def _rewrite(p: _Problem, source, target, change) -> None:
    """target = change(first row, source) for a tile of K or V in shared memory, by small parts.

    The loader has few registers, and gives the others up to those that compute.
    """
    height, width = p.part

    def rewrite_rows(i, _):
        row = i * height
        for column in range(0, p.head_dim, width):
            part = pl.ds(row, height), pl.ds(column, width)
            values = plgpu.load(source.at[part], layout=p.part_layout, optimized=False)
            mosaic.store(target.at[part], change(row, values))

    lax.fori_loop(0, p.config.tile_tokens // height, rewrite_rows, None)
    plgpu.commit_smem()


def _heads(pools: tuple, head: jax.Array) -> list:
    """Slots of one kv head of each pool [B, block_size, K, H], or of scales [B, K, block_size]."""
    if pools and len(pools[0].shape) == 3:
        return [lambda block, inside, pool=pool: pool.at[block, head, inside] for pool in pools]
    return [lambda block, inside, pool=pool: pool.at[block, inside, head] for pool in pools]


def _bring(p: _Problem, refs: _Refs, tile: _Tile, step: jax.Array, _) -> None:
    """Brings K and V of one step into the ring: what the third warpgroup does."""
    index = tile.low + step
    start = index * p.config.tile_tokens
    ids = mosaic.block_ids(
        refs.tables, tile.row, tile.last, start, num_tokens=p.config.tile_tokens, block_size=p.block_size
    )
    copy = functools.partial(mosaic.start_copies, ids, start, p.block_size)
    pools, scales = _heads(refs.pools, tile.head), _heads(refs.pool_scales, tile.head)
    live = functools.partial(_live_values, p, tile, start)
    if p.is_quantised:
        _bring_quantised(p, refs, step, copy, pools, scales, live)
        return
    slot = _wait_until_free(p, refs, 0, step)
    copy(pools[0], refs.ring[0].at[slot], refs.ready[0].at[slot])
    _wait_until_free(p, refs, 1, step)
    is_masked = (index < tile.unmasked) | (index >= tile.masked)
    values, ready = refs.ring[1].at[slot], refs.ready[1].at[slot]
    pl.when(jnp.logical_not(is_masked))(lambda: copy(pools[1], values, ready))

    @pl.when(is_masked)
    def _():
        copy(pools[1], values, refs.landed[1])
        plgpu.barrier_wait(refs.landed[1])
        _rewrite(p, values, values, live)
        for _ in range(p.copies):
            plgpu.barrier_arrive(ready)


def _bring_quantised(p: _Problem, refs: _Refs, step: jax.Array, copy, pools, scales, live) -> None:
    """As above for 8-bit K and V: they are converted on the way."""
    slot = lax.rem(step, p.config.num_stages)

    def start(which: int) -> None:
        _wait_until_free(p, refs, which, step)
        copy(pools[which], refs.raw[which % p.num_raw], refs.landed[which])
        copy(scales[which], refs.scales[which].at[slot], refs.landed[which])

    def convert(which: int) -> None:
        plgpu.barrier_wait(refs.landed[which])
        kept = live if which == 1 else lambda row, values: values
        change = lambda row, raw: kept(row, mosaic.dequantised(raw, p.dtype, True))  # noqa: E731
        _rewrite(p, refs.raw[which % p.num_raw], refs.ring[which].at[slot], change)
        plgpu.barrier_arrive(refs.ready[which].at[slot])

    order = (start, 0), (start, 1), (convert, 0), (convert, 1)
    for action, which in order if p.num_raw == 2 else (order[0], order[2], order[1], order[3]):
        action(which)


def _release(p: _Problem, refs: _Refs, tile: _Tile, which: int, step: jax.Array) -> None:
    """Tells the loader that this warpgroup has read its place of the ring, if that is used again."""
    slot = lax.rem(step, p.config.num_stages)
    is_reused = tile.low + step + p.config.num_stages < tile.high
    pl.when(is_reused)(lambda: plgpu.barrier_arrive(refs.free[which].at[slot]))


def _scale_vector(p: _Problem, refs: _Refs, which: int, slot: jax.Array) -> jax.Array:
    vector = plgpu.load(refs.scales[which].at[slot], layout=_WGMMA.reduce(0), optimized=False)
    plgpu.commit_smem()  # it is read before TMA may overwrite it
    return vector


def _add_product(p: _Problem, acc: jax.Array, weights: jax.Array, values) -> jax.Array:
    """acc + weights @ values, accumulated in place: a sum outside of the instruction would spill registers."""
    if p.interpret:  # the interpreter takes neither a left operand in registers nor a given accumulator
        values = values[...]
        plgpu.commit_smem()  # wgmma's reads are ordered with TMA's writes, these are not
        return acc + jnp.dot(weights, values, preferred_element_type=jnp.float32)

    def multiply(accumulator):
        plgpu.wgmma(accumulator, weights, values)

    return pl.run_state(multiply)(plgpu.WGMMAAccumulatorRef.init(acc))  # pyright: ignore[reportReturnType]


def _live_scores(p: _Problem, tile: _Tile, warpgroup: jax.Array, index: jax.Array) -> jax.Array:
    """Which keys of a tile each row sees, bool[64, tile_tokens]."""
    shape = (_ROWS, p.config.tile_tokens)
    row = warpgroup * _ROWS + plgpu.broadcasted_iota(jnp.int32, (_ROWS,), 0, layout=_WGMMA.reduce(1))
    last = tile.position - index * p.config.tile_tokens + (row & (p.query_tile - 1))
    column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=_WGMMA)
    live = column <= rows_to(shape, last)
    if p.sliding_window is not None:
        live &= column > rows_to(shape, last - p.sliding_window)
    return live


def _attend_step(p: _Problem, refs: _Refs, tile: _Tile, warpgroup: jax.Array, is_masked: bool, index: jax.Array, carry):
    """Folds one tile of keys into the running softmax."""
    acc, highest, total = carry
    step = index - tile.low
    slot = lax.rem(step, p.config.num_stages)
    shape = (_ROWS, p.config.tile_tokens)

    def multiply(accumulator):
        plgpu.wgmma(accumulator, refs.queries.at[warpgroup], refs.ring[0].at[slot].transpose((1, 0)))
        return accumulator[...]

    plgpu.barrier_wait(refs.ready[0].at[slot])
    scores = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))
    if p.is_quantised:
        scores *= columns_to(shape, _scale_vector(p, refs, 0, slot))
    _release(p, refs, tile, 0, step)
    scores = mosaic.capped(scores, p.scale, p.logits_soft_cap)
    live = None
    if is_masked:
        live = _live_scores(p, tile, warpgroup, index)
        scores = jnp.where(live, scores, MASK_VALUE)
    # A row that has seen nothing so far has MASK_VALUE as its highest score, and sums that its first real score wipes.
    weights, highest, total, shrink = mosaic.softmax_step(scores, highest, total)
    acc *= rows_to(acc.shape, shrink)

    plgpu.barrier_wait(refs.ready[1].at[slot])
    if p.is_quantised:
        weights *= columns_to(shape, _scale_vector(p, refs, 1, slot))
        if live is not None:
            weights = jnp.where(live, weights, jnp.zeros_like(weights))
    acc = _add_product(p, acc, weights.astype(p.dtype), refs.ring[1].at[slot])
    _release(p, refs, tile, 1, step)
    return acc, highest, total


def _pieces(p: _Problem, tile: _Tile, warpgroup: jax.Array):
    """The parts of a warpgroup's rows that belong to one head: (first row, head in the group, token offset)."""
    for j in range(_ROWS // p.query_piece):
        row = warpgroup * _ROWS + j * p.query_piece
        yield j * p.query_piece, lax.div(row, p.query_tile), row & (p.query_tile - 1)


def _attend_tile(p: _Problem, refs: _Refs, tile: _Tile, warpgroup: jax.Array, sinks):
    """Output [64, H], normalised, and log2 of the softmax denominator [64], both float32: of one warpgroup."""
    for row, in_group, offset in _pieces(p, tile, warpgroup):
        head = tile.head * p.group + jnp.minimum(in_group, p.group - 1)
        # The tiles of shared memory have 8 rows: the compiler must see that the token is a multiple of 8.
        lines = pl.ds(lax.div(tile.token + offset, 8) * 8, p.query_piece)
        target = refs.queries.at[warpgroup, pl.ds(row, p.query_piece)]
        plgpu.copy_gmem_to_smem(refs.q.at[lines, head], target, refs.query_ready.at[warpgroup])
    if sinks is None:
        highest = plgpu.layout_cast(jnp.full((_ROWS,), MASK_VALUE, jnp.float32), _WGMMA.reduce(1))
        total = plgpu.layout_cast(jnp.zeros((_ROWS,), jnp.float32), _WGMMA.reduce(1))
    else:
        highest = plgpu.load(sinks.at[tile.head, warpgroup], layout=_WGMMA.reduce(1), optimized=False)
        total = plgpu.layout_cast(jnp.ones((_ROWS,), jnp.float32), _WGMMA.reduce(1))
    acc = plgpu.layout_cast(jnp.zeros((_ROWS, p.head_dim), jnp.float32), _WGMMA)
    plgpu.barrier_wait(refs.query_ready.at[warpgroup])
    masked, unmasked = (functools.partial(_attend_step, p, refs, tile, warpgroup, m) for m in (True, False))
    carry = acc, highest, total
    if p.sliding_window is not None:
        carry = lax.fori_loop(tile.low, tile.unmasked, masked, carry)
    carry = lax.fori_loop(tile.unmasked, tile.masked, unmasked, carry)
    acc, highest, total = lax.fori_loop(tile.masked, tile.high, masked, carry)
    total = jnp.where(total == 0, jnp.ones_like(total), total)
    return acc / rows_to(acc.shape, total), highest + jnp.log2(total)


def _store_tile(p: _Problem, tile: _Tile, warpgroup: jax.Array, staged, out, begin: jax.Array, end: jax.Array) -> None:
    """Stores the lines begin ... end - 1 of the packed queries."""
    # Copies of several lines need each of them on a multiple of 128 bytes of shared memory.
    store = _store_by_powers_of_two if p.head_dim * jnp.dtype(p.dtype).itemsize % 128 == 0 else _store_by_line
    for row, in_group, offset in _pieces(p, tile, warpgroup):
        piece = tile.token + offset
        first, last = jnp.maximum(begin, piece), jnp.minimum(end, piece + p.query_piece)
        num_lines = jnp.where(in_group < p.group, jnp.maximum(last - first, 0), 0)
        start = row + first - piece

        def copy(done, size, first=first, start=start, head=tile.head * p.group + in_group):
            source, target = staged.at[warpgroup, pl.ds(start + done, size)], out.at[pl.ds(first + done, size), head]
            plgpu.copy_smem_to_gmem(source, target, commit_group=False)

        store(p, num_lines, copy)
    plgpu.commit_smem_to_gmem_group()
    plgpu.wait_smem_to_gmem(0)


def _store_by_powers_of_two(p: _Problem, num_lines: jax.Array, copy) -> None:
    """copy(first line, number of lines) of num_lines lines in copies of a power of two lines each."""
    done, size = jnp.int32(0), p.query_piece
    while size:
        is_taken = (num_lines & size) != 0
        pl.when(is_taken)(functools.partial(copy, done, size))
        done += jnp.where(is_taken, size, 0)
        size //= 2


def _store_by_line(p: _Problem, num_lines: jax.Array, copy) -> None:
    lax.fori_loop(0, num_lines, lambda i, _: copy(i, 1), None)


def _prefill_kernel(p: _Problem, *arrays, queries, staged, ring, raw, scales, ready, free, landed, query_ready):
    q, k, v, tables, items, *rest = arrays
    pool_scales = tuple(rest[:2]) if p.is_quantised else ()
    sinks = rest[-3] if p.has_sinks else None
    out, lse = rest[-2:]
    index, warpgroup = lax.axis_index("tile"), lax.axis_index("warpgroup")
    begin, end = items[index, TILE_FIRST], items[index, TILE_END]
    memory = (queries, ring, raw, scales, ready, free, landed, query_ready)

    @pl.when(begin < end)
    def _():
        tile = _tile(p, items, index, lax.axis_index("kv_head"))
        refs = _Refs(q, (k, v), pool_scales, tables, *memory)

        @pl.when(warpgroup < _LOADER)
        def _():
            plgpu.set_max_registers(p.registers[0], action="increase")
            tile_out, tile_lse = _attend_tile(p, refs, tile, warpgroup, sinks)
            mosaic.store(lse.at[index, tile.head, warpgroup], tile_lse)
            mosaic.store(staged.at[warpgroup], tile_out.astype(p.dtype))
            plgpu.commit_smem()
            _store_tile(p, tile, warpgroup, staged, out, begin, end)

        @pl.when(warpgroup == _LOADER)
        def _():
            plgpu.set_max_registers(p.registers[1], action="decrease")
            lax.fori_loop(0, tile.high - tile.low, functools.partial(_bring, p, refs, tile), None)


def _token_lse(p: _Problem, work: jax.Array, lse: jax.Array, num_tokens: int) -> jax.Array:
    """Natural logarithm of the softmax denominator by token, float32[T, N]; -inf where a token sees nothing."""
    by_head = lse.reshape(*lse.shape[:2], 2 * _ROWS)[:, :, : p.group * p.query_tile]
    by_head = by_head.reshape(-1, p.num_kv_heads, p.group, p.query_tile)
    by_token = jnp.moveaxis(by_head, 3, 1).reshape(-1, p.query_tile, p.num_heads) / LOG2E
    token = work[:, TILE_TOKEN, None] + jnp.arange(p.query_tile)[None]
    is_own = (token >= work[:, TILE_FIRST, None]) & (token < work[:, TILE_END, None])
    target = jnp.where(is_own, token, num_tokens)
    by_token = jnp.where(by_token <= MASK_VALUE / 4, -jnp.inf, by_token)
    return jnp.full((num_tokens, p.num_heads), -jnp.inf).at[target].set(by_token, mode="drop")


def paged_prefill(
    query: jax.Array,
    key_cache: jax.Array,
    value_cache: jax.Array,
    *,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_start_loc: jax.Array,
    out,
    scale: float | None = None,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    config: Config | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Attends the rows with more than one query, in one launch, and zeroes the output of padding tokens.

    Arguments as for `paged_jax.attention.paged_attention`, which validates them.

    Args:
        out: Ref [T, N, H] in query's dtype; the lines of the rows' queries and of the padding tokens are written.
        config: None: `default_config` of the shape and the chip.
        interpret: run in the interpreter.

    Returns:
        lse: float32[T, N], natural logarithm of the softmax denominator, the sink included; -inf for other tokens.

    Raises:
        NotImplementedError: the kernel does not take this shape, dtype or chip.
    """
    capability = mosaic.compute_capability(interpret)
    p = _Problem.of(
        query,
        key_cache,
        config=config or default_config(key_cache),
        scale=scale,
        sliding_window=sliding_window,
        logits_soft_cap=logits_soft_cap,
        sinks=sinks,
        interpret=interpret,
    )
    _check(p, capability)
    num_tokens = query.shape[0]
    work = prefill_work(query_start_loc, seq_lens, num_tokens=num_tokens, tile=p.query_tile)
    query = jnp.pad(query, ((0, -num_tokens % 8), (0, 0), (0, 0)))  # TMA takes only arrays that end with a whole tile
    operands = [query, key_cache, value_cache, block_tables, work]
    if p.is_quantised:
        operands += [k_scale, v_scale]
    if sinks is not None:
        operands.append(p.sink_rows(sinks, p.query_tile, 2 * _ROWS).reshape(-1, 2, _ROWS))
    (lse,) = plgpu.kernel(
        functools.partial(_prefill_kernel, p),
        out_type=[jax.ShapeDtypeStruct((work.shape[0], p.num_kv_heads, 2, _ROWS), jnp.float32)],
        grid=(work.shape[0], p.num_kv_heads),
        grid_names=("tile", "kv_head"),
        num_threads=3,
        thread_name="warpgroup",
        scratch_types=_scratch(p),
        kernel_name="paged_prefill",
        interpret=mosaic.interpret_params(interpret),
    )(*operands, out)
    return _token_lse(p, work, lse, num_tokens)


def default_config(key_cache: jax.Array) -> Config:
    """The Config for a shape of pool; from compiled sizes, not yet from timings."""
    return Config(tile_tokens=32 if key_cache.shape[3] > 192 else 64)


def _check(p: _Problem, capability: tuple[int, int]) -> None:
    """Raises NotImplementedError unless the kernel takes the problem on the chip."""
    chip = f"sm_{capability[0]}{capability[1]}"
    if capability != (9, 0):
        raise NotImplementedError(f"paged_prefill is written for wgmma, which only sm_90 has; this is {chip}")
    if p.group > 16:
        raise NotImplementedError(f"{p.group} query heads share a kv head; paged_prefill takes up to 16")
    limit = mosaic.SHARED_MEMORY_BYTES[capability]
    if p.shared_memory_bytes > limit:
        raise NotImplementedError(
            f"paged_prefill needs {p.shared_memory_bytes} bytes of shared memory for head_dim {p.head_dim}, "
            f"tile_tokens {p.config.tile_tokens} and num_stages {p.config.num_stages}; {chip} has {limit}"
        )
