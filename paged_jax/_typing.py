"""The one decorator that checks annotated shapes and dtypes when a function is called or traced."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, get_args, get_type_hints

import jax.numpy as jnp
import jaxtyping
import numpy as np

F = TypeVar("F", bound=Callable[..., Any])


def _matches(value: object, hint: Any) -> bool:
    """isinstance() for jaxtyping array annotations and unions of them with None."""
    members = get_args(hint)
    if members:
        return any(value is None if member is type(None) else _matches(value, member) for member in members)
    return isinstance(value, hint)


def _is_array_hint(hint: Any) -> bool:
    members = get_args(hint) or (hint,)
    return any(isinstance(m, type) and issubclass(m, jaxtyping.AbstractArray) for m in members)


def _describe(value: object) -> str:
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    return type(value).__name__ if shape is None else f"{dtype}{list(shape)}"


def typed(function: F) -> F:
    """Checks jaxtyping-annotated arguments; equal axis names must have equal sizes across one call.

    NumPy arrays become JAX arrays first.

    Runs on every call outside jit and once per trace inside it. Arguments annotated otherwise are not looked at.

    Raises:
        ValueError: an argument has another dtype, rank or axis size than its annotation says.
    """
    signature = inspect.signature(function)
    hints = {name: h for name, h in get_type_hints(function).items() if name != "return" and _is_array_hint(h)}

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        with jaxtyping.jaxtyped("context"):  # pyright: ignore[reportGeneralTypeIssues]
            for name, value in bound.arguments.items():
                if name in hints and isinstance(value, np.ndarray):
                    bound.arguments[name] = value = jnp.asarray(value)
                if name in hints and not _matches(value, hints[name]):
                    raise ValueError(
                        f"{function.__name__}(): {name} is {_describe(value)}, expected {hints[name]}; axes with the "
                        f"same name must agree across arguments, here "
                        f"{ {n: _describe(v) for n, v in bound.arguments.items() if n in hints} }"
                    )
        return function(*bound.args, **bound.kwargs)

    return checked  # pyright: ignore[reportReturnType]
