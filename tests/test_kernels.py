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


#: Cases that add a shape, and nothing else, to what the others exercise: they run with the soak.
#: Cases that add a shape, and nothing else, to what the others exercise. They run with the soak: one for 50 of its
#: examples, in this order.
ONLY_SHAPES = [
    "decode_edges_many_chunks",
    "mixed_narrow_window",
    "decode_g16_h128_bs128",
    "decode_mma_h80_e5m2",
    "mixed_fp8_edges",
    "decode_g4_h128",
    "decode_g1_h80_bs64_f16",
    "decode_g5_h96_bs24",
    "decode_g7_h64_bs32_edges",
    "mixed_g5_h96_bs24",
    "mixed_g8_h256_bs8",
    "mixed_g16_h128_bs128",
    "mixed_g1_h80_bs64_f16",
    "mixed_g3_h64",  # as the model that is decoded below
]
SOAK_EXAMPLES = int(os.environ.get("SOAK_EXAMPLES", "2000"))


def check_case(name: str) -> None:
    result = run_interpreted("kernel_cases", name)
    assert result.returncode == 0, result.stderr[-3000:]


@needs_mosaic
@pytest.mark.parametrize("name", [name for name in kernel_cases.CASES if name not in ONLY_SHAPES])
def test_mosaic_kernel_in_the_interpreter_equals_the_oracle_without_races(name):
    check_case(name)


@pytest.mark.soak
@needs_mosaic
@pytest.mark.parametrize("name", ONLY_SHAPES[: SOAK_EXAMPLES // 50])
def test_mosaic_kernel_of_other_shapes_in_the_interpreter_equals_the_oracle_without_races(name):
    check_case(name)


@needs_mosaic
@pytest.mark.parametrize("name", kernel_faults.FAULTS)
def test_fault_of_other_kernels_in_the_interpreter(name):
    result = run_interpreted("kernel_faults", name)
    assert result.returncode == 0, result.stderr[-3000:]


@needs_mosaic
def test_mosaic_moves_kv_and_decodes_a_model_in_the_interpreter():
    result = run_interpreted("interpreted_model")
    assert result.returncode == 0, result.stderr[-3000:]
