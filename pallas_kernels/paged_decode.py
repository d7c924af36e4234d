"""Paged attention of one query per row on Pallas' Mosaic GPU backend: split by length, grouped heads packed.

One program takes one chunk of one row (pallas_kernels/work_list.py) and one kv head: all query heads of that kv head
are the rows of one matrix tile, so that K and V are read once. K and V come block by block through a ring in shared
memory; the block ids of the next step are loaded one step ahead. Rows that fit one chunk write their output at once;
the others leave normalised float32 partials and the logarithm of their denominators, which a second launch combines in
a fixed order.
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
from pallas_kernels.combine import combine, row_lse
from pallas_kernels.mosaic import columns_to, rows_to
from pallas_kernels.reference import MASK_VALUE
from pallas_kernels.work_list import HIGH, IS_FIRST, LOW, NUM_CHUNKS, ROW, TOKEN, decode_work


@dataclass(frozen=True, kw_only=True)
class Config:
    """How paged_decode uses the chip.

    Attributes:
        mma: "wgmma" (sm_90; tiles of 64 query heads) or "mma" (any chip; tiles of 16 or 32).
        tile_tokens: cached tokens per step of a program, a multiple of 64.
        num_stages: steps of K and V in the ring, at least 2 unless head_dim is 256.
        num_chunks: chunks per kv head that fill the chip; the rows are cut to make about that many.
    """

    mma: str = "wgmma"
    tile_tokens: int = 64
    num_stages: int = 2
    num_chunks: int = 33

    def __post_init__(self):
        if self.mma not in ("wgmma", "mma"):
            raise ValueError(f"Config.mma is {self.mma!r}; choose 'wgmma' or 'mma'")
        if self.tile_tokens < 64 or self.tile_tokens % 64:
            raise ValueError(f"Config.tile_tokens is {self.tile_tokens}; it must be a positive multiple of 64")
        if self.num_stages < 2 or self.num_chunks < 1:
            raise ValueError(
                f"Config.num_stages is {self.num_stages} and num_chunks {self.num_chunks}; they must be >= 2 and >= 1"
            )


@dataclass(frozen=True, kw_only=True)
class _Problem(mosaic.Problem):
    config: Config
    use_tma: bool

    @property
    def piece(self) -> int:
        """Tokens that lie in one block and in one step: what one copy brings."""
        return math.gcd(self.block_size, self.config.tile_tokens)

    @property
    def pieces(self) -> int:
        return self.config.tile_tokens // self.piece

    @property
    def tile_rows(self) -> int:
        """Rows of the query tile: what the instruction computes; only `group` of them are meaningful."""
        if self.config.mma == "wgmma":
            return 64
        return 16 if self.head_dim % 32 == 0 else 32

    @property
    def shared_memory_bytes(self) -> int:
        """Shared memory of one program: `_scratch`, and what alignment and barriers add."""
        rows, dim, tokens, stages = self.tile_rows, self.head_dim, self.config.tile_tokens, self.config.num_stages
        query = 2 * (2 * rows * dim + rows * tokens)
        ring = 2 * stages * tokens * dim * jnp.dtype(self.cache_dtype).itemsize
        dequantised = 2 * tokens * (4 * stages + 2 * dim) if self.is_quantised else 0
        return query + max(ring, 4 * rows * dim) + dequantised + 2048

    def layout(self, name: str, dtype=jnp.float32):
        """The register layout of the instruction's "lhs", "rhs" or "acc"."""
        if self.config.mma == "wgmma":
            return plgpu.Layout.WGMMA
        kind = {"lhs": plgpu.Layout.MMA_LHS, "rhs": plgpu.Layout.MMA_RHS, "acc": plgpu.Layout.MMA_ACC}[name]
        return kind(dtype, m_warps=self.tile_rows // 16)


def _scratch(p: _Problem) -> dict[str, Any]:
    """Shared memory: K and V as they are stored; with 8 bits also their scales and one 16-bit tile of each."""
    tokens, stages, rows, dim = p.config.tile_tokens, p.config.num_stages, p.tile_rows, p.head_dim
    pool_tiling = mosaic.tiled(dim, p.cache_dtype, rows_per_async_copy=None if p.use_tma else p.piece)
    stored = plgpu.SMEM((stages, tokens, dim), p.cache_dtype, transforms=pool_tiling)
    tile = plgpu.SMEM((tokens, dim), p.dtype, transforms=mosaic.tiled(dim, p.dtype))
    scales = plgpu.SMEM((stages, tokens), jnp.float32)
    # The output leaves through the memory of the ring, which is empty by then.
    out = plgpu.SMEM((rows, dim), jnp.float32)
    weights_tiling = mosaic.tiled(math.gcd(tokens, dim), p.dtype)  # the swizzles of P and V must be the same
    ready = plgpu.Barrier(num_arrivals=p.pieces * (2 if p.is_quantised else 1), num_barriers=stages)
    return {
        "q_in": plgpu.SMEM((rows, dim), p.dtype),
        "q_tile": plgpu.SMEM((rows, dim), p.dtype, transforms=mosaic.tiled(dim, p.dtype)),
        "weights": plgpu.SMEM((rows, tokens), p.dtype, transforms=weights_tiling),
        "ring": plgpu.RefUnion([stored, stored], [out]),
        "scales": [scales, scales] if p.is_quantised else [],
        "tiles": [tile, tile] if p.is_quantised else [],
        "barriers": [ready, ready, plgpu.Barrier()] if p.use_tma else [],
    }


class _Refs(NamedTuple):
    """Arrays in device memory, and the shared memory of one program."""

    q: Any  # [T, N, H]
    pools: tuple  # K and V [B, block_size, K, H]
    scales: tuple  # of K and of V [B, K, block_size], or ()
    tables: Any  # int32[S, M]
    seq_lens: Any  # int32[S]
    q_in: Any
    q_tile: Any
    weights: Any
    ring: tuple
    ring_scales: tuple
    tiles: tuple
    barriers: tuple  # of K, of V and of the query; () with cp.async


class _Item(NamedTuple):
    """One entry of the work list, and the kv head."""

    row: jax.Array
    token: jax.Array
    low: jax.Array
    num_steps: jax.Array
    seq_len: jax.Array
    head: jax.Array


def _block_ids(p: _Problem, refs: _Refs, item: _Item, step: jax.Array) -> tuple[jax.Array, ...]:
    return mosaic.block_ids(
        refs.tables,
        item.row,
        item.seq_len - 1,
        (item.low + step) * p.config.tile_tokens,
        num_tokens=p.config.tile_tokens,
        block_size=p.block_size,
    )


def _start_copies(p: _Problem, refs: _Refs, item: _Item, step: jax.Array, ids: tuple[jax.Array, ...]) -> None:
    """Starts to fill the ring with one step's K and V, and their scales."""
    slot = lax.rem(step, p.config.num_stages)
    start = (item.low + step) * p.config.tile_tokens
    columns = item.head if p.use_tma else pl.ds(item.head * p.head_dim, p.head_dim)
    for which, pool in enumerate(refs.pools):
        copy = functools.partial(mosaic.start_copies, ids, start, p.block_size)
        ready = refs.barriers[which].at[slot] if p.use_tma else None
        copy(lambda block, inside, pool=pool: pool.at[block, inside, columns], refs.ring[which].at[slot], ready)
        if p.is_quantised:
            scales = refs.scales[which]
            target = refs.ring_scales[which].at[slot]
            copy(lambda block, inside, scales=scales: scales.at[block, item.head, inside], target, ready)


def _wait(p: _Problem, refs: _Refs, item: _Item, step: jax.Array, which: int) -> None:
    """Waits for one step's K (which = 0) or V (which = 1)."""
    if p.use_tma:
        plgpu.barrier_wait(refs.barriers[which].at[lax.rem(step, p.config.num_stages)])
    elif which == 0:  # cp.async counts copies, and K and V are waited for together
        ahead = p.config.num_stages - 1  # steps that were started after this one
        is_tail = step + ahead >= item.num_steps
        pl.when(is_tail)(lambda: plgpu.wait_gmem_to_smem(0))
        pl.when(jnp.logical_not(is_tail))(lambda: plgpu.wait_gmem_to_smem(2 * p.pieces * ahead))
        mosaic.sync(p.use_tma)  # cp.async is waited for thread by thread


def _load_query(p: _Problem, refs: _Refs, item: _Item) -> None:
    """Brings the query heads of the kv head into q_tile. Its other rows hold anything: rows do not mix."""
    heads = refs.q.at[item.token, pl.ds(item.head * p.group, p.group)]
    if p.use_tma:
        plgpu.copy_gmem_to_smem(heads, refs.q_in.at[pl.ds(0, p.group)], refs.barriers[2])
        plgpu.barrier_wait(refs.barriers[2])
    else:
        for g in range(p.group):
            mosaic.store(refs.q_in.at[g], mosaic.load_line(refs.q.at[item.token, item.head * p.group + g]))
        mosaic.sync(p.use_tma)
    mosaic.store(refs.q_tile, plgpu.load(refs.q_in, layout=p.layout("lhs", p.dtype), optimized=False))
    mosaic.sync(p.use_tma)


def _matmul(p: _Problem, a, b, shape: tuple[int, int]) -> jax.Array:
    """a @ b in float32, both from shared memory."""
    if p.config.mma == "wgmma":

        def multiply(accumulator):
            plgpu.wgmma(accumulator, a, b)
            return accumulator[...]

        return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))
    a = plgpu.load(a, layout=p.layout("lhs", p.dtype), optimized=False)
    b = plgpu.load(b, layout=p.layout("rhs", p.dtype), optimized=False)
    if p.interpret:  # the interpreter has no rule for mma
        return jnp.dot(a, b, preferred_element_type=jnp.float32)
    zeros = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), p.layout("acc"))
    return plgpu.mma(zeros, a, b)


