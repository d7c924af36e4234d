"""Counters, histograms and their Prometheus form, against sums made by hand."""

import sys
import weakref

import prometheus_client as prometheus
import pytest

from paged_jax.metrics import FIRST_TOKEN_EDGES, Histogram, Metrics, RequestMetrics, StepRecord


def record(**values) -> StepRecord:
    defaults = {"time": 0.0, "seconds": 0.1, "kind": "decode", "num_steps": 1, "num_running": 0, "num_waiting": 0}
    defaults |= {"num_used_blocks": 0, "num_free_blocks": 10, "num_cached_blocks": 0, "num_stored_tokens": 0}
    return StepRecord(**{**defaults, "num_prompt_tokens": 0, "num_generated_tokens": 0, **values})


def filled_metrics() -> Metrics:
    metrics = Metrics()
    metrics.on_step(record(kind="prefill", num_prompt_tokens=20, num_generated_tokens=2, prefix_queries=30))
    metrics.on_step(
        record(
            num_steps=4,
            num_running=2,
            num_waiting=3,
            num_swapped=1,
            num_used_blocks=6,
            num_free_blocks=2,
            num_cached_blocks=1,
            num_prompt_tokens=5,
            num_generated_tokens=7,
            num_preemptions_recompute=2,
            num_preemptions_swap=1,
            num_swapped_out_blocks=5,
            num_swapped_in_blocks=4,
            prefix_queries=10,
            prefix_hits=8,
            compile_count=9,
        )
    )
    metrics.on_first_token(0.03)
    metrics.on_tokens(0.2, 4)
    metrics.on_tokens(0.2, 0)
    metrics.on_finished("stop", RequestMetrics(arrival_time=1.0, first_scheduled_time=1.5, finished_time=3.0))
    metrics.on_finished("abort", RequestMetrics(arrival_time=1.0))
    return metrics


def test_snapshot_holds_totals_and_the_latest_state():
    got = filled_metrics().snapshot()
    expected = {
        "num_requests_running": 2,
        "num_requests_waiting": 3,
        "num_requests_swapped": 1,
        "kv_cache_usage_perc": 0.75,
        "num_cached_blocks": 1,
        "compile_count": 9,
        "kv_cache_bytes_per_token": 0,
        "num_steps": 5,
        "prompt_tokens": 25,
        "generation_tokens": 9,
        "prefix_cache_queries": 40,
        "prefix_cache_hits": 8,
        "num_preemptions": 3,
        "num_preemptions_recompute": 2,
        "num_preemptions_swap": 1,
        "swapped_out_blocks": 5,
        "swapped_in_blocks": 4,
        "request_success": {"stop": 1, "length": 0, "abort": 1, "error": 0},
    }
    histograms = {name: value for name, value in got.items() if name not in expected}
    assert {name: got[name] for name in expected} == expected
    assert {name: (h["count"], round(h["sum"], 9)) for name, h in histograms.items()} == {
        "time_to_first_token_seconds": (1, 0.03),
        "inter_token_latency_seconds": (4, 0.2),
        "e2e_request_latency_seconds": (1, 2.0),
        "request_queue_time_seconds": (1, 0.5),
    }
    assert histograms["inter_token_latency_seconds"]["buckets"]["0.05"] == 4  # each of 4 tokens took 0.05 s


def test_snapshot_before_the_first_step_has_the_same_names_and_only_zeros():
    empty = Metrics().snapshot()
    assert empty.keys() == filled_metrics().snapshot().keys()
    assert all(v == 0 for v in empty.values() if not isinstance(v, dict))


@pytest.mark.parametrize(("value", "bucket"), [(-1, 0), (0.5, 0), (1, 0), (1.5, 1), (2, 1), (2.1, 2), (1e9, 2)])
def test_histogram_edges_belong_to_the_bucket_below(value, bucket):
    histogram = Histogram([1, 2])
    histogram.observe(value, 3)
    assert histogram.counts == [3 * (i == bucket) for i in range(3)]
    assert histogram.cumulative()[-1] == ("+Inf", 3)


def test_registry_is_private_and_shows_present_values_under_known_names():
    metrics = filled_metrics()
    registry, other = metrics.registry("tiny"), Metrics().registry()
    assert b"vllm:e2e_request_latency_seconds_bucket" in prometheus.generate_latest(registry)
    value = lambda name, **labels: registry.get_sample_value(name, {"model_name": "tiny", **labels})  # noqa: E731
    assert value("vllm:num_requests_running") == 2
    assert value("vllm:num_requests_waiting") == 3
    assert value("vllm:kv_cache_usage_perc") == 0.75
    assert value("vllm:prefix_cache_queries_total") == 40
    assert value("vllm:prefix_cache_hits_total") == 8
    assert value("vllm:num_preemptions_total") == 3
    assert value("paged_jax:preemptions_total", kind="swap") == 1
    assert value("paged_jax:swapped_blocks_total", direction="in") == 4
    assert value("vllm:prompt_tokens_total") == 25
    assert value("vllm:generation_tokens_total") == 9
    assert value("vllm:request_success_total", finished_reason="abort") == 1
    assert value("vllm:e2e_request_latency_seconds_count") == 1
    assert value("vllm:time_to_first_token_seconds_bucket", le="0.02") == 0
    assert value("vllm:time_to_first_token_seconds_bucket", le="0.04") == 1
    assert value("vllm:inter_token_latency_seconds_count") == 4
    metrics.on_step(record(num_generated_tokens=1))
    assert value("vllm:generation_tokens_total") == 10
    assert other.get_sample_value("vllm:generation_tokens_total", {"model_name": ""}) == 0
    assert "vllm:" not in prometheus.generate_latest(prometheus.REGISTRY).decode()


def test_registry_without_prometheus_client_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client.registry", None)
    monkeypatch.delitem(sys.modules, "paged_jax.prometheus", raising=False)
    with pytest.raises(ImportError, match=r"pip install 'paged_jax\[metrics\]'"):
        Metrics().registry()


def test_request_metrics_are_none_until_things_have_happened():
    fresh = RequestMetrics(arrival_time=5.0)
    assert (fresh.time_in_queue, fresh.time_to_first_token, fresh.e2e_latency) == (None, None, None)
    done = RequestMetrics(arrival_time=5.0, first_scheduled_time=6.0, first_token_time=8.0, finished_time=9.0)
    assert (done.time_in_queue, done.time_to_first_token, done.e2e_latency) == (1.0, 3.0, 4.0)


def test_metrics_hold_no_request_and_no_step_but_the_last():
    metrics, alive = Metrics(), []
    for i in range(100):
        times, step = RequestMetrics(arrival_time=0.0, finished_time=1.0), record(num_steps=i)
        alive += [weakref.ref(times), weakref.ref(step)]
        metrics.on_step(step)
        metrics.on_first_token(i)
        metrics.on_tokens(i, 4)
        metrics.on_finished("length", times)
    del times, step
    assert sum(ref() is not None for ref in alive) == 1
    assert len(metrics.time_to_first_token.counts) == len(FIRST_TOKEN_EDGES) + 1
