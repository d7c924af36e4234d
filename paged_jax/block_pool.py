"""BlockPool: the free queue and the reference counts of the physical blocks, as immutable arrays.

Pure functions over the pool; all of them work under jit and vmap. Invariants 1 - 3, 5 and 7 of docs/block_manager.md
live here. Nothing outside this module knows how the queue is represented.
"""

import enum
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from paged_jax._typing import typed
from paged_jax.config import check_positive

NULL_BLOCK = 0


class Status(enum.IntEnum):
    """Why an operation was refused; a refused operation returns the state that it was given, bit for bit."""

    OK = 0
    OUT_OF_BLOCKS = 1  # fewer free blocks (beyond the reserve) than the operation needs
    TABLE_FULL = 2  # a row would need more than max_blocks_per_seq blocks
    NOT_OWNED = 3  # release of a block that has no owner (double free), of the null block, or of an unknown id
    ROW_EMPTY = 4  # the operation needs a row that holds tokens, and this one holds none
    ROW_IN_USE = 5  # the operation would overwrite a row that holds tokens
    BAD_LENGTH = 6  # a negative token count, or a truncation to more tokens than the row holds


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class BlockPool:
    """Which physical blocks are free, and how many table entries name each of the others.

    Attributes:
        free_queue: int32 [num_blocks] ring of block ids; only `count` entries from `head` on are meaningful.
        head: int32 [] index of the next block to hand out.
        count: int32 [] number of free blocks.
        ref_count: int32 [num_blocks] owners of each block; 0 for free blocks and for the null block.
    """

    free_queue: Int32[Array, " B"]
    head: Int32[Array, ""]
    count: Int32[Array, ""]
    ref_count: Int32[Array, " B"]

    @property
    def num_blocks(self) -> int:
        """Physical blocks, the null block included."""
        return self.ref_count.shape[-1]

    @property
    def num_free(self) -> Int32[Array, ""]:
        """Blocks that can be handed out."""
        return self.count


def init_pool(num_blocks: int) -> BlockPool:
    """A pool in which every block but the null block (id 0) is free, to be handed out in the order 1, 2, 3 ...

    Raises:
        ValueError: fewer than 2 blocks.
    """
    check_positive("init_pool()", num_blocks=num_blocks)
    if num_blocks < 2:
        raise ValueError(f"init_pool(): num_blocks must be >= 2 (block 0 is the null block), got {num_blocks}")
    return BlockPool(
        free_queue=(jnp.arange(num_blocks, dtype=jnp.int32) + 1) % num_blocks,
        head=jnp.int32(0),
        count=jnp.int32(num_blocks - 1),
        ref_count=jnp.zeros(num_blocks, jnp.int32),
    )


def exclusive_cumsum(x: Array, axis: int = -1) -> Array:
    """[3, 1, 2] -> [0, 3, 4]."""
    return jnp.cumsum(x, axis=axis, dtype=x.dtype) - x


def read_before_write(array: Array, index: Array) -> tuple[Array, Array]:
    """(array[index], array) such that later writes to the array wait for this read.

    Without the barrier XLA may fuse the read into a consumer behind the write, and must then copy the whole array.
    """
    return jax.lax.optimization_barrier((array[index], array))


