"""The progress bar of `LLM.generate` and `LLM.beam_search`, with the look that users of other engines know."""

from paged_jax.outputs import BeamSearchOutput, RequestOutput


class Progress:
    """A context manager around a tqdm bar; does nothing when disabled or where tqdm is not installed."""

    def __init__(self, total: int, *, enabled: bool) -> None:
        self._bar = None
        self._num_prompt_tokens = self._num_tokens = 0
        if enabled:
            try:
                from tqdm.auto import tqdm
            except ImportError:
                return
            self._bar = tqdm(total=total, desc="Processed prompts", dynamic_ncols=True)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def update(self, output: RequestOutput | BeamSearchOutput) -> None:
        """Counts one finished request."""
        if self._bar is None:
            return
        self._num_prompt_tokens += len(output.prompt_token_ids)
        self._num_tokens += sum(len(o.token_ids) for o in output.outputs)
        elapsed = max(self._bar.format_dict["elapsed"], 1e-9)
        self._bar.set_postfix_str(
            f"est. speed input: {self._num_prompt_tokens / elapsed:.2f} toks/s, "
            f"output: {self._num_tokens / elapsed:.2f} toks/s",
            refresh=False,
        )
        self._bar.update(1)
