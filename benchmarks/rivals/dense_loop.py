"""Worker: the decode loop that a JAX user writes by hand with a contiguous cache, no paging.

Each layer has K and V `[S, C, K, H]`, donated, where C is the power of two that holds the longest row at its end (the
tightest dense cache there is); all rows decode together in one `fori_loop` dispatch.
"""

import argparse
import functools

import _common
import _llama
import _workers
import jax
import jax.numpy as jnp
import numpy as np


def init_caches(num_rows: int, capacity: int) -> list[tuple[jax.Array, jax.Array]]:
    """Returns per layer zeroed K and V caches `[num_rows, capacity, K, H]`."""
    shape = (num_rows, capacity, _llama.NUM_KV_HEADS, _llama.HEAD_DIM)
    return [(jnp.zeros(shape), jnp.zeros(shape)) for _ in range(_llama.NUM_LAYERS)]


@functools.partial(jax.jit, donate_argnames="caches")
def prefill(params, caches, token_ids, length, row):
    """Computes one prompt and stores its K and V in `row`; returns its first new token and the caches."""
    token, stored = _llama.prefill(params, token_ids, length)
    # Values past the prompt are overwritten before they are first attended to.
    written = [
        tuple(cache.at[row, : len(token_ids)].set(new) for cache, new in zip(of_layer, new_of_layer, strict=True))
        for of_layer, new_of_layer in zip(caches, stored, strict=True)
    ]
    return token, written


def decode_step(params, caches, tokens, lengths):
    """One token for every row; `lengths [S]` counts stored tokens before the step."""
    rows = jnp.arange(len(tokens))
    mask = (jnp.arange(caches[0][0].shape[1]) <= lengths[:, None])[:, None]
    cos, sin = _llama.rotation(lengths)
    x, written = params.embedding[tokens], []

    def attend(k_cache, v_cache, query, key, value):
        k_cache, v_cache = k_cache.at[rows, lengths].set(key), v_cache.at[rows, lengths].set(value)
        written.append((k_cache, v_cache))
        return _llama.attend_masked(query[:, None], k_cache, v_cache, mask)[:, 0]

    for layer, caches_of_layer in zip(params.layers, caches, strict=True):
        x = _llama.apply_layer(layer, x, cos, sin, functools.partial(attend, *caches_of_layer))
    return _llama.next_tokens(params, x), written


@functools.partial(jax.jit, static_argnames="steps", donate_argnames="caches")
def decode(params, caches, tokens, lengths, *, steps):
    """Runs `steps` greedy steps; returns new tokens `[steps, S]` and the caches."""

    def body(step, carry):
        caches, tokens, output = carry
        tokens, caches = decode_step(params, caches, tokens, lengths + step)
        return caches, tokens, output.at[step].set(tokens)

    output = jnp.zeros((steps, len(tokens)), jnp.int32)
    caches, _, output = jax.lax.fori_loop(0, steps, body, (caches, tokens, output))
    return output, caches


class Loop:
    """Parameters and caches of one worker."""

    def __init__(self, params: _llama.Params):
        """Keeps the parameters; caches are made for the first batch of each shape and used again."""
        self.params = params
        self.caches = {}

    def generate(self, prompts: list[list[int]], max_new_tokens: int) -> list[list[int]]:
        """Prefills row by row, then decodes all rows together."""
        lengths = np.array([len(prompt) for prompt in prompts], np.int32)
        steps = max_new_tokens - 1
        shape = (len(prompts), _llama.bucket(int(lengths.max()) + steps))
        caches = self.caches.pop(shape, None) or init_caches(*shape)
        first = []
        for row, prompt in enumerate(prompts):
            token, caches = prefill(self.params, caches, _llama.padded(prompt), len(prompt), row)
            first.append(token)
        tokens = jnp.stack(first)
        output = jnp.zeros((0, len(prompts)), jnp.int32)
        if steps > 0:
            output, caches = decode(self.params, caches, tokens, lengths, steps=steps)
        self.caches[shape] = caches
        return np.concatenate([np.asarray(tokens)[None], np.asarray(output)]).T.tolist()


def load():
    """Reads the command line and the weights."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gguf", required=True)
    loop = Loop(_llama.load_params(parser.parse_args().gguf))
    return loop.generate, _common.package_versions("jax", "jaxlib", "numpy", "gguf"), {"capacity": "power of two"}


if __name__ == "__main__":
    _workers.serve(load)
