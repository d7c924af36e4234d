"""PrefixCache: worked examples, and the cases that random operations reach too seldom."""

import dataclasses
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from block_manager_machine import BLOCK_SIZE, MAX_NEW, NUM_ROWS, REAL, WIDTH, jitted
from test_block_manager_properties import WEAK_DIGEST, planted

from paged_jax import CacheConfig, Status, append_tokens, init_prefix_cache, publish, release
from paged_jax.block_pool import CACHED, UNCACHED
from paged_jax.block_table import init
from paged_jax.digest import _FACTORS, block_hashes, chain_digests, root_digest, to_uint32
from paged_jax.invariants import InvariantError, check_invariants
from paged_jax.prefix_cache import _MAX_UID, DIGEST, SLOT, root_of, write_tokens

EQUAL_DIGESTS = (*WEAK_DIGEST[:2], "[place] * (before + sums) & jnp.uint32(0)")


class Manager:
    """Pool, table and cache, driven like a step does it: blocks of 3 tokens, 5 rows of 4 blocks."""

    def __init__(self, num_usable: int, functions=REAL, window=None):
        config = CacheConfig(
            num_blocks=num_usable + 1,
            num_layers=1,
            sliding_windows=(window,),
            num_kv_heads=1,
            head_dim=1,
            block_size=BLOCK_SIZE,
            max_num_seqs=NUM_ROWS,
            max_blocks_per_seq=WIDTH,
        )
        self.functions = functions
        self.pool, self.table = functions.init(config)
        self.cache = functions.init_cache(config)
        self.namespaces = [0] * NUM_ROWS

    def look_up(self, row: int, prompt: list[int], namespace: int = 0):
        """(pool, table, status, block ids) with the prompt's cached blocks in `row`."""
        tokens = jnp.array(prompt + [0] * (WIDTH * BLOCK_SIZE - len(prompt)), jnp.int32)
        arguments = (jnp.int32(row), tokens, jnp.int32(len(prompt)), jnp.int32(namespace))
        return self.functions.admit(self.cache, self.pool, self.table, *arguments)

    def num_hits(self, prompt: list[int], namespace: int = 0) -> int:
        """Blocks that would be hit, without taking them."""
        return int((self.look_up(NUM_ROWS - 1, prompt, namespace)[-1] > 0).sum())

    def admit(self, prompts: dict[int, list[int]], namespace: int = 0) -> dict[int, int]:
        """Looks all prompts up, then stores the rest of them in one step. Returns the blocks hit per row."""
        hits = {}
        for row, prompt in prompts.items():
            self.namespaces[row] = namespace
            self.pool, self.table, status, ids = self.look_up(row, prompt, namespace)
            assert int(status) == Status.OK
            hits[row] = int((ids > 0).sum())
        self.extend({row: prompt[hits[row] * BLOCK_SIZE :] for row, prompt in prompts.items()})
        return hits

    def extend(self, new: dict[int, list[int]]) -> None:
        """Stores more tokens without asking the cache."""
        old_lens = self.table.seq_lens
        counts = jnp.array([len(new.get(r, [])) for r in range(NUM_ROWS)], jnp.int32)
        self.pool, self.table, appended = self.functions.append(self.pool, self.table, counts, max_new_tokens=MAX_NEW)
        assert int(appended.status) == Status.OK
        tokens = np.zeros((NUM_ROWS, MAX_NEW), np.int32)
        for row, mine in new.items():
            tokens[row, : len(mine)] = mine
        self.cache, self.pool = self.functions.store(
            self.cache, self.pool, self.table, appended, tokens, old_lens, jnp.array(self.namespaces, jnp.int32), True
        )
        self.check()

    def truncate(self, row: int, length: int) -> None:
        lens = self.table.seq_lens.at[row].set(length)
        self.pool, self.table, status = self.functions.truncate(self.pool, self.table, lens)
        assert int(status) == Status.OK
        self.check()

    def release(self, *rows: int) -> None:
        for row in rows:
            self.truncate(row, 0)

    def check(self) -> None:
        check_invariants(self.pool, self.table, self.cache)

    def uids(self, row: int) -> list[int]:
        return [int(self.pool.content_uid[b]) for b in self.table.block_ids[0, row] if b]

    @property
    def free(self) -> list[list[int]]:
        pool = self.pool
        return [
            [int(pool.free_queue[q, (int(pool.head[q]) + i) % pool.num_blocks]) for i in range(int(pool.count[q]))]
            for q in (UNCACHED, CACHED)
        ]


