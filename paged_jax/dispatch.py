"""Which implementation runs: the caller's choice, or the best that the device and the shapes allow."""

import warnings
from collections.abc import Callable, Mapping
from typing import TypeVar

import jax

T = TypeVar("T")

MIN_JAX_FOR_MOSAIC = (0, 11, 2)


def default_platform() -> str:
    """The platform that programs are traced for: "cpu", "gpu" ... Obeys `jax.default_device`."""
    device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    return jax.default_backend() if device is None else getattr(device, "platform", device)


def wants_mosaic(implementation: str | None) -> bool:
    """Whether the Mosaic GPU kernels come first: by name, or by device if none is named."""
    return implementation == "mosaic_gpu" or (implementation is None and default_platform() in ("gpu", "cuda"))


def require_mosaic() -> None:
    """Raises NotImplementedError where the Mosaic GPU kernels cannot even be imported."""
    if jax.__version_info__ < MIN_JAX_FOR_MOSAIC:
        needed = ".".join(map(str, MIN_JAX_FOR_MOSAIC))
        raise NotImplementedError(f"the Mosaic GPU kernels need JAX >= {needed}, this is {jax.__version__}: take 'xla'")


def dispatch(implementation: str | None, candidates: Mapping[str, Callable[[], T]]) -> T:
    """Runs the candidate that is named; if none is, on a GPU "mosaic_gpu", and else or where that cannot, "xla".

    Raises:
        ValueError: no such candidate.
        NotImplementedError: the one named cannot do this; the message says why.
    """
    if implementation is not None:
        if implementation not in candidates:
            names = ", ".join(map(repr, candidates))
            raise ValueError(f"implementation is {implementation!r}; choose one of {names}, or None for the default")
        return candidates[implementation]()
    if wants_mosaic(None):
        try:
            return candidates["mosaic_gpu"]()
        except NotImplementedError as reason:
            warnings.warn(f"XLA instead of a Mosaic GPU kernel: {reason}", stacklevel=2)
    return candidates["xla"]()
