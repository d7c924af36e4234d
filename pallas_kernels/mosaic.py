"""What the Mosaic GPU kernels share: where they run, how shared memory is laid out, the softmax step.

Every kernel is one program text for the chip and for the interpreter on a CPU. Where the interpreter lacks a
primitive, the function here that wraps it says so.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import warpgroup_barrier
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.reference import MASK_VALUE

LOG2E = math.log2(math.e)  # scores are kept in units of log2, for which the chip has an instruction
QUERY_DTYPES = ("bfloat16", "float16")
QUANTISED_DTYPES = ("int8", "float8_e4m3fn", "float8_e5m2")
# By chip: shared memory that one program can have, and multiprocessors.
SHARED_MEMORY_BYTES = {(8, 0): 166912, (8, 9): 101376, (9, 0): 232448, (10, 0): 232448}
NUM_CORES = {(8, 0): 108, (8, 9): 142, (9, 0): 132, (10, 0): 148}


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What is static in an attention kernel."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: Any
    cache_dtype: Any
    scale: float
    sliding_window: int | None
    logits_soft_cap: float | None
    has_sinks: bool
    interpret: bool

    @classmethod
    def of(
        cls,
        query: jax.Array,
        key_cache: jax.Array,
        *,
        scale: float | None,
        sliding_window: int | None,
        logits_soft_cap: float | None,
        sinks: jax.Array | None,
        interpret: bool,
        **more: Any,
    ):
        """The problem of a call; `more` are the fields of a subclass.

        Raises:
            NotImplementedError: no Mosaic kernel takes it.
        """
        check_supported(query, key_cache, interpret=interpret)
        return cls(
            num_heads=query.shape[1],
            num_kv_heads=key_cache.shape[2],
            head_dim=query.shape[2],
            block_size=key_cache.shape[1],
            dtype=query.dtype,
            cache_dtype=key_cache.dtype,
            scale=1.0 / math.sqrt(query.shape[2]) if scale is None else scale,
            sliding_window=sliding_window,
            logits_soft_cap=logits_soft_cap,
            has_sinks=sinks is not None,
            interpret=interpret,
            **more,
        )

    @property
    def group(self) -> int:
        """Query heads per kv head."""
        return self.num_heads // self.num_kv_heads

    @property
    def is_quantised(self) -> bool:
        """Whether K and V are 8-bit numbers with scales."""
        return self.cache_dtype != self.dtype

    def sink_rows(self, sinks: jax.Array, repeats: int, num_rows: int) -> jax.Array:
        """Sinks [N] in units of log2 by kv head and row of its tile, each head `repeats` rows: float32[K, num_rows]."""
        by_head = jnp.maximum(sinks.astype(jnp.float32) * LOG2E, MASK_VALUE).reshape(self.num_kv_heads, self.group)
        by_row = jnp.repeat(by_head, repeats, axis=1)
        return jnp.pad(by_row, ((0, 0), (0, num_rows - by_row.shape[1])), constant_values=MASK_VALUE)


def compute_capability(interpret: bool) -> tuple[int, int]:
    """The chip that a kernel is traced for: the default device, as Mosaic does; (9, 0) in the interpreter.

    Raises:
        NotImplementedError: there is no NVIDIA GPU, or none that the kernels know.
    """
    if not hasattr(plgpu, "InterpretGPUParams"):
        raise NotImplementedError(f"the Mosaic GPU kernels need JAX >= 0.11.2, this is {jax.__version__}")
    if interpret:
        return 9, 0
    device = jax.config.jax_default_device or jax.local_devices()[0]  # pyright: ignore[reportAttributeAccessIssue]
    found = getattr(device, "compute_capability", "")
    if not found or found.startswith("gfx"):
        raise NotImplementedError(
            f"the Mosaic GPU kernels need an NVIDIA GPU, the default device is {device}; on a CPU pass interpret=True "
            "to run them in the interpreter, which is for tests"
        )
    major, minor = (int(x) for x in found.split("."))
    if (major, minor) not in SHARED_MEMORY_BYTES:
        known = ", ".join(f"sm_{a}{b}" for a, b in SHARED_MEMORY_BYTES)
        raise NotImplementedError(f"the Mosaic GPU kernels know {known}, this is sm_{major}{minor}")
    return major, minor


def interpret_params(interpret: bool):
    """The interpreter with race detection, or None to compile."""
    return plgpu.InterpretGPUParams(detect_races=True) if interpret else None


def tiled(num_columns: int, dtype, *, max_bytes: int = 128, rows_per_async_copy: int | None = None) -> tuple:
    """How a matrix of that width lies in shared memory: tiles of 8 rows, swizzled as widely as possible.

    Args:
        num_columns, dtype: of the matrix.
        max_bytes: of a swizzle. wgmma multiplies by as many rows at a time as a swizzle has columns.
        rows_per_async_copy: rows that one cp.async copy brings (sm_80, sm_89); the four warps then share its tiles.

    Raises:
        NotImplementedError: no layout serves such copies.
    """
    num_bytes = num_columns * jnp.dtype(dtype).itemsize
    tile_rows = 4 if rows_per_async_copy is None else rows_per_async_copy // 8
    for swizzle in (128, 64, 32, 16):
        if swizzle <= max_bytes and num_bytes % swizzle == 0 and tile_rows * (num_bytes // swizzle) % 4 == 0:
            tiling = plgpu.TilingTransform((8, swizzle // jnp.dtype(dtype).itemsize))  # pyright: ignore
            return (tiling,) if swizzle == 16 else (tiling, plgpu.SwizzleTransform(swizzle))  # pyright: ignore
    raise NotImplementedError(
        f"four warps cannot share copies of {rows_per_async_copy} rows of {num_columns} {jnp.dtype(dtype).name}; use a "
        "larger block_size"
    )


def sync(has_tma: bool) -> None:
    """All warps meet; what they wrote to shared memory is seen by all of them, by TMA and by wgmma."""
    if has_tma:
        plgpu.commit_smem()
    else:  # commit_smem also fences TMA's proxy, which chips before sm_90 lack
        plgpu.inline_mgpu()(lambda _: warpgroup_barrier())()


def store(ref, value: jax.Array) -> None:
    """Stores registers without demanding a conflict-free layout (JAX 0.11 has no plgpu.store and never demands it)."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value


