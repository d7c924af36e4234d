"""The GPU benchmarks run end to end without a GPU, and say what went wrong."""

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
from test_kernels import needs_mosaic

from benchmarks import _goals, _parts, kernels, tune_kernels
from pallas_kernels.shapes import MODEL_SHAPES

ROOT = Path(__file__).parents[1]


def dry_run(module: str, path: Path) -> dict:
    # Programs that are equal to those of an earlier run need not be compiled again.
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(ROOT / ".jax_cache")}
    environment |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2"}
    command = (sys.executable, "-m", f"benchmarks.{module}", "--dry", "--seconds", "900", "--output", str(path))
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, (result.stdout + result.stderr)[-3000:]
    return json.loads(path.read_text())


@needs_mosaic
def test_kernel_benchmark_runs_dry(tmp_path):
    report = dry_run("kernels", tmp_path / "report.json")
    assert (report["chip"], report["is_dry"], report["skipped"], report["failures"]) == ("cpu", True, [], {})
    assert {m["part"] for m in report["measurements"]} == set(kernels.PARTS)
    # Sizes that a dry run leaves out belong to the table of decode; all other goals find their measurements by name.
    missing = [goal["missing"] for goal in report["goals"] if goal["value"] is None]
    assert all(name.startswith("decode_/") for name in missing), missing
    assert len(missing) == 9
    interpreted = {m["part"] for m in report["measurements"] if "interpreted" in m.get("ran", "")}
    assert {"decode_wgmma", "prefill"} <= interpreted


@needs_mosaic
def test_tuner_runs_dry(tmp_path):
    report = dry_run("tune_kernels", tmp_path / "report.json")
    assert len(report["best"]) == 2
    for part, winner in report["best"].items():
        times = [m["us"]["median"] for m in report["measurements"] if m["part"] == part]
        assert len(times) == 2
        assert winner["us"]["median"] == min(times)


@needs_mosaic
def test_tuner_candidates_are_valid_configs():
    from pallas_kernels import paged_decode, paged_prefill

    for fields in tune_kernels.decode_candidates(is_dry=False):
        fields["num_chunks"] = fields.pop("programs")
        paged_decode.Config(**fields)
    for fields in tune_kernels.prefill_candidates(is_dry=False):
        paged_prefill.Config(**fields)
    names = tune_kernels.part_names(list(MODEL_SHAPES), is_dry=False)
    assert len(set(names)) == len(names) == 5 * len(MODEL_SHAPES)


WORKER = """
import sys, time
from benchmarks import _parts
def fine(): return {"us": {"median": 1.0}}
def wrong(): raise ValueError("no such thing")
def hang(): time.sleep(1000)
def crash(): import os; os._exit(7)
def lost(): global alive; alive = False; raise RuntimeError("illegal address")
alive = True
def part(*functions):
    def run():
        for f in functions: yield f.__name__, f
    return run
def broken():
    yield "fine", fine
    raise KeyError("inputs")
parts = {"a": part(fine, wrong, fine), "b": part(fine, hang, fine), "c": part(crash), "d": part(lost), "e": broken}
parts["f"] = part(fine)
names = sys.argv[sys.argv.index("--parts") + 1 :]
_parts.serve(parts, names, seconds=100, chip="none", is_alive=lambda: alive)
"""


def test_parts_survive_errors_hangs_and_crashes(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "some_worker.py").write_text(WORKER)
    monkeypatch.setattr(_parts, "_START_SECONDS", 20)
    options = {"silence_s": 4, "seed": 0, "is_dry": False}
    report = _parts.run("some_worker", list("abcdef"), budget_s=100, **options)
    names = [(m["part"], m["name"], "error" in m) for m in report["measurements"]]
    fine = [("a", "fine", False), ("a", "wrong", True), ("a", "fine", False), ("b", "fine", False)]
    assert names == [*fine, ("d", "lost", True), ("e", "fine", False), ("f", "fine", False)]
    assert list(report["failures"]) == ["b", "c", "d", "e"]
    assert report["failures"]["b"].startswith("hang: killed, silent for")
    assert "status 7" in report["failures"]["c"]
    assert report["failures"]["e"] == "KeyError: 'inputs'"
    assert report["skipped"] == []
    assert _parts.run("some_worker", ["a", "f"], budget_s=0, **options)["skipped"] == ["a", "f"]
    monkeypatch.setattr(_parts, "_GRACE_S", 1.0)
    report = _parts.run("some_worker", ["b", "f"], budget_s=8, **(options | {"silence_s": 50}))
    assert (report["failures"], report["skipped"]) == ({"b": "hang: killed, the time was up"}, ["f"])
    assert list(_parts.run("no_such_module", ["a", "f"], budget_s=9, **options)["failures"]) == ["a", "f"]


def test_goals_are_judged_by_the_faster_variant():
    def entry(part, name, us, **numbers):
        return {"part": part, "name": name, "us": {"median": us}} | numbers

    measurements = [
        entry("bandwidth", "copy by the driver", 1.0, bytes=100),
        entry("bandwidth", "copy by XLA", 1.0, bytes=90),
        entry("decode_wgmma", "64 x 8192,", 2.0, bytes=182),
        entry("decode_mma", "64 x 8192,", 4.0, bytes=182),
        entry("decode_mma", "1 x 1024,", 9.5, bytes=1),
        {"part": "decode_wgmma", "name": "1 x 1024,", "error": "wrong"},
    ]
    judged = {goal["goal"]: types.SimpleNamespace(**goal) for goal in _goals.judge(measurements)}
    assert judged["decode 64 x 8192"].value == pytest.approx(0.91)
    assert judged["decode 64 x 8192"].is_met
    assert not judged["decode 1 x 1024"].is_met
    assert judged["prefill 8192, causal"].is_met is None
    assert len(_goals.table(_goals.judge(measurements)).splitlines()) == len(_goals.GOALS)
