"""SamplingParams: what is refused, with which words, and what is stored."""

import dataclasses
import math
import time

import numpy as np
import pytest

from paged_jax.sampling_params import RequestOutputKind, SamplingParams

HUGE = 10**5000
PENALTIES = ("presence_penalty", "frequency_penalty")
INVALID = [
    *(("temperature", v) for v in [-1, -1e-9, math.nan, math.inf, -math.inf, 1e7, HUGE, "1", None, True, [1.0]]),
    *(("top_p", v) for v in [0, -0.1, 1.0001, math.nan, math.inf, "0.5", None, False, np.float32("nan")]),
    *(("top_k", v) for v in [-2, 2**31, 2**63, HUGE, 1.0, math.nan, "5", None, True, np.bool_(True)]),
    *(("min_p", v) for v in [-0.1, 1.1, math.nan, math.inf, None, True]),
    *(("n", v) for v in [0, -1, 10**6, HUGE, 1.0, "2", None, True]),
    *(("seed", v) for v in [-1, 2**64, HUGE, 1.5, "0", True]),
    *(("max_tokens", v) for v in [0, -1, 2**31, 2**63, HUGE, 1.0, math.inf, "16", True]),
    *(("stop_token_ids", v) for v in [5, "ab", [-1], [2**31], [1.0], ["a"], [True], [None], ["x"] * 10**5]),
    *(("stop_token_ids", v) for v in [list(range(10**6)), iter([1]), {1: 2}, [[1]], np.zeros((1, 1), int)]),
    *((n, v) for n in PENALTIES for v in [-2.1, 2.0001, math.nan, -math.inf, HUGE, "0", None, True]),
    *(("repetition_penalty", v) for v in [0, -1, 1e-7, 1e7, math.nan, math.inf, None, "1"]),
    *(("min_tokens", v) for v in [-1, 17, 2**31, HUGE, 1.0, None, True]),
    *((n, v) for n in ("logprobs", "prompt_logprobs") for v in [-1, -2, 21, 10**9, 1.0, True, "5"]),
    *((n, v) for n in ("stop", "bad_words") for v in [5, [""], "", ["a", ""], [b"a"], [None], {"a": 1}, iter("ab")]),
    *((n, v) for n in ("stop", "bad_words") for v in [["x"] * 10**5, "x" * 10**7, ["x" * 1025]]),
    *(("logit_bias", v) for v in [{-1: 1}, {2**31: 1}, {"5": 1}, {1: math.nan}, {1: "1"}, {1: True}, {True: 1}]),
    *(("logit_bias", v) for v in [5, [1], [(1, 2)], (1,), ((1, 2, 3),), dict.fromkeys(range(10**5), 0)]),
    *(("allowed_token_ids", v) for v in [(), [], 5, [-1], [2**31], [1.0], [True], ["a"], range(5), [0] * (2**18 + 1)]),
    *(("output_kind", v) for v in [0, "DELTA", None]),
    *(
        (n, v)
        for n in (
            "ignore_eos",
            "detokenize",
            "skip_special_tokens",
            "skip_reading_prefix_cache",
            "include_stop_str_in_output",
        )
        for v in [1, 0.0, "yes", None]
    ),
]


@pytest.mark.parametrize(("name", "value"), INVALID, ids=lambda v: repr(type(v)) if v is HUGE else repr(v)[:20])
def test_sampling_params_when_invalid_raises_naming_the_field(name, value):
    start = time.process_time()
    with pytest.raises(ValueError, match=rf"^{name} (must|may)") as caught:
        SamplingParams(**{name: value})
    assert len(str(caught.value)) < 300
    assert time.process_time() - start < 1  # some milliseconds: no work grows with what is refused


