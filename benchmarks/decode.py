"""Measures greedy generation of SmolLM2-135M, float32, on this CPU: paged_jax against its rivals, in one run.

    python benchmarks/decode.py --rival-python RIVAL_ENV/bin/python

Every variant is a worker process that stays alive; in each round each variant runs once with all new tokens and once
with a single one. End to end is the former's wall time; decode only is the difference of the two, (max_new_tokens - 1)
steps. Ratios are taken within a round (rival time / our time) and then summarised.
"""

import argparse
import collections
import pathlib
import sys

import _common
import _workers

OURS = "ours"
JAX_RIVALS = {"plain_paged_loop": "plain_paged_loop.py", "dense_loop": "dense_loop.py"}
TORCH_RIVALS = {"transformers_generate": "generate", "transformers_generate_batch": "generate_batch"}


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rival-python", type=pathlib.Path, help="interpreter with torch and transformers; else skipped"
    )
    parser.add_argument("--without", nargs="*", default=[], metavar="VARIANT", help="variants to leave out")
    parser.add_argument("--batch-sizes", nargs="*", type=int, default=[1, 16])
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=pathlib.Path, default=_common.ROOT / "benchmarks/results/decode_cpu.json")
    return parser.parse_args()


def start_workers(arguments: argparse.Namespace) -> list[_workers.Worker]:
    """Starts one worker per variant, one after another."""
    gguf = ["--gguf", str(_common.smollm2_gguf())]
    commands = {
        OURS: (sys.executable, "ours.py", ["--max-model-len", "512"]),
        "ours_max_model_len_8192": (sys.executable, "ours.py", ["--max-model-len", "8192"]),
    }
    commands |= {name: (sys.executable, script, gguf) for name, script in JAX_RIVALS.items()}
    if arguments.rival_python:
        python = str(arguments.rival_python)
        commands |= {
            name: (python, "transformers_generate.py", [*gguf, "--api", api]) for name, api in TORCH_RIVALS.items()
        }
    wanted = {name: command for name, command in commands.items() if name not in arguments.without}
    return [_workers.Worker(name, *command) for name, command in wanted.items()]


def measure(workers, workload: _common.Workload, arguments: argparse.Namespace) -> tuple[dict, dict]:
    """Returns seconds[variant] = [(all tokens, one token) per round] and tokens[variant] = [rows per round]."""
    seconds, tokens = collections.defaultdict(list), collections.defaultdict(list)
    for round_index in range(-1, arguments.rounds):  # round -1 compiles and warms up
        shift = round_index % len(workers)
        for worker in workers[shift:] + workers[:shift]:
            prompts = [workload.prompts(arguments.seed, 2 * round_index + 2 + part) for part in (0, 1)]
            whole, output = worker.run(prompts[0], arguments.max_new_tokens)
            first, _ = worker.run(prompts[1], 1)
            if round_index >= 0:
                seconds[worker.name].append((whole, first))
            tokens[worker.name].append(output)
            print(
                f"{workload.name} round {round_index} {worker.name}: {whole:.2f} s, first token {first:.2f} s",
                flush=True,
            )
    return seconds, tokens


def first_difference(expected: list, actual: list) -> dict[str, int] | None:
    """Returns where two variants' tokens (rounds, rows, positions) first differ, or None."""
    for round_index, (expected_rows, actual_rows) in enumerate(zip(expected, actual, strict=True)):
        for row, (left, right) in enumerate(zip(expected_rows, actual_rows, strict=True)):
            if left != right:
                position = next(i for i, (a, b) in enumerate(zip(left, right, strict=True)) if a != b)
                return {
                    "run": round_index,
                    "row": row,
                    "position": position,
                    "expected": left[position],
                    "got": right[position],
                }
    return None


def summarise(seconds: dict, tokens: dict, workload: _common.Workload, arguments: argparse.Namespace) -> dict:
    """Returns the report of one workload: times, rates, ratios to ours, and agreement of tokens."""
    num_rows, steps = len(workload.prompt_lengths), arguments.max_new_tokens - 1
    base = OURS if OURS in seconds else next(iter(seconds))
    variants = {}
    for name, pairs in seconds.items():
        whole, decode = [a for a, _ in pairs], [a - b for a, b in pairs]
        base_whole, base_decode = [a for a, _ in seconds[base]], [a - b for a, b in seconds[base]]
        variants[name] = {
            "end_to_end_seconds": _common.summary(whole),
            "end_to_end_tokens_per_second": _common.summary([num_rows * arguments.max_new_tokens / t for t in whole]),
            "decode_seconds": _common.summary(decode),
            "decode_tokens_per_second": _common.summary([num_rows * steps / t for t in decode]),
            f"end_to_end_time_over_{base}": _common.summary([a / b for a, b in zip(whole, base_whole, strict=True)]),
            f"decode_time_over_{base}": _common.summary([a / b for a, b in zip(decode, base_decode, strict=True)]),
            f"first_difference_from_{base}": first_difference(tokens[base], tokens[name]),
            "rounds": pairs,
        }
    return {"prompt_lengths": workload.prompt_lengths, "base": base, "variants": variants}


def print_table(name: str, report: dict) -> None:
    """Prints one workload's result as a Markdown table."""
    base = report["base"]
    print(f"\n### {name} (prompts of {min(report['prompt_lengths'])} - {max(report['prompt_lengths'])} tokens)\n")
    print(
        f"| variant | end to end tok/s | decode tok/s | end to end time / {base} | decode time / {base} | same tokens |"
    )
    print("|---|---|---|---|---|---|")
    for variant, result in report["variants"].items():
        ratios = [result[f"{kind}_time_over_{base}"] for kind in ("end_to_end", "decode")]
        cells = [f"{result[f'{kind}_tokens_per_second']['median']:.1f}" for kind in ("end_to_end", "decode")]
        cells += [f"{ratio['median']:.2f} ({ratio['min']:.2f} - {ratio['max']:.2f})" for ratio in ratios]
        same = (
            "yes" if result[f"first_difference_from_{base}"] is None else str(result[f"first_difference_from_{base}"])
        )
        print("| " + " | ".join([variant, *cells, same]) + " |")


def main() -> None:
    """Runs every workload and writes the report."""
    arguments = parse_arguments()
    report = {"environment": _common.environment(), "seed": arguments.seed, "max_new_tokens": arguments.max_new_tokens}
    workers = start_workers(arguments)
    report["variants"] = {worker.name: worker.about for worker in workers}
    report["workloads"] = {}
    for batch_size in arguments.batch_sizes:
        workload = _common.build_workload(batch_size, arguments.seed)
        report["workloads"][workload.name] = summarise(*measure(workers, workload, arguments), workload, arguments)
    for worker in workers:
        worker.close()
    for name, result in report["workloads"].items():
        print_table(name, result)
    _common.write_report(arguments.output, report)


if __name__ == "__main__":
    main()
