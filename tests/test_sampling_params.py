"""SamplingParams: what is refused, with which words, and what is stored."""

import dataclasses
import math

import numpy as np
import pytest

from paged_jax.sampling_params import SamplingParams

HUGE = 10**5000
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
    *(
        (n, v)
        for n in ("ignore_eos", "detokenize", "skip_special_tokens", "skip_reading_prefix_cache")
        for v in [1, 0.0, "yes", None]
    ),
]


@pytest.mark.parametrize(("name", "value"), INVALID, ids=lambda v: repr(type(v)) if v is HUGE else repr(v)[:20])
def test_sampling_params_when_invalid_raises_naming_the_field(name, value):
    with pytest.raises(ValueError, match=rf"^{name} (must|may)") as caught:
        SamplingParams(**{name: value})
    assert len(str(caught.value)) < 300


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
    ],
)
def test_sampling_params_when_valid_stores_plain_python_values(name, value, stored):
    result = getattr(SamplingParams(**{name: value}), name)
    assert (result, type(result)) == (stored, type(stored))


def test_sampling_params_defaults_are_those_of_vllm():
    assert dataclasses.asdict(SamplingParams()) == {
        "n": 1,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "seed": None,
        "stop_token_ids": (),
        "ignore_eos": False,
        "max_tokens": 16,
        "detokenize": True,
        "skip_special_tokens": True,
        "skip_reading_prefix_cache": False,
    }


def test_sampling_params_several_greedy_samples_are_refused():
    with pytest.raises(ValueError, match="n must be 1 when temperature"):
        SamplingParams(n=2, temperature=0)
    assert SamplingParams(n=2, temperature=1e-5).n == 2


def test_sampling_params_when_equal_have_equal_hashes():
    assert hash(SamplingParams(top_k=-1, stop_token_ids=[1])) == hash(SamplingParams(stop_token_ids=(1,)))


def test_sampling_params_when_assigned_to_raises():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().temperature = 0.0
