"""Cache groups and windows: which layers form groups, which blocks a window gives back, and what a prefix hit needs."""

import dataclasses
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax import (
    CacheConfig,
    LayerCache,
    Status,
    acquire_prefix,
    append_tokens,
    attend,
    fork,
    group_layers,
    init_state,
    truncate,
)
from paged_jax.batch import StepBatch
from paged_jax.block_pool import allocate
from paged_jax.block_table import acquire, init, num_blocks_needed, num_prefix_blocks, release_out_of_window
from paged_jax.config import cdiv
from paged_jax.invariants import InvariantError, check_invariants
from paged_jax.prefix_cache import init_prefix_cache, match_prefix, publish, write_tokens

append = jax.jit(append_tokens, static_argnames="max_new_tokens")
leave = jax.jit(release_out_of_window, static_argnames="max_new_tokens")
needed = jax.jit(num_blocks_needed)
cut = jax.jit(truncate)


def config(windows, num_usable=200, block_size=4, num_rows=2, width=40) -> CacheConfig:
    return CacheConfig(
        num_blocks=num_usable + 1,
        num_layers=len(windows),
        num_kv_heads=1,
        head_dim=1,
        block_size=block_size,
        max_num_seqs=num_rows,
        max_blocks_per_seq=width,
        layer_groups=tuple((g,) for g in range(len(windows))),
        sliding_windows=windows,
    )


def step(pool, table, *counts, max_new=64):
    """Room for more tokens, and what has left the windows goes: (pool, table, Appended, blocks that were taken)."""
    counts = jnp.array([*counts, *[0] * (len(table.seq_lens) - len(counts))], jnp.int32)
    old, before = table.seq_lens, int(pool.num_free)
    pool, table, appended = append(pool, table, counts, max_new_tokens=max_new)
    taken = before - int(pool.num_free)
    if int(appended.status) == Status.OK:
        pool, table = leave(pool, table, old, max_new_tokens=max_new)
    check_invariants(pool, table)
    return pool, table, appended, taken


def held(table, row=0):
    """[group] -> logical blocks that the row still has."""
    return [np.flatnonzero(ids[row]).tolist() for ids in np.asarray(table.block_ids)]


