"""The steps of generation: prefill_step, decode_step and decode_many, and what changes rows between them.

One state, one step, two drivers: `decode_many` runs up to K decode steps in one dispatch, block allocation, K/V writes,
attention, sampling, stop detection, publication and release included; `decode_step` is the same with K = 1, for callers
that look at every token. All of them donate the state: use the returned one and forget the old.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from paged_jax import block_table, prefix_cache
from paged_jax.batch import StepBatch, build_decode_batch, build_ragged_batch
from paged_jax.block_pool import NULL_BLOCK, Status, exclusive_cumsum
from paged_jax.block_table import Appended, append_tokens, num_prefix_blocks, release_out_of_window
from paged_jax.kv_cache import KVCache, copy_blocks
from paged_jax.logprobs import LogprobsMode, TokenLogprobs, init_logprobs, token_logprobs
from paged_jax.next_token import NextTokens, next_tokens
from paged_jax.prefix_cache import PrefixCache
from paged_jax.sampling import mask_padding
from paged_jax.state import EngineState, FinishReason, Forward, PrefillPlan, StepOutput
from paged_jax.token_rules import push_tokens


def _take(tree: Any, rows: Array) -> Any:
    """tree[rows] for every leaf; padding rows (past the end) repeat the last row."""
    return jax.tree.map(lambda x: x.at[rows].get(mode="clip"), tree)


def merge_rows(chosen: Array, new: Any, old: Any) -> Any:
    """Leaf by leaf new[s] where chosen[s], else old[s]."""
    return jax.tree.map(lambda n, o: jnp.where(jnp.expand_dims(chosen, range(1, n.ndim)), n, o), new, old)


def _append(
    state: EngineState, counts: Array, *, max_new_tokens: int, reserve: Array | int = 0
) -> tuple[EngineState, Appended]:
    """append_tokens on the state; counts the copies and evictions."""
    num_cached = state.pool.num_cached
    pool, table, appended = append_tokens(
        state.pool, state.table, counts, max_new_tokens=max_new_tokens, reserve=reserve
    )
    num_copies = jnp.sum(appended.copy_dst != 0, dtype=jnp.uint32)
    num_evicted = (num_cached - pool.num_cached).astype(jnp.uint32)
    counters = state.counters
    counters = replace(counters, copies=counters.copies + num_copies, evictions=counters.evictions + num_evicted)
    return replace(state, pool=pool, table=table, counters=counters), appended


def copy_on_write(state: EngineState, appended: Appended, implementation: str | None) -> EngineState:
    """Copies what append_tokens asks for: K, V, and the tokens that the prefix cache knows them by."""
    src, dst = appended.copy_src.reshape(-1), appended.copy_dst.reshape(-1)

    def copy(cache: KVCache, known: PrefixCache | None) -> tuple[KVCache, PrefixCache | None]:
        cache = copy_blocks(cache, src, dst, are_disjoint=True, implementation=implementation)
        return cache, known and prefix_cache.copy_tokens(known, src, dst)

    cache, known = jax.lax.cond(jnp.any(dst != 0), copy, lambda *same: same, state.cache, state.prefix_cache)
    return replace(state, cache=cache, prefix_cache=known)


def _compute(
    forward: Forward,
    params: Any,
    state: EngineState,
    batch: StepBatch,
    appended: Appended,
    counts: Array,
    max_new_tokens: int,
    implementation: str | None,
) -> tuple[EngineState, Array]:
    """Copies on write, runs the model, publishes the blocks that are full now, and gives back those that have left the
    windows of their groups.

    Args:
        batch, appended: of this step.
        counts: int32 [S] tokens that each row of the state stores in it, together at most max_new_tokens.

    Returns:
        (state, logits).
    """
    state = copy_on_write(state, appended, implementation)
    logits, cache = forward(params, batch, state.cache)
    old_lens = state.table.seq_lens - counts
    state = _publish(replace(state, cache=cache), batch, old_lens, max_new_tokens)
    pool, table = release_out_of_window(
        state.pool, state.table, old_lens, max_new_tokens=appended.slot_mapping.shape[-1]
    )
    return replace(state, pool=pool, table=table), logits


def _publish(state: EngineState, batch: StepBatch, old_lens: Array, max_new_tokens: int) -> EngineState:
    """Makes the blocks that this step has filled known to the prefix cache, if there is one."""
    known, table = state.prefix_cache, state.table
    if known is None:
        return state
    known = prefix_cache.write_tokens(known, batch.token_ids, batch.slot_mapping[known.chain_group])
    known, pool = jax.lax.cond(
        jnp.any(table.seq_lens // table.block_size > old_lens // table.block_size),
        lambda known, pool: prefix_cache.publish(
            known, pool, table, old_lens, state.rows.namespace, max_new_tokens=max_new_tokens
        ),
        lambda *same: same,
        known,
        state.pool,
    )
    return replace(state, prefix_cache=known, pool=pool)


def _commit(
    state: EngineState,
    rows: Array,
    logits: Array,
    draws: Array,
    vocab_size: int | None,
    logprobs_mode: LogprobsMode,
) -> tuple[EngineState, NextTokens, Array, Array]:
    """Draws the next token of the rows where `draws`, and retires those that finish with it.

    Args:
        rows: int32 [R] rows of the state; past the end = padding.
        logits: [R, V].
        draws: bool [R].

    Returns:
        (state, next_tokens [R], is_output [R], finish [R]).
    """
    stop_token_ids, num_remaining, length = _take(
        (state.rows.stop_token_ids, state.rows.num_remaining, state.table.seq_lens), rows
    )
    drawn = next_tokens(
        logits,
        rows,
        state.rows,
        state.rule_tables,
        lengths=length,
        takes_part=draws,
        vocab_size=vocab_size or logits.shape[-1],
        logprobs_mode=logprobs_mode,
    )
    token = drawn.token_ids
    capacity = state.table.block_ids.shape[-1] * state.table.block_size
    is_stop = jnp.any(token[:, None] == stop_token_ids, axis=1)
    is_full = (num_remaining <= 1) | (length >= capacity)
    finish = jnp.where(is_stop, FinishReason.STOP, jnp.where(is_full, FinishReason.LENGTH, FinishReason.NONE))
    finish = jnp.where(drawn.has_token, finish, FinishReason.NO_TOKEN)
    finish = jnp.where(drawn.is_finite, finish, FinishReason.ERROR)
    finish = jnp.where(draws, finish, FinishReason.NONE).astype(jnp.int32)

    target = jnp.where(draws, rows, state.last_token.shape[0])
    ended = jnp.zeros_like(state.is_active).at[target].set(finish != FinishReason.NONE, mode="drop")
    # No status: rows that drew a token hold at least one.
    pool, table, _ = block_table.release(state.pool, state.table, ended)
    state = replace(
        state,
        pool=pool,
        table=table,
        rows=replace(state.rows, num_remaining=state.rows.num_remaining.at[target].add(-1, mode="drop")),
        rule_tables=state.rule_tables and push_tokens(state.rule_tables, target, length, token),
        last_token=state.last_token.at[target].set(token, mode="drop"),
        is_active=state.is_active.at[target].set(True, mode="drop") & ~ended,
    )
    return state, drawn, draws & drawn.is_finite & drawn.has_token, finish


def _prefill_step(
    forward: Forward,
    params: Any,
    state: EngineState,
    plan: PrefillPlan,
    *,
    vocab_size: int | None = None,
    implementation: str | None = None,
    logprobs_mode: LogprobsMode = "raw",
) -> tuple[EngineState, StepOutput]:
    """Stores chunks of prompts and draws the first token of each row whose prompt is complete; active rows that take
    part store the token that they generated last and draw the next one.

    Rows that fork another row share all its blocks; the first write of each into a partially filled one copies it.

    Args:
        forward: the model, static. params: its weights.
        state: donated.
        plan: the step; a row continues where its last chunk ended.
        vocab_size: static; logits columns from here on are padding. None: there is no padding.
        implementation: static, attention implementation, None = by device.
        logprobs_mode: static, by what log-probabilities output.logprobs ranks tokens.

    Returns:
        (state, output) with K = 1. Status not OK: nothing was stored, the state is unchanged. ROW_IN_USE: an active row
        has more than one token, or a row that is to fork holds tokens; ROW_EMPTY: it forks a row without tokens in this
        step; BAD_LENGTH: more tokens than T, or a negative count; otherwise as for append_tokens.
    """
    _check_plan(plan, state)
    num_rows, max_tokens = state.is_active.shape[0], plan.token_ids.shape[0]
    row = jnp.arange(num_rows, dtype=jnp.int32)
    parents = row if plan.parents is None else plan.parents
    is_child = parents != row
    refused = _refusal(plan, state, parents)
    counts = plan.num_new_tokens * (refused == Status.OK)
    has_tokens = counts > 0
    rows = merge_rows(~state.is_active & has_tokens | is_child, plan.rows, state.rows)
    state, appended = _append(state, counts, max_new_tokens=max_tokens, reserve=rows.reserve)
    status = jnp.where(refused == Status.OK, appended.status, refused).astype(jnp.int32)
    min_free = state.pool.num_free

    def run(state: EngineState) -> tuple[EngineState, NextTokens, Array, Array, TokenLogprobs | None]:
        is_decode = state.is_active & has_tokens
        first = jnp.where(is_decode, exclusive_cumsum(counts), max_tokens)
        token_ids = plan.token_ids.at[first].set(state.last_token, mode="drop")
        state = replace(state, rows=rows)
        batch = build_ragged_batch(
            state.table,
            appended,
            counts,
            token_ids,
            kernel_block_size=state.cache.kernel_block_size,
            implementation=implementation,
        )
        last = batch.logits_indices[parents]
        batch = replace(
            batch, logits_indices=last if plan.next_token_ids is None else jnp.arange(max_tokens, dtype=jnp.int32)
        )
        state, logits = _compute(forward, params, state, batch, appended, counts, max_tokens, implementation)
        prompt_logprobs = None
        if plan.next_token_ids is not None:
            raw = mask_padding(logits.astype(jnp.float32), vocab_size or logits.shape[-1])
            prompt_logprobs = token_logprobs(raw, raw, plan.next_token_ids, mode="raw")
            logits = logits[last]
        # No status: _refusal has looked.
        pool, table, _ = block_table.fork(state.pool, state.table, parents)
        draws = (has_tokens & (plan.is_last | is_decode))[parents]
        state = replace(state, pool=pool, table=table)
        return *_commit(state, row, logits, draws, vocab_size, logprobs_mode), prompt_logprobs

    def refuse(state: EngineState) -> tuple[EngineState, NextTokens, Array, Array, TokenLogprobs | None]:
        none = jnp.zeros(num_rows, jnp.int32)
        nothing = NextTokens(
            token_ids=none,
            is_finite=none > 0,
            has_token=none > 0,
            wants_logprobs=jnp.bool_(False),
            logprobs=init_logprobs(num_rows),
        )
        prompt_logprobs = None if plan.next_token_ids is None else init_logprobs(max_tokens)
        return state, nothing, none > 0, none, prompt_logprobs

    is_ok = status == Status.OK
    state, drawn, is_output, finish, prompt_logprobs = jax.lax.cond(is_ok, run, refuse, state)
    return state, StepOutput(
        token_ids=drawn.token_ids[:, None],
        num_tokens=is_output.astype(jnp.int32),
        finish=finish,
        num_steps=is_ok.astype(jnp.int32),
        num_free=state.pool.num_free,
        num_cached=state.pool.num_cached,
        min_free=min_free,
        status=status,
        counters=state.counters,
        logprobs=jax.tree.map(lambda x: x[:, None], drawn.logprobs),
        prompt_logprobs=prompt_logprobs,
    )


def _refusal(plan: PrefillPlan, state: EngineState, parents: Array) -> Array:
    """The Status of a plan, before the pool is asked."""
    num_rows, max_tokens = state.is_active.shape[0], plan.token_ids.shape[0]
    is_child = parents != jnp.arange(num_rows, dtype=jnp.int32)
    grows = plan.num_new_tokens > 0
    has_parent = (parents >= 0) & (parents < num_rows) & grows[jnp.clip(parents, 0, num_rows - 1)]
    in_use = state.is_active & (plan.num_new_tokens > 1) | is_child & ((state.table.seq_lens + plan.num_new_tokens) > 0)
    is_too_long = jnp.sum(plan.num_new_tokens, dtype=jnp.int32) > max_tokens
    refused = jnp.where(is_too_long, Status.BAD_LENGTH, Status.OK)
    refused = jnp.where(jnp.any(is_child & ~has_parent), Status.ROW_EMPTY, refused)
    return jnp.where(jnp.any(in_use), Status.ROW_IN_USE, refused).astype(jnp.int32)


def _check_plan(plan: PrefillPlan, state: EngineState) -> None:
    """Raises ValueError unless the plan has an entry for each row of the state, and rows of the state's shapes."""
    rows = state.is_active.shape
    for name in ("num_new_tokens", "is_last", "parents"):
        array = getattr(plan, name)
        if array is not None and array.shape != rows:
            raise ValueError(
                f"PrefillPlan.{name} has shape {array.shape}; pass one entry for each of the {rows[0]} rows"
            )
    following = plan.next_token_ids
    if following is not None and following.shape != plan.token_ids.shape:
        raise ValueError(
            f"PrefillPlan.next_token_ids has shape {following.shape}; pass one for each token, {plan.token_ids.shape}"
        )
    given, expected = (jax.tree.map(lambda x: x.shape, r) for r in (plan.rows, state.rows))
    if given != expected:
        raise ValueError(f"PrefillPlan.rows has shapes {given}, those of the state are {expected}; make them equal")


