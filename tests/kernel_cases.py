"""The contract of the attention kernels: cases, inputs and the check that every implementation must pass.

`python -m kernel_cases NAME` runs one case on the Mosaic kernels in the interpreter; each runs in a process of its own,
because a wrong barrier hangs and a race leaves the interpreter unusable.
"""

import sys
from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np

from pallas_kernels.reference import paged_attention_reference
from pallas_kernels.shapes import KERNEL_SHAPES, AttentionShape

# Largest error of an output whose values lie in -1 ... 1, beyond the rounding of the output itself (half a unit in the
# last place): the weights are rounded to 16 bits before they meet the values.
MAX_ERROR = {"bfloat16": 2e-3, "float16": 3e-4}
ROUNDING = {"bfloat16": 2**-8, "float16": 2**-11}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One problem.

    Attributes:
        shape: sizes, window and cap.
        seq_lens: tokens of each row.
        counts: queries of each row; None: a decode batch.
        padding: tokens of a ragged batch that belong to no row.
        dtype: of the queries. cache_dtype: of K and V, None = the same.
        has_sinks: attention sinks.
        spare_columns: table columns that no row needs.
        decode: fields of paged_decode's Config that differ from the default.
    """

    shape: AttentionShape
    seq_lens: tuple[int, ...]
    counts: tuple[int, ...] | None = None
    padding: int = 0
    dtype: str = "bfloat16"
    cache_dtype: str | None = None
    has_sinks: bool = False
    spare_columns: int = 3
    decode: dict | None = None


def _decode_lens(block_size: int) -> tuple[int, ...]:
    """Lengths 0, 1, around a block, and one with more steps than the ring has stages, in several chunks."""
    return (330, 0, 1, block_size - 1, block_size, block_size + 1)


def _decode(name: str, **changes) -> Case:
    shape = KERNEL_SHAPES[name]
    window = {k: changes.pop(k) for k in ("sliding_window", "logits_soft_cap") if k in changes}
    shape = replace(shape, **window)
    return Case(**{"shape": shape, "seq_lens": _decode_lens(shape.block_size), **changes})


def _mixed(name: str, **changes) -> Case:
    """A chunk over a long past, a decode row, a row without queries, a whole prompt, a short one, padding."""
    case = _decode(name, **changes)
    return replace(case, seq_lens=(205, 70, 9, 37, 3), counts=(43, 1, 0, 37, 3), padding=6)


_EDGES = {"sliding_window": 90, "logits_soft_cap": 20.0, "has_sinks": True}

CASES = {
    "decode_g3_h64": _decode("g3_h64"),
    "decode_g4_h128": _decode("g4_h128"),
    "decode_g1_h80_bs64_f16": _decode("g1_h80_bs64", dtype="float16"),
    "decode_g5_h96_bs24": _decode("g5_h96_bs24"),
    "decode_g8_h256_bs8": _decode("g8_h256_bs8"),
    "decode_g16_h128_bs128": _decode("g16_h128_bs128"),
    "decode_g7_h64_bs32_edges": _decode("g7_h64_bs32", **_EDGES),
    "decode_int8": _decode("g4_h128", cache_dtype="int8"),
    "decode_fp8_edges": _decode("g3_h64", cache_dtype="float8_e4m3fn", **_EDGES),
    "decode_mma": _decode("g3_h64", decode={"mma": "mma", "num_chunks": 3}),
    "decode_mma_h80_e5m2": _decode("g1_h80_bs64", cache_dtype="float8_e5m2", decode={"mma": "mma"}),
    "decode_one_chunk_three_stages": _decode("g3_h64", decode={"num_chunks": 1, "num_stages": 3}),
    "decode_edges_many_chunks": _decode("g3_h64", seq_lens=(330, 329, 0, 91, 90, 89), **_EDGES),
    "mixed_g3_h64": _mixed("g3_h64"),
    "mixed_g4_h128_edges": _mixed("g4_h128", **_EDGES),
    "mixed_g1_h80_bs64_f16": _mixed("g1_h80_bs64", dtype="float16"),
    "mixed_g5_h96_bs24": _mixed("g5_h96_bs24"),
    "mixed_g8_h256_bs8": _mixed("g8_h256_bs8"),
    "mixed_g16_h128_bs128": _mixed("g16_h128_bs128"),
    "mixed_int8": _mixed("g7_h64_bs32", cache_dtype="int8"),
    "mixed_fp8_edges": _mixed("g4_h128", cache_dtype="float8_e4m3fn", **_EDGES),
    "mixed_narrow_window": _mixed("g3_h64", sliding_window=5),
}


def _stored(values: np.ndarray, dtype: str, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray | None]:
    """Values [..., block_size, K, H] in -1 ... 1 as they are stored, and their scales [..., K, block_size]."""
    target = jnp.dtype(dtype)
    if dtype not in ("int8", "float8_e4m3fn", "float8_e5m2"):
        return values.astype(target), None
    scale = rng.uniform(0.25, 1.0, values.shape[:-1]).astype(np.float32) / (127 if dtype == "int8" else 16)
    scaled = values / scale[..., None]
    stored = np.clip(np.rint(scaled), -127, 127) if dtype == "int8" else scaled
    return stored.astype(target), np.swapaxes(scale, -1, -2).copy()


def inputs(case: Case, layout_seed: int) -> dict:
    """Arguments of the attention function.

    Everything that must not be read is poison: dead slots hold NaN (or the largest int8 number), dead table entries
    point outside of the pool or at blocks of poison. layout_seed decides which physical blocks the rows have.
    """
    shape, rng = case.shape, np.random.default_rng(0)
    block_size, num_kv_heads, head_dim = shape.block_size, shape.num_kv_heads, shape.head_dim
    num_rows = len(case.seq_lens)
    used = [-(-n // block_size) for n in case.seq_lens]
    num_blocks = sum(used) + 4
    num_tokens = num_rows if case.counts is None else sum(case.counts) + case.padding
    query = rng.normal(size=(num_tokens, shape.num_heads, head_dim))
    logical = [rng.uniform(-1, 1, (sum(used), block_size, num_kv_heads, head_dim)) for _ in "kv"]
    logical[0] *= 1.7  # keys of variance 1
    order = np.random.default_rng(layout_seed).permutation(num_blocks - 1)[: sum(used)] + 1

    live = np.zeros((num_blocks, block_size), bool)
    tables = np.resize(np.array([-1, 10**6, 0], np.int32), (num_rows, max(used) + case.spare_columns)).copy()
    for row, end in enumerate(np.cumsum(used)):
        blocks = order[end - used[row] : end]
        tables[row, : used[row]] = blocks
        for i, block in enumerate(blocks):
            live[block, : max(0, min(block_size, case.seq_lens[row] - i * block_size))] = True

    cache_dtype = case.cache_dtype or case.dtype
    pools, scales = [], []
    for values in logical:
        stored, scale = _stored(values, cache_dtype, rng)
        poison = 127 if cache_dtype == "int8" else np.nan
        pool = np.full((num_blocks, *stored.shape[1:]), poison).astype(stored.dtype)
        pool[order] = stored
        pools.append(jnp.asarray(np.where(live[:, :, None, None], pool, np.asarray(poison).astype(pool.dtype))))
        if scale is not None:
            placed = np.full((num_blocks, *scale.shape[1:]), np.nan, np.float32)
            placed[order] = scale
            scales.append(jnp.asarray(np.where(live[:, None, :], placed, np.nan)))
    start = None if case.counts is None else jnp.asarray(np.cumsum((0, *case.counts)), jnp.int32)
    return {
        "query": jnp.asarray(query, case.dtype),
        "key_cache": pools[0],
        "value_cache": pools[1],
        "block_tables": jnp.asarray(tables),
        "seq_lens": jnp.asarray(case.seq_lens, jnp.int32),
        "query_start_loc": start,
        "k_scale": scales[0] if scales else None,
        "v_scale": scales[1] if scales else None,
        "sinks": jnp.asarray(rng.normal(size=shape.num_heads), jnp.float32) if case.has_sinks else None,
        "sliding_window": shape.sliding_window,
        "logits_soft_cap": shape.logits_soft_cap,
    }


def check(case: Case, run) -> float:
    """Asserts that run(**inputs) -> (out, lse) equals the oracle, and is bit-equal with other physical blocks.

    Returns:
        The largest error of the output beyond its own rounding.
    """
    given = inputs(case, layout_seed=1)
    out, lse = (np.asarray(x, np.float32) for x in run(**given))
    # The oracle computes in float32 and rounds only its output: it gets the rounded queries as float32.
    exact, exact_lse = paged_attention_reference(**(given | {"query": given["query"].astype(jnp.float32)}))
    exact, exact_lse = np.asarray(exact), np.asarray(exact_lse)
    assert not np.isnan(out).any(), "NaN from a slot that no query sees"
    error = float((np.abs(out - exact) - ROUNDING[case.dtype] * np.abs(exact)).max())
    assert error <= MAX_ERROR[case.dtype], f"error {error} of the output exceeds {MAX_ERROR[case.dtype]}"
    blind = np.abs(exact).max(axis=(1, 2)) == 0  # sees nothing: exact zeros
    assert (out[blind] == 0).all(), "a token that sees nothing must give exact zeros"
    np.testing.assert_allclose(lse, exact_lse, atol=2e-5, rtol=2e-5)
    again = run(**inputs(case, layout_seed=2))
    np.testing.assert_array_equal(out, np.asarray(again[0], np.float32), err_msg="output with other physical blocks")
    np.testing.assert_array_equal(lse, np.asarray(again[1]), err_msg="lse with other physical blocks")
    return error


def mosaic(case: Case, *, interpret: bool):
    """The Mosaic kernels as `check` calls them."""
    from pallas_kernels import paged_decode
    from pallas_kernels.mosaic_gpu import paged_attention_mosaic_gpu

    def run(**arguments):
        pool = arguments["key_cache"]
        decode = replace(paged_decode.default_config(pool, interpret=interpret), **case.decode or {})
        return paged_attention_mosaic_gpu(**arguments, decode_config=decode, interpret=interpret)

    return run


def assert_no_races() -> None:
    """JAX 0.12 raises on a race; 0.11 only notes it, where no public function tells."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks  # noqa: TID251

    assert not gpu_callbacks.get_races().races_found, "the interpreter saw a race"


def main(name: str) -> None:
    error = check(CASES[name], mosaic(CASES[name], interpret=True))
    assert_no_races()
    print(f"{name}: error {error:.2e}")


if __name__ == "__main__":
    main(sys.argv[1])
