"""Runs the parts of a benchmark in a process of their own that may hang or crash: what was measured is kept.

A kernel that reads out of bounds ends the CUDA context of its process, and one that waits for ever never returns. So
the driver (`run`) knows no JAX; it starts a worker (`serve`), reads one JSON line for everything that the worker
measures, and when the worker falls silent or dies starts another one for the parts that are left.

    {"chip": str}                                    comes first
    {"part": str, "name": str, ...result}            a measurement
    {"part": str, "name": str, "error": str}         a measurement that failed ("missing": a rival is not installed)
    {"part": str, "started": str}                    a measurement begins
    {"part": str, "seconds": float, "is_whole": bool, "failure": str (where it failed as a whole)}
"""

import collections.abc
import json
import os
import pathlib
import queue
import subprocess
import sys
import threading
import time
import traceback
import typing

from benchmarks._common import ROOT, environment, package_versions, write_report
from benchmarks._workers import claim_stdout

#: A part yields what it measures, one by one, as (name, function that does it).
Part = collections.abc.Iterator[tuple[str, collections.abc.Callable[[], dict[str, typing.Any]]]]
_START_SECONDS = 60  # that a worker may take to import JAX and to open the device
_GRACE_S = 30  # for the measurement under way when the time is up
_PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "numpy", "flax", "torch", "flashinfer-python")
_RESULTS = ROOT / "benchmarks/results"


class Report(typing.TypedDict):
    """What came of a run.

    chip: name of the device.
    measurements: results in order; a failed one has "error" instead of numbers, one of a rival that is not installed
        "missing".
    skipped: parts not begun, or not finished, because the time was up.
    failures: parts that ended in an error of their own, a crash or a hang, and why.
    seconds: of every finished part.
    """

    chip: str
    measurements: list[dict[str, typing.Any]]
    skipped: list[str]
    failures: dict[str, str]
    seconds: dict[str, float]


def run(module: str, parts: list[str], *, budget_s: float, silence_s: float, seed: int, is_dry: bool) -> Report:
    """Runs the parts by `python -m module --worker --seed N [--dry] --seconds N --parts PART...`, which calls `serve`.

    Args:
        parts: in order of importance.
        budget_s: seconds for all of them; what is not begun by then is skipped.
        silence_s: seconds that one measurement may take, compilation included, before it counts as hung.
        is_dry: on a CPU.
    """
    command = [sys.executable, "-m", module, "--worker", "--seed", str(seed), *(["--dry"] if is_dry else [])]
    # The interpreter needs more threads than a kernel has warpgroups.
    variables = {"JAX_PLATFORMS": "cpu", "NPROC": "16"} if is_dry else {}
    report: Report = {"chip": "unknown", "measurements": [], "skipped": [], "failures": {}, "seconds": {}}
    end, left = time.monotonic() + budget_s, list(parts)
    while left:
        if time.monotonic() >= end:
            report["skipped"] += left
            break
        finished = _run_worker(command, left, report, end, silence_s, variables)
        if finished == 0:
            report["failures"] |= dict.fromkeys(left, "the worker did not start: see its messages")
            break
        left = left[finished:]
    return report


def _run_worker(command, parts, report: Report, end: float, silence_s: float, variables) -> int:
    """Runs one worker until it ends; returns how many of the parts are done with, the one that killed it included."""
    command = [*command, "--seconds", str(max(1.0, end - time.monotonic())), "--parts", *parts]
    lines: queue.Queue[str] = queue.Queue()

    def read(stream) -> None:
        for line in stream:
            lines.put(line)
        lines.put("")

    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=os.environ | variables) as worker:
        reader = threading.Thread(target=read, args=(worker.stdout,), daemon=True)
        reader.start()
        finished, current, patience = 0, None, _START_SECONDS + silence_s
        failure = "the worker ended with status {status}, see its messages"
        while True:
            try:
                left = max(1.0, end + _GRACE_S - time.monotonic())
                line = lines.get(timeout=min(patience, left))
            except queue.Empty:
                worker.kill()
                why = "the time was up" if left < patience else f"silent for {patience:.0f} s"
                current, failure = current or "start", f"killed, {why}"
                break
            if not line:
                break
            patience = silence_s
            message = json.loads(line)
            if "chip" in message:
                report["chip"] = message["chip"]
            elif "started" in message:
                current = message["started"]
            elif "seconds" in message:
                current, finished = None, finished + 1
                _end_part(report, message)
            else:
                report["measurements"].append(message)
                print(_line(message), flush=True)
        status = worker.wait()
        reader.join()
    if current is not None:  # it died within a part
        report["failures"][parts[finished]] = f"{current}: {failure.format(status=status)}"
        finished += 1
    return finished


