"""paged_attention and attend, every implementation against a dense float64 formula and against counting."""

import dataclasses
import math
from functools import partial
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_jax.attention import attend, paged_attention
from paged_jax.batch import StepBatch
from paged_jax.kv_cache import LayerCache
from pallas_kernels.shapes import TINY_SHAPES
from pallas_kernels.xla import paged_attention_xla

IMPLEMENTATIONS = ("reference", "xla")
# Absolute and relative, by the dtype of the output: the rounding of the output itself dominates.
TOLERANCE = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 1.6e-2}


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request):
    return request.param


def dense_attention(query, keys, values, counts, *, scale=None, sliding_window=None, logits_soft_cap=None, sinks=None):
    """The formula in float64: query [T, N, H], keys and values one [len, K, H] per row -> out [T, N, H], lse [T, N]."""
    query = np.asarray(query, np.float64)
    sink = np.full(query.shape[1], -np.inf) if sinks is None else np.asarray(sinks, np.float64)
    out, lse = np.zeros(query.shape), np.tile(sink, (len(query), 1))
    token = 0
    for k, v, count in zip(keys, values, counts, strict=True):
        for position in range(len(k) - count, len(k)):
            low = 0 if sliding_window is None else max(0, position - sliding_window + 1)
            for n in range(query.shape[1]):
                head = n * k.shape[1] // query.shape[1]
                s = np.asarray(k, np.float64)[low : position + 1, head] @ query[token, n]
                s = s / math.sqrt(query.shape[2]) if scale is None else s * scale
                if logits_soft_cap is not None:
                    s = logits_soft_cap * np.tanh(s / logits_soft_cap)
                top = max(s.max(), sink[n])
                weights = np.exp(s - top)
                total = weights.sum() + np.exp(sink[n] - top)
                out[token, n] = weights @ np.asarray(v, np.float64)[low : position + 1, head] / total
                lse[token, n] = top + np.log(total)
            token += 1
    return out, lse


