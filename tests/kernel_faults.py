"""Faults that paged kernels elsewhere have had, one function each: the Mosaic kernels must not have them.

`python -m kernel_faults NAME` runs one in the interpreter, in a process of its own: see test_kernels.py.
"""

import sys

import jax
import jax.numpy as jnp
import kernel_cases
import numpy as np

from paged_jax import paged_attention


def _attend(query, key, value, **options):
    """One row whose keys and values [L, K, H] lie in blocks of 64."""
    length, line = key.shape[0], key.shape[1:]
    pools = [jnp.concatenate([jnp.zeros((64, *line), x.dtype), x]).reshape(-1, 64, *line) for x in (key, value)]
    tables = jnp.arange(1, length // 64 + 1)[None]
    arguments = {"block_tables": tables, "seq_lens": jnp.array([length]), "return_residual": True}
    out, lse = paged_attention(query, *pools, **arguments, **options, implementation="mosaic_gpu", interpret=True)
    jax.block_until_ready(out)
    kernel_cases.assert_no_races()
    return out, lse


def fp16_values_of_twenty_over_8192_tokens_stay_finite() -> None:
    zeros, twenties = jnp.zeros((8192, 1, 64), jnp.float16), jnp.full((8192, 1, 64), 20, jnp.float16)
    out, lse = _attend(jnp.zeros((1, 1, 64), jnp.float16), zeros, twenties)
    np.testing.assert_array_equal(np.asarray(out, np.float32), 20)
    np.testing.assert_allclose(np.asarray(lse), np.log(8192), rtol=1e-6)


def scores_of_minus_half_a_million_still_give_the_value() -> None:
    query, key = jnp.full((1, 1, 64), -128, jnp.bfloat16), jnp.full((64, 1, 64), 64, jnp.bfloat16)
    out, lse = _attend(query, key, jnp.ones((64, 1, 64), jnp.bfloat16), scale=1.0)
    np.testing.assert_array_equal(np.asarray(out, np.float32), 1)
    np.testing.assert_allclose(np.asarray(lse), -524288 + np.log(64), rtol=1e-6)


def slices_of_packed_arrays_equal_copies() -> None:
    rng = np.random.default_rng(0)
    packed = jnp.asarray(rng.normal(size=(128, 3, 64)), jnp.bfloat16)
    query = jnp.asarray(rng.normal(size=(1, 5, 64)), jnp.bfloat16)
    for start in (0, 1):
        key, value = packed[:, start : start + 1], packed[:, 2:]
        sliced, _ = _attend(query[:, start : start + 2], key, value)
        copied, _ = _attend(*(jnp.asarray(np.array(x)) for x in (query[:, start : start + 2], key, value)))
        np.testing.assert_array_equal(np.asarray(sliced, np.float32), np.asarray(copied, np.float32))


def block_ids_past_the_last_block_repeat_it() -> None:
    """The interpreter does not notice an id outside of the pool: the bound is checked by itself."""
    from pallas_kernels.mosaic import block_ids

    last = 300
    for block_size in (8, 16, 24, 128):
        columns = np.arange(64)
        table = jnp.asarray(np.where(columns <= last // block_size, columns + 7, -1)[None], jnp.int32)
        for start in range(0, 512, 64):
            where = jnp.int32(0), jnp.int32(last), jnp.int32(start)
            ids = block_ids(table, *where, num_tokens=64, block_size=block_size)
            pieces = np.arange(start, start + 64, 64 // len(ids))
            np.testing.assert_array_equal(np.asarray(ids), np.minimum(pieces // block_size, last // block_size) + 7)
    nothing = block_ids(table, jnp.int32(0), jnp.int32(-1), jnp.int32(0), num_tokens=64, block_size=16)
    assert set(map(int, nothing)) == {7}


FAULTS = {
    f.__name__: f
    for f in (
        fp16_values_of_twenty_over_8192_tokens_stay_finite,
        scores_of_minus_half_a_million_still_give_the_value,
        slices_of_packed_arrays_equal_copies,
        block_ids_past_the_last_block_repeat_it,
    )
}

if __name__ == "__main__":
    FAULTS[sys.argv[1]]()