def _is_live(p: _Problem, item: _Item, position: jax.Array) -> jax.Array:
    """Which positions the row's query sees."""
    live = position < item.seq_len
    if p.sliding_window is not None:
        live &= position >= item.seq_len - p.sliding_window
    return live


def _key_tile(p: _Problem, refs: _Refs, slot: jax.Array):
    """K of one step [tile_tokens, H] in 16 bits."""
    if not p.is_quantised:
        return refs.ring[0].at[slot]
    stored = plgpu.load(refs.ring[0].at[slot], layout=plgpu.Layout.WGMMA, optimized=False)
    mosaic.store(refs.tiles[0], mosaic.dequantised(stored, p.dtype, p.use_tma))
    mosaic.sync(p.use_tma)
    return refs.tiles[0]


def _value_tile(p: _Problem, refs: _Refs, item: _Item, slot: jax.Array, start: jax.Array):
    """V of one step [tile_tokens, H] in 16 bits, dead rows zeroed: 0 * NaN is NaN, and dead slots hold anything."""
    shape = (p.config.tile_tokens, p.head_dim)

    def clear_dead(source, target):
        values = plgpu.load(source, layout=plgpu.Layout.WGMMA, optimized=False)
        row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)
        values = mosaic.dequantised(values, p.dtype, p.use_tma) if p.is_quantised else values
        mosaic.store(target, jnp.where(_is_live(p, item, start + row), values, jnp.zeros_like(values)))
        mosaic.sync(p.use_tma)

    if p.is_quantised:
        clear_dead(refs.ring[1].at[slot], refs.tiles[1])
        return refs.tiles[1]
    is_edge = start + p.config.tile_tokens > item.seq_len
    if p.sliding_window is not None:
        is_edge |= start < item.seq_len - p.sliding_window
    pl.when(is_edge)(lambda: clear_dead(refs.ring[1].at[slot], refs.ring[1].at[slot]))
    return refs.ring[1].at[slot]


