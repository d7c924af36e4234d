"""Compares scheduling policies on a virtual clock, through the real scheduler and the real block manager.

    python benchmarks/scheduling.py --plot benchmarks/results/scheduling.png

The engine runs as always: it admits, allocates, preempts, swaps, looks prompts up. Only the model is a stub that
generates one token for ever, and time is what a cost model says (`Costs`), so that figures repeat exactly on any
machine. Requests have log-normal lengths with the means of ShareGPT and arrive as a Poisson process.

* Policy: "fcfs" against "sjf", over arrival rates as shares of what the engine can serve; the pool holds every row.
* Watermark: a pool for a third of the rows, fcfs, recomputation.
* Preemption: recomputation (with the prefix cache and without) against swapping, all requests at once, no watermark,
  over pool sizes.

Latency is the time from arrival to the last token, also per token of output; TTFT that to the first token.
"""

import argparse
import dataclasses
import functools
import pathlib

import _common
import jax
import jax.numpy as jnp
import numpy as np
from memory import TRAFFIC

from paged_jax import LLM, CacheConfig, KVCache, SamplingParams, StepBatch
from paged_jax.config import cdiv
from paged_jax.engine_core import EngineCore

SHAREGPT = next(traffic for traffic in TRAFFIC if traffic.name == "sharegpt_lengths")
BLOCK_SIZE = 16
VOCAB = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds that things take. Defaults: Llama-3-8B in bfloat16 on an H100, from data sheets.

    Attributes:
        step: reading 16.1e9 bytes of weights at 3.35e12 byte/s.
        token: 2 * 8.03e9 floating-point operations at half of 989e12 per second.
        cached_token: reading the K/V of a token, 32 layers * 2 * 8 heads * 128 * 2 bytes, at 3.35e12 byte/s.
        swapped_block: moving a block of 16 tokens between device and host at 5e10 byte/s.
    """

    step: float = 4.8e-3
    token: float = 3.25e-5
    cached_token: float = 3.9e-8
    swapped_block: float = 4.2e-5


class Clock:
    """The time by the cost model: every dispatch of the core's runner moves it on.

    Attributes:
        now: seconds.
        runner: the real one.
        num_steps: steps of the model. num_tokens: tokens that it has computed.
    """

    def __init__(self, core: EngineCore, costs: Costs) -> None:
        self.now, self.num_steps, self.num_tokens = 0.0, 0, 0
        self._core, self.runner, self._costs = core, core.runner, costs
        core.runner = self  # what it does not time goes to the real one

    def __getattr__(self, name: str):
        return getattr(self.runner, name)

    def prefill(self, chunks):
        """A ragged step."""
        cached = {s.row: s.num_computed_tokens for r in self._core.running for s in r.live_samples}
        counts = {c.row: len(c.token_ids) for c in chunks}
        output = self.runner.prefill(chunks)
        self._step(output, sum(counts.values()), sum(cached[row] + count for row, count in counts.items()))
        return output

    def decode(self, num_active, **options):
        """One decode step: the engine runs with decode_steps=1."""
        cached = [s.num_computed_tokens for r in self._core.running for s in r.live_samples if s.is_active]
        output = self.runner.decode(num_active, **options)
        self._step(output, num_active, sum(cached) + num_active)
        return output

    def swap_out(self, rows):
        """Blocks to the host."""
        saved = self.runner.swap_out(rows)
        self.now += self._costs.swapped_block * saved.num_blocks
        return saved

    def swap_in(self, saved, rows, reserve):
        """Blocks from the host, if there is room."""
        is_done = self.runner.swap_in(saved, rows, reserve)
        self.now += self._costs.swapped_block * saved.num_blocks * is_done
        return is_done

    def _step(self, output, num_tokens: int, num_cached: int) -> None:
        if int(output.num_steps) == 0:
            return  # refused by the block manager, the model did not run
        costs = self._costs
        self.now += costs.step + costs.token * num_tokens + costs.cached_token * num_cached
        self.num_steps += 1
        self.num_tokens += num_tokens


def forward(params: dict, batch: StepBatch, cache: KVCache) -> tuple[jax.Array, KVCache]:
    """The stub: token 1, whatever comes."""
    return jnp.zeros((batch.logits_indices.shape[0], VOCAB)).at[:, 1].set(1.0), cache


@functools.cache
def programs(*shapes) -> dict:
    """What engines of equal shapes have compiled: policies are not in it."""
    return {}


def engine(num_usable_blocks: int, num_rows: int, max_model_len: int, **options) -> LLM:
    """An engine around the stub, with options of LLM."""
    config = CacheConfig(
        num_blocks=num_usable_blocks + 1,
        block_size=BLOCK_SIZE,
        num_layers=1,
        num_kv_heads=1,
        head_dim=1,
        max_num_seqs=num_rows,
        max_blocks_per_seq=cdiv(max_model_len, BLOCK_SIZE),
    )
    llm = LLM(forward, {}, config, decode_steps=1, **options)
    runner = llm.core.runner
    # Padding takes no virtual time: one program a kind will do.
    runner.token_buckets, runner.row_buckets = runner.token_buckets[-1:], runner.row_buckets[-1:]
    runner._programs = programs(config, llm.max_num_batched_tokens, runner.has_prefix_cache)
    return llm


def simulate(llm: LLM, costs: Costs, lengths: np.ndarray, arrivals: np.ndarray, seed: int) -> dict[str, object]:
    """Serves requests that arrive at the given times and returns what they and the engine experienced.

    Args:
        llm: new.
        lengths: [n, 2] tokens of prompts and outputs.
        arrivals: [n] seconds, in order.
        seed: of the prompts' tokens.
    """
    core, clock, rng = llm.core, Clock(llm.core, costs), np.random.default_rng(seed)
    prompts = [rng.integers(2, VOCAB, n).tolist() for n in lengths[:, 0]]
    first, last, next_request = np.full(len(arrivals), np.nan), np.zeros(len(arrivals)), 0
    while next_request < len(arrivals) or llm.has_unfinished_requests():
        if not llm.has_unfinished_requests():
            clock.now = max(clock.now, arrivals[next_request])
        while next_request < len(arrivals) and arrivals[next_request] <= clock.now:
            params = SamplingParams(temperature=0, max_tokens=int(lengths[next_request, 1]), ignore_eos=True)
            llm.add_request(str(next_request), {"prompt_token_ids": prompts[next_request]}, params)
            next_request += 1
        for output in llm.step():
            i = int(output.request_id)
            first[i] = clock.now if np.isnan(first[i]) else first[i]
            if output.finished:
                if len(output.outputs[0].token_ids) != lengths[i, 1]:
                    raise RuntimeError(f"request {i} ended with {output.outputs[0]} instead of {lengths[i, 1]} tokens")
                last[i] = clock.now
    if llm.num_free_blocks != llm.cache_config.num_blocks - 1:
        raise RuntimeError("blocks were lost")
    latency = last - arrivals
    return {
        "seconds": float(clock.now - arrivals[0]),
        "seconds_80_percent": float(np.quantile(last, 0.8) - arrivals[0]),
        "output_tokens_per_second": float(lengths[:, 1].sum() / (clock.now - arrivals[0])),
        "latency": statistics_of(latency),
        "latency_per_token": statistics_of(latency / lengths[:, 1]),
        "ttft": statistics_of(first - arrivals),
        "steps": clock.num_steps,
        "computed_tokens": clock.num_tokens,
        "computed_twice": clock.num_tokens - int((lengths.sum(axis=1) - 1).sum()),
        "preemptions": sum(core.num_preemptions.values()),
        "swapped_blocks": sum(core.num_swapped_blocks.values()),
        "peak_blocks": core.peak_blocks,
    }


def statistics_of(seconds: np.ndarray) -> dict[str, float]:
    """Mean, median and 99th percentile."""
    return {"mean": float(seconds.mean()), "p50": float(np.median(seconds)), "p99": float(np.percentile(seconds, 99))}


# -- experiments -----------------------------------------------------------------------------------------------------


class Experiments:
    """The three comparisons, each a list of figures with the settings that made them."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments, self.costs = arguments, Costs()
        self.lengths = SHAREGPT.lengths(arguments.num_requests, arguments.max_model_len, arguments.seed)
        # Blocks that num_rows requests of the mean length hold at their end.
        self.load = arguments.num_rows * cdiv(int(self.lengths.sum(axis=1).mean()), BLOCK_SIZE)

    def run(self, pool_share: float, rate: float | None, **options) -> dict[str, object]:
        """One simulation. rate: requests per second, None = all at once; options: of LLM."""
        a = self.arguments
        largest = cdiv(int(self.lengths.sum(axis=1).max()), BLOCK_SIZE)
        num_blocks = max(largest, round(self.load * pool_share))
        gaps = np.random.default_rng((a.seed, 1)).exponential(1.0, a.num_requests)
        arrivals = np.zeros(a.num_requests) if rate is None else np.cumsum(gaps) / rate
        options |= {"max_num_batched_tokens": a.max_num_batched_tokens}
        llm = engine(num_blocks, a.num_rows, a.max_model_len, **options)
        figures = simulate(llm, self.costs, self.lengths, arrivals, a.seed)
        settings = {"num_blocks": num_blocks, "pool_share": pool_share, "rate": rate}
        settings |= {"has_prefix_cache": llm.core.runner.has_prefix_cache, **dataclasses.asdict(llm.scheduler_config)}
        line = f"{figures['latency']['mean']:8.2f} s mean, {figures['latency']['p99']:8.2f} s p99 latency"
        print(f"{line}, {figures['preemptions']:5} preemptions  {settings}", flush=True)
        return settings | figures

    def capacity(self, pool_share: float) -> float:
        """Requests per second that the engine serves when all are there at once, the first 80 % of them: the last rows
        have no successors."""
        return 0.8 * len(self.lengths) / self.run(pool_share, None, preemption_mode="recompute")["seconds_80_percent"]

    def policies(self) -> list[dict]:
        """fcfs and sjf over rates; the pool is large enough for every row."""
        capacity = self.capacity(2.0)
        return [
            {"load": load} | self.run(2.0, load * capacity, scheduling_policy=policy)
            for load in self.arguments.loads
            for policy in ("fcfs", "sjf")
        ]

    def watermarks(self) -> list[dict]:
        """No watermark to a large one, near the capacity of a scarce pool."""
        rate = 0.9 * self.capacity(1 / 3)
        options = {"preemption_mode": "recompute"}
        return [self.run(1 / 3, rate, watermark=share, **options) for share in self.arguments.watermarks]

    def preemption(self) -> list[dict]:
        """Recomputation and swapping over pool sizes."""
        ways = (
            {"preemption_mode": "recompute", "enable_prefix_caching": False},
            {"preemption_mode": "recompute"},
            {"preemption_mode": "swap"},
        )
        shares = self.arguments.pool_shares
        return [self.run(share, None, watermark=0.0, **way) for share in shares for way in ways]


