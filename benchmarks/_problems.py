"""Attention problems for benchmarks on a GPU: sizes, random inputs, implementations, and a check of what is timed."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import _timing
from pallas_kernels import paged_decode, paged_prefill
from pallas_kernels.mosaic_gpu import paged_attention_mosaic_gpu
from pallas_kernels.reference import paged_attention_reference
from pallas_kernels.shapes import AttentionShape
from pallas_kernels.xla import paged_attention_xla

_PIECE = 4096  # blocks of random numbers, which repeat throughout a pool
_MAX_ERROR = 0.02  # of the largest output: what rounding to bfloat16 (and of the weights) never reaches
# Rough speeds from which the number of calls in a sample is guessed.
_BYTES_PER_US, _FLOP_PER_US = 3e6, 4e8


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One attention call.

    Attributes:
        shape: heads and block size.
        seq_lens: tokens of every row.
        counts: queries of every row; None: one each.
        width: columns of the block table; None: as many as the longest row needs.
        cache_dtype: of K and V; queries are bfloat16.
    """

    shape: AttentionShape
    seq_lens: tuple[int, ...]
    counts: tuple[int, ...] | None = None
    width: int | None = None
    cache_dtype: str = "bfloat16"

    @property
    def bytes(self) -> int:
        """Live K and V, scales included: what must be read."""
        per_token = 2 * (self.shape.head_dim * jnp.dtype(self.cache_dtype).itemsize + 4 * self.is_quantised)
        return sum(self.seq_lens) * self.shape.num_kv_heads * per_token

    @property
    def flop(self) -> int:
        """Of both products, over the visible keys."""
        counts = self.counts or (1,) * len(self.seq_lens)
        visible = sum(n * (2 * length - n + 1) // 2 for n, length in zip(counts, self.seq_lens, strict=True))
        return 4 * self.shape.num_heads * self.shape.head_dim * visible

    @property
    def is_quantised(self) -> bool:
        return jnp.dtype(self.cache_dtype).itemsize == 1

    @property
    def guess_us(self) -> float:
        """About how long a good kernel takes."""
        return max(8.0, self.bytes / _BYTES_PER_US, self.flop / _FLOP_PER_US)


class Inputs(NamedTuple):
    """Arguments as `_timing.compiled` takes them; the carry is the query."""

    query: jax.Array
    large: dict[str, jax.Array]
    small: dict[str, jax.Array]
    rotated: tuple[jax.Array, ...]  # block tables


def _pool(key: jax.Array, mean: float, reps: int, blocks: int, line: tuple[int, ...], dtype: str) -> tuple:
    """A pool of reps * blocks blocks, and its scales or None.

    Values have a random mean of their own for every head and column: so the output, which is the next call's query,
    stays of the size of a query.
    """
    keys = jax.random.split(key, 3)
    values = jax.random.normal(keys[0], (blocks, *line)) + mean * jax.random.normal(keys[1], (1, 1, *line[1:]))
    scale = None
    if jnp.dtype(dtype).itemsize == 1:
        steps = 32.0 if dtype == "int8" else 1.0
        scale = jax.random.uniform(keys[2], (blocks, line[1], line[0]), minval=0.5, maxval=1.0) / steps
        values = jnp.clip(jnp.round(values * 32), -127, 127) if dtype == "int8" else values
    values = values.astype(dtype)
    repeat = lambda x: jnp.broadcast_to(x[None], (reps, *x.shape)).reshape(reps * blocks, *x.shape[1:])  # noqa: E731
    return repeat(values), None if scale is None else repeat(scale)


_make_pool = jax.jit(_pool, static_argnums=(2, 3, 4, 5))


def build(problem: Problem, seed: int, *, max_rotation: int = _timing.MAX_ROTATION) -> Inputs:
    """Random inputs: K/V blocks scattered over the pool, a block table of disjoint blocks for each of the rotation."""
    shape = problem.shape
    used = [-(-n // shape.block_size) for n in problem.seq_lens]
    num_tables = min(max_rotation, _timing.rotation(problem.bytes))
    needed = num_tables * sum(used) + 1
    blocks = min(_PIECE, -(-needed // 64) * 64)
    line = (shape.block_size, shape.num_kv_heads, shape.head_dim)
    keys = jax.random.split(jax.random.key(seed, impl="rbg"), 3)  # threefry takes seconds to compile
    sizes = (-(-needed // blocks), blocks, line, problem.cache_dtype)
    (k, k_scale), (v, v_scale) = _make_pool(keys[0], 0.0, *sizes), _make_pool(keys[1], 1.0, *sizes)

    ids = np.random.default_rng(seed).permutation(k.shape[0] - 1)[: needed - 1].astype(np.int32) + 1
    width = problem.width or max(used)
    ends = np.cumsum(used)
    tables = []
    for part in np.split(ids, num_tables):
        table = np.zeros((len(used), width), np.int32)
        for row, (count, end) in enumerate(zip(used, ends, strict=True)):
            table[row, :count] = part[end - count : end]
        tables.append(jnp.asarray(table))
    small = {"seq_lens": jnp.asarray(problem.seq_lens, jnp.int32)}
    if problem.counts is not None:
        small["query_start_loc"] = jnp.asarray(np.cumsum((0, *problem.counts)), jnp.int32)
    large = {"key_cache": k, "value_cache": v}
    if k_scale is not None:
        large |= {"k_scale": k_scale, "v_scale": v_scale}
    num_tokens = sum(problem.counts) if problem.counts else len(used)
    query = jax.random.normal(keys[2], (num_tokens, shape.num_heads, shape.head_dim), jnp.bfloat16)
    return Inputs(query, large, small, tuple(tables))


@dataclass(frozen=True)
class Implementation:
    """Something to time: op(carry, large, small, own) -> carry, and what it says of itself in the report."""

    op: Callable
    about: dict[str, Any]


def _masking(shape: AttentionShape) -> dict[str, Any]:
    return {"sliding_window": shape.sliding_window, "logits_soft_cap": shape.logits_soft_cap}


def xla(shape: AttentionShape) -> Implementation:
    """This package's XLA implementation."""

    def op(query, large, small, table):
        return paged_attention_xla(query, **large, **small, block_tables=table, **_masking(shape))[0]

    return Implementation(op, {"ran": "xla"})


def mosaic(
    shape: AttentionShape,
    inputs: Inputs,
    *,
    decode: dict[str, Any] | None = None,
    prefill: dict[str, Any] | None = None,
    is_dry: bool = False,
    is_interpreted: bool = False,
) -> Implementation:
    """This package's Mosaic kernels, with the fields of their Configs that differ from the default.

    Without a GPU they run in the interpreter, or the oracle stands in for them where that would take too long.
    """
    pool = inputs.large["key_cache"]
    decode_config = replace(paged_decode.default_config(pool, interpret=is_dry), **decode or {})
    prefill_config = replace(paged_prefill.default_config(pool), **prefill or {})
    about = {"decode_config": vars(decode_config)}
    if "query_start_loc" in inputs.small:
        about["prefill_config"] = vars(prefill_config)
    if is_dry and not is_interpreted:

        def stand_in(query, large, small, table):
            return paged_attention_reference(query, **large, **small, block_tables=table, **_masking(shape))[0]

        return Implementation(stand_in, {"ran": "reference, which stands in for mosaic_gpu in a dry run"} | about)

    def op(query, large, small, table):
        configs = {"decode_config": decode_config, "prefill_config": prefill_config}
        options = _masking(shape) | configs | {"interpret": is_interpreted}
        return paged_attention_mosaic_gpu(query, **large, **small, block_tables=table, **options)[0]

    return Implementation(op, {"ran": "mosaic_gpu, interpreted" if is_interpreted else "mosaic_gpu"} | about)


def _error(problem: Problem, inputs: Inputs, out: jax.Array) -> float:
    """Largest error of the last token's and another one's output, over the largest output, against the oracle."""
    counts = problem.counts or (1,) * len(problem.seq_lens)
    row_of = np.repeat(np.arange(len(counts)), counts)
    tokens = np.array([len(row_of) // 3, len(row_of) - 1])
    rows = row_of[tokens]
    from_end = np.cumsum(counts)[rows] - tokens
    lens = np.asarray(problem.seq_lens)[rows] - from_end + 1
    query = inputs.query[tokens].astype(jnp.float32)
    small = {"block_tables": inputs.rotated[0][rows], "seq_lens": jnp.asarray(lens, jnp.int32)}
    exact, _ = paged_attention_reference(query, **inputs.large, **small, **_masking(problem.shape))
    return float(jnp.abs(out[tokens].astype(jnp.float32) - exact).max() / jnp.abs(exact).max())


def measure(
    implementation: Implementation,
    problem: Problem,
    inputs: Inputs,
    limits: _timing.Limits,
    *,
    is_isolated: bool = True,
) -> dict[str, Any]:
    """Checks one call against the oracle, then times many.

    Raises:
        ArithmeticError: the output is wrong; a time would say nothing.
    """
    timed = prepare(implementation, problem, inputs, limits, is_isolated=is_isolated)
    return implementation.about | timed_and_checked(timed, implementation, problem, inputs, limits)


def prepare(
    implementation: Implementation,
    problem: Problem,
    inputs: Inputs,
    limits: _timing.Limits,
    *,
    is_isolated: bool = True,
) -> _timing.Timed:
    """The compiled program of many calls."""
    arguments = inputs.query, inputs.large, inputs.small, inputs.rotated
    guess = problem.guess_us
    return _timing.compiled(implementation.op, *arguments, guess_us=guess, limits=limits, is_isolated=is_isolated)


def timed_and_checked(
    timed: _timing.Timed, implementation: Implementation, problem: Problem, inputs: Inputs, limits: _timing.Limits
) -> dict[str, Any]:
    """As `measure`, of a program that is compiled already."""
    if timed.num_calls == 1:
        out = timed.program(jnp.copy(inputs.query), *timed.arguments)
    else:
        out = jax.jit(implementation.op)(inputs.query, inputs.large, inputs.small, inputs.rotated[0])
    error = _error(problem, inputs, out)
    if not error <= _MAX_ERROR:
        raise ArithmeticError(f"the output is off by {error:.3g} of its largest value, {_MAX_ERROR} is allowed")
    numbers, _ = timed.run(jnp.copy(inputs.query), limits)
    return numbers | {
        "bytes": problem.bytes,
        "flop": problem.flop,
        "rotation": len(inputs.rotated),
        "output_error": error,
    }
