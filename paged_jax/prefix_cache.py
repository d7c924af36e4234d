"""PrefixCache: finds blocks that already hold the K/V of a prompt's first tokens. Arrays and pure functions, under jit.

Invariant 8 of docs/block_manager.md. A full block whose K/V are written is *published*: it gets a content uid
(BlockPool.content_uid) and a record, and an entry in a hash table says where it may be found. Entries are hints: one is
valid while the record of its block points back at it and the block has a uid: a block that is reused loses its identity
without a write to this module's arrays.

Identity is proved, not hashed. A record holds the uid of the block before it, or the chain's root; tokens are compared
and uids followed at publication and at every hit. Blocks of one uid therefore hold one token chain under one root, and
no other chain ever gets that uid: no collision, no rewritten or reused parent can serve another prompt's K/V.

With several cache groups, chains are followed in one of them, whose blocks stay longest: a group with full attention
if there is one, else that with the largest window. Blocks of the other groups that hold the same tokens share the uid;
each group finds its own by it.
"""

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from paged_jax._typing import typed
from paged_jax.block_pool import NULL_BLOCK, BlockPool, Status, exclusive_cumsum, forget_all
from paged_jax.block_table import BlockTable, first_needed_blocks
from paged_jax.config import CacheConfig, cdiv
from paged_jax.digest import LANES, block_hashes, chain_digests, mix, root_digest, to_int32, to_uint32

#: Columns of a record.
SLOT, GROUP, DIGEST, PARENT = 0, 1, slice(2, 2 + LANES), 2 + LANES
_RECORD_SIZE = 3 + LANES
#: Entries of a bucket; each block may stand in one of two buckets. With at least twice as many entries as blocks, none
#: is dropped in practice, unless more than 16 blocks hold the same.
_BUCKET_SIZE = 8
#: Blocks that one pass of `publish` handles on a CPU: few blocks fill up in one step, and a pass compares all pairs.
_CPU_ITEMS_PER_PASS = 32
_GROUP_FACTOR = 0x9E3779B1
#: Beyond this uid nothing is published until `reset`.
_MAX_UID = 2**31 - 1


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class PrefixCache:
    """What is known of the blocks' content.

    Attributes:
        token_ids: int32 [num_blocks, block_size] of blocks of the chain group, the token whose K/V each slot holds;
            stale where nothing is stored.
        records: int32 [num_blocks, 5] of blocks with a uid: index of their entry, or the number of entries if they have
            none; cache group; two digest lanes; uid of the block before, or the chain's root.
        entries: int32 [num_entries] hash table of block ids, in buckets of 8; 0 = empty.
        next_uid: int32 [] the uid of the next new content.
        sliding_windows: static, per group the window of its layers in tokens, None = full attention.
    """

    token_ids: Int32[Array, "B block"]
    records: Int32[Array, "B record"]
    entries: Int32[Array, " H"]
    next_uid: Int32[Array, ""]
    sliding_windows: tuple[int | None, ...] = field(metadata={"static": True})

    @property
    def chain_group(self) -> int:
        """The group in which chains are followed."""
        return max(range(len(self.sliding_windows)), key=lambda g: self.sliding_windows[g] or _MAX_UID)


def init_prefix_cache(config: CacheConfig) -> PrefixCache:
    """An empty cache."""
    num_entries = max(2 * _BUCKET_SIZE, 1 << (2 * config.num_blocks - 1).bit_length())
    return PrefixCache(
        token_ids=jnp.zeros((config.num_blocks, config.block_size), jnp.int32),
        records=jnp.zeros((config.num_blocks, _RECORD_SIZE), jnp.int32),
        entries=jnp.zeros(num_entries, jnp.int32),
        next_uid=jnp.int32(1),
        sliding_windows=config.sliding_windows,
    )


def root_of(namespace: Array) -> Array:
    """The parent of a chain's first block: negative, so that it is no uid. namespace: int32 >= 0."""
    return -1 - namespace


