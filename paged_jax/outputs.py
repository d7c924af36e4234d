"""What generation returns, and how it is made of tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paged_jax.detokenizer import Detokenizer
from paged_jax.logprobs import Logprob, cumulative_logprob, with_text
from paged_jax.sampling_params import RequestOutputKind
from paged_jax.scheduler import Request, RequestState, Sample
from paged_jax.state import FinishReason

_FINISH_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ERROR: "error",
    FinishReason.NO_TOKEN: "error",
}


@dataclass(frozen=True, kw_only=True)
class CompletionOutput:
    """One generated continuation.

    Attributes:
        index: number of the continuation among its request's.
        text: the generated text, without the prompt; "" without a tokenizer or with detokenize=False.
        token_ids: generated tokens; a stop token that ended it is the last one.
        finish_reason: "stop" (a stop or end-of-sequence token), "length", or "error" (see the request's
            `error`); None while it goes on.
        stop_reason: the id from stop_token_ids that ended it; None for the end-of-sequence token and other reasons.
        logprobs: for each of token_ids its own log-probability and those of the most likely tokens, by token id; None
            if SamplingParams.logprobs is.
        cumulative_logprob: sum of the log-probabilities of all tokens generated so far; None like logprobs.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | None = None
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


def request_output(state: RequestState, tokenizer: Any | None) -> RequestOutput:
    """What the request has so far, or since its last output if it asked for that."""
    request, completions, errors = state.request, [], []
    for index, sample in enumerate(state.samples):
        completion, error = _completion(request, index, sample, tokenizer)
        completions.append(completion)
        errors.append(error)
    prompt_logprobs, error = _prompt_logprobs(state, tokenizer)
    return RequestOutput(
        request_id=request.request_id,
        prompt=request.prompt,
        prompt_token_ids=list(request.prompt_token_ids),
        outputs=completions,
        finished=not state.live_samples,
        num_cached_tokens=state.num_cached_tokens or 0,
        prompt_logprobs=prompt_logprobs,
        error=next((error for error in [*errors, error] if error), None),
    )


def _prompt_logprobs(
    state: RequestState, tokenizer: Any | None
) -> tuple[list[dict[int, Logprob] | None] | None, Exception | None]:
    error, params = None, state.request.params
    if params.prompt_logprobs is None:
        return None, None
    if tokenizer is not None and params.detokenize:
        try:
            state.prompt_logprobs = {i: with_text(entry, tokenizer) for i, entry in state.prompt_logprobs.items()}
        except Exception as failure:  # foreign code: its failure must not touch other requests
            error = failure
    return [None, *(state.prompt_logprobs[i] for i in range(1, len(state.request.prompt_token_ids)))], error


def _completion(
    request: Request, index: int, sample: Sample, tokenizer: Any | None
) -> tuple[CompletionOutput, Exception | None]:
    text, error, finish, token_ids = "", None, sample.finish, sample.token_ids
    if finish == FinishReason.ERROR:
        error = FloatingPointError(
            f"the model's logits after {len(request.prompt_token_ids) + len(token_ids)} tokens were not finite; look "
            "for NaN or inf in the weights, or a dtype that overflows"
        )
    if finish == FinishReason.NO_TOKEN:
        error = ValueError(
            f"allowed_token_ids, bad_words and min_tokens leave no token to generate after {len(token_ids)} tokens; "
            "loosen one of them"
        )
    if tokenizer is not None and request.params.detokenize:
        try:
            text = _decode(tokenizer, request, token_ids)
            sample.logprobs = [with_text(entry, tokenizer) for entry in sample.logprobs]
        except Exception as failure:  # foreign code: its failure must not touch other requests
            error, finish = failure, FinishReason.ERROR
    stopped_by = token_ids[-1] if finish == FinishReason.STOP else None
    new = slice(sample.num_emitted, None) if request.params.output_kind == RequestOutputKind.DELTA else slice(None)
    sample.num_emitted = len(token_ids)
    completion = CompletionOutput(
        index=index,
        text=text,
        token_ids=token_ids[new],
        finish_reason=_FINISH_REASONS.get(finish),
        stop_reason=stopped_by if stopped_by in request.params.stop_token_ids else None,
        logprobs=None if request.params.logprobs is None else sample.logprobs[new],
        cumulative_logprob=None
        if request.params.logprobs is None
        else cumulative_logprob(sample.logprobs, sample.token_ids),
    )
    return completion, error


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


def _decode(tokenizer: Any, request: Request, token_ids: Sequence[int]) -> str:
    detokenizer = Detokenizer(tokenizer, request.prompt_token_ids, request.params.skip_special_tokens)
    return detokenizer.push(token_ids) + detokenizer.finish()
