"""The Mosaic GPU kernels in Mosaic's interpreter: numbers and races.

Each case runs in a process of its own under a timeout: a wrong barrier hangs, and a race leaves the interpreter
unusable. NPROC gives XLA's CPU pool more threads than a kernel has warpgroups; with fewer it hangs at random.
"""

import os
import subprocess
import sys
from pathlib import Path

import jax
import kernel_cases
import kernel_faults
import pytest

from paged_jax.dispatch import MIN_JAX_FOR_MOSAIC

ROOT = Path(__file__).parents[1]
needs_mosaic = pytest.mark.skipif(
    jax.__version_info__ < MIN_JAX_FOR_MOSAIC,
    reason=f"the Mosaic GPU kernels need JAX >= {MIN_JAX_FOR_MOSAIC}, this is {jax.__version__}",
)


def run_interpreted(*command: str, root: Path = ROOT, timeout: float = 400) -> subprocess.CompletedProcess:
    """python -m command, with the kernels of the project at root."""
    path = os.pathsep.join(str(p) for p in (root, ROOT, ROOT / "tests"))
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "NPROC": "16", "PYTHONPATH": path}
    command = (sys.executable, "-m", *command)
    return subprocess.run(
        command, cwd=root, env=environment, timeout=timeout, capture_output=True, text=True, check=False
    )


@needs_mosaic
@pytest.mark.parametrize("name", kernel_cases.CASES)
def test_mosaic_kernel_in_the_interpreter_equals_the_oracle_without_races(name):
    result = run_interpreted("kernel_cases", name)
    assert result.returncode == 0, result.stderr[-3000:]


@needs_mosaic
@pytest.mark.parametrize("name", kernel_faults.FAULTS)
def test_fault_of_other_kernels_in_the_interpreter(name):
    result = run_interpreted("kernel_faults", name)
    assert result.returncode == 0, result.stderr[-3000:]


@needs_mosaic
def test_mosaic_moves_kv_and_decodes_a_model_in_the_interpreter():
    result = run_interpreted("interpreted_model")
    assert result.returncode == 0, result.stderr[-3000:]
