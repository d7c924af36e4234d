"""BlockTable: the worked examples, edges of lengths and blocks, and the trials about sizes, order and sharing."""

import dataclasses
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax import CacheConfig
from paged_jax.block_pool import BlockPool, Status
from paged_jax.block_table import (
    BlockTable,
    append_tokens,
    fork,
    init,
    num_blocks_needed,
    release,
    reparent,
    slots_of,
    truncate,
)
from paged_jax.invariants import InvariantError, check_invariants

append = jax.jit(append_tokens, static_argnames="max_new_tokens")
fork_rows, cut_rows, release_rows = jax.jit(fork), jax.jit(truncate), jax.jit(release)
beam_step = jax.jit(reparent)


def manager(num_usable, block_size=4, num_rows=4, width=None, num_groups=1):
    return init(
        CacheConfig(
            num_blocks=num_usable + 1,
            num_layers=num_groups,
            num_kv_heads=1,
            head_dim=1,
            block_size=block_size,
            max_num_seqs=num_rows,
            max_blocks_per_seq=width or num_usable,
            layer_groups=tuple((g,) for g in range(num_groups)),
        )
    )


def vector(num_rows, **rows):
    """vector(4, r1=3) -> [0, 3, 0, 0]."""
    values = np.zeros(num_rows, np.int32)
    for name, value in rows.items():
        values[int(name[1:])] = value
    return jnp.asarray(values)


def grow(pool, table, max_new=128, **rows):
    pool, table, appended = append(pool, table, vector(len(table.seq_lens), **rows), max_new_tokens=max_new)
    check_invariants(pool, table)
    return pool, table, appended


def drop(pool, table, *rows):
    mask = jnp.zeros(len(table.seq_lens), bool).at[jnp.array(rows)].set(True)
    pool, table, status = release_rows(pool, table, mask)
    check_invariants(pool, table)
    return pool, table, int(status)


def blocks(table, row, group=0):
    return [int(b) for b in table.block_ids[group, row] if b]


# -- worked examples -------------------------------------------------------------------------------------------------


def test_block_manager_worked_example_of_six_blocks():
    pool, table = manager(6)  # ids are one higher than without a null block
    pool, table, _ = grow(pool, table, r0=6)
    assert blocks(table, 0) == [1, 2]
    pool, table, _ = grow(pool, table, r1=3)
    assert blocks(table, 1) == [3]
    pool, table, _ = drop(pool, table, 1)
    pool, table, _ = grow(pool, table, r0=3)
    assert blocks(table, 0) == [1, 2, 4]
    pool, table, _ = grow(pool, table, r2=5)
    assert blocks(table, 2) == [5, 6]
    pool, table, _ = drop(pool, table, 0)
    pool, table, _ = grow(pool, table, r3=10)
    assert blocks(table, 3) == [3, 4, 2]  # block 3 was free first; of row 0 the tail comes first
    assert int(pool.num_free) == 1
    refused_pool, refused_table, appended = grow(pool, table, r3=100)
    assert int(appended.status) == Status.TABLE_FULL
    chex.assert_trees_all_equal((refused_pool, refused_table), (pool, table))


def test_pool_worked_example_releases_ids_in_the_order_given():
    from paged_jax import block_pool

    pool, table = manager(6)
    for rows in ({"r0": 6}, {"r1": 3}):
        pool, table, _ = grow(pool, table, **rows)
    pool, table, _ = drop(pool, table, 1)
    for rows in ({"r0": 3}, {"r2": 5}):
        pool, table, _ = grow(pool, table, **rows)
    pool, status = block_pool.release(pool, jnp.array([1, 2, 4], jnp.int32))
    pool, ids, _ = block_pool.allocate(pool, jnp.array([3], jnp.int32), max_blocks=3)
    assert (int(status), ids[0].tolist(), int(pool.num_free)) == (Status.OK, [3, 1, 2], 1)