@pytest.fixture(scope="module")
def equal_digests():
    """The block manager with one digest for everything."""
    return jitted(*planted(EQUAL_DIGESTS))


A, B, C = [1, 2, 3], [4, 5, 6], [7, 8, 9]


def test_match_worked_example_hits_full_blocks_and_leaves_a_token():
    manager = Manager(12)
    assert manager.admit({0: [*A, *B, 7]}) == {0: 0}
    assert manager.admit({1: [*A, *B, 7]}) == {1: 2}
    assert manager.admit({2: A + B}) == {2: 1}  # the last token must be computed
    assert manager.admit({3: [*A, 4, 5, 9, 9]}) == {3: 1}
    assert manager.admit({4: [1, 2]}) == {4: 0}
    assert manager.uids(1)[:2] == manager.uids(0)[:2]


def test_match_after_release_takes_blocks_out_of_the_queue():
    manager = Manager(4)
    manager.admit({0: [*A, *B, 7]})
    manager.release(0)
    assert manager.free == [[4, 3], [2, 1]]  # the chain's tail is reused before its head
    assert manager.admit({1: [*A, *B, 7]}) == {1: 2}
    assert manager.free == [[3], []]


def test_match_in_another_namespace_finds_nothing():
    manager = Manager(12)
    manager.admit({0: [*A, *B, 1]})
    assert manager.admit({1: [*A, *B, 1]}, namespace=1) == {1: 0}
    assert [manager.num_hits([*A, *B, 1], namespace) for namespace in range(3)] == [2, 2, 0]


def test_b04_cached_blocks_are_not_published_again():
    manager = Manager(8)
    manager.admit({0: [*A, *B, 7]})
    manager.extend({0: [8, 9, 1]})
    manager.admit({1: [*A, *B, 7]})
    manager.extend({1: [8, 9, 1]})
    assert manager.uids(0) == manager.uids(1) == [1, 2, 3, 0]  # C is there twice, as one content
    entries = np.asarray(manager.cache.entries)
    assert len(entries[entries > 0]) == int((manager.pool.content_uid > 0).sum()) == 4
    manager.release(0, 1)
    for first in (20, 30, 40):  # unrelated texts take every block
        manager.admit({row: [first + row] * 7 for row in range(2)})
        manager.release(0, 1)
    assert manager.num_hits([*A, *B, 7]) == 0


def test_b07_evicting_one_duplicate_keeps_the_other():
    manager = Manager(8)
    manager.admit({0: [*A, 7], 1: [*A, 7]})  # computed side by side: both copies stay
    assert manager.uids(0) == manager.uids(1) == [1, 0]
    manager.release(0, 1)
    manager.extend({0: [50] * 7, 1: [60] * 4, 2: [70] * 4})  # seven blocks, one of the two among them
    assert int((manager.pool.content_uid == 1).sum()) == 1
    assert manager.num_hits([*A, 7]) == 1
    manager.extend({3: [80]})
    assert manager.num_hits([*A, 7]) == 0
    assert int((manager.pool.content_uid == 1).sum()) == 0


def test_equal_prompts_of_one_step_share_their_identities_block_by_block():
    manager = Manager(14)
    manager.admit({0: [*A, *B, 7], 1: [*A, *B, 8], 2: [*A, *C, 9]})
    assert manager.uids(0) == manager.uids(1) == [1, 2, 0]
    assert manager.uids(2) == [1, 3, 0]


def test_different_contents_of_one_digest_in_one_step_leave_the_second_unknown(equal_digests):
    manager = Manager(14, equal_digests)
    manager.admit({0: [*A, 1], 1: [*B, 1], 2: [*A, 1]})
    assert [manager.uids(r)[0] for r in range(3)] == [1, 0, 1]
    manager.admit({3: [*B, 1]})  # alone it becomes known, and does not inherit A's identity
    assert manager.uids(3)[0] == 2


def colliding_blocks():
    """(a, other, b): a and other have one weak digest, b behind them has another."""

    def weak(blocks):
        first = jnp.zeros(len(blocks), jnp.int32)
        root = jnp.broadcast_to(root_digest(root_of(jnp.zeros(1, jnp.int32))), (len(blocks), 2))
        return [int(d) & 3 for d in chain_digests(root, block_hashes(jnp.array(blocks, jnp.int32)), first)[:, 0]]

    for a, other, b in itertools.product(
        ([1, 2, 3], [2, 2, 3]), ([1, 5, i] for i in range(1, 9)), ([7, 7, 1], [7, 1, 1])
    ):
        on_a, on_other = weak([a, b]), weak([other, b])
        if a[0] == other[0] and on_a == on_other and on_a[0] != on_a[1]:
            return a, other, b
    raise AssertionError("no collision among these")