def _scale_vector(p: _Problem, refs: _Refs, which: int, slot: jax.Array) -> jax.Array:
    return plgpu.load(refs.ring_scales[which].at[slot], layout=p.layout("acc").reduce(0), optimized=False)


def _attend_step(p: _Problem, refs: _Refs, item: _Item, step: jax.Array, carry):
    """Folds tile_tokens cached tokens into the running softmax, and starts the copies of a later step."""
    acc, highest, total, ids = carry
    slot = lax.rem(step, p.config.num_stages)
    start = (item.low + step) * p.config.tile_tokens
    shape = (p.tile_rows, p.config.tile_tokens)

    mosaic.sync(p.use_tma)  # all warps are past the previous step: its slot can be filled again
    later = step + p.config.num_stages - 1
    pl.when(later < item.num_steps)(lambda: _start_copies(p, refs, item, later, ids))
    ids = _block_ids(p, refs, item, later + 1)

    _wait(p, refs, item, step, 0)
    key = _key_tile(p, refs, slot)
    scores = _matmul(p, refs.q_tile, key.transpose((1, 0)), shape)
    if p.is_quantised:
        scores *= columns_to(shape, _scale_vector(p, refs, 0, slot))
    scores = mosaic.capped(scores, p.scale, p.logits_soft_cap)
    position = start + plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=p.layout("acc"))
    live = _is_live(p, item, position)
    scores = jnp.where(live, scores, MASK_VALUE)
    weights, highest, total, shrink = mosaic.softmax_step(scores, highest, total)
    acc *= rows_to(acc.shape, shrink)

    _wait(p, refs, item, step, 1)
    value = _value_tile(p, refs, item, slot, start)
    if p.is_quantised:
        scaled = weights * columns_to(shape, _scale_vector(p, refs, 1, slot))
        weights = jnp.where(live, scaled, jnp.zeros_like(scaled))
    mosaic.store(refs.weights, weights.astype(p.dtype))
    mosaic.sync(p.use_tma)
    acc += _matmul(p, refs.weights, value, acc.shape)
    return acc, highest, total, ids


