"""`python -m paged_jax bench {throughput,latency}`: options, printed lines and JSON keys as of `vllm bench`.

What is compiled is compiled before, and warm-up runs are not counted.
"""

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jaxlib
import numpy as np

import paged_jax
from paged_jax.engine import LLM
from paged_jax.sampling_params import SamplingParams

_PERCENTAGES = (10, 25, 50, 75, 90, 99)
_MAX_TOKEN = 10_000  # prompts are random ids below it, as in vLLM, or below the vocabulary's size


def add_throughput_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench throughput`."""
    parser.add_argument("--num-prompts", type=int, default=64, help="requests (default: 64)")
    parser.add_argument("--input-len", type=int, default=128, help="prompt tokens per request (default: 128)")
    parser.add_argument("--output-len", type=int, default=64, help="tokens to generate per request (default: 64)")
    parser.add_argument(
        "--random-range-ratio",
        type=float,
        default=0.0,
        help="lengths vary in [length * (1 - ratio), length * (1 + ratio)]; in [0, 1) (default: 0)",
    )
    _add_common_arguments(parser)


def add_latency_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench latency`."""
    parser.add_argument("--input-len", type=int, default=32, help="prompt tokens per request (default: 32)")
    parser.add_argument("--output-len", type=int, default=128, help="tokens to generate per request (default: 128)")
    parser.add_argument("--batch-size", type=int, default=8, help="requests per iteration (default: 8)")
    parser.add_argument("--num-iters-warmup", type=int, default=10, help="iterations before (default: 10)")
    parser.add_argument("--num-iters", type=int, default=30, help="iterations that are timed (default: 30)")
    _add_common_arguments(parser)


def _add_common_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--n", type=int, default=1, help="sequences per prompt (default: 1)")
    parser.add_argument("--disable-detokenize", action="store_true", help="make no text of the tokens")
    parser.add_argument("--output-json", type=Path, default=None, help="write the results there")


def run_throughput(args: argparse.Namespace, make_llm: Callable[..., LLM]) -> None:
    """Times one call of generate() with many requests."""
    _check_at_least(1, num_prompts=args.num_prompts, input_len=args.input_len, output_len=args.output_len)
    if not 0 <= args.random_range_ratio < 1:
        raise ValueError(f"random_range_ratio must be in [0, 1), got {args.random_range_ratio}")
    rng = np.random.default_rng(args.seed)
    input_lens, output_lens = (
        _random_lengths(rng, length, args.random_range_ratio, args.num_prompts)
        for length in (args.input_len, args.output_len)
    )
    params = [_sampling_params(args, length) for length in output_lens]
    llm = make_llm(enable_prefix_caching=True)
    prompts = [_random_prompt(rng, length, llm.vocab_size) for length in input_lens]
    llm.warmup()
    compile_count, start = llm.compile_count, time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=True)
    elapsed = time.perf_counter() - start
    _raise_first_error(outputs)
    num_prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    num_output_tokens = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
    num_tokens = num_prompt_tokens + num_output_tokens
    print(
        f"Throughput: {len(outputs) / elapsed:.2f} requests/s, {num_tokens / elapsed:.2f} total tokens/s, "
        f"{num_output_tokens / elapsed:.2f} output tokens/s"
    )
    print(f"Total num prompt tokens:  {num_prompt_tokens}")
    print(f"Total num output tokens:  {num_output_tokens}")
    results = {
        "elapsed_time": elapsed,
        "num_requests": len(outputs),
        "total_num_tokens": num_tokens,
        "requests_per_second": len(outputs) / elapsed,
        "tokens_per_second": num_tokens / elapsed,
        "total_num_prompt_tokens": num_prompt_tokens,
        "total_num_output_tokens": num_output_tokens,
    }
    _write(args, llm.compile_count - compile_count, results)


def run_latency(args: argparse.Namespace, make_llm: Callable[..., LLM]) -> None:
    """Times generate() with one batch of equal requests, several times."""
    _check_at_least(1, batch_size=args.batch_size, input_len=args.input_len, output_len=args.output_len)
    _check_at_least(1, num_iters=args.num_iters)
    _check_at_least(0, num_iters_warmup=args.num_iters_warmup)
    params = _sampling_params(args, args.output_len)
    llm = make_llm(enable_prefix_caching=False)  # every iteration computes the whole prompts
    rng = np.random.default_rng(args.seed)
    prompts = [_random_prompt(rng, args.input_len, llm.vocab_size) for _ in range(args.batch_size)]

    def run_to_completion() -> float:
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        _raise_first_error(outputs)
        return seconds

    llm.warmup()
    for _ in range(args.num_iters_warmup):
        run_to_completion()
    compile_count = llm.compile_count
    latencies = np.array([run_to_completion() for _ in range(args.num_iters)])
    percentiles = np.percentile(latencies, _PERCENTAGES).tolist()
    print(f"Avg latency: {latencies.mean()} seconds")
    print(f"Std latency: {latencies.std()} seconds")
    for percentage, percentile in zip(_PERCENTAGES, percentiles, strict=True):
        print(f"{percentage}% percentile latency: {percentile} seconds")
    results = {
        "avg_latency": latencies.mean().item(),
        "std_latency": latencies.std().item(),
        "latencies": latencies.tolist(),
        "percentiles": dict(zip(map(str, _PERCENTAGES), percentiles, strict=True)),
    }
    _write(args, llm.compile_count - compile_count, results)


def _check_at_least(low: int, **values: int) -> None:
    for name, value in values.items():
        if value < low:
            raise ValueError(f"{name} must be at least {low}, got {value}")


def _random_lengths(rng: np.random.Generator, length: int, ratio: float, count: int) -> list[int]:
    low, high = max(1, round(length * (1 - ratio))), round(length * (1 + ratio))
    return rng.integers(low, high + 1, count).tolist()


def _random_prompt(rng: np.random.Generator, length: int, vocab_size: int) -> dict[str, list[int]]:
    return {"prompt_token_ids": rng.integers(0, min(_MAX_TOKEN, vocab_size), length).tolist()}


def _sampling_params(args: argparse.Namespace, max_tokens: int) -> SamplingParams:
    return SamplingParams(
        n=args.n, temperature=1.0, ignore_eos=True, max_tokens=max_tokens, detokenize=not args.disable_detokenize
    )


def _raise_first_error(outputs: list[Any]) -> None:
    error = next((output.error for output in outputs if output.error is not None), None)
    if error is not None:
        raise ValueError(f"a request of the benchmark failed: {error}") from error


def _write(args: argparse.Namespace, num_compiled: int, results: dict[str, Any]) -> None:
    """Writes the results with all that a reader needs to repeat them."""
    if num_compiled:
        print(f"WARNING: {num_compiled} programs were compiled in the timed part")
    if args.output_json is None:
        return
    versions = {package.__name__: package.__version__ for package in (paged_jax, jax, jaxlib, np)}
    versions["python"] = platform.python_version()
    options = {name: str(v) if isinstance(v, Path) else v for name, v in vars(args).items() if not callable(v)}
    report = {**results, "num_compiled_while_timed": num_compiled, "arguments": options, "versions": versions}
    args.output_json.write_text(json.dumps(report, indent=4) + "\n")