def visible_blocks(length, window, block_size):
    """Logical blocks with a token that the token behind `length` tokens sees, or with room for it; one by one."""
    seen = {p // block_size for p in range(length) if window is None or p > length - window}
    return sorted(seen | ({length // block_size} if length % block_size else set()))


# -- which layers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layer_windows", "groups", "windows"),
    [
        ([None] * 4, ((0, 1, 2, 3),), (None,)),
        ([8, 8], ((0, 1),), (8,)),
        ([8, None, 8, None], ((0, 2), (1, 3)), (8, None)),
        ([8, 8, None], ((0,), (1,), (2,)), (8, 8, None)),
        ([8, 8, None, 8, 8, None], ((0, 1), (2, 5), (3, 4)), (8, None, 8)),
        ([8, 4, None, None, 4, 8], ((0, 5), (1, 4), (2, 3)), (8, 4, None)),
        ([8] * 9 + [None] * 5, ((0, 1, 2, 3, 4), (5, 6, 7, 8), (9, 10, 11, 12, 13)), (8, 8, None)),
    ],
)
def test_r48_layers_of_one_kind_form_groups_of_equal_size(layer_windows, groups, windows):
    assert group_layers(layer_windows) == (groups, windows)
    made = CacheConfig(
        num_blocks=2,
        num_layers=len(layer_windows),
        num_kv_heads=1,
        head_dim=1,
        max_blocks_per_seq=1,
        layer_groups=groups,
        sliding_windows=windows,
    )
    assert [made.sliding_windows[group] for group, _ in made.layer_map] == layer_windows


def test_r48_gemma3_270m_has_five_groups_of_windows_and_a_full_one():
    groups, windows = group_layers([None if i % 6 == 5 else 512 for i in range(18)])
    assert [len(g) for g in groups] == [3] * 6
    assert sorted(windows, key=str) == [512] * 5 + [None]
    assert groups[windows.index(None)] == (5, 11, 17)


@pytest.mark.parametrize(
    ("num_layers", "num_groups", "size"), [(18, 6, 3), (26, 7, 4), (34, 7, 5), (48, 6, 8), (62, 6, 11)]
)
def test_r48_every_gemma3_has_few_groups_that_leave_little_unused(num_layers, num_groups, size):
    groups, windows = group_layers([None if i % 6 == 5 else 1024 for i in range(num_layers)])
    assert (len(groups), max(map(len, groups))) == (num_groups, size)
    assert sorted(sum(groups, ())) == list(range(num_layers))
    for window in (None, 1024):
        mine = [len(g) for g, w in zip(groups, windows, strict=True) if w == window]
        assert sum(mine) >= 0.9 * size * len(mine)


@pytest.mark.parametrize("layer_groups", [((0, 1), ()), ((0,),), ((0, 1), (1,)), ((0, 2), (1,))])
def test_groups_that_are_no_partition_are_refused(layer_groups):
    sizes = {"num_blocks": 2, "num_layers": 2, "num_kv_heads": 1, "head_dim": 1, "max_blocks_per_seq": 1}
    with pytest.raises(ValueError, match="must partition range"):
        CacheConfig(layer_groups=layer_groups, **sizes)


@pytest.mark.parametrize("layer_windows", [5, (), [[1]], [None, 0], [8, True]])
def test_r47_useless_windows_of_layers_are_refused_by_name(layer_windows):
    with pytest.raises(ValueError, match="layer_windows"):
        group_layers(layer_windows)


@pytest.mark.parametrize("window", [0, -1, 1.5, True])
def test_r47_useless_window_is_refused_by_name(window):
    with pytest.raises(ValueError, match=r"sliding_windows\[1\] must be an integer >= 1"):
        config((None, window))


def test_windows_for_another_number_of_groups_are_refused():
    with pytest.raises(ValueError, match="3 entries for 2 groups"):
        dataclasses.replace(config((None, 8)), sliding_windows=(None, 8, 8))


def test_window_beyond_int32_is_refused():
    assert config((None, 2**31 - 1)).num_blocks_for(9) == 2 * 3
    with pytest.raises(ValueError, match=r"sliding_windows\[1\]=2147483648 does not fit int32"):
        config((None, 2**31))


@pytest.mark.parametrize(
    "groups", [{"layer_groups": (0, 1)}, {"layer_groups": None}, {"layer_groups": ((0, "1"),)}, {"sliding_windows": 8}]
)
def test_groups_that_are_no_tuples_are_refused(groups):
    with pytest.raises(ValueError, match="tuple of tuples of layers, and sliding_windows a tuple"):
        dataclasses.replace(config((None, 8)), **groups)


@pytest.mark.parametrize("window", [None, 9])
def test_layer_that_sees_more_than_its_group_keeps_is_refused(window):
    layer = LayerCache(k=jnp.zeros((4, 4, 1, 8)), v=jnp.zeros((4, 4, 1, 8)), group=0, sliding_window=8)
    batch = StepBatch(
        token_ids=jnp.zeros(1, jnp.int32),
        positions=jnp.zeros(1, jnp.int32),
        seq_lens=jnp.ones(1, jnp.int32),
        query_start_loc=None,
        block_tables=jnp.ones((1, 1, 2), jnp.int32),
        slot_mapping=jnp.full((1, 1), 4, jnp.int32),
        logits_indices=jnp.zeros(1, jnp.int32),
    )
    kv = jnp.ones((1, 1, 8))
    with pytest.raises(ValueError, match="keeps only a window of 8 tokens"):
        attend(layer, kv, kv, kv, batch, sliding_window=window)
    assert attend(layer, kv, kv, kv, batch, sliding_window=8)[0].shape == (1, 1, 8)


# -- what leaves a window ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("window", "block_size"), [(1, 4), (2, 3), (4, 4), (5, 4), (8, 4), (9, 4), (7, 16), (33, 1)])
def test_r40_b61_block_leaves_in_the_first_step_whose_next_token_does_not_see_it(window, block_size):
    sizes = config((None, window), block_size=block_size, width=cdiv(4 * window + 8, block_size) + 1, num_usable=400)
    pool, table = init(sizes)
    for length in range(1, 4 * window + 9):
        pool, table, _, _ = step(pool, table, 1, max_new=1)
        full, windowed = held(table)
        assert full == list(range(cdiv(length, block_size)))
        assert windowed == visible_blocks(length, window, block_size)
        assert len(windowed) <= cdiv(window, block_size) + 1
        assert len(full) + len(windowed) == sizes.num_blocks_for(length)
        again = leave(pool, table, table.seq_lens, max_new_tokens=1)  # nothing is left to leave
        chex.assert_trees_all_equal(again, (pool, table))


def test_r40_one_hundred_tokens_in_a_window_of_64_free_the_first_37():
    pool, table = init(config((64,), block_size=1, width=128))
    for count in (64, 36):  # the next token, at position 100, sees 37 ... 100
        pool, table, _, _ = step(pool, table, count)
    assert held(table) == [list(range(37, 100))]


def test_b23_r45_block_goes_when_the_step_that_read_it_is_done_not_when_it_is_planned():
    pool, table = init(config((8,), num_rows=2))
    pool, table, _, _ = step(pool, table, 10)
    assert held(table) == [[0, 1, 2]]  # the next token, at position 10, sees 3 ... 10
    before = table
    pool, after, appended = append(pool, table, jnp.array([1, 0], jnp.int32), max_new_tokens=1)
    assert int(after.block_ids[0, 0, 0]) == int(before.block_ids[0, 0, 0]) != 0  # while the step runs it is there
    assert int(pool.ref_count[before.block_ids[0, 0, 0]]) == 1
    assert int(appended.slot_mapping[0, 0, 0]) not in range(4, 8)
    pool, after = leave(pool, after, table.seq_lens, max_new_tokens=1)
    assert held(after) == [[1, 2]]  # 11 tokens are stored, the next token sees 4 ... 11


@pytest.mark.parametrize("chunks", [(1, 40), (7, 13, 21), (40, 1), (3, 3, 3, 32)])
def test_chunks_of_any_size_leave_what_single_tokens_leave(chunks):
    sizes = config((8, None, 3))
    pool, table = init(sizes)
    for chunk in chunks:
        pool, table, _, _ = step(pool, table, chunk)
    assert held(table) == [visible_blocks(41, w, 4) for w in (8, None, 3)]
    assert int(pool.num_free) == 200 - sizes.num_blocks_for(41)


def test_blocks_go_row_by_row_group_by_group_the_tail_first():
    pool, table = init(config((4, None, 4), num_usable=40, num_rows=2))
    pool, table, _, _ = step(pool, table, 8, 8)
    # Row 0 had blocks 1 - 2, 3 - 4, 5 - 6 in its groups, row 1 had 7 - 12; the first of each window went.
    queue = [int(pool.free_queue[0, (int(pool.head[0]) + i) % 41]) for i in range(int(pool.count[0]))]
    assert queue[-4:] == [1, 5, 7, 11]
    pool, table, _, _ = step(pool, table, 12)
    queue = [int(pool.free_queue[0, (int(pool.head[0]) + i) % 41]) for i in range(int(pool.count[0]))]
    assert queue[-6:] == [14, 13, 2, 20, 19, 6]


def test_block_that_a_fork_still_holds_stays_and_goes_once():
    pool, table = init(config((8,), num_rows=2, num_usable=12))
    pool, table, _, _ = step(pool, table, 9)
    pool, table, status = fork(pool, table, jnp.array([0, 0], jnp.int32))
    assert int(status) == Status.OK
    pool, table, _, _ = step(pool, table, 3)  # row 0 leaves block 0, row 1 sees it
    assert held(table, 0) == [[1, 2]]
    assert held(table, 1) == [[0, 1, 2]]
    pool, table, _, _ = step(pool, table, 1, 4)
    assert held(table, 1) == [[1, 2, 3]]
    assert int(pool.num_free) == 12 - len({*np.unique(table.block_ids)} - {0})


@pytest.mark.parametrize(
    ("length", "status"),
    [(30, Status.OK), (27, Status.OK), (26, Status.BAD_LENGTH), (8, Status.BAD_LENGTH), (0, Status.OK)],
)
def test_row_can_be_cut_as_far_as_its_windows_reach_back(length, status):
    """Window 8, 30 tokens: blocks 0 - 4 are gone. The token behind 27 sees positions 20 ..., behind 26 also 19."""
    pool, table = init(config((None, 8), width=8))
    pool, table, _, _ = step(pool, table, 30)
    assert held(table)[1] == [5, 6, 7]
    pool_after, table_after, got = cut(pool, table, jnp.array([length, 0], jnp.int32))
    assert int(got) == status
    check_invariants(pool_after, table_after)
    if status != Status.OK:
        chex.assert_trees_all_equal((pool_after, table_after), (pool, table))


def test_speculation_is_cut_before_anything_leaves():
    pool, table = init(config((None, 8), width=8))
    pool, table, _, _ = step(pool, table, 11)
    old = table.seq_lens
    grown_pool, grown, _ = append(pool, table, jnp.array([6, 0], jnp.int32), max_new_tokens=8)
    cut_pool, kept, status = cut(grown_pool, grown, jnp.array([12, 0], jnp.int32))
    assert int(status) == Status.OK
    cut_pool, kept = leave(cut_pool, kept, old, max_new_tokens=8)
    check_invariants(cut_pool, kept)
    assert held(kept) == [[0, 1, 2], [1, 2]]
    assert int(cut_pool.num_free) == 200 - 3 - 2


@pytest.mark.parametrize("change", [lambda i: i.at[1, 0, 3].set(0), lambda i: i.at[1, 0, 2].set(0), lambda i: i * 0])
def test_check_invariants_row_that_lacks_a_block_of_its_window_raises(change):
    pool, table = init(config((None, 8), width=8))
    pool, table, _, _ = step(pool, table, 16)
    bad = dataclasses.replace(table, block_ids=change(table.block_ids))
    with pytest.raises(InvariantError, match="invariant"):
        check_invariants(pool, bad)


# -- how many blocks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("windows", [(None, None), (None, 8), (8, 3)])
@pytest.mark.parametrize("block_size", [4, 8])
def test_b65_r44_predicted_blocks_are_those_taken(windows, block_size):
    sizes = config(windows, block_size=block_size, width=cdiv(48, block_size))
    for chunk in range(1, 9):
        pool, table = init(sizes)
        bound = sizes.max_blocks_for(40, chunk)
        for length in range(chunk, 41, chunk):
            predicted = int(needed(pool, table, jnp.array([chunk, 0], jnp.int32)).sum())
            owned = sizes.num_blocks_for(length - chunk)
            pool, table, _, taken = step(pool, table, chunk)
            assert predicted == taken
            assert owned + taken <= bound
            assert int((table.block_ids != 0).sum()) == sizes.num_blocks_for(length)
            assert 200 - int(pool.num_free) == sizes.num_blocks_for(length)


def test_bound_of_a_window_is_reached_and_never_passed():
    for window, block_size, chunk in itertools.product((1, 2, 5, 8, 9), (1, 3, 4), (1, 2, 4, 7)):
        sizes = config((window,), block_size=block_size, width=100)
        most = max(
            cdiv(length + chunk, block_size) - max(0, length - window + 1) // block_size for length in range(0, 60)
        )
        assert most == sizes.max_blocks_for(60 + chunk, chunk)


@pytest.mark.parametrize(("windows", "num_usable"), [((None,), 7), ((None, 8), 12), ((None, 8, 3), 9), ((8,), 5)])
def test_r49_longest_sequence_is_exact(windows, num_usable):
    sizes = config(windows, num_usable=num_usable, width=12)
    longest = sizes.longest_sequence(2)
    assert sizes.max_blocks_for(longest, 2) <= num_usable
    assert longest == sizes.max_model_len or sizes.max_blocks_for(longest + 1, 2) > num_usable


def test_r49_longest_sequence_of_a_full_group_is_the_pool():
    sizes = config((None,), num_usable=1024, block_size=16, width=2048)
    assert sizes.longest_sequence(256) == 16384
    assert sizes.longest_sequence(256, 1023) == 16368
    assert sizes.max_concurrency(4096, 256) == 4
    assert config((None, 8), num_usable=24).max_concurrency(40, 1) == 24 / (10 + 3)


@pytest.mark.parametrize("num_usable", range(9))
@pytest.mark.parametrize("windows", [(None, 8, 3), (8, None, None)])
def test_b20_admission_that_lacks_blocks_in_any_group_changes_nothing(windows, num_usable):
    """Three groups of three blocks each: with n blocks the groups 0 ... n // 3 - 1 would get theirs."""
    sizes = config(windows, num_usable=max(1, num_usable))
    before = init(sizes)
    if num_usable == 0:
        before = (allocate(before[0], jnp.array([1], jnp.int32), max_blocks=1)[0], before[1])
    pool, table, appended = append(*before, jnp.array([9, 0], jnp.int32), max_new_tokens=16)
    assert int(appended.status) == Status.OUT_OF_BLOCKS
    chex.assert_trees_all_equal((pool, table), before)
    assert not appended.slot_mapping.any()


@pytest.mark.parametrize("missing", [1, 2, 3])
def test_b20_growth_that_lacks_a_block_in_any_group_changes_nothing(missing):
    pool, table = init(config((None, 8, 3), num_usable=30))
    pool, table, _, _ = step(pool, table, 12)
    pool, _, _ = allocate(pool, jnp.array([int(pool.num_free) - 3 + missing], jnp.int32), max_blocks=30)
    after = append(pool, table, jnp.array([1, 0], jnp.int32), max_new_tokens=1)
    assert int(after[2].status) == Status.OUT_OF_BLOCKS
    chex.assert_trees_all_equal(after[:2], (pool, table))


# -- prefix hits -------------------------------------------------------------------------------------------------------


class Cached:
    """Rows of blocks of four tokens, stored and published like a step does it."""

    def __init__(self, windows, num_usable=80):
        self.config = config(windows, num_usable=num_usable, num_rows=3, width=12)
        self.pool, self.table = init(self.config)
        self.cache = init_prefix_cache(self.config)
        self.match = jax.jit(match_prefix)

    def store(self, row, tokens):
        old = self.table.seq_lens
        counts = jnp.zeros(3, jnp.int32).at[row].set(len(tokens))
        self.pool, self.table, appended = append(self.pool, self.table, counts, max_new_tokens=48)
        assert int(appended.status) == Status.OK
        padded = jnp.zeros(48, jnp.int32).at[: len(tokens)].set(jnp.array(tokens, jnp.int32))
        slots = appended.slot_mapping[self.cache.chain_group, row]
        self.cache = write_tokens(self.cache, padded, slots)
        namespaces = jnp.zeros(3, jnp.int32)
        self.stored = np.asarray(self.table.block_ids)[:, row]
        self.cache, self.pool = publish(self.cache, self.pool, self.table, old, namespaces, max_new_tokens=48)
        self.pool, self.table = leave(self.pool, self.table, old, max_new_tokens=48)
        check_invariants(self.pool, self.table, self.cache)

    def look_up(self, tokens):
        padded = jnp.zeros(48, jnp.int32).at[: len(tokens)].set(jnp.array(tokens, jnp.int32))
        return self.match(self.cache, self.pool, padded, jnp.int32(len(tokens)), jnp.int32(0))

    def hit(self, tokens):
        """Tokens that would be hit."""
        return int(num_prefix_blocks(self.look_up(tokens))) * 4

    def admit(self, row, tokens):
        found = self.look_up(tokens)
        self.pool, self.table, status = acquire(self.pool, self.table, jnp.int32(row), found)
        assert int(status) == Status.OK
        check_invariants(self.pool, self.table, self.cache)
        return found

    def end(self, row):
        self.pool, self.table, status = cut(self.pool, self.table, self.table.seq_lens.at[row].set(0))
        assert int(status) == Status.OK

    def evict(self, group, column):
        """The block that the last store() filled is taken for something else."""
        block = int(self.stored[group, column])
        assert int(self.pool.content_uid[block]) > 0
        self.pool = dataclasses.replace(self.pool, content_uid=self.pool.content_uid.at[block].set(0))


A = list(range(1, 21))


def test_b12_hit_is_the_longest_that_holds_in_all_groups():
    cached = Cached((None, 8))
    cached.store(0, A)
    again = [*A, 99]
    assert cached.hit(again) == 20  # the window group needs blocks 3 and 4 of 0 ... 4
    assert np.flatnonzero(cached.look_up(again)[1]).tolist() == [3, 4]
    cached.evict(1, 4)
    assert cached.hit(again) == 16
    found = cached.look_up(again)
    assert [np.flatnonzero(ids).tolist() for ids in found] == [[0, 1, 2, 3], [2, 3]]


def test_b12_hit_is_zero_where_no_length_has_its_window():
    cached = Cached((None, 8))
    cached.store(0, A)
    for column in (4, 3, 2, 1):
        cached.evict(1, column)
    assert cached.hit([*A, 99]) == 4  # one block: all that the token behind it sees is there
    cached.evict(1, 0)
    assert cached.hit([*A, 99]) == 0


def test_r42_what_each_lost_block_costs():
    tokens = list(range(1, 17))
    for group, column, expected in ((1, 0, 12), (0, 0, 0), (0, 2, 8), (1, 2, 8)):
        cached = Cached((None, 8))
        cached.store(0, tokens)
        cached.evict(group, column)
        assert cached.hit([*tokens[:12], 99]) == expected, (group, column)


@pytest.mark.parametrize("windows", [(None, 8), (8, None, 5), (None, None, 8, 3), (8, 13)])
@pytest.mark.parametrize("length", range(1, 22))
def test_r41_r43_window_needs_its_last_blocks_and_earlier_ones_are_null(windows, length):
    cached = Cached(windows)
    cached.store(0, A)
    found = np.asarray(cached.look_up([*A, 99][:length]))
    hit = (length - 1) // 4
    for group, window in enumerate(windows):
        count = hit if window is None else min(hit, cdiv(window - 1, 4))
        assert np.flatnonzero(found[group]).tolist() == list(range(hit - count, hit))


@pytest.mark.parametrize("missing", [1, 2, 3])
def test_b20_row_with_a_hit_that_lacks_blocks_in_any_group_keeps_it_and_takes_nothing(missing):
    cached = Cached((None, 8, 3))
    cached.store(0, A)
    cached.admit(1, [*A, 99])
    taken = int(cached.pool.num_free) - 3 + missing
    pool, _, _ = allocate(cached.pool, jnp.array([taken], jnp.int32), max_blocks=80)
    after = append(pool, cached.table, jnp.array([0, 1, 0], jnp.int32), max_new_tokens=1)
    assert int(after[2].status) == Status.OUT_OF_BLOCKS
    chex.assert_trees_all_equal(after[:2], (pool, cached.table))


@pytest.mark.parametrize("missing", [1, 2, 3])
def test_b20_prompt_with_cached_blocks_that_cannot_go_on_is_not_admitted(missing):
    """The blocks that it hits are free and count; three more, one per group, are needed, and some are not there."""
    state = init_state(config((None, 8, 3), num_usable=40, num_rows=3, width=12))
    cached = Cached((None, 8, 3), num_usable=40)
    cached.store(0, A)
    cached.end(0)
    hits = int((cached.look_up([*A, 99]) > 0).sum())
    state = dataclasses.replace(state, pool=cached.pool, table=cached.table, prefix_cache=cached.cache)
    prompt = jnp.zeros(48, jnp.int32).at[:21].set(jnp.array([*A, 99], jnp.int32))
    before = jax.tree.map(np.asarray, state)
    need = 40 + missing
    state, num_cached, status = acquire_prefix(state, jnp.int32(1), prompt, jnp.int32(21), jnp.int32(0), need)
    assert (int(status), int(num_cached)) == (Status.OUT_OF_BLOCKS, 0)
    chex.assert_trees_all_equal(before, jax.tree.map(np.asarray, state))
    state, num_cached, status = acquire_prefix(state, jnp.int32(1), prompt, jnp.int32(21), jnp.int32(0), 40)
    assert (int(status), int(num_cached), int(state.pool.num_free)) == (Status.OK, 20, 40 - hits)
    check_invariants(state.pool, state.table, state.prefix_cache)


def test_hit_row_goes_on_like_one_that_stored_everything():
    cached = Cached((None, 8, 3))
    cached.store(0, A)
    cached.end(0)
    found = cached.admit(1, [*A, 99])
    cached.store(1, [99, 98, 97])
    other = Cached((None, 8, 3))
    other.store(1, [*A, 99, 98, 97])
    assert held(cached.table, 1) == held(other.table, 1)
    assert int(cached.table.seq_lens[1]) == 23
    assert np.asarray(cached.table.block_ids)[:2, 1, 4].tolist() == np.asarray(found)[:2, 4].tolist()


def test_r46_lost_window_block_is_healed_by_computing_it_again():
    cached = Cached((None, 8))
    cached.store(0, A)
    cached.evict(1, 4)
    cached.evict(1, 3)
    again = [*A, 99]
    assert cached.hit(again) == 12
    cached.admit(1, again)
    cached.store(1, again[12:])
    assert cached.hit(again) == 20
    assert (
        len(np.unique(np.asarray(cached.pool.content_uid))) == 6
    )  # five contents and none: nothing got a new identity


def test_windows_alone_follow_chains_in_the_largest():
    cached = Cached((3, 8))
    assert cached.cache.chain_group == 1
    cached.store(0, A)
    assert cached.hit([*A, 99]) == 20
    cached.evict(1, 0)
    assert cached.hit([*A, 99]) == 0  # the chain is followed from its root


def test_gemma3_270m_holds_a_third_of_the_bytes_at_4096_tokens():
    """benchmarks/windows.py counts the same with the block manager itself."""
    layer_windows = [None if i % 6 == 5 else 512 for i in range(18)]
    sizes = {"num_blocks": 9, "num_layers": 18, "num_kv_heads": 1, "head_dim": 256, "max_blocks_per_seq": 256}
    groups, windows = group_layers(layer_windows)
    grouped = CacheConfig(layer_groups=groups, sliding_windows=windows, **sizes)
    full = CacheConfig(**sizes)
    assert grouped.num_arrays * 6 == full.num_arrays
    one = full.num_blocks_for(4096) * full.bytes_per_block
    assert one >= 3 * grouped.num_blocks_for(4096) * grouped.bytes_per_block
    assert one >= 3 * grouped.max_blocks_for(4096, 256) * grouped.bytes_per_block
