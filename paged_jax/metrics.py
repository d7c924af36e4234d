"""What the engine has done so far: counters, gauges and histograms of constant size that hold no request."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from typing import Any

#: Upper edges of the histograms' buckets in seconds; the last bucket is open. They are vLLM's.
FIRST_TOKEN_EDGES = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
INTER_TOKEN_EDGES = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
REQUEST_EDGES = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One dispatch of the engine.

    Attributes:
        time: when it ended, in seconds of `time.monotonic`.
        seconds: how long it took on the host, the wait for the device included.
        kind: "prefill", "decode", or "mixed" for both in one step.
        num_steps: model steps in the dispatch.
        num_running, num_waiting, num_swapped: requests with rows, without, and with their K/V in host memory, after it.
        num_used_blocks, num_free_blocks, num_cached_blocks: blocks that a request owns, that none owns, and how many
            of the latter still hold a cached prefix, after it.
        num_stored_tokens: tokens in the used blocks, a shared one once, after it.
        num_prompt_tokens, num_generated_tokens: computed and generated in it.
        num_preemptions_recompute, num_preemptions_swap: requests that lost their blocks for it, by kind.
        num_swapped_out_blocks, num_swapped_in_blocks: blocks copied to host memory and back.
        prefix_queries, prefix_hits: prompt tokens that were looked up in the prefix cache, and found.
        compile_count: programs compiled since the engine was made.
    """

    time: float
    seconds: float
    kind: str
    num_steps: int
    num_running: int
    num_waiting: int
    num_swapped: int = 0
    num_used_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_stored_tokens: int
    num_prompt_tokens: int
    num_generated_tokens: int
    num_preemptions_recompute: int = 0
    num_preemptions_swap: int = 0
    num_swapped_out_blocks: int = 0
    num_swapped_in_blocks: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    compile_count: int = 0

    @property
    def num_preemptions(self) -> int:
        """Preemptions of both kinds."""
        return self.num_preemptions_recompute + self.num_preemptions_swap


@dataclass(frozen=True, kw_only=True)
class RequestMetrics:
    """When things happened to one request, in seconds of `time.monotonic`; None for what has not happened.

    Attributes:
        arrival_time: it was added.
        first_scheduled_time: it first got a row.
        first_token_time, last_token_time: its first and its latest token were on the host.
        finished_time: its last continuation ended.
        num_preemptions: how often it lost its blocks.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0

    @property
    def time_in_queue(self) -> float | None:
        """Seconds from its arrival to its first row."""
        return None if self.first_scheduled_time is None else self.first_scheduled_time - self.arrival_time

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from its arrival to its first token."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def e2e_latency(self) -> float | None:
        """Seconds from its arrival to its end."""
        return None if self.finished_time is None else self.finished_time - self.arrival_time


class Histogram:
    """Counts of values per bucket.

    Attributes:
        edges: upper edges of the buckets, inclusive; one more bucket has none.
        counts: values per bucket.
        sum: of all values.
    """

    def __init__(self, edges: Sequence[float]) -> None:
        self.edges = tuple(edges)
        self.counts = [0] * (len(edges) + 1)
        self.sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Adds a value `count` times."""
        self.counts[bisect_left(self.edges, value)] += count
        self.sum += value * count

    def cumulative(self) -> list[tuple[str, int]]:
        """(edge, number of values up to it) per bucket, as Prometheus has it."""
        return list(zip([*map(str, self.edges), "+Inf"], accumulate(self.counts), strict=True))

    def snapshot(self) -> dict[str, Any]:
        """Its content as plain values."""
        return {"count": sum(self.counts), "sum": self.sum, "buckets": dict(self.cumulative())}


@dataclass(kw_only=True)
class _Counters:
    """Totals since the engine was made; names of vLLM where it has them."""

    num_steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_preemptions_recompute: int = 0
    num_preemptions_swap: int = 0
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0
    request_success: dict[str, int] = field(default_factory=lambda: {"stop": 0, "length": 0, "abort": 0, "error": 0})


