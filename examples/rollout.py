"""Reinforcement learning in one process: the engine generates, optax trains, both on the very same arrays.

A tiny Llama with random weights learns to write one token as often as it can (REINFORCE). The log-probabilities that
the engine returns are those of the model that trains, so an off-policy correction would need nothing else.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from models.llama import LlamaConfig, LlamaForward, init_params
from paged_jax import LLM, CacheConfig, SamplingParams, append_tokens, build_ragged_batch, init_state

CONFIG = LlamaConfig(
    vocab_size=32, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8
)
FORWARD = LlamaForward(CONFIG)
END, TARGET = 0, 7  # the token that ends a text, and the one to write
MAX_TOKENS = 12


def cache_config(num_rows: int, num_tokens: int) -> CacheConfig:
    """Room for num_rows rows of num_tokens tokens."""
    width = -(-num_tokens // 4)
    return CacheConfig(
        num_blocks=1 + num_rows * width,
        block_size=4,
        num_layers=CONFIG.num_layers,
        num_kv_heads=CONFIG.num_kv_heads,
        head_dim=CONFIG.head_dim,
        max_num_seqs=num_rows,
        max_blocks_per_seq=width,
    )


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Rollout:
    """What the engine wrote.

    Attributes:
        token_ids: int32 [n, T] prompts and generated tokens, then zeros.
        prompt_lens, seq_lens: int32 [n] tokens of the prompt, and of all.
        logprobs: float32 [n, T] raw log-probability of each generated token given all before it, 0 elsewhere.
    """

    token_ids: np.ndarray | jax.Array
    prompt_lens: np.ndarray | jax.Array
    seq_lens: np.ndarray | jax.Array
    logprobs: np.ndarray | jax.Array


def roll_out(llm: LLM, prompts: list[list[int]], num_samples: int) -> Rollout:
    """num_samples continuations of each prompt; every call draws others."""
    params = SamplingParams(n=num_samples, temperature=1.0, max_tokens=MAX_TOKENS, logprobs=0)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    samples = [(o.prompt_token_ids, s) for o in outputs for s in o.outputs]
    shape = len(samples), max(map(len, prompts)) + MAX_TOKENS
    token_ids, logprobs = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
    for row, (prompt, sample) in enumerate(samples):
        start, end = len(prompt), len(prompt) + len(sample.token_ids)
        token_ids[row, :end] = [*prompt, *sample.token_ids]
        entries = zip(sample.token_ids, sample.logprobs or (), strict=True)
        logprobs[row, start:end] = [entry[token].logprob for token, entry in entries]
    prompt_lens = np.array([len(prompt) for prompt, _ in samples], np.int32)
    seq_lens = np.array([len(prompt) + len(sample.token_ids) for prompt, sample in samples], np.int32)
    return Rollout(token_ids=token_ids, prompt_lens=prompt_lens, seq_lens=seq_lens, logprobs=logprobs)


def teacher_forced(params: Any, rollout: Rollout) -> jax.Array:
    """float32 [n, T] log-probability of each generated token by one forward pass over whole sequences, 0 elsewhere.

    The model and its attention are those of the engine: here all rows store all their tokens in one step. The
    attention is the reference in plain JAX, which can be differentiated.
    """
    num_rows, num_tokens = rollout.token_ids.shape
    state = init_state(cache_config(num_rows, num_tokens))
    counts = jnp.full(num_rows, num_tokens, jnp.int32)  # padding comes last: causality makes it harmless
    token_ids = jnp.asarray(rollout.token_ids)
    _, table, appended = append_tokens(state.pool, state.table, counts, max_new_tokens=token_ids.size)
    batch = build_ragged_batch(table, appended, counts, token_ids.reshape(-1), implementation="reference")
    batch = replace(batch, logits_indices=jnp.arange(token_ids.size, dtype=jnp.int32))
    logits, _ = FORWARD(params, batch, state.cache)
    logprobs = jax.nn.log_softmax(logits).reshape(num_rows, num_tokens, -1)
    chosen = jnp.take_along_axis(logprobs[:, :-1], token_ids[:, 1:, None], axis=2)[..., 0]
    return jnp.where(is_generated(rollout), jnp.pad(chosen, ((0, 0), (1, 0))), 0.0)


def is_generated(rollout: Rollout) -> jax.Array:
    """bool [n, T]."""
    position = jnp.arange(rollout.token_ids.shape[1])[None]
    return (position >= rollout.prompt_lens[:, None]) & (position < rollout.seq_lens[:, None])


def rewards(rollout: Rollout) -> jax.Array:
    """float32 [n] share of TARGET among the generated tokens."""
    hits = jnp.where(is_generated(rollout), rollout.token_ids == TARGET, False)
    return jnp.sum(hits, axis=1, dtype=jnp.float32) / (rollout.seq_lens - rollout.prompt_lens)


@partial(jax.jit, static_argnames="optimizer")
def train_step(params: Any, opt_state: Any, rollout: Rollout, optimizer: optax.GradientTransformation) -> tuple:
    """One step of REINFORCE with the mean reward as the baseline; returns (params, opt_state)."""
    advantages = rewards(rollout) - jnp.mean(rewards(rollout))

    def loss(params: Any) -> jax.Array:
        return -jnp.mean(advantages * jnp.sum(teacher_forced(params, rollout), axis=1))

    updates, opt_state = optimizer.update(jax.grad(loss)(params), opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def train(num_rounds: int, num_samples: int = 16) -> tuple[LLM, list[float]]:
    """Returns the engine with the trained weights, and the mean reward of each round."""
    prompts = [[1, 2, 3], [4, 5, 6, 8, 9]]
    params = init_params(CONFIG, nnx.Rngs(0))
    num_tokens = max(map(len, prompts)) + MAX_TOKENS
    llm = LLM(FORWARD, params, cache_config(2 * num_samples, num_tokens), eos_token_ids=END, decode_steps=MAX_TOKENS)
    optimizer = optax.adam(0.02)
    opt_state, mean_rewards = optimizer.init(params), []
    for _ in range(num_rounds):
        rollout = roll_out(llm, prompts, num_samples)
        mean_rewards.append(float(jnp.mean(rewards(rollout))))
        params, opt_state = train_step(params, opt_state, rollout, optimizer)
        llm.update_params(params)
    return llm, mean_rewards


def main() -> None:
    """Trains, and shows what the engine writes then."""
    llm, mean_rewards = train(num_rounds=6)
    print("mean reward of each round:", *(f"{reward:.2f}" for reward in mean_rewards))
    rollout = roll_out(llm, [[1, 2, 3]], num_samples=2)
    for row, length in zip(rollout.token_ids.tolist(), rollout.seq_lens, strict=True):
        print(f"{row[:3]} -> {row[3:length]}")
    difference = np.abs(teacher_forced(llm.core.runner.params, rollout) - rollout.logprobs).max()
    print(f"log-probabilities differ from a teacher-forced pass by {difference:.1e} at most")


if __name__ == "__main__":
    main()
