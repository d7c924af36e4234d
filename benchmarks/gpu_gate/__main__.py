"""Runs the gate: `make gpu-gate`, or `python -m benchmarks.gpu_gate [--bounded] [--only REGEX] [--output FILE]`.

Needs the environment that `make gpu-gate` builds: JAX's CUDA plugin and ptxas, but neither a GPU nor a driver.
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

from benchmarks._common import ROOT, package_versions, write_report
from benchmarks.gpu_gate import checks, parse
from benchmarks.gpu_gate.cases import DEPTHS, FLAGS, Case, ControlCase, ProgramCase, all_cases, bounded_cases, refusal

TIMEOUT_SECONDS = 400
PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-cuda-nvcc", "flax", "numpy")


def compile_case(case: Case, directory: pathlib.Path) -> subprocess.CompletedProcess[str]:
    """Compiles the case in a process of its own, which leaves its findings in the directory.

    Raises:
        subprocess.TimeoutExpired: it took too long.
    """
    (directory / "mosaic").mkdir()
    flags = f"--xla_dump_to={directory / 'xla'} --xla_dump_hlo_as_text {FLAGS[case.flags]}"
    env = {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", "JAX_COMPILATION_CACHE_DIR")}
    env |= {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "TF_CPP_MIN_LOG_LEVEL": "2", "XLA_FLAGS": flags}
    if not isinstance(case, ProgramCase):  # a dump per layer would be gigabytes
        env["MOSAIC_GPU_DUMP_TO"] = str(directory / "mosaic")
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_gate.worker", case.name, str(directory)],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )


def read_facts(directory: pathlib.Path) -> checks.Facts:
    """What compile_case has left."""
    kernels = [
        parse.Kernel(
            name=report.stem,
            smem_bytes=parse.parse_resources(report.with_suffix(".resources.txt").read_text()),
            **parse.parse_ptxas(report.read_text()),
            **parse.parse_ptx(report.with_suffix(".ptx").read_text()),
        )
        for report in sorted((directory / "mosaic").glob("*.ptxas"))
    ]
    # The last module is the step; XLA writes the sequence "after passes" only where a pass has changed it.
    dump = directory / "xla"
    hlo = max(dump.glob("*gpu_after_optimizations.txt"), key=lambda path: path.stat().st_size)
    stem = hlo.name.split(".sm_")[0]
    thunks = dump / f"{stem}.thunk_sequence_after_thunk_passes.txt"
    if not thunks.exists():
        thunks = dump / f"{stem}.thunk_sequence.txt"
    return checks.Facts(
        sizes=json.loads((directory / "facts.json").read_text()),
        kernels=tuple(kernels),
        thunks=parse.parse_thunks(thunks.read_text()),
        hlo=hlo.read_text(),
    )


def run_case(case: Case) -> tuple[checks.Facts | None, list[str]]:
    """The facts, None if there are none, and what is wrong."""
    with tempfile.TemporaryDirectory(prefix="gpu_gate_") as name:
        directory = pathlib.Path(name)
        try:
            done = compile_case(case, directory)
        except subprocess.TimeoutExpired:
            return None, [f"does not compile: no end after {TIMEOUT_SECONDS} s"]
        if done.returncode != 0:
            how = f"signal {-done.returncode}: " if done.returncode < 0 else ""
            return None, [f"does not compile: {how}{parse.error_of(done.stderr)}"]
        facts = read_facts(directory)
    return facts, checks.failures(case, facts)


def verdict(case: Case, found: list[str]) -> list[str]:
    """The failures that count: a control must be complained of, and some kernels must refuse, in the expected words."""
    refused = refusal(case)
    if refused is not None:
        is_refused = len(found) == 1 and "NotImplementedError" in found[0] and refused in found[0]
        return [] if is_refused else [f"no NotImplementedError with {refused!r}: {found}"]
    if not isinstance(case, ControlCase):
        return found
    if any(case.complaint in f for f in found):
        return []
    return [f"planted fault not noticed: nothing about {case.complaint!r} in {found}"]


def row(case: Case, facts: checks.Facts | None, found: list[str]) -> dict[str, object]:
    """One row of the report."""
    result: dict[str, object] = {"case": case.name, "ok": not found, "failures": found}
    if facts is None:
        return result
    result |= {k: v for k, v in facts.sizes.items() if k != "pool_shapes"}
    step = checks.step_launches(case, facts)
    if case in DEPTHS:
        result["step"] = [t.kind if t.name == t.kind else f"{t.kind} {t.name}" for t in step]
    result |= {
        "launches": len(step),
        "mosaic_launches": sum(t.kind == "kCustomCall" for t in step),
        "outside_command_buffers": len(parse.outside_command_buffers(facts.thunks)),
        "pool_rewrites": len(checks.rewrites(facts)),
        "kernels": [
            {k: v for k, v in vars(kernel).items() if v != ()} | {"ctas_per_sm": checks.ctas_per_sm(kernel, case.chip)}
            for kernel in facts.kernels
        ],
    }
    return result


def line(result: dict) -> str:
    """One line of the table."""
    if "launches" not in result:
        return f"{result['case']:52}"
    kernel = max(result["kernels"], key=lambda k: (-k["ctas_per_sm"], k["smem_bytes"]), default=None)
    cells = [
        f"{result['case']:52}",
        "{registers:4} {spill_bytes:5} {smem_bytes:7} {ctas_per_sm:4}".format(**kernel) if kernel else " " * 23,
        f"{result['launches']:5} {result['mosaic_launches']:6} {result['outside_command_buffers']:7}",
        f"{result['pool_rewrites']:6} {result['alias_bytes'] / 2**20:9.1f} {result['temp_bytes'] / 2**20:7.1f}",
        f"{result['seconds']:6.1f}",
    ]
    return " ".join(cells)


HEADER = (
    f"{'case':52} regs spill    SMEM CTAs steps mosaic outside copies alias MiB temp MiB      s\n"
    "regs ... CTAs: of the Mosaic kernel of which the fewest fit an SM; steps: launches of one call or decode step,\n"
    "mosaic: the Mosaic kernels among them; outside: launches outside of command buffers, decode loop included;\n"
    "copies: instructions that move a whole pool"
)


def main() -> int:
    """Runs the cases; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_gate", description=__doc__)
    parser.add_argument("--bounded", action="store_true", help="the cases that CI compiles")
    parser.add_argument("--only", default="", metavar="REGEX", help="only the cases whose name has it")
    parser.add_argument("--output", type=pathlib.Path, help="JSON report")
    arguments = parser.parse_args()
    cases = bounded_cases() if arguments.bounded else all_cases()
    cases = [c for c in cases if re.search(arguments.only, c.name)]
    if not cases:
        parser.error(f"no case matches --only {arguments.only}")

    print(HEADER, flush=True)
    rows: list[dict] = []
    with concurrent.futures.ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        for case, (facts, found) in zip(cases, pool.map(run_case, cases), strict=True):
            result = row(case, facts, verdict(case, found))
            rows.append(result)
            status = "refused" if refusal(case) else "ok"
            print(line(result), status if result["ok"] else "FAIL", flush=True)
            for failure in result["failures"]:
                print(f"    {failure}")
            if isinstance(case, ControlCase) and result["ok"]:
                print(f"    noticed: {next(f for f in found if case.complaint in f)}")

    report: dict[str, object] = {
        "versions": package_versions(*PACKAGES),
        "is_bounded": arguments.bounded,
        "rows": rows,
    }
    failed = [r["case"] for r in rows if not r["ok"]]
    depths = [r for case in DEPTHS for r in rows if r["case"] == case.name and "step" in r]
    if len(depths) == len(DEPTHS):
        deep, shallow = depths
        num_layers = deep["num_layers"] - shallow["num_layers"]
        per_layer, found = checks.depth_failures(deep["step"], shallow["step"], num_layers)
        report["llama3_8b_launches_per_layer"] = per_layer
        print(f"launches per layer of llama3_8b in decode_many: {per_layer:g}", *found, sep="\n    ")
        failed += found
    if arguments.output:
        write_report(arguments.output, report)
    print(f"gpu gate: {len(rows) - len([r for r in rows if not r['ok']])} passed, {len(failed)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
