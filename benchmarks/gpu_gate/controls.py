"""Planted faults: programs that the gate must complain of. A check that cannot fail checks nothing."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from benchmarks.gpu_gate.cases import ControlCase

POOL = (9001, 16, 8, 128)
_TRANSFORMS = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


def _spilling_kernel(x: jax.Array) -> jax.Array:
    """512 registers a thread, all alive at once."""

    def body(x_ref, out_ref, smem, barrier):
        plgpu.copy_gmem_to_smem(x_ref, smem, barrier)
        plgpu.barrier_wait(barrier)
        value = smem[...].astype(jnp.float32)
        smem[...] = (value * jnp.sum(value)).astype(smem.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem, out_ref)
        plgpu.wait_smem_to_gmem(0)

    scratch = [plgpu.SMEM(x.shape, x.dtype), plgpu.Barrier()]
    return plgpu.kernel(body, out_type=jax.ShapeDtypeStruct(x.shape, x.dtype), scratch_types=scratch)(x)


def _one_cta_per_sm(x: jax.Array) -> jax.Array:
    """200 KiB of shared memory where half an SM was intended."""

    def body(x_ref, out_ref, smem, _, barrier):
        plgpu.copy_gmem_to_smem(x_ref, smem, barrier)
        plgpu.barrier_wait(barrier)
        plgpu.copy_smem_to_gmem(smem, out_ref)
        plgpu.wait_smem_to_gmem(0)

    scratch = [plgpu.SMEM(x.shape, x.dtype), plgpu.SMEM((200, 256), jnp.float32), plgpu.Barrier()]
    return plgpu.kernel(body, out_type=jax.ShapeDtypeStruct(x.shape, x.dtype), scratch_types=scratch)(x)


def _wgmma(a: jax.Array, b: jax.Array) -> jax.Array:
    """a [64, 64] @ b [64, 64], a through registers into shared memory without the fence that wgmma needs."""

    def body(a_ref, b_ref, out_ref, raw, a_smem, b_smem, out_smem, barrier):
        plgpu.copy_gmem_to_smem(a_ref, raw, barrier)
        plgpu.copy_gmem_to_smem(b_ref, b_smem, barrier)
        plgpu.barrier_wait(barrier)
        a_smem[...] = plgpu.layout_cast(raw[...] * 2, plgpu.Layout.WGMMA)

        def multiply(acc):
            plgpu.wgmma(acc, a_smem, b_smem)
            return acc[...]

        out_smem[...] = pl.run_scoped(multiply, plgpu.ACC((64, 64), jnp.float32)).astype(jnp.bfloat16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_smem, out_ref)
        plgpu.wait_smem_to_gmem(0)

    tile = plgpu.SMEM((64, 64), jnp.bfloat16, transforms=_TRANSFORMS)
    scratch = [tile, tile, tile, tile, plgpu.Barrier(num_arrivals=2)]
    return plgpu.kernel(body, out_type=jax.ShapeDtypeStruct((64, 64), jnp.bfloat16), scratch_types=scratch)(a, b)


def _loop(step: Any) -> Any:
    """16 steps over a pool; as in a decode loop, a step may be skipped."""

    def run(pool):
        return jax.lax.fori_loop(0, 16, lambda i, p: jax.lax.cond(p[i, 0, 0, 0] < 3, step, lambda p: p, p), pool)

    return run


def _write(pool: jax.Array) -> jax.Array:
    return pool.at[pool[1, 0, 0, 0].astype(jnp.int32)].set(1, mode="drop")


def _loop_within_step(pool: jax.Array) -> jax.Array:
    return jax.lax.while_loop(lambda p: p[5, 0, 0, 0] < 5, _write, pool)


def _callback_within_step(pool: jax.Array) -> jax.Array:
    """A program with a callback does not even compile without a GPU."""
    value = jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct((), pool.dtype), pool[0, 0, 0, 0])
    return pool.at[0, 0, 0, 0].set(value)


def _predicate_read_by_host(pool: jax.Array) -> jax.Array:
    return jax.lax.while_loop(lambda p: p[0, 0, 0, 0] < 3, _write, pool)


def _rebuilt_by_select(pool: jax.Array) -> jax.Array:
    block = jax.lax.broadcasted_iota(jnp.int32, pool.shape, 0)
    return jnp.where(block == pool[0, 0, 0, 0].astype(jnp.int32), jnp.ones((), pool.dtype), pool)


#: function, shapes and dtypes of its arguments, arguments that it may overwrite.
_FAULTS = {
    "spilling_kernel": (_spilling_kernel, [((256, 256), jnp.bfloat16)], ()),
    "one_cta_per_sm": (_one_cta_per_sm, [((64, 64), jnp.float32)], ()),
    "no_fence_before_wgmma": (_wgmma, [((64, 64), jnp.bfloat16)] * 2, ()),
    "wgmma_without_wgmma": (_wgmma, [((64, 64), jnp.bfloat16)] * 2, ()),
    "pool_not_donated": (_write, [(POOL, jnp.bfloat16)], ()),
    "pool_rebuilt_by_select": (_loop(_rebuilt_by_select), [(POOL, jnp.bfloat16)], (0,)),
    "loop_within_step": (_loop(_loop_within_step), [(POOL, jnp.bfloat16)], (0,)),
    "predicate_read_by_host": (_predicate_read_by_host, [(POOL, jnp.bfloat16)], (0,)),
    "callback_within_step": (_loop(_callback_within_step), [(POOL, jnp.bfloat16)], (0,)),
}


def build(case: ControlCase, sharding: Any) -> tuple[Any, dict[str, Any]]:
    """The traced program, and the sizes to check it by."""
    run, arguments, donated = _FAULTS[case.control]
    args = [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape, dtype in arguments]
    sizes = {"pool_shapes": [list(POOL)], "cache_bytes": 0}
    return jax.jit(run, donate_argnums=donated).trace(*args), sizes
