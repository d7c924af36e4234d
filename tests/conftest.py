"""Settings for all tests: strict JAX, deterministic Hypothesis."""

from pathlib import Path

import jax
import pytest
from hypothesis import HealthCheck, settings

jax.config.update("jax_numpy_rank_promotion", "raise")
# Many tests build engines with equal programs: compile each of them once.
jax.config.update("jax_compilation_cache_dir", str(Path(__file__).parent.parent / ".jax_cache"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

settings.register_profile(
    "default", deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), print_blob=True
)
settings.load_profile("default")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what this machine cannot run, and says why."""
    has_gpu = jax.default_backend() == "gpu"
    for item in items:
        if "gpu" in item.keywords and not has_gpu:
            item.add_marker(pytest.mark.skip(reason=f"needs a GPU; the default backend is {jax.default_backend()}"))
