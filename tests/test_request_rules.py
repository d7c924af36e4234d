"""From SamplingParams to rules: bad words as tokens, ids inside the vocabulary."""

import pytest

from paged_jax.request_rules import bad_word_sequences, check_vocabulary, first_stop
from paged_jax.sampling_params import MAX_INT32, SamplingParams

PIECES = ["a", "b", "c", " ", "ab", " a", " ab", "ca", " cab"]


class PieceTokenizer:
    """Longest match first; begins every text with token 99 unless asked not to."""

    def encode(self, text, add_special_tokens=True):
        ids = [99] if add_special_tokens else []
        while text:
            piece = max((p for p in PIECES if text.startswith(p)), key=len)
            ids.append(PIECES.index(piece))
            text = text[len(piece) :]
        return ids


def ids(*pieces):
    return tuple(PIECES.index(p) for p in pieces)


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("a", {ids("a"), ids(" a")}),
        (" a", {ids("a"), ids(" a")}),  # leading spaces do not matter
        ("b", {ids("b")}),  # after a space it ends with the same token
        ("abc", {ids("ab", "c"), ids(" ab", "c")}),
        ("cab", {ids("ca", "b"), ids(" cab")}),  # fewer tokens after a space
        (" ", {ids(" ")}),
    ],
)
def test_bad_word_sequences_forbid_a_word_with_and_without_a_space(word, expected):
    assert set(bad_word_sequences([word], PieceTokenizer())) == expected


def test_bad_word_sequences_of_equal_words_are_listed_once():
    assert bad_word_sequences(["a", " a", "a"], PieceTokenizer()) == (ids("a"), ids(" a"))
    assert bad_word_sequences([], None) == ()


@pytest.mark.parametrize(
    ("word", "tokenizer", "message"),
    [
        ("a", None, "bad_words need a tokenizer"),
        ("b" * 17, PieceTokenizer(), "'bbbbbbbbbbbbbbbbb' has 17 tokens; a bad word must have 1 ... 16"),
        ("x", PieceTokenizer(), "the tokenizer cannot encode 'x'"),
    ],
)
def test_bad_word_sequences_when_impossible_raise(word, tokenizer, message):
    with pytest.raises(ValueError, match=message):
        bad_word_sequences([word], tokenizer)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"logit_bias": {96: 1.0, 97: 1.0}}, "logit_bias: token id 97 is outside the vocabulary 0 ... 96"),
        ({"allowed_token_ids": [97]}, "allowed_token_ids: token id 97"),
    ],
)
def test_check_vocabulary_when_a_token_does_not_exist_raises(params, message):
    with pytest.raises(ValueError, match=message):
        check_vocabulary(SamplingParams(**params), 97)
    check_vocabulary(SamplingParams(**params), 98)


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_check_vocabulary_when_more_logprobs_than_tokens_are_wanted_raises(name):
    with pytest.raises(ValueError, match=f"{name}=5 exceeds the vocabulary of 4 tokens"):
        check_vocabulary(SamplingParams(**{name: 5}), 4)
    check_vocabulary(SamplingParams(**{name: 4}), 4)


@pytest.mark.parametrize(("min_tokens", "expected"), [(0, MAX_INT32), (1, 5), (6, 0)])
def test_first_stop_is_what_remains_when_the_minimum_is_generated(min_tokens, expected):
    assert first_stop(SamplingParams(min_tokens=min_tokens), 6) == expected
