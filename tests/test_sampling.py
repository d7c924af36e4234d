"""Sampling: kept sets against a sort-based reference, distributions, determinism, hostile logits."""

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from paged_jax.sampling import SamplingState, _pick, filter_threshold, init_sampling_state, sample, seed_words

V = 97
jit_sample = jax.jit(sample, static_argnames="vocab_size")  # most tests share the compiled shape [97, 97]


def make_state(num_rows, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0):
    """A state from scalars or per-row lists."""

    def rows(value, dtype):
        return jnp.broadcast_to(jnp.asarray(value, dtype), (num_rows,))

    seeds = [seed] * num_rows if isinstance(seed, int) else seed
    return SamplingState(
        temperature=rows(temperature, jnp.float32),
        top_k=rows(top_k, jnp.int32),
        top_p=rows(top_p, jnp.float32),
        min_p=rows(min_p, jnp.float32),
        seed=jnp.asarray(np.stack([seed_words(s) for s in seeds])),
    )


def draw(logits, state, positions=None, vocab_size=None):
    """Token ids as NumPy; every row must be finite."""
    positions = jnp.arange(logits.shape[0], dtype=jnp.int32) if positions is None else positions
    token_ids, is_finite = jit_sample(logits, state, positions, vocab_size=vocab_size or logits.shape[1])
    assert np.all(is_finite)
    return np.asarray(token_ids)


@jax.jit
def _draw_chunks(logits_row, state, firsts):
    logits = jnp.broadcast_to(logits_row, (len(state.top_k), len(logits_row)))
    rows = jnp.arange(len(logits), dtype=jnp.int32)
    return lax.map(lambda first: sample(logits, state, first + rows, vocab_size=len(logits_row))[0], firsts)


def draw_many(logits_row, num_draws, rows=1000, **params):
    """Draws from one distribution at `num_draws` successive positions."""
    firsts = jnp.arange(0, num_draws, rows, dtype=jnp.int32)
    return np.asarray(_draw_chunks(jnp.asarray(logits_row, jnp.float32), make_state(rows, **params), firsts)).ravel()


def normal(seed, scale=1.0):
    """Logits `[97, 97]`."""
    return jax.random.normal(jax.random.key(seed), (V, V)) * scale


def kept(logits, **params):
    """Mask of the tokens that the filters keep, `[R, V]`."""
    logits = jnp.asarray(logits, jnp.float32)
    state = make_state(logits.shape[0], **params)
    is_random = jnp.ones(logits.shape[0], bool)
    threshold = jax.jit(filter_threshold)(logits, jnp.max(logits, axis=1), state.temperature, is_random, state)
    return np.asarray(logits >= threshold[:, None])


def chi_square_is_plausible(counts, probabilities, z=3.72):
    """Pearson's test at p > 1e-4, with the Wilson-Hilferty approximation of the distribution's tail."""
    expected = np.asarray(probabilities) * counts.sum()
    statistic = np.sum((counts - expected) ** 2 / expected)
    dof = len(counts) - 1
    return ((statistic / dof) ** (1 / 3) - (1 - 2 / (9 * dof))) / math.sqrt(2 / (9 * dof)) < z


# --- greedy ---


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
def test_greedy_when_logits_tie_takes_the_first_like_argmax(dtype):
    logits = jax.random.randint(jax.random.key(0), (V, V), -3, 4).astype(dtype)
    token_ids, _ = jit_sample(logits, init_sampling_state(V), jnp.zeros(V, jnp.int32), vocab_size=V)
    chex.assert_trees_all_equal(token_ids, jnp.argmax(logits, axis=1).astype(jnp.int32))


def test_greedy_when_temperature_is_below_1e5_equals_argmax():
    logits = normal(1, 1e-6)
    np.testing.assert_array_equal(draw(logits, make_state(V, temperature=0.99e-5)), np.argmax(logits, axis=1))


def test_greedy_row_when_neighbours_are_random_equals_argmax():
    logits = normal(2)
    token_ids = draw(logits, make_state(V, temperature=[5.0 * (r % 2) for r in range(V)], top_p=0.9, top_k=50))
    np.testing.assert_array_equal(token_ids[::2], np.argmax(logits, axis=1)[::2])