def test_truncated_and_rewritten_parent_of_equal_digest_serves_no_child():
    """Identity is not where the parent lies: b was computed behind a, whose block holds other tokens now."""
    a, other, b = colliding_blocks()
    manager = Manager(12, jitted(*planted(WEAK_DIGEST)))
    manager.admit({0: a + b + [1]})
    block = int(manager.table.block_ids[0, 0, 0])
    manager.truncate(0, 1)
    manager.extend({0: other[1:]})
    assert int(manager.table.block_ids[0, 0, 0]) == block  # rewritten in place, and known again
    assert manager.uids(0) == [3]
    assert manager.admit({1: other + b + [1]}) == {1: 1}
    assert manager.admit({2: a + b + [1]}) == {2: 0}


def test_reused_parent_and_newest_identity_wins():
    """A child that has lost its parent must not hide the chain when it is published anew."""
    manager = Manager(12)
    manager.admit({0: [*A, *B, 1]})
    manager.truncate(0, 1)
    manager.extend({0: [9, 9]})  # A is gone, B is an orphan
    assert manager.admit({1: [*A, *B, 1]}) == {1: 0}  # A and B are published again behind the orphan
    assert manager.admit({2: [*A, *B, 1]}) == {2: 2}
    assert manager.uids(2)[:2] == manager.uids(1)[:2]


def test_block_rewritten_by_one_of_its_owners_stays_known_for_the_other():
    manager = Manager(12)
    manager.admit({0: [*A, *B, 1]})
    manager.admit({1: [*A, *B, 1]})
    manager.truncate(1, 5)
    manager.extend({1: [9]})  # copies, for row 0 holds the block too
    assert manager.uids(0)[1] != manager.uids(1)[1]
    assert manager.admit({2: [*A, *B, 1]}) == {2: 2}


def test_b15_uncached_before_cached_least_recently_used_first_and_children_before_parents():
    manager = Manager(10)
    manager.admit({0: [*A, *B, 7]})
    manager.admit({1: [*A, *B, 8]})
    first, second = ([int(b) for b in manager.table.block_ids[0, r] if b] for r in (0, 1))
    never_used = manager.free[UNCACHED]
    manager.release(0, 1)
    assert first[:2] == second[:2]
    assert manager.free == [[*never_used, first[2], second[2]], [first[1], first[0]]]
    manager.admit({2: [*A, 9]})  # A is used again, B is not
    manager.release(2)
    assert manager.free[CACHED] == [first[1], first[0]]
    manager.admit({0: [*C, 1]})
    manager.release(0)
    manager.admit({0: [*A, 9]})
    manager.release(0)
    assert manager.free[CACHED][0] == first[1]
    assert manager.free[CACHED][-1] == first[0]


def test_sixteen_equal_blocks_fill_their_buckets_and_the_next_is_known_but_not_found():
    manager = Manager(18)
    for _ in range(6):
        manager.extend({0: A, 1: A, 2: A})
        manager.release(0, 1, 2)
    # Released blocks without other room are taken again: 18 copies of one content.
    assert (np.asarray(manager.pool.content_uid)[1:] == 1).all()
    slots = np.asarray(manager.cache.records)[1:, SLOT]
    assert int((slots == len(manager.cache.entries)).sum()) == 2
    assert manager.admit({3: [*A, 1]}) == {3: 1}


def test_uids_used_up_publish_nothing_until_reset():
    manager = Manager(8)
    manager.cache = dataclasses.replace(manager.cache, next_uid=jnp.int32(_MAX_UID - 1))
    manager.admit({0: [*A, 1]})
    assert manager.uids(0) == [0, 0]
    _, _, status = manager.functions.reset(manager.cache, manager.pool)
    assert int(status) == Status.BLOCKS_IN_USE
    manager.release(0)
    manager.cache, manager.pool, status = manager.functions.reset(manager.cache, manager.pool)
    assert int(status) == Status.OK
    manager.admit({0: [*A, 1]})
    assert manager.uids(0) == [1, 0]


