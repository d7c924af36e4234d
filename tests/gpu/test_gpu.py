"""The Mosaic kernels on a GPU: the contract suite, bits that repeat, large pools, a whole engine.

Every check runs in a process of its own (gpu_cases.py), several side by side; the first test to ask starts them all.
"""

import os
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import gpu_cases
import pytest

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]
_AT_ONCE = max(1, min(8, (os.cpu_count() or 1) // 2))
_TIMEOUT_S = 60  # of one check
# No check begins after that: a session on a GPU must end in time.
_TOTAL_S = float(os.environ.get("GPU_TESTS_SECONDS", "600"))


def _run(name: str, end: float) -> subprocess.CompletedProcess:
    if time.monotonic() > end:
        raise TimeoutError(f"not begun: the checks before it took more than {_TOTAL_S:.0f} s (GPU_TESTS_SECONDS)")
    path = os.pathsep.join(str(p) for p in (ROOT, ROOT / "tests", ROOT / "tests" / "gpu"))
    # Each takes the memory that it needs, not three quarters of all.
    environment = os.environ | {"PYTHONPATH": path, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    command = (sys.executable, "-m", "gpu_cases", name)
    return subprocess.run(command, env=environment, timeout=_TIMEOUT_S, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def results(request):
    """The processes of all selected checks, by name."""
    end = time.monotonic() + _TOTAL_S
    selected = [item.callspec.params["name"] for item in request.session.items if item.path == request.path]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        futures: dict[str, Future] = {name: pool.submit(_run, name, end) for name in selected}
        yield futures
        for future in futures.values():
            future.cancel()


@pytest.mark.parametrize("name", gpu_cases.CHECKS)
def test_on_a_gpu(name, results):
    result = results[name].result()
    if result.returncode == gpu_cases.SKIPPED:
        pytest.skip(result.stdout.splitlines()[-1])
    assert result.returncode == 0, (result.stdout + result.stderr)[-3000:]
