"""Measures ragged requests through a pool for a third of them: SmolLM2-135M, float32, this CPU, all in one run.

    python benchmarks/throughput.py --rival-python RIVAL_ENV/bin/python

64 prompts of 8 - 512 random tokens, 16 - 128 new greedy tokens each. Every variant has a cache of as many tokens as a
third of the requests have at their end:

* `ours`: all requests at once; the engine batches continuously and preempts where blocks run out.
* `ours_static`: the same engine, as many requests at a time as the cache can promise the longest length, each group
  until its last request has ended.
* `transformers_generate_batch`: transformers' paged continuous batching.

Variants are worker processes that stay alive; they run one after another in every round, and ratios are taken within a
round. The first round compiles and does not count.
"""

import argparse
import collections
import pathlib
import sys

import _common
import _workers
import numpy as np
from decode import first_difference

OURS = "ours"
PROMPT_LENGTHS, OUTPUT_LENGTHS = (8, 512), (16, 128)
BLOCK_SIZE = 16
MAX_MODEL_LEN = PROMPT_LENGTHS[1] + OUTPUT_LENGTHS[1]


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rival-python", type=pathlib.Path, help="interpreter with torch and transformers")
    parser.add_argument("--num-requests", type=int, default=64)
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument("--max-num-batched-tokens", type=int, default=256)
    parser.add_argument("--decode-steps", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=pathlib.Path, default=_common.ROOT / "benchmarks/results/throughput_cpu.json")
    return parser.parse_args()


def draw_lengths(count: int, seed: int) -> np.ndarray:
    """[count, 2] lengths of prompts and outputs, uniform."""
    rng = np.random.default_rng(seed)
    return np.stack([rng.integers(a, b + 1, count) for a, b in (PROMPT_LENGTHS, OUTPUT_LENGTHS)], axis=1)


def start_workers(arguments: argparse.Namespace, num_blocks: int) -> list[_workers.Worker]:
    """Starts one worker per variant, one after another."""
    shared = {
        "--max-model-len": MAX_MODEL_LEN,
        "--num-blocks": num_blocks + 1,
        "--max-num-batched-tokens": arguments.max_num_batched_tokens,
        "--decode-steps": arguments.decode_steps,
    }
    static_rows = max(1, num_blocks * BLOCK_SIZE // MAX_MODEL_LEN)
    options = [str(x) for pair in shared.items() for x in pair]
    workers = [
        _workers.Worker(OURS, sys.executable, "ours.py", [*options, "--max-num-seqs", str(arguments.max_num_seqs)]),
        _workers.Worker(
            "ours_static", sys.executable, "ours.py", [*options, "--max-num-seqs", str(static_rows), "--static"]
        ),
    ]
    if arguments.rival_python:
        rival = ["--gguf", str(_common.smollm2_gguf()), "--api", "generate_batch"]
        rival += ["--page-size", str(BLOCK_SIZE), "--max-tokens-in-cache", str(num_blocks * BLOCK_SIZE)]
        python = str(arguments.rival_python)
        workers.append(_workers.Worker("transformers_generate_batch", python, "transformers_generate.py", rival))
    return workers


def measure(workers: list[_workers.Worker], lengths: np.ndarray, arguments: argparse.Namespace) -> tuple[dict, dict]:
    """Returns seconds[variant] = [per round] and tokens[variant] = [rows per round]."""
    seconds, tokens = collections.defaultdict(list), collections.defaultdict(list)
    workload = _common.Workload(name="ragged", prompt_lengths=tuple(lengths[:, 0].tolist()))
    for round_index in range(-1, arguments.rounds):  # round -1 compiles and warms up
        prompts = workload.prompts(arguments.seed, round_index + 1)
        shift = round_index % len(workers)
        for worker in workers[shift:] + workers[:shift]:
            took, output = worker.run(prompts, lengths[:, 1].tolist())
            print(f"round {round_index} {worker.name}: {took:.2f} s", flush=True)
            if round_index >= 0:
                seconds[worker.name].append(took)
                tokens[worker.name].append(output)
    return seconds, tokens


def main() -> None:
    """Measures, prints a table and writes the report."""
    arguments = parse_arguments()
    lengths = draw_lengths(arguments.num_requests, arguments.seed)
    num_blocks = int(np.ceil(lengths.sum(axis=1) / BLOCK_SIZE).sum()) // 3
    workers = start_workers(arguments, num_blocks)
    seconds, tokens = measure(workers, lengths, arguments)
    report: dict = {
        "environment": _common.environment(),
        "settings": {k: v for k, v in vars(arguments).items() if k not in ("output", "rival_python")},
        "prompt_tokens": int(lengths[:, 0].sum()),
        "output_tokens": int(lengths[:, 1].sum()),
        "num_blocks": num_blocks,
        "workers": {worker.name: worker.about for worker in workers},
        "variants": {},
    }
    print("| variant | s | output tok/s | time / ours | same tokens |\n|---|---|---|---|---|")
    for name, times in seconds.items():
        ratios = [a / b for a, b in zip(times, seconds[OURS], strict=True)]
        difference = first_difference(tokens[OURS], tokens[name])
        report["variants"][name] = {
            "seconds": _common.summary(times),
            "output_tokens_per_second": _common.summary([report["output_tokens"] / t for t in times]),
            "time_over_ours": _common.summary(ratios),
            "first_difference_from_ours": difference,
            "rounds": times,
        }
        row = report["variants"][name]
        ratio = "{median:.2f} ({min:.2f} - {max:.2f})".format(**row["time_over_ours"])
        rate = row["output_tokens_per_second"]["median"]
        print(f"| {name} | {row['seconds']['median']:.1f} | {rate:.1f} | {ratio} | {difference or 'yes'} |")
    for worker in workers:
        worker.close()
    _common.write_report(arguments.output, report)


if __name__ == "__main__":
    main()
