"""Worker: the paged decode loop that a JAX user writes by hand, without a block manager.

Blocks of 16 tokens, one donated pool per layer, a table filled once; all rows decode together in one `fori_loop`
dispatch. Attention gathers the live part of the table, rounded up to a power of two of tokens.
"""

import argparse
import functools

import _common
import _llama
import _workers
import jax
import jax.numpy as jnp
import numpy as np

BLOCK_SIZE = 16


def init_pools(num_blocks: int) -> list[tuple[jax.Array, jax.Array]]:
    """Returns per layer zeroed K and V pools `[num_blocks, block_size, K, H]`; block 0 takes padded writes."""
    shape = (num_blocks, BLOCK_SIZE, _llama.NUM_KV_HEADS, _llama.HEAD_DIM)
    return [(jnp.zeros(shape), jnp.zeros(shape)) for _ in range(_llama.NUM_LAYERS)]


def write(pool: jax.Array, slots: jax.Array, rows: jax.Array) -> jax.Array:
    """Writes `rows [T, K, H]` at `slots [T]`."""
    return pool.at[slots // BLOCK_SIZE, slots % BLOCK_SIZE].set(rows)


@functools.partial(jax.jit, donate_argnames="pools")
def prefill(params, pools, token_ids, length, table):
    """Computes one prompt and stores its K and V; returns its first new token and the pools."""
    token, stored = _llama.prefill(params, token_ids, length)
    positions = jnp.arange(len(token_ids))
    slots = table[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    slots = jnp.where(positions < length, slots, 0)
    written = [
        (write(k_pool, slots, k), write(v_pool, slots, v))
        for (k_pool, v_pool), (k, v) in zip(pools, stored, strict=True)
    ]
    return token, written


def decode_step(params, pools, tokens, lengths, tables):
    """One token for every row; `lengths [S]` counts stored tokens before the step."""
    rows = jnp.arange(len(tokens))
    slots = tables[rows, lengths // BLOCK_SIZE] * BLOCK_SIZE + lengths % BLOCK_SIZE
    mask = (jnp.arange(tables.shape[1] * BLOCK_SIZE) <= lengths[:, None])[:, None]
    cos, sin = _llama.rotation(lengths)
    x, written = params.embedding[tokens], []

    def attend(k_pool, v_pool, query, key, value):
        k_pool, v_pool = write(k_pool, slots, key), write(v_pool, slots, value)
        written.append((k_pool, v_pool))
        gathered = [pool[tables].reshape(len(tokens), -1, *pool.shape[2:]) for pool in (k_pool, v_pool)]
        return _llama.attend_masked(query[:, None], *gathered, mask)[:, 0]

    for layer, pools_of_layer in zip(params.layers, pools, strict=True):
        x = _llama.apply_layer(layer, x, cos, sin, functools.partial(attend, *pools_of_layer))
    return _llama.next_tokens(params, x), written


@functools.partial(jax.jit, static_argnames="steps", donate_argnames="pools")
def decode(params, pools, tokens, lengths, tables, *, steps):
    """Runs `steps` greedy steps; returns new tokens `[steps, S]` and the pools."""

    def body(step, carry):
        pools, tokens, output = carry
        tokens, pools = decode_step(params, pools, tokens, lengths + step, tables)
        return pools, tokens, output.at[step].set(tokens)

    output = jnp.zeros((steps, len(tokens)), jnp.int32)
    pools, _, output = jax.lax.fori_loop(0, steps, body, (pools, tokens, output))
    return output, pools


class Loop:
    """Parameters and pools of one worker."""

    def __init__(self, params: _llama.Params, max_num_seqs: int, max_model_len: int):
        """Allocates pools for `max_num_seqs` rows of `max_model_len` tokens."""
        self.params = params
        self.max_blocks = max_model_len // BLOCK_SIZE
        self.pools = init_pools(1 + max_num_seqs * self.max_blocks)

    def tables(self, num_rows: int) -> np.ndarray:
        """Returns block tables `[S, M]` whose blocks lie scattered, as after some time of use."""
        ids = 1 + np.random.default_rng(0).permutation(num_rows * self.max_blocks)
        return ids.reshape(num_rows, self.max_blocks).astype(np.int32)

    def generate(self, prompts: list[list[int]], max_new_tokens: int) -> list[list[int]]:
        """Prefills row by row, then decodes all rows together."""
        tables = self.tables(len(prompts))
        lengths = np.array([len(prompt) for prompt in prompts], np.int32)
        first = []
        for prompt, table in zip(prompts, tables, strict=True):
            token, self.pools = prefill(self.params, self.pools, _llama.padded(prompt), len(prompt), table)
            first.append(token)
        tokens = jnp.stack(first)
        steps = max_new_tokens - 1
        live = _llama.bucket(int(lengths.max()) + steps) // BLOCK_SIZE
        if steps == 0:
            return np.asarray(tokens)[:, None].tolist()
        output, self.pools = decode(self.params, self.pools, tokens, lengths, tables[:, :live], steps=steps)
        return np.concatenate([np.asarray(tokens)[None], np.asarray(output)]).T.tolist()


def load():
    """Reads the command line and the weights."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gguf", required=True)
    parser.add_argument("--max-model-len", type=int, default=512)
    parser.add_argument("--max-num-seqs", type=int, default=16)
    arguments = parser.parse_args()
    loop = Loop(_llama.load_params(arguments.gguf), arguments.max_num_seqs, arguments.max_model_len)
    settings = {"block_size": BLOCK_SIZE, "max_model_len": arguments.max_model_len}
    return loop.generate, _common.package_versions("jax", "jaxlib", "numpy", "gguf"), settings


if __name__ == "__main__":
    _workers.serve(load)
