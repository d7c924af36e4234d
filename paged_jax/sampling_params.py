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
GREEDY_TEMPERATURE = 1e-5  # below it a row is greedy, as in vLLM


class RequestOutputKind(enum.Enum):
    """What `step` and `stream` return of a request: all that it has so far, what is new, or only the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters with vLLM's names, defaults and ranges; frozen and hashable.

    Filters apply in the order temperature -> min_p -> top_k -> top_p. Tokens that tie at the threshold of top_k or
    top_p are all kept.

    Attributes:
        n: samples drawn for the prompt, which is computed once; sample i draws as if it were a request of its own with
            `sample_seed(seed, i)`. More than 1 only if not greedy: greedy samples would be equal.
        temperature: divides the logits, 0 to 1e6; below 1e-5 the most likely token is taken (greedy).
        top_p: keep the smallest set of tokens with at least this probability, in (0, 1]; 1 = off.
        top_k: keep the k most likely tokens; 0 or -1 = off (stored as 0).
        min_p: keep tokens at least this likely relative to the most likely one, in [0, 1]; 0 = off.
        seed: in [0, 2**64); None = the engine chooses one.
        stop_token_ids: tokens that end the request, besides the model's end-of-sequence tokens; stored as a tuple.
        ignore_eos: go on after an end-of-sequence token.
        max_tokens: number of tokens to generate, at least 1; None = until the context is full.
        detokenize: return text as well as token ids.
        skip_special_tokens: leave special tokens out of the text.
        output_kind: what `step` and `stream` return; a RequestOutputKind.
        skip_reading_prefix_cache: compute the whole prompt even where it is cached; what it computes is cached.

    Raises:
        ValueError: a value of the wrong type or out of its range.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    max_tokens: int | None = 16
    detokenize: bool = True
    skip_special_tokens: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    skip_reading_prefix_cache: bool = False

    def __post_init__(self):
        """Validates and stores plain Python values, so that equal parameters have equal hashes."""
        values = {
            "n": _int_in("n", self.n, 1, MAX_SAMPLES, "send several requests for more"),
            "temperature": _float_in("temperature", self.temperature, 0.0, MAX_TEMPERATURE, "0 is greedy"),
            "top_p": _float_in("top_p", self.top_p, 0.0, 1.0, "1 turns it off", allow_low=False),
            "top_k": max(0, _int_in("top_k", self.top_k, -1, MAX_INT32, "0 or -1 turns it off")),
            "min_p": _float_in("min_p", self.min_p, 0.0, 1.0, "0 turns it off"),
            "seed": _int_or_none("seed", self.seed, 0, 2**64 - 1, "reduce it modulo 2**64"),
            "stop_token_ids": _token_ids("stop_token_ids", self.stop_token_ids),
            "ignore_eos": _bool("ignore_eos", self.ignore_eos),
            "max_tokens": _int_or_none("max_tokens", self.max_tokens, 1, MAX_INT32, "None fills the context"),
            "detokenize": _bool("detokenize", self.detokenize),
            "skip_special_tokens": _bool("skip_special_tokens", self.skip_special_tokens),
            "skip_reading_prefix_cache": _bool("skip_reading_prefix_cache", self.skip_reading_prefix_cache),
        }
        if not isinstance(self.output_kind, RequestOutputKind):
            raise ValueError(f"output_kind must be a RequestOutputKind, got {_short(self.output_kind)}.")
        if values["n"] > 1 and values["temperature"] < GREEDY_TEMPERATURE:
            raise ValueError(f"n must be 1 when temperature is 0 (greedy), got {self.n}; all samples would be equal.")
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


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)) and not (isinstance(value, np.ndarray) and value.ndim == 1):
        raise ValueError(f"{name} must be a list of token ids, got {_short(value)} of type {type(value).__name__}.")
    if len(value) > MAX_STOP_TOKEN_IDS:
        raise ValueError(f"{name} may hold at most {MAX_STOP_TOKEN_IDS} token ids, got {len(value)}; shorten the list.")
    return tuple(_int_in(name, token, 0, MAX_INT32, "token ids start at 0") for token in value)


def _short(value: Any) -> str:
    """`repr` in at most 80 characters; Python refuses to print integers of thousands of digits."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    return repr(value)[:80]
