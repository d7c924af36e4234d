"""BlockPool: the free queues, the reference counts and the identities of the physical blocks, as immutable arrays.

Pure functions over the pool; all of them work under jit and vmap. Invariants 1 - 3, 5 and 7 of docs/block_manager.md
live here. Nothing outside this module knows how the queues are represented.
"""

import enum
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from paged_jax._typing import typed
from paged_jax.config import check_positive

NULL_BLOCK = 0
#: Rows of the free queues: blocks without an identity are reused before cached ones.
UNCACHED, CACHED = 0, 1


class Status(enum.IntEnum):
    """Why an operation was refused; a refused operation returns the state that it was given, bit for bit."""

    OK = 0
    OUT_OF_BLOCKS = 1  # fewer free blocks (beyond the reserve) than the operation needs
    TABLE_FULL = 2  # a row would need more than max_blocks_per_seq blocks
    NOT_OWNED = 3  # release of a block without owner (double free), acquire of a free uncached one, or an unknown id
    ROW_EMPTY = 4  # the operation needs a row that holds tokens, and this one holds none
    ROW_IN_USE = 5  # the operation would overwrite a row that holds tokens
    BAD_LENGTH = 6  # a negative token count, or a truncation to more tokens than the row holds
    BLOCKS_IN_USE = 7  # the operation needs a pool whose blocks are all free


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class BlockPool:
    """Which physical blocks are free, how many table entries name each of the others, and which are cached.

    Attributes:
        free_queue: int32 [2, num_blocks] two rings of block ids, of uncached and of cached free blocks; in each, only
            `count` entries from `head` on are meaningful.
        head: int32 [2] index of the next block to hand out.
        count: int32 [2] number of free blocks.
        ref_count: int32 [num_blocks] owners of each block; 0 for free blocks and for the null block.
        content_uid: int32 [num_blocks] identity of the block's content in the prefix cache, 0 = uncached. Blocks with
            one uid hold the K/V of one token chain; a uid is never given to another chain.
    """

    free_queue: Int32[Array, "2 B"]
    head: Int32[Array, " 2"]
    count: Int32[Array, " 2"]
    ref_count: Int32[Array, " B"]
    content_uid: Int32[Array, " B"]

    @property
    def num_blocks(self) -> int:
        """Physical blocks, the null block included."""
        return self.ref_count.shape[-1]

    @property
    def num_cached(self) -> Int32[Array, ""]:
        """Free blocks whose content is cached."""
        return self.count[CACHED]

    @property
    def num_free(self) -> Int32[Array, ""]:
        """Blocks that can be handed out, cached ones included."""
        return self.count[UNCACHED] + self.count[CACHED]


def init_pool(num_blocks: int) -> BlockPool:
    """A pool in which every block but the null block (id 0) is free, to be handed out in the order 1, 2, 3 ...

    Raises:
        ValueError: fewer than 2 blocks.
    """
    check_positive("init_pool()", num_blocks=num_blocks)
    if num_blocks < 2:
        raise ValueError(f"init_pool(): num_blocks must be >= 2 (block 0 is the null block), got {num_blocks}")
    none = jnp.zeros(num_blocks, jnp.int32)
    return BlockPool(
        free_queue=jnp.stack([(jnp.arange(num_blocks, dtype=jnp.int32) + 1) % num_blocks, none]),
        head=jnp.zeros(2, jnp.int32),
        count=jnp.array([num_blocks - 1, 0], jnp.int32),
        ref_count=none,
        content_uid=jnp.zeros(num_blocks, jnp.int32),
    )


def exclusive_cumsum(x: Array, axis: int = -1) -> Array:
    """[3, 1, 2] -> [0, 3, 4]."""
    return jnp.cumsum(x, axis=axis, dtype=x.dtype) - x


def read_before_write(array: Array, index: Array | tuple[Array, ...]) -> tuple[Array, Array]:
    """(array[index], array) such that later writes to the array wait for this read.

    Without the barrier XLA may fuse the read into a consumer behind the write, and must then copy the whole array.
    """
    return jax.lax.optimization_barrier((array[index], array))


