"""Times the Mosaic GPU kernels against the copy bandwidth of the same run, and against others.

    python -m benchmarks.kernels              # on a GPU; at most 6 minutes
    python -m benchmarks.kernels --dry        # on a CPU: every line of it with tiny sizes, the numbers mean nothing

Writes benchmarks/results/kernels_<chip>.json. `_timing.py` says how calls are timed, `_parts.py` what happens when a
kernel hangs or crashes, README.md what the entries mean.
"""

import argparse
import functools
import pathlib

from benchmarks import _goals, _parts

_SILENCE_S = 100.0  # that one measurement may take


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="tiny sizes on a CPU; writes no file without --output")
    parser.add_argument("--seconds", type=float, default=340.0, help="parts not begun by then are skipped")
    parser.add_argument("--parts", nargs="*", choices=PARTS, help="default: all, in this order")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=pathlib.Path, help="default: benchmarks/results/kernels_<chip>.json")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


#: In order of importance: what is first is measured even if the time is short.
PARTS = (
    "bandwidth",
    "decode_wgmma",
    "decode_mma",
    "prefill",
    "ragged",
    "wide_table",
    "quantised",
    "rivals",
    "moves",
    "mixed",
    "torch",
    "decode_in_model",
)


def serve(arguments: argparse.Namespace) -> None:
    """The worker: runs the parts in this process."""
    from benchmarks import _kernel_parts, _timing, _torch_parts

    chip = _timing.chip(is_dry=arguments.dry)
    options = {"is_dry": arguments.dry, "seed": arguments.seed}
    bench = _kernel_parts.Bench(**options)
    parts = {name: functools.partial(getattr(_kernel_parts, name), bench) for name in PARTS if name != "torch"}
    parts["torch"] = functools.partial(_torch_parts.torch, **options)
    seconds = arguments.seconds
    _parts.serve(parts, arguments.parts, seconds=seconds, chip=chip, is_alive=_timing.is_device_alive)


def main() -> None:
    arguments = parse_arguments()
    if arguments.worker:
        serve(arguments)
        return
    options = {"is_dry": arguments.dry, "seed": arguments.seed}
    limits = {"budget_s": arguments.seconds, "silence_s": _SILENCE_S}
    report = _parts.run("benchmarks.kernels", arguments.parts or list(PARTS), **limits, **options)
    results = {"goals": _goals.judge(report["measurements"])}
    print(_goals.table(results["goals"]))
    _parts.finish(results, report, stem="kernels", output=arguments.output, **options)


if __name__ == "__main__":
    main()
