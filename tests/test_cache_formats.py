"""Storage formats of K and V: rounding, scales, what must never be silent; trials and rows by their numbers."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from doubles import (
    TINY,
    VOCAB,
    cache_config,
    ids,
    oracle_llm,
    oracle_tokens,
    prompt,
    tiny_llm,
    tiny_params,
    tokens_of,
)

from paged_jax import (
    BeamSearchParams,
    CacheConfig,
    LayerCache,
    SamplingParams,
    StepBatch,
    append_tokens,
    attend,
    build_decode_batch,
    build_ragged_batch,
    init_state,
    paged_attention,
)
from paged_jax.config import CACHE_DTYPES, SCALED_CACHE_DTYPES
from paged_jax.kv_cache import (
    copy_blocks,
    init_cache,
    quantise,
    read_blocks,
    storage_dtype,
    storage_format,
    to_storage,
    write_blocks,
    write_kv,
)

GREEDY = SamplingParams(temperature=0, max_tokens=8)
#: Largest error of a stored number, as a fraction of the largest magnitude in its row.
ROUNDING = {
    "float32": 0.0,
    "bfloat16": 2**-8,
    "float16": 2**-11,
    "int8": 0.5 / 127,
    "float8_e4m3fn": 2**-4,
    "float8_e5m2": 2**-3,
}
every_format = pytest.mark.parametrize("dtype", CACHE_DTYPES)
every_scaled_format = pytest.mark.parametrize("dtype", SCALED_CACHE_DTYPES)


def config(dtype, *, num_usable=9, block_size=8, num_layers=2, num_kv_heads=2, head_dim=16, **sizes):
    return CacheConfig(
        num_blocks=num_usable + 1,
        block_size=block_size,
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_blocks_per_seq=num_usable,
        dtype=dtype,
        **sizes,
    )


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def dequantised(layer, which):
    """What the slots of a layer hold: float32 [num_blocks * block_size, K, H]."""
    numbers, scale = getattr(layer, which), getattr(layer, f"{which}_scale")
    dtype = storage_format(numbers.dtype, layer.dtype)
    values = np.asarray(numbers).view(jnp.dtype(dtype)).astype(np.float32)
    if scale is not None:
        values = values * np.swapaxes(np.asarray(scale), 1, 2)[..., None]
    return values.reshape(-1, *values.shape[2:])


# -- numbers ---------------------------------------------------------------------------------------------------------


def test_b70_r104_int8_rounds_half_to_even_and_is_symmetric():
    values = jnp.asarray([1.6, -1.6, 2.5, -2.5, 126.7, 127.4, -128.9, 0.49], jnp.float32)
    assert to_storage(values, jnp.dtype("int8"), "int8").tolist() == [2, -2, 2, -2, 127, 127, -127, 0]


def test_b70_int8_loses_no_magnitude_on_average():
    values = np.random.default_rng(0).uniform(-1, 1, (10_000, 1)).astype(np.float32)
    values = np.concatenate([values, np.ones_like(values)], axis=1)  # one LSB is 1 / 127 in every row
    numbers, scale = quantise(jnp.asarray(values), "int8")
    stored = np.asarray(to_storage(numbers, jnp.dtype("int8"), "int8"), np.float64) * np.asarray(scale)[:, None]
    lost = (np.abs(stored) - np.abs(values))[:, 0] * 127
    assert abs(lost.mean()) < 0.02
    assert np.abs(lost).max() <= 0.5001


@every_format
def test_stored_numbers_are_within_the_rounding_of_the_format(dtype):
    k = normal(40, 2, 16) * np.exp2(np.random.default_rng(1).integers(-20, 20, (40, 2, 1))).astype(np.float32)
    k[3] = 0
    v = normal(40, 2, 16, seed=2)
    slots = jnp.arange(8, 48, dtype=jnp.int32)
    if dtype == "float16":
        k = np.clip(k, -6e4, 6e4)
    layer = write_kv(init_cache(config(dtype)).layer(1), jnp.asarray(k), jnp.asarray(v), slots)
    for which, values in (("k", k), ("v", v)):
        error = np.abs(dequantised(layer, which)[8:48] - values)
        smallest = 1e-7 if dtype == "float16" else 0  # it has no smaller numbers
        assert (error <= ROUNDING[dtype] * np.abs(values).max(axis=-1, keepdims=True) + smallest).all()


@every_scaled_format
def test_largest_number_of_a_row_is_the_largest_of_the_format_and_zero_rows_have_scale_1(dtype):
    values = normal(5, 3, 8)
    values[2, 1] = 0
    numbers, scale = quantise(jnp.asarray(values), dtype)
    limit = 127 if dtype == "int8" else float(jnp.finfo(dtype).max)
    stored = np.abs(np.asarray(to_storage(numbers, jnp.dtype(dtype), dtype)).astype(np.float32))
    assert (np.asarray(scale)[2, 1], stored[2, 1].max()) == (1, 0)
    stored[2, 1] = limit
    assert (stored.max(axis=-1) == limit).all()


@every_scaled_format
@pytest.mark.parametrize("largest", [1e-45, 1e-38, 1e-30, 3.4e38])
def test_smallest_and_largest_floats_stay_finite(dtype, largest):
    numbers, scale = quantise(jnp.full((1, 4), largest, jnp.float32), dtype)
    stored = np.asarray(to_storage(numbers, jnp.dtype(dtype), dtype)).astype(np.float64) * np.asarray(scale)[..., None]
    assert (np.asarray(scale) > 0).all()
    np.testing.assert_allclose(stored, largest, rtol=1e-5, atol=1e-38)  # subnormal floats count as zero


@every_scaled_format
def test_attention_of_every_bit_pattern_is_the_number_that_it_means(dtype):
    """V is each of the 256 numbers in turn, the query sees that token alone."""
    bits = np.arange(256, dtype=np.uint8)
    value = bits.view(jnp.dtype(dtype)).astype(np.float32)
    pool = np.tile(bits[:, None, None, None], (1, 1, 1, 2))
    pool = pool if storage_dtype(dtype) == jnp.uint8 else pool.view(jnp.dtype(dtype))
    for implementation in ("reference", "xla"):
        out = paged_attention(
            jnp.zeros((256, 1, 2)),
            jnp.zeros_like(jnp.asarray(pool)),
            jnp.asarray(pool),
            block_tables=jnp.arange(256, dtype=jnp.int32)[:, None],
            seq_lens=jnp.ones(256, jnp.int32),
            k_scale=jnp.ones((256, 1, 1)),
            v_scale=jnp.full((256, 1, 1), 0.5),
            kv_cache_dtype=dtype,
            implementation=implementation,
        )
        np.testing.assert_array_equal(np.asarray(out)[:, 0, 0], value * 0.5)


# -- writes and copies -----------------------------------------------------------------------------------------------


@every_format
@pytest.mark.parametrize(("num_kv_heads", "head_dim"), [(8, 64), (13, 46)])
def test_r100_r101_each_token_is_at_its_slot_and_nowhere_else(dtype, num_kv_heads, head_dim):
    cache = init_cache(config(dtype, num_usable=20, num_kv_heads=num_kv_heads, head_dim=head_dim))
    k, v = normal(42, num_kv_heads, head_dim), normal(42, num_kv_heads, head_dim, seed=1)
    slots = 8 + np.random.default_rng(2).permutation(160)[:42].astype(np.int32)
    layer = jax.jit(write_kv)(cache.layer(0), jnp.asarray(k), jnp.asarray(v), jnp.asarray(slots))
    others = np.setdiff1d(np.arange(168), slots)
    for which, values in (("k", k), ("v", v)):
        alone = dequantised(
            write_kv(cache.layer(0), jnp.asarray(values), jnp.asarray(values), 8 + jnp.arange(42, dtype=jnp.int32)), "k"
        )[8:50]  # what a token becomes depends on neither its slot nor the others
        np.testing.assert_array_equal(dequantised(layer, which)[slots], alone)
        assert not dequantised(layer, which)[others].any()
        scale = getattr(layer, f"{which}_scale")
        if scale is not None:
            assert (np.swapaxes(np.asarray(scale), 1, 2).reshape(168, -1)[others] == 1).all()


@every_format
def test_r102_padding_slots_reach_no_block_but_the_null_block(dtype):
    cache = init_cache(config(dtype))
    ones = jnp.ones((3, 2, 16))
    layer = write_kv(cache.layer(0), ones, ones, jnp.array([-1, 0, -7], jnp.int32))
    before = cache.layer(0)
    for array, old in zip(jax.tree.leaves(layer), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(array[1:], old[1:])
    empty = write_kv(before, ones[:0], ones[:0], jnp.zeros(0, jnp.int32))
    jax.tree.map(np.testing.assert_array_equal, empty, before)


def filled(dtype, **sizes):
    """A cache in which every slot of every layer holds other numbers."""
    cache = init_cache(config(dtype, **sizes))
    num_slots = cache.k[0].shape[0] * cache.kernel_block_size
    for index in range(cache.num_layers):
        k, v = (jnp.asarray(normal(num_slots, 2, 16, seed=2 * index + i)) for i in (0, 1))
        layer = write_kv(cache.layer(index), k, v, jnp.arange(num_slots, dtype=jnp.int32))
        cache = cache.with_layer(index, layer)
    return cache


@every_format
@pytest.mark.parametrize("kernel_block_size", [8, 2])
def test_r105_copies_and_swaps_move_numbers_and_scales_of_the_chosen_blocks_of_all_layers(dtype, kernel_block_size):
    cache = filled(dtype, kernel_block_size=kernel_block_size)
    assert (cache.block_size, cache.kernel_block_size) == (8, kernel_block_size)
    src, dst = jnp.array([3, 5, 0], jnp.int32), jnp.array([7, 2, 0], jnp.int32)
    copied = jax.jit(partial(copy_blocks, are_disjoint=True))(cache, src, dst)
    swapped = write_blocks(cache, dst, read_blocks(cache, src))
    for index in range(2):
        for which in ("k", "v"):
            expected = dequantised(cache.layer(index), which).reshape(10, 8, 2, 16)
            expected[[7, 2]] = expected[[3, 5]]
            for result in (copied, swapped):
                np.testing.assert_array_equal(dequantised(result.layer(index), which).reshape(expected.shape), expected)


@every_scaled_format
def test_r106_layer_that_shares_anothers_keys_and_values_writes_nothing(dtype):
    layer, batch = filled(dtype).layer(0), decode_batch([9, 20])
    query = jnp.asarray(normal(2, 4, 16))
    out, same = jax.jit(partial(attend, k=None, v=None, batch=batch))(layer, query)
    jax.tree.map(np.testing.assert_array_equal, same, layer)
    assert np.isfinite(out).all()


# -- attention -------------------------------------------------------------------------------------------------------


def decode_batch(lens, block_size=8, **fields):
    """Row r has the blocks 1 + 3 r ... 3 + 3 r."""
    lens = np.asarray(lens, np.int32)
    table = 1 + np.arange(3 * len(lens), dtype=np.int32).reshape(-1, 3)
    slots = table[np.arange(len(lens)), (lens - 1) // block_size] * block_size + (lens - 1) % block_size
    return StepBatch(
        token_ids=jnp.zeros(len(lens), jnp.int32),
        positions=jnp.asarray(lens - 1),
        seq_lens=jnp.asarray(lens),
        query_start_loc=None,
        block_tables=jnp.asarray(table)[None],
        slot_mapping=jnp.asarray(slots)[None],
        logits_indices=jnp.arange(len(lens), dtype=jnp.int32),
        **fields,
    )


def dense(query, k, v):
    """One query over keys and values [len, K, H], in float64."""
    group = query.shape[0] // k.shape[1]
    k, v = (np.repeat(np.asarray(x, np.float64), group, axis=1) for x in (k, v))
    scores = np.einsum("nh,tnh->nt", query, k) / np.sqrt(query.shape[1])
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.einsum("nt,tnh->nh", weights / weights.sum(axis=1, keepdims=True), v)


@every_format
@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 9], ids="K={}".format)
def test_attend_equals_dense_on_what_was_stored(dtype, implementation, num_kv_heads):
    cache = init_cache(config(dtype, num_kv_heads=num_kv_heads))
    layer, lens = cache.layer(1), [9, 20]
    history = [normal(20, num_kv_heads, 16, seed=s) for s in (1, 2)]
    for token in range(20):
        batch = decode_batch([min(token + 1, n) for n in lens], implementation=implementation)
        k, v = (jnp.asarray(np.stack([h[min(token, n - 1)] for n in lens])) for h in history)
        layer = jax.jit(write_kv)(layer, k, v, batch.slot_mapping[0])
    query = normal(2, 18, 16, seed=3)
    out, layer = jax.jit(attend)(layer, jnp.asarray(query), k, v, batch)
    for row, length in enumerate(lens):
        slots = (1 + 3 * row) * 8 + np.arange(length)
        expected = dense(query[row], dequantised(layer, "k")[slots], dequantised(layer, "v")[slots])
        np.testing.assert_allclose(out[row], expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("per", ["tensor", "head", "token"])
@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_r104_scales_may_be_equal_for_a_tensor_a_head_or_differ_by_token(per, implementation):
    rng = np.random.default_rng(0)
    pools = [rng.integers(-127, 128, (10, 8, 2, 16)).astype(np.int8) for _ in "kv"]
    shape = {"tensor": (1, 1, 1), "head": (1, 2, 1), "token": (10, 2, 8)}[per]
    scales = [np.broadcast_to(rng.uniform(0.005, 0.02, shape), (10, 2, 8)).astype(np.float32) for _ in "kv"]
    query, batch = normal(2, 4, 16), decode_batch([9, 20])
    out = paged_attention(
        query,
        *pools,
        block_tables=batch.block_tables[0],
        seq_lens=batch.seq_lens,
        k_scale=scales[0],
        v_scale=scales[1],
        implementation=implementation,
    )
    exact = [(p * np.swapaxes(s, 1, 2)[..., None]).reshape(80, 2, 16) for p, s in zip(pools, scales, strict=True)]
    for row, length in enumerate([9, 20]):
        slots = (1 + 3 * row) * 8 + np.arange(length)
        np.testing.assert_allclose(out[row], dense(query[row], *(x[slots] for x in exact)), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("bad", [0.0, -1.0, np.nan, np.inf])
@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_r103_bad_scale_of_a_live_slot_is_refused_outside_jit_and_of_a_dead_one_is_not(bad, name):
    layer, batch = filled("int8").layer(0), decode_batch([9, 20])
    query = jnp.asarray(normal(2, 4, 16))

    def call(layer, **options):
        return paged_attention(
            query,
            layer.k,
            layer.v,
            block_tables=batch.block_tables[0],
            seq_lens=batch.seq_lens,
            k_scale=layer.k_scale,
            v_scale=layer.v_scale,
            **options,
        )

    def broken(block, offset):
        return dataclasses.replace(layer, **{name: getattr(layer, name).at[block, 1, offset].set(bad)})

    with pytest.raises(ValueError, match=f"{name} is {bad} for kv head 1 of token 8 of row 0"):
        call(broken(2, 0))
    np.testing.assert_array_equal(call(broken(2, 1)), call(layer))  # row 0 has 9 tokens
    np.testing.assert_array_equal(call(broken(1, 3), sliding_window=2), call(layer, sliding_window=2))
    traced = np.asarray(jax.jit(call)(broken(2, 0)))
    if np.isnan(bad):
        assert np.isnan(traced[0, 2:]).all()  # the query heads of kv head 1
    np.testing.assert_array_equal(traced[1], call(layer)[1])


@every_format
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("which", ["k", "v"])
def test_values_that_are_not_finite_stay_visible_and_reach_only_their_row(dtype, bad, which):
    layer, batch = filled(dtype).layer(0), decode_batch([9, 20])
    query, k, v = jnp.asarray(normal(2, 4, 16)), jnp.asarray(normal(2, 2, 16)), jnp.asarray(normal(2, 2, 16))
    fine, _ = jax.jit(attend)(layer, query, k, v, batch)
    given = {"k": k, "v": v}
    given[which] = given[which].at[0, :, 5].set(bad)
    out, layer = jax.jit(attend)(layer, query, **given, batch=batch)
    if dtype in SCALED_CACHE_DTYPES:
        assert np.isnan(np.asarray(getattr(layer, f"{which}_scale"))[2, :, 0]).all()
        assert np.isnan(out[0]).all()
    else:
        assert not np.isfinite(dequantised(layer, which)[2 * 8, :, 5]).any()
    np.testing.assert_array_equal(out[1], fine[1])


def test_layer_without_its_scales_and_formats_that_contradict_are_refused():
    layer = init_cache(config("int8")).layer(0)
    ones, slot = jnp.ones((1, 2, 16)), jnp.array([9], jnp.int32)
    with pytest.raises(ValueError, match="has no scales"):
        write_kv(dataclasses.replace(layer, k_scale=None), ones, ones, slot)
    with pytest.raises(ValueError, match="lacks the scales"):
        init_cache(config("int8")).with_layer(0, LayerCache(k=layer.k, v=layer.v, group=0))
    bits = dataclasses.replace(layer, k=layer.k.astype(jnp.uint8), v=layer.v.astype(jnp.uint8), dtype=None)
    with pytest.raises(ValueError, match=r"float8_e4m3fn or float8_e5m2.*None"):
        write_kv(bits, ones, ones, slot)
    with pytest.raises(ValueError, match="'float32'"):
        write_kv(dataclasses.replace(layer, dtype="float32"), ones, ones, slot)


@pytest.mark.parametrize(
    ("pool_dtype", "kv_cache_dtype", "message"),
    [
        ("uint8", None, "pass kv_cache_dtype"),
        ("uint8", "int8", "float8_e4m3fn or float8_e5m2"),
        ("int8", "float8_e4m3fn", "'float8_e4m3fn'"),
        ("float32", "fp8", "kv_cache_dtype is 'fp8'"),
        ("int32", None, "int32"),
    ],
)
def test_format_that_pools_cannot_have_is_refused(pool_dtype, kv_cache_dtype, message):
    pool, scale = jnp.zeros((5, 4, 2, 8), pool_dtype), jnp.ones((5, 2, 4))
    with pytest.raises(ValueError, match=message):
        paged_attention(
            jnp.zeros((2, 4, 8)),
            pool,
            pool,
            block_tables=jnp.zeros((2, 3), jnp.int32),
            seq_lens=jnp.ones(2, jnp.int32),
            k_scale=scale,
            v_scale=scale,
            kv_cache_dtype=kv_cache_dtype,
        )


# -- sizes -----------------------------------------------------------------------------------------------------------


@every_format
def test_bytes_of_the_config_are_those_of_the_arrays_scales_included(dtype):
    c = config(dtype, num_layers=4, layer_groups=((0, 1), (2, 3)), kernel_block_size=4)
    assert sum(x.nbytes for x in jax.tree.leaves(init_cache(c))) == c.num_blocks * c.bytes_per_block
    element = jnp.dtype(dtype).itemsize
    scale = 4 * (element == 1)
    assert c.bytes_per_token == 2 * 4 * 2 * (16 * element + scale)


@pytest.mark.parametrize(("head_dim", "ratio"), [(64, 128 / 68), (128, 256 / 132), (256, 512 / 260)])
def test_tokens_in_the_same_bytes_as_bfloat16(head_dim, ratio):
    """1.88, 1.94 and 1.97: a scale of 4 bytes for head_dim numbers of one."""
    both = [
        CacheConfig.with_memory(
            10**9, num_layers=30, num_kv_heads=3, head_dim=head_dim, max_blocks_per_seq=128, dtype=dtype
        )
        for dtype in ("bfloat16", "int8")
    ]
    assert both[1].num_blocks / both[0].num_blocks == pytest.approx(ratio, rel=1e-3)


def test_config_of_a_number_of_bytes_uses_them_and_one_byte_less_is_one_block_less():
    sizes = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 16, "max_blocks_per_seq": 5, "dtype": "int8"}
    c = CacheConfig.with_memory(100_000, **sizes)
    assert c.num_blocks * c.bytes_per_block <= 100_000 < (c.num_blocks + 1) * c.bytes_per_block
    exactly = c.num_blocks * c.bytes_per_block
    assert CacheConfig.with_memory(exactly, **sizes) == c
    assert CacheConfig.with_memory(exactly - 1, **sizes).num_blocks == c.num_blocks - 1
    needed = 6 * c.bytes_per_block  # one sequence and the null block
    assert CacheConfig.with_memory(needed, **sizes).num_blocks == 6
    with pytest.raises(ValueError, match=rf"{needed - 1} bytes .* 80 tokens needs 5 .* at least {needed} bytes"):
        CacheConfig.with_memory(needed - 1, **sizes)


def test_config_of_more_bytes_than_slots_have_numbers_leaves_the_rest():
    sizes = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 1, "max_blocks_per_seq": 5, "dtype": "int8"}
    c = CacheConfig.with_memory(2**50, **sizes)
    assert 2**31 - 16 <= c.num_blocks * c.block_size < 2**31


@pytest.mark.parametrize("num_bytes", [0, -1, 1.5, True])
def test_bytes_that_are_none_are_refused_by_name(num_bytes):
    with pytest.raises(ValueError, match="num_bytes"):
        CacheConfig.with_memory(num_bytes, num_layers=1, num_kv_heads=1, head_dim=1, max_blocks_per_seq=1)


@pytest.mark.parametrize("size", [0, 3, 16, 2.0])
def test_kernel_block_that_does_not_divide_the_block_is_refused(size):
    with pytest.raises(ValueError, match="kernel_block_size"):
        config("float32", kernel_block_size=size)


# -- the engine ------------------------------------------------------------------------------------------------------


def generate(llm, prompts, **options):
    outputs = llm.generate(ids(prompts), GREEDY, use_tqdm=False, **options)
    assert all(o.error is None for o in outputs)
    assert llm.is_whole
    return tokens_of(outputs)


PROMPTS = [prompt(n, n) for n in (5, 9, 14, 3, 21)]
SETTINGS = [
    {"max_num_batched_tokens": 5, "decode_steps": 1},
    {"num_usable_blocks": 9, "preemption_mode": "recompute", "watermark": 0.0},
    {"num_usable_blocks": 9, "preemption_mode": "swap", "watermark": 0.0},
    {"num_usable_blocks": 9, "block_size": 16, "kernel_block_size": 4},
]


def engine(dtype, *, num_usable_blocks=40, **options):
    return tiny_llm(num_usable_blocks, dtype=dtype, **{"max_blocks_per_seq": 8} | options)


def test_greedy_tokens_of_an_8_bit_cache_are_equal_under_every_setting():
    """A token is quantised by itself: chunks, neighbours, preemption, swaps and cached prefixes change no number.

    With int8 whole test files run: TEST_CACHE=int8.
    """
    dtype = "float8_e4m3fn"
    llm = engine(dtype)
    expected = [generate(llm, [p])[0] for p in PROMPTS]
    llm.reset_prefix_cache()
    llm.poison_value = np.nan
    for _ in ("computed", "cached"):
        assert generate(llm, PROMPTS) == expected
    assert llm.block_counters["hits"] > 0
    for options in SETTINGS:
        other = engine(dtype, **options)
        other.poison_value = np.nan
        assert generate(other, PROMPTS) == expected
        mode = options.get("preemption_mode")
        assert mode is None or other.core.num_preemptions[mode] > 0


def test_samples_and_beams_of_an_int8_cache_share_blocks_as_others_do():
    llm = engine("int8")
    params = SamplingParams(n=3, temperature=1.0, seed=3, max_tokens=8)
    alone = llm.generate(ids(PROMPTS[:2]), params, use_tqdm=False)
    other = engine("int8", num_usable_blocks=12, preemption_mode="swap")
    scarce = other.generate(ids(PROMPTS[:2]), params, use_tqdm=False)
    for a, b in zip(alone, scarce, strict=True):
        assert [s.token_ids for s in a.outputs] == [s.token_ids for s in b.outputs]
    assert llm.block_counters["copies"] > 0
    beams = BeamSearchParams(beam_width=3, max_tokens=6)
    first, again = (x.beam_search(ids(PROMPTS[:2]), beams, use_tqdm=False) for x in (llm, other))
    for a, b in zip(first, again, strict=True):
        assert [s.token_ids for s in a.outputs] == [s.token_ids for s in b.outputs]


@pytest.mark.parametrize("dtype", ["int8"])
def test_request_whose_keys_are_not_finite_ends_with_an_error_alone(dtype):
    def forward(params, batch, cache):
        logits, cache = TINY(params, batch, cache)
        layer = cache.layer(0)
        # Once more the step's keys, infinite for the token at position 6; then attention over them.
        k = jnp.where((batch.positions == 6)[:, None, None], jnp.inf, jnp.ones((1, 2, 8)))
        query = jnp.ones((len(batch.positions), 4, 8))
        out, _ = attend(layer, query, k, jnp.ones_like(k), batch)
        return logits + 0 * out[batch.logits_indices, 0, :1], cache

    llm = engine(dtype, forward=forward)
    failed, fine = llm.generate(ids([prompt(5), prompt(9)]), [GREEDY, dataclasses.replace(GREEDY, max_tokens=3)])
    assert isinstance(failed.error, FloatingPointError)
    assert failed.outputs[0].finish_reason == "error"
    assert llm.is_whole
    assert len(fine.outputs[0].token_ids) <= 3


def test_bytes_per_token_are_reported():
    llm = engine("int8")
    assert llm.kv_cache_bytes_per_token == 2 * 2 * 2 * (8 + 4)
    assert llm.metrics.snapshot()["kv_cache_bytes_per_token"] == llm.kv_cache_bytes_per_token


# -- blocks of two sizes ---------------------------------------------------------------------------------------------


def logits_of(dtype, kernel_block_size, num_steps=6):
    """All logits of a prefill in two chunks and of decode steps, with blocks of 8."""
    c = cache_config(12, 8, dtype=dtype, kernel_block_size=kernel_block_size, max_num_seqs=2, max_blocks_per_seq=6)
    state, all_logits = init_state(c), []
    pool, table, cache = state.pool, state.table, state.cache
    rows = jnp.arange(2, dtype=jnp.int32)

    @partial(jax.jit, static_argnames="num_tokens")
    def step(pool, table, cache, counts, tokens, num_tokens):
        pool, table, appended = append_tokens(pool, table, counts, max_new_tokens=num_tokens)
        options = {"kernel_block_size": cache.kernel_block_size}
        if num_tokens == 1:
            batch = build_decode_batch(table, appended, rows, tokens, **options)
        else:
            batch = build_ragged_batch(table, appended, counts, tokens, **options)
        logits, cache = TINY(tiny_params(), batch, cache)
        return pool, table, cache, logits

    for counts in ((13, 3), (2, 14)):
        tokens = jnp.asarray(np.random.default_rng(counts[0]).integers(1, VOCAB, 16), jnp.int32)
        pool, table, cache, logits = step(pool, table, cache, jnp.asarray(counts, jnp.int32), tokens, 16)
        all_logits.append(logits)
    for token in range(num_steps):
        tokens = jnp.full(2, token, jnp.int32)
        pool, table, cache, logits = step(pool, table, cache, jnp.ones(2, jnp.int32), tokens, 1)
        all_logits.append(logits)
    return np.stack(all_logits)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_kernel_blocks_of_any_size_give_the_same_bits(dtype):
    expected = logits_of(dtype, None)
    assert np.isfinite(expected).all()
    for kernel_block_size in (8, 4, 2):
        np.testing.assert_array_equal(logits_of(dtype, kernel_block_size), expected)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_preempted_requests_in_blocks_of_two_sizes_read_their_own_slots_only(mode, dtype):
    llm = oracle_llm(4, dtype=dtype, kernel_block_size=2, max_num_batched_tokens=4, preemption_mode=mode)
    assert llm._runner._state.cache.k[0].shape[:2] == (10, 2)
    params = dataclasses.replace(GREEDY, max_tokens=8)
    outputs = llm.generate(ids([prompt(5, 1), prompt(5, 2)]), params, use_tqdm=False)
    assert tokens_of(outputs) == [oracle_tokens(prompt(5, n), 8) for n in (1, 2)]
    assert llm.core.num_preemptions[mode] >= 1
    assert llm.is_whole


def test_batch_built_for_other_blocks_than_the_layers_is_refused():
    layer = filled("float32", kernel_block_size=4).layer(0)
    with pytest.raises(ValueError, match=r"kernel_block_size=cache\.kernel_block_size"):
        attend(layer, jnp.zeros((2, 4, 16)), None, None, dataclasses.replace(decode_batch([9, 20]), block_size=8))
