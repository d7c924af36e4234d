"""How requests are continued and when they stop: `SamplingParams` and `BeamSearchParams`, validated on the host."""

import enum
from dataclasses import dataclass
from typing import Any

import numpy as np

MAX_INT32 = 2**31 - 1
MAX_TEMPERATURE = 1e6  # all tokens are equally likely long before; keeps the quotient inside float32
MAX_STOP_TOKEN_IDS = 1024
MAX_LENGTH_PENALTY = 4.0  # the length to this power stays inside float32, whatever the length
MAX_SAMPLES = 16384
MAX_PENALTY = 2.0  # of presence_penalty and frequency_penalty
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 1e-6, 1e6  # keeps quotient and product inside float32
MAX_LOGIT_BIAS = 100.0
MAX_LOGIT_BIASES = 1024
MAX_ALLOWED_TOKEN_IDS = 1 << 18  # the largest vocabularies
MAX_LOGPROBS = 20
MAX_STRINGS, MAX_STRING_CHARS = 64, 1024  # of stop and bad_words
GREEDY_TEMPERATURE = 1e-5  # below it a row is greedy, as in vLLM


class RequestOutputKind(enum.Enum):
    """What a RequestOutput of an unfinished request holds."""

    CUMULATIVE = 0  # everything so far
    DELTA = 1  # what is new
    FINAL_ONLY = 2  # nothing: there is no output before the last one


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters with vLLM's names, defaults and ranges; frozen and hashable.

    What applies to the logits, in this order: allowed_token_ids and logit_bias -> bad_words -> min_tokens -> penalties
    -> temperature -> min_p -> top_k -> top_p. Tokens that tie at the threshold of top_k or top_p are all kept. Greedy
    requests obey everything up to the penalties. Where the rules leave no token, the request ends with an error.

    Attributes:
        n: samples drawn for the prompt, which is computed once; sample i draws as if it were a request of its own with
            `sample_seed(seed, i)`. More than 1 only if not greedy: greedy samples would be equal.
        presence_penalty: subtracted from the logits of tokens that were generated before, in [-2, 2]; 0 = off.
        frequency_penalty: subtracted as often as the token was generated before, in [-2, 2]; 0 = off.
        repetition_penalty: divides positive, multiplies negative logits of tokens of the prompt and of tokens generated
            before, in [1e-6, 1e6]; 1 = off.
        temperature: divides the logits, 0 to 1e6; below 1e-5 the most likely token is taken (greedy).
        top_p: keep the smallest set of tokens with at least this probability, in (0, 1]; 1 = off.
        top_k: keep the k most likely tokens; 0 or -1 = off (stored as 0).
        min_p: keep tokens at least this likely relative to the most likely one, in [0, 1]; 0 = off.
        seed: in [0, 2**64); None = the engine chooses one.
        stop: up to 64 strings of 1 to 1024 characters, or one, that end the text where they first appear in it; stored
            as a tuple.
        stop_token_ids: tokens that end the request, besides the model's end-of-sequence tokens; stored as a tuple.
        bad_words: up to 64 strings of 1 to 1024 characters, or one, that are not generated, neither at the beginning
            of a word nor after a space: their last token is impossible behind the others. Stored as a tuple.
        include_stop_str_in_output: the text ends with the stop string instead of before it.
        ignore_eos: go on after an end-of-sequence token.
        max_tokens: number of tokens to generate, at least 1; None = until the context is full.
        min_tokens: so many tokens are generated before an end-of-sequence token, stop token or stop string can end the
            request; at most max_tokens.
        logprobs: log-probabilities to return for each generated token: its own, and those of the 0 to 20 most likely
            ones. None = none.
        prompt_logprobs: the same for the tokens of the prompt. The prompt is then not looked up in the prefix cache.
        logit_bias: {token id: bias}, up to 1024, added to the logits; clipped to [-100, 100]. Stored as a tuple of
            (id, bias) in order of id.
        allowed_token_ids: the only tokens that can be generated, up to 262144; stored as a tuple. None = all.
        detokenize: return text as well as token ids.
        skip_special_tokens: leave special tokens out of the text.
        output_kind: what the outputs of a stream hold, a RequestOutputKind.
        skip_reading_prefix_cache: compute the whole prompt even where it is cached; what it computes is cached.

    Raises:
        ValueError: a value of the wrong type or out of its range.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    skip_reading_prefix_cache: bool = False

    def __post_init__(self):
        """Validates and stores plain Python values, so that equal parameters have equal hashes."""
        low, high = MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY
        many = "the log-probabilities of the whole vocabulary are not returned"
        values = {
            "n": _int_in("n", self.n, 1, MAX_SAMPLES, "send several requests for more"),
            "presence_penalty": _penalty("presence_penalty", self.presence_penalty),
            "frequency_penalty": _penalty("frequency_penalty", self.frequency_penalty),
            "repetition_penalty": _float_in("repetition_penalty", self.repetition_penalty, low, high, "1 turns it off"),
            "temperature": _float_in("temperature", self.temperature, 0.0, MAX_TEMPERATURE, "0 is greedy"),
            "top_p": _float_in("top_p", self.top_p, 0.0, 1.0, "1 turns it off", allow_low=False),
            "top_k": max(0, _int_in("top_k", self.top_k, -1, MAX_INT32, "0 or -1 turns it off")),
            "min_p": _float_in("min_p", self.min_p, 0.0, 1.0, "0 turns it off"),
            "seed": _int_or_none("seed", self.seed, 0, 2**64 - 1, "reduce it modulo 2**64"),
            "stop": _strings("stop", self.stop),
            "stop_token_ids": _token_ids("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS),
            "bad_words": _strings("bad_words", self.bad_words),
            "include_stop_str_in_output": _bool("include_stop_str_in_output", self.include_stop_str_in_output),
            "ignore_eos": _bool("ignore_eos", self.ignore_eos),
            "max_tokens": _int_or_none("max_tokens", self.max_tokens, 1, MAX_INT32, "None fills the context"),
            "min_tokens": _int_in("min_tokens", self.min_tokens, 0, MAX_INT32, "0 turns it off"),
            "logprobs": _int_or_none("logprobs", self.logprobs, 0, MAX_LOGPROBS, many),
            "prompt_logprobs": _int_or_none("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS, many),
            "logit_bias": _logit_bias(self.logit_bias),
            "allowed_token_ids": _allowed_token_ids(self.allowed_token_ids),
            "detokenize": _bool("detokenize", self.detokenize),
            "skip_special_tokens": _bool("skip_special_tokens", self.skip_special_tokens),
            "output_kind": _output_kind(self.output_kind),
            "skip_reading_prefix_cache": _bool("skip_reading_prefix_cache", self.skip_reading_prefix_cache),
        }
        if values["n"] > 1 and values["temperature"] < GREEDY_TEMPERATURE:
            raise ValueError(f"n must be 1 when temperature is 0 (greedy), got {self.n}; all samples would be equal.")
        if values["max_tokens"] is not None and values["min_tokens"] > values["max_tokens"]:
            raise ValueError(f"min_tokens must be at most max_tokens={self.max_tokens}, got {self.min_tokens}.")
        if values["stop"] and not values["detokenize"]:
            raise ValueError("stop must be empty when detokenize is False: stop strings are looked for in the text.")
        for name, value in values.items():
            object.__setattr__(self, name, value)


@dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """Parameters of a beam search with vLLM's names and defaults; frozen and hashable.

    Attributes:
        beam_width: sequences that are followed, and returned, per prompt.
        max_tokens: tokens to generate at most, at least 1.
        length_penalty: sequences are ranked by cumulative log-probability / length ** length_penalty, in [-4, 4]; above
            0 it favours long sequences.
        ignore_eos: go on after an end-of-sequence token.

    Raises:
        ValueError: a value of the wrong type or out of its range.
    """

    beam_width: int
    max_tokens: int
    length_penalty: float = 1.0
    ignore_eos: bool = False

    def __post_init__(self):
        """Validates and stores plain Python values, so that equal parameters have equal hashes."""
        low, high = -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY
        values = {
            "beam_width": _int_in("beam_width", self.beam_width, 1, MAX_INT32, "1 is greedy search"),
            "max_tokens": _int_in("max_tokens", self.max_tokens, 1, MAX_INT32, "a beam search must end"),
            "length_penalty": _float_in("length_penalty", self.length_penalty, low, high, "0 ignores the length"),
            "ignore_eos": _bool("ignore_eos", self.ignore_eos),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)


def _float_in(name: str, value: Any, low: float, high: float, hint: str, *, allow_low: bool = True) -> float:
    if not isinstance(value, (int, float, np.integer, np.floating)) or isinstance(value, bool):
        raise ValueError(f"{name} must be a number, got {_short(value)} of type {type(value).__name__}.")
    is_inside = (low <= value if allow_low else low < value) and value <= high  # False for NaN
    if not is_inside:
        interval = f"{'[' if allow_low else '('}{low:g}, {high:g}]"
        raise ValueError(f"{name} must be in {interval}, got {_short(value)}; {hint}.")
    return float(value)


def _int_in(name: str, value: Any, low: int, high: int, hint: str) -> int:
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
        raise ValueError(f"{name} must be an integer, got {_short(value)} of type {type(value).__name__}.")
    if not low <= value <= high:
        raise ValueError(f"{name} must be in [{low}, {high}], got {_short(value)}; {hint}.")
    return int(value)


def _int_or_none(name: str, value: Any, low: int, high: int, hint: str) -> int | None:
    return None if value is None else _int_in(name, value, low, high, hint)


def _bool(name: str, value: Any) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise ValueError(f"{name} must be True or False, got {_short(value)} of type {type(value).__name__}.")
    return bool(value)


def _penalty(name: str, value: Any) -> float:
    return _float_in(name, value, -MAX_PENALTY, MAX_PENALTY, "0 turns it off")


def _output_kind(value: Any) -> RequestOutputKind:
    if not isinstance(value, RequestOutputKind):
        raise ValueError(
            f"output_kind must be a RequestOutputKind, got {_short(value)} of type {type(value).__name__}."
        )
    return value


def _strings(name: str, value: Any) -> tuple[str, ...]:
    value = () if value is None else (value,) if isinstance(value, str) else value
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{name} must be a str or a list of them, got {_short(value)} of type {type(value).__name__}.")
    if len(value) > MAX_STRINGS:
        raise ValueError(f"{name} may hold at most {MAX_STRINGS} strings, got {len(value)}; shorten the list.")
    for text in value:
        if not isinstance(text, str):
            raise ValueError(f"{name} must hold strings, got {_short(text)} of type {type(text).__name__}.")
        if not 1 <= len(text) <= MAX_STRING_CHARS:
            raise ValueError(f"{name} must hold strings of 1 ... {MAX_STRING_CHARS} characters, got {len(text)}.")
    return tuple(map(str, value))


def _token_ids(name: str, value: Any, max_len: int) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)) and not (isinstance(value, np.ndarray) and value.ndim == 1):
        raise ValueError(f"{name} must be a list of token ids, got {_short(value)} of type {type(value).__name__}.")
    if len(value) > max_len:
        raise ValueError(f"{name} may hold at most {max_len} token ids, got {len(value)}; shorten the list.")
    if set(map(type, value)) == {int} and min(value) >= 0 and max(value) <= MAX_INT32:
        return tuple(value)  # the quick way for a long list
    return tuple(_int_in(name, token, 0, MAX_INT32, "token ids start at 0") for token in value)


