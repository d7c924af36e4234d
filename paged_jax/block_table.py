"""BlockTable: logical block -> physical block for every row and cache group, over one BlockPool.

Pure functions `(pool, table, ...) -> (pool, table, ..., status)`, vectorised over rows, all or nothing, under jit and
vmap. Order everywhere: rows ascending, within a row its cache groups ascending, within a group the tail first on
release. Invariants 1 - 7 and 9 of docs/block_manager.md; invariants.py states them as code.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from paged_jax._typing import typed
from paged_jax.block_pool import (
    NULL_BLOCK,
    BlockPool,
    Status,
    allocate,
    forget,
    init_pool,
    push_free,
    read_before_write,
)
from paged_jax.block_pool import acquire as acquire_blocks
from paged_jax.config import CacheConfig, cdiv

#: Rows that one pass of a release handles on a CPU: few rows end in one step, so short passes over only these beat one
#: pass over all rows (measured: 256 rows of 512 blocks, one done: 0.08 against 1.5 - 3 ms).
_CPU_ROWS_PER_PASS = 4


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class BlockTable:
    """Which physical blocks hold each row's tokens.

    Token `p` of row `s` lies, for cache group `g`, in slot block_ids[g, s, p // block_size] * block_size +
    p % block_size. Table [7, 3, 11] with blocks of 4: positions 0, 3, 4, 8, 9 -> slots 28, 31, 12, 44, 45.

    Attributes:
        block_ids: int32 [num_groups, max_num_seqs, max_blocks_per_seq]; the null block past a row's last block, and in
            a group with a window for blocks that no later token sees.
        seq_lens: int32 [max_num_seqs] tokens stored per row, 0 for a row that is not in use.
        block_size: static, tokens per block.
        sliding_windows: static, per group the window of its layers in tokens, None = full attention.
    """

    block_ids: Int32[Array, "G S M"]
    seq_lens: Int32[Array, " S"]
    block_size: int = field(metadata={"static": True})
    sliding_windows: tuple[int | None, ...] = field(metadata={"static": True})

    @property
    def num_blocks(self) -> Int32[Array, " S"]:
        """Logical blocks per row; a group with a window may have given back the first of them."""
        return cdiv(self.seq_lens, self.block_size)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Appended:
    """What the caller of append_tokens must do now: first the copies, then the writes.

    Attributes:
        slot_mapping: int32 [G, S, max_new_tokens] slot of each new token, 0 (null block) where a row has fewer.
        copy_src: int32 [G, S] shared block whose content the row's new block needs (copy-on-write), 0 = no copy.
        copy_dst: int32 [G, S] where to copy it; sources and destinations are disjoint.
        status: int32 [] Status; not OK: nothing changed and all of the above is 0.
    """

    slot_mapping: Int32[Array, "G S N"]
    copy_src: Int32[Array, "G S"]
    copy_dst: Int32[Array, "G S"]
    status: Int32[Array, ""]


def init_table(config: CacheConfig) -> BlockTable:
    """A table whose rows are all empty."""
    shape = (config.num_groups, config.max_num_seqs, config.max_blocks_per_seq)
    return BlockTable(
        block_ids=jnp.full(shape, NULL_BLOCK, jnp.int32),
        seq_lens=jnp.zeros(config.max_num_seqs, jnp.int32),
        block_size=config.block_size,
        sliding_windows=config.sliding_windows,
    )


def first_needed_blocks(
    lens: Int32[Array, "..."], sliding_windows: Sequence[int | None], block_size: int
) -> Int32[Array, "G ..."]:
    """The logical block from which on the token behind `lens` tokens of a row looks, per group; 0 without a window.

    That token sees positions lens - W + 1 ... lens: blocks that end before them are needed no more. Window 8, blocks of
    4: 0 for 10 tokens, 1 for 11.
    """
    seen = [jnp.zeros_like(lens) if w is None else jnp.maximum(lens - (w - 1), 0) for w in sliding_windows]
    return jnp.stack(seen) // block_size


def init(config: CacheConfig) -> tuple[BlockPool, BlockTable]:
    """The whole block manager, empty."""
    return init_pool(config.num_blocks), init_table(config)


@typed
def num_blocks_needed(pool: BlockPool, table: BlockTable, num_new_tokens: Int32[Array, " S"]) -> Int32[Array, "G S"]:
    """Blocks that append_tokens would take for each group and row.

    In every group cdiv(len + new, block_size) - cdiv(len, block_size), plus one where the row would write into a
    shared, partially filled block. If every holder of that block writes, the highest row keeps it and all others copy:
    what appending row by row would do.
    """
    copies, _, _ = _copies(pool.ref_count, table, num_new_tokens)
    return copies + _growth(table, num_new_tokens)


def _check_rows(name: str, array: Array, table: BlockTable) -> None:
    """Raises ValueError unless the array has one entry for each row; an array of length 1 would count for all rows."""
    if array.shape[0] != table.seq_lens.shape[0]:
        raise ValueError(
            f"{name} has {array.shape[0]} entries, the table {table.seq_lens.shape[0]} rows; pass one for each row"
        )


def _growth(table: BlockTable, num_new_tokens: Array) -> Array:
    """New blocks per row, alike in all groups: [1, S]."""
    return (cdiv(table.seq_lens + num_new_tokens, table.block_size) - table.num_blocks)[None]


def _copies(ref_count: Array, table: BlockTable, num_new_tokens: Array) -> tuple[Array, Array, Array]:
    """(1 where a row must copy its last block before it writes else 0, that last block), both [G, S]; and ref_count."""
    row = jnp.arange(table.seq_lens.shape[0], dtype=jnp.int32)
    writes = (num_new_tokens > 0) & (table.seq_lens % table.block_size != 0)
    writes = writes[None]
    last = jnp.where(writes, table.block_ids[:, row, jnp.maximum(table.num_blocks - 1, 0)], NULL_BLOCK)
    # earlier[s] = writers before row s with the same last block; each of them has left it when row s comes to write.
    # Rows that do not write have last == NULL_BLOCK here and are equal to no writer.
    before = (row[:, None] > row[None])[None]
    earlier = jnp.sum((last[:, :, None] == last[:, None, :]) & before, axis=-1, dtype=jnp.int32)
    held, ref_count = read_before_write(ref_count, last)
    return (writes & (held - earlier > 1)).astype(jnp.int32), last, ref_count


@typed
def append_tokens(
    pool: BlockPool,
    table: BlockTable,
    num_new_tokens: Int32[Array, " S"],
    *,
    max_new_tokens: int,
    reserve: Int32[Array, " S"] | Int32[Array, ""] | int = 0,
) -> tuple[BlockPool, BlockTable, Appended]:
    """Makes room for num_new_tokens[s] more tokens in each row s, all rows or none.

    Every block that is going to be written loses its identity in the prefix cache: fresh ones, and a cached one that a
    truncated row, its only owner, writes in place.

    Args:
        pool, table: may be donated.
        num_new_tokens: int32 [S] tokens per row, each in 0 ... max_new_tokens.
        max_new_tokens: static bound on one row's tokens (1 in a decode step).
        reserve: blocks that must stay free if any row takes one, or int32 [S]: if this row takes one. A privileged row
            has 0.

    Returns:
        (pool, table, appended). Status BAD_LENGTH: a count out of range; TABLE_FULL: a row would need more than
        max_blocks_per_seq blocks; OUT_OF_BLOCKS: the pool has too few.
    """
    _check_rows("num_new_tokens", num_new_tokens, table)
    if max_new_tokens < 0:
        raise ValueError(f"append_tokens(): max_new_tokens must be >= 0, got {max_new_tokens}")
    num_groups, num_rows, width = table.block_ids.shape
    max_blocks = min(width, cdiv(max(max_new_tokens, 1) - 1, table.block_size) + 1)
    in_range = jnp.all((num_new_tokens >= 0) & (num_new_tokens <= max_new_tokens))
    new_lens = table.seq_lens + num_new_tokens
    fits = jnp.all(cdiv(new_lens, table.block_size) <= width)

    copies, last, ref_count = _copies(pool.ref_count, table, num_new_tokens)
    pool = replace(pool, ref_count=ref_count)
    need = (_growth(table, num_new_tokens) + copies) * (in_range & fits)
    reserve = jnp.max(jnp.where(jnp.any(need > 0, axis=0), reserve, 0)).astype(jnp.int32)
    pool, ids, status = allocate(pool, need.T.reshape(-1), max_blocks=max_blocks, reserve=reserve)
    ids = ids.reshape(num_rows, num_groups, max_blocks).swapaxes(0, 1)
    status = jnp.where(in_range, jnp.where(fits, status, Status.TABLE_FULL), Status.BAD_LENGTH).astype(jnp.int32)
    ok = status == Status.OK

    copies = copies * ok
    in_place = jnp.where((copies == 0) & ok, last, NULL_BLOCK)
    pool = replace(
        pool,
        ref_count=pool.ref_count.at[last].add(-copies),
        content_uid=forget(pool.content_uid, in_place),
    )
    block_ids = _write_columns(table.block_ids, ids, table.num_blocks[None] - copies, need * ok)
    table = replace(table, block_ids=block_ids, seq_lens=jnp.where(ok, new_lens, table.seq_lens))
    appended = Appended(
        slot_mapping=_new_slots(table, num_new_tokens * ok, max_new_tokens),
        copy_src=last * copies,
        copy_dst=ids[:, :, 0] * copies,
        status=status,
    )
    return pool, table, appended


def _write_columns(block_ids: Array, new_ids: Array, first: Array, count: Array) -> Array:
    """block_ids[g, s, first[g, s] + j] = new_ids[g, s, j] for j < count[g, s]."""
    num_groups, num_rows, width = block_ids.shape
    j = jnp.arange(new_ids.shape[-1], dtype=jnp.int32)
    column = jnp.where(j[None, None] < count[..., None], first[..., None] + j[None, None], width)
    group = jnp.arange(num_groups, dtype=jnp.int32)[:, None, None]
    row = jnp.arange(num_rows, dtype=jnp.int32)[None, :, None]
    return block_ids.at[group, row, column].set(new_ids, mode="drop")


def _new_slots(table: BlockTable, num_new_tokens: Array, max_new_tokens: int) -> Array:
    """Slots [G, S, max_new_tokens] of each row's last num_new_tokens tokens, 0 where a row has fewer."""
    offset = jnp.arange(max_new_tokens, dtype=jnp.int32)[None]
    real = offset < num_new_tokens[:, None]
    position = jnp.where(real, (table.seq_lens - num_new_tokens)[:, None] + offset, 0)
    row = jnp.arange(table.seq_lens.shape[0], dtype=jnp.int32)[:, None]
    return jnp.where(real[None], slots_of(table, row, position), 0)


def slots_of(table: BlockTable, row: Array, position: Array) -> Int32[Array, "G ..."]:
    """Slot of token `position` of `row` in each group: [5, 2] with blocks of 16: 15 -> 95, 16 -> 32, 23 -> 39.

    Args:
        row, position: int32 arrays of one rank that broadcast against each other; positions lie below the row's length.
    """
    block = table.block_ids[:, row, position // table.block_size]
    return block * table.block_size + (position % table.block_size)[None]


@typed
def fork(
    pool: BlockPool, table: BlockTable, parents: Int32[Array, " S"]
) -> tuple[BlockPool, BlockTable, Int32[Array, ""]]:
    """Makes row s share all blocks of row parents[s], for every s with parents[s] != s; all rows or none.

    A reparent() that overwrites no tokens.

    Args:
        pool, table: may be donated.
        parents: int32 [S]; parents[s] == s leaves row s alone.

    Returns:
        (pool, table, status): ROW_IN_USE if a child row holds tokens, ROW_EMPTY if a parent holds none or is no row.
    """
    _check_rows("parents", parents, table)
    row = jnp.arange(parents.shape[0], dtype=jnp.int32)
    in_use = jnp.any((parents != row) & (table.seq_lens > 0))
    # Past the last row there is no parent; reparent() would empty the child.
    wanted = jnp.where(parents < parents.shape[0], parents, -1)
    pool, table, status = reparent(pool, table, jnp.where(in_use, row, wanted))
    return pool, table, jnp.where(in_use, Status.ROW_IN_USE, status).astype(jnp.int32)


@typed
def reparent(
    pool: BlockPool, table: BlockTable, parents: Int32[Array, " S"]
) -> tuple[BlockPool, BlockTable, Int32[Array, ""]]:
    """Gives every row s what row parents[s] held before the call: the step of a beam search; all rows or none.

    One permutation of table rows, with repetitions: [0, 0, 2, 1] makes row 1 share the blocks of row 0, moves row 1 to
    row 3 and gives up what row 3 held. Nothing is copied: the first write into a shared, partially filled block copies
    it (append_tokens). Blocks that nobody holds any more return to the pool in the order of a release of their rows.

    Args:
        pool, table: may be donated.
        parents: int32 [S]; parents[s] == s leaves row s alone, parents[s] == S (the number of rows) empties it.

    Returns:
        (pool, table, status): ROW_EMPTY if another row's parent holds no tokens or is not in 0 ... S.
    """
    _check_rows("parents", parents, table)
    num_rows = parents.shape[0]
    row = jnp.arange(num_rows, dtype=jnp.int32)
    parent_lens = table.seq_lens.at[parents].get(mode="fill", fill_value=1)
    allowed = (parents >= 0) & (parents <= num_rows) & (parent_lens > 0)
    ok = jnp.all(allowed | (parents == row))
    parents = jnp.where(ok, parents, row)

    children = jnp.zeros_like(parents).at[parents].add(1, mode="drop")
    # A row's blocks change their count once, by children - 1. Rows with children keep their own reference throughout,
    # so that no count passes through 0.
    pool, table = _cut(pool, table, jnp.where(children > 0, table.seq_lens, 0))
    added = jnp.where(table.block_ids != NULL_BLOCK, jnp.maximum(children - 1, 0)[None, :, None], 0)
    pool = replace(pool, ref_count=pool.ref_count.at[table.block_ids].add(added))
    table = replace(
        table,
        block_ids=table.block_ids.at[:, parents].get(mode="fill", fill_value=NULL_BLOCK),
        seq_lens=table.seq_lens.at[parents].get(mode="fill", fill_value=0),
    )
    return pool, table, jnp.where(ok, Status.OK, Status.ROW_EMPTY).astype(jnp.int32)


def num_prefix_blocks(block_ids: Int32[Array, "G n"]) -> Int32[Array, ""]:
    """Logical blocks up to the last one that a group has: what `match_prefix` found."""
    column = jnp.arange(1, block_ids.shape[1] + 1, dtype=jnp.int32)
    return jnp.max(jnp.where(block_ids != NULL_BLOCK, column[None], 0), initial=0)


@typed
def acquire(
    pool: BlockPool, table: BlockTable, row: Int32[Array, ""], block_ids: Int32[Array, "G n"]
) -> tuple[BlockPool, BlockTable, Int32[Array, ""]]:
    """Gives an empty row the cached blocks `block_ids`, which it shares with whoever else holds them.

    Args:
        pool, table: may be donated.
        row: int32 [].
        block_ids: int32 [G, n] full blocks for the row's first tokens in each group, up to the same one, then null
            blocks; n <= max_blocks_per_seq. Null, too, are blocks that a group with a window does not need. All null:
            nothing happens.

    Returns:
        (pool, table, status): ROW_IN_USE if the row holds tokens, NOT_OWNED if a block is free and not cached.
    """
    num_tokens = num_prefix_blocks(block_ids) * table.block_size
    in_use = (table.seq_lens[row] > 0) & (num_tokens > 0)
    pool, status = acquire_blocks(pool, (block_ids * ~in_use).reshape(-1))
    status = jnp.where(in_use, Status.ROW_IN_USE, status).astype(jnp.int32)
    target = jnp.where((status == Status.OK) & (num_tokens > 0), row, table.seq_lens.shape[0])
    block_ids = table.block_ids.at[:, target, : block_ids.shape[1]].set(block_ids, mode="drop")
    seq_lens = table.seq_lens.at[target].set(num_tokens, mode="drop")
    return pool, replace(table, block_ids=block_ids, seq_lens=seq_lens), status


@typed
def restore(
    pool: BlockPool,
    table: BlockTable,
    numbers: Int32[Array, "G S M"],
    seq_lens: Int32[Array, " S"],
    num_blocks: Int32[Array, ""],
    *,
    max_blocks: int,
    reserve: Int32[Array, ""] | int = 0,
) -> tuple[BlockPool, BlockTable, Int32[Array, " n"], Int32[Array, ""]]:
    """Gives empty rows blocks of their own that they share among each other as `numbers` says: the way back of rows
    whose blocks were copied elsewhere and released. All or nothing; the caller writes the blocks' content.

    Args:
        pool, table: may be donated.
        numbers: int32 [G, S, M]; entry (g, s, m) of the table becomes the block numbers[g, s, m], counted from 1, of
            those taken; 0 past a row's last block and for rows that are left alone.
        seq_lens: int32 [S] tokens of each restored row, 0 for rows that are left alone.
        num_blocks: int32 [] blocks to take: the largest of the numbers.
        max_blocks: static bound on num_blocks, the length n of the ids that are returned.
        reserve: blocks that must stay free.

    Returns:
        (pool, table, ids, status): ids int32 [n] the blocks taken, in the order of their numbers, then null blocks.
        ROW_IN_USE if a restored row holds tokens, OUT_OF_BLOCKS, BAD_LENGTH if num_blocks is not in 0 ... max_blocks.
    """
    _check_rows("seq_lens", seq_lens, table)
    restored = seq_lens > 0
    in_use = jnp.any(restored & (table.seq_lens > 0))
    pool, ids, status = allocate(pool, jnp.where(in_use, 0, num_blocks)[None], max_blocks=max_blocks, reserve=reserve)
    status = jnp.where(in_use, Status.ROW_IN_USE, status).astype(jnp.int32)
    numbers = numbers * (status == Status.OK)
    entries = jnp.concatenate([jnp.zeros(1, jnp.int32), ids[0]])[numbers]
    # allocate() has counted one owner of each block already.
    more_owners = jnp.zeros(max_blocks + 1, jnp.int32).at[numbers].add(1)[1:] - 1
    pool = replace(pool, ref_count=pool.ref_count.at[ids[0]].add(jnp.where(ids[0] != NULL_BLOCK, more_owners, 0)))
    chosen = restored & (status == Status.OK)
    table = replace(
        table,
        block_ids=jnp.where(chosen[None, :, None], entries, table.block_ids),
        seq_lens=jnp.where(chosen, seq_lens, table.seq_lens),
    )
    return pool, table, ids[0], status


@typed
def truncate(
    pool: BlockPool, table: BlockTable, new_lens: Int32[Array, " S"]
) -> tuple[BlockPool, BlockTable, Int32[Array, ""]]:
    """Cuts each row s to its first new_lens[s] tokens and gives up the blocks behind them; all rows or none.

    Args:
        pool, table: may be donated.
        new_lens: int32 [S], each in 0 ... seq_lens[s]; equal to seq_lens[s] leaves the row alone.

    Returns:
        (pool, table, status): BAD_LENGTH if a length is out of range, or so short that a group has given back blocks
            that the next token would see.
    """
    _check_rows("new_lens", new_lens, table)
    ok = jnp.all((new_lens >= 0) & (new_lens <= table.seq_lens)) & _has_needed_blocks(table, new_lens)
    status = jnp.where(ok, Status.OK, Status.BAD_LENGTH).astype(jnp.int32)
    return *_cut(pool, table, jnp.where(ok, new_lens, table.seq_lens)), status


@typed
def release(
    pool: BlockPool, table: BlockTable, rows: Bool[Array, " S"]
) -> tuple[BlockPool, BlockTable, Int32[Array, ""]]:
    """Empties the chosen rows; blocks without an owner left return to the pool. All rows or none.

    Args:
        pool, table: may be donated.
        rows: bool [S].

    Returns:
        (pool, table, status): ROW_EMPTY if a chosen row holds nothing, as after an earlier release.
    """
    _check_rows("rows", rows, table)
    ok = ~jnp.any(rows & (table.seq_lens == 0))
    status = jnp.where(ok, Status.OK, Status.ROW_EMPTY).astype(jnp.int32)
    return *_cut(pool, table, jnp.where(rows & ok, 0, table.seq_lens)), status


def _has_needed_blocks(table: BlockTable, lens: Array) -> Array:
    """Whether every row cut to `lens` tokens would have the blocks that its next token sees."""
    if not any(table.sliding_windows):
        return jnp.bool_(True)
    first = first_needed_blocks(lens, table.sliding_windows, table.block_size)
    row = jnp.arange(lens.shape[0], dtype=jnp.int32)[None]
    group = jnp.arange(first.shape[0], dtype=jnp.int32)[:, None]
    has_first = table.block_ids[group, row, first] != NULL_BLOCK
    return jnp.all(has_first | (first >= cdiv(lens, table.block_size)[None]))


def release_out_of_window(
    pool: BlockPool, table: BlockTable, old_lens: Int32[Array, " S"], *, max_new_tokens: int
) -> tuple[BlockPool, BlockTable]:
    """Gives back the blocks that have left the windows of their groups since rows held old_lens tokens.

    Called when a step has read them: the null block takes their place, and the next token sees none of them. Rows that
    still hold what they gave up in another row keep it. Nothing is refused.

    Args:
        pool, table: may be donated.
        old_lens: int32 [S] tokens per row before the step; equal to the table's where nothing happened.
        max_new_tokens: static bound on one row's new tokens.
    """
    windowed = [g for g, w in enumerate(table.sliding_windows) if w is not None]
    if not windowed:
        return pool, table
    windows = [table.sliding_windows[g] for g in windowed]
    first, end = (first_needed_blocks(n, windows, table.block_size) for n in (old_lens, table.seq_lens))

    def drop(pool: BlockPool, block_ids: Array) -> tuple[BlockPool, Array]:
        width, num_columns = block_ids.shape[-1], cdiv(max_new_tokens, table.block_size)
        # Tail first, like all releases.
        column = end[..., None] - 1 - jnp.arange(num_columns, dtype=jnp.int32)[None, None]
        leaves = column >= first[..., None]
        group = jnp.array(windowed, jnp.int32)[:, None, None]
        row = jnp.arange(old_lens.shape[0], dtype=jnp.int32)[None, :, None]
        ids, block_ids = read_before_write(block_ids, (group, row, jnp.where(leaves, column, 0)))
        dropped = leaves & (ids != NULL_BLOCK)
        block_ids = block_ids.at[group, row, jnp.where(dropped, column, width)].set(NULL_BLOCK, mode="drop")
        ids, dropped = (x.swapaxes(0, 1).reshape(-1) for x in (jnp.where(dropped, ids, NULL_BLOCK), dropped))
        pool = replace(pool, ref_count=pool.ref_count.at[ids].add(-dropped.astype(jnp.int32)))
        return push_free(pool, ids, dropped), block_ids

    pool, block_ids = jax.lax.cond(jnp.any(end > first), drop, lambda *same: same, pool, table.block_ids)
    return pool, replace(table, block_ids=block_ids)


def _cut(pool: BlockPool, table: BlockTable, new_lens: Array) -> tuple[BlockPool, BlockTable]:
    """Drops the table entries at and past cdiv(new_lens, block_size) of every row."""
    num_rows = new_lens.shape[0]
    keep = cdiv(new_lens, table.block_size)
    cut = keep < table.num_blocks
    rows = jnp.nonzero(cut, size=num_rows, fill_value=num_rows)[0].astype(jnp.int32)

    def passes(pool: BlockPool, block_ids: Array) -> tuple[BlockPool, Array]:
        size = min(_CPU_ROWS_PER_PASS, num_rows)
        padded = jnp.pad(rows, (0, -num_rows % size), constant_values=num_rows)

        def drop(i: Array, carry: tuple[BlockPool, Array]) -> tuple[BlockPool, Array]:
            return _drop_entries(carry[0], carry[1], jax.lax.dynamic_slice(padded, (i * size,), (size,)), keep)

        return jax.lax.fori_loop(0, cdiv(jnp.sum(cut, dtype=jnp.int32), size), drop, (pool, block_ids))

    def at_once(pool: BlockPool, block_ids: Array) -> tuple[BlockPool, Array]:
        # In most decode steps no row ends, and then a GPU skips the launches.
        return jax.lax.cond(
            jnp.any(cut), lambda p, b: _drop_entries(p, b, rows, keep), lambda p, b: (p, b), pool, block_ids
        )

    pool, block_ids = jax.lax.platform_dependent(pool, table.block_ids, cpu=passes, default=at_once)
    return pool, replace(table, block_ids=block_ids, seq_lens=new_lens)


def _drop_entries(pool: BlockPool, block_ids: Array, rows: Array, keep: Array) -> tuple[BlockPool, Array]:
    """Drops the entries at and past column keep[row] of the listed rows (ascending; out of range = padding)."""
    ids = block_ids.at[:, rows].get(mode="fill", fill_value=NULL_BLOCK)
    first = keep.at[rows].get(mode="fill", fill_value=0)
    behind = jnp.arange(ids.shape[-1], dtype=jnp.int32)[None] >= first[:, None]
    dropped = behind[None] & (ids != NULL_BLOCK)
    block_ids = block_ids.at[:, rows].set(jnp.where(dropped, NULL_BLOCK, ids), mode="drop")
    pool = replace(pool, ref_count=pool.ref_count.at[ids].add(-dropped.astype(jnp.int32)))
    # Rows, then groups, then the tail first.
    flat = [jnp.flip(x, -1).swapaxes(0, 1).reshape(-1) for x in (ids, dropped)]
    return push_free(pool, *flat), block_ids
