"""The virtual clock of benchmarks/scheduling.py: what a simulation reports is what its costs add up to."""

import importlib
from pathlib import Path

import numpy as np
import pytest

SCARCE = 4  # blocks of 16 tokens: two requests of 17 - 48 tokens cannot both grow


@pytest.fixture(scope="module")
def scheduling():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
        yield importlib.import_module("scheduling")


def run(scheduling, lengths, arrivals, costs, **options):
    llm = scheduling.engine(SCARCE, 2, 64, max_num_batched_tokens=32, **options)
    return scheduling.simulate(llm, scheduling.Costs(**costs), np.array(lengths), np.array(arrivals), 0)


def test_latency_is_the_sum_of_the_costs_of_the_steps(scheduling):
    costs = {"step": 1.0, "token": 0.1, "cached_token": 0.01, "swapped_block": 0.0}
    figures = run(scheduling, [[5, 3], [40, 1]], [0.0, 100.0], costs)
    first = (1 + 0.5 + 0.05) + (1 + 0.1 + 0.06) + (1 + 0.1 + 0.07)
    second = (1 + 3.2 + 0.32) + (1 + 0.8 + 0.40)  # two chunks: at most 32 tokens a step
    assert figures["latency"]["mean"] == pytest.approx((first + second) / 2)
    assert figures["ttft"]["mean"] == pytest.approx((1.55 + second) / 2)
    assert figures["seconds"] == pytest.approx(100 + second)
    assert (figures["steps"], figures["computed_tokens"], figures["computed_twice"]) == (5, 47, 0)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preemption_costs_computed_tokens_or_moved_blocks(scheduling, mode):
    costs = {"step": 1.0, "token": 0.1, "cached_token": 0.0, "swapped_block": 10.0}
    figures = run(scheduling, [[17, 30], [17, 30]], [0.0, 0.0], costs, preemption_mode=mode, watermark=0.0)
    assert figures["preemptions"] > 0
    assert (figures["computed_twice"] > 0, figures["swapped_blocks"] > 0) == (mode == "recompute", mode == "swap")
    tokens = figures["computed_tokens"]
    assert tokens == 2 * 46 + figures["computed_twice"]
    seconds = figures["steps"] + 0.1 * tokens + 10 * figures["swapped_blocks"]
    assert figures["seconds"] == pytest.approx(seconds)
