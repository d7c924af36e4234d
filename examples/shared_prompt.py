"""Questions behind one system prompt: computed for the first of them, found in the prefix cache by the others."""

from paged_jax import LLM, SamplingParams

SYSTEM = (
    "<|im_start|>system\nYou are the information desk of a railway station. Answer in one short sentence. Trains to "
    "the coast leave from platform 4 at every full hour, trains to the mountains from platform 7 at half past, "
    "and the night train leaves from platform 1 at 23:15. Tickets are sold at the counter until 22:00 and at the "
    "machines at all times. Bicycles travel free of charge after 9:00.<|im_end|>\n"
)
QUESTIONS = [
    "When does the next train to the coast leave?",
    "Which platform does the night train leave from?",
    "May I take my bicycle at ten o'clock?",
]


def prompt_of(question: str) -> str:
    """The question in the model's chat format."""
    return f"{SYSTEM}<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def main(llm: LLM | None = None) -> None:
    """Asks the questions one after the other and shows what was cached."""
    llm = llm or LLM.from_pretrained("smollm2", max_model_len=512, max_num_seqs=4)
    params = SamplingParams(temperature=0, max_tokens=24)
    for question in QUESTIONS:
        (output,) = llm.generate(prompt_of(question), params, use_tqdm=False)
        num_tokens = len(output.prompt_token_ids)
        print(f"{question}\n  {output.outputs[0].text!r}\n  {output.num_cached_tokens} of {num_tokens} tokens cached")

    prompt = prompt_of(QUESTIONS[0])
    (private,) = llm.generate({"prompt": prompt, "cache_salt": "another tenant"}, params, use_tqdm=False)
    print(f"with a cache_salt of its own: {private.num_cached_tokens} cached")
    (cached,) = llm.generate(prompt, params, use_tqdm=False)
    llm.reset_prefix_cache()
    (again,) = llm.generate(prompt, params, use_tqdm=False)
    print(
        f"after reset_prefix_cache(): {again.num_cached_tokens} cached, same answer: {again.outputs == cached.outputs}"
    )


if __name__ == "__main__":
    main()
