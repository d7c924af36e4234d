"""Settings for all tests: strict JAX, deterministic Hypothesis."""

import jax
import pytest
from hypothesis import HealthCheck, settings

jax.config.update("jax_numpy_rank_promotion", "raise")
# JAX's import of its GPU plugins must not depend on the machine: these tests are about the default backend.
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
