"""Times candidate Configs of paged_decode and paged_prefill, and says which is best for each shape.

    python -m benchmarks.tune_kernels --shapes llama3_8b --seconds 300     # on a GPU
    python -m benchmarks.tune_kernels --dry                                # on a CPU; the numbers mean nothing

The default Config is timed first. What the tables in pallas_kernels say should change only where another one is faster
by more than the spread of the samples. Writes benchmarks/results/tuned_<chip>.json.
"""

import argparse
import functools
import itertools
import os
import pathlib
import typing
from concurrent.futures import ThreadPoolExecutor

from benchmarks import _parts
from pallas_kernels.shapes import MODEL_SHAPES

_SILENCE_S = 150.0  # a part compiles all its candidates before it times the first
#: (rows, tokens a row): for decode; and (queries, tokens) of one row for prefill.
DECODES = ((1, 8192), (64, 1024), (64, 8192))
PREFILLS = ((8192, 8192), (2048, 32768))
_DRY_SHAPE = "smollm2_135m"


def decode_candidates(is_dry: bool, programs_per_core: tuple[int, ...] = (1, 2, 4)) -> list[dict[str, typing.Any]]:
    """Fields of paged_decode.Config; "programs" is per multiprocessor, and becomes num_chunks."""
    if is_dry:
        return [{"mma": "mma", "tile_tokens": 64, "num_stages": 2, "programs": 1}]
    names = ("mma", "tile_tokens", "num_stages", "programs")
    values = itertools.product(("wgmma", "mma"), (64, 128), (2, 3, 4), programs_per_core)
    return [dict(zip(names, v, strict=True)) for v in values]


def prefill_candidates(is_dry: bool) -> list[dict[str, int]]:
    """Fields of paged_prefill.Config."""
    if is_dry:
        return [{"tile_tokens": 32, "num_stages": 2}]
    return [{"tile_tokens": t, "num_stages": s} for t, s in itertools.product((32, 64, 128), (1, 2, 3))]


def part_names(shapes: list[str], is_dry: bool) -> list[str]:
    """Parts "kernel/shape/rows x tokens" in the order of measurement."""
    decodes, prefills = (DECODES[:1], PREFILLS[:1]) if is_dry else (DECODES, PREFILLS)
    return [
        f"{kernel}/{shape}/{first} x {second}"
        for shape in shapes
        for kernel, sizes in (("paged_decode", decodes), ("paged_prefill", prefills))
        for first, second in sizes
    ]


def best(measurements: list[dict[str, typing.Any]]) -> dict[str, dict[str, typing.Any]]:
    """By part: the fastest candidate, its time, and how much faster it is than the default Config."""
    winners = {}
    for part in dict.fromkeys(m["part"] for m in measurements):
        timed = [m for m in measurements if m["part"] == part and "us" in m]
        if not timed:
            continue
        winner = min(timed, key=lambda m: m["us"]["median"])
        default = next((m for m in timed if m["name"] == "default"), None)
        config = winner["prefill_config" if part.startswith("paged_prefill") else "decode_config"]
        gain = None if default is None else default["us"]["median"] / winner["us"]["median"]
        winners[part] = {"config": config, "us": winner["us"], "times_faster_than_default": gain}
    return winners


def _part(name: str, *, is_dry: bool, seed: int) -> _parts.Part:
    """Compiles all candidates side by side, then times one after the other."""
    from benchmarks import _problems, _timing
    from pallas_kernels import mosaic

    kernel, shape_name, sizes = name.split("/")
    shape = MODEL_SHAPES[shape_name]
    first, second = (max(16, int(n) // 256) if is_dry and n != "1" else int(n) for n in sizes.split(" x "))
    limits = _timing.DRY if is_dry else _timing.Limits(num_samples=7, seconds=0.3)
    if kernel == "paged_decode":
        problem = _problems.Problem(shape=shape, seq_lens=(second,) * first)
    else:
        problem = _problems.Problem(shape=shape, seq_lens=(second,), counts=(first,))
    inputs = _problems.build(problem, seed, max_rotation=1 if is_dry else 8)
    cores = mosaic.NUM_CORES[mosaic.compute_capability(is_dry)]

    def implementation(candidate: dict[str, typing.Any]) -> _problems.Implementation:
        fields = dict(candidate)
        if programs := fields.pop("programs", None):
            fields["num_chunks"] = max(1, programs * cores // shape.num_kv_heads)
        options = {kernel.removeprefix("paged_"): fields}
        return _problems.mosaic(shape, inputs, is_dry=is_dry, **options)

    candidates = {"default": {}}
    for fields in decode_candidates(is_dry) if kernel == "paged_decode" else prefill_candidates(is_dry):
        candidates[" ".join(map(str, fields.values()))] = fields

    prepared = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for label, fields in candidates.items():
            made = implementation(fields)
            prepared[label] = made, pool.submit(_problems.prepare, made, problem, inputs, limits)

    def measure(label: str) -> dict:
        made, timed = prepared[label]
        return made.about | _problems.timed_and_checked(timed.result(), made, problem, inputs, limits)

    for label in candidates:
        yield label, functools.partial(measure, label)


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="tiny sizes on a CPU; writes no file without --output")
    parser.add_argument("--shapes", nargs="*", choices=MODEL_SHAPES, default=["llama3_8b"])
    parser.add_argument("--seconds", type=float, default=400.0, help="parts not begun by then are skipped")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=pathlib.Path, help="default: benchmarks/results/tuned_<chip>.json")
    parser.add_argument("--parts", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    options = {"is_dry": arguments.dry, "seed": arguments.seed}
    if arguments.worker:
        from benchmarks import _timing

        chip = _timing.chip(is_dry=arguments.dry)
        parts = {name: functools.partial(_part, name, **options) for name in arguments.parts}
        seconds = arguments.seconds
        _parts.serve(parts, arguments.parts, seconds=seconds, chip=chip, is_alive=_timing.is_device_alive)
        return
    names = part_names([_DRY_SHAPE] if arguments.dry else arguments.shapes, arguments.dry)
    limits = {"budget_s": arguments.seconds, "silence_s": _SILENCE_S}
    report = _parts.run("benchmarks.tune_kernels", names, **limits, **options)
    results = {"best": best(report["measurements"])}
    for part, winner in results["best"].items():
        gain = winner["times_faster_than_default"]
        against = "the default failed" if gain is None else f"{gain:.3f} x as fast as the default"
        print(f"{part}: {winner['us']['median']:.1f} us with {winner['config']}, {against}")
    _parts.finish(results, report, stem="tuned", output=arguments.output, **options)


if __name__ == "__main__":
    main()