def _decode_many(
    forward: Forward,
    params: Any,
    state: EngineState,
    *,
    num_steps: int,
    until_finish: Array | bool = False,
    num_rows: int | None = None,
    vocab_size: int | None = None,
    implementation: str | None = None,
    logprobs_mode: LogprobsMode = "raw",
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
        until_finish: bool []: stop after a step in which a row finishes, for others wait for its room.
        num_rows: static, rows that one step computes: the first num_rows active ones take part, further ones wait
            until one of these has ended. Default: all rows. A row's tokens do not depend on it.
        vocab_size, implementation, logprobs_mode: as in prefill_step.

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
        goes_on = (output.status == Status.OK) & ~(until_finish & jnp.any(output.finish != FinishReason.NONE))
        takes_part = state.is_active.at[rows].get(mode="fill", fill_value=False) & goes_on
        live = jnp.where(takes_part, rows, max_num_seqs)
        counts = jnp.zeros(max_num_seqs, jnp.int32).at[live].set(1, mode="drop")
        state, appended = _append(state, counts, max_new_tokens=1, reserve=state.rows.reserve)
        output = replace(
            output,
            min_free=jnp.minimum(output.min_free, state.pool.num_free),
            status=jnp.where(output.status == Status.OK, appended.status, output.status),
        )

        def run(state: EngineState, output: StepOutput) -> tuple[EngineState, StepOutput]:
            batch = build_decode_batch(
                state.table,
                appended,
                live,
                _take(state.last_token, live),
                kernel_block_size=state.cache.kernel_block_size,
                implementation=implementation,
            )
            state, logits = _compute(forward, params, state, batch, appended, counts, num_rows, implementation)
            state, drawn, is_output, finish = _commit(state, live, logits, takes_part, vocab_size, logprobs_mode)
            return state, replace(
                output,
                token_ids=output.token_ids.at[live, i].set(drawn.token_ids, mode="drop"),
                num_tokens=output.num_tokens.at[live].add(is_output.astype(jnp.int32), mode="drop"),
                finish=output.finish.at[live].set(finish, mode="drop"),
                num_steps=output.num_steps + 1,
                logprobs=jax.lax.cond(
                    drawn.wants_logprobs,
                    lambda: jax.tree.map(
                        lambda all_, new: all_.at[live, i].set(new, mode="drop"), output.logprobs, drawn.logprobs
                    ),
                    lambda: output.logprobs,
                ),
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
        num_cached=state.pool.num_cached,
        min_free=state.pool.num_free,
        status=jnp.int32(Status.OK),
        counters=state.counters,
        logprobs=init_logprobs(max_num_seqs, num_steps),
        prompt_logprobs=None,
    )
    state, output = jax.lax.fori_loop(0, num_steps, step, (state, output))
    return state, replace(
        output, num_free=state.pool.num_free, num_cached=state.pool.num_cached, counters=state.counters
    )


def _acquire_prefix(
    state: EngineState,
    row: Array,
    token_ids: Array,
    num_tokens: Array,
    namespace: Array,
    num_blocks: Array | int = 0,
) -> tuple[EngineState, Array, Array]:
    """Gives an empty row the cached blocks that hold the beginning of its prompt; its prefill continues behind them.

    Args:
        state: donated.
        row: int32 [].
        token_ids: int32 [L] the prompt, padded to any length; num_tokens: int32 [] its real length.
        namespace: int32 [] >= 0, as in RowParams.
        num_blocks: int32 [] blocks that must be free for the row, its cached ones counted as far as they are free: it
            does not start at all where it could not go on.

    Returns:
        (state, num_cached_tokens [], status). Nothing changed if not OK. ROW_IN_USE: the row holds tokens, and there
        was something to give it; OUT_OF_BLOCKS: fewer than num_blocks.

    Raises:
        ValueError: prefix caching is off.
    """
    if state.prefix_cache is None:
        raise ValueError("acquire_prefix(): this state has no prefix cache; init_state(enable_prefix_caching=True)")
    longest = state.table.block_ids.shape[-1] * state.table.block_size
    ids = prefix_cache.match_prefix(state.prefix_cache, state.pool, token_ids[:longest], num_tokens, namespace)
    # Blocks that others hold already cost nothing.
    num_shared = jnp.sum((ids != NULL_BLOCK) & (state.pool.ref_count[ids] > 0), dtype=jnp.int32)
    fits = num_blocks - num_shared <= state.pool.num_free
    pool, table, status = block_table.acquire(state.pool, state.table, row, ids * fits)
    status = jnp.where(fits, status, Status.OUT_OF_BLOCKS).astype(jnp.int32)
    is_ok = status == Status.OK
    num_cached = num_prefix_blocks(ids) * state.table.block_size * is_ok
    counters = replace(
        state.counters,
        queries=state.counters.queries + (num_tokens * is_ok).astype(jnp.uint32),
        hits=state.counters.hits + num_cached.astype(jnp.uint32),
    )
    return replace(state, pool=pool, table=table, counters=counters), num_cached, status


def _reset_prefix_cache(state: EngineState) -> tuple[EngineState, Array]:
    """Forgets everything that is cached.

    Args:
        state: donated.

    Returns:
        (state, status): BLOCKS_IN_USE, and nothing changed, unless all blocks are free.
    """
    if state.prefix_cache is None:
        return state, jnp.int32(Status.OK)
    known, pool, status = prefix_cache.reset(state.prefix_cache, state.pool)
    return replace(state, prefix_cache=known, pool=pool), status


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


_STATIC = ("vocab_size", "implementation", "logprobs_mode")
_jit = partial(jax.jit, donate_argnames="state")
prefill_step = _jit(_prefill_step, static_argnames=("forward", *_STATIC))
decode_many = _jit(_decode_many, static_argnames=("forward", "num_steps", "num_rows", *_STATIC))
decode_step = partial(decode_many, num_steps=1)
release_rows = _jit(_release_rows)
acquire_prefix = _jit(_acquire_prefix)
reset_prefix_cache = _jit(_reset_prefix_cache)
