"""K/V writes and block copies in place on Pallas' Mosaic GPU backend.

Both move whole lines through shared memory by TMA; no register ever holds a value. The pools are Refs: XLA aliases
them with the donated arrays, so that nothing else is read or written.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic

_TOKENS = 8  # tokens per program of write_kv
_BYTES = 16384  # bytes per pool and program of copy_blocks


def _check(pool: jax.Array, interpret: bool) -> None:
    """Raises NotImplementedError unless TMA can move the lines of the pool."""
    if mosaic.compute_capability(interpret) < (9, 0):
        raise NotImplementedError("K/V writes and block copies go by TMA, which chips before sm_90 lack")
    line_bytes = pool.shape[2] * pool.shape[3] * pool.dtype.itemsize
    if line_bytes % 16:
        raise NotImplementedError(f"the K of one token has {line_bytes} bytes; the kernels move multiples of 16")


def _lines(pool: jax.Array) -> jax.Array:
    """[B, block_size, K, H] as one line [K, H] per slot."""
    return pool.reshape(-1, *pool.shape[2:])


def _scratch(shape: tuple[int, ...], dtype) -> dict:
    """Room for K and for V of that shape, with a barrier each."""
    return {"staged": plgpu.SMEM((2, *shape), dtype), "ready": plgpu.Barrier(num_barriers=2)}


def _write_kernel(num_tokens: int, block_size: int, k_new, v_new, slots, k_pool, v_pool, staged, ready):
    first = lax.axis_index("part") * _TOKENS
    for which, new in enumerate((k_new, v_new)):
        plgpu.copy_gmem_to_smem(new.at[pl.ds(first, _TOKENS)], staged.at[which], ready.at[which])
    for which, pool in enumerate((k_pool, v_pool)):
        plgpu.barrier_wait(ready.at[which])
        for i in range(_TOKENS):
            token = jnp.minimum(first + i, num_tokens - 1)
            slot = slots[token]
            # Padding goes to the null block, which nobody reads: it need not be written.
            is_live = (first + i < num_tokens) & (slot >= block_size)
            pl.when(is_live)(
                lambda i=i, slot=slot, which=which, pool=pool: plgpu.copy_smem_to_gmem(
                    staged.at[which, i], pool.at[slot], commit_group=False
                )
            )
    plgpu.commit_smem_to_gmem_group()
    plgpu.wait_smem_to_gmem(0)


def write_kv(
    k_pool: jax.Array,
    v_pool: jax.Array,
    k: jax.Array,
    v: jax.Array,
    slot_mapping: jax.Array,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Writes K and V of T tokens into their slots, in place, in one launch.

    Args:
        k_pool, v_pool: [B, block_size, K, H]; donate them, or XLA copies them first.
        k, v: [T, K, H] in the dtype of the pools.
        slot_mapping: int32[T], block * block_size + offset, each slot at most once; slots of block 0 are skipped.
        interpret: run in the interpreter.

    Returns:
        The pools.

    Raises:
        NotImplementedError: no TMA, or lines that it cannot move.
    """
    _check(k_pool, interpret)
    block_size, num_tokens = k_pool.shape[1], k.shape[0]
    pools = [jax.new_ref(_lines(pool)) for pool in (k_pool, v_pool)]
    plgpu.kernel(
        functools.partial(_write_kernel, num_tokens, block_size),
        out_type=(),
        grid=(-(-num_tokens // _TOKENS),),
        grid_names=("part",),
        scratch_types=_scratch((_TOKENS, *k.shape[1:]), k_pool.dtype),
        kernel_name="write_kv",
        interpret=mosaic.interpret_params(interpret),
    )(k, v, slot_mapping, *pools)
    k_pool, v_pool = (jax.freeze(ref).reshape(pool.shape) for ref, pool in zip(pools, (k_pool, v_pool), strict=True))
    return k_pool, v_pool


def _copy_kernel(block_size: int, lines: int, src, dst, k_pool, v_pool, staged, ready):
    pair, part = lax.axis_index("pair"), lax.axis_index("part")
    source, target = src[pair], dst[pair]

    @pl.when(target != 0)
    def _():
        for which, pool in enumerate((k_pool, v_pool)):
            rows = pl.ds(source * block_size + part * lines, lines)
            plgpu.copy_gmem_to_smem(pool.at[rows], staged.at[which], ready.at[which])
        for which, pool in enumerate((k_pool, v_pool)):
            plgpu.barrier_wait(ready.at[which])
            rows = pl.ds(target * block_size + part * lines, lines)
            plgpu.copy_smem_to_gmem(staged.at[which], pool.at[rows])
        plgpu.wait_smem_to_gmem(0)


def copy_blocks(
    k_pool: jax.Array, v_pool: jax.Array, src: jax.Array, dst: jax.Array, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Copies blocks src[i] to dst[i] of both pools, in place, in one launch.

    The copies run side by side: no block may be the target of one and the source of another, as copy-on-write
    guarantees (its targets come from the free queue). dst 0 = no copy.

    Args:
        k_pool, v_pool: [B, block_size, K, H]; donate them, or XLA copies them first.
        src, dst: int32[C].
        interpret: run in the interpreter.

    Returns:
        The pools.

    Raises:
        NotImplementedError: no TMA, or lines that it cannot move.
    """
    _check(k_pool, interpret)
    block_size, line = k_pool.shape[1], k_pool.shape[2:]
    fitting = max(1, _BYTES // (math.prod(line) * k_pool.dtype.itemsize))
    lines = max(n for n in range(1, block_size + 1) if block_size % n == 0 and n <= fitting)
    pools = [jax.new_ref(_lines(pool)) for pool in (k_pool, v_pool)]
    plgpu.kernel(
        functools.partial(_copy_kernel, block_size, lines),
        out_type=(),
        grid=(src.shape[0], block_size // lines),
        grid_names=("pair", "part"),
        scratch_types=_scratch((lines, *line), k_pool.dtype),
        kernel_name="copy_blocks",
        interpret=mosaic.interpret_params(interpret),
    )(src, dst, *pools)
    k_pool, v_pool = (jax.freeze(ref).reshape(pool.shape) for ref, pool in zip(pools, (k_pool, v_pool), strict=True))
    return k_pool, v_pool
