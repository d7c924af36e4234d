"""The steps of generation: prefill_step, decode_step and decode_many, the only jit boundaries of the main path.

One state, one step, two drivers: `decode_many` runs up to K decode steps in one dispatch, block allocation, K/V writes,
attention, sampling, stop detection and release included; `decode_step` is the same with K = 1, for callers that look at
every token. All of them donate the state: use the returned one and forget the old.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from paged_jax import block_table
from paged_jax.batch import StepBatch, build_decode_batch, build_ragged_batch
from paged_jax.block_pool import BlockPool, Status
from paged_jax.block_table import Appended, BlockTable, append_tokens
from paged_jax.config import CacheConfig
from paged_jax.kv_cache import KVCache, copy_blocks, init_cache
from paged_jax.sampling import SamplingState, init_sampling_state, sample

#: forward(params, batch, cache) -> (logits [R, V] of batch.logits_indices, cache). Pure; hashable, for it is static.
#: JAX keeps it for ever: use one function for all engines, and pass weights through params, never through a closure.
Forward = Callable[[Any, StepBatch, KVCache], tuple[Array, KVCache]]


class FinishReason(enum.IntEnum):
    """Why a row stopped, as it comes from the device."""

    NONE = 0
    STOP = 1  # it drew one of its stop tokens
    LENGTH = 2  # it has its number of tokens, or its row of the block table is full
    ERROR = 3  # its logits were not finite; the token of that step is not part of the output


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class RowParams:
    """What a request brings to its row.

    Attributes:
        sampling: [S] arrays of sampling parameters.
        num_remaining: int32 [S] tokens that the row may still generate, at least 1.
        stop_token_ids: int32 [S, J] tokens that end the row, padded with -1, which no token equals.
    """

    sampling: SamplingState
    num_remaining: Int32[Array, " S"]
    stop_token_ids: Int32[Array, "S J"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class EngineState:
    """Everything that lives on the device between steps.

    Attributes:
        pool: free queue and reference counts.
        table: block tables and sequence lengths.
        cache: K and V.
        rows: per-row parameters of the requests.
        last_token: int32 [S] the token that the row generated last; its K/V are stored by the next step.
        is_active: bool [S] rows that take part in decode steps: the prompt is complete, the row has not finished.
    """

    pool: BlockPool
    table: BlockTable
    cache: KVCache
    rows: RowParams
    last_token: Int32[Array, " S"]
    is_active: Bool[Array, " S"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class PrefillPlan:
    """One chunk of prompt tokens, made on the host.

    Attributes:
        token_ids: int32 [T] the rows' tokens one after the other in row order, padded with 0.
        num_new_tokens: int32 [S] tokens of this chunk per row.
        is_last: bool [S] rows whose prompt is complete with this chunk: they generate their first token now.
        rows: parameters of the rows with new tokens; those of other rows are not looked at.
    """

    token_ids: Int32[Array, " T"]
    num_new_tokens: Int32[Array, " S"]
    is_last: Bool[Array, " S"]
    rows: RowParams


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class StepOutput:
    """What the host reads after a dispatch; nothing else is downloaded.

    Attributes:
        token_ids: int32 [S, K] generated tokens per row; the first num_tokens[s] are meaningful.
        num_tokens: int32 [S].
        finish: int32 [S] FinishReason of the rows that ended in this dispatch and gave back their blocks.
        num_steps: int32 [] steps that ran, <= K.
        num_free: int32 [] free blocks afterwards.
        min_free: int32 [] the fewest free blocks that there were at any moment.
        status: int32 [] Status. Not OK: the next step was refused; the state is as after num_steps steps, so that no
            token is lost and the same call can be made again when there is room.
    """

    token_ids: Int32[Array, "S K"]
    num_tokens: Int32[Array, " S"]
    finish: Int32[Array, " S"]
    num_steps: Int32[Array, ""]
    num_free: Int32[Array, ""]
    min_free: Int32[Array, ""]
    status: Int32[Array, ""]


def init_state(config: CacheConfig, *, max_stop_token_ids: int = 8) -> EngineState:
    """Allocates all device memory of the engine, once.

    Args:
        config: sizes.
        max_stop_token_ids: static width of the per-row list of stop tokens.
    """
    pool, table = block_table.init(config)
    num_rows = config.max_num_seqs
    return EngineState(
        pool=pool,
        table=table,
        cache=init_cache(config),
        rows=RowParams(
            sampling=init_sampling_state(num_rows),
            num_remaining=jnp.zeros(num_rows, jnp.int32),
            stop_token_ids=jnp.full((num_rows, max_stop_token_ids), -1, jnp.int32),
        ),
        last_token=jnp.zeros(num_rows, jnp.int32),
        is_active=jnp.zeros(num_rows, bool),
    )


def _take(tree: Any, rows: Array) -> Any:
    """tree[rows] for every leaf; padding rows (past the end) repeat the last row."""
    return jax.tree.map(lambda x: x.at[rows].get(mode="clip"), tree)


def _merge(chosen: Array, new: Any, old: Any) -> Any:
    """Leaf by leaf new[s] where chosen[s], else old[s]."""
    return jax.tree.map(lambda n, o: jnp.where(jnp.expand_dims(chosen, range(1, n.ndim)), n, o), new, old)


def _copy_on_write(cache: KVCache, appended: Appended, implementation: str | None) -> KVCache:
    src, dst = appended.copy_src.reshape(-1), appended.copy_dst.reshape(-1)
    copy = partial(copy_blocks, src=src, dst=dst, are_disjoint=True, implementation=implementation)
    return jax.lax.cond(jnp.any(dst != 0), copy, lambda c: c, cache)


def _commit(
    state: EngineState, rows: Array, logits: Array, draws: Array, vocab_size: int | None
) -> tuple[EngineState, Array, Array, Array]:
    """Draws the next token of the rows where `draws`, and retires those that finish with it.

    Args:
        rows: int32 [R] rows of the state; past the end = padding.
        logits: [R, V].
        draws: bool [R].

    Returns:
        (state, token_ids [R], is_output [R], finish [R]).
    """
    params = _take(state.rows, rows)
    length = _take(state.table.seq_lens, rows)
    token, is_finite = sample(logits, params.sampling, length, vocab_size=vocab_size or logits.shape[-1])
    capacity = state.table.block_ids.shape[-1] * state.table.block_size
    is_stop = jnp.any(token[:, None] == params.stop_token_ids, axis=1)
    is_full = (params.num_remaining <= 1) | (length >= capacity)
    finish = jnp.where(is_stop, FinishReason.STOP, jnp.where(is_full, FinishReason.LENGTH, FinishReason.NONE))
    finish = jnp.where(draws, jnp.where(is_finite, finish, FinishReason.ERROR), FinishReason.NONE).astype(jnp.int32)

    target = jnp.where(draws, rows, state.last_token.shape[0])
    ended = jnp.zeros_like(state.is_active).at[target].set(finish != FinishReason.NONE, mode="drop")
    # No status: rows that drew a token hold at least one.
    pool, table, _ = block_table.release(state.pool, state.table, ended)
    state = replace(
        state,
        pool=pool,
        table=table,
        rows=replace(state.rows, num_remaining=state.rows.num_remaining.at[target].add(-1, mode="drop")),
        last_token=state.last_token.at[target].set(token, mode="drop"),
        is_active=state.is_active.at[target].set(True, mode="drop") & ~ended,
    )
    return state, token, draws & is_finite, finish


def _prefill_step(
    forward: Forward,
    params: Any,
    state: EngineState,
    plan: PrefillPlan,
    *,
    vocab_size: int | None = None,
    reserve: Array | int = 0,
    implementation: str | None = None,
) -> tuple[EngineState, StepOutput]:
    """Stores one chunk of prompt tokens and draws the first token of each row whose prompt is complete.

    Args:
        forward: the model, static. params: its weights.
        state: donated.
        plan: the chunk; a row continues where its last chunk ended.
        vocab_size: static; logits columns from here on are padding. None: there is no padding.
        reserve: blocks that must stay free.
        implementation: static, attention implementation, None = by device.

    Returns:
        (state, output) with K = 1. Status not OK: nothing was stored, the state is unchanged. ROW_IN_USE: a row of the
        plan is active, its prompt is complete; BAD_LENGTH: more tokens than T, or a negative count; otherwise as for
        append_tokens.
    """
    _check_plan(plan, state)
    num_rows, max_tokens = state.is_active.shape[0], plan.token_ids.shape[0]
    is_busy = jnp.any(state.is_active & (plan.num_new_tokens > 0))
    is_too_long = jnp.sum(plan.num_new_tokens, dtype=jnp.int32) > max_tokens
    refused = jnp.where(is_busy, Status.ROW_IN_USE, jnp.where(is_too_long, Status.BAD_LENGTH, Status.OK))
    counts = plan.num_new_tokens * (refused == Status.OK)
    pool, table, appended = append_tokens(state.pool, state.table, counts, max_new_tokens=max_tokens, reserve=reserve)
    status = jnp.where(refused == Status.OK, appended.status, refused).astype(jnp.int32)
    state = replace(state, pool=pool, table=table)

    def run(state: EngineState) -> tuple[EngineState, Array, Array, Array]:
        batch = build_ragged_batch(state.table, appended, counts, plan.token_ids, implementation=implementation)
        logits, cache = forward(params, batch, _copy_on_write(state.cache, appended, implementation))
        state = replace(state, cache=cache, rows=_merge(counts > 0, plan.rows, state.rows))
        return _commit(state, jnp.arange(num_rows, dtype=jnp.int32), logits, plan.is_last & (counts > 0), vocab_size)

    def refuse(state: EngineState) -> tuple[EngineState, Array, Array, Array]:
        none = jnp.zeros(num_rows, jnp.int32)
        return state, none, none > 0, none

    is_ok = status == Status.OK
    state, token, is_output, finish = jax.lax.cond(is_ok, run, refuse, state)
    return state, StepOutput(
        token_ids=token[:, None],
        num_tokens=is_output.astype(jnp.int32),
        finish=finish,
        num_steps=is_ok.astype(jnp.int32),
        num_free=state.pool.num_free,
        min_free=pool.num_free,
        status=status,
    )


def _check_plan(plan: PrefillPlan, state: EngineState) -> None:
    """Raises ValueError unless the plan has an entry for each row of the state, and rows of the state's shapes."""
    rows = state.is_active.shape
    for name, shape in (("num_new_tokens", plan.num_new_tokens.shape), ("is_last", plan.is_last.shape)):
        if shape != rows:
            raise ValueError(f"PrefillPlan.{name} has shape {shape}; pass one entry for each of the {rows[0]} rows")
    given, expected = (jax.tree.map(lambda x: x.shape, r) for r in (plan.rows, state.rows))
    if given != expected:
        raise ValueError(f"PrefillPlan.rows has shapes {given}, those of the state are {expected}; make them equal")


