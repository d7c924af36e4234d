"""Settings for all tests: strict JAX, deterministic Hypothesis."""

import gc
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")
# Most programs are tiny and run a few hundred times: compiling them is nearly all that a test costs. What XLA makes of
# a program (fusions, copies, memory) stays the same; only LLVM does less.
jax.config.update("jax_disable_most_optimizations", True)
# Many tests build engines with equal programs: compile each of them once.
jax.config.update("jax_compilation_cache_dir", str(Path(__file__).parent.parent / ".jax_cache"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

# GPU machines have neither Hypothesis nor pytest-timeout, and tests/gpu needs none.
if importlib.util.find_spec("hypothesis") is not None:
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "default", deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), print_blob=True
    )
    settings.load_profile("default")


@pytest.fixture(autouse=True, scope="module")
def _free_executables() -> Iterator[None]:
    """Every executable takes several memory mappings, of which a process may have 65530: beyond, XLA crashes."""
    yield
    jax.clear_caches()
    gc.collect()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Makes the setting `timeout` known where its plugin is missing: unknown settings are errors."""
    if importlib.util.find_spec("pytest_timeout") is None:
        parser.addini("timeout", "seconds that a test may take, if pytest-timeout is installed")


#: The files that take longest go first, so that parallel workers end together.
LONG = (
    "test_smollm2",
    "test_block_manager_properties",
    "test_kernels",
    "test_engine",
    "test_preemption",
    "test_options",
    "test_decode",
    "test_package",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Orders the files, skips what this machine cannot run, and says why."""
    items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))
    has_gpu, cache = jax.default_backend() == "gpu", os.environ.get("TEST_CACHE", "full")
    for item in items:
        if "full_cache" in item.keywords and cache != "full":
            item.add_marker(
                pytest.mark.skip(reason=f"counts blocks or looks into arrays of TEST_CACHE=full, not {cache}")
            )
        if "gpu" in item.keywords and not has_gpu:
            item.add_marker(pytest.mark.skip(reason=f"no GPU: JAX's default backend is {jax.default_backend()}"))
