"""The kernel suite on the implementations that need no interpreter, and the work lists of the kernels."""

import jax.numpy as jnp
import kernel_cases
import numpy as np
import pytest
from test_kernels import ONLY_SHAPES

from pallas_kernels.reference import paged_attention_reference
from pallas_kernels.work_list import FIRST_ITEM, HIGH, LOW, NUM_CHUNKS, ROW, ROW_CHUNKS, decode_work, prefill_work
from pallas_kernels.xla import paged_attention_xla

NAMES = [pytest.param(name, marks=[pytest.mark.soak] * (name in ONLY_SHAPES)) for name in kernel_cases.CASES]


@pytest.mark.parametrize("name", NAMES)
def test_xla_passes_the_kernel_suite(name):
    kernel_cases.check(kernel_cases.CASES[name], paged_attention_xla)


def test_reference_passes_the_kernel_suite_in_the_dtype_of_the_queries():
    kernel_cases.check(kernel_cases.CASES["mixed_g4_h128_edges"], paged_attention_reference)


def test_decode_work_covers_every_tile_once_in_even_chunks():
    low, high = jnp.array([0, 0, 3, 0, 5]), jnp.array([9, 0, 7, 100, 5])
    is_in = jnp.array([True, True, True, True, False])
    work = decode_work(low, high, jnp.arange(5, dtype=jnp.int32), is_in, target=10)
    items, rows = np.asarray(work.items), np.asarray(work.rows)
    seen = [(int(r), t) for r, lo, hi in items[items[:, NUM_CHUNKS] > 0][:, [ROW, LOW, HIGH]] for t in range(lo, hi)]
    assert sorted(seen) == [(0, t) for t in range(9)] + [(2, t) for t in range(3, 7)] + [(3, t) for t in range(100)]
    np.testing.assert_array_equal(rows[:, ROW_CHUNKS], [1, 1, 1, 9, 0])  # an empty row has one empty chunk
    assert rows[3, FIRST_ITEM] == 3
    sizes = (items[:, HIGH] - items[:, LOW])[3:12]
    assert sizes.sum() == 100
    assert sizes.max() == 12
    assert len(items) == 10 + 5  # whatever the width of the table


@pytest.mark.parametrize("tile", [8, 32, 128])
def test_prefill_work_covers_every_query_of_longer_rows_and_the_padding_once(tile):
    rng = np.random.default_rng(tile)
    for _ in range(20):
        counts = rng.choice([0, 1, 2, 7, 8, 40], size=6)
        start = np.concatenate([[0], np.cumsum(counts)])
        lens = counts + rng.integers(0, 50, 6)
        num_tokens = int(start[-1] + rng.integers(0, 20))
        if num_tokens == 0:
            continue
        work = np.asarray(prefill_work(jnp.asarray(start), jnp.asarray(lens), num_tokens=num_tokens, tile=tile))
        seen = {}
        for row, token, first, end, position in work:
            assert token % 8 == 0
            assert first >= token
            assert end <= token + tile
            for t in range(first, end):
                assert t not in seen
                seen[t] = (row, position + t - token)
        for row, count in enumerate(counts):
            for i in range(count if count > 1 else 0):
                assert seen.pop(start[row] + i) == (row, lens[row] - count + i)
        assert sorted(seen) == list(range(start[-1], num_tokens))
        assert all(position < 0 for _, position in seen.values())