@typed
def write_tokens(cache: PrefixCache, token_ids: Int32[Array, " T"], slot_mapping: Int32[Array, " T"]) -> PrefixCache:
    """Notes which token each slot of the chain group holds; call it with every write of K/V.

    Args:
        token_ids: int32 [T].
        slot_mapping: int32 [T] of the chain group; padding goes to the null block.
    """
    block_size = cache.token_ids.shape[1]
    slot = jnp.maximum(slot_mapping, 0)
    return replace(cache, token_ids=cache.token_ids.at[slot // block_size, slot % block_size].set(token_ids))


@typed
def copy_tokens(cache: PrefixCache, src: Int32[Array, " n"], dst: Int32[Array, " n"]) -> PrefixCache:
    """Notes that block dst[i] now holds what block src[i] held; the counterpart of copy_blocks."""
    return replace(cache, token_ids=cache.token_ids.at[dst].set(cache.token_ids[src]))


@typed
def match_prefix(
    cache: PrefixCache,
    pool: BlockPool,
    token_ids: Int32[Array, " L"],
    num_tokens: Int32[Array, ""],
    namespace: Int32[Array, ""],
) -> Int32[Array, " n"]:
    """The blocks that hold the longest cached prefix of a prompt; at least one token is always left to compute.

    It ends where every group has the blocks that the next token sees: of a window W the last cdiv(W - 1, block_size).

    Args:
        token_ids: int32 [L] the prompt, padded to any length.
        num_tokens: int32 [] its real length.
        namespace: int32 [] >= 0; only blocks published under it match.

    Returns:
        int32 [G, L // block_size] block ids, at most (num_tokens - 1) // block_size, then null blocks, which also stand
        for blocks before a group's window. They may be free: `acquire` them before anything else is allocated.
    """
    block_size, windows = cache.token_ids.shape[1], cache.sliding_windows
    num_groups, num_blocks = len(windows), token_ids.shape[0] // block_size
    blocks = token_ids[: num_blocks * block_size].reshape(-1, block_size)
    if num_blocks == 0:
        return jnp.zeros((num_groups, 0), jnp.int32)
    root = root_of(namespace)[None]
    first = jnp.zeros(num_blocks, jnp.int32)
    digest = chain_digests(root_digest(root), block_hashes(blocks), first)
    found, uid = _find(cache, pool, digest)
    before = jnp.concatenate([root, uid[:-1]])
    is_hit = _is_verified(cache, found, uid, blocks, before)
    is_hit &= jnp.arange(num_blocks, dtype=jnp.int32) < (num_tokens - 1) // block_size
    is_hit = _leading(is_hit, first)
    found = _find_in_groups(cache, pool, digest, jnp.where(is_hit, uid, 0))
    number = jnp.arange(1, num_blocks + 1, dtype=jnp.int32)
    # A prefix of `number` blocks ends well if no group lacks one of the blocks that the next token sees.
    missing = jax.lax.cummax(jnp.where(found == NULL_BLOCK, number[None], 0), axis=1)
    ends_well = jnp.all(missing <= first_needed_blocks(number * block_size, windows, block_size), axis=0)
    length = jnp.max(jnp.where(is_hit & ends_well, number, 0))
    needed = first_needed_blocks(length * block_size, windows, block_size)
    return jnp.where((number <= length)[None] & (number[None] > needed[:, None]), found, NULL_BLOCK)


@typed
def publish(
    cache: PrefixCache,
    pool: BlockPool,
    table: BlockTable,
    old_lens: Int32[Array, " S"],
    namespaces: Int32[Array, " S"],
    *,
    max_new_tokens: int,
) -> tuple[PrefixCache, BlockPool]:
    """Makes the blocks that rows have filled since they held old_lens tokens available to `match_prefix`.

    Their K/V and tokens must be written, and blocks that leave a window not yet be given back. A block stays unknown if
    the block before it is, or if another content of this very call has its digest.

    Args:
        cache, pool: may be donated.
        old_lens: int32 [S] tokens per row before; equal to the table's where nothing happened.
        namespaces: int32 [S] >= 0, of each row.
        max_new_tokens: static bound on the new tokens of all rows together.
    """
    block_size, num_rows = table.block_size, table.seq_lens.shape[0]
    num_items = (max_new_tokens + (block_size - 1) * min(num_rows, max_new_tokens)) // block_size
    counts = table.seq_lens // block_size - old_lens // block_size

    def publish_from(number: Array | int, size: int, cache: PrefixCache, pool: BlockPool):
        numbers = number + jnp.arange(size, dtype=jnp.int32)
        items = _filled_blocks(table, cache.chain_group, old_lens // block_size, counts, numbers)
        return _publish_items(cache, pool, items, root_of(namespaces))

    def passes(cache: PrefixCache, pool: BlockPool) -> tuple[PrefixCache, BlockPool]:
        num_passes = cdiv(jnp.sum(counts, dtype=jnp.int32), _CPU_ITEMS_PER_PASS)
        one = lambda i, state: publish_from(i * _CPU_ITEMS_PER_PASS, _CPU_ITEMS_PER_PASS, *state)  # noqa: E731
        return jax.lax.fori_loop(0, num_passes, one, (cache, pool))

    def at_once(cache: PrefixCache, pool: BlockPool) -> tuple[PrefixCache, BlockPool]:
        return publish_from(0, num_items, cache, pool)

    if num_items == 0:
        return cache, pool
    if num_items <= _CPU_ITEMS_PER_PASS:
        return at_once(cache, pool)
    return jax.lax.platform_dependent(cache, pool, cpu=passes, default=at_once)


class _Items(NamedTuple):
    """Filled blocks [n]: rows ascending, each row's chain in order, not-yet-filled ones (padding) last.

    row; blocks [G, n] of all groups, and that of the chain group; the chain group's block before it; is_root: there is
    none. start: index of the first item of the chain that each item belongs to, as far as the chain is among these
    items.
    """

    is_item: Array
    row: Array
    blocks: Array
    block: Array
    parent_block: Array
    is_root: Array
    start: Array


def _filled_blocks(table: BlockTable, group: int, first_block: Array, counts: Array, numbers: Array) -> _Items:
    """Those with consecutive `numbers` among all; row s has filled counts[s] blocks, the first is first_block[s]."""
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    is_item = numbers < ends[-1]
    row = jnp.sum(numbers[:, None] >= ends[None], axis=1, dtype=jnp.int32) * is_item
    place = jnp.where(is_item, numbers - (ends - counts)[row], 0)
    column = first_block[row] + place
    blocks = jnp.where(is_item[None], table.block_ids[:, row, column], NULL_BLOCK)
    parent_block = jnp.where(column > 0, table.block_ids[group, row, jnp.maximum(column - 1, 0)], NULL_BLOCK)
    item = jnp.arange(numbers.shape[0], dtype=jnp.int32)
    return _Items(
        is_item=is_item,
        row=row,
        blocks=blocks,
        block=blocks[group],
        parent_block=parent_block,
        is_root=column == 0,
        start=jnp.maximum(item - place, 0),
    )


def _publish_items(cache: PrefixCache, pool: BlockPool, items: _Items, roots: Array) -> tuple[PrefixCache, BlockPool]:
    num_items, start, root = items.row.shape[0], items.start, roots[items.row]
    item = jnp.arange(num_items, dtype=jnp.int32)
    is_first = start == item
    tokens = cache.token_ids[items.block]
    # What stands before each chain: a known block, a root, or an unknown block, with uid 0.
    origin = jnp.where(items.is_root, root, pool.content_uid[items.parent_block])[start]
    before = to_uint32(cache.records[items.parent_block, DIGEST])
    digest = chain_digests(
        jnp.where(items.is_root[:, None], root_digest(root), before)[start], block_hashes(tokens), start
    )

    # Content that is published already keeps its uid.
    found, found_uid = _find(cache, pool, digest)
    is_known = _is_verified(cache, found, found_uid, tokens, jnp.where(is_first, origin, jnp.roll(found_uid, 1)))
    is_known = _leading(is_known, start)

    # Equal content among the items gets one uid, that of its first item. Chains are compared block by block.
    is_equal = items.is_item[None]
    for lane in range(LANES):
        is_equal &= digest[:, lane, None] == digest[None, :, lane]
    same = jnp.min(jnp.where(is_equal, item[None], num_items - 1), axis=1)
    parents_are_equal = jnp.where(
        is_first, is_first[same] & (origin == origin[same]), ~is_first[same] & (same[item - 1] == same[same - 1])
    )
    is_same = (same == item) | (jnp.all(tokens == tokens[same], axis=1) & parents_are_equal)
    is_sound = items.is_item & (origin != 0) & is_same & (cache.next_uid <= _MAX_UID - num_items)
    is_sound = _leading(is_sound, start)
    is_sound = _leading(is_sound & is_sound[same], start)
    is_new = is_sound & ~is_known & (same == item)
    uid = jnp.where(is_known, found_uid, cache.next_uid + exclusive_cumsum(is_new.astype(jnp.int32)))[same]
    parent = jnp.where(is_first, origin, jnp.roll(uid, 1))

    # From here on [G * n]: the blocks of all groups.
    num_groups, blocks = items.blocks.shape[0], items.blocks.reshape(-1)
    group = jnp.repeat(jnp.arange(num_groups, dtype=jnp.int32), num_items)
    is_sound, digest, parent, uid = (
        jnp.tile(x, (num_groups,) + (1,) * (x.ndim - 1)) for x in (is_sound, digest, parent, uid)
    )
    is_sound &= blocks != NULL_BLOCK
    slot = _free_entries(cache, pool, digest, group, is_sound)
    record = jnp.concatenate([slot[:, None], group[:, None], to_int32(digest), parent[:, None]], axis=1)
    target = jnp.where(is_sound, blocks, pool.num_blocks)
    # All reads come before the writes, or XLA copies the arrays.
    reads, arrays = (slot, record, target, uid, blocks), (cache.records, cache.entries, pool.content_uid)
    (slot, record, target, uid, blocks), (records, entries, uids) = jax.lax.optimization_barrier((reads, arrays))
    cache, pool = replace(cache, records=records, entries=entries), replace(pool, content_uid=uids)
    return (
        replace(
            cache,
            records=cache.records.at[target].set(record, mode="drop"),
            entries=cache.entries.at[slot].set(blocks, mode="drop"),
            next_uid=cache.next_uid + jnp.sum(is_new, dtype=jnp.int32),
        ),
        replace(pool, content_uid=pool.content_uid.at[target].set(uid, mode="drop")),
    )


def reset(cache: PrefixCache, pool: BlockPool) -> tuple[PrefixCache, BlockPool, Int32[Array, ""]]:
    """Forgets everything. BLOCKS_IN_USE, and nothing changed, unless all blocks are free.

    Args:
        cache, pool: may be donated.
    """
    is_idle = pool.num_free == pool.num_blocks - 1
    cache, pool = jax.lax.cond(
        is_idle, lambda c, p: (replace(c, next_uid=jnp.int32(1)), forget_all(p)), lambda c, p: (c, p), cache, pool
    )
    return cache, pool, jnp.where(is_idle, Status.OK, Status.BLOCKS_IN_USE).astype(jnp.int32)


def _leading(holds: Array, start: Array) -> Array:
    """Whether `holds [n]` at every item from the first of its chain, `start [n]`, up to this one."""
    fails = (~holds).astype(jnp.int32)
    count = jnp.cumsum(fails, dtype=jnp.int32)
    return count == (count - fails)[start]


def _is_verified(cache: PrefixCache, found: Array, uid: Array, tokens: Array, parent: Array) -> Array:
    """Whether block found[i] holds tokens[i] behind the content parent[i]; uid[i] = 0: nothing was found."""
    has_tokens = jnp.all(cache.token_ids[found] == tokens, axis=1)
    return (uid > 0) & has_tokens & (cache.records[found, PARENT] == parent)


def _candidates(cache: PrefixCache, pool: BlockPool, digest: Array, group: Array) -> tuple[Array, Array, Array]:
    """The two buckets of each digest in its group: (entry index, block, its uid, 0 if the entry is dead), [n, 2, 8]."""
    num_buckets = cache.entries.shape[0] // _BUCKET_SIZE
    # Each group has buckets of its own choice, or a few prompts would fill two buckets with all groups' blocks.
    word = mix(digest[:, 0] ^ mix(digest[:, 1] + group.astype(jnp.uint32) * jnp.uint32(_GROUP_FACTOR)))
    other = mix(digest[:, 1] + digest[:, 0])
    first = word % num_buckets
    second = first ^ (1 + other % (num_buckets - 1))  # num_buckets is a power of two: another bucket
    bucket = jnp.stack([first, second], axis=1).astype(jnp.int32)
    slot = bucket[:, :, None] * _BUCKET_SIZE + jnp.arange(_BUCKET_SIZE, dtype=jnp.int32)[None, None]
    block = cache.entries[slot]
    is_live = (cache.records[block, SLOT] == slot) & (cache.records[block, GROUP] == group[:, None, None])
    return slot, block, jnp.where(is_live, pool.content_uid[block], 0)


def _find(cache: PrefixCache, pool: BlockPool, digest: Array) -> tuple[Array, Array]:
    """A block [n] of the chain group with this digest, and its uid: the newest content wins, or a dead chain could hide
    its successor.

    Nothing found: null block and 0.
    """
    _, block, uid = _candidates(cache, pool, digest, jnp.full(digest.shape[0], cache.chain_group, jnp.int32))
    has_digest = jnp.all(cache.records[block, DIGEST] == to_int32(digest)[:, None, None], axis=-1)
    uid = jnp.where(has_digest, uid, 0)
    newest = jnp.max(uid, axis=(1, 2))
    is_newest = (uid == newest[:, None, None]) & (uid > 0)
    return jnp.max(jnp.where(is_newest, block, NULL_BLOCK), axis=(1, 2)), newest


def _find_in_groups(cache: PrefixCache, pool: BlockPool, digest: Array, uid: Array) -> Array:
    """A block [G, n] of each group with this uid [n], where it is not 0; the null block where there is none."""
    num_groups, num_items = len(cache.sliding_windows), digest.shape[0]
    group = jnp.repeat(jnp.arange(num_groups, dtype=jnp.int32), num_items)
    _, block, found = _candidates(cache, pool, jnp.tile(digest, (num_groups, 1)), group)
    is_it = (found == jnp.tile(uid, num_groups)[:, None, None]) & (found > 0)
    return jnp.max(jnp.where(is_it, block, NULL_BLOCK), axis=(1, 2)).reshape(num_groups, num_items)


def _free_entries(cache: PrefixCache, pool: BlockPool, digest: Array, group: Array, wanted: Array) -> Array:
    """An entry [n] for each wanted item, each another one; the number of entries where there is none or none wanted."""
    slot, block, _ = _candidates(cache, pool, digest, group)
    is_dead = (cache.records[block, SLOT] != slot) | (pool.content_uid[block] == 0)
    num_dead = jnp.sum(is_dead, axis=2, dtype=jnp.int32)
    choice = (num_dead[:, 1] > num_dead[:, 0]).astype(jnp.int32)[:, None, None]
    slot, is_dead = (jnp.take_along_axis(x, choice, axis=1)[:, 0] for x in (slot, is_dead))
    # Items of one bucket take its dead entries in turn.
    bucket = slot[:, 0]
    earlier = jnp.tri(slot.shape[0], k=-1, dtype=bool)
    rank = jnp.sum((bucket[:, None] == bucket[None]) & wanted[None] & earlier, axis=1, dtype=jnp.int32)
    is_mine = wanted[:, None] & is_dead & (exclusive_cumsum(is_dead.astype(jnp.int32), axis=1) == rank[:, None])
    return jnp.min(jnp.where(is_mine, slot, cache.entries.shape[0]), axis=1)
