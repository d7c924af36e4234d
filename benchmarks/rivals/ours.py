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
    parser.add_argument("--max-num-batched-tokens", type=int)
    parser.add_argument("--num-blocks", type=int)
    parser.add_argument("--decode-steps", type=int, default=32)
    parser.add_argument("--static", action="store_true", help="max_num_seqs requests at a time, until all have ended")
    settings = {"dtype": "float32", **vars(parser.parse_args())}
    is_static = settings.pop("static")
    llm = LLM.from_pretrained("smollm2", **settings)

    def generate(prompts: list[list[int]], max_new_tokens: int | list[int]) -> list[list[int]]:
        lengths = max_new_tokens if isinstance(max_new_tokens, list) else [max_new_tokens] * len(prompts)
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
        prompts = [{"prompt_token_ids": prompt} for prompt in prompts]
        size, outputs = settings["max_num_seqs"] if is_static else len(prompts), []
        for start in range(0, len(prompts), size):
            group = slice(start, start + size)
            outputs += llm.generate(prompts[group], params[group], use_tqdm=False)
        return [list(map(int, output.outputs[0].token_ids)) for output in outputs]

    return generate, _common.package_versions("jax", "jaxlib", "flax", "numpy"), settings | {"is_static": is_static}


if __name__ == "__main__":
    _workers.serve(load)