@pytest.mark.parametrize(
    ("ids", "block_size", "slots"),
    [([7, 3, 11], 4, {0: 28, 3: 31, 4: 12, 8: 44, 9: 45}), ([5, 2], 16, {15: 95, 16: 32, 23: 39})],
)
def test_slots_of_worked_examples(ids, block_size, slots):
    table = BlockTable(
        block_ids=jnp.array([[ids]], jnp.int32),
        seq_lens=jnp.array([1], jnp.int32),
        block_size=block_size,
        sliding_windows=(None,),
    )
    position = jnp.array(list(slots), jnp.int32)
    assert slots_of(table, jnp.zeros_like(position), position)[0].tolist() == list(slots.values())


def test_append_lengths_need_the_blocks_and_waste_of_the_example():
    pool, table = manager(9, num_rows=5, width=3)
    pool, table, _ = grow(pool, table, r0=1, r1=4, r2=5, r3=8, r4=9)
    assert table.num_blocks.tolist() == [1, 1, 2, 2, 3]
    assert (table.num_blocks * 4 - table.seq_lens).tolist() == [3, 0, 3, 0, 3]


# -- trials ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
def test_b55_blocks_are_counted_with_ceil(block_size):
    for length in range(3 * block_size + 2):
        pool, table = manager(5, block_size, num_rows=1)
        pool, table, _ = grow(pool, table, r0=length)
        num_blocks = -(-length // block_size)
        assert len(blocks(table, 0)) == num_blocks
        if length:
            assert 1 <= length - (num_blocks - 1) * block_size <= block_size
        _, after, _ = grow(pool, table, r0=1)
        assert len(blocks(after, 0)) - num_blocks == int(length % block_size == 0)


@pytest.mark.parametrize("block_size", range(1, 9))
def test_b48_need_is_the_block_deficit_plus_one_for_a_shared_tail(block_size):
    """All lengths 0 - 24, 1 - 9 new tokens, tail shared or not: exactly `need` free blocks suffice."""
    width, num_blocks = 40, 41
    cases = [c for c in itertools.product(range(25), range(1, 10), (False, True)) if c[0] or not c[2]]
    length, new, shared = (np.array(x) for x in zip(*cases, strict=True))
    used = -(-length // block_size)
    need = -(-(length + new) // block_size) - used + (shared & (length % block_size > 0))

    column = np.arange(width)[None]
    row = np.where(column < used[:, None], column + 1, 0)
    ids = np.stack([row, np.where(shared[:, None], row, 0)], axis=1)[:, None]
    lens = np.stack([length, np.where(shared, length, 0)], axis=1)
    block = np.arange(num_blocks)[None]
    refs = ((block > 0) & (block <= used[:, None])) * (1 + shared[:, None])

    def run(num_free):
        uncached = (used[:, None] + 1 + block) % num_blocks
        pool = BlockPool(
            free_queue=jnp.asarray(np.stack([uncached, 0 * uncached], axis=1), jnp.int32),
            head=jnp.zeros((len(cases), 2), jnp.int32),
            count=jnp.asarray(np.stack([num_free, 0 * num_free], axis=1), jnp.int32),
            ref_count=jnp.asarray(refs, jnp.int32),
            content_uid=jnp.zeros(refs.shape, jnp.int32),
        )
        table = BlockTable(
            block_ids=jnp.asarray(ids, jnp.int32),
            seq_lens=jnp.asarray(lens, jnp.int32),
            block_size=block_size,
            sliding_windows=(None,),
        )
        counts = jnp.asarray(np.stack([new, 0 * new], axis=1), jnp.int32)
        predicted = jax.vmap(num_blocks_needed)(pool, table, counts)
        _, _, appended = jax.vmap(lambda p, t, n: append_tokens(p, t, n, max_new_tokens=9))(pool, table, counts)
        return np.asarray(predicted).sum(axis=(1, 2)), np.asarray(appended.status)

    predicted, status = run(need)
    np.testing.assert_array_equal(predicted, need)
    assert (status == Status.OK).all()
    short = need > 0
    assert (run(need - 1)[1][short] == Status.OUT_OF_BLOCKS).all()


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_b52_rows_in_any_order_get_the_same_lengths_and_disjoint_blocks(order):
    pool, table = manager(12)
    for row, length in zip(order, (1, 4, 5, 9), strict=True):
        pool, table, _ = grow(pool, table, **{f"r{row}": length})
    pool, table, appended = grow(pool, table, r0=1, r1=1, r2=1, r3=1)
    for row, length in zip(order, (1, 4, 5, 9), strict=True):
        assert int(appended.slot_mapping[0, row, 0]) % 4 == length % 4
        assert int(appended.slot_mapping[0, row, 0]) // 4 == blocks(table, row)[length // 4]


def test_b17_releasing_a_row_twice_is_refused_bit_equal():
    pool, table, _ = drop(*grow(*manager(6), r0=5, r1=3)[:2], 0)
    after_pool, after_table, status = drop(pool, table, 0)
    assert status == Status.ROW_EMPTY
    chex.assert_trees_all_equal((after_pool, after_table), (pool, table))


def test_b17_releasing_a_live_and_an_empty_row_together_releases_neither():
    pool, table, _ = grow(*manager(6), r0=5)
    after_pool, after_table, status = drop(pool, table, 0, 1)
    assert status == Status.ROW_EMPTY
    chex.assert_trees_all_equal((after_pool, after_table), (pool, table))


def test_b08_null_block_is_never_handed_out_over_many_operations():
    rng, (pool, table) = np.random.default_rng(0), manager(7, num_rows=4, width=3)
    for _ in range(100):
        live = np.asarray(table.seq_lens) > 0
        if live.any() and rng.random() < 0.4:
            pool, table, _ = drop(pool, table, int(rng.choice(np.flatnonzero(live))))
        else:
            pool, table, _ = grow(pool, table, **{f"r{rng.integers(4)}": int(rng.integers(1, 6))})
        assert int(pool.ref_count[0]) == 0
        check_invariants(pool, table)


# -- sharing ---------------------------------------------------------------------------------------------------------


def test_fork_then_append_copies_the_partial_block_and_shares_the_full_one():
    pool, table, _ = grow(*manager(6), r0=6)
    pool, table, status = fork_rows(pool, table, jnp.array([0, 0, 2, 3], jnp.int32))
    assert int(status) == Status.OK
    assert pool.ref_count[jnp.array([1, 2])].tolist() == [2, 2]
    pool, table, appended = grow(pool, table, r0=1, r1=1)
    assert (blocks(table, 0), blocks(table, 1)) == ([1, 3], [1, 2])  # the last holder keeps the block
    assert (appended.copy_src[0].tolist(), appended.copy_dst[0].tolist()) == ([2, 0, 0, 0], [3, 0, 0, 0])


def test_reparent_shares_moves_and_gives_up_as_in_the_example():
    pool, table, _ = grow(*manager(9), r0=6, r1=5, r2=4, r3=9)  # blocks 1 2 | 3 4 | 5 | 6 7 8
    pool, table, status = beam_step(pool, table, jnp.array([0, 0, 2, 1], jnp.int32))
    check_invariants(pool, table)
    assert int(status) == Status.OK
    assert [blocks(table, r) for r in range(4)] == [[1, 2], [1, 2], [5], [3, 4]]
    assert table.seq_lens.tolist() == [6, 6, 4, 5]
    pool, table, appended = grow(pool, table, r0=1, r1=1)
    assert (appended.copy_src[0].tolist(), appended.copy_dst[0].tolist()) == ([2, 0, 0, 0], [9, 0, 0, 0])
    pool, table, _ = beam_step(pool, table, jnp.array([4, 4, 4, 2], jnp.int32))
    check_invariants(pool, table)
    assert [blocks(table, r) for r in range(4)] == [[], [], [], [5]]
    entries = (int(pool.head[0]) + np.arange(int(pool.count[0]))) % 10  # nothing is cached
    queue = np.asarray(pool.free_queue)[0, entries]
    assert queue.tolist() == [8, 7, 6, 9, 2, 1, 4, 3]  # row by row, tails first, a shared block at its last owner


@pytest.mark.parametrize("parents", [[0, 1, -1, 3], [0, 1, 5, 3], [0, 2, 2, 3]])
def test_reparent_to_a_row_that_holds_nothing_is_refused_bit_equal(parents):
    pool, table, _ = grow(*manager(9), r0=6, r1=5)
    after_pool, after_table, status = beam_step(pool, table, jnp.array(parents, jnp.int32))
    assert int(status) == Status.ROW_EMPTY
    chex.assert_trees_all_equal((after_pool, after_table), (pool, table))


def test_fork_at_a_block_boundary_copies_nothing():
    pool, table, _ = grow(*manager(6), r0=8)
    pool, table, _ = fork_rows(pool, table, jnp.array([0, 0, 2, 3], jnp.int32))
    pool, table, appended = grow(pool, table, r0=1, r1=1)
    assert (blocks(table, 0), blocks(table, 1)) == ([1, 2, 3], [1, 2, 4])
    assert not appended.copy_dst.any()


def test_copy_on_write_without_a_free_block_is_refused_bit_equal():
    pool, table, _ = grow(*manager(2), r0=6)
    pool, table, _ = fork_rows(pool, table, jnp.array([0, 0, 2, 3], jnp.int32))
    after_pool, after_table, appended = grow(pool, table, r0=1)
    assert int(appended.status) == Status.OUT_OF_BLOCKS
    chex.assert_trees_all_equal((after_pool, after_table), (pool, table))


@pytest.mark.parametrize(
    ("parents", "status"),
    [([1, 1, 2, 3], Status.ROW_IN_USE), ([0, 2, 2, 3], Status.ROW_EMPTY), ([0, 9, 2, 3], Status.ROW_EMPTY)],
)
def test_fork_that_cannot_be_is_refused_bit_equal(parents, status):
    pool, table, _ = grow(*manager(6), r0=6)
    after_pool, after_table, got = fork_rows(pool, table, jnp.array(parents, jnp.int32))
    assert int(got) == status
    chex.assert_trees_all_equal((after_pool, after_table), (pool, table))


@pytest.mark.parametrize(("length", "left"), [(9, [1, 2, 3]), (8, [1, 2]), (5, [1, 2]), (1, [1]), (0, [])])
def test_truncate_keeps_the_blocks_of_the_remaining_tokens(length, left):
    pool, table, _ = grow(*manager(6), r1=10)
    pool, table, status = cut_rows(pool, table, vector(4, r1=length))
    check_invariants(pool, table)
    assert (int(status), blocks(table, 1), int(table.seq_lens[1])) == (Status.OK, left, length)


@pytest.mark.parametrize("length", [-1, 11])
def test_truncate_to_a_length_out_of_range_is_refused(length):
    pool, table, _ = grow(*manager(6), r1=10)
    after_pool, after_table, status = cut_rows(pool, table, vector(4, r1=length))
    assert int(status) == Status.BAD_LENGTH
    chex.assert_trees_all_equal((after_pool, after_table), (pool, table))


@pytest.mark.parametrize("num_usable", [5, 4, 3, 1])
def test_append_when_any_group_lacks_a_block_changes_nothing(num_usable):
    pool, table = manager(num_usable, num_rows=2, width=3, num_groups=3)  # two rows in three groups need six blocks
    after_pool, after_table, appended = grow(pool, table, r0=4, r1=4)
    assert int(appended.status) == Status.OUT_OF_BLOCKS
    chex.assert_trees_all_equal((after_pool, after_table), (pool, table))


def test_append_several_groups_give_each_group_its_own_blocks():
    _, table, appended = grow(*manager(6, num_rows=2, width=3, num_groups=2), r1=5)
    assert (blocks(table, 1, 0), blocks(table, 1, 1)) == ([1, 2], [3, 4])
    assert appended.slot_mapping[:, 1, :5].tolist() == [[4, 5, 6, 7, 8], [12, 13, 14, 15, 16]]


def test_release_many_rows_at_once_equals_one_by_one():
    pool, table, _ = grow(*manager(20, num_rows=10, width=4), **{f"r{i}": 5 for i in range(10)})
    together = drop(pool, table, *range(9))[0]
    for row in range(9):
        pool, table, _ = drop(pool, table, row)
    chex.assert_trees_all_equal(together, pool)


@pytest.mark.parametrize(
    "operation", [fork, reparent, truncate, lambda p, t, x: append_tokens(p, t, x, max_new_tokens=1)]
)
def test_operations_with_an_entry_for_one_row_only_are_refused(operation):
    """An array of length 1 would broadcast to all rows."""
    with pytest.raises(ValueError, match="one for each row"):
        operation(*manager(6), jnp.zeros(1, jnp.int32))


def test_release_with_an_entry_for_one_row_only_is_refused():
    with pytest.raises(ValueError, match="one for each row"):
        release(*manager(6), jnp.ones(1, bool))


@pytest.mark.parametrize("block_size", [1, 4])
def test_append_of_no_tokens_at_all_is_a_no_op(block_size):
    pool, table = manager(6, block_size)
    after_pool, after_table, appended = append_tokens(pool, table, jnp.zeros(4, jnp.int32), max_new_tokens=0)
    assert (int(appended.status), appended.slot_mapping.shape) == (Status.OK, (1, 4, 0))
    chex.assert_trees_all_equal((after_pool, after_table), (pool, table))


def test_append_numpy_counts_are_taken():
    _, table, appended = append_tokens(*manager(6), np.array([1, 0, 0, 0], np.int32), max_new_tokens=1)
    assert (int(appended.status), blocks(table, 0)) == (Status.OK, [1])


def test_all_operations_under_vmap_equal_one_by_one():
    def run(length):
        pool, table = manager(9, num_rows=3, width=4)
        counts = jnp.array([0, 1, 0], jnp.int32) * length
        pool, table, appended = append_tokens(pool, table, counts, max_new_tokens=12)
        pool, table, forked = fork(pool, table, jnp.array([1, 1, 2], jnp.int32))
        pool, table, again = append_tokens(pool, table, jnp.array([2, 1, 0], jnp.int32), max_new_tokens=2)
        pool, table, cut = truncate(pool, table, table.seq_lens // 2)
        pool, table, moved = reparent(pool, table, jnp.array([1, 3, 1], jnp.int32))
        pool, table, freed = release(pool, table, jnp.array([True, False, False]))
        return pool, table, appended, again, forked, cut, moved, freed

    lengths = jnp.arange(1, 13, dtype=jnp.int32)
    together, one_by_one = jax.jit(jax.vmap(run))(lengths), jax.jit(run)
    for i, length in enumerate(lengths):
        chex.assert_trees_all_equal(jax.tree.map(lambda x, i=i: x[i], together), one_by_one(length))


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="XLA of older versions copies counts when rows are released")
@pytest.mark.parametrize("is_beam_step", [False, True])
def test_decode_bookkeeping_copies_nothing_of_the_pools_size(is_beam_step):
    """A copy of the queue or of the counts would make a step's cost grow with the pool."""

    def steps(pool, table):
        def step(_, state):
            pool, table, _ = append_tokens(*state, jnp.ones(8, jnp.int32), max_new_tokens=1)
            if is_beam_step:
                return reparent(pool, table, table.seq_lens % 9)[:2]
            return release(pool, table, table.seq_lens > 20)[:2]

        return jax.lax.fori_loop(0, 4, step, (pool, table))

    pool, table = manager(9_999, num_rows=8, width=4)
    text = jax.jit(steps, donate_argnums=(0, 1)).lower(pool, table).compile().as_text()
    assert "s32[10000]" in text
    assert [line for line in text.splitlines() if " copy(" in line and "s32[10000]" in line] == []


# -- the checker itself ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("ref_count", lambda x: x.at[1].add(1)),
        ("ref_count", lambda x: x.at[0].set(1)),
        ("ref_count", lambda x: x.at[5].set(1)),
        ("count", lambda x: x - 1),
        ("count", lambda x: x + 99),
        ("head", lambda x: x + 1),
        ("free_queue", lambda x: x.at[0, 3].set(3)),
        ("content_uid", lambda x: x.at[4].set(1)),
        ("content_uid", lambda x: x.at[0].set(1)),
    ],
)
def test_check_invariants_corrupt_pool_raises(field, change):
    pool, table, _ = grow(*manager(6), r0=5)
    with pytest.raises(InvariantError, match="invariant"):
        check_invariants(dataclasses.replace(pool, **{field: change(getattr(pool, field))}), table)


@pytest.mark.parametrize("change", [lambda i: i.at[0, 0, 0].set(2), lambda i: i.at[0, 1, 0].set(1), lambda i: i * 0])
def test_check_invariants_corrupt_table_raises(change):
    pool, table, _ = grow(*manager(6), r0=5)
    bad = dataclasses.replace(table, block_ids=change(table.block_ids))
    with pytest.raises(InvariantError, match="invariant"):
        check_invariants(pool, bad)