# --- hostile logits ---


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf])
def test_is_finite_when_one_logit_is_bad_is_false_at_every_column(bad, temperature):
    logits = jnp.where(jnp.eye(97, dtype=bool), bad, jnp.linspace(-1, 1, 97)[None, :].repeat(97, 0))
    state = make_state(97, temperature=temperature, top_k=5, top_p=0.9)
    token_ids, is_finite = jit_sample(logits, state, jnp.zeros(97, jnp.int32), vocab_size=97)
    chex.assert_trees_all_equal((token_ids, is_finite), (jnp.zeros(97, jnp.int32), jnp.zeros(97, bool)))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("fill", [-np.inf, np.nan])
def test_sample_when_a_whole_row_is_bad_leaves_its_neighbour_alone(fill, temperature):
    good = jax.random.normal(jax.random.key(3), (1, 97))
    logits = jnp.concatenate([jnp.full((1, 97), fill), good])
    state = make_state(2, temperature=temperature, top_k=5, top_p=0.9)
    token_ids, is_finite = jit_sample(logits, state, jnp.arange(2, dtype=jnp.int32), vocab_size=97)
    alone = draw(good, make_state(1, temperature=temperature, top_k=5, top_p=0.9), jnp.ones(1, jnp.int32))
    assert (token_ids.tolist(), is_finite.tolist()) == ([0, alone[0]], [False, True])


@pytest.mark.parametrize("fraction", [0.5, 0.9, 0.99])
def test_random_when_tokens_are_minus_infinity_never_draws_them(fraction):
    banned = np.random.default_rng(0).random(1000) < fraction
    token_ids = draw_many(np.where(banned, -np.inf, 0.0), 1000, top_k=900, top_p=0.999, min_p=1e-3)
    assert not np.any(banned[token_ids])


PADDED = {
    "normal": np.random.default_rng(1).normal(size=97),
    "all equal": np.zeros(97),
    "one-hot at the end": np.where(np.arange(97) == 96, 0.0, -np.inf),
    "huge": np.random.default_rng(2).normal(size=97) * 1e37,
}


@pytest.mark.parametrize("row", PADDED.values(), ids=PADDED.keys())
@pytest.mark.parametrize("params", [{}, {"top_k": 96, "top_p": 0.999999}, {"temperature": 0.0}, {"temperature": 1e6}])
def test_sample_when_vocabulary_is_padded_stays_inside_it(row, params):
    padded = jnp.concatenate([jnp.asarray(row, jnp.float32), jnp.full(31, 5.0).at[3].set(jnp.nan)])
    logits = jnp.broadcast_to(padded, (10_000, 128))
    token_ids = draw(logits, make_state(10_000, **params), vocab_size=97)
    assert token_ids.min() >= 0
    assert token_ids.max() < 97
    assert np.all(np.isfinite(row[token_ids]))


def test_random_when_vocabulary_is_padded_equals_unpadded():
    logits = normal(4)
    padded = jnp.pad(logits, ((0, 0), (0, 31)), constant_values=9.0)
    state = make_state(V, top_k=40, top_p=0.9)
    np.testing.assert_array_equal(draw(padded, state, vocab_size=V), draw(logits, state))


@pytest.mark.parametrize("vocab_size", [0, 98])
def test_sample_when_vocab_size_does_not_fit_the_logits_raises(vocab_size):
    with pytest.raises(ValueError, match=rf"vocab_size must be in \[1, 97\].*{vocab_size}"):
        sample(jnp.zeros((1, V)), init_sampling_state(1), jnp.zeros(1, jnp.int32), vocab_size=vocab_size)


@pytest.mark.parametrize("vocab_size", [1, 129, 1000])
def test_random_when_vocabulary_has_any_size_draws_every_token(vocab_size):
    token_ids = draw_many(np.zeros(vocab_size), 20 * max(vocab_size, 50))
    assert set(token_ids.tolist()) == set(range(vocab_size))


# --- kept sets ---