@pytest.mark.parametrize(
    ("name", "value", "stored"),
    [
        ("temperature", 0, 0.0),
        ("temperature", np.float32(0.5), 0.5),
        ("temperature", np.int64(2), 2.0),
        ("top_k", -1, 0),
        ("top_k", np.int32(7), 7),
        ("top_k", 2**31 - 1, 2**31 - 1),
        ("top_p", 1, 1.0),
        ("top_p", 1e-8, 1e-8),
        ("min_p", 1, 1.0),
        ("seed", 2**64 - 1, 2**64 - 1),
        ("seed", np.uint64(2**64 - 1), 2**64 - 1),
        ("max_tokens", None, None),
        ("max_tokens", 1, 1),
        ("stop_token_ids", None, ()),
        ("stop_token_ids", [3, 1], (3, 1)),
        ("stop_token_ids", np.array([3, 1]), (3, 1)),
        ("ignore_eos", np.bool_(True), True),
        ("presence_penalty", -2, -2.0),
        ("frequency_penalty", np.float32(2), 2.0),
        ("repetition_penalty", 1e-6, 1e-6),
        ("min_tokens", np.int64(16), 16),
        ("logprobs", 0, 0),
        ("logprobs", np.int32(20), 20),
        ("prompt_logprobs", None, None),
        ("stop", "END", ("END",)),
        ("stop", ["a", "b"], ("a", "b")),
        ("stop", None, ()),
        ("bad_words", ["x" * 1024] * 64, ("x" * 1024,) * 64),
        ("logit_bias", None, ()),
        ("logit_bias", {7: 1, np.int32(3): -math.inf, 5: HUGE}, ((3, -100.0), (5, 100.0), (7, 1.0))),
        ("logit_bias", dict.fromkeys(range(1024), 0), tuple((t, 0.0) for t in range(1024))),
        ("allowed_token_ids", np.array([3, 1]), (3, 1)),
        ("allowed_token_ids", list(range(2**18)), tuple(range(2**18))),
        ("output_kind", RequestOutputKind.DELTA, RequestOutputKind.DELTA),
    ],
    ids=lambda v: repr(v)[:20] if not isinstance(v, (dict, tuple)) else type(v).__name__,
)
def test_sampling_params_when_valid_stores_plain_python_values(name, value, stored):
    params = SamplingParams(**{name: value})
    result = getattr(params, name)
    assert (result, type(result)) == (stored, type(stored))
    assert dataclasses.replace(params) == params
    assert isinstance(hash(params), int)


def test_sampling_params_defaults_are_those_of_vllm():
    assert dataclasses.asdict(SamplingParams()) == {
        "n": 1,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "seed": None,
        "stop": (),
        "stop_token_ids": (),
        "bad_words": (),
        "include_stop_str_in_output": False,
        "ignore_eos": False,
        "max_tokens": 16,
        "min_tokens": 0,
        "logprobs": None,
        "prompt_logprobs": None,
        "logit_bias": (),
        "allowed_token_ids": None,
        "detokenize": True,
        "skip_special_tokens": True,
        "output_kind": RequestOutputKind.CUMULATIVE,
        "skip_reading_prefix_cache": False,
    }


def test_sampling_params_several_greedy_samples_are_refused():
    with pytest.raises(ValueError, match="n must be 1 when temperature"):
        SamplingParams(n=2, temperature=0)
    assert SamplingParams(n=2, temperature=1e-5).n == 2


def test_sampling_params_min_tokens_above_max_tokens_are_refused():
    with pytest.raises(ValueError, match="min_tokens must be at most max_tokens=3, got 4"):
        SamplingParams(min_tokens=4, max_tokens=3)
    assert SamplingParams(min_tokens=3, max_tokens=3).min_tokens == 3
    assert SamplingParams(min_tokens=40, max_tokens=None).min_tokens == 40


def test_sampling_params_stop_strings_without_text_are_refused():
    with pytest.raises(ValueError, match="stop must be empty when detokenize is False"):
        SamplingParams(stop="a", detokenize=False)


def test_sampling_params_when_equal_have_equal_hashes():
    assert hash(SamplingParams(top_k=-1, stop_token_ids=[1])) == hash(SamplingParams(stop_token_ids=(1,)))


def test_sampling_params_when_assigned_to_raises():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().temperature = 0.0
