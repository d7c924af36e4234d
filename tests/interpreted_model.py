"""A whole engine on the Mosaic kernels in the interpreter, and the kernels that move K and V.

`python -m interpreted_model`, in a process of its own: see test_kernels.py. gpu/gpu_cases.py runs the same on a GPU.
"""

from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import kernel_cases
import numpy as np
from flax import nnx

from models.llama import LlamaConfig, LlamaForward, init_params
from paged_jax import LLM, CacheConfig, SamplingParams, attention, copy_blocks, init_cache, write_kv
from pallas_kernels import move_kv
from pallas_kernels.mosaic_gpu import paged_attention_mosaic_gpu

CONFIG = LlamaConfig(
    vocab_size=61,
    hidden_size=64,
    intermediate_size=64,
    num_layers=1,
    num_heads=3,
    num_kv_heads=1,
    head_dim=64,
    tie_word_embeddings=True,
)


def check_moves(*, interpret: bool) -> None:
    rng = np.random.default_rng(0)
    num_blocks, block_size, line = 12, 16, (2, 64)
    k_pool, v_pool = (jnp.asarray(rng.normal(size=(num_blocks, block_size, *line)), jnp.bfloat16) for _ in "kv")
    k, v = (jnp.asarray(rng.normal(size=(21, *line)), jnp.bfloat16) for _ in "kv")
    slots = np.zeros(21, np.int32)
    slots[:18] = rng.permutation((num_blocks - 1) * block_size)[:18] + block_size
    written = move_kv.write_kv(k_pool, v_pool, k, v, jnp.asarray(slots), interpret=interpret)
    for old, new, lines in zip((k_pool, v_pool), written, (k, v), strict=True):
        expected = np.array(old).reshape(-1, *line)
        expected[slots[:18]] = np.asarray(lines)[:18]
        np.testing.assert_array_equal(np.asarray(new).reshape(-1, *line), expected)
    pairs = jnp.array([3, 5, 0]), jnp.array([7, 2, 0])
    copied = move_kv.copy_blocks(k_pool, v_pool, *pairs, interpret=interpret)
    for old, new in zip((k_pool, v_pool), copied, strict=True):
        expected = np.array(old)
        expected[[7, 2]] = expected[[3, 5]]
        np.testing.assert_array_equal(np.asarray(new), expected)


def check_copies() -> None:
    """copy_blocks of a cache with scales and small kernel blocks: the kernel moves what XLA does."""
    config = CacheConfig(
        num_blocks=9,
        num_layers=1,
        num_kv_heads=2,
        head_dim=64,
        max_blocks_per_seq=8,
        block_size=16,
        kernel_block_size=8,
        dtype="int8",
    )
    cache, slots = init_cache(config), jnp.arange(9 * 16, dtype=jnp.int32)
    k, v = (jax.random.normal(jax.random.key(i), (9 * 16, 2, 64)) for i in (0, 1))
    cache = cache.with_layer(0, write_kv(cache.layer(0), k, v, slots))
    pairs = jnp.array([3, 5, 0, 0], jnp.int32), jnp.array([7, 2, 0, 0], jnp.int32)
    expected = copy_blocks(cache, *pairs, implementation="xla")
    kernel = mock.Mock(wraps=partial(move_kv.copy_blocks, interpret=True))
    with mock.patch.object(move_kv, "copy_blocks", kernel):
        copied = copy_blocks(cache, *pairs, are_disjoint=True, implementation="mosaic_gpu")
    kernel.assert_called_once()
    jax.tree.map(np.testing.assert_array_equal, copied, expected)


def generate(implementation: str, **sizes) -> list[list[int]]:
    params = jax.tree.map(
        lambda x: (x * (9.0 if x.ndim == 2 else 1.0)).astype(jnp.bfloat16), init_params(CONFIG, nnx.Rngs(1))
    )
    sizes = {"num_blocks": 24, "max_blocks_per_seq": 8, "dtype": "bfloat16"} | sizes
    cache = CacheConfig(num_layers=1, num_kv_heads=1, head_dim=64, max_num_seqs=2, **sizes)
    llm = LLM(
        LlamaForward(CONFIG), params, cache, max_num_batched_tokens=32, decode_steps=4, implementation=implementation
    )
    rng = np.random.default_rng(5)
    prompts = [
        {"prompt_token_ids": rng.integers(0, 61, n).tolist()} for n in (70, 9)
    ]  # three chunks, and a decode row beside them
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True))
    assert all(o.error is None for o in outputs), outputs
    assert llm.num_free_blocks == cache.num_blocks - 1
    return [o.outputs[0].token_ids for o in outputs]


def check_engine() -> None:
    """The kernels give the tokens of the oracle, from 8-bit K and V in blocks of two sizes."""
    sizes = {"dtype": "int8", "num_blocks": 12, "max_blocks_per_seq": 4, "block_size": 32, "kernel_block_size": 16}
    expected = generate("reference", **sizes)
    actual = generate("mosaic_gpu", **sizes)
    assert len({tuple(t) for t in expected}) == 2, "the prompts must give different texts"
    assert actual == expected, f"{actual} is not {expected}"


def main() -> None:
    check_moves(interpret=True)
    check_copies()
    # On a CPU the name alone is refused; the interpreter is for tests, so they put it in.
    attention._mosaic_gpu = lambda *pools, interpret, **given: paged_attention_mosaic_gpu(
        *pools, **given, interpret=True
    )
    check_engine()
    kernel_cases.assert_no_races()


if __name__ == "__main__":
    main()
