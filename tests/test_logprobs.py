"""Log-probabilities against NumPy in float64: raw and processed, ranks, ties, vocabularies of any size."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from doubles import ByteTokenizer
from test_sampling import kept, make_state
from test_token_rules import R, V, draw, normal, params_of, tables_of

from paged_jax.logprobs import (
    TokenLogprobs,
    check_logprobs_mode,
    cumulative_logprob,
    logprobs_of,
    token_logprobs,
    with_text,
)
from paged_jax.sampling_params import MAX_LOGPROBS

jit_logprobs = jax.jit(token_logprobs, static_argnames="mode")


def log_softmax(x):
    x = np.asarray(x, np.float64)
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_next_tokens_when_options_act_has_both_logprobs_of_the_token_it_draws(mode):
    logits = normal() * 3
    temperatures = [0.0, 0.5, 1.0, 2.0] * 2
    options = {"top_k": [0, 0, 9, 0, 0, 5, 0, 0], "top_p": [1, 0.9, 1, 1, 1, 1, 0.5, 1], "min_p": [0.0] * 7 + [0.1]}
    state = make_state(R, temperature=temperatures, **options)
    bias = ((3, 2.0), (50, -2.0))
    tables = tables_of([{"token_ids": [1], "logit_bias": bias}] * R)
    padded = jnp.pad(jnp.asarray(logits), ((0, 0), (0, 31)), constant_values=99.0)  # padding columns win nothing
    got = draw(padded, state, params_of(has_bias=True), tables, num_logprobs=5, mode=mode)
    biased = logits.copy()
    for token, value in bias:
        biased[:, token] += np.float32(value)
    mask = kept(biased, temperature=[t or 1.0 for t in temperatures], **options).copy()
    mask[0] = mask[4] = True  # greedy rows have no filters
    tempered = np.where(mask, biased / np.array([[t or 1.0] for t in temperatures]), -np.inf)
    expected = {"raw": log_softmax(logits), "processed": log_softmax(tempered)}
    chosen = np.asarray(got.token_ids)[:, None]
    for name, values in expected.items():
        values = np.take_along_axis(values, chosen, 1)[:, 0]
        np.testing.assert_allclose(getattr(got.logprobs, name), values, rtol=1e-5, atol=1e-5)
    by = expected[mode]
    order = np.argsort(-by, axis=1, kind="stable")[:, :5]
    np.testing.assert_array_equal(got.logprobs.top_ids[:, :5], order)
    np.testing.assert_allclose(got.logprobs.top_logprobs[:, :5], np.take_along_axis(by, order, 1), rtol=1e-5, atol=1e-5)
    rank = np.sum(by >= np.take_along_axis(by, chosen, 1), axis=1)
    np.testing.assert_array_equal(got.logprobs.rank, rank)


def test_next_tokens_when_a_neighbour_asks_for_logprobs_draws_the_same():
    logits, state = normal() * 3, make_state(R, temperature=[0.0, 1.0] * 4, top_p=0.9)
    plain = draw(logits, state, params_of(), tables_of([]))
    asked = draw(logits, state, params_of(), tables_of([]), num_logprobs=[-1, 0, 20] + [-1] * 5)
    np.testing.assert_array_equal(asked.token_ids, plain.token_ids)
    assert not np.any(plain.logprobs.raw)


def test_next_tokens_when_no_row_asks_for_alternatives_does_not_rank_them():
    got = draw(normal(), make_state(R), params_of(), tables_of([]), num_logprobs=[0, 20] + [-1] * 6, takes_part=False)
    assert not np.any(got.logprobs.raw)
    takes_part = [True] + [False] * 7
    got = draw(normal(), make_state(R), params_of(), tables_of([]), num_logprobs=[0, 20] + [-1] * 6,
               takes_part=takes_part)  # fmt: skip
    assert np.all(np.asarray(got.logprobs.raw) < 0)
    assert not np.any(got.logprobs.top_logprobs)


def test_token_logprobs_when_tokens_tie_lists_them_in_order_of_id():
    logits = jnp.zeros((2, V)).at[0, 60].set(1.0)
    got = jit_logprobs(logits, logits, jnp.asarray([60, 5], jnp.int32), mode="raw")
    assert got.top_ids.tolist() == [[60, *range(19)], list(range(20))]
    assert got.rank.tolist() == [1, V]


@pytest.mark.parametrize("vocab_size", [1, 19, 20, 1000])
def test_token_logprobs_for_any_vocabulary_size(vocab_size):
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(2, vocab_size)), jnp.float32)
    got = jit_logprobs(logits, logits, jnp.asarray([0, vocab_size - 1], jnp.int32), mode="processed")
    assert got.top_ids.shape == (2, MAX_LOGPROBS)
    count = min(vocab_size, MAX_LOGPROBS)
    np.testing.assert_array_equal(got.top_ids[:, :count], np.argsort(-np.asarray(logits), axis=1)[:, :count])
    np.testing.assert_allclose(got.raw, log_softmax(logits)[[0, 1], [0, vocab_size - 1]], rtol=1e-5, atol=1e-5)


def test_token_logprobs_of_masked_tokens_are_minus_infinity_and_never_nan():
    logits = jnp.full((1, V), -jnp.inf).at[0, 4].set(1e38).at[0, 5].set(-1e38)
    got = jit_logprobs(logits, logits, jnp.asarray([5], jnp.int32), mode="raw")
    assert not np.any(np.isnan(got.top_logprobs))
    assert got.top_ids[0, :2].tolist() == [4, 5]
    assert got.top_logprobs[0, 0] == 0


def test_logprobs_of_puts_the_token_first_even_if_it_is_unlikely():
    tokens = TokenLogprobs(
        raw=np.array([-3.0, -0.5]),
        processed=np.array([-1.0, -1.0]),
        rank=np.array([9, 1]),
        top_ids=np.array([[65, 66, 67], [66, 65, 67]]),
        top_logprobs=np.array([[-0.5, -1.0, -2.0], [-0.5, -0.75, -1.0]]),
    )
    entries = [logprobs_of(tokens, index, token, 2, "raw") for index, token in enumerate([90, 66])]
    assert [{t: (e.logprob, e.rank, e.decoded_token) for t, e in entry.items()} for entry in entries] == [
        {90: (-3.0, 9, None), 65: (-0.5, 1, None), 66: (-1.0, 2, None)},
        {66: (-0.5, 1, None), 65: (-0.75, 2, None)},
    ]
    assert cumulative_logprob(entries, [90, 66]) == -3.5
    only = logprobs_of(tokens, 0, 90, 0, "processed")
    assert {t: e.logprob for t, e in only.items()} == {90: -1.0}
    spelled = with_text(entries[0], ByteTokenizer())
    assert {t: e.decoded_token for t, e in spelled.items()} == {90: "Z", 65: "A", 66: "B"}
    assert with_text(spelled, None) is spelled  # it has its text


def test_check_logprobs_mode_when_unknown_raises():
    with pytest.raises(ValueError, match=r"logprobs_mode must be one of \('raw', 'processed'\), got 'raw_logits'"):
        check_logprobs_mode("raw_logits")