def plot(report: dict, path: pathlib.Path) -> None:
    """Draws the three comparisons side by side."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(15, 4.2))
    for policy in ("fcfs", "sjf"):
        rows = [r for r in report["policies"] if r["policy"] == policy]
        for kind, style in (("mean", "-o"), ("p99", "--s")):
            times = [r["latency_per_token"][kind] * 1e3 for r in rows]
            axes[0].plot([r["load"] for r in rows], times, style, label=f"{policy}, {kind}")
    axes[0].set(xlabel="arrivals, share of capacity", ylabel="latency per output token, ms", yscale="log")
    rows = report["watermarks"]
    marks = [100 * r["watermark"] for r in rows]
    axes[1].plot(marks, [r["latency"]["mean"] for r in rows], "-o", label="latency, mean, s")
    axes[1].plot(marks, [r["latency"]["p99"] for r in rows], "--s", label="latency, p99, s")
    axes[1].plot(marks, [r["preemptions"] for r in rows], ":^", label="preemptions")
    axes[1].set(xlabel="watermark, % of the pool", ylim=(0, None))
    for mode, is_cached, label in (
        ("recompute", False, "recompute"),
        ("recompute", True, "recompute, prefix cache"),
        ("swap", True, "swap"),
    ):
        chosen = [r for r in report["preemption"] if (r["preemption_mode"], r["has_prefix_cache"]) == (mode, is_cached)]
        rates = [r["output_tokens_per_second"] for r in chosen]
        axes[2].plot([r["pool_share"] for r in chosen], rates, "-o", label=label)
    axes[2].set(xlabel="pool, share of the load", ylabel="output tokens per second", ylim=(0, None))
    for axis, title in zip(axes, ("Policy", "Watermark (pool for a third)", "Preemption"), strict=True):
        axis.set_title(title)
        axis.grid(alpha=0.3)
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    print(f"wrote {path}")


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-requests", type=int, default=300)
    parser.add_argument("--num-rows", type=int, default=32, help="requests in flight at once")
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--max-num-batched-tokens", type=int, default=512)
    parser.add_argument("--loads", nargs="*", type=float, default=[0.7, 0.9, 1.1, 1.5])
    parser.add_argument("--watermarks", nargs="*", type=float, default=[0.0, 0.05, 0.1, 0.2])
    parser.add_argument("--pool-shares", nargs="*", type=float, default=[0.2, 1 / 3, 2 / 3, 1.0])
    parser.add_argument("--seed", type=int, default=0)
    results = _common.ROOT / "benchmarks/results"
    parser.add_argument("--output", type=pathlib.Path, default=results / "scheduling.json")
    parser.add_argument("--plot", type=pathlib.Path, help="picture to write; needs matplotlib")
    return parser.parse_args()


def main() -> None:
    """Runs the comparisons and writes the report."""
    arguments = parse_arguments()
    settings = {k: v for k, v in vars(arguments).items() if k not in ("output", "plot")}
    experiments = Experiments(arguments)
    report: dict = {
        "environment": _common.environment(),
        "settings": settings,
        "costs": dataclasses.asdict(experiments.costs),
        "policies": experiments.policies(),
        "watermarks": experiments.watermarks(),
        "preemption": experiments.preemption(),
    }
    _common.write_report(arguments.output, report)
    if arguments.plot:
        plot(report, arguments.plot)


if __name__ == "__main__":
    main()
