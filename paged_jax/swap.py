"""Swapping: rows leave the device, K/V and all, and come back later into other blocks.

The device half of preemption by swap. `read_blocks` copies blocks out, after which `release_rows` ends their rows;
`restore_rows` gives new blocks to the rows when they return, all or nothing, and `write_blocks` fills these.
"""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32, Shaped

from paged_jax import block_table, kv_cache
from paged_jax.block_pool import Status
from paged_jax.decode import merge_rows
from paged_jax.state import EngineState, RowParams


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class BlockContent:
    """What blocks hold.

    Attributes:
        kv: as `kv_cache.read_blocks` gives it: of all K, V and scale arrays the kernel blocks.
        token_ids: int32 [n, block_size] as far as the prefix cache knows them; None: there is no prefix cache.
    """

    kv: tuple[Shaped[Array, "m ..."], ...]
    token_ids: Int32[Array, "n block"] | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class RowPlan:
    """Rows that return.

    Attributes:
        numbers: int32 [G, S, M] which of the returning blocks each table entry is, counted from 1; 0 = none.
        num_blocks: int32 [] returning blocks, a shared one counted once.
        seq_lens: int32 [S] tokens that each returning row holds, 0 for all others.
        rows: parameters of the returning rows; others are not looked at.
        last_token: int32 [S] the token that each returning row generated last.
        is_active: bool [S] returning rows that generate already.
        reserve: int32 [] blocks that must stay free.
    """

    numbers: Int32[Array, "G S M"]
    num_blocks: Int32[Array, ""]
    seq_lens: Int32[Array, " S"]
    rows: RowParams
    last_token: Int32[Array, " S"]
    is_active: Bool[Array, " S"]
    reserve: Int32[Array, ""]


def _read_blocks(state: EngineState, block_ids: Array) -> BlockContent:
    """The content of blocks int32 [n]; the state is not donated."""
    known = state.prefix_cache
    return BlockContent(
        kv=kv_cache.read_blocks(state.cache, block_ids), token_ids=None if known is None else known.token_ids[block_ids]
    )


def _restore_rows(state: EngineState, plan: RowPlan) -> tuple[EngineState, Array, Array]:
    """Gives the returning rows blocks of their own, shared among each other as they were; none of them is cached.

    Args:
        state: donated.

    Returns:
        (state, block_ids [n], status): the ids of the blocks in the order of their numbers, then null blocks. The
        caller fills them by write_blocks before any step runs. Not OK, and nothing changed: as for block_table.restore.
    """
    max_blocks = min(plan.numbers.size, state.pool.num_blocks - 1)
    pool, table, ids, status = block_table.restore(
        state.pool,
        state.table,
        plan.numbers,
        plan.seq_lens,
        plan.num_blocks,
        max_blocks=max_blocks,
        reserve=plan.reserve,
    )
    returns = (plan.seq_lens > 0) & (status == Status.OK)
    num_evicted = (state.pool.num_cached - pool.num_cached).astype(jnp.uint32)
    return (
        replace(
            state,
            pool=pool,
            table=table,
            counters=replace(state.counters, evictions=state.counters.evictions + num_evicted),
            rows=merge_rows(returns, plan.rows, state.rows),
            last_token=jnp.where(returns, plan.last_token, state.last_token),
            is_active=jnp.where(returns, plan.is_active, state.is_active),
        ),
        ids,
        status,
    )


def _write_blocks(state: EngineState, block_ids: Array, content: BlockContent) -> EngineState:
    """Fills blocks int32 [n], which restore_rows has just given out (null = padding).

    Args:
        state: donated.
    """
    known = state.prefix_cache
    if known is not None:
        known = replace(known, token_ids=known.token_ids.at[block_ids].set(content.token_ids))
    return replace(state, cache=kv_cache.write_blocks(state.cache, block_ids, content.kv), prefix_cache=known)


read_blocks = jax.jit(_read_blocks)
_jit = partial(jax.jit, donate_argnames="state")
restore_rows = _jit(_restore_rows)
write_blocks = _jit(_write_blocks)
