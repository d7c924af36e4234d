"""Times calls on a device from inside one program, so that neither dispatch nor the L2 cache is measured.

`repeated` makes one program that calls an operation many times: a `fori_loop` of a static number of rounds (a static
trip count needs no word from the host, and XLA:GPU records its body as one CUDA graph), and in each round one call for
every input of a rotation. The rotation's K/V together are at least twice the L2 of an H200, so a call finds none of its
K/V there. Every call takes the output of the call before as its query: nothing can run ahead, be merged or be dropped,
and no instruction is added. A sample is the host's time for one such program, about 20 ms, over its number of calls:
the ~0.1 ms that dispatch and the wait for its end take are under 1 % of it.

An optimisation barrier ties what the call derives from lengths and tables (the work list) to the call before; without
it (`is_isolated=False`) XLA computes the list once for all, as it does for the layers of a model.
"""

import statistics
import time
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax

ROTATED_BYTES = 150_000_000  # an H200 has 60 MB of L2
MAX_ROTATION = 36


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long one measurement takes.

    Attributes:
        sample_us: of one sample, if a call takes as long as guessed.
        num_samples: at most. seconds: after which no further sample is taken, three are always; 0: one sample.
    """

    sample_us: float = 20_000.0
    num_samples: int = 11
    seconds: float = 0.8


DRY = Limits(sample_us=0, num_samples=1, seconds=0)


def rotation(num_bytes: int) -> int:
    """How many inputs of num_bytes each make the rotation."""
    return min(MAX_ROTATION, max(1, -(-ROTATED_BYTES // num_bytes)))


def repeated(op, num_rounds: int, *, is_isolated: bool):
    """The program: num_rounds times, for each `own` in the rotation, carry = op(carry, large, small, own).

    Args:
        op: (carry, large, small, own) -> carry. `large` are arrays that never pass a barrier (K/V pools).
    """

    def program(carry, large, small, rotated):
        def one_round(_, carry):
            for own in rotated:
                shared = small
                if is_isolated:
                    carry, shared, own = lax.optimization_barrier((carry, small, own))
                carry = op(carry, large, shared, own)
            return carry

        return lax.fori_loop(0, num_rounds, one_round, carry)

    return program


@dataclass
class Timed:
    """A compiled program of `repeated`, and its arguments but for the carry."""

    program: Any
    arguments: tuple
    num_calls: int
    compile_s: float

    def run(self, carry, limits: Limits) -> tuple[dict[str, Any], Any]:
        """Times it; returns the numbers (microseconds per call) and the last carry. The given carry is consumed."""
        if limits.seconds:  # warm up
            carry = jax.block_until_ready(self.program(carry, *self.arguments))
        samples, begin = [], time.perf_counter()
        while len(samples) < limits.num_samples:
            start = time.perf_counter()
            carry = jax.block_until_ready(self.program(carry, *self.arguments))
            samples.append((time.perf_counter() - start) / self.num_calls * 1e6)
            if time.perf_counter() - begin > limits.seconds and len(samples) >= min(3, limits.num_samples):
                break
        numbers = {
            "us": {"median": statistics.median(samples), "min": min(samples), "max": max(samples)},
            "samples": len(samples),
            "calls_per_sample": self.num_calls,
            "compile_s": round(self.compile_s, 2),
        }
        return numbers, carry


def compiled(op, carry, large, small, rotated, *, guess_us: float, limits: Limits, is_isolated: bool = True) -> Timed:
    """Compiles the program for about limits.sample_us; the carry is donated."""
    num_rounds = max(1, round(limits.sample_us / (guess_us * len(rotated))))
    start = time.perf_counter()
    program = jax.jit(repeated(op, num_rounds, is_isolated=is_isolated), donate_argnums=0)
    program = program.lower(carry, large, small, rotated).compile()
    return Timed(program, (large, small, rotated), num_rounds * len(rotated), time.perf_counter() - start)


def chip(*, is_dry: bool) -> str:
    """Name of the device. Ends the process if that is no GPU, unless the run is dry."""
    if not is_dry and jax.default_backend() != "gpu":
        raise SystemExit(f"no GPU: JAX's default backend is {jax.default_backend()}; --dry runs on a CPU")
    return jax.devices()[0].device_kind


def is_device_alive() -> bool:
    """Whether the device still computes: an illegal access ends the CUDA context of the process."""
    try:
        return int(np.asarray(jax.jit(lambda x: x + 1)(np.int32(1)))) == 2
    except Exception:
        return False
