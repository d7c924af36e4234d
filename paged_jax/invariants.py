"""The invariants of docs/block_manager.md as code, for tests and debugging."""

import numpy as np

from paged_jax.block_pool import CACHED, NULL_BLOCK, UNCACHED, BlockPool
from paged_jax.block_table import BlockTable
from paged_jax.config import cdiv
from paged_jax.prefix_cache import GROUP, PARENT, SLOT, PrefixCache


class InvariantError(RuntimeError):
    """The block manager's state contradicts itself: a bug, never a user's mistake."""


def require(condition: object, invariant: int, message: str) -> None:
    """Raises InvariantError unless the condition holds."""
    if not condition:
        raise InvariantError(f"invariant {invariant}: {message}")


def check_invariants(pool: BlockPool, table: BlockTable, cache: PrefixCache | None = None) -> None:
    """Checks invariants 1 - 4, and what can be seen of 7 and 8, on the host; for tests and debugging.

    Raises:
        InvariantError: naming the invariant and the numbers that contradict it.
    """
    ref, ids, lens = (np.asarray(x) for x in (pool.ref_count, table.block_ids, table.seq_lens))
    uid, head, counts, queues = (np.asarray(x) for x in (pool.content_uid, pool.head, pool.count, pool.free_queue))
    num_blocks, width, count = len(ref), ids.shape[-1], int(counts.sum())

    require(0 <= count < num_blocks, 1, f"{count} free blocks in a pool of {num_blocks}")
    queue, cached = (queues[q, (head[q] + np.arange(counts[q])) % num_blocks] for q in (UNCACHED, CACHED))
    require((uid[queue] == 0).all(), 7, f"cached blocks {queue[uid[queue] != 0].tolist()} in the uncached queue")
    require((uid[cached] > 0).all(), 7, f"uncached blocks {cached[uid[cached] <= 0].tolist()} in the cached queue")
    require((uid >= 0).all() and uid[NULL_BLOCK] == 0, 8, "a negative uid, or the null block is cached")
    queue = np.concatenate([queue, cached])
    require(len(set(queue.tolist())) == count, 1, f"the free queues hold a block twice: {queue.tolist()}")
    require(NULL_BLOCK not in queue, 3, "the null block is in the free queue")
    require(ref[NULL_BLOCK] == 0, 3, f"the null block has ref_count {ref[NULL_BLOCK]}")
    require((ref >= 0).all(), 2, f"negative ref_count: {ref.tolist()}")
    owned = int((ref > 0).sum())
    require(owned + count + 1 == num_blocks, 1, f"{owned} owned + {count} free + 1 null != {num_blocks} blocks")
    require((ref[queue] == 0).all(), 1, f"free blocks with owners: {queue[ref[queue] > 0].tolist()}")
    require(((ids >= 0) & (ids < num_blocks)).all(), 4, "a table entry is not a block id")
    uses = np.bincount(ids[ids != NULL_BLOCK].ravel(), minlength=num_blocks)
    require((uses == ref).all(), 2, f"ref_count {ref.tolist()} but the tables name the blocks {uses.tolist()} times")
    require(((lens >= 0) & (lens <= width * table.block_size)).all(), 4, f"row lengths {lens.tolist()} out of range")
    for group, window in enumerate(table.sliding_windows):
        column, end = np.arange(width), cdiv(lens, table.block_size)[:, None]
        needed = np.maximum(lens - window + 1, 0)[:, None] // table.block_size if window else np.zeros_like(end)
        held = ids[group] != NULL_BLOCK
        first = np.where(held.any(axis=1), held.argmax(axis=1), end[:, 0])[:, None]
        require(
            (held == ((first <= column) & (column < end))).all(), 4, "a row's blocks have gaps or reach past its end"
        )
        require((first <= np.minimum(needed, end)).all(), 4, f"a row of group {group} lacks blocks that it needs")
    for row in range(len(lens)):
        mine = ids[:, row][ids[:, row] != NULL_BLOCK]
        require(len(set(mine.tolist())) == mine.size, 4, f"row {row} names a block twice: {mine.tolist()}")
    if cache is not None:
        _check_prefix_cache(uid, cache)


def _check_prefix_cache(uid: np.ndarray, cache: PrefixCache) -> None:
    entries, records, tokens = (np.asarray(x) for x in (cache.entries, cache.records, cache.token_ids))
    cached = np.flatnonzero(uid)
    slots = records[cached, SLOT]
    found = np.append(entries, 0)[slots]
    require(((slots == len(entries)) | (found == cached)).all(), 8, f"entries of blocks {cached.tolist()} name {found}")
    require(uid.max() < int(cache.next_uid), 8, f"uid {uid.max()} is used, the next one is {int(cache.next_uid)}")
    content: dict[int, list[int]] = {}
    groups = records[cached, GROUP]
    require(((groups >= 0) & (groups < len(cache.sliding_windows))).all(), 8, f"unknown groups {groups.tolist()}")
    for block in cached[groups == cache.chain_group]:
        mine = [int(records[block, PARENT]), *tokens[block].tolist()]
        require(content.setdefault(int(uid[block]), mine) == mine, 8, f"uid {uid[block]} has two contents")
