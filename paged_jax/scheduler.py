"""Which request gets a row, and which prompt tokens a step takes: pure functions on the host, first come first served.

Policy only. Which block a row gets is decided on the device; the host keeps no copy of the allocator. A request is
admitted when the pool can hold every admitted request at its longest, so that decoding never runs out of blocks.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from paged_jax.config import CacheConfig
from paged_jax.sampling_params import SamplingParams
from paged_jax.state import FinishReason


@dataclass(frozen=True, kw_only=True)
class Request:
    """What was asked for.

    Attributes:
        request_id: unique among unfinished requests.
        prompt: the text, if there was one.
        prompt_token_ids: at least one token.
        params: as given.
        max_tokens: tokens to generate at most, after the limits of the model's length.
        stop_token_ids: tokens that end a sample, end-of-sequence tokens included.
        seed: 64-bit seed of this request's random draws.
        namespace: number of the requests that it may share cached blocks with.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    seed: int
    namespace: int

    @property
    def max_stored_tokens(self) -> int:
        """Tokens in the cache at the end: the last generated token is never stored."""
        return len(self.prompt_token_ids) + self.max_tokens - 1

    def num_blocks_needed(self, config: CacheConfig, num_samples: int) -> int:
        """Blocks that this many samples own at their longest: full blocks of the prompt are shared."""
        each = config.num_blocks_for(self.max_stored_tokens)
        if self.max_tokens == 1:
            return each  # nothing is stored behind the prompt
        shared = config.num_groups * (len(self.prompt_token_ids) // config.block_size)
        return shared + num_samples * (each - shared)


@dataclass(kw_only=True)
class Sample:
    """One continuation of a running request.

    Attributes:
        row: row of the block tables, free for others when the sample has finished.
        token_ids: generated so far.
        finish: NONE while it goes on.
    """

    row: int
    token_ids: list[int] = field(default_factory=list)
    finish: FinishReason = FinishReason.NONE


@dataclass(kw_only=True)
class RunningRequest:
    """A request that has rows.

    Attributes:
        samples: the prompt is stored in the row of the first one; the others fork it when it is complete.
        num_computed_tokens: prompt tokens stored so far.
        num_cached_tokens: of these, tokens that were found in the prefix cache; None before it was asked.
    """

    request: Request
    samples: list[Sample]
    num_computed_tokens: int = 0
    num_cached_tokens: int | None = None

    @property
    def live_samples(self) -> list[Sample]:
        """Those that have not finished."""
        return [s for s in self.samples if s.finish == FinishReason.NONE]

    @property
    def num_prompt_tokens_left(self) -> int:
        """Prompt tokens that are not stored yet."""
        return len(self.request.prompt_token_ids) - self.num_computed_tokens


def plan_admissions(
    waiting: Iterable[Request], running: Sequence[RunningRequest], config: CacheConfig
) -> list[RunningRequest]:
    """The requests at the head of the queue that can start now, with the lowest free rows.

    Blocks that requests share through the prefix cache are counted for each of them: a request may wait longer than it
    must, but a step never lacks a block.
    """
    free_rows = sorted(set(range(config.max_num_seqs)) - {s.row for r in running for s in r.live_samples})
    num_free = config.num_blocks - 1
    num_free -= sum(r.request.num_blocks_needed(config, len(r.live_samples)) for r in running)
    admissions = []
    for request in waiting:
        num_samples = request.params.n
        num_free -= request.num_blocks_needed(config, num_samples)
        if len(free_rows) < num_samples or num_free < 0:
            break
        rows, free_rows = free_rows[:num_samples], free_rows[num_samples:]
        admissions.append(RunningRequest(request=request, samples=[Sample(row=row) for row in rows]))
    return admissions


def plan_prefill(
    running: Sequence[RunningRequest], max_num_batched_tokens: int, look_up: Callable[[RunningRequest], None]
) -> list[tuple[RunningRequest, int]]:
    """The next chunk of prompt tokens, oldest request first: (request, number of its tokens).

    A request asks the prefix cache (`look_up`) in the step that takes its first tokens, not before: what older requests
    have stored until then can be found.
    """
    budget, chunk = max_num_batched_tokens, []
    for request in running:
        if budget > 0 and request.num_cached_tokens is None:
            look_up(request)
        count = min(request.num_prompt_tokens_left, budget)
        if count > 0:
            chunk.append((request, count))
            budget -= count
    return chunk
