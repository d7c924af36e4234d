"""The command line in this process, over a tiny engine: options, printed lines, JSON, pictures."""

import json

import numpy as np
import pytest
from doubles import ByteTokenizer, tiny_llm

from paged_jax import LLM, ChatTemplate
from paged_jax.__main__ import main


@pytest.fixture(scope="module")
def engine():
    return tiny_llm(40, tokenizer=ByteTokenizer(), chat_template=ChatTemplate(source="{{ messages[0].content }}"))


@pytest.fixture
def made(monkeypatch, engine):
    """Options of the engines that the command line asks for; it gets a tiny one instead."""
    options = []

    def from_pretrained(cls, model, **asked):
        options.append(asked)
        return engine

    monkeypatch.setattr(LLM, "from_pretrained", classmethod(from_pretrained))
    yield options
    assert engine.is_whole


def test_bench_throughput_prints_and_writes_what_vllm_does(made, tmp_path, capsys):
    path = tmp_path / "throughput.json"
    options = "--num-prompts 6 --input-len 8 --output-len 5 --random-range-ratio 0.5 --seed 3 --output-json"
    assert main(["bench", "throughput", "--model", "tiny", *options.split(), str(path)]) == 0
    report, printed = json.loads(path.read_text()), capsys.readouterr().out
    assert report["num_requests"] == 6
    assert report["total_num_tokens"] == report["total_num_prompt_tokens"] + report["total_num_output_tokens"]
    assert 6 * 4 <= report["total_num_prompt_tokens"] <= 6 * 12
    assert 6 * 2 <= report["total_num_output_tokens"] <= 6 * 8
    assert report["requests_per_second"] == pytest.approx(6 / report["elapsed_time"])
    assert report["tokens_per_second"] == pytest.approx(report["total_num_tokens"] / report["elapsed_time"])
    assert report["num_compiled_while_timed"] == 0
    assert report["arguments"]["seed"] == 3
    assert {"jax", "jaxlib", "numpy", "paged_jax", "python"} == report["versions"].keys()
    assert "Throughput: " in printed
    assert f"Total num prompt tokens:  {report['total_num_prompt_tokens']}" in printed
    assert (made[0]["seed"], made[0]["enable_prefix_caching"]) == (3, True)


def test_bench_latency_prints_and_writes_what_vllm_does(made, engine, tmp_path, capsys):
    path, num_before = tmp_path / "latency.json", engine.metrics.snapshot()["generation_tokens"]
    options = "--input-len 6 --output-len 4 --batch-size 2 --num-iters-warmup 1 --num-iters 3 --output-json"
    assert main(["bench", "latency", "--model", "tiny", *options.split(), str(path)]) == 0
    report, printed = json.loads(path.read_text()), capsys.readouterr().out
    assert len(report["latencies"]) == 3
    assert report["avg_latency"] == pytest.approx(np.mean(report["latencies"]))
    assert report["std_latency"] == pytest.approx(np.std(report["latencies"]))
    assert list(report["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    assert report["percentiles"]["50"] == pytest.approx(np.median(report["latencies"]))
    assert report["num_compiled_while_timed"] == 0
    assert "Avg latency: " in printed
    assert "99% percentile latency: " in printed
    # The warm-up is run and not counted.
    assert engine.metrics.snapshot()["generation_tokens"] - num_before == (1 + 3) * 2 * 4
    assert made[0]["enable_prefix_caching"] is False


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("throughput --num-prompts 0", "num_prompts"),
        ("throughput --output-len 0", "output_len"),
        ("throughput --random-range-ratio 1", "random_range_ratio"),
        ("latency --num-iters 0", "num_iters"),
        ("latency --num-iters-warmup -1", "num_iters_warmup"),
        ("latency --n 0", "n must be"),
    ],
)
def test_bench_with_bad_option_fails_before_anything_is_loaded(made, capsys, command, name):
    assert main(["bench", *command.split(), "--model", "tiny"]) == 2
    assert name in capsys.readouterr().err
    assert not made


def test_bench_when_a_request_cannot_be_served_fails(made, capsys):
    assert main(["bench", "throughput", "--model", "tiny", "--num-prompts", "2", "--input-len", "500"]) == 2
    assert "a request of the benchmark failed" in capsys.readouterr().err


def test_options_of_the_cache_reach_the_engine_and_its_bytes_are_printed(made, engine, capsys):
    options = "--kv-cache-dtype int8 --gpu-memory-utilization 0.5 --kv-cache-memory-bytes 1000000"
    assert main(["generate", "--model", "tiny", "--prompt", "ABC", "--max-tokens", "2", *options.split()]) == 0
    names = ("kv_cache_dtype", "gpu_memory_utilization", "kv_cache_memory_bytes")
    assert [made[0][name] for name in names] == ["int8", 0.5, 1_000_000]
    assert f"float32, {engine.kv_cache_bytes_per_token} bytes per token" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["generate", "--model", "tiny", "--prompt", "ABC", "--kv-cache-dtype", "int3"])
    assert "float8_e4m3fn" in capsys.readouterr().err


def test_generate_with_plot_chat_and_stop_strings(made, tmp_path, capsys):
    path = tmp_path / "run.png"
    command = ["generate", "--model", "tiny", "--prompt", "ABC", "--max-tokens", "8", "--json", "--plot", str(path)]
    assert main(command) == 0
    text = json.loads(capsys.readouterr().out)["text"]
    assert path.read_bytes().startswith(b"\x89PNG")
    assert len(text) == 8
    assert main([*command, "--chat", "--stop", text[3:5]]) == 0
    stopped = json.loads(capsys.readouterr().out)
    assert (stopped["text"], stopped["finish_reason"]) == (text[: text.index(text[3:5])], "stop")
