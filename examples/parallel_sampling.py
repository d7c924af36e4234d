"""Several samples of one prompt: it is computed once, and its full blocks are shared."""

from paged_jax import LLM, SamplingParams, sample_seed


def main(llm: LLM | None = None) -> None:
    """Four continuations of one prompt, then the third of them as a request of its own."""
    llm = llm or LLM.from_pretrained("smollm2", max_model_len=512, max_num_seqs=4)
    prompt = "The little robot opened the door of the old library and"
    params = SamplingParams(n=4, temperature=0.8, top_p=0.95, seed=7, max_tokens=24)
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    for sample in output.outputs:
        print(f"[{sample.index}]{sample.text!r}")
    copies = llm.block_counters["copies"]
    print(f"{len(output.prompt_token_ids)} prompt tokens stored once; {copies} blocks copied on write")

    third = SamplingParams(temperature=0.8, top_p=0.95, seed=sample_seed(7, 2), max_tokens=24)
    (alone,) = llm.generate(prompt, third, use_tqdm=False)
    print(f"sample 2 alone is the same: {alone.outputs[0].token_ids == output.outputs[2].token_ids}")


if __name__ == "__main__":
    main()
