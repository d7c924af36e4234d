"""EngineCore: requests that wait and run, and the dispatches that bring them forward. No text, no user.

Policy comes from scheduler.py, mechanism from the runner; what is left here is the order of things: admit, run, note
the result, and when the pool has run out preempt a victim.
"""

import bisect
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, cast

import jax
import numpy as np

from paged_jax.beam_search import BeamStepOutput
from paged_jax.block_pool import Status
from paged_jax.config import CacheConfig, SchedulerConfig
from paged_jax.inputs import Namespaces, sample_seed
from paged_jax.logprobs import LogprobsMode, logprobs_of
from paged_jax.runner import ModelRunner, ReturningRow, RowChunk
from paged_jax.scheduler import (
    Chunk,
    Request,
    RequestState,
    Sample,
    choose_swap,
    choose_victim,
    num_blocks_to_admit,
    plan_chunks,
    start_order,
)
from paged_jax.state import FinishReason, StepOutput


class Dispatch(NamedTuple):
    """What one call of the device did.

    Attributes:
        kind: "prefill", "decode", or "mixed" for both in one step.
        num_steps: model steps.
        num_prompt_tokens: tokens stored of prompts, and of what preempted requests compute again.
        num_generated_tokens: tokens drawn.
    """

    kind: str
    num_steps: int
    num_prompt_tokens: int
    num_generated_tokens: int


