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


def build_generate_batch(model, page_size: int, max_tokens_in_cache: int) -> _workers.Generate:
    """Returns a function that calls `model.generate_batch` with one persistent manager.

    Where each prompt has a length of its own, which `generate_batch` does not take, it does what that does.
    """
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)  # it warns at every call
    config = transformers.ContinuousBatchingConfig(
        page_size=page_size,
        num_blocks=max_tokens_in_cache // page_size,
        max_batch_tokens=2048,
        auto_switch_to_flash=False,
    )

    def generate_ragged(prompts: list[list[int]], max_new_tokens: list[int]) -> list[list[int]]:
        results = {}
        with model.continuous_batching_context_manager(
            continuous_batching_config=config, persistent_manager=True, timeout=5
        ) as manager:
            ids = [
                manager.add_request(prompt, max_new_tokens=count)
                for prompt, count in zip(prompts, max_new_tokens, strict=True)
            ]
            while len(results) < len(ids):
                result = manager.get_result(timeout=1)
                if result is None and not manager.is_running():
                    raise RuntimeError("the generation thread has ended")
                if result is not None and result.is_finished():
                    results[result.request_id] = result.generated_tokens
        return [results[i] for i in ids]

    def generate(prompts: list[list[int]], max_new_tokens: int | list[int]) -> list[list[int]]:
        if isinstance(max_new_tokens, list):
            return generate_ragged(prompts, max_new_tokens)
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
    parser.add_argument("--max-tokens-in-cache", type=int, default=16384)
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
    settings |= {"page_size": arguments.page_size, "max_tokens_in_cache": arguments.max_tokens_in_cache}
    return build_generate_batch(model, arguments.page_size, arguments.max_tokens_in_cache), versions, settings


if __name__ == "__main__":
    _workers.serve(load)