def reference_kept(row, temperature, min_p, top_k, top_p):
    """Sort-based, float64; ties at a threshold are kept."""
    weights = np.exp((row.astype(np.float64) - row.max()) / temperature)
    keep = weights >= min_p * (1 - 1e-6)
    if 0 < top_k < len(row):
        keep &= row >= np.sort(row)[-top_k]
    if top_p < 1:
        values, inverse = np.unique(-row, return_inverse=True)  # ascending in -row: the largest logit first
        mass = np.zeros(len(values))
        np.add.at(mass, inverse, np.where(keep, weights, 0.0))
        last = np.searchsorted(np.cumsum(mass), top_p * (1 - 1e-6) * mass.sum())
        keep &= -row <= values[last]
    return keep


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("vocab_size", [5, 97, 3000])
def test_kept_set_for_random_parameters_equals_sort_based_reference(vocab_size, ties):
    rng = np.random.default_rng(vocab_size)
    num_rows = 64
    logits = (rng.normal(size=(num_rows, vocab_size)) * 4 + rng.normal(size=(num_rows, 1)) * 20).astype(np.float32)
    logits = np.round(logits) if ties else logits
    params = {
        "temperature": rng.choice([0.3, 1.0, 2.5], num_rows).tolist(),
        "min_p": rng.choice([0.0, 0.01, 0.3, 1.0], num_rows).tolist(),
        "top_k": rng.choice([0, 1, 2, 50, vocab_size], num_rows).tolist(),
        "top_p": rng.choice([1e-8, 0.1, 0.5, 0.9, 0.99, 1.0], num_rows).tolist(),
    }
    mask = kept(logits, **params)
    expected = [
        reference_kept(row, *values) for row, *values in zip(logits, *(params[name] for name in params), strict=True)
    ]
    np.testing.assert_array_equal(mask, expected)


@pytest.mark.parametrize("fraction", [0.5, 0.9, 0.99])
def test_kept_set_when_tokens_are_minus_infinity_has_k_of_the_others(fraction):
    rng = np.random.default_rng(0)
    logits = np.where(rng.random((1, 1000)) < fraction, -np.inf, rng.normal(size=(1, 1000)))
    assert kept(logits, top_k=7).sum() == 7


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize(
    ("top_p", "expected"), [(0.75, 2), (0.76, 4), (1.0, 4), (1e-8, 1), (1e-4, 1), (1e-3, 1), (0.0, 1), (0.751, 4)]
)
def test_top_p_at_its_edges_keeps_the_smallest_set_that_reaches_it(top_p, expected, dtype):
    logits = jnp.log(jnp.array([[0.5, 0.25, 0.125, 0.125]])).astype(dtype)
    np.testing.assert_array_equal(kept(logits, top_p=top_p)[0], np.arange(4) < expected)


@pytest.mark.parametrize("params", [{"top_p": 0.75}, {"min_p": 0.5}])
def test_filter_at_an_exact_boundary_when_logits_are_shifted_keeps_the_same_set(params):
    logits = np.log([[0.125, 0.5, 0.125, 0.25]]) + np.linspace(-9, 9, 181)[:, None]  # rounded differently in each row
    np.testing.assert_array_equal(kept(logits, **params), [[False, True, False, True]] * 181)


def test_top_p_when_all_logits_are_equal_keeps_all():
    assert kept(np.full((1, 97), 3.0), top_p=0.5).sum() == 97


def test_top_p_after_top_k_counts_the_mass_that_top_k_left():
    logits = np.log([[0.4, 0.2, 0.1, 0.1, 0.1, 0.1]])
    assert kept(logits, top_k=2, top_p=0.6).sum() == 1  # 0.4 is two thirds of what is left
    assert kept(logits, top_p=0.6).sum() == 2


def test_top_p_after_min_p_counts_the_mass_that_min_p_left():
    logits = np.log([[0.4, 0.2, 0.1, 0.1, 0.1, 0.1]])
    assert kept(logits, min_p=0.5, top_p=0.6).sum() == 1


def test_min_p_after_temperature_compares_tempered_probabilities():
    logits = np.log([[0.5, 0.25, 0.125, 0.125]])
    assert kept(logits, min_p=0.5).sum() == 2
    assert kept(logits, min_p=0.5, temperature=2.0).sum() == 4


def test_top_k_when_one_equals_greedy():
    logits = normal(5)
    np.testing.assert_array_equal(draw(logits, make_state(V, temperature=9.0, top_k=1)), np.argmax(logits, axis=1))


