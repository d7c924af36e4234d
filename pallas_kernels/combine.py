"""Combines the partial results of rows that were cut into several chunks, in the order of the chunks."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from pallas_kernels.mosaic import LOG2E
from pallas_kernels.reference import MASK_VALUE
from pallas_kernels.work_list import FIRST_ITEM, NUM_CHUNKS, ROW, ROW_CHUNKS, ROW_TOKEN, DecodeWork


def _combine_kernel(group: int, rows, partial_out, partial_lse, out):
    """One row and query head; rows with one chunk have written their output already."""
    row, head = lax.axis_index("row"), lax.axis_index("head")
    num_chunks = rows[row, ROW_CHUNKS]

    @pl.when(num_chunks > 1)
    def _():
        first = rows[row, FIRST_ITEM]
        kv_head, in_group = lax.div(head, group), lax.rem(head, group)

        def lse(chunk):
            return partial_lse[first + chunk, kv_head, in_group]

        highest = lax.fori_loop(1, num_chunks, lambda c, m: jnp.maximum(m, lse(c)), lse(0))

        def add(chunk, carry):
            acc, total = carry
            weight = jnp.exp2(lse(chunk) - highest)
            return acc + mosaic.load_line(partial_out.at[first + chunk, head]) * weight, total + weight

        zeros = jnp.zeros((out.shape[-1],), jnp.float32)
        zeros = plgpu.layout_cast(zeros, plgpu.Layout.WGMMA.reduce(0))
        acc, total = lax.fori_loop(0, num_chunks, add, (zeros, jnp.float32(0)))
        mosaic.store(out.at[rows[row, ROW_TOKEN], head], (acc * (1 / total)).astype(out.dtype))


def combine(work: DecodeWork, partial_out: jax.Array, partial_lse: jax.Array, out, *, interpret: bool) -> None:
    """Writes the output of the rows with several chunks.

    Args:
        partial_out: float32[I, N, H] normalised outputs of the chunks.
        partial_lse: float32[I, K, R] log2 of their softmax denominators; row r < N / K of the tile is a query head.
        out: Ref [T, N, H].
        interpret: run in the interpreter.
    """
    num_heads, num_kv_heads = partial_out.shape[1], partial_lse.shape[1]
    plgpu.kernel(
        functools.partial(_combine_kernel, num_heads // num_kv_heads),
        out_type=(),
        grid=(work.rows.shape[0], num_heads),
        grid_names=("row", "head"),
        kernel_name="paged_decode_combine",
        interpret=mosaic.interpret_params(interpret),
    )(work.rows, partial_out, partial_lse, out)


def row_lse(work: DecodeWork, partial_lse: jax.Array, num_heads: int, *, has_sinks: bool) -> jax.Array:
    """Natural logarithm of the softmax denominator, float32[S, N]; -inf where a row saw nothing and has no sink."""
    num_rows, num_kv_heads = work.rows.shape[0], partial_lse.shape[1]
    row = jnp.where(work.items[:, NUM_CHUNKS] > 0, work.items[:, ROW], num_rows)
    lse = partial_lse[:, :, : num_heads // num_kv_heads].reshape(-1, num_heads)
    highest = jax.ops.segment_max(lse, row, num_rows)
    weights = jnp.where(row[:, None] < num_rows, jnp.exp2(lse - highest.at[row].get(mode="fill", fill_value=0.0)), 0.0)
    lse = (highest + jnp.log2(jax.ops.segment_sum(weights, row, num_rows))) / LOG2E
    return lse if has_sinks else jnp.where(highest <= MASK_VALUE / 2, -jnp.inf, lse)