def paged(keys, values, *, block_size, max_blocks, seed=0, poison=np.nan, permute=True):
    """Pools and block tables that hold the rows; everything else in the pool is poison.

    Dead table entries name a block of another row. Block 0 (the null block) is poison too.
    """
    rng = np.random.default_rng(seed)
    needed = [-(-len(k) // block_size) for k in keys]
    num_blocks = len(keys) * max_blocks + 3  # by shapes alone: other lengths need no other executable
    ids = rng.permutation(np.arange(1, num_blocks)) if permute else np.arange(1, num_blocks)
    pools = [np.full((num_blocks, block_size, *keys[0].shape[1:]), poison, np.float32) for _ in range(2)]
    table = np.tile(ids[-1:], (len(keys), max_blocks)).astype(np.int32)
    first = 0
    for row, count in enumerate(needed):
        table[row, :count] = ids[first : first + count]
        table[row, count:] = ids[(first + count) % len(ids)]
        first += count
        for pool, data in zip(pools, (keys[row], values[row]), strict=True):
            for slot in range(len(data)):
                pool[table[row, slot // block_size], slot % block_size] = data[slot]
    return pools[0], pools[1], table


def make_case(shape, lens, *, counts=None, max_blocks=6, num_rows=6, seed=0, poison=np.nan, permute=True):
    """A problem with random data: counts None = decode.

    Rows of length 0 are appended up to num_rows, padding tokens up to a multiple of 32, so that most tests share their
    executables: compiling is what takes the time.
    """
    lens = [*lens, *[0] * (num_rows - len(lens))]
    rng = np.random.default_rng(seed)
    normal = partial(rng.standard_normal, dtype=np.float32)
    rows = [[normal((n, shape.num_kv_heads, shape.head_dim)) for n in lens] for _ in range(2)]
    k, v, table = paged(
        *rows, block_size=shape.block_size, max_blocks=max_blocks, seed=seed, poison=poison, permute=permute
    )
    arrays = {"block_tables": table, "seq_lens": np.asarray(lens, np.int32)}
    num_tokens = num_rows
    if counts is not None:
        counts = [*counts, *[0] * (num_rows - len(counts))]
        arrays["query_start_loc"] = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        num_tokens = -(-(sum(counts) + 1) // 32) * 32
    query = normal((num_tokens, shape.num_heads, shape.head_dim))
    return SimpleNamespace(query=query, k=k, v=v, keys=rows[0], values=rows[1], arrays=arrays, counts=counts)


def run(case, implementation, *, pool_dtype=None, query_dtype=None, **options):
    """paged_attention of a case, as NumPy arrays."""
    convert = partial(jnp.asarray, dtype=pool_dtype)
    result = paged_attention(
        jnp.asarray(case.query, query_dtype),
        convert(case.k),
        convert(case.v),
        **jax.tree.map(jnp.asarray, case.arrays),
        implementation=implementation,
        **options,
    )
    return jax.tree.map(np.asarray, result)


def expect_dense(case, **options):
    counts = [min(1, len(k)) for k in case.keys] if case.counts is None else case.counts
    if case.counts is not None:
        return dense_attention(case.query, case.keys, case.values, counts, **options)
    live = [i for i, n in enumerate(counts) if n]
    out, lse = dense_attention(
        case.query[live], [case.keys[i] for i in live], [case.values[i] for i in live], [1] * len(live), **options
    )
    full_out, full_lse = np.zeros(case.query.shape), np.full(case.query.shape[:2], -np.inf)
    if options.get("sinks") is not None:
        full_lse[:] = np.asarray(options["sinks"])
    full_out[live], full_lse[live] = out, lse
    return full_out, full_lse


def assert_dense(case, implementation, *, tolerance=TOLERANCE["float32"], **options):
    out, lse = run(case, implementation, return_residual=True, **options)
    expected_out, expected_lse = expect_dense(case, **options)
    np.testing.assert_allclose(out, expected_out, atol=tolerance, rtol=tolerance)
    np.testing.assert_allclose(lse, expected_lse, atol=tolerance, rtol=tolerance)


SMALL = TINY_SHAPES["gqa3_h64_bs16"]
TINY = dataclasses.replace(TINY_SHAPES["gqa4_h24_bs4"], num_heads=4, num_kv_heads=2, head_dim=8)


# ------------------------------------------------------------------------------------------------ against the formula


@pytest.mark.parametrize("shape", TINY_SHAPES.values(), ids=TINY_SHAPES.keys())
def test_decode_over_all_edge_lengths_equals_dense(shape, implementation):
    bs = shape.block_size
    assert_dense(make_case(shape, [0, 1, bs - 1, bs, bs + 1, 6 * bs]), implementation)


@pytest.mark.parametrize("shape", TINY_SHAPES.values(), ids=TINY_SHAPES.keys())
def test_ragged_with_prefill_decode_idle_and_padding_rows_equals_dense(shape, implementation):
    bs = shape.block_size
    case = make_case(shape, [bs + 1, 2 * bs, 0, 6 * bs, 1, 6], counts=[bs + 1, 1, 0, 3, 1, 0])
    assert_dense(case, implementation)


@pytest.mark.parametrize(
    ("chunk_tokens", "tile_tokens", "options"), [(4, 7, {}), (16, 16, {}), (4, 7, {"sliding_window": 4})]
)
def test_ragged_over_many_tiles_and_chunks_equals_dense(chunk_tokens, tile_tokens, options):
    case = make_case(TINY, [40, 61, 33, 17], counts=[40, 30, 1, 16], max_blocks=16)
    actual = paged_attention_xla(
        case.query, case.k, case.v, **case.arrays, **options, chunk_tokens=chunk_tokens, tile_tokens=tile_tokens
    )
    expected = expect_dense(case, **options)
    chex.assert_trees_all_close(jax.tree.map(np.asarray, actual), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("counts", [None, [5, 1, 0, 16, 1]], ids=["decode", "ragged"])
@pytest.mark.parametrize(
    "options",
    [
        {"sliding_window": 1},
        {"sliding_window": 4},
        {"sliding_window": 8, "logits_soft_cap": 1.5},
        {"scale": 0.3, "logits_soft_cap": 30.0},
        {"sinks": np.linspace(-2, 3, 4)},
        {"sinks": np.linspace(-2, 3, 4), "sliding_window": 4, "logits_soft_cap": 2.0},
    ],
    ids=lambda o: "-".join(o),
)
def test_options_equal_dense(options, counts, implementation):
    case = make_case(TINY, [5, 17, 0, 24, 1], counts=counts)
    if "sinks" in options:
        options = options | {"sinks": jnp.asarray(options["sinks"], jnp.float32)}
    assert_dense(case, implementation, **options)


def bfloat16_bits(values):
    return np.asarray(jax.lax.bitcast_convert_type(jnp.asarray(values, jnp.bfloat16), jnp.uint16))


@pytest.mark.parametrize(
    ("pool_dtype", "query_dtype"),
    [
        ("float16", "float16"),
        ("bfloat16", "bfloat16"),
        ("uint16", "bfloat16"),
        ("uint16", "float32"),
        ("float16", "float32"),
        ("float32", "bfloat16"),
    ],
)
def test_each_pool_and_query_dtype_equals_dense(pool_dtype, query_dtype, implementation):
    case = make_case(TINY, [0, 1, 7, 20])
    stored = "bfloat16" if pool_dtype == "uint16" else pool_dtype
    case.keys, case.values = (
        [np.asarray(jnp.asarray(x, stored), np.float32) for x in rows] for rows in (case.keys, case.values)
    )
    case.query = np.asarray(jnp.asarray(case.query, query_dtype), np.float32)
    if pool_dtype == "uint16":
        case.k, case.v = bfloat16_bits(case.k), bfloat16_bits(case.v)
    out = run(case, implementation, pool_dtype=pool_dtype, query_dtype=query_dtype)
    assert out.dtype == query_dtype
    tolerance = TOLERANCE[query_dtype]
    np.testing.assert_allclose(np.asarray(out, np.float64), expect_dense(case)[0], atol=tolerance, rtol=tolerance)


def test_uint16_pool_equals_bfloat16_pool_bitwise(implementation):
    case = make_case(TINY, [3, 20])
    as_bfloat16 = run(case, implementation, pool_dtype="bfloat16")
    case.k, case.v = bfloat16_bits(case.k), bfloat16_bits(case.v)
    np.testing.assert_array_equal(run(case, implementation, pool_dtype="uint16"), as_bfloat16)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "float8_e5m2"])
def test_scaled_pool_equals_dense_on_dequantised_values_with_poisoned_dead_scales(dtype, implementation):
    case = make_case(TINY, [0, 1, 7, 20], poison=np.nan)
    rng = np.random.default_rng(3)
    scales, stored, exact = [], [], []
    for pool in (case.k, case.v):
        live = np.isfinite(pool).all(axis=(2, 3))  # [num_blocks, block_size]
        scale = np.where(live[:, None], rng.uniform(0.01, 0.03, (len(pool), 2, 4)), np.nan).astype(np.float32)
        number = np.nan_to_num(pool / np.swapaxes(scale, 1, 2)[..., None])
        quantised = np.asarray(jnp.asarray(np.clip(np.round(number), -127, 127), dtype))
        scales.append(jnp.asarray(scale))
        stored.append(quantised)
        exact.append(quantised.astype(np.float32) * np.swapaxes(scale, 1, 2)[..., None])
    table = case.arrays["block_tables"]
    for rows, pool in zip((case.keys, case.values), exact, strict=True):
        for row, data in enumerate(rows):
            data[:] = pool[table[row]].reshape(-1, 2, 8)[: len(data)]
    case.k, case.v = stored
    out = run(case, implementation, pool_dtype=dtype, k_scale=scales[0], v_scale=scales[1])
    np.testing.assert_allclose(out, expect_dense(case)[0], atol=2e-5, rtol=2e-5)


# Few shapes and options, so that few executables are compiled; lengths, counts, ids and data are free.
@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    lens=st.lists(st.integers(0, 24), min_size=4, max_size=4),
    queries=st.lists(st.integers(0, 6), min_size=4, max_size=4),
    block_size=st.sampled_from([1, 4]),
    options=st.sampled_from([{}, {"sliding_window": 4, "logits_soft_cap": 2.0, "sinks": True}]),
    poison=st.sampled_from([np.nan, np.inf]),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_batch_equals_dense(lens, queries, block_size, options, poison, seed):
    shape = dataclasses.replace(TINY, block_size=block_size)
    counts = [min(q, n) for q, n in zip(queries, lens, strict=True)]
    case = make_case(
        shape,
        lens,
        counts=counts,
        max_blocks=24 // block_size,
        seed=seed,
        poison=poison,
    )
    if "sinks" in options:
        options = options | {"sinks": jnp.linspace(-1, 2, 4, dtype=jnp.float32)}
    assert_dense(case, "xla", **options)


# --------------------------------------------------------------------------------------------------- exact counting


def counting_case(lens, counts, *, block_size=4, max_blocks=8):
    """K = 0 and V row j = unit vector e_j: each output is 1 / (number of visible tokens) on the visible positions."""
    unit = np.eye(32, dtype=np.float32)
    keys = [np.zeros((n, 1, 32), np.float32) for n in lens]
    values = [unit[:n, None] for n in lens]
    k, v, table = paged(keys, values, block_size=block_size, max_blocks=max_blocks)
    arrays = {"block_tables": table, "seq_lens": np.asarray(lens, np.int32)}
    num_tokens = len(lens)
    if counts is not None:
        arrays["query_start_loc"] = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        num_tokens = sum(counts)
    return SimpleNamespace(query=np.ones((num_tokens, 2, 32), np.float32), k=k, v=v, arrays=arrays)


def expect_counting(positions, window):
    slot = np.arange(32)[None]
    position = np.asarray(positions)[:, None]
    visible = (slot <= position) & (slot > position - (window or 32))
    return np.repeat((visible / visible.sum(axis=1, keepdims=True))[:, None], 2, axis=1)


@pytest.mark.parametrize("window", [None, 1, 4, 8])
def test_b61_decode_counts_exactly_the_window(window, implementation):
    positions = [0, 6, 7, 8, 9, 15, 16, 31]
    out = run(counting_case([p + 1 for p in positions], None), implementation, sliding_window=window)
    expected = expect_counting(positions, window)
    np.testing.assert_array_equal(out > 0, expected > 0)
    np.testing.assert_allclose(out, expected, rtol=1e-6)


@pytest.mark.parametrize("window", [None, 1, 4, 8])
def test_b62_prefill_chunks_count_exactly_the_window(window, implementation):
    prefixes, chunks = (5, 8, 13, 0, 5), (1, 2, 3, 8, 8)
    lens = [p + c for p, c in zip(prefixes, chunks, strict=True)]
    positions = [p + i for p, c in zip(prefixes, chunks, strict=True) for i in range(c)]
    out = run(counting_case(lens, chunks), implementation, sliding_window=window)
    expected = expect_counting(positions, window)
    np.testing.assert_array_equal(out > 0, expected > 0)
    np.testing.assert_allclose(out, expected, rtol=1e-6)


@pytest.mark.parametrize("chunk_blocks", [1, 2, 3, 8])
def test_chunk_edges_weigh_every_token_once(chunk_blocks):
    lens = list(range(1, 32))
    case = counting_case(lens, None)
    out, _ = paged_attention_xla(case.query, case.k, case.v, **case.arrays, chunk_tokens=4 * chunk_blocks)
    np.testing.assert_allclose(out, expect_counting([n - 1 for n in lens], None), rtol=1e-6)


def test_chunk_lengths_agree():
    case = make_case(TINY, [1, 4, 5, 23], max_blocks=6)
    results = [
        paged_attention_xla(case.query, case.k, case.v, **case.arrays, chunk_tokens=chunk)[0]
        for chunk in (4, 8, 12, 64)
    ]
    chex.assert_trees_all_close(*results, atol=1e-6)


# -------------------------------------------------------------------------------------------------- masks and poison


def test_rows_of_length_zero_are_zero_with_lse_minus_infinity(implementation):
    out, lse = run(make_case(TINY, [0, 5, 0], num_rows=3), implementation, return_residual=True)
    np.testing.assert_array_equal(out[[0, 2]], 0.0)
    np.testing.assert_array_equal(lse[[0, 2]], -np.inf)


def test_very_low_scores_still_give_exactly_v(implementation):
    case = make_case(TINY, [1, 4, 9])
    for pool, value in ((case.k, 1.0), (case.v, 1.0)):
        pool[np.isfinite(pool)] = value
    case.query[:] = -524288.0 / 8
    out, lse = run(case, implementation, scale=1.0, return_residual=True)
    np.testing.assert_array_equal(out[:3], 1.0)
    np.testing.assert_allclose(lse[:3, 0], -524288.0 + np.log([1, 4, 9]), rtol=1e-7)


def test_opposite_huge_scores_stay_finite(implementation):
    case = make_case(TINY, [9], num_rows=1)
    case.k[np.isfinite(case.k)] = 6e4 / 8
    case.k[:, 1::2] = np.where(np.isfinite(case.k[:, 1::2]), -6e4 / 8, case.k[:, 1::2])
    case.query[:] = 1.0
    chex.assert_tree_all_finite(run(case, implementation, scale=1.0, return_residual=True))


def test_window_that_hides_the_first_chunks_equals_dense():
    case = make_case(TINY, [24, 22, 3], max_blocks=6)
    out, lse = paged_attention_xla(case.query, case.k, case.v, **case.arrays, sliding_window=3, chunk_tokens=4)
    expected = expect_dense(case, sliding_window=3)
    chex.assert_trees_all_close((np.asarray(out), np.asarray(lse)), expected, atol=2e-5)


@pytest.mark.parametrize("counts", [None, [1, 2, 4, 1, 8, 3]], ids=["decode", "ragged"])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_poison_in_dead_slots_never_shows(poison, window, counts, implementation):
    lens = [1, 3, 4, 5, 8, 9]
    results = [
        run(make_case(TINY, lens, counts=counts, poison=fill), implementation, sliding_window=window)
        for fill in (poison, 0.0)
    ]
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("chunk_tokens", [4, 8, 64])
def test_poison_in_dead_slots_never_shows_at_any_chunk_length(chunk_tokens):
    results = []
    for fill in (np.nan, 0.0):
        case = make_case(TINY, [1, 3, 4, 5, 8, 9], poison=fill)
        results.append(paged_attention_xla(case.query, case.k, case.v, **case.arrays, chunk_tokens=chunk_tokens)[0])
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("counts", [None, [2, 3]], ids=["decode", "ragged"])
def test_blocks_before_the_window_are_never_looked_at(counts, implementation):
    case = make_case(TINY, [20, 24], counts=counts)
    clean = run(case, implementation, sliding_window=4)
    freed = case.arrays["block_tables"][:, :3]  # positions 0..11; the lowest visible one is 15
    case.k[freed], case.v[freed] = np.nan, np.nan
    np.testing.assert_array_equal(run(case, implementation, sliding_window=4), clean)


def test_out_of_range_ids_in_dead_table_entries_do_not_matter():
    case = make_case(TINY, [1, 9, 0, 20])
    clean = run(case, "xla")
    for garbage in (-1, -(2**31), 2**31 - 1):
        used = -(-case.arrays["seq_lens"] // 4)
        dead = np.arange(6)[None] >= used[:, None]
        case.arrays["block_tables"] = np.where(dead, np.int32(garbage), case.arrays["block_tables"])
        np.testing.assert_array_equal(run(case, "xla"), clean)


# ------------------------------------------------------------------------------------------- V, rows, heads, strides


@pytest.mark.parametrize("shape", TINY_SHAPES.values(), ids=TINY_SHAPES.keys())
def test_constant_v_comes_back_for_every_head_size(shape, implementation):
    case = make_case(shape, [1, 1, 2, 3, 5, 6 * shape.block_size])
    case.v[np.isfinite(case.v)] = 3.0
    np.testing.assert_allclose(run(case, implementation), 3.0, rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "dtype"),
    [({"sliding_window": 4}, "float32"), ({"logits_soft_cap": 2.0}, "float32"), ({"sliding_window": 4}, "bfloat16")],
)
def test_constant_v_comes_back_under_every_mask_and_dtype(options, dtype, implementation):
    case = make_case(TINY, [1, 5, 24], counts=[1, 3, 20])
    case.v[np.isfinite(case.v)] = 3.0
    out = run(case, implementation, pool_dtype=dtype, query_dtype=dtype, **options)
    np.testing.assert_allclose(np.asarray(out, np.float32)[:24], 3.0, rtol=1e-6)


def test_v_that_names_the_kv_head_comes_back_in_its_group(implementation):
    case = make_case(SMALL, [3, 20], num_rows=2)
    case.v[:] = np.arange(3, dtype=np.float32)[None, None, :, None]
    np.testing.assert_allclose(run(case, implementation), np.tile(np.repeat([0, 1, 2], 3)[None, :, None], (2, 1, 64)))


@pytest.mark.parametrize(("num_rows", "is_ragged"), [(1, False), (2, False), (3, False), (5, False), (5, True)])
def test_each_row_gets_its_own_row(num_rows, is_ragged, implementation):
    lens = [7, 0, 3, 20, 1][:num_rows]
    counts = [min(n, 2) for n in lens] if is_ragged else None
    case = make_case(TINY, lens, counts=counts, num_rows=num_rows)
    for row, n in enumerate(lens):
        for slot in range(n):
            case.v[case.arrays["block_tables"][row, slot // 4], slot % 4] = row + 1
    expected = [r + 1 for r, c in enumerate(counts) for _ in range(c)] if is_ragged else np.arange(1, num_rows + 1)
    expected = np.where(np.asarray(lens) > 0, expected, 0) if not is_ragged else np.asarray(expected)
    out = run(case, implementation)[: len(expected)]
    np.testing.assert_allclose(out, np.tile(expected[:, None, None], (1, 4, 8)), rtol=1e-6)


def test_slices_and_transposed_tables_equal_contiguous_copies_bitwise(implementation):
    case = make_case(TINY_SHAPES["odd_13x46"], [3, 9])
    packed = jnp.concatenate([jnp.asarray(case.k), jnp.asarray(case.v)], axis=2)
    wide_query = jnp.pad(jnp.asarray(case.query), ((1, 1), (2, 3), (1, 1)))

    @jax.jit
    def sliced(packed, query, transposed_table):
        return paged_attention(
            query[1:-1, 2:-3, 1:-1],
            packed[:, :, :13],
            packed[:, :, 13:],
            block_tables=transposed_table.T,
            seq_lens=jnp.asarray(case.arrays["seq_lens"]),
            implementation=implementation,
        )

    out = sliced(packed, wide_query, jnp.asarray(case.arrays["block_tables"].T.copy()))
    np.testing.assert_array_equal(out, run(case, implementation))


# ------------------------------------------------------------------------------------------------------------- sinks


@pytest.mark.parametrize("window", [None, 3])
def test_sink_counts_once_for_every_chunk_length(window):
    for chunk_tokens in (4, 8, 64):
        case = counting_case([3, 3, 20], None)
        case.v[np.isfinite(case.v)] = 1.0
        out, _ = paged_attention_xla(
            case.query,
            case.k,
            case.v,
            **case.arrays,
            sinks=jnp.zeros(2),
            sliding_window=window,
            chunk_tokens=chunk_tokens,
        )
        np.testing.assert_allclose(out[:2], 3 / 4, rtol=1e-6)
        np.testing.assert_allclose(out[2], (20 if window is None else 3) / (21 if window is None else 4), rtol=1e-6)


@pytest.mark.parametrize("counts", [None, [0, 3]], ids=["decode", "ragged"])
def test_lse_of_a_token_that_sees_nothing_is_the_sink(counts, implementation):
    sinks = jnp.asarray([0.5, -1.0, 2.0, 30.0], jnp.float32)
    case = make_case(TINY, [0, 3], counts=counts)
    out, lse = run(case, implementation, sinks=sinks, return_residual=True)
    empty = [0] if counts is None else [3, 4]
    np.testing.assert_array_equal(out[empty], 0.0)
    np.testing.assert_array_equal(lse[empty], np.tile(sinks, (len(empty), 1)))


def test_bfloat16_sinks_are_accepted(implementation):
    sinks = jnp.asarray([0.5, -1.0, 2.0, 3.0], jnp.bfloat16)
    assert_dense(make_case(TINY, [3, 9]), implementation, sinks=sinks)


def test_lse_merges_two_halves_of_the_context(implementation):
    case = make_case(TINY, [16], num_rows=1)
    whole, _ = expect_dense(case)
    parts = []
    for half in (slice(0, 2), slice(2, 4)):
        part = SimpleNamespace(query=case.query, k=case.k, v=case.v)
        part.arrays = {"block_tables": case.arrays["block_tables"][:, half], "seq_lens": np.asarray([8], np.int32)}
        parts.append(run(part, implementation, return_residual=True))
    weight = np.exp([lse for _, lse in parts])
    merged = sum(w[..., None] * out for w, (out, _) in zip(weight, parts, strict=True)) / weight.sum(axis=0)[..., None]
    np.testing.assert_allclose(merged, whole, atol=1e-5)


# ------------------------------------------------------------------------------------------------------ independence


@pytest.mark.parametrize("counts", [None, [4, 1, 9]], ids=["decode", "ragged"])
def test_physical_block_ids_do_not_change_a_bit(counts, implementation):
    results = [run(make_case(TINY, [4, 9, 20], counts=counts, permute=p), implementation) for p in (True, False)]
    np.testing.assert_array_equal(*results)


def test_repetition_does_not_change_a_bit(implementation):
    case = make_case(SMALL, [4, 33, 90])
    np.testing.assert_array_equal(run(case, implementation), run(case, implementation))


@pytest.mark.parametrize("neighbours", [[0, 0], [24, 24], [1, 17]])
def test_neighbours_do_not_change_a_bit_of_a_row(neighbours):
    results = []
    for first, last in ([3, 3], neighbours):
        case = make_case(TINY, [first, 11, last])
        alone = make_case(TINY, [11], seed=5)
        blocks = case.arrays["block_tables"][1, :3]
        own = alone.arrays["block_tables"][0, :3]
        case.k[blocks], case.v[blocks], case.query[1] = alone.k[own], alone.v[own], alone.query[0]
        results.append(paged_attention_xla(case.query, case.k, case.v, **case.arrays, chunk_tokens=4)[0][1])
    np.testing.assert_array_equal(*results)


def test_decode_equals_the_last_row_of_prefill():
    prefill = make_case(SMALL, [37], counts=[37], num_rows=1)
    decode = SimpleNamespace(query=prefill.query[36:37], k=prefill.k, v=prefill.v)
    decode.arrays = {name: prefill.arrays[name] for name in ("block_tables", "seq_lens")}
    np.testing.assert_allclose(run(decode, "xla"), run(prefill, "xla")[36:37], atol=1e-6)


@pytest.mark.parametrize("counts", [None, [4, 1, 9]], ids=["decode", "ragged"])
def test_vmap_equals_a_loop(counts, implementation):
    cases = [make_case(TINY, lens, counts=counts, seed=i) for i, lens in enumerate(([4, 9, 20], [20, 4, 9]))]
    stacked = jax.tree.map(lambda *x: jnp.stack([jnp.asarray(a) for a in x]), *[vars(c)["arrays"] for c in cases])
    pools = [jnp.stack([getattr(c, name) for c in cases]) for name in ("k", "v")]
    query = jnp.stack([jnp.asarray(c.query) for c in cases])
    attention = partial(paged_attention, implementation=implementation)
    out = jax.vmap(lambda q, k, v, arrays: attention(q, k, v, **arrays))(query, *pools, stacked)
    np.testing.assert_allclose(out, np.stack([run(c, implementation) for c in cases]), atol=1e-6)


# -------------------------------------------------------------------------------------------------- memory and indices


def equations(jaxpr):
    """All equations of a jaxpr and of everything nested in it."""
    for eqn in jaxpr.eqns:
        yield eqn
        for value in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def huge_step(pool, query, kv, tables, lens, slots, start):
    batch = StepBatch(
        token_ids=slots,
        positions=slots,
        seq_lens=lens,
        query_start_loc=start,
        block_tables=tables[None],
        slot_mapping=slots[None],
        logits_indices=lens,
    )
    return attend(LayerCache(k=pool, v=pool, group=0), query, kv, kv, batch)


@pytest.mark.parametrize("num_tokens", [2, 9], ids=["decode", "ragged"])
def test_pool_beyond_two_to_the_31_elements_is_indexed_by_axis_and_never_reshaped(num_tokens):
    pool = jax.ShapeDtypeStruct((40_000, 16, 32, 128), jnp.float32)
    size = math.prod(pool.shape)
    assert size > 2**31
    integer = partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    tokens = [jax.ShapeDtypeStruct((num_tokens, heads, 128), jnp.float32) for heads in (64, 32)]
    start = None if num_tokens == 2 else integer((3,))
    jaxpr = jax.make_jaxpr(huge_step)(pool, *tokens, integer((2, 8)), integer((2,)), integer((num_tokens,)), start)
    touching = [e for e in equations(jaxpr.jaxpr) if any(math.prod(v.aval.shape) == size for v in e.invars)]
    reads = [e.params["dimension_numbers"].start_index_map for e in touching if e.primitive.name == "gather"]
    writes = [
        e.params["dimension_numbers"].scatter_dims_to_operand_dims for e in touching if e.primitive.name == "scatter"
    ]
    assert set(reads) == {(0,)}  # the block
    assert writes == [(0, 1), (0, 1)]  # block and offset
    assert {e.primitive.name for e in touching} <= {"gather", "scatter", "jit", "pjit", "while", "optimization_barrier"}


@pytest.mark.parametrize("num_tokens", [4, 40], ids=["decode", "ragged"])
@pytest.mark.parametrize("dtype", ["float32", "uint16", "int8"])
def test_wide_table_and_large_pool_need_no_temporary_of_their_size(dtype, num_tokens):
    pool = jax.ShapeDtypeStruct((4096, 16, 3, 64), dtype)
    integer = partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    arrays = {"block_tables": integer((4, 512)), "seq_lens": integer((4,))}
    if num_tokens > 4:
        arrays["query_start_loc"] = integer((5,))
    if dtype == "int8":
        arrays |= dict.fromkeys(("k_scale", "v_scale"), jax.ShapeDtypeStruct((4096, 3, 16), jnp.float32))
    query = jax.ShapeDtypeStruct((num_tokens, 9, 64), jnp.float32)
    compiled = jax.jit(partial(paged_attention, implementation="xla")).lower(query, pool, pool, **arrays).compile()
    one_row = 512 * 16 * 3 * 64 * 4
    assert compiled.memory_analysis().temp_size_in_bytes < one_row


def test_one_executable_serves_all_lengths():
    compiled = jax.jit(partial(paged_attention, implementation="xla"))
    for lens in ([1, 2], [24, 0], [17, 23]):
        case = make_case(TINY, [24, 24], num_rows=2)
        arrays = {"block_tables": jnp.asarray(case.arrays["block_tables"]), "seq_lens": jnp.asarray(lens, jnp.int32)}
        compiled(jnp.asarray(case.query), jnp.asarray(case.k), jnp.asarray(case.v), **arrays)
    assert compiled._cache_size() == 1


# ------------------------------------------------------------------------------------------------------------ attend


def decode_batch(table, seq_lens, *, implementation=None):
    lens = np.asarray(seq_lens, np.int32)
    last = np.maximum(lens - 1, 0)
    slots = table[np.arange(len(lens)), last // 4] * 4 + last % 4
    return StepBatch(
        token_ids=jnp.zeros(len(lens), jnp.int32),
        positions=jnp.asarray(last),
        seq_lens=jnp.asarray(lens),
        query_start_loc=None,
        block_tables=jnp.asarray(table)[None],
        slot_mapping=jnp.asarray(np.where(lens > 0, slots, 0), jnp.int32)[None],
        logits_indices=jnp.arange(len(lens), dtype=jnp.int32),
        implementation=implementation,
    )


def test_attend_prefill_then_decode_writes_exactly_the_live_slots_and_equals_dense():
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((15, heads, 8), dtype=np.float32) for heads in (4, 2, 2))
    table = np.asarray([[5, 2, 7, 3]], np.int32)
    cache = LayerCache(k=jnp.full((8, 4, 2, 8), jnp.nan), v=jnp.full((8, 4, 2, 8), jnp.nan), group=0)
    prefill = dataclasses.replace(
        decode_batch(table, [9]),
        query_start_loc=jnp.asarray([0, 9], jnp.int32),
        slot_mapping=jnp.asarray([table[0, p // 4] * 4 + p % 4 for p in range(9)], jnp.int32)[None],
    )
    step = jax.jit(attend)
    out, cache = step(cache, jnp.asarray(q[:9]), jnp.asarray(k[:9]), jnp.asarray(v[:9]), prefill)
    outs = [np.asarray(out)]
    for n in range(10, 16):
        now = slice(n - 1, n)
        out, cache = step(
            cache, jnp.asarray(q[now]), jnp.asarray(k[now]), jnp.asarray(v[now]), decode_batch(table, [n])
        )
        outs.append(np.asarray(out))
        written = np.isfinite(np.asarray(cache.k)).all(axis=(2, 3))[table[0]].reshape(-1)
        np.testing.assert_array_equal(written, np.arange(16) < n)
    np.testing.assert_allclose(np.concatenate(outs), dense_attention(q, [k], [v], [15])[0], atol=2e-5)


def test_attend_without_k_and_v_reads_the_shared_cache_and_changes_nothing():
    case = make_case(TINY, [3, 9], num_rows=2)
    cache = LayerCache(k=jnp.asarray(case.k), v=jnp.asarray(case.v), group=0)
    out, after = attend(cache, jnp.asarray(case.query), None, None, decode_batch(case.arrays["block_tables"], [3, 9]))
    np.testing.assert_array_equal(out, run(case, "xla"))
    jax.tree.map(np.testing.assert_array_equal, after, cache)


def test_attend_uses_table_and_slots_of_its_group():
    case = make_case(TINY, [3, 9], num_rows=2)
    right = decode_batch(case.arrays["block_tables"], [3, 9])
    wrong = jnp.zeros_like(right.block_tables)
    batch = dataclasses.replace(right, block_tables=jnp.concatenate([wrong, right.block_tables]))
    cache = LayerCache(k=jnp.asarray(case.k), v=jnp.asarray(case.v), group=1)
    out, _ = attend(cache, jnp.asarray(case.query), None, None, batch)
    np.testing.assert_array_equal(out, run(case, "xla"))


@pytest.mark.parametrize(
    ("argument", "in_batch", "error"),
    [("xla", "nonsense", None), (None, "nonsense", ValueError), ("mosaic_gpu", "xla", NotImplementedError)],
)
def test_attend_prefers_the_argument_over_the_batch(argument, in_batch, error):
    case = make_case(TINY, [3], num_rows=1)
    cache = LayerCache(k=jnp.asarray(case.k), v=jnp.asarray(case.v), group=0)
    batch = decode_batch(case.arrays["block_tables"], [3], implementation=in_batch)
    call = partial(attend, cache, jnp.asarray(case.query), None, None, batch, implementation=argument)
    if error is None:
        call()
    else:
        with pytest.raises(error, match="Mosaic" if argument else in_batch):
            call()


def test_attend_with_k_but_no_v_is_refused():
    case = make_case(TINY, [3], num_rows=1)
    cache = LayerCache(k=jnp.asarray(case.k), v=jnp.asarray(case.v), group=0)
    batch = decode_batch(case.arrays["block_tables"], [3])
    with pytest.raises(ValueError, match="k is given but v is None"):
        attend(cache, jnp.asarray(case.query), jnp.zeros((1, 2, 8)), None, batch)


# ------------------------------------------------------------------------------------------------------------ refusals


def valid_arguments():
    return {
        "query": jnp.zeros((2, 4, 8)),
        "key_cache": jnp.zeros((5, 4, 2, 8)),
        "value_cache": jnp.zeros((5, 4, 2, 8)),
        "block_tables": jnp.zeros((2, 3), jnp.int32),
        "seq_lens": jnp.ones(2, jnp.int32),
    }


INT8 = {"key_cache": jnp.zeros((5, 4, 2, 8), jnp.int8), "value_cache": jnp.zeros((5, 4, 2, 8), jnp.int8)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": jnp.zeros((2, 4))}, "query is"),
        ({"query": jnp.zeros((0, 4, 8)), "seq_lens": jnp.zeros(0, jnp.int32)}, "block_tables"),
        ({"query": jnp.zeros((2, 3, 8))}, "N = 3 heads.*K = 2"),
        ({"query": jnp.zeros((2, 4, 16))}, "key_cache"),
        ({"query": jnp.zeros((2, 4, 8), jnp.int32)}, "query"),
        ({"query": jnp.zeros((2, 4, 8), jnp.float8_e4m3fn)}, "query has dtype float8_e4m3fn"),
        ({"query": jnp.zeros((3, 4, 8))}, "T = 3 tokens for S = 2 rows"),
        ({"value_cache": jnp.zeros((5, 4, 1, 8))}, "value_cache"),
        ({"value_cache": jnp.zeros((5, 4, 2, 8), jnp.bfloat16)}, "both must have the same"),
        (
            {"key_cache": INT8["key_cache"].astype(jnp.int32), "value_cache": INT8["key_cache"].astype(jnp.int32)},
            "int32",
        ),
        ({"block_tables": jnp.zeros((2, 3))}, "block_tables"),
        ({"block_tables": jnp.zeros((3, 3), jnp.int32)}, "seq_lens"),
        ({"block_tables": jnp.zeros((2, 0), jnp.int32)}, "0 columns"),
        ({"seq_lens": jnp.ones(2)}, "seq_lens"),
        ({"query_start_loc": jnp.zeros(2, jnp.int32)}, "query_start_loc has 2 entries for S = 2"),
        ({"scale": math.nan}, "scale is nan"),
        ({"scale": "1"}, "scale is '1'"),
        ({"sliding_window": 0}, "sliding_window is 0"),
        ({"sliding_window": -1}, "sliding_window is -1"),
        ({"sliding_window": 4.0}, "sliding_window is 4.0"),
        ({"sliding_window": True}, "sliding_window is True"),
        ({"logits_soft_cap": 0.0}, "logits_soft_cap is 0.0"),
        ({"logits_soft_cap": -5.0}, "logits_soft_cap is -5.0"),
        ({"sinks": jnp.zeros(3)}, "sinks"),
        (INT8, r"k_scale is None: pass float32 \[5, 2, 4\]"),
        (INT8 | {"k_scale": jnp.ones((5, 2, 4))}, "v_scale is None"),
        (INT8 | {"k_scale": jnp.ones((5, 4, 2)), "v_scale": jnp.ones((5, 2, 4))}, "k_scale"),
        ({"k_scale": jnp.ones((5, 2, 4))}, "k_scale must be None"),
        ({"implementation": "triton"}, "implementation is 'triton'"),
        ({"interpret": True}, "interpret=True"),
        ({"interpret": True, "implementation": "xla"}, "interpret=True"),
    ],
)
def test_misuse_is_refused_with_the_argument_and_its_value(change, message):
    with pytest.raises(ValueError, match=message):
        paged_attention(**valid_arguments() | change)


def test_mosaic_gpu_by_name_refuses_what_it_cannot_do_with_the_reason():
    with pytest.raises(NotImplementedError, match=r"query has dtype float32|need JAX >= 0\.11\.2"):
        paged_attention(**valid_arguments(), implementation="mosaic_gpu", interpret=True)
    in_16_bits = {k: v.astype(jnp.bfloat16) for k, v in valid_arguments().items() if v.ndim > 2}
    with pytest.raises(NotImplementedError, match=r"block_size is 4|need JAX >= 0\.11\.2"):
        paged_attention(**valid_arguments() | in_16_bits, implementation="mosaic_gpu", interpret=True)
    large_blocks = {k: jnp.zeros((5, 16, 2, 64), jnp.bfloat16) for k in ("key_cache", "value_cache")}
    query = jnp.zeros((2, 4, 64), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match=r"need an NVIDIA GPU|need JAX >= 0\.11\.2"):
        paged_attention(**valid_arguments() | large_blocks | {"query": query}, implementation="mosaic_gpu")


def test_valid_arguments_are_accepted():
    chex.assert_shape(paged_attention(**valid_arguments()), (2, 4, 8))


def test_no_rank_promotion_and_no_dtype_promotion_is_implicit(implementation):
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        case = make_case(TINY, [2, 9], counts=[1, 3])
        sinks = jnp.zeros(4, jnp.bfloat16)
        run(
            case,
            implementation,
            sliding_window=4,
            logits_soft_cap=2.0,
            sinks=sinks,
            query_dtype="bfloat16",
            pool_dtype="float16",
        )
