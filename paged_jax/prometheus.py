"""Metrics in Prometheus' form. Imported on first use: it needs the package prometheus_client."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

try:
    from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
    from prometheus_client.registry import Collector, CollectorRegistry
except ImportError as error:
    raise ImportError("Prometheus metrics need prometheus_client: pip install 'paged_jax[metrics]'") from error

if TYPE_CHECKING:
    from paged_jax.metrics import Metrics

_HELP = {
    "vllm:num_requests_running": "Requests that have rows.",
    "vllm:num_requests_waiting": "Requests that wait for rows or blocks.",
    "paged_jax:num_requests_swapped": "Requests whose K/V are in host memory.",
    "vllm:kv_cache_usage_perc": "Share of the blocks in use; 1 is all.",
    "paged_jax:kv_cache_bytes_per_token": "Bytes of K and V that one token takes.",
    "paged_jax:num_cached_blocks": "Free blocks that hold a cached prefix.",
    "paged_jax:compile_count": "Programs compiled.",
    "paged_jax:num_steps": "Model steps.",
    "vllm:prompt_tokens": "Prompt tokens computed.",
    "vllm:generation_tokens": "Tokens generated.",
    "vllm:prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "vllm:prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "vllm:num_preemptions": "Requests that lost their blocks, by either kind.",
    "vllm:time_to_first_token_seconds": "Time to first token in seconds.",
    "vllm:inter_token_latency_seconds": "Time between tokens in seconds; tokens of one dispatch share its time.",
    "vllm:e2e_request_latency_seconds": "Time from arrival to end in seconds.",
    "vllm:request_queue_time_seconds": "Time from arrival to the first row in seconds.",
}


class MetricsCollector(Collector):
    """Reads the metrics out for Prometheus; nothing is counted twice."""

    def __init__(self, metrics: "Metrics", model_name: str) -> None:
        self._metrics = metrics
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        """The metric families, with their present values."""
        values, label, model = self._metrics.snapshot(), "model_name", self._model_name
        histograms = self._metrics.histograms()
        for name, text in _HELP.items():
            key = name.split(":")[1]
            if key in histograms:
                family = HistogramMetricFamily(name, text, labels=[label])
                family.add_metric([model], buckets=histograms[key].cumulative(), sum_value=histograms[key].sum)
            else:
                kind = GaugeMetricFamily if key in self._metrics.gauges() else CounterMetricFamily
                family = kind(name, text, labels=[label])
                family.add_metric([model], values[key])
            yield family
        for name, text, new_label, counts in (
            ("vllm:request_success", "Continuations that ended.", "finished_reason", values["request_success"]),
            (
                "paged_jax:preemptions",
                "Requests that lost their blocks.",
                "kind",
                {kind: values[f"num_preemptions_{kind}"] for kind in ("recompute", "swap")},
            ),
            (
                "paged_jax:swapped_blocks",
                "Blocks copied between device and host memory.",
                "direction",
                {way: values[f"swapped_{way}_blocks"] for way in ("out", "in")},
            ),
        ):
            family = CounterMetricFamily(name, text, labels=[label, new_label])
            for value, count in counts.items():
                family.add_metric([model, value], count)
            yield family


def build_registry(metrics: "Metrics", model_name: str) -> CollectorRegistry:
    """A registry of its own for these metrics."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(MetricsCollector(metrics, model_name))
    return registry
