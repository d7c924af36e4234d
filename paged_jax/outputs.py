"""What generation returns, and how it is made of tokens."""

from dataclasses import dataclass

from paged_jax.logprobs import Logprob
from paged_jax.metrics import RequestMetrics


@dataclass(frozen=True, kw_only=True)
class CompletionOutput:
    """One generated continuation.

    Attributes:
        index: number of the continuation among its request's.
        text: the generated text, without the prompt; "" without a tokenizer or with detokenize=False. It ends before
            the stop string or stop token that ended it, or behind it with include_stop_str_in_output.
        token_ids: generated tokens; the stop token that ended it, or the token that completed the stop string, is the
            last one.
        finish_reason: "stop" (a stop string, stop token or end-of-sequence token), "length", or "error" (see the
            request's `error`); None while it goes on.
        stop_reason: the string from stop or the id from stop_token_ids that ended it; None for the end-of-sequence
            token and other reasons.
        logprobs: for each of token_ids its own log-probability and those of the most likely tokens, by token id; None
            if SamplingParams.logprobs is.
        cumulative_logprob: sum of the log-probabilities of all tokens generated so far; None like logprobs.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """The result of one prompt.

    Attributes:
        request_id: as given or numbered by the engine.
        prompt: the text, if the prompt was text.
        prompt_token_ids: the prompt's tokens; empty if it failed before it had any.
        outputs: the continuations, as many as SamplingParams.n, in the order of their index.
        finished: True when nothing more will come.
        num_cached_tokens: prompt tokens whose K/V were found in the prefix cache.
        metrics: when things happened to it; None if it failed before it was queued.
        prompt_logprobs: for each of prompt_token_ids its own log-probability, by the model's logits, and those of the
            most likely tokens; None for the first one. None if SamplingParams.prompt_logprobs is.
        error: why this request failed alone, None if it did not.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    error: Exception | None = None


@dataclass(frozen=True, kw_only=True)
class BeamSequence:
    """One sequence that a beam search found.

    Attributes:
        token_ids: generated tokens; an end-of-sequence token that ended it is the last one.
        text: the generated text, without the prompt; "" without a tokenizer.
        cumulative_logprob: sum of the log-probabilities of token_ids.
        score: cumulative_logprob / number of tokens ** length_penalty.
        finish_reason: "stop" (an end-of-sequence token) or "length".
    """

    token_ids: list[int]
    text: str
    cumulative_logprob: float
    score: float
    finish_reason: str


@dataclass(frozen=True, kw_only=True)
class BeamSearchOutput:
    """The result of one prompt's beam search.

    Attributes:
        prompt: the text, if the prompt was text.
        prompt_token_ids: the prompt's tokens; empty if it failed before it had any.
        outputs: beam_width sequences, best score first; fewer if fewer have a probability above 0, none after an error.
        error: why this prompt failed alone, None if it did not.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[BeamSequence]
    error: Exception | None = None


def failed_output(request_id: str, prompt: object, error: Exception) -> RequestOutput:
    """The result of a prompt that never became a request."""
    return RequestOutput(
        request_id=request_id,
        prompt=prompt if isinstance(prompt, str) else None,
        prompt_token_ids=[],
        outputs=[CompletionOutput(index=0, text="", token_ids=[], finish_reason="error")],
        finished=True,
        error=error,
    )