@typed
def allocate(
    pool: BlockPool, num_blocks: Int32[Array, " R"], *, max_blocks: int, reserve: Int32[Array, ""] | int = 0
) -> tuple[BlockPool, Int32[Array, "R max_blocks"], Int32[Array, ""]]:
    """Takes num_blocks[r] blocks for each row r from the front of the free queues, all rows or none.

    Uncached blocks go first, in the order of their release; then cached ones, least recently used first, and these lose
    their identity.

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
    enough = jnp.sum(num_blocks, dtype=jnp.int32) <= jnp.maximum(pool.num_free - jnp.maximum(reserve, 0), 0)
    status = jnp.where(in_range, jnp.where(enough, Status.OK, Status.OUT_OF_BLOCKS), Status.BAD_LENGTH).astype(
        jnp.int32
    )
    counts = num_blocks * (status == Status.OK)

    column = jnp.arange(max_blocks, dtype=jnp.int32)[None]
    wanted = column < counts[:, None]
    rank = exclusive_cumsum(counts)[:, None] + column
    queued, free_queue = read_before_write(pool.free_queue, _place(pool, rank))
    ids = jnp.where(wanted, queued, NULL_BLOCK)
    taken = jnp.sum(counts, dtype=jnp.int32)
    from_uncached = jnp.minimum(taken, pool.count[UNCACHED])
    taken_each = jnp.stack([from_uncached, taken - from_uncached])
    return (
        replace(
            pool,
            free_queue=free_queue,
            head=(pool.head + taken_each) % pool.num_blocks,
            count=pool.count - taken_each,
            ref_count=pool.ref_count.at[ids].add(wanted.astype(jnp.int32)),
            content_uid=forget(pool.content_uid, ids),
        ),
        ids,
        status,
    )


def _place(pool: BlockPool, rank: Array) -> tuple[Array, Array]:
    """Where in free_queue the block stands that is handed out after `rank` others."""
    queue = (rank >= pool.count[UNCACHED]).astype(jnp.int32)
    return queue, (pool.head[queue] + rank - queue * pool.count[UNCACHED]) % pool.num_blocks


def forget(content_uid: Array, ids: Array) -> Array:
    """The identities without those of the blocks `ids` (any shape, null = padding)."""
    return content_uid.at[ids].set(0)


@typed
def acquire(pool: BlockPool, block_ids: Int32[Array, " n"]) -> tuple[BlockPool, Int32[Array, ""]]:
    """Adds one reference per listed id: an owned block gets one more owner, a free cached one leaves its queue.

    Costs a pass over the cached queue if one of the blocks is free, and nothing of the pool's size otherwise.

    Args:
        pool: may be donated.
        block_ids: int32 [n], 0 = padding.

    Returns:
        (pool, status): NOT_OWNED, and nothing changed, if an id is free and not cached, or is not in
        0 ... num_blocks - 1.
    """
    listed = block_ids != NULL_BLOCK
    known = (block_ids >= 0) & (block_ids < pool.num_blocks)
    ids = jnp.where(known, block_ids, NULL_BLOCK)
    is_free = listed & (pool.ref_count[ids] == 0)
    ok = jnp.all(known & (~is_free | (pool.content_uid[ids] > 0)))
    leaves = is_free & ok
    pool = jax.lax.cond(jnp.any(leaves), _leave_cached_queue, lambda pool, *_: pool, pool, ids, leaves)
    status = jnp.where(ok, Status.OK, Status.NOT_OWNED).astype(jnp.int32)
    return replace(pool, ref_count=pool.ref_count.at[ids].add((listed & ok).astype(jnp.int32))), status


def _leave_cached_queue(pool: BlockPool, ids: Array, leaves: Array) -> BlockPool:
    """Takes the blocks `ids` (where `leaves`) out of the cached queue, which keeps its order and starts at 0 again."""
    entry = jnp.arange(pool.num_blocks, dtype=jnp.int32)
    queue = pool.free_queue[CACHED, (pool.head[CACHED] + entry) % pool.num_blocks]
    gone = jnp.zeros(pool.num_blocks, bool).at[jnp.where(leaves, ids, pool.num_blocks)].set(True, mode="drop")
    stays = (entry < pool.count[CACHED]) & ~gone[queue]
    position = jnp.where(stays, exclusive_cumsum(stays.astype(jnp.int32)), pool.num_blocks)
    return replace(
        pool,
        free_queue=pool.free_queue.at[CACHED, position].set(queue, mode="drop"),
        head=pool.head.at[CACHED].set(0),
        # Not count - len(ids): one block may be listed several times.
        count=pool.count.at[CACHED].set(jnp.sum(stays, dtype=jnp.int32)),
    )


@typed
def release(pool: BlockPool, block_ids: Int32[Array, " n"]) -> tuple[BlockPool, Int32[Array, ""]]:
    """Drops one reference per listed id; blocks without an owner left join the back of their queue in list order.

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
    """Appends to the free queues those `ids` (where `dropped`) whose count has just become 0, in the order given.

    Blocks with an identity join the cached queue, the others the uncached one. For the block manager only: reference
    counts must be up to date already.
    """
    order = jnp.arange(1, ids.shape[0] + 1, dtype=jnp.int32)
    counts, ref_count = read_before_write(pool.ref_count, ids)
    gone = dropped & (counts == 0)
    # A block that several owners gave up in this call joins once, at its last occurrence. The counts of these blocks,
    # all 0, serve as scratch: an array of zeros of the pool's size would make the cost depend on the pool.
    target = jnp.where(gone, ids, pool.num_blocks)
    last, scratch = read_before_write(ref_count.at[target].max(order, mode="drop"), ids)
    joins = gone & (last == order)
    queue = (pool.content_uid[ids] > 0).astype(jnp.int32)
    joins_each = (joins[None] & (queue[None] == jnp.arange(2, dtype=jnp.int32)[:, None])).astype(jnp.int32)
    rank = jnp.sum(exclusive_cumsum(joins_each) * joins_each, axis=0, dtype=jnp.int32)
    position = (pool.head[queue] + pool.count[queue] + rank) % pool.num_blocks
    return replace(
        pool,
        ref_count=scratch.at[target].set(0, mode="drop"),
        free_queue=pool.free_queue.at[queue, jnp.where(joins, position, pool.num_blocks)].set(ids, mode="drop"),
        count=pool.count + jnp.sum(joins_each, axis=1, dtype=jnp.int32),
    )


def forget_all(pool: BlockPool) -> BlockPool:
    """No block is cached any more; free cached ones go behind the uncached ones. A pass over the pool."""
    order = pool.free_queue[_place(pool, jnp.arange(pool.num_blocks, dtype=jnp.int32))]
    return replace(
        pool,
        free_queue=pool.free_queue.at[UNCACHED].set(order),
        head=jnp.zeros_like(pool.head),
        count=jnp.stack([pool.num_free, jnp.zeros_like(pool.num_free)]),
        content_uid=jnp.zeros_like(pool.content_uid),
    )
