"""What runs on a GPU, each in a process of its own: a kernel that hangs or reads out of bounds takes its process along.

`python -m gpu_cases NAME`; status SKIPPED with the reason on the last line where the chip has no such kernel.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import kernel_cases
import numpy as np

from pallas_kernels.shapes import MODEL_SHAPES

SKIPPED = 77
_REPEATS = 20


def _model_cases() -> dict[str, kernel_cases.Case]:
    """The layers of published models at lengths that fill several chunks and go around the ring many times."""
    cases = {}
    for name, shape in MODEL_SHAPES.items():
        shape = shape if shape.sliding_window is None else replace(shape, sliding_window=500)
        lens = (3001, 0, 1, 17, 640, 4096, 1000, 999)
        cases[f"decode_{name}"] = kernel_cases.Case(shape=shape, seq_lens=lens, spare_columns=4096)
        chunks = {"seq_lens": (700, 70, 1200, 9, 64), "counts": (150, 1, 1, 0, 64), "padding": 6}
        cases[f"mixed_{name}"] = kernel_cases.Case(shape=shape, **chunks)
    return cases


def _with_mma(cases: dict[str, kernel_cases.Case]) -> dict[str, kernel_cases.Case]:
    """Decode by the instruction that is not the default of an H200."""
    picked = {name: case for name, case in cases.items() if "mma" not in name and "decode" in name}
    return {f"{name}, mma": replace(case, decode=(case.decode or {}) | {"mma": "mma"}) for name, case in picked.items()}


def check_case(case: kernel_cases.Case) -> None:
    """Against the oracle; then the same bits again and again: nothing else sees a race on the chip."""
    run = kernel_cases.mosaic(case, interpret=False)
    error = kernel_cases.check(case, run)
    given = kernel_cases.inputs(case, layout_seed=1)
    first = [np.asarray(x, np.float32) for x in run(**given)]
    for _ in range(_REPEATS):
        for expected, actual in zip(first, run(**given), strict=True):
            np.testing.assert_array_equal(np.asarray(actual, np.float32), expected, err_msg="another run, other bits")
    print(f"error {error:.2e}")


def check_long_float16(counts: tuple[int, ...] | None) -> None:
    """8192 equal scores of values of 20: sums that are not normalised overflow float16."""
    shape = MODEL_SHAPES["llama3_8b"]
    lens = (8192, 8192)
    case = kernel_cases.Case(shape=shape, seq_lens=lens, counts=counts, dtype="float16")
    given = kernel_cases.inputs(case, layout_seed=1)
    given["query"] = jnp.zeros_like(given["query"])
    given["value_cache"] = jnp.full_like(given["value_cache"], 20.0)
    out, _ = kernel_cases.mosaic(case, interpret=False)(**given)
    np.testing.assert_allclose(np.asarray(out, np.float32), 20.0, rtol=2e-3)


def check_huge_pool(name: str) -> None:
    """Blocks beyond element 2^31 (of 8-bit pools: beyond byte 2^32) give the bits of a small pool."""
    case = kernel_cases.CASES[name]
    small = kernel_cases.inputs(case, layout_seed=1)
    small["block_tables"] = jnp.where(
        (small["block_tables"] >= 0) & (small["block_tables"] < small["key_cache"].shape[0]), small["block_tables"], 0
    )
    run = kernel_cases.mosaic(case, interpret=False)
    expected = [np.asarray(x) for x in run(**small)]
    block_shape, itemsize = small["key_cache"].shape[1:], small["key_cache"].dtype.itemsize
    shift = (2**31 if itemsize == 2 else 2**32) // int(np.prod(block_shape)) + 1

    def enlarge(pool):
        if pool is None:
            return None
        poison = jnp.full((shift, *pool.shape[1:]), 127 if pool.dtype == jnp.int8 else jnp.nan, pool.dtype)
        return jnp.concatenate([poison, pool])

    for field in ("key_cache", "value_cache", "k_scale", "v_scale"):
        small[field] = enlarge(small[field])
    assert small["key_cache"].size > 2**31
    small["block_tables"] += shift
    for want, got in zip(expected, run(**small), strict=True):
        np.testing.assert_array_equal(np.asarray(got), want)


def check_huge_moves() -> None:
    """Writes and block copies at both ends of pools with more than 2^31 elements."""
    from pallas_kernels import move_kv

    line, block_size = (8, 128), 16
    num_blocks = 2**31 // (block_size * 1024) + 100
    rng = np.random.default_rng(0)
    k, v = (jnp.asarray(rng.normal(size=(9, *line)), jnp.bfloat16) for _ in "kv")
    blocks = np.array([num_blocks - 1, 1, num_blocks - 40, num_blocks - 2, 2, 3, 4, 5, num_blocks // 2])
    offsets = np.arange(9)
    pools = tuple(jnp.zeros((num_blocks, block_size, *line), jnp.bfloat16) for _ in "kv")
    assert pools[0].size > 2**31
    slots = jnp.asarray(blocks * block_size + offsets, jnp.int32)
    pools = jax.jit(move_kv.write_kv, donate_argnums=(0, 1))(*pools, k, v, slots)
    pairs = jnp.array([num_blocks - 1, 1, 0]), jnp.array([num_blocks - 3, num_blocks - 4, 0])
    pools = jax.jit(move_kv.copy_blocks, donate_argnums=(0, 1))(*pools, *pairs)
    for pool, new in zip(pools, (k, v), strict=True):
        np.testing.assert_array_equal(np.asarray(pool[blocks, offsets]), np.asarray(new))
        np.testing.assert_array_equal(np.asarray(pool[num_blocks - 3, 0]), np.asarray(new[0]))
        np.testing.assert_array_equal(np.asarray(pool[num_blocks - 4, 1]), np.asarray(new[1]))
        written = jnp.sum(jnp.any(pool != 0, axis=(2, 3)), dtype=jnp.int32)
        assert int(written) == 11, "lines that nobody wrote have changed"


def check_model(part: str) -> None:
    """What interpreted_model.py checks in the interpreter."""
    import interpreted_model

    {"moves": partial(interpreted_model.check_moves, interpret=False), "engine": interpreted_model.check_engine}[part]()


_CASES = kernel_cases.CASES | _model_cases()
CHECKS: dict[str, Callable[[], None]] = {
    **{name: partial(check_case, case) for name, case in (_CASES | _with_mma(_CASES)).items()},
    "long_float16_decode": partial(check_long_float16, None),
    "long_float16_mixed": partial(check_long_float16, (2, 1)),
    "moves": partial(check_model, "moves"),
    "engine": partial(check_model, "engine"),
    "huge_pool_decode": partial(check_huge_pool, "decode_g4_h128"),
    "huge_pool_decode_int8": partial(check_huge_pool, "decode_int8"),
    "huge_pool_mixed": partial(check_huge_pool, "mixed_g16_h128_bs128"),
    "huge_pool_moves": check_huge_moves,
}
#: What the largest of them hold at once, pools and copies: not run where the GPU has less.
HUGE_BYTES = 20e9


def main(name: str) -> None:
    (device,) = jax.devices()[:1]
    limit = (device.memory_stats() or {}).get("bytes_limit", 0)
    if name.startswith("huge") and limit < HUGE_BYTES:
        print(f"the GPU lends {limit / 1e9:.0f} GB, pools of more than 2^31 elements need {HUGE_BYTES / 1e9:.0f}")
        sys.exit(SKIPPED)
    try:
        CHECKS[name]()
    except NotImplementedError as reason:
        if device.compute_capability == "9.0":
            raise  # the chip that all kernels are written for
        print(str(reason).splitlines()[0])
        sys.exit(SKIPPED)


if __name__ == "__main__":
    main(sys.argv[1])
