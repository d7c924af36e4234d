"""The loop without an engine: prefill two rows, then many decode steps per dispatch until all is done."""

import jax
import jax.numpy as jnp
import numpy as np

from examples.own_model import CACHE, VOCAB, forward, init_params
from paged_jax import PrefillPlan, Status, decode_many, init_state, prefill_step, release_rows, seed_words


def main() -> None:
    """Two prompts, 24 greedy or sampled tokens each."""
    prompts = [[1, 2, 3], [7] * 20]
    params, state = init_params(jax.random.key(0)), init_state(CACHE)

    rows = jax.tree.map(np.array, state.rows)  # parameters of all rows, as NumPy arrays to fill in
    rows.num_remaining[:2] = 24
    rows.sampling.temperature[1] = 0.8  # row 0 stays greedy
    rows.sampling.seed[1] = seed_words(1)
    counts = np.zeros(CACHE.max_num_seqs, np.int32)
    counts[:2] = [len(p) for p in prompts]
    tokens = np.zeros(32, np.int32)
    tokens[: counts.sum()] = np.concatenate(prompts)
    plan = PrefillPlan(
        token_ids=jnp.asarray(tokens),
        num_new_tokens=jnp.asarray(counts),
        is_last=jnp.asarray(counts > 0),
        rows=jax.tree.map(jnp.asarray, rows),
    )

    state, output = prefill_step(forward, params, state, plan)
    generated = [[int(output.token_ids[r, 0])] for r in range(2)]
    while state.is_active.any() and output.status == Status.OK:
        state, output = decode_many(forward, params, state, num_steps=8, num_rows=2, vocab_size=VOCAB)
        for row, mine in enumerate(generated):
            mine += np.asarray(output.token_ids)[row, : int(output.num_tokens[row])].tolist()
    if output.status == Status.OUT_OF_BLOCKS:  # no token is lost: make room, call decode_many again
        state, _ = release_rows(state, np.arange(CACHE.max_num_seqs) == 1)
    for prompt, mine in zip(prompts, generated, strict=True):
        print(f"{prompt} -> {mine}")
    print(f"{int(output.num_free)} blocks free")


if __name__ == "__main__":
    main()
