"""Worker: paged_jax through its public interface."""

import argparse

import _common
import _workers

from paged_jax import LLM, SamplingParams


def load():
    """Reads the command line and the weights."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-model-len", type=int, default=512)
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--decode-steps", type=int, default=32)
    arguments = parser.parse_args()
    settings = {"dtype": "float32", **vars(arguments)}
    llm = LLM.from_pretrained("smollm2", **settings)

    def generate(prompts: list[list[int]], max_new_tokens: int) -> list[list[int]]:
        params = SamplingParams(temperature=0, max_tokens=max_new_tokens, ignore_eos=True)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return [list(map(int, output.outputs[0].token_ids)) for output in outputs]

    return generate, _common.package_versions("jax", "jaxlib", "flax", "numpy"), settings


if __name__ == "__main__":
    _workers.serve(load)