def _attend_chunk(p: _Problem, refs: _Refs, item: _Item, sink: jax.Array | None, is_first: jax.Array):
    """Output [R, H], normalised, and log2 of the softmax denominator [R], both float32, of one chunk."""
    ahead = p.config.num_stages - 1
    for step in range(ahead):
        step = jnp.int32(step)
        started = functools.partial(_start_copies, p, refs, item, step)
        pl.when(step < item.num_steps)(lambda s=step, f=started: f(_block_ids(p, refs, item, s)))
    ids = _block_ids(p, refs, item, jnp.int32(ahead))
    _load_query(p, refs, item)

    layout = p.layout("acc")
    highest = plgpu.layout_cast(jnp.full((p.tile_rows,), MASK_VALUE, jnp.float32), layout.reduce(1))
    total = plgpu.layout_cast(jnp.zeros((p.tile_rows,), jnp.float32), layout.reduce(1))
    acc = plgpu.layout_cast(jnp.zeros((p.tile_rows, p.head_dim), jnp.float32), layout)
    if sink is not None:  # it counts once: in the row's first chunk
        is_first = is_first.astype(jnp.float32)
        highest = sink * is_first + highest * (1 - is_first)
        total = total + is_first
    body = functools.partial(_attend_step, p, refs, item)
    acc, highest, total, _ = lax.fori_loop(0, item.num_steps, body, (acc, highest, total, ids))
    mosaic.sync(p.use_tma)  # the ring is read no more
    is_empty = total == 0
    total = jnp.where(is_empty, jnp.ones_like(total), total)
    return acc / rows_to(acc.shape, total), highest + jnp.log2(total)


def _decode_kernel(p: _Problem, *arrays, q_in, q_tile, weights, ring, scales, tiles, barriers):
    """One chunk of one row for one kv head."""
    q, k, v, tables, seq_lens, items, *rest = arrays
    scale_arrays = tuple(rest[:2]) if p.is_quantised else ()
    sinks = rest[-4] if p.has_sinks else None
    out, partial_out, partial_lse = rest[-3:]
    index, head = lax.axis_index("item"), lax.axis_index("kv_head")
    num_chunks = items[index, NUM_CHUNKS]

    @pl.when(num_chunks > 0)
    def _():
        row = items[index, ROW]
        low = items[index, LOW]
        item = _Item(row, items[index, TOKEN], low, items[index, HIGH] - low, seq_lens[row], head)
        (ring_k, ring_v), (staged,) = ring
        refs = _Refs(
            q, (k, v), scale_arrays, tables, seq_lens, q_in, q_tile, weights, (ring_k, ring_v), scales, tiles, barriers
        )
        sink = None
        if sinks is not None:
            sink = plgpu.load(sinks.at[head], layout=p.layout("acc").reduce(1), optimized=False)
        chunk_out, chunk_lse = _attend_chunk(p, refs, item, sink, items[index, IS_FIRST])
        mosaic.store(partial_lse.at[index, head], chunk_lse)
        mosaic.store(staged, chunk_out)
        mosaic.sync(p.use_tma)
        for g in range(p.group):
            line = mosaic.load_line(staged.at[g])
            target = head * p.group + g
            pl.when(num_chunks == 1)(lambda x=line, n=target: mosaic.store(out.at[item.token, n], x.astype(p.dtype)))
            pl.when(num_chunks > 1)(lambda x=line, n=target: mosaic.store(partial_out.at[index, n], x))


