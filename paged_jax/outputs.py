"""What generation returns."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CompletionOutput:
    """One generated continuation.

    Attributes:
        index: number of the continuation among its request's.
        text: the generated text, without the prompt; "" without a tokenizer or with detokenize=False.
        token_ids: generated tokens; a stop token that ended it is the last one.
        finish_reason: "stop" (a stop or end-of-sequence token), "length", "abort", or "error" (see the request's
            `error`).
        stop_reason: the id from stop_token_ids that ended it; None for the end-of-sequence token and other reasons.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: int | None = None


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """The result of one prompt.

    Attributes:
        request_id: as given or numbered by the engine.
        prompt: the text, if the prompt was text.
        prompt_token_ids: the prompt's tokens; empty if it failed before it had any.
        outputs: the continuations.
        finished: True when nothing more will come.
        error: why this request failed alone, None if it did not.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    error: Exception | None = None
