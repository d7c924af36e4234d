"""Beam search: the most likely continuations of several prompts, over shared blocks."""

import jax

from examples.own_model import CACHE, forward, init_params
from paged_jax import LLM, BeamSearchParams


def main() -> None:
    """Two prompts, four beams each."""
    prompts = [{"prompt_token_ids": [1, 2, 3]}, {"prompt_token_ids": [7] * 20}]
    params = BeamSearchParams(beam_width=4, max_tokens=12)
    llm = LLM(forward, init_params(jax.random.key(0)), CACHE)

    for output in llm.beam_search(prompts, params, use_tqdm=False):
        for sequence in output.outputs:  # best first
            print(f"{output.prompt_token_ids} -> {sequence.token_ids}: score {sequence.score:.3f}")

    lengths = [len(prompt["prompt_token_ids"]) + params.max_tokens - 1 for prompt in prompts]
    alone = params.beam_width * sum(CACHE.num_blocks_for(length) for length in lengths)
    print(f"at most {llm.peak_blocks} blocks in use; without sharing it would have been {alone}")


if __name__ == "__main__":
    main()