def paged_decode(
    query: jax.Array,
    key_cache: jax.Array,
    value_cache: jax.Array,
    *,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    out,
    query_start_loc: jax.Array | None = None,
    scale: float | None = None,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    config: Config | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Attends rows with one query each, in two launches.

    Arguments as for `paged_jax.attention.paged_attention`, which validates them.

    Args:
        out: Ref [T, N, H] in query's dtype; the lines of the rows' queries are written.
        query_start_loc: None: query s belongs to row s. Else only the rows with exactly one query are attended.
        config: None: `default_config` of the shape and the chip.
        interpret: run in the interpreter.

    Returns:
        lse: float32[S, N], natural logarithm of the softmax denominator, the sink included.

    Raises:
        NotImplementedError: the kernel does not take this shape, dtype or chip.
    """
    capability = mosaic.compute_capability(interpret)
    config = config or default_config(key_cache, interpret=interpret)
    p = _Problem.of(
        query,
        key_cache,
        config=config,
        scale=scale,
        sliding_window=sliding_window,
        logits_soft_cap=logits_soft_cap,
        sinks=sinks,
        use_tma=capability >= (9, 0),
        interpret=interpret,
    )
    _check(p, capability)

    num_rows, tile = seq_lens.shape[0], config.tile_tokens
    low = jnp.zeros_like(seq_lens) if sliding_window is None else jnp.maximum(seq_lens - sliding_window, 0) // tile
    if query_start_loc is None:
        token, is_in = jnp.arange(num_rows, dtype=jnp.int32), jnp.ones(num_rows, bool)
    else:
        token, is_in = query_start_loc[:-1], query_start_loc[1:] - query_start_loc[:-1] == 1
    work = decode_work(low, -(-seq_lens // tile), token, is_in, target=config.num_chunks)

    operands = [query, key_cache, value_cache, block_tables, seq_lens, work.items]
    if not p.use_tma:  # cp.async cannot skip an axis: kv heads become columns
        operands[1:3] = (pool.reshape(*pool.shape[:2], -1) for pool in operands[1:3])
    if p.is_quantised:
        operands += [k_scale, v_scale]
    if sinks is not None:
        operands.append(p.sink_rows(sinks, 1, p.tile_rows))
    num_items = work.items.shape[0]
    partial_out, partial_lse = plgpu.kernel(
        functools.partial(_decode_kernel, p),
        out_type=[
            jax.ShapeDtypeStruct((num_items, p.num_heads, p.head_dim), jnp.float32),
            jax.ShapeDtypeStruct((num_items, p.num_kv_heads, p.tile_rows), jnp.float32),
        ],
        grid=(num_items, p.num_kv_heads),
        grid_names=("item", "kv_head"),
        scratch_types=_scratch(p),
        kernel_name="paged_decode",
        interpret=mosaic.interpret_params(interpret),
    )(*operands, out)
    combine(work, partial_out, partial_lse, out, interpret=interpret)
    return row_lse(work, partial_lse, p.num_heads, has_sinks=p.has_sinks)


def default_config(key_cache: jax.Array, *, interpret: bool = False) -> Config:
    """The Config for a pool [B, block_size, K, H] and the chip; from compiled sizes, not yet from timings.

    In the interpreter, where every program costs, few chunks.
    """
    capability = mosaic.compute_capability(interpret)
    _, _, num_kv_heads, head_dim = key_cache.shape
    # wgmma's tiles of 64 rows do not fit the registers beyond 128 columns.
    use_wgmma = capability == (9, 0) and head_dim <= 128
    programs = 4 if interpret else 2 * mosaic.NUM_CORES[capability]  # two fit a core
    return Config(mma="wgmma" if use_wgmma else "mma", num_chunks=max(1, programs // num_kv_heads))


def _check(p: _Problem, capability: tuple[int, int]) -> None:
    """Raises NotImplementedError unless the kernel takes the problem on the chip."""
    chip = f"sm_{capability[0]}{capability[1]}"
    if p.config.mma == "wgmma" and capability != (9, 0):
        raise NotImplementedError(f"Config.mma is 'wgmma', which only sm_90 has; this is {chip}: take 'mma'")
    if p.group > p.tile_rows:
        raise NotImplementedError(
            f"{p.group} query heads share a kv head; paged_decode with Config.mma = {p.config.mma!r} takes up to "
            f"{p.tile_rows}"
        )
    if capability < (8, 9) and "float8" in jnp.dtype(p.cache_dtype).name:
        raise NotImplementedError(f"{chip} has no float8 numbers: take int8 for K and V")
    limit = mosaic.SHARED_MEMORY_BYTES[capability]
    if p.shared_memory_bytes > limit:
        raise NotImplementedError(
            f"paged_decode needs {p.shared_memory_bytes} bytes of shared memory for head_dim {p.head_dim}, tile_tokens "
            f"{p.config.tile_tokens} and num_stages {p.config.num_stages}; {chip} has {limit}"
        )