class Metrics:
    """Totals and the latest state of an engine.

    Attributes:
        kv_cache_bytes_per_token: bytes of K and V that one token takes.
        time_to_first_token, inter_token_latency, e2e_request_latency, request_queue_time: histograms of seconds.
    """

    def __init__(self, *, kv_cache_bytes_per_token: int = 0) -> None:
        self.kv_cache_bytes_per_token = kv_cache_bytes_per_token
        self.time_to_first_token = Histogram(FIRST_TOKEN_EDGES)
        self.inter_token_latency = Histogram(INTER_TOKEN_EDGES)
        self.e2e_request_latency = Histogram(REQUEST_EDGES)
        self.request_queue_time = Histogram(REQUEST_EDGES)
        self._counters = _Counters()
        self._last: StepRecord | None = None

    def on_step(self, record: StepRecord) -> None:
        """Counts a dispatch."""
        total = self._counters
        total.num_steps += record.num_steps
        total.prompt_tokens += record.num_prompt_tokens
        total.generation_tokens += record.num_generated_tokens
        total.prefix_cache_queries += record.prefix_queries
        total.prefix_cache_hits += record.prefix_hits
        total.num_preemptions_recompute += record.num_preemptions_recompute
        total.num_preemptions_swap += record.num_preemptions_swap
        total.swapped_out_blocks += record.num_swapped_out_blocks
        total.swapped_in_blocks += record.num_swapped_in_blocks
        self._last = record

    def on_first_token(self, seconds: float) -> None:
        """Counts the first token of a continuation, this long after its request arrived."""
        self.time_to_first_token.observe(seconds)

    def on_tokens(self, seconds: float, count: int) -> None:
        """Counts `count` further tokens of a continuation that arrived together, this long after the ones before."""
        if count > 0:
            self.inter_token_latency.observe(seconds / count, count)

    def on_finished(self, reason: str, times: RequestMetrics) -> None:
        """Counts a continuation that has ended; n of them for a request of n samples, as in vLLM."""
        self._counters.request_success[reason] += 1
        for histogram, seconds in (
            (self.e2e_request_latency, times.e2e_latency),
            (self.request_queue_time, times.time_in_queue),
        ):
            if seconds is not None:
                histogram.observe(seconds)

    def snapshot(self) -> dict[str, Any]:
        """All of it as plain values: gauges after the latest step, totals, histograms with cumulative buckets.

        Names are those of vLLM's Prometheus metrics without their prefix, where vLLM has the metric.
        """
        counters = asdict(self._counters)
        num_preemptions = self._counters.num_preemptions_recompute + self._counters.num_preemptions_swap
        return {
            **self.gauges(),
            **counters,
            "num_preemptions": num_preemptions,
            **{name: histogram.snapshot() for name, histogram in self.histograms().items()},
        }

    def registry(self, model_name: str = "") -> Any:
        """A private prometheus_client.CollectorRegistry, which shows the present values whenever it is read.

        Metrics that vLLM has too bear its names ("vllm:..."), others begin with "paged_jax:".

        Example:
            >>> print(prometheus_client.generate_latest(llm.metrics.registry("smollm2")).decode())

        Raises:
            ImportError: prometheus_client is not installed.
        """
        from paged_jax.prometheus import build_registry

        return build_registry(self, model_name)

    def gauges(self) -> dict[str, float]:
        """The state after the latest dispatch, and what is always so."""
        last = self._last
        fixed: dict[str, float] = {"kv_cache_bytes_per_token": self.kv_cache_bytes_per_token}
        if last is None:
            names = ("num_requests_running", "num_requests_waiting", "num_requests_swapped", "kv_cache_usage_perc")
            return fixed | dict.fromkeys((*names, "num_cached_blocks", "compile_count"), 0)
        return fixed | {
            "num_requests_running": last.num_running,
            "num_requests_waiting": last.num_waiting,
            "num_requests_swapped": last.num_swapped,
            "kv_cache_usage_perc": last.num_used_blocks / max(1, last.num_used_blocks + last.num_free_blocks),
            "num_cached_blocks": last.num_cached_blocks,
            "compile_count": last.compile_count,
        }

    def histograms(self) -> dict[str, Histogram]:
        """The distributions."""
        return {
            "time_to_first_token_seconds": self.time_to_first_token,
            "inter_token_latency_seconds": self.inter_token_latency,
            "e2e_request_latency_seconds": self.e2e_request_latency,
            "request_queue_time_seconds": self.request_queue_time,
        }
