"""A model of your own over the paged cache: once in plain JAX, once as a Flax module. Random weights."""

import jax
import jax.numpy as jnp
from flax import nnx

from paged_jax import LLM, CacheConfig, KVCache, SamplingParams, StepBatch, attend

VOCAB, WIDTH, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 128, 64, 4, 2, 16, 2
QKV = (HEADS + 2 * KV_HEADS) * HEAD_DIM

CACHE = CacheConfig(
    num_blocks=64, block_size=8, num_layers=LAYERS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, max_blocks_per_seq=16
)


# -- plain JAX: any pure function with this signature is a model -----------------------------------------------------


def init_params(key: jax.Array) -> dict[str, jax.Array]:
    """Weights, stacked over layers."""
    k = jax.random.split(key, 4)
    return {
        "embedding": jax.random.normal(k[0], (VOCAB, WIDTH)),
        "position": jax.random.normal(k[1], (CACHE.max_model_len, WIDTH)),
        "qkv": jax.random.normal(k[2], (LAYERS, WIDTH, QKV)) * WIDTH**-0.5,
        "out": jax.random.normal(k[3], (LAYERS, HEADS * HEAD_DIM, WIDTH)) * WIDTH**-0.5,
    }


def split_heads(qkv: jax.Array) -> list[jax.Array]:
    """[T, QKV] -> q [T, HEADS, HEAD_DIM], k and v [T, KV_HEADS, HEAD_DIM]."""
    return jnp.split(qkv.reshape(-1, HEADS + 2 * KV_HEADS, HEAD_DIM), [HEADS, HEADS + KV_HEADS], axis=1)


def forward(params: dict[str, jax.Array], batch: StepBatch, cache: KVCache) -> tuple[jax.Array, KVCache]:
    """(logits of batch.logits_indices, cache): prefill chunks and decode steps alike."""
    x = params["embedding"][batch.token_ids] + params["position"][batch.positions]
    for i in range(LAYERS):
        q, k, v = split_heads(x @ params["qkv"][i])
        out, layer = attend(cache.layer(i), q, k, v, batch)  # stores k and v, then attends
        cache = cache.with_layer(i, layer)
        x = x + out.reshape(len(x), -1) @ params["out"][i]
    return x[batch.logits_indices] @ params["embedding"].T, cache


# -- Flax: a module is a container of weights; split it once, merge it inside ----------------------------------------


class Block(nnx.Module):
    """Attention and a residual connection."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.qkv = nnx.Linear(WIDTH, QKV, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(HEADS * HEAD_DIM, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array, batch: StepBatch, cache: KVCache, index: int) -> tuple[jax.Array, KVCache]:
        q, k, v = split_heads(self.qkv(self.norm(x)))
        out, layer = attend(cache.layer(index), q, k, v, batch)
        return x + self.out(out.reshape(len(x), -1)), cache.with_layer(index, layer)


class Decoder(nnx.Module):
    """Embedding, blocks, tied head."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embedding = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.position = nnx.Embed(CACHE.max_model_len, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])

    def __call__(self, batch: StepBatch, cache: KVCache) -> tuple[jax.Array, KVCache]:
        x = self.embedding(batch.token_ids) + self.position(batch.positions)
        for i, block in enumerate(self.blocks):
            x, cache = block(x, batch, cache, i)
        return self.embedding.attend(x[batch.logits_indices]), cache


def main() -> None:
    """Generates with both."""
    prompts = [{"prompt_token_ids": [1, 2, 3]}, {"prompt_token_ids": [7] * 20}]
    params = SamplingParams(temperature=0.8, top_p=0.9, seed=1, max_tokens=12)

    plain = LLM(forward, init_params(jax.random.key(0)), CACHE)
    graph, weights = nnx.split(Decoder(nnx.Rngs(0)))
    flax = LLM(lambda weights, batch, cache: nnx.merge(graph, weights)(batch, cache), weights, CACHE)

    for name, llm in (("plain JAX", plain), ("Flax", flax)):
        for output in llm.generate(prompts, params, use_tqdm=False):
            print(f"{name}: {output.prompt_token_ids} -> {output.outputs[0].token_ids}")


if __name__ == "__main__":
    main()
