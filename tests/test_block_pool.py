"""BlockPool alone: queue order, counts, refusals."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.block_pool import CACHED, UNCACHED, BlockPool, Status, acquire, allocate, forget_all, init_pool, release

take = jax.jit(allocate, static_argnames="max_blocks")
give = jax.jit(release)


def ids(*values):
    return jnp.array(values, jnp.int32)


def free_blocks(pool: BlockPool) -> list[int]:
    """Uncached ones, then cached ones, in the order of their reuse."""
    return [
        int(pool.free_queue[queue, (int(pool.head[queue]) + i) % pool.num_blocks])
        for queue in (UNCACHED, CACHED)
        for i in range(int(pool.count[queue]))
    ]


def test_init_pool_fresh_hands_out_every_block_but_the_null_block():
    assert free_blocks(init_pool(5)) == [1, 2, 3, 4]


@pytest.mark.parametrize("num_blocks", [1, 0, -1, True, 2.5])
def test_init_pool_bad_size_raises(num_blocks):
    with pytest.raises(ValueError, match="num_blocks"):
        init_pool(num_blocks)


def test_allocate_worked_example_gives_rows_their_blocks_in_order():
    pool, blocks, status = take(init_pool(8), ids(2, 0, 3), max_blocks=3)
    chex.assert_trees_all_equal(blocks, jnp.array([[1, 2, 0], [0, 0, 0], [3, 4, 5]], jnp.int32))
    assert int(status) == Status.OK
    assert free_blocks(pool) == [6, 7]


def test_release_ids_in_the_order_given_join_the_back_of_the_queue():
    pool, _, _ = take(init_pool(6), ids(5), max_blocks=5)
    pool, status = give(pool, ids(2, 1, 4))
    assert int(status) == Status.OK
    assert free_blocks(pool) == [2, 1, 4]


@pytest.mark.parametrize("num_free", range(5))
def test_allocate_one_more_than_free_is_refused_and_changes_nothing(num_free):
    pool, _, _ = take(init_pool(6), ids(5 - num_free), max_blocks=5)
    after, blocks, status = take(pool, ids(num_free + 1), max_blocks=5)
    assert int(status) == Status.OUT_OF_BLOCKS
    chex.assert_trees_all_equal(after, pool)
    chex.assert_trees_all_equal(blocks, jnp.zeros((1, 5), jnp.int32))


@pytest.mark.parametrize(("reserve", "status"), [(0, Status.OK), (1, Status.OK), (2, Status.OUT_OF_BLOCKS)])
def test_allocate_with_reserve_leaves_it_free(reserve, status):
    assert int(take(init_pool(6), ids(4), max_blocks=4, reserve=jnp.int32(reserve))[2]) == status


def test_allocate_nothing_below_the_reserve_is_ok():
    assert int(take(init_pool(3), ids(0), max_blocks=1, reserve=jnp.int32(99))[2]) == Status.OK


def test_allocate_negative_reserve_adds_no_blocks():
    assert int(take(init_pool(3), ids(3), max_blocks=3, reserve=jnp.int32(-5))[2]) == Status.OUT_OF_BLOCKS


@pytest.mark.parametrize("count", [-1, 4])
def test_allocate_count_out_of_range_is_refused(count):
    pool = init_pool(9)
    after, _, status = take(pool, ids(1, count), max_blocks=3)
    assert int(status) == Status.BAD_LENGTH
    chex.assert_trees_all_equal(after, pool)


@pytest.mark.parametrize("bad", [(2,), (1, 1), (-1,), (5,), (99,), (1, 2)])
def test_release_of_a_block_without_owner_is_refused_and_changes_nothing(bad):
    pool, _, _ = take(init_pool(5), ids(1), max_blocks=1)  # only block 1 has an owner
    after, status = give(pool, ids(*bad))
    assert int(status) == Status.NOT_OWNED
    chex.assert_trees_all_equal(after, pool)


def test_release_padding_ids_are_ignored():
    pool, _, _ = take(init_pool(5), ids(2), max_blocks=2)
    after, status = give(pool, ids(0, 2, 0))
    assert (int(status), free_blocks(after)) == (Status.OK, [3, 4, 2])


def test_release_shared_block_returns_at_the_last_owner():
    pool, _, _ = take(init_pool(4), ids(1), max_blocks=1)
    pool = dataclasses.replace(pool, ref_count=pool.ref_count.at[1].set(3))
    pool, _ = give(pool, ids(1, 0))
    assert free_blocks(pool) == [2, 3]
    pool, _ = give(pool, ids(1, 1))
    assert free_blocks(pool) == [2, 3, 1]


def cached_pool():
    """Blocks 1 - 3 of 5 are free and cached, to be reused in this order; 4 and 5 are uncached."""
    pool, _, _ = take(init_pool(6), ids(3), max_blocks=3)
    pool = dataclasses.replace(pool, content_uid=pool.content_uid.at[ids(1, 2, 3)].set(ids(7, 8, 9)))
    pool, _ = give(pool, ids(1, 2, 3))
    assert free_blocks(pool) == [4, 5, 1, 2, 3]
    return pool


def test_allocate_takes_uncached_blocks_first_and_cached_ones_lose_their_identity():
    pool, blocks, _ = take(cached_pool(), ids(3), max_blocks=3)
    assert blocks.tolist() == [[4, 5, 1]]
    assert pool.content_uid.tolist() == [0, 0, 8, 9, 0, 0]


def test_acquire_of_free_and_owned_blocks_counts_each_owner_and_keeps_the_order():
    pool, status = acquire(cached_pool(), ids(2, 0, 2))  # two rows hit one free block in one call
    assert (int(status), free_blocks(pool), int(pool.ref_count[2])) == (Status.OK, [4, 5, 1, 3], 2)
    pool, status = acquire(pool, ids(2))
    assert (int(status), free_blocks(pool), int(pool.ref_count[2])) == (Status.OK, [4, 5, 1, 3], 3)


@pytest.mark.parametrize("bad", [(4,), (1, 5), (-1,), (6,)])
def test_acquire_of_a_free_uncached_or_unknown_block_is_refused_and_changes_nothing(bad):
    pool = cached_pool()
    after, status = acquire(pool, ids(*bad))
    assert int(status) == Status.NOT_OWNED
    chex.assert_trees_all_equal(after, pool)


def test_forget_all_puts_cached_blocks_behind_the_others():
    pool = forget_all(cached_pool())
    assert free_blocks(pool) == [4, 5, 1, 2, 3]
    assert pool.count.tolist() == [5, 0]
    assert not pool.content_uid.any()


def test_pool_ring_wraps_like_a_deque():
    rng, pool, queue, owned = np.random.default_rng(0), init_pool(8), list(range(1, 8)), []
    for _ in range(300):
        if owned and rng.random() < 0.5:
            block = owned.pop(rng.integers(len(owned)))
            pool, status = give(pool, ids(block))
            queue.append(block)
        else:
            pool, blocks, status = take(pool, ids(1), max_blocks=1)
            if not queue:
                assert int(status) == Status.OUT_OF_BLOCKS
                continue
            owned.append(queue.pop(0))
            assert int(blocks[0, 0]) == owned[-1]
        assert int(status) == Status.OK
    assert free_blocks(pool) == queue


def test_allocate_under_vmap_equals_one_by_one():
    pools = jax.tree.map(lambda x: jnp.stack([x, x]), init_pool(6))
    counts = jnp.array([[1, 2], [3, 3]], jnp.int32)
    both = jax.vmap(lambda p, c: allocate(p, c, max_blocks=3))(pools, counts)
    for i in range(2):
        alone = allocate(init_pool(6), counts[i], max_blocks=3)
        chex.assert_trees_all_equal(jax.tree.map(lambda x, i=i: x[i], both), alone)


def test_allocate_wrong_dtype_raises_with_the_name():
    with pytest.raises(ValueError, match="num_blocks"):
        allocate(init_pool(6), jnp.array([1.0]), max_blocks=1)
