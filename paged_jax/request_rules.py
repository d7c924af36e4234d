"""From SamplingParams to the rules of one request: bad words as tokens, ids inside the vocabulary (host)."""

from collections.abc import Iterator, Sequence
from typing import Any

from paged_jax.sampling_params import MAX_INT32, SamplingParams
from paged_jax.token_rules import MAX_BAD_SEQUENCE_TOKENS


def check_vocabulary(params: SamplingParams, vocab_size: int) -> None:
    """Raises ValueError if the parameters name tokens that the model does not have, or want more than it has."""
    named = {
        "logit_bias": [token for token, _ in params.logit_bias],
        "allowed_token_ids": params.allowed_token_ids or (),
    }
    for name, ids in named.items():
        if ids and max(ids) >= vocab_size:
            raise ValueError(f"{name}: token id {max(ids)} is outside the vocabulary 0 ... {vocab_size - 1}")
    for name in ("logprobs", "prompt_logprobs"):
        if (getattr(params, name) or 0) > vocab_size:
            raise ValueError(f"{name}={getattr(params, name)} exceeds the vocabulary of {vocab_size} tokens")


def bad_word_sequences(bad_words: Sequence[str], tokenizer: Any) -> tuple[tuple[int, ...], ...]:
    """The token sequences that must not be generated: of each word as it is, and as it is after a space.

    vLLM takes the one after a space only if both have as many tokens; here a word is also forbidden where it is one
    token after a space and several without.

    Raises:
        ValueError: no tokenizer, it fails, or a word has no token or more than MAX_BAD_SEQUENCE_TOKENS.
    """
    if bad_words and tokenizer is None:
        raise ValueError("bad_words need a tokenizer; give LLM(tokenizer=...), or a logit_bias of -100 for token ids")
    return tuple(dict.fromkeys(ids for word in bad_words for ids in _spellings(word.lstrip() or word, tokenizer)))


def _spellings(word: str, tokenizer: Any) -> Iterator[tuple[int, ...]]:
    plain, spaced = _encode(word, tokenizer), _encode(" " + word, tokenizer)
    if not 1 <= len(plain) <= MAX_BAD_SEQUENCE_TOKENS:
        raise ValueError(
            f"bad_words: {word[:80]!r} has {len(plain)} tokens; a bad word must have 1 ... {MAX_BAD_SEQUENCE_TOKENS}"
        )
    yield plain
    if spaced[-len(plain) :] != plain and len(spaced) <= MAX_BAD_SEQUENCE_TOKENS:
        yield spaced  # else it ends with what is forbidden anyway


def _encode(text: str, tokenizer: Any) -> tuple[int, ...]:
    try:
        encoded = tokenizer.encode(text, add_special_tokens=False)
    except Exception as error:  # foreign code: its failure must not touch other requests
        raise ValueError(f"bad_words: the tokenizer cannot encode {text[:80]!r}: {error!r}") from error
    return tuple(int(token) for token in getattr(encoded, "ids", encoded))


def needs_tables(params: SamplingParams) -> bool:
    """Whether the request has rules that look at RuleTables."""
    penalties = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty)
    has_list = bool(params.logit_bias or params.bad_words) or params.allowed_token_ids is not None
    return has_list or penalties != (0.0, 0.0, 1.0)


def first_stop(params: SamplingParams, max_tokens: int) -> int:
    """RuleParams.first_stop of a request that may generate `max_tokens` tokens in all."""
    return max_tokens - params.min_tokens if params.min_tokens else MAX_INT32
