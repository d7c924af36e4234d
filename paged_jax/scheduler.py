"""Which request runs, which tokens a step takes, and who must make room: pure functions on the host.

Policy only. Which block a row gets is decided on the device; the host keeps no copy of the allocator, only the number
of free blocks that the last StepOutput told.

A request is admitted when the pool has room for all tokens that it must store before it generates, behind what admitted
requests still have to store, and a watermark on top for the growth of those that generate. When the pool runs out
nevertheless, a victim is preempted; it waits in the queue like the others and comes back with the tokens that it had.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from paged_jax.config import CacheConfig
from paged_jax.logprobs import Logprob
from paged_jax.sampling_params import SamplingParams
from paged_jax.state import FinishReason

#: Policy "sjf": tokens that the engine computes while a request waits make it this much shorter in the queue, so that
#: no stream of short requests holds a long one back for ever: a request of n tokens goes before any new one at the
#: latest when the engine has computed 256 n tokens.
AGEING = 1 / 256
#: Preemption "auto": floating-point operations that take as long as moving one byte between device and host. Rounded
#: to powers of ten from data sheets: 1e15 FLOP/s and 5e10 byte/s of PCIe 5, 1e11 FLOP/s and 1e10 byte/s of one core.
FLOPS_PER_BYTE_MOVED = {"cpu": 10, "gpu": 20_000}


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
        cache_salt: of the prompt.
        namespace: number of the requests that it may share cached blocks with.
        priority: lower values go first.
        number: of arrival, unique in an engine.
        reserve: blocks that this request leaves free for privileged ones.
        bad_words: token sequences that it does not generate.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    seed: int
    cache_salt: str | None
    namespace: int
    priority: int
    number: int
    reserve: int
    bad_words: tuple[tuple[int, ...], ...] = ()

    def num_blocks_needed(self, config: CacheConfig, max_num_batched_tokens: int) -> int:
        """Blocks that it owns at most. The last token of a sample is never stored."""
        num_tokens = len(self.prompt_token_ids) + self.max_tokens - 1
        return config.max_blocks_for_samples(
            len(self.prompt_token_ids), [num_tokens] * self.params.n, max_num_batched_tokens
        )


@dataclass(kw_only=True, eq=False)
class Sample:
    """One continuation of a request.

    Attributes:
        row: row of the block tables; None while it has none.
        token_ids: generated so far.
        finish: NONE while it goes on.
        num_computed_tokens: tokens that its row stores.
        is_active: its row generates: the device knows its last token.
        logprobs: of each of token_ids, if they were asked for.
    """

    row: int | None = None
    token_ids: list[int] = field(default_factory=list)
    finish: FinishReason = FinishReason.NONE
    num_computed_tokens: int = 0
    is_active: bool = False
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)


@dataclass(kw_only=True, eq=False)
class RequestState:
    """A request that has not finished, waiting or running.

    Attributes:
        samples: as many as SamplingParams.n. The prompt is stored in the row of the first one that goes on; the others
            fork it when it is complete.
        is_forked: all samples that go on have rows with the prompt.
        num_cached_tokens: tokens that were found in the prefix cache when it first started; None before.
        saved: what the runner has copied to the host; None unless it waits to be swapped in.
        clock: tokens that the engine had computed when it arrived.
        num_preemptions: times that it had to make room.
        has_progressed: it has generated a token since it was last admitted.
        start_time: of `time.monotonic`, when it first got rows; None before.
        prompt_logprobs: of each token of the prompt but the first, by its place; empty if nobody asked for them.
    """

    request: Request
    samples: list[Sample]
    is_forked: bool = False
    num_cached_tokens: int | None = None
    saved: Any = None
    clock: int = 0
    num_preemptions: int = 0
    has_progressed: bool = False
    start_time: float | None = None
    prompt_logprobs: dict[int, dict[int, Logprob]] = field(default_factory=dict)

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Whether its prompt must be computed for its log-probabilities."""
        wants = self.request.params.prompt_logprobs is not None
        return wants and len(self.prompt_logprobs) < len(self.request.prompt_token_ids) - 1

    @property
    def live_samples(self) -> list[Sample]:
        """Those that have not finished."""
        return [s for s in self.samples if s.finish == FinishReason.NONE]

    @property
    def is_preempted(self) -> bool:
        """It waits after it has run before."""
        return self.num_preemptions > 0

    def num_tokens(self, sample: Sample) -> int:
        """Tokens of the sample, the prompt included."""
        return len(self.request.prompt_token_ids) + len(sample.token_ids)

    def tokens(self, sample: Sample, start: int, count: int) -> tuple[int, ...]:
        """`count` tokens of the sample from position `start` on."""
        prompt = self.request.prompt_token_ids
        generated = sample.token_ids[max(0, start - len(prompt)) : max(0, start + count - len(prompt))]
        return (*prompt[start : start + count], *generated)

    def num_left(self, sample: Sample) -> int:
        """Tokens that the sample must store before it generates, in steps that it can take part in now."""
        if sample.is_active:
            return 0
        if self.is_forked or len(self.live_samples) == 1:
            return self.num_tokens(sample) - sample.num_computed_tokens
        is_leader = sample is self.live_samples[0]
        return len(self.request.prompt_token_ids) - sample.num_computed_tokens if is_leader else 0

    def num_blocks_to_start(self, config: CacheConfig, max_num_batched_tokens: int) -> int:
        """Blocks that it owns at most until it next generates."""
        lengths = [self.num_tokens(s) for s in self.live_samples]
        return config.max_blocks_for_samples(len(self.request.prompt_token_ids), lengths, max_num_batched_tokens)

    def num_blocks_promised(self, config: CacheConfig, max_num_batched_tokens: int) -> int:
        """Of these, blocks that it has been admitted for and does not own yet."""
        if all(s.is_active for s in self.live_samples):
            return 0
        prompt = len(self.request.prompt_token_ids)
        if not self.is_forked:
            owned = config.num_blocks_for(self.live_samples[0].num_computed_tokens)
            return self.num_blocks_to_start(config, max_num_batched_tokens) - owned
        # Rows share what they forked: blocks that leave one's windows may stay for another. The last block of the
        # prompt, if it is not full, is copied before a row writes to it.
        full = prompt // config.block_size * config.block_size
        return sum(
            config.max_blocks_gained(
                full if s.num_computed_tokens == prompt else s.num_computed_tokens,
                self.num_tokens(s),
                max_num_batched_tokens,
            )
            for s in self.live_samples
            if not s.is_active
        )

    def leave(self, saved: Any) -> None:
        """It loses its rows. What the runner has saved of them, if anything, is all that need not be computed again."""
        self.num_preemptions += 1
        for sample in self.samples:
            sample.row = None
        if saved is None:
            self.forget_saved()
        self.saved = saved

    def forget_saved(self) -> None:
        """All that it has computed is void."""
        self.saved, self.is_forked = None, False
        for sample in self.samples:
            sample.num_computed_tokens, sample.is_active = 0, False

    @property
    def num_tokens_to_recompute(self) -> int:
        """Tokens that would have to be computed again if all its blocks were lost."""
        prompt = len(self.request.prompt_token_ids)
        samples = self.live_samples
        shared = min(prompt, samples[0].num_computed_tokens)
        return shared + sum(max(0, s.num_computed_tokens - prompt) for s in samples)

    @property
    def num_tokens_expected(self) -> int:
        """Tokens still to be computed if no stop token comes."""
        samples = self.live_samples
        generating = sum(self.request.max_tokens - len(s.token_ids) for s in samples)
        return len(self.request.prompt_token_ids) - samples[0].num_computed_tokens + generating