@pytest.mark.parametrize("params", [{"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.4}])
def test_random_when_filtered_draws_only_and_all_kept_tokens(params):
    row = np.log(np.array([0.05, 0.3, 0.2, 0.3, 0.15]))
    token_ids = draw_many(row, 2000, **params)
    np.testing.assert_array_equal(np.unique(token_ids), np.flatnonzero(kept(row[None], **params)[0]))


# --- distribution ---


@pytest.mark.parametrize("vocab_size", [97, 1024])
def test_random_when_logits_are_equal_is_uniform(vocab_size):
    counts = np.bincount(draw_many(np.zeros(vocab_size), 200_000), minlength=vocab_size)
    assert chi_square_is_plausible(counts, np.full(vocab_size, 1 / vocab_size))


@pytest.mark.parametrize("temperature", [0.7, 2.0])
def test_random_when_tempered_follows_the_softmax(temperature):
    row = np.random.default_rng(3).normal(size=500).astype(np.float32)
    probabilities = np.exp(row / temperature, dtype=np.float64)
    counts = np.bincount(draw_many(row, 200_000, temperature=temperature), minlength=500)
    assert chi_square_is_plausible(counts, probabilities / probabilities.sum())


def test_random_when_filtered_follows_the_renormalised_softmax():
    row = np.random.default_rng(4).normal(size=(1, 500)).astype(np.float32)
    params = {"temperature": 1.3, "top_k": 100, "top_p": 0.9, "min_p": 0.02}
    mask = kept(row, **params)[0]
    probabilities = np.exp(row[0][mask] / 1.3, dtype=np.float64)
    counts = np.bincount(draw_many(row[0], 50_000, **params), minlength=500)
    assert chi_square_is_plausible(counts[mask], probabilities / probabilities.sum())


def test_random_when_log_odds_are_16_draws_the_rare_token_as_often_as_expected():
    token_ids = draw_many(np.array([0.0, 16.0, -np.inf]), 2_000_000, rows=4000)
    assert set(np.unique(token_ids)) <= {0, 1}
    assert np.sum(token_ids == 0) <= 4  # Poisson with mean 0.225: more has probability 4e-6


@pytest.mark.parametrize(
    ("weights", "rare", "first_word"),
    [
        ([1e-7, 1.0, 0.0], 0, 0),
        ([0.0, 1.0, 0.0, 1e-7, 0.0], 3, 2**32 - 3000),
        ([0.5, 1e-7, 0.5], 1, 2**31 - 1500),  # in the middle, where a float32 sum cannot hold it
    ],
)
def test_pick_over_all_words_near_a_rare_token_gives_it_its_probability(weights, rare, first_word):
    words = jnp.asarray(np.arange(first_word, first_word + 3000).astype(np.uint32))
    index = np.asarray(_pick(jnp.broadcast_to(jnp.asarray(weights, jnp.float32), (3000, len(weights))), words))
    assert np.sum(index == rare) == pytest.approx(1e-7 * 2**32, rel=0.01)
    assert not np.any(np.asarray(weights)[index] == 0)


def test_pick_at_extreme_words_never_takes_a_weight_of_zero():
    weights = jnp.zeros((4, 128)).at[:2, 7].set(1.0).at[2:, 127].set(1e-30)
    words = jnp.asarray([0, 2**32 - 1] * 2, jnp.uint32)
    np.testing.assert_array_equal(_pick(weights, words), [7, 7, 127, 127])


def test_random_over_successive_positions_does_not_repeat_itself():
    token_ids = draw_many(np.zeros(97), 400, rows=1)
    assert len(set(token_ids.tolist())) >= 80
    assert np.sum(token_ids[1:] == token_ids[:-1]) <= 15
    assert chi_square_is_plausible(np.bincount(token_ids, minlength=97), np.full(97, 1 / 97))


def test_random_pairs_of_successive_positions_are_independent():
    token_ids = draw_many(np.zeros(16), 100_000)
    counts = np.bincount(token_ids[:-1] * 16 + token_ids[1:], minlength=256)
    assert chi_square_is_plausible(counts, np.full(256, 1 / 256))


@pytest.mark.parametrize("other", [6, 5 + 2**32])
def test_random_rows_when_seeds_differ_in_any_word_differ(other):
    logits = jnp.zeros((V, V))
    assert np.mean(draw(logits, make_state(V, seed=5)) == draw(logits, make_state(V, seed=other))) < 0.1


# --- a row depends on nothing but itself ---


def test_random_row_at_each_place_of_each_batch_is_bit_equal():
    rng = np.random.default_rng(5)
    logits = jnp.asarray(rng.normal(size=(8, 3000)).astype(np.float32) * 3)
    state = make_state(8, temperature=0.9, top_k=[0, 50, 0, 50, 3, 0, 1, 2000], top_p=0.95, seed=list(range(8)))
    positions = jnp.arange(40, 48, dtype=jnp.int32)

    def rows(ids):
        ids = jnp.asarray(ids)
        return draw(logits[ids], jax.tree.map(lambda x: x[ids], state), positions[ids]).tolist()

    alone = [rows([r])[0] for r in range(8)]
    for num_rows in range(2, 9):
        for place in range(num_rows):
            ids = [(r - place) % 8 for r in range(num_rows)]  # row 0 at each place, others around it
            assert rows(ids) == [alone[r] for r in ids]


@pytest.mark.parametrize("neighbour", [{"temperature": 0.0}, {"top_k": 9}, {"top_p": 0.5}, {"min_p": 0.3}])
def test_random_row_when_a_neighbour_uses_other_filters_is_bit_equal(neighbour):
    logits = jax.random.normal(jax.random.key(6), (32, 1, 3000)) * 3
    mine = make_state(1, temperature=0.8, seed=3)
    both = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), mine, make_state(1, **neighbour))
    for position, row in enumerate(logits):
        where = jnp.full(2, position, jnp.int32)
        assert draw(row, mine, where[:1])[0] == draw(jnp.concatenate([row, -row]), both, where)[0]


# --- transformations ---


def test_sample_when_values_change_never_retraces():
    count = 0

    def counted(logits, state, positions):
        nonlocal count
        count += 1
        return sample(logits, state, positions, vocab_size=97)

    jitted = jax.jit(counted)
    logits = jnp.ones((2, V))
    for i, params in enumerate([{"temperature": 0.0}, {"top_k": 5}, {"top_p": 0.3}, {"min_p": 0.1}, {"seed": 2**63}]):
        jitted(logits * i, make_state(2, **params), jnp.full(2, i, jnp.int32))
    assert count == 1


MIXED = {"temperature": ([0.0, 1.0, 0.5] * V)[:V], "top_k": ([0, 20] * V)[:V], "top_p": ([1.0, 0.8, 0.5, 0.9] * V)[:V]}


def test_sample_inside_fori_loop_equals_single_calls():
    logits, state = normal(8, 3.0), make_state(V, **MIXED)

    def step(i, out):
        token_ids, _ = sample(logits, state, jnp.full(V, i, jnp.int32), vocab_size=V)
        return out.at[i].set(token_ids)

    loop = jax.jit(lambda: lax.fori_loop(0, 10, step, jnp.zeros((10, V), jnp.int32)))()
    expected = np.stack([draw(logits, state, jnp.full(V, i, jnp.int32)) for i in range(10)])
    np.testing.assert_array_equal(loop, expected)


def test_sample_under_vmap_equals_single_calls():
    logits, state = jnp.stack([normal(seed, 3.0) for seed in (9, 10)]), make_state(V, **MIXED)
    positions = jnp.arange(V, dtype=jnp.int32)
    batched, _ = jax.jit(jax.vmap(lambda x: sample(x, state, positions, vocab_size=V)))(logits)
    np.testing.assert_array_equal(batched, np.stack([draw(x, state) for x in logits]))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_random_when_logits_are_16_bit_equals_their_float32_values(dtype):
    logits = normal(11, 3.0).astype(dtype)
    state = make_state(V, top_k=40, top_p=0.9)
    np.testing.assert_array_equal(draw(logits, state), draw(logits.astype(jnp.float32), state))


@pytest.mark.parametrize(("seed", "words"), [(0, [0, 0]), (2**32 + 7, [1, 7]), (2**64 - 1, [2**32 - 1] * 2)])
def test_seed_words_splits_the_seed_high_word_first(seed, words):
    chex.assert_trees_all_equal(seed_words(seed), np.array(words, np.uint32))


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_seed_words_when_out_of_range_raises(seed):
    with pytest.raises(ValueError, match=f"seed must be in .*{seed}"):
        seed_words(seed)
