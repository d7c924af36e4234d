"""Worker: transformers on the CPU, float32: `generate`, or `generate_batch` (its paged continuous batching).

Runs in an environment of its own (make_rival_env.sh).
"""

import argparse
import logging
import pathlib

import _common
import _workers
import torch
import transformers

PAD = 2
MAX_TOKENS_IN_CACHE = 16384


def build_generate(model) -> _workers.Generate:
    """Returns a function that pads the prompts on the left and calls `model.generate`."""

    def generate(prompts: list[list[int]], max_new_tokens: int) -> list[list[int]]:
        width = max(len(prompt) for prompt in prompts)
        token_ids = torch.tensor([[PAD] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        with torch.inference_mode():
            output = model.generate(token_ids, attention_mask=mask, max_new_tokens=max_new_tokens)
        return output[:, width:].tolist()

    return generate


def build_generate_batch(model, page_size: int) -> _workers.Generate:
    """Returns a function that calls `model.generate_batch` with one persistent manager."""
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)  # it warns at every call
    config = transformers.ContinuousBatchingConfig(
        page_size=page_size,
        num_blocks=MAX_TOKENS_IN_CACHE // page_size,
        max_batch_tokens=2048,
        auto_switch_to_flash=False,
    )

    def generate(prompts: list[list[int]], max_new_tokens: int) -> list[list[int]]:
        results = model.generate_batch(
            prompts,
            continuous_batching_config=config,
            max_new_tokens=max_new_tokens,
            persistent_manager=True,
        )
        return [result.generated_tokens for result in results.values()]

    return generate


def load():
    """Reads the command line and the weights."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gguf", required=True, type=pathlib.Path)
    parser.add_argument("--api", choices=("generate", "generate_batch"), required=True)
    parser.add_argument("--attention", choices=("sdpa", "paged|eager"), default="sdpa")
    parser.add_argument("--page-size", type=int, default=16)
    arguments = parser.parse_args()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        arguments.gguf.parent,
        gguf_file=arguments.gguf.name,
        dtype=torch.float32,
        attn_implementation=arguments.attention,
    ).eval()
    # Greedy, never stopped early; the batching API takes a number that no token has for "no end".
    end = -1 if arguments.api == "generate_batch" else None
    model.generation_config = transformers.GenerationConfig(do_sample=False, eos_token_id=end, pad_token_id=PAD)
    settings = {"api": arguments.api, "attention": arguments.attention, "threads": torch.get_num_threads()}
    versions = _common.package_versions("torch", "transformers", "numpy", "gguf")
    if arguments.api == "generate":
        return build_generate(model), versions, settings
    return build_generate_batch(model, arguments.page_size), versions, {**settings, "page_size": arguments.page_size}


if __name__ == "__main__":
    _workers.serve(load)
