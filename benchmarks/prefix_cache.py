"""Measures what the prefix cache saves and what it costs, with SmolLM2-135M on this CPU.

    python benchmarks/prefix_cache.py

* Time to first token of a prompt of 1010 tokens whose first 1000 were seen before, over that of one that is all new.
* A decode step of 16 rows with the cache on, over the same step with it off.
* Bookkeeping of 16 rows alone (append, publish, release), over that step.
"""

import argparse
import pathlib
import time

import _common
import block_manager
import numpy as np

from paged_jax import LLM, SamplingParams

NUM_ROWS, NUM_TOKENS = 16, 65
SHARED, OWN = 1000, 10


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--output", type=pathlib.Path, default=_common.ROOT / "benchmarks/results/prefix_cache_cpu.json"
    )
    return parser.parse_args()


def build(*, caching: bool) -> LLM:
    """The engine, as a user would build it."""
    return LLM.from_pretrained(
        "smollm2", max_num_seqs=NUM_ROWS, max_model_len=1088, decode_steps=16, enable_prefix_caching=caching
    )


def seconds(llm: LLM, prompts: list[np.ndarray], max_tokens: int) -> float:
    """Time of one generate() call."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    start = time.perf_counter()
    llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    return time.perf_counter() - start


def measure(arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Returns the samples of every quantity, interleaved over the rounds."""
    rng = np.random.default_rng(arguments.seed)
    draw = lambda n: rng.integers(_common.FIRST_TEXT_TOKEN, _common.VOCAB_SIZE, n)  # noqa: E731
    on, off = build(caching=True), build(caching=False)
    sizes = argparse.Namespace(
        num_blocks=[on.cache_config.num_blocks],
        num_rows=NUM_ROWS,
        block_size=16,
        max_blocks_per_seq=on.cache_config.max_blocks_per_seq,
        seed=arguments.seed,
    )
    bookkeeping = block_manager.Bench(on.cache_config.num_blocks, sizes, caching=True)
    shared = draw(SHARED)
    samples: dict[str, list[float]] = {}
    for index in range(-2, arguments.rounds):  # the first two compile; one computes the shared part, one finds it
        row = {
            "first token, prompt new": seconds(on, [draw(SHARED + OWN)], 1),
            "first token, 1000 tokens shared": seconds(on, [np.concatenate([shared, draw(OWN)])], 1),
        }
        for name, llm in (("on", on), ("off", off)):
            prompts = [draw(32) for _ in range(NUM_ROWS)]
            first, whole = seconds(llm, prompts, 1), seconds(llm, [draw(32) for _ in range(NUM_ROWS)], NUM_TOKENS)
            row[f"decode step, cache {name}"] = (whole - first) / (NUM_TOKENS - 1)
        row["bookkeeping of a step"] = bookkeeping.run(block_manager.many_steps, 4) / block_manager.STEPS_PER_LOOP
        if index >= 0:
            row["ratio: first token, shared over new"] = (
                row["first token, 1000 tokens shared"] / row["first token, prompt new"]
            )
            row["ratio: decode step, on over off"] = row["decode step, cache on"] / row["decode step, cache off"]
            row["ratio: bookkeeping over decode step"] = row["bookkeeping of a step"] / row["decode step, cache on"]
            for name, value in row.items():
                samples.setdefault(name, []).append(value)
    bookkeeping.check()
    return samples


def main() -> None:
    """Measures, prints the table and writes the report."""
    arguments = parse_arguments()
    report: dict[str, object] = {"environment": _common.environment(), "seed": arguments.seed}
    results = {name: _common.summary(values) for name, values in measure(arguments).items()}
    report["seconds and ratios"] = results
    print("| | median | min - max |\n|---|---|---|")
    for name, s in results.items():
        scale, unit = (1, "") if name.startswith("ratio") else (1000, " ms")
        print(f"| {name} | {s['median'] * scale:.3f}{unit} | {s['min'] * scale:.3f} - {s['max'] * scale:.3f} |")
    _common.write_report(arguments.output, report)


if __name__ == "__main__":
    main()