class EngineCore:
    """Requests in, tokens out.

    Args:
        runner: owned by the core from now on, but for beam searches while no request is unfinished.
        cache_config, scheduler_config: sizes and policies.
        max_num_batched_tokens: tokens of a ragged step at most.
        logprobs_mode: of the log-probabilities that are noted.

    Attributes:
        requests: the unfinished ones, by request_id.
        waiting: those that wait, in the order in which they start.
        running: those that have rows.
        swapped: those that wait with blocks on the host.
        peak_blocks: the most blocks that were ever in use at once.
        num_preemptions: requests that had to make room so far, by "recompute" and "swap".
        num_swapped_blocks: blocks copied to the host ("out") and back ("in") so far.
        last_dispatch: of the last step(), None if there was nothing to run.
    """

    def __init__(
        self,
        runner: ModelRunner,
        cache_config: CacheConfig,
        scheduler_config: SchedulerConfig,
        max_num_batched_tokens: int,
        logprobs_mode: LogprobsMode,
    ) -> None:
        self.runner = runner
        self.requests: dict[str, RequestState] = {}
        self.waiting: list[RequestState] = []
        self.swapped: set[RequestState] = set()
        self.running: list[RequestState] = []
        self.peak_blocks = 0
        self.num_preemptions = {"recompute": 0, "swap": 0}
        self.num_swapped_blocks = {"out": 0, "in": 0}
        self.last_dispatch: Dispatch | None = None
        self._config = cache_config
        self._scheduler = scheduler_config
        self._max_num_batched_tokens = max_num_batched_tokens
        self._logprobs_mode: LogprobsMode = logprobs_mode
        self._clock = 0  # tokens computed so far
        self._flops_per_token = 2 * sum(np.size(x) for x in jax.tree.leaves(runner.params))

    @property
    def num_host_blocks_used(self) -> int:
        """Blocks that swapped requests keep on the host."""
        return sum(state.saved.num_blocks for state in self.swapped)

    def add(self, request: Request) -> RequestState:
        """Queues a request that fits the idle pool, with an id that no unfinished one has."""
        samples = [Sample() for _ in range(request.params.n)]
        state = RequestState(request=request, samples=samples, clock=self._clock)
        self.requests[request.request_id] = state
        self._enqueue(state)
        return state

    def abort(self, state: RequestState) -> None:
        """Drops an unfinished request and gives its blocks back."""
        self._forget(state)
        self.release(state.live_samples)

    def end_sample(self, state: RequestState, sample: Sample, finish: FinishReason, num_tokens: int) -> None:
        """Ends a sample with its first `num_tokens` tokens, whether or not it goes on; the others go on.

        Args:
            state: its request.
            sample: one that has generated tokens.
            finish: why it ends.
            num_tokens: tokens that it keeps.
        """
        was_live = sample.finish == FinishReason.NONE
        if was_live:
            self.release([sample])
        sample.finish = finish
        del sample.token_ids[num_tokens:], sample.logprobs[num_tokens:]
        if not was_live:
            return
        if not state.live_samples:
            self._forget(state)
        elif state in self.swapped:  # what was saved is the rows of all that went on
            self.swapped.remove(state)
            state.forget_saved()

    def abort_all(self) -> None:
        """Drops all unfinished requests and gives their blocks back, whatever was interrupted."""
        for requests in (self.requests, self.waiting, self.running, self.swapped):
            requests.clear()
        self.runner.reset()

    def preempt_all(self) -> None:
        """Makes all running requests wait; they compute again what they need."""
        while self.running:
            self.preempt(self.running[-1], "recompute")

    def change_namespaces(self, namespaces: Namespaces) -> None:
        """Nothing that was computed so far is used again: requests keep only their tokens."""
        self.preempt_all()
        self.swapped.clear()
        for state in self.waiting:
            state.forget_saved()
            state.request = replace(state.request, namespace=namespaces.number_of(state.request.cache_salt))

    def step(self) -> list[RequestState]:
        """Runs one dispatch and returns the requests that got tokens or finished with it."""
        self.last_dispatch = None
        self._admit()
        if not self.running:
            return []
        lacks_logprobs = any(state.lacks_prompt_logprobs for state in self.running)
        limit = self.runner.max_prompt_logprobs_tokens if lacks_logprobs else self._max_num_batched_tokens
        in_order = sorted(self.running, key=self._place)
        chunks = sorted(plan_chunks(in_order, limit), key=lambda c: cast(int, c.sample.row))
        num_active = sum(s.is_active for r in self.running for s in r.live_samples)
        if chunks:
            output = self.runner.prefill([_row_chunk(c) for c in chunks])
        else:
            output = self.runner.decode(num_active, until_finish=bool(self.waiting))
        self.count_blocks(output)
        self._note_dispatch(output, chunks)
        changed = self._commit(output, chunks)
        if output.status != Status.OK:
            victim = choose_victim(self.running) if output.status == Status.OUT_OF_BLOCKS else None
            if victim is None:
                raise RuntimeError(
                    f"the block manager refused a step that must fit: {Status(int(output.status))!r} with "
                    f"{int(output.num_free)} free blocks and {len(self.running)} running requests; this is a bug"
                )
            self.preempt(victim, self._scheduler.preemption_mode)
        return changed

    def _admit(self) -> None:
        """Starts waiting requests, in the order of the policy, as long as there are rows, blocks, and tokens left in
        this step."""
        budget = self._max_num_batched_tokens - sum(
            s.is_active or state.num_left(s) for state in self.running for s in state.live_samples
        )
        while self.waiting:
            state = self.waiting[0]
            used = {s.row for r in self.running for s in r.live_samples}
            free_rows = [row for row in range(self._config.max_num_seqs) if row not in used]
            samples = state.live_samples
            if len(free_rows) < len(samples) or budget < 1 or not self._start(state, free_rows[: len(samples)]):
                break
            self.waiting.pop(0)
            self.running.append(state)
            budget -= sum(s.is_active or state.num_left(s) for s in samples)

    def _start(self, state: RequestState, rows: Sequence[int]) -> bool:
        """Gives a waiting request rows, and all that the host or the prefix cache has of it, if there is room."""
        request, samples = state.request, state.live_samples
        watermark = int(self._scheduler.watermark * (self._config.num_blocks - 1))
        need = num_blocks_to_admit(state, self.running, self._config, watermark, self._max_num_batched_tokens)
        own = state.num_blocks_to_start(self._config, self._max_num_batched_tokens)
        if self.runner.num_free_blocks < need - own:
            return False  # whatever is cached
        for sample, row in zip(samples, rows, strict=True):
            seed = sample_seed(request.seed, state.samples.index(sample))
            self.runner.set_row(row, request, seed, len(sample.token_ids))
        if state.saved is not None:
            held = [(s, row) for s, row in zip(samples, rows, strict=True) if s.num_computed_tokens > 0]
            returning = [ReturningRow(row, s.token_ids[-1] if s.is_active else 0, s.is_active) for s, row in held]
            if not self.runner.swap_in(state.saved, returning, need - own):
                return False
            self.num_swapped_blocks["in"] += state.saved.num_blocks
            self.swapped.remove(state)
            state.saved = None
        elif self.runner.has_prefix_cache and not (
            request.params.skip_reading_prefix_cache or state.lacks_prompt_logprobs
        ):
            # The others fork the prompt, behind which they differ.
            count = state.num_tokens(samples[0]) if len(samples) == 1 else len(request.prompt_token_ids)
            num_cached = self.runner.acquire_prefix(
                rows[0], state.tokens(samples[0], 0, count), request.namespace, need
            )
            if num_cached is None:
                return False
            samples[0].num_computed_tokens = num_cached
        elif self.runner.num_free_blocks < need:
            return False
        for sample, row in zip(samples, rows, strict=True):
            sample.row = row
            self.runner.set_rules(row, request, (*request.prompt_token_ids, *sample.token_ids))
        if state.start_time is None:
            state.start_time = time.monotonic()
        if state.num_cached_tokens is None:
            state.num_cached_tokens = samples[0].num_computed_tokens
        state.has_progressed = False
        return True

    def _note_dispatch(self, output: StepOutput, chunks: Sequence[Chunk]) -> None:
        prompt_counts = [c.count for c in chunks if not c.sample.is_active]
        kind = "decode" if not chunks else "prefill" if len(prompt_counts) == len(chunks) else "mixed"
        num_prompt_tokens = sum(prompt_counts) if output.num_steps > 0 else 0
        self.last_dispatch = Dispatch(kind, int(output.num_steps), num_prompt_tokens, int(np.sum(output.num_tokens)))

    def _commit(self, output: StepOutput, chunks: Sequence[Chunk]) -> list[RequestState]:
        """Notes what a dispatch has done; returns the requests that got tokens or finished with it."""
        if output.num_steps > 0:
            self._note_prompt_logprobs(output, chunks)
            for chunk in chunks:
                chunk.note_computed()
            self._clock += sum(c.count for c in chunks) if chunks else int(np.sum(output.num_tokens))
        wants_logprobs = any(state.request.params.logprobs is not None for state in self.running)
        logprobs = jax.device_get(output.logprobs) if wants_logprobs else None
        changed = []
        for state in self.running:
            samples = state.live_samples
            for sample in samples:
                new = np.asarray(output.token_ids)[sample.row, : int(output.num_tokens[sample.row])].tolist()
                sample.token_ids += new
                if logprobs is not None and state.request.params.logprobs is not None:
                    sample.logprobs += [
                        logprobs_of(
                            logprobs, (sample.row, i), token, state.request.params.logprobs, self._logprobs_mode
                        )
                        for i, token in enumerate(new)
                    ]
                sample.num_computed_tokens += 0 if chunks else len(new)
                sample.finish = FinishReason(int(output.finish[sample.row]))
                state.has_progressed |= bool(new)
            if any(output.num_tokens[s.row] or s.finish != FinishReason.NONE for s in samples):
                changed.append(state)
        for state in changed:
            if not state.live_samples:
                self._forget(state)
        return changed

    def _note_prompt_logprobs(self, output: StepOutput, chunks: Sequence[Chunk]) -> None:
        if output.prompt_logprobs is None:
            return
        tokens, start = jax.device_get(output.prompt_logprobs), 0
        for chunk in chunks:
            state, first = chunk.request, chunk.sample.num_computed_tokens
            num_top = state.request.params.prompt_logprobs
            for i, token in enumerate(_next_prompt_tokens(chunk)):
                # A prompt's log-probabilities are the model's own, as in vLLM.
                entry = logprobs_of(tokens, start + i, token, cast(int, num_top), "raw")
                state.prompt_logprobs[first + i + 1] = entry
            start += chunk.count

    def preempt(self, state: RequestState, mode: str) -> None:
        """Makes a running request wait again, with what it has generated.

        Args:
            mode: as SchedulerConfig.preemption_mode. Blocks for which the host pool has no room are computed again.
        """
        rows = [cast(int, s.row) for s in state.live_samples if s.num_computed_tokens > 0]
        saved = self.runner.swap_out(rows) if self._swaps(state, rows, mode) else None
        self.num_preemptions["recompute" if saved is None else "swap"] += 1
        self.num_swapped_blocks["out"] += 0 if saved is None else saved.num_blocks
        self.release(state.live_samples)
        state.leave(saved)
        if saved is not None:
            self.swapped.add(state)
        self.running.remove(state)
        self._enqueue(state)

    def _place(self, state: RequestState) -> tuple[float, ...]:
        return start_order(state, self._scheduler.policy)

    def _enqueue(self, state: RequestState) -> None:
        """Puts a request in its place among those that wait."""
        bisect.insort(self.waiting, state, key=self._place)

    def _forget(self, state: RequestState) -> None:
        """A request has ended."""
        del self.requests[state.request.request_id]
        self.swapped.discard(state)
        (self.running if state in self.running else self.waiting).remove(state)

    def _swaps(self, state: RequestState, rows: Sequence[int], mode: str) -> bool:
        """Whether the blocks in the request's rows shall go to the host."""
        num_blocks = self.runner.num_blocks_of(rows) if rows and mode != "recompute" else 0
        limit = self._scheduler.num_host_blocks
        room = (self._config.num_blocks - 1 if limit is None else limit) - self.num_host_blocks_used
        num_bytes, num_tokens = num_blocks * self._config.bytes_per_block, state.num_tokens_to_recompute
        return 0 < num_blocks <= room and choose_swap(
            mode, num_bytes, num_tokens, self._flops_per_token, jax.default_backend()
        )

    def release(self, samples: Sequence[Sample]) -> None:
        """Empties the rows of samples."""
        self.runner.release([s.row for s in samples if s.row is not None])

    def count_blocks(self, output: StepOutput | BeamStepOutput) -> None:
        """Notes the occupancy that a dispatch reports."""
        self.peak_blocks = max(self.peak_blocks, self._config.num_blocks - 1 - int(output.min_free))


def _row_chunk(chunk: Chunk) -> RowChunk:
    """The chunk for the runner."""
    state, sample = chunk.request, chunk.sample
    token_ids = state.tokens(sample, sample.num_computed_tokens, chunk.count)
    children = [s.row for s in chunk.children]
    following = _next_prompt_tokens(chunk)
    following += (0,) * (len(token_ids) - len(following) if following else 0)
    return RowChunk(cast(int, sample.row), token_ids, chunk.generates, cast(Sequence[int], children), following)


def _next_prompt_tokens(chunk: Chunk) -> tuple[int, ...]:
    """The tokens of the prompt that follow those of the chunk, if their log-probabilities are missing."""
    start = chunk.sample.num_computed_tokens + 1
    return chunk.request.request.prompt_token_ids[start:][: chunk.count] if chunk.request.lacks_prompt_logprobs else ()