@typed
def allocate(
    pool: BlockPool, num_blocks: Int32[Array, " R"], *, max_blocks: int, reserve: Int32[Array, ""] | int = 0
) -> tuple[BlockPool, Int32[Array, "R max_blocks"], Int32[Array, ""]]:
    """Takes num_blocks[r] blocks for each row r from the front of the free queue, all rows or none.

    Args:
        pool: may be donated.
        num_blocks: int32 [R] blocks per row, each in 0 ... max_blocks.
        max_blocks: static bound on one row's count: the width of the result.
        reserve: blocks that this call must leave free. A privileged call passes 0.

    Returns:
        (pool, ids, status): ids int32 [R, max_blocks], row r's blocks first, padded with the null block.
        Status OUT_OF_BLOCKS if the sum exceeds num_free - reserve, BAD_LENGTH if a count is negative or exceeds
        max_blocks; then nothing is taken and ids are all null.
    """
    in_range = jnp.all((num_blocks >= 0) & (num_blocks <= max_blocks))
    # max(): a call that needs nothing succeeds even below the reserve, and no reserve can add blocks.
    enough = jnp.sum(num_blocks, dtype=jnp.int32) <= jnp.maximum(pool.count - jnp.maximum(reserve, 0), 0)
    status = jnp.where(in_range, jnp.where(enough, Status.OK, Status.OUT_OF_BLOCKS), Status.BAD_LENGTH).astype(
        jnp.int32
    )
    counts = num_blocks * (status == Status.OK)

    column = jnp.arange(max_blocks, dtype=jnp.int32)[None]
    wanted = column < counts[:, None]
    position = (pool.head + exclusive_cumsum(counts)[:, None] + column) % pool.num_blocks
    queued, free_queue = read_before_write(pool.free_queue, position)
    ids = jnp.where(wanted, queued, NULL_BLOCK)
    taken = jnp.sum(counts, dtype=jnp.int32)
    return (
        replace(
            pool,
            free_queue=free_queue,
            head=(pool.head + taken) % pool.num_blocks,
            count=pool.count - taken,
            ref_count=pool.ref_count.at[ids].add(wanted.astype(jnp.int32)),
        ),
        ids,
        status,
    )


@typed
def release(pool: BlockPool, block_ids: Int32[Array, " n"]) -> tuple[BlockPool, Int32[Array, ""]]:
    """Drops one reference per listed id; blocks without an owner left join the back of the free queue in list order.

    A block listed several times loses that many references and joins at its last occurrence. Null ids are padding.

    Args:
        pool: may be donated.
        block_ids: int32 [n] ids in the order of release, 0 = padding.

    Returns:
        (pool, status): NOT_OWNED, and nothing changed, if an id would lose more references than it has or is not in
        0 ... num_blocks - 1.
    """
    listed = block_ids != NULL_BLOCK
    known = (block_ids >= 0) & (block_ids < pool.num_blocks)
    ids = jnp.where(known, block_ids, NULL_BLOCK)
    held = pool.ref_count.at[ids].add(-listed.astype(jnp.int32), mode="drop")
    ok = jnp.all(known & (~listed | (held[ids] >= 0)))
    drop = listed & known & ok
    status = jnp.where(ok, Status.OK, Status.NOT_OWNED).astype(jnp.int32)
    return push_free(replace(pool, ref_count=pool.ref_count.at[ids].add(-drop.astype(jnp.int32))), ids, drop), status


def push_free(pool: BlockPool, ids: Int32[Array, " n"], dropped: Array) -> BlockPool:
    """Appends to the free queue those `ids` (where `dropped`) whose count has just become 0, in the order given.

    For the block manager only: reference counts must be up to date already.
    """
    order = jnp.arange(1, ids.shape[0] + 1, dtype=jnp.int32)
    counts, ref_count = read_before_write(pool.ref_count, ids)
    gone = dropped & (counts == 0)
    # A block that several owners gave up in this call joins once, at its last occurrence. The counts of these blocks,
    # all 0, serve as scratch: an array of zeros of the pool's size would make the cost depend on the pool.
    target = jnp.where(gone, ids, pool.num_blocks)
    last, scratch = read_before_write(ref_count.at[target].max(order, mode="drop"), ids)
    joins = gone & (last == order)
    position = (pool.head + pool.count + exclusive_cumsum(joins.astype(jnp.int32))) % pool.num_blocks
    return replace(
        pool,
        ref_count=scratch.at[target].set(0, mode="drop"),
        free_queue=pool.free_queue.at[jnp.where(joins, position, pool.num_blocks)].set(ids, mode="drop"),
        count=pool.count + jnp.sum(joins, dtype=jnp.int32),
    )
