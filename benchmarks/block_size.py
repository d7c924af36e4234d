"""Prints what block sizes cost for two kinds of traffic, as recommend_block_size sees it, and draws it.

    python benchmarks/block_size.py --plot docs/block_size.png

Lengths are drawn as in memory.py; sizes are those of SmolLM2-135M with K and V in bfloat16. Nothing is timed: the
figures repeat exactly.
"""

import argparse
import dataclasses
import pathlib

import _common
import memory

from paged_jax import BlockSizeReport, CacheConfig, recommend_block_size

MAX_MODEL_LEN = 2048
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONFIG = CacheConfig(
    num_blocks=8192,
    num_layers=30,
    num_kv_heads=3,
    head_dim=64,
    max_blocks_per_seq=MAX_MODEL_LEN // 16,
    max_num_seqs=32,
    dtype="bfloat16",
)


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-sequences", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=pathlib.Path, default=None)
    parser.add_argument("--output", type=pathlib.Path, default=_common.ROOT / "benchmarks/results/block_size.json")
    return parser.parse_args()


def plot(reports: dict[str, BlockSizeReport], path: pathlib.Path) -> None:
    """Unused slots, table size and allocations over the block size."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    figure = Figure(figsize=(13, 4), layout="constrained")
    waste, table, allocations = figure.subplots(1, 3)
    for (name, report), colour in zip(reports.items(), ("#0072B2", "#E69F00"), strict=True):
        waste.plot(SIZES, [c.waste for c in report.costs], "o-", color=colour, label=name.replace("_", " "))
        chosen = next(c for c in report.costs if c.block_size == report.block_size)
        waste.plot(chosen.block_size, chosen.waste, "o", markersize=14, markerfacecolor="none", color=colour)
    waste.axhline(report.max_waste, color="0.6", linestyle="--", linewidth=1)
    waste.annotate(f"{report.max_waste:.0%}", (SIZES[0], report.max_waste), color="0.4", va="bottom")
    waste.yaxis.set_major_formatter(PercentFormatter(1))
    waste.set(title="slots allocated but unused (ring: recommended)", ylim=(0, None))
    waste.legend(frameon=False)
    table.plot(SIZES, [c.table_bytes / 1024 for c in report.costs], "o-", color="#009E73")
    table.set(title=f"block table of {CONFIG.max_num_seqs} rows of {MAX_MODEL_LEN} tokens, KiB", yscale="log")
    allocations.plot(SIZES, [c.blocks_per_step for c in report.costs], "o-", color="#D55E00")
    allocations.set(title=f"blocks allocated per decode step of {CONFIG.max_num_seqs} rows", yscale="log")
    for axes in (waste, table, allocations):
        axes.set_xscale("log", base=2)
        axes.set_xticks(SIZES, [str(s) for s in SIZES])
        axes.set_xlabel("block_size, tokens")
        axes.grid(alpha=0.3)
    figure.savefig(str(path), dpi=110)


def main() -> None:
    """Prints the reports, writes them, and draws them if asked to."""
    arguments = parse_arguments()
    reports = {}
    for traffic in memory.TRAFFIC:
        lengths = traffic.lengths(arguments.num_sequences, MAX_MODEL_LEN, arguments.seed).sum(axis=1)
        reports[traffic.name] = recommend_block_size(lengths, CONFIG, candidates=SIZES)
        print(f"\n{traffic.name}: {reports[traffic.name]}")
    _common.write_report(
        arguments.output,
        {
            "environment": _common.environment(),
            "traffic": {name: dataclasses.asdict(report) for name, report in reports.items()},
        },
    )
    if arguments.plot is not None:
        plot(reports, arguments.plot)


if __name__ == "__main__":
    main()