@pytest.mark.parametrize("follows", [True, False])
def test_prompt_that_differs_only_before_the_window_is_not_hit(follows):
    """A digest that does not tell tokens above 50 apart, and a window that needs the last block alone."""
    blind = ("digest", "words = token_ids.astype(jnp.uint32)", "words = jnp.minimum(token_ids, 50).astype(jnp.uint32)")
    planted_bug = ("cache", "is_hit = _leading(is_hit, first)", "is_hit = is_hit")
    manager = Manager(12, jitted(*planted(blind, *([] if follows else [planted_bug]))), window=4)
    manager.extend({0: [60, 60, 60, *A]})
    manager.extend({0: [*B, 1]})
    assert manager.num_hits([60, 60, 60, *A, *B, 1]) == 1
    assert manager.num_hits([70, 60, 60, *A, *B, 1]) == (0 if follows else 1)  # else K/V after another beginning


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("entries", lambda x: x * 0),
        ("next_uid", lambda x: x * 0),
        ("token_ids", lambda x: x.at[1, 0].add(1)),  # of two blocks with one identity, one is changed
    ],
)
def test_check_invariants_corrupt_cache_raises(field, change):
    manager = Manager(12)
    manager.admit({0: [*A, 1], 1: [*A, 1]})
    manager.cache = dataclasses.replace(manager.cache, **{field: change(getattr(manager.cache, field))})
    with pytest.raises(InvariantError, match="invariant 8"):
        manager.check()


# -- the digest ------------------------------------------------------------------------------------------------------


def test_digest_of_a_chain_is_the_recurrence_one_block_at_a_time():
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 50_000, (40, 16)), jnp.int32)
    hashes, root = block_hashes(tokens), root_digest(jnp.array([-1], jnp.int32))
    start = jnp.array([0] * 25 + [25] * 15, jnp.int32)  # two chains behind one root
    chains = np.asarray(chain_digests(jnp.broadcast_to(root, (40, 2)), hashes, start))
    for lane, factor in enumerate(_FACTORS):
        raw = int(root[0, lane])
        for i in range(40):
            raw = int(root[0, lane]) if i == 25 else raw
            raw = (raw * factor + int(hashes[i, lane])) % 2**32
            assert int(chains[i, lane]) == raw


def test_digest_tells_contents_orders_and_roots_apart():
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 3, (4000, 16))
    blocks = np.unique(np.concatenate([blocks, blocks[:, ::-1], [[i] + [0] * 15 for i in range(50)]]), axis=0)
    hashes = np.asarray(block_hashes(jnp.asarray(blocks, jnp.int32)))
    assert len(np.unique(hashes, axis=0)) == len(blocks)
    roots = np.asarray(root_digest(jnp.arange(-4000, 0, dtype=jnp.int32)))
    assert len(np.unique(roots, axis=0)) == 4000


def test_digest_kept_in_a_record_continues_the_chain():
    manager = Manager(12)
    manager.admit({0: A})
    manager.extend({0: B})
    blocks = jnp.array([A, B], jnp.int32)
    root = jnp.broadcast_to(root_digest(jnp.array([-1], jnp.int32)), (2, 2))
    expected = chain_digests(root, block_hashes(blocks), jnp.zeros(2, jnp.int32))
    chex.assert_trees_all_equal(to_uint32(manager.cache.records[manager.table.block_ids[0, 0, :2], DIGEST]), expected)


# -- cost ------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="XLA of older versions copies counts when rows are released")
@pytest.mark.parametrize("num_rows", [8, 64])  # published at once, and in passes
def test_bookkeeping_with_a_prefix_cache_copies_nothing_of_the_pools_size(num_rows):
    sizes = {"num_blocks": 10_000, "max_num_seqs": num_rows, "max_blocks_per_seq": 4, "block_size": 4}
    config = CacheConfig(num_layers=1, num_kv_heads=1, head_dim=1, **sizes)

    def steps(pool, table, cache):
        def step(_, state):
            pool, table, cache = state
            old_lens = table.seq_lens
            pool, table, appended = append_tokens(pool, table, jnp.ones(num_rows, jnp.int32), max_new_tokens=1)
            cache = write_tokens(cache, old_lens, appended.slot_mapping[0, :, 0])
            cache, pool = jax.lax.cond(
                jnp.any(table.seq_lens % 4 == 0),
                lambda c, p: publish(c, p, table, old_lens, 0 * old_lens, max_new_tokens=num_rows),
                lambda c, p: (c, p),
                cache,
                pool,
            )
            return *release(pool, table, table.seq_lens > 13)[:2], cache

        return jax.lax.fori_loop(0, 4, step, (pool, table, cache))

    state = (*init(config), init_prefix_cache(config))
    text = jax.jit(steps, donate_argnums=(0, 1, 2)).lower(*state).compile().as_text()
    big = ("s32[10000]", "s32[2,10000]", "s32[10000,4]", "s32[32768]")
    assert all(shape in text for shape in big)
    copies = [line for line in text.splitlines() if " copy(" in line and any(shape in line for shape in big)]
    assert copies == []