def _allowed_token_ids(value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    ids = _token_ids("allowed_token_ids", value, MAX_ALLOWED_TOKEN_IDS)
    if not ids:
        raise ValueError("allowed_token_ids must not be empty; None allows all.")
    return ids


def _logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    if value is None:
        return ()
    if not isinstance(value, (dict, tuple)):
        raise ValueError(
            f"logit_bias must be a dict of token ids and biases, got {_short(value)} of type {type(value).__name__}."
        )
    if len(value) > MAX_LOGIT_BIASES:
        raise ValueError(f"logit_bias may hold at most {MAX_LOGIT_BIASES} token ids, got {len(value)}; shorten it.")
    if isinstance(value, tuple) and not all(isinstance(pair, tuple) and len(pair) == 2 for pair in value):
        raise ValueError(f"logit_bias must be a dict, or its pairs (token id, bias), got {_short(value)}.")
    biases = {}
    for token, bias in dict(value).items():
        token = _int_in("logit_bias", token, 0, MAX_INT32, "token ids start at 0")
        if not isinstance(bias, (int, float, np.integer, np.floating)) or isinstance(bias, bool) or bias != bias:
            raise ValueError(f"logit_bias must be a number for token {token}, got {_short(bias)}.")
        biases[token] = float(min(MAX_LOGIT_BIAS, max(-MAX_LOGIT_BIAS, bias)))
    return tuple(sorted(biases.items()))


def _short(value: Any) -> str:
    """`repr` in at most 80 characters; Python refuses to print integers of thousands of digits."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    return repr(value)[:80]