def start_order(request: RequestState, policy: str) -> tuple[float, ...]:
    """The request's place among those that wait: the lowest starts first, and gets tokens first. No two are equal.

    "fcfs": in order of arrival, so that a preempted request goes before all that came after it. "priority": by priority
    first. "sjf": those with the least work left first. While a request waits it gets shorter by AGEING for each token
    that the engine computes; as all of them do, only their arrivals differ.
    """
    number = request.request.number
    if policy == "priority":
        return request.request.priority, number
    if policy == "sjf":
        return request.num_tokens_expected + AGEING * request.clock, number
    return (number,)


def num_blocks_to_admit(
    request: RequestState,
    running: Sequence[RequestState],
    config: CacheConfig,
    watermark: int,
    max_num_batched_tokens: int,
) -> int:
    """Free blocks that there must be before the request starts.

    Its own until it generates, and its reserve; unless nothing runs, those promised to running requests, the watermark
    and, if it was preempted, a block for the next growth of every row: it shall not have to leave again at once.
    """
    need = request.num_blocks_to_start(config, max_num_batched_tokens) + request.request.reserve
    if not running:
        return need
    need += sum(r.num_blocks_promised(config, max_num_batched_tokens) for r in running)
    if request.is_preempted:
        need += config.num_groups * sum(len(r.live_samples) for r in [request, *running])
    return need + watermark


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Tokens of one row in a ragged step.

    Attributes:
        request, sample: whose.
        count: tokens: one for a row that generates, more for one that stores its prompt.
    """

    request: RequestState
    sample: Sample
    count: int

    @property
    def ends(self) -> bool:
        """Whether the row has all its tokens then, or all that it can get before others fork it."""
        return not self.sample.is_active and self.count == self.request.num_left(self.sample)

    @property
    def children(self) -> list[Sample]:
        """Samples that fork the row after this step."""
        samples = self.request.live_samples
        return samples[1:] if self.ends and not self.request.is_forked else []

    @property
    def generates(self) -> bool:
        """Whether the row generates a token with this step, and those that fork it do."""
        stored = self.sample.num_computed_tokens + self.count
        return self.sample.is_active or (self.ends and stored == self.request.num_tokens(self.sample))

    def note_computed(self) -> None:
        """The step has run."""
        generates, children, request = self.generates, self.children, self.request
        request.is_forked |= self.ends
        self.sample.num_computed_tokens += self.count
        self.sample.is_active = generates
        for child in children:
            child.num_computed_tokens, child.is_active = self.sample.num_computed_tokens, generates


def plan_chunks(running: Sequence[RequestState], max_num_batched_tokens: int) -> list[Chunk]:
    """The ragged step that brings prompts forward: first the next token of all rows that generate, but one token of the
    budget at least is for prompts; then prompts, in the order given. Empty: no prompt is incomplete.
    """
    rows = [(r, s) for r in running for s in r.live_samples]
    prefills = [(r, s) for r, s in rows if r.num_left(s) > 0]
    if not prefills:
        return []
    active = [(r, s) for r, s in rows if s.is_active]
    chunks = [Chunk(request=r, sample=s, count=1) for r, s in active[: max_num_batched_tokens - 1]]
    budget = max_num_batched_tokens - len(chunks)
    for request, sample in prefills:
        count = min(request.num_left(sample), budget)
        if count > 0:
            chunks.append(Chunk(request=request, sample=sample, count=count))
            budget -= count
    return chunks


def choose_victim(running: Sequence[RequestState]) -> RequestState | None:
    """Who makes room: the lowest priority, then the latest arrival. None: one request has the pool for itself.

    One that has not generated a token since it came back stays as long as another can leave: two requests cannot push
    each other out for ever.
    """
    if len(running) < 2:
        return None
    candidates = [r for r in running if r.has_progressed or not r.is_preempted] or running
    return max(candidates, key=lambda r: (r.request.priority, r.request.number))


def choose_swap(mode: str, num_bytes: int, num_tokens: int, flops_per_token: float, platform: str) -> bool:
    """Whether a victim's blocks are moved to the host rather than computed again.

    Args:
        mode: "swap", "recompute", or "auto": what takes less time. Moved bytes go both ways.
        num_bytes: K and V of the victim. num_tokens: tokens to compute again.
        flops_per_token: of the model, two per parameter.
        platform: where the model runs.
    """
    if mode != "auto":
        return mode == "swap"
    flops_per_byte = FLOPS_PER_BYTE_MOVED.get(platform, FLOPS_PER_BYTE_MOVED["gpu"])
    return 2 * num_bytes * flops_per_byte < num_tokens * flops_per_token