def rows_to(shape: tuple[int, ...], vector: jax.Array) -> jax.Array:
    """A vector with one value per row as a matrix."""
    return lax.broadcast_in_dim(vector, shape, [0])


def columns_to(shape: tuple[int, ...], vector: jax.Array) -> jax.Array:
    """A vector with one value per column as a matrix."""
    return lax.broadcast_in_dim(vector, shape, [1])


def capped(scores: jax.Array, scale: float, cap: float | None) -> jax.Array:
    """Scaled, soft-capped scores in units of log2."""
    if cap is None:
        return scores * (scale * LOG2E)
    return jnp.tanh(scores * (scale / cap)) * (cap * LOG2E)


def softmax_step(
    scores: jax.Array, highest: jax.Array, total: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """One step of the running softmax in units of log2.

    Returns:
        (weights [R, C], new highest [R], new total [R], factor [R] for what was accumulated so far).
    """
    new = jnp.maximum(highest, scores.max(axis=1))
    shrink = jnp.exp2(highest - new)
    weights = jnp.exp2(scores - rows_to(scores.shape, new))
    return weights, new, total * shrink + weights.sum(axis=1), shrink


def dequantised(values: jax.Array, dtype, has_tma: bool) -> jax.Array:
    """8-bit numbers as 16-bit ones, exactly, by the conversions that there are: from int8 directly only on sm_90."""
    if values.dtype == jnp.int8:
        return values.astype(dtype) if has_tma else values.astype(jnp.float16).astype(jnp.float32).astype(dtype)
    return values.astype(jnp.float32).astype(dtype)


def block_ids(
    tables, row: jax.Array, last: jax.Array, start: jax.Array, *, num_tokens: int, block_size: int
) -> tuple[jax.Array, ...]:
    """The physical blocks that hold positions start ... start + num_tokens - 1 of a row, one for each copy.

    Past the block of position `last` they repeat that one, so that no dead entry of the table is read.
    """
    last_column = lax.div(jnp.maximum(last, 0), block_size)
    piece = math.gcd(block_size, num_tokens)
    columns = [lax.div(start + offset, block_size) for offset in range(0, num_tokens, piece)]
    return tuple(tables[row, jnp.minimum(column, last_column)] for column in columns)


def start_copies(ids: tuple[jax.Array, ...], start: jax.Array, block_size: int, pool, target, ready) -> None:
    """Starts copies of positions start ... of one kv head from the blocks `ids` into shared memory.

    Args:
        pool: function of (block, offset slice) that gives the Ref of those slots of one kv head.
        target: Ref [num_tokens, H], or [num_tokens] for scales.
        ready: barrier that gets one arrival for each block; None: by cp.async.
    """
    piece = target.shape[0] // len(ids)
    for j, block in enumerate(ids):
        # The tiles of shared memory have 8 rows: the compiler must see that the offset is a multiple of 8.
        offset = 0 if piece == block_size else lax.rem(lax.div(start + j * piece, 8), block_size // 8) * 8
        source, part = pool(block, pl.ds(offset, piece)), target.at[pl.ds(j * piece, piece)]
        if ready is not None:
            plgpu.copy_gmem_to_smem(source, part, ready)
        elif len(target.shape) == 2:
            plgpu.copy_gmem_to_smem(source, part, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)
        else:  # too few bytes for cp.async
            store(part, load_line(source))


def load_line(source) -> jax.Array:
    """A vector whose length is a multiple of 8, as every warp sees it."""
    return plgpu.load(source, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)


def check_supported(query: jax.Array, key_cache: jax.Array, *, interpret: bool) -> None:
    """Raises NotImplementedError for what no Mosaic kernel takes."""
    block_size, head_dim = key_cache.shape[1], query.shape[2]
    if query.dtype.name not in QUERY_DTYPES:
        raise NotImplementedError(
            f"query has dtype {query.dtype}; the Mosaic kernels take {' and '.join(QUERY_DTYPES)}"
        )
    if key_cache.dtype != query.dtype and key_cache.dtype.name not in QUANTISED_DTYPES:
        raise NotImplementedError(
            f"key_cache has dtype {key_cache.dtype}, query {query.dtype}; the Mosaic kernels take K and V in the dtype "
            f"of the query or in {', '.join(QUANTISED_DTYPES)}"
        )
    if block_size % 8 or block_size > 128:
        raise NotImplementedError(f"block_size is {block_size}; the Mosaic kernels take multiples of 8 up to 128")
    if head_dim % 16 or head_dim > 256:
        raise NotImplementedError(f"head_dim is {head_dim}; the Mosaic kernels take multiples of 16 up to 256")
    compute_capability(interpret)