def _end_part(report: Report, message: dict[str, typing.Any]) -> None:
    report["seconds"][message["part"]] = message["seconds"]
    if not message["is_whole"]:
        report["skipped"].append(message["part"])
    if "failure" in message:
        report["failures"][message["part"]] = message["failure"]


def _line(message: dict[str, typing.Any]) -> str:
    what = message.get("error") or message.get("missing") or f"{message['us']['median']:10.1f} us"
    return f"{message['part']:>20} {message['name']:<36} {str(what).splitlines()[0][:110]}"


def serve(
    parts: dict[str, collections.abc.Callable[[], Part]],
    names: list[str],
    *,
    seconds: float,
    chip: str,
    is_alive: collections.abc.Callable[[], bool],
) -> None:
    """The worker: measures and tells the driver, until all is done or the time is up.

    Args:
        parts: by name. names: those to run, in this order.
        is_alive: whether the device still serves this process; asked after every error.
    """
    tell, end = claim_stdout(), time.monotonic() + seconds
    tell({"chip": chip})
    for name in names:
        tell({"part": name, "started": "inputs"})
        start, is_whole, failure = time.monotonic(), True, {}
        try:
            for what, measure in parts[name]():
                if time.monotonic() >= end:
                    is_whole = False
                    break
                tell({"part": name, "started": what})
                error = None
                try:
                    tell({"part": name, "name": what} | measure())
                except Exception as caught:
                    traceback.print_exc(limit=-4)
                    error = f"{type(caught).__name__}: {caught}"[:2000]
                del measure  # and with it the inputs, before the next ones are made
                if error is not None:
                    tell({"part": name, "name": what, "error": error})
                    if not is_alive():
                        sys.exit("the device is lost to this process")
        except Exception as error:
            traceback.print_exc()
            failure = {"failure": f"{type(error).__name__}: {error}"[:2000]}
        tell({"part": name, "seconds": time.monotonic() - start, "is_whole": is_whole} | failure)


def finish(
    results: dict[str, typing.Any], report: Report, *, stem: str, seed: int, is_dry: bool, output: pathlib.Path | None
) -> None:
    """Prints what went wrong and writes results and report to `output`, by default <stem>_<chip>.json.

    A dry run is written only where an output is named. Ends the process with status 1 if a part failed, in a dry run
    also if a single measurement did.
    """
    for name, why in report["failures"].items():
        print(f"FAILED {name}: {why.splitlines()[0]}")
    errors = [m for m in report["measurements"] if "error" in m]
    for m in errors:
        print(f"ERROR {m['part']}, {m['name']}: {m['error'].splitlines()[0]}")
    if report["skipped"]:
        print(f"SKIPPED, the time was up: {', '.join(report['skipped'])}")
    if output is None and not is_dry and report["measurements"]:
        output = _RESULTS / f"{stem}_{report['chip'].lower().replace(' ', '_')}.json"
    if output is not None:
        machine = environment() | {"versions": package_versions(*_PACKAGES), "seed": seed, "is_dry": is_dry}
        write_report(output, machine | results | report)
    if report["failures"] or not report["measurements"] or (is_dry and (errors or report["skipped"])):
        sys.exit(1)
