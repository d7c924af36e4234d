"""From the tokens that a dispatch brought to what the user sees: text, stop strings, times."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from paged_jax.engine_core import EngineCore
from paged_jax.logprobs import Logprob, cumulative_logprob, with_text
from paged_jax.metrics import Metrics, RequestMetrics
from paged_jax.outputs import CompletionOutput, RequestOutput
from paged_jax.sampling_params import RequestOutputKind
from paged_jax.scheduler import Request, RequestState, Sample
from paged_jax.state import FinishReason
from paged_jax.text_stream import TextStream

_FINISH_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ERROR: "error",
    FinishReason.NO_TOKEN: "error",
}


@dataclass(kw_only=True)
class _SampleView:
    """What the user gets of a sample.

    Attributes:
        text: None before its first tokens, and if there shall be none.
        num_read: tokens that `text` and the metrics have taken.
        num_emitted: tokens that the user has seen.
        is_ended: its end has been noted.
        error: why it ended, if that was an error.
        first_time, last_time: of `time.monotonic`, when its first and its latest token arrived.
    """

    text: TextStream | None = None
    num_read: int = 0
    num_emitted: int = 0
    is_ended: bool = False
    error: Exception | None = None
    first_time: float | None = None
    last_time: float | None = None


@dataclass(kw_only=True)
class _RequestView:
    """What the user gets of a request; `tokenizer` is None if there shall be no text; `error` is of its prompt."""

    arrival_time: float
    tokenizer: Any | None
    samples: list[_SampleView]
    error: Exception | None = None


class OutputProcessor:
    """Turns the progress of requests into outputs, and ends samples at their stop strings.

    Of a request it keeps what it needs as long as the request lives.
    """

    def __init__(self, core: EngineCore, metrics: Metrics) -> None:
        self._core = core
        self._metrics = metrics
        self._views: WeakKeyDictionary[RequestState, _RequestView] = WeakKeyDictionary()

    def add(self, state: RequestState, tokenizer: Any | None) -> None:
        """Expects the progress of a request that has just been queued."""
        if not state.request.params.detokenize:
            tokenizer = None
        samples = [_SampleView() for _ in state.samples]
        self._views[state] = _RequestView(arrival_time=time.monotonic(), tokenizer=tokenizer, samples=samples)

    def process(self, changed: Sequence[RequestState], *, final_only: bool = False) -> list[RequestOutput]:
        """What the requests have that got tokens or finished with a dispatch.

        Args:
            changed: the requests.
            final_only: only of those that have finished; otherwise of those that want it now, see
                SamplingParams.output_kind.
        """
        now, outputs = time.monotonic(), []
        for state in changed:
            view = self._views[state]
            for sample, sample_view in zip(state.samples, view.samples, strict=True):
                if sample_view.is_ended:
                    continue
                self._read(state, sample, sample_view, now)
                if sample.finish != FinishReason.NONE:
                    sample_view.is_ended = True
                    self._metrics.on_finished(_FINISH_REASONS[sample.finish], self._times(state, view, now))
            waits_for_end = final_only or state.request.params.output_kind == RequestOutputKind.FINAL_ONLY
            if not (waits_for_end and state.live_samples):
                outputs.append(self._output(state, view, None if state.live_samples else now))
        return outputs

    def on_abort(self, state: RequestState) -> None:
        """Counts a request that is dropped."""
        view = self._views.get(state)
        if view is None:  # add() was interrupted
            return
        for _ in state.live_samples:
            self._metrics.on_finished("abort", self._times(state, view, time.monotonic()))

    def _read(self, state: RequestState, sample: Sample, view: _SampleView, now: float) -> None:
        """Takes the new tokens of a sample, and ends it if they complete a stop string or cannot be decoded."""
        if sample.finish == FinishReason.ERROR:
            view.error = FloatingPointError(
                f"the model's logits after {state.num_tokens(sample)} tokens were not finite; look for NaN or inf in "
                "the weights, or a dtype that overflows"
            )
        if sample.finish == FinishReason.NO_TOKEN:
            view.error = ValueError(
                f"allowed_token_ids, bad_words and min_tokens leave no token to generate after "
                f"{len(sample.token_ids)} tokens; loosen one of them"
            )
        try:
            self._read_text(state, sample, view)
        except Exception as error:  # foreign code: its failure must not touch other requests
            view.text, view.error = None, error
            self._core.end_sample(state, sample, FinishReason.ERROR, len(sample.token_ids))
        num_new = len(sample.token_ids) - view.num_read
        if num_new == 0:
            return
        view.num_read = len(sample.token_ids)
        if view.last_time is None:
            view.first_time = now
            self._metrics.on_first_token(now - self._views[state].arrival_time)
        else:
            self._metrics.on_tokens(now - view.last_time, num_new)
        view.last_time = now

    def _read_text(self, state: RequestState, sample: Sample, view: _SampleView) -> None:
        tokenizer = self._views[state].tokenizer
        if tokenizer is None:
            return
        if view.text is None:
            view.text = _text_stream(state.request, tokenizer)
        new = sample.token_ids[view.num_read :]
        sample.logprobs[view.num_read :] = [with_text(e, tokenizer) for e in sample.logprobs[view.num_read :]]
        if sample.finish == FinishReason.STOP and not state.request.params.include_stop_str_in_output:
            new = new[:-1]  # the stop token
        num_kept = view.text.push(new)
        if view.text.stopped_by is not None:
            self._core.end_sample(state, sample, FinishReason.STOP, view.num_read + num_kept)
        if sample.finish != FinishReason.NONE:
            view.text.finish()

    def _output(self, state: RequestState, view: _RequestView, finished_time: float | None) -> RequestOutput:
        request = state.request
        completions = [
            _completion(request, index, sample, sample_view)
            for index, (sample, sample_view) in enumerate(zip(state.samples, view.samples, strict=True))
        ]
        prompt_logprobs = _prompt_logprobs(state, view)
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=list(request.prompt_token_ids),
            outputs=completions,
            finished=not state.live_samples,
            num_cached_tokens=state.num_cached_tokens or 0,
            prompt_logprobs=prompt_logprobs,
            metrics=self._times(state, view, finished_time),
            error=next((v.error for v in [*view.samples, view] if v.error is not None), None),
        )

    def _times(self, state: RequestState, view: _RequestView, finished_time: float | None) -> RequestMetrics:
        return RequestMetrics(
            arrival_time=view.arrival_time,
            first_scheduled_time=state.start_time,
            first_token_time=min((v.first_time for v in view.samples if v.first_time is not None), default=None),
            last_token_time=max((v.last_time for v in view.samples if v.last_time is not None), default=None),
            finished_time=finished_time,
            num_preemptions=state.num_preemptions,
        )


def _text_stream(request: Request, tokenizer: Any) -> TextStream:
    params = request.params
    return TextStream(
        tokenizer,
        request.prompt_token_ids,
        stop=params.stop,
        min_tokens=params.min_tokens,
        include_stop_str_in_output=params.include_stop_str_in_output,
        skip_special_tokens=params.skip_special_tokens,
    )


def _prompt_logprobs(state: RequestState, view: _RequestView) -> list[dict[int, Logprob] | None] | None:
    if state.request.params.prompt_logprobs is None:
        return None
    if view.tokenizer is not None:
        try:
            state.prompt_logprobs = {i: with_text(e, view.tokenizer) for i, e in state.prompt_logprobs.items()}
        except Exception as error:  # foreign code: its failure must not touch other requests
            view.error = error
    return [None, *(state.prompt_logprobs[i] for i in range(1, len(state.request.prompt_token_ids)))]


def _completion(request: Request, index: int, sample: Sample, view: _SampleView) -> CompletionOutput:
    is_delta = request.params.output_kind == RequestOutputKind.DELTA
    text = "" if view.text is None else view.text.delta() if is_delta else view.text.text
    start, view.num_emitted = view.num_emitted if is_delta else 0, len(sample.token_ids)
    stop_reason = None if view.text is None else view.text.stopped_by
    if stop_reason is None and sample.finish == FinishReason.STOP:
        last = sample.token_ids[-1]
        stop_reason = last if last in request.params.stop_token_ids else None
    return CompletionOutput(
        index=index,
        text=text,
        token_ids=sample.token_ids[start:],
        finish_reason=_FINISH_REASONS.get(sample.finish),
        stop_reason=stop_reason,
        logprobs=None if request.params.logprobs is None else sample.logprobs[start:],
        cumulative_logprob=None
        if request.params.logprobs is None
        else cumulative_logprob(sample.logprobs, sample.token_ids),
    )
