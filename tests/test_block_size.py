"""recommend_block_size: costs by hand, and by counting what the block manager really allocates."""

import jax.numpy as jnp
import numpy as np
import pytest
from doubles import cache_config

from paged_jax import CacheConfig, append_tokens, init_state, recommend_block_size


def config(**sizes):
    return cache_config(64, 16, **{"max_num_seqs": 4, "max_blocks_per_seq": 64} | sizes)


def test_costs_of_two_lengths_by_hand():
    """9 and 24 tokens: blocks of 8 hold 16 + 24 slots, blocks of 16 hold 16 + 32, blocks of 64 hold 128."""
    report = recommend_block_size([9, 24], config(), candidates=[64, 8, 16, 8], max_waste=0.2)
    by_size = {c.block_size: c for c in report.costs}
    assert list(by_size) == [8, 16, 64]
    assert [c.waste for c in report.costs] == pytest.approx([7 / 40, 15 / 48, 95 / 128])
    assert by_size[16].wasted_slots == 7.5
    assert by_size[16].wasted_bytes == 7.5 * config().bytes_per_token
    assert (by_size[8].table_entries, by_size[8].table_bytes) == (2.5, 4 * 4 * 128)
    assert by_size[8].blocks_per_step == 0.5
    assert (report.block_size, report.num_sequences, report.mean_length) == (8, 2, 16.5)


@pytest.mark.parametrize("block_size", [4, 16])
def test_waste_is_what_the_block_manager_leaves_unused(block_size):
    lengths = [1, 16, 17, 100, 63, 5]
    c = cache_config(200, block_size, max_num_seqs=6, max_blocks_per_seq=32)
    state = init_state(c)
    pool, _, _ = append_tokens(state.pool, state.table, jnp.asarray(lengths, jnp.int32), max_new_tokens=100)
    allocated = (200 - int(pool.num_free)) * block_size
    (costs,) = recommend_block_size(lengths, c, candidates=[block_size]).costs
    assert costs.waste == pytest.approx(1 - sum(lengths) / allocated)


def test_largest_block_within_the_bound_is_recommended_and_the_reason_has_the_numbers():
    lengths = np.random.default_rng(0).integers(200, 1000, 500)
    report = recommend_block_size(lengths, config(), max_waste=0.04)
    costs = {c.block_size: c for c in report.costs}
    assert report.block_size == 32
    assert costs[32].waste <= 0.04 < costs[64].waste
    text = str(report)
    for part in (f"blocks of 64 would leave {costs[64].waste:.1%}", "2.0 times as large", "block_size=32"):
        assert part in text
    assert sum(line.startswith(">") for line in text.splitlines()) == 1


def test_short_sequences_get_the_smallest_block_and_are_told_so():
    report = recommend_block_size([3, 5], config())
    assert report.block_size == 8
    assert "the sequences are short" in report.reason


def test_groups_multiply_tables_and_allocations():
    one = recommend_block_size([9, 24], config(), candidates=[8]).costs[0]
    two = recommend_block_size(
        [9, 24], config(layer_groups=((0,), (1,)), sliding_windows=(None, None)), candidates=[8]
    ).costs[0]
    for name in ("table_entries", "table_bytes", "blocks_per_step"):
        assert getattr(two, name) == 2 * getattr(one, name)
    assert two.wasted_bytes == one.wasted_bytes


@pytest.mark.parametrize("length", [3, 9, 30, 64])
def test_windows_count_what_their_groups_own(length):
    c = config(layer_groups=((0,), (1,)), sliding_windows=(None, 10))
    (costs,) = recommend_block_size([length], c, candidates=[16]).costs
    assert costs.table_entries == c.num_blocks_for(length)
    assert costs.wasted_slots == 16 * c.num_blocks_for(length) - length - min(length, 9)


def test_window_of_one_token_owns_nothing_at_block_ends_and_wastes_nothing():
    costs = recommend_block_size([16, 32], config(sliding_windows=(1,)), candidates=[8, 16]).costs
    assert [(c.waste, c.table_entries) for c in costs] == [(0, 0), (0, 0)]


@pytest.mark.parametrize(
    ("lengths", "options", "message"),
    [
        ([], {}, "lengths"),
        ([3, 0], {}, "lengths.*0"),
        ([2.5], {}, "lengths.*2.5"),
        ([True], {}, "lengths"),
        ([1025], {}, "1025.*1024"),
        ([3], {"candidates": []}, "candidates"),
        (3, {}, "lengths.*3"),
        ([3], {"candidates": [0]}, "candidates"),
        ([3], {"candidates": 8}, "candidates"),
        ([3], {"candidates": [8, None]}, "candidates"),
        ([3], {"max_waste": 0}, "max_waste"),
        ([3], {"max_waste": 1}, "max_waste"),
    ],
)
def test_bad_input_is_refused_by_name(lengths, options, message):
    with pytest.raises(ValueError, match=message):
        recommend_block_size(lengths, config(), **options)


def test_candidates_are_multiples_of_the_kernel_block_size():
    config = CacheConfig(
        num_blocks=9,
        num_layers=1,
        num_kv_heads=1,
        head_dim=8,
        max_blocks_per_seq=8,
        block_size=32,
        kernel_block_size=32,
    )
    report = recommend_block_size([200, 256], config)
    assert [c.block_size for c in report.costs] == [32, 64, 128]
    with pytest.raises(ValueError, match="multiple of config"):
        recommend_block_size([200], config, candidates=(8, 16))