def _decode_many(
    forward: Forward,
    params: Any,
    state: EngineState,
    *,
    num_steps: int,
    num_rows: int | None = None,
    vocab_size: int | None = None,
    implementation: str | None = None,
) -> tuple[EngineState, StepOutput]:
    """Runs up to `num_steps` decode steps for the active rows; allocation to release all on the device.

    Each step stores every active row's last token, draws the next one, and releases the rows that finish with it. The
    loop stops computing when no row is active any more or the pool cannot give a block that a row needs; one row's end
    does not stop the others. The trip count is static and finished trips are skipped, so that on a GPU the host is
    never asked.

    Args:
        forward: the model, static. params: its weights.
        state: donated.
        num_steps: static K >= 1.
        num_rows: static, rows that one step computes: the first num_rows active ones take part, further ones wait
            until one of these has ended. Default: all rows. A row's tokens do not depend on it.
        vocab_size, implementation: as in prefill_step.

    Returns:
        (state, output). Status OUT_OF_BLOCKS: the pool ran out after output.num_steps steps; nothing is lost.
    """
    max_num_seqs = state.is_active.shape[0]
    num_rows = max_num_seqs if num_rows is None else num_rows
    if num_steps < 1 or not 1 <= num_rows <= max_num_seqs:
        raise ValueError(
            f"decode_many(): num_steps must be >= 1 and num_rows in 1 ... {max_num_seqs} (max_num_seqs), got "
            f"{num_steps} and {num_rows}"
        )
    rows = jnp.nonzero(state.is_active, size=num_rows, fill_value=max_num_seqs)[0].astype(jnp.int32)

    def step(i: Array, carry: tuple[EngineState, StepOutput]) -> tuple[EngineState, StepOutput]:
        state, output = carry
        takes_part = state.is_active.at[rows].get(mode="fill", fill_value=False) & (output.status == Status.OK)
        live = jnp.where(takes_part, rows, max_num_seqs)
        counts = jnp.zeros(max_num_seqs, jnp.int32).at[live].set(1, mode="drop")
        pool, table, appended = append_tokens(state.pool, state.table, counts, max_new_tokens=1)
        state = replace(state, pool=pool, table=table)
        output = replace(
            output,
            min_free=jnp.minimum(output.min_free, pool.num_free),
            status=jnp.where(output.status == Status.OK, appended.status, output.status),
        )

        def run(state: EngineState, output: StepOutput) -> tuple[EngineState, StepOutput]:
            batch = build_decode_batch(
                state.table, appended, live, _take(state.last_token, live), implementation=implementation
            )
            logits, cache = forward(params, batch, _copy_on_write(state.cache, appended, implementation))
            state, token, is_output, finish = _commit(replace(state, cache=cache), live, logits, takes_part, vocab_size)
            return state, replace(
                output,
                token_ids=output.token_ids.at[live, i].set(token, mode="drop"),
                num_tokens=output.num_tokens.at[live].add(is_output.astype(jnp.int32), mode="drop"),
                finish=output.finish.at[live].set(finish, mode="drop"),
                num_steps=output.num_steps + 1,
            )

        runs = (appended.status == Status.OK) & jnp.any(takes_part)
        return jax.lax.cond(runs, run, lambda *unchanged: unchanged, state, output)

    none = jnp.zeros(max_num_seqs, jnp.int32)
    output = StepOutput(
        token_ids=jnp.zeros((max_num_seqs, num_steps), jnp.int32),
        num_tokens=none,
        finish=none,
        num_steps=jnp.int32(0),
        num_free=state.pool.num_free,
        min_free=state.pool.num_free,
        status=jnp.int32(Status.OK),
    )
    state, output = jax.lax.fori_loop(0, num_steps, step, (state, output))
    return state, replace(output, num_free=state.pool.num_free)


def _release_rows(state: EngineState, rows: Array) -> tuple[EngineState, Array]:
    """Ends rows from outside (abort): their blocks return to the pool.

    Args:
        state: donated.
        rows: bool [S].

    Returns:
        (state, status): ROW_EMPTY, and nothing changed, if one of them holds nothing, as after it has finished.
    """
    pool, table, status = block_table.release(state.pool, state.table, rows)
    is_active = state.is_active & ~(rows & (status == Status.OK))
    return replace(state, pool=pool, table=table, is_active=is_active), status


_jit = partial(jax.jit, donate_argnames="state")
prefill_step = _jit(_prefill_step, static_argnames=("forward", "vocab_size", "implementation"))
decode_many = _jit(_decode_many, static_argnames=("forward", "num_steps", "num_rows", "vocab_size", "implementation"))
decode_step = partial(decode_many, num_steps=1)
release_rows = _jit(_release_rows)
