"""Text and benchmarks from the command line: `python -m paged_jax generate --model smollm2 --prompt "..."`."""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from paged_jax import LLM, Recorder, RequestOutput, SamplingParams, bench, plot_steps
from paged_jax.config import CACHE_DTYPES


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m paged_jax", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    generate = commands.add_parser("generate", help="continue prompts")
    _add_engine_arguments(generate)
    generate.add_argument("--prompt", action="append", required=True, help="repeat for several prompts")
    generate.add_argument("--chat", action="store_true", help="each prompt is a message, put into the chat template")
    generate.add_argument("--max-tokens", type=int, default=64)
    generate.add_argument("--temperature", type=float, default=0.0, help="0 = greedy (default)")
    generate.add_argument("--top-p", type=float, default=1.0)
    generate.add_argument("--top-k", type=int, default=0)
    generate.add_argument("--stop", action="append", default=[], help="text that ends the output; may be repeated")
    generate.add_argument("--plot", type=Path, default=None, help="draw the run: blocks, waste, cache, preemptions")
    generate.add_argument("--json", action="store_true", help="one JSON object per prompt on standard output")
    generate.set_defaults(run=_generate)
    benchmarks = commands.add_parser("bench", help="measure").add_subparsers(dest="benchmark", required=True)
    throughput = benchmarks.add_parser("throughput", help="many requests: tokens per second")
    latency = benchmarks.add_parser("latency", help="one batch: seconds")
    _add_engine_arguments(throughput)
    _add_engine_arguments(latency)
    bench.add_throughput_arguments(throughput)
    bench.add_latency_arguments(latency)
    throughput.set_defaults(run=partial(_bench, bench.run_throughput))
    latency.set_defaults(run=partial(_bench, bench.run_latency))
    return parser


def _add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help='Hugging Face directory, GGUF file, "smollm2" or "gemma3"')
    parser.add_argument("--max-model-len", type=int, default=None)
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--num-blocks", type=int, default=None)
    parser.add_argument(
        "--kv-cache-dtype",
        choices=("auto", *CACHE_DTYPES),
        default="auto",
        help="storage format of K and V (default: that of the weights)",
    )
    parser.add_argument(
        "--gpu-memory-utilization",
        type=float,
        default=0.9,
        help="share of a GPU's memory that weights and K/V take at most together (default: 0.9)",
    )
    parser.add_argument("--kv-cache-memory-bytes", type=int, default=None, help="bytes for K and V, on any device")
    parser.add_argument("--seed", type=int, default=0)


def _make_llm(args: argparse.Namespace, **options: Any) -> LLM:
    return LLM.from_pretrained(
        args.model,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        block_size=args.block_size,
        num_blocks=args.num_blocks,
        kv_cache_dtype=args.kv_cache_dtype,
        gpu_memory_utilization=args.gpu_memory_utilization,
        kv_cache_memory_bytes=args.kv_cache_memory_bytes,
        seed=args.seed,
        **options,
    )


def _bench(run: Any, args: argparse.Namespace) -> int:
    run(args, partial(_make_llm, args))
    return 0


def _record(prompt: str, output: RequestOutput) -> dict[str, object]:
    completion = output.outputs[0]
    record: dict[str, object] = {
        "prompt": prompt,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "prompt_token_ids": output.prompt_token_ids,
        "finish_reason": completion.finish_reason,
    }
    return record if output.error is None else record | {"error": str(output.error)}


def _print_readable(prompts: Sequence[str], outputs: Sequence[RequestOutput]) -> None:
    for prompt, output in zip(prompts, outputs, strict=True):
        completion = output.outputs[0]
        print(f"\n> {prompt}")
        if output.error is not None:
            print(f"[failed: {output.error}]")
        else:
            print(f"{completion.text}\n[{len(completion.token_ids)} tokens, {completion.finish_reason}]")


def _generate(args: argparse.Namespace) -> int:
    params = SamplingParams(
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        max_tokens=args.max_tokens,
        stop=args.stop,
    )
    llm = _make_llm(args)
    recorder = None if args.plot is None else Recorder(block_maps=True)
    llm.recorder = recorder
    start = time.perf_counter()
    if args.chat:
        conversations = [[{"role": "user", "content": prompt}] for prompt in args.prompt]
        outputs = llm.chat(conversations, params, use_tqdm=not args.json)
    else:
        outputs = llm.generate(args.prompt, params, use_tqdm=not args.json)
    seconds = time.perf_counter() - start
    if args.json:
        for prompt, output in zip(args.prompt, outputs, strict=True):
            print(json.dumps(_record(prompt, output)))
    else:
        _print_readable(args.prompt, outputs)
        num_tokens = sum(len(o.outputs[0].token_ids) for o in outputs)
        print(
            f"\n{num_tokens} tokens in {seconds:.1f} s, compilation included: {num_tokens / seconds:.1f} tokens/s; "
            f"at most {llm.peak_blocks} of {llm.cache_config.num_blocks - 1} blocks in use; K/V as "
            f"{llm.cache_config.dtype}, {llm.kv_cache_bytes_per_token} bytes per token"
        )
    if recorder is not None and recorder.records:
        plot_steps(recorder, llm.cache_config.block_size).savefig(str(args.plot))
    return int(any(o.error is not None for o in outputs))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status: 0, 1 if a prompt failed, 2 if the call is wrong."""
    args = _parser().parse_args(argv)
    try:
        return args.run(args)
    except (ValueError, ImportError) as error:
        print(f"paged_jax: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
