"""Which request gets a row, and which prompt tokens a step takes: pure functions on the host, first come first served.

Policy only. Which block a row gets is decided on the device; the host keeps no copy of the allocator. A request is
admitted when the pool can hold every admitted request at its longest, so that decoding never runs out of blocks.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from paged_jax.config import CacheConfig
from paged_jax.sampling_params import SamplingParams


@dataclass(frozen=True, kw_only=True)
class Request:
    """What was asked for.

    Attributes:
        request_id: unique among unfinished requests.
        prompt: the text, if there was one.
        prompt_token_ids: at least one token.
        params: as given.
        max_tokens: tokens to generate at most, after the limits of the model's length.
        seed: 64-bit seed of this request's random draws.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    max_tokens: int
    seed: int

    @property
    def max_stored_tokens(self) -> int:
        """Tokens in the cache at the end: the last generated token is never stored."""
        return len(self.prompt_token_ids) + self.max_tokens - 1


@dataclass(kw_only=True)
class RunningRequest:
    """A request that has a row.

    Attributes:
        row: row of the block tables.
        num_computed_tokens: prompt tokens stored so far.
        token_ids: generated so far.
    """

    request: Request
    row: int
    num_computed_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)

    @property
    def num_prompt_tokens_left(self) -> int:
        """Prompt tokens that are not stored yet."""
        return len(self.request.prompt_token_ids) - self.num_computed_tokens


def plan_admissions(
    waiting: Iterable[Request], running: Sequence[RunningRequest], config: CacheConfig
) -> list[tuple[Request, int]]:
    """The requests at the head of the queue that can start now, each with the lowest free row."""
    free_rows = sorted(set(range(config.max_num_seqs)) - {r.row for r in running}, reverse=True)
    num_free = config.num_blocks - 1 - sum(config.num_blocks_for(r.request.max_stored_tokens) for r in running)
    admissions = []
    for request in waiting:
        num_free -= config.num_blocks_for(request.max_stored_tokens)
        if not free_rows or num_free < 0:
            break
        admissions.append((request, free_rows.pop()))
    return admissions


def plan_prefill(running: Sequence[RunningRequest], max_num_batched_tokens: int) -> list[tuple[RunningRequest, int]]:
    """The next chunk of prompt tokens, oldest request first: (request, number of its tokens)."""
    budget, chunk = max_num_batched_tokens, []
    for request in running:
        count = min(request.num_prompt_tokens_left, budget)
        if count > 0:
            chunk.append((request, count))
            budget -= count
    return chunk
