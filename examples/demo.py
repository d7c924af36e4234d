"""Continues several prompts of different lengths with SmolLM2 and shows speed and pool occupancy: `make demo`."""

import time

from paged_jax import LLM, SamplingParams

PROMPTS = [
    "The capital of France is",
    "Once upon a time there was a dragon who",
    "def fibonacci(n):\n",
    "<|im_start|>user\nExplain in one sentence what a paged key-value cache is good for.<|im_end|>\n"
    "<|im_start|>assistant\n",
    "Water boils at 100 degrees Celsius at sea level. On a high mountain the air pressure is lower, and therefore",
]


def main() -> None:
    """Loads, compiles, generates, reports."""
    print("Loading SmolLM2-135M-Instruct ...")
    llm = LLM.from_pretrained("smollm2", max_model_len=1024, max_num_seqs=8)
    params = SamplingParams(temperature=0, max_tokens=48)
    print("Compiling ...")
    llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)

    start = time.perf_counter()
    outputs = llm.generate(PROMPTS, params)
    seconds = time.perf_counter() - start
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        print(f"\n{'-' * 80}\n{prompt}\033[1m{output.outputs[0].text}\033[0m  [{output.outputs[0].finish_reason}]")

    num_tokens = sum(len(o.outputs[0].token_ids) for o in outputs)
    capacity = llm.cache_config.num_blocks - 1
    print(
        f"\n{'-' * 80}\n{num_tokens} tokens in {seconds:.2f} s: {num_tokens / seconds:.0f} tokens/s\n"
        f"K/V pool: at most {llm.peak_blocks} of {capacity} blocks of {llm.cache_config.block_size} tokens in use "
        f"({llm.peak_blocks / capacity:.1%}), {llm.num_free_blocks} free at the end"
    )


if __name__ == "__main__":
    main()
