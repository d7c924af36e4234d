"""Beam search on the host: which prompts run together, their prefill, and sequences from what the device recorded."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paged_jax.beam_search import BeamState, BeamStepOutput, init_beams, num_candidates
from paged_jax.block_pool import Status
from paged_jax.config import CacheConfig
from paged_jax.detokenizer import Detokenizer
from paged_jax.inputs import Namespaces, Prompt, cache_salt_of, max_new_tokens, tokenize
from paged_jax.outputs import BeamSearchOutput, BeamSequence
from paged_jax.runner import ModelRunner, RowChunk, bucket_for, bucket_sizes
from paged_jax.sampling_params import BeamSearchParams
from paged_jax.state import FinishReason, StepOutput


@dataclass(kw_only=True)
class BeamSearch:
    """One prompt's search.

    Attributes:
        index: number of the prompt among those of the call.
        prompt: the text, if there was one.
        prompt_token_ids: the prompt's tokens; none if it failed before it had any.
        max_tokens: tokens to generate at most, after the limits of the model's length.
        namespace: number of the requests that the prompt may share cached blocks with.
        token_ids, parents: int32 [k, n] of each dispatch: token of each running beam after each of the n steps, and the
            beam, before that step, that it continues.
        sequences: (token_ids, cumulative log-probability, score) of each sequence found, best first.
        error: why the search failed.
    """

    index: int
    prompt: str | None = None
    prompt_token_ids: tuple[int, ...] = ()
    max_tokens: int = 0
    namespace: int = 0
    token_ids: list[np.ndarray] = field(default_factory=list)
    parents: list[np.ndarray] = field(default_factory=list)
    sequences: list[tuple[list[int], float, float]] = field(default_factory=list)
    error: Exception | None = None


def max_blocks(search: BeamSearch, beam_width: int, config: CacheConfig, max_num_batched_tokens: int) -> int:
    """Blocks that a search needs at most: beams share the prompt's full blocks and, at worst, nothing else."""
    num_tokens = len(search.prompt_token_ids)
    return config.max_blocks_for_samples(
        num_tokens, [num_tokens + search.max_tokens - 1] * beam_width, max_num_batched_tokens
    )


def plan_waves(
    searches: Iterable[BeamSearch], beam_width: int, config: CacheConfig, max_num_batched_tokens: int
) -> Iterator[list[BeamSearch]]:
    """Searches that run together, in order: as many as the rows and, at their largest, the pool can hold.

    One that could outgrow the whole pool gets a wave of its own: its beams may share enough to fit after all.
    """
    capacity = config.num_blocks - 1
    wave, room = [], capacity
    for search in searches:
        need = min(max_blocks(search, beam_width, config, max_num_batched_tokens), capacity)
        if wave and (need > room or len(wave) == config.max_num_seqs // beam_width):
            yield wave
            wave, room = [], capacity
        wave.append(search)
        room -= need
    if wave:
        yield wave


@dataclass(frozen=True, kw_only=True)
class BeamSearcher:
    """Beam searches with the same parameters, on an engine that does nothing else meanwhile.

    Attributes:
        params: for all prompts.
        runner: its state's rows are empty before and after.
        config: sizes of the runner's state.
        tokenizer: as for LLM.
        eos_token_ids: tokens that end a sequence.
        max_model_len, max_num_batched_tokens: as for LLM.
        watch: called with what each dispatch returned.

    Raises:
        ValueError: no prompt could be searched with so many beams.
    """

    params: BeamSearchParams
    runner: ModelRunner
    config: CacheConfig
    tokenizer: Any
    eos_token_ids: Sequence[int]
    max_model_len: int
    max_num_batched_tokens: int
    namespaces: Namespaces
    watch: Callable[[StepOutput | BeamStepOutput], None]

    def __post_init__(self) -> None:
        width, max_num_seqs = self.params.beam_width, self.config.max_num_seqs
        if width > max_num_seqs:
            raise ValueError(
                f"beam_width={width} needs as many rows, and max_num_seqs={max_num_seqs}; lower beam_width or raise "
                "max_num_seqs"
            )
        needed = num_candidates(width, len(self.eos_token_ids))
        if needed > self.runner.vocab_size:
            raise ValueError(
                f"beam_width={width} compares {needed} continuations in each step, and the vocabulary has only "
                f"{self.runner.vocab_size} tokens; lower beam_width"
            )

    def run(self, prompts: Sequence[Prompt]) -> Iterator[BeamSearch]:
        """Runs all searches wave by wave, and yields each when it has ended or failed."""
        searches = [self._prepare(index, prompt) for index, prompt in enumerate(prompts)]
        yield from (s for s in searches if s.error is not None)
        runnable = (s for s in searches if s.error is None)
        for wave in plan_waves(runnable, self.params.beam_width, self.config, self.max_num_batched_tokens):
            self._run_wave(wave)
            yield from wave

    def output(self, search: BeamSearch) -> BeamSearchOutput:
        """What the user gets of a search that has ended."""
        outputs, error = [], search.error
        for token_ids, cumulative_logprob, score in search.sequences:
            text = ""
            if self.tokenizer is not None and error is None:
                try:
                    detokenizer = Detokenizer(self.tokenizer, search.prompt_token_ids)
                    text = detokenizer.push(token_ids) + detokenizer.finish()
                except Exception as failure:  # foreign code: its failure must not touch other prompts
                    error = failure
            outputs.append(
                BeamSequence(
                    token_ids=token_ids,
                    text=text,
                    cumulative_logprob=cumulative_logprob,
                    score=score,
                    finish_reason="stop" if token_ids[-1] in self.eos_token_ids else "length",
                )
            )
        return BeamSearchOutput(
            prompt=search.prompt, prompt_token_ids=list(search.prompt_token_ids), outputs=outputs, error=error
        )

    def _prepare(self, index: int, prompt: Prompt) -> BeamSearch:
        try:
            text, token_ids = tokenize(prompt, self.tokenizer, self.runner.vocab_size)
            max_tokens = max_new_tokens(self.params, len(token_ids), self.max_model_len)
            namespace = self.namespaces.number_of(cache_salt_of(prompt))
        except (ValueError, TypeError) as error:
            return BeamSearch(index=index, prompt=prompt if isinstance(prompt, str) else None, error=error)
        return BeamSearch(
            index=index, prompt=text, prompt_token_ids=token_ids, max_tokens=max_tokens, namespace=namespace
        )

    def _run_wave(self, wave: Sequence[BeamSearch]) -> None:
        """Runs the searches of one wave to their end and fills in what they found."""
        status, beams = self._prefill(wave), self._init_beams(wave)
        while status == Status.OK and (beams.finish == FinishReason.NONE).any():
            before = beams.num_tokens
            beams, output = self.runner.search(beams)
            self.watch(output)
            status = Status(int(output.status))
            for p, search in enumerate(wave):
                count = beams.num_tokens[p] - before[p]
                search.token_ids.append(np.asarray(output.token_ids)[p, :, :count])
                search.parents.append(np.asarray(output.parents)[p, :, :count])
        if status != Status.OK:
            self.runner.reset()
        for p, search in enumerate(wave):
            self._conclude(search, jax.tree.map(lambda x, p=p: x[p], beams), status)

    def _prefill(self, wave: Sequence[BeamSearch]) -> Status:
        """Stores all but the last token of each prompt in the first row of its beams, as far as they are not cached."""
        rows = range(0, len(wave) * self.params.beam_width, self.params.beam_width)
        prompts = [s.prompt_token_ids[:-1] for s in wave]
        for i, (row, search) in enumerate(zip(rows, wave, strict=True)):
            self.runner.set_namespace(row, search.namespace)
            if self.runner.has_prefix_cache and prompts[i]:
                num_cached = self.runner.acquire_prefix(row, prompts[i], search.namespace) or 0
                prompts[i] = prompts[i][num_cached:]
        for chunk in _chunks(rows, prompts, self.max_num_batched_tokens):
            output = self.runner.prefill(chunk)
            self.watch(output)
            if output.status != Status.OK:
                return Status(int(output.status))
        return Status.OK

    def _init_beams(self, wave: Sequence[BeamSearch]) -> BeamState:
        num_prompts = bucket_for(len(wave), bucket_sizes(self.config.max_num_seqs // self.params.beam_width))
        last_token, max_tokens = np.zeros((2, num_prompts), np.int32)
        for p, search in enumerate(wave):
            last_token[p], max_tokens[p] = search.prompt_token_ids[-1], search.max_tokens
        return jax.device_get(
            init_beams(
                jnp.asarray(last_token),
                jnp.asarray(max_tokens),
                beam_width=self.params.beam_width,
                length_penalty=self.params.length_penalty,
                eos_token_ids=jnp.array(self.eos_token_ids, jnp.int32),
            )
        )

    def _conclude(self, search: BeamSearch, beams: BeamState, status: Status) -> None:
        """Fills in the sequences or the error of a search whose wave has ended with `status`; beams: its part alone."""
        num_prompt_tokens, num_tokens = len(search.prompt_token_ids), int(beams.num_tokens)
        if beams.finish == FinishReason.ERROR:
            search.error = FloatingPointError(
                f"the model's logits after {num_prompt_tokens + num_tokens} tokens were not finite; look for NaN or "
                "inf in the weights, or a dtype that overflows"
            )
        elif beams.finish == FinishReason.NONE:
            width, config = self.params.beam_width, self.config
            need = max_blocks(search, width, config, self.max_num_batched_tokens)
            search.error = RuntimeError(
                f"the beam search of a prompt of {num_prompt_tokens} tokens stopped after {num_tokens} of "
                f"{search.max_tokens} new tokens: {status.name}. {width} beams need up to {need} blocks of "
                f"{config.block_size} tokens, and the pool has {config.num_blocks - 1}; raise num_blocks, or lower "
                "beam_width, max_tokens or the prompt's length"
            )
        else:
            kept = beams.kept
            columns = (kept.num_tokens, kept.beam, kept.last_token, kept.cumulative_logprob, kept.score)
            search.sequences = [
                (_trace_back(search, n, beam, token), logprob, score)
                for n, beam, token, logprob, score in zip(*(np.asarray(x).tolist() for x in columns), strict=True)
                if n > 0
            ]


def _chunks(rows: Iterable[int], prompts: Sequence[Sequence[int]], max_num_tokens: int) -> Iterator[list[RowChunk]]:
    """Chunks of at most max_num_tokens prompt tokens for ModelRunner.prefill; no row generates a token with them."""
    chunk, room = [], max_num_tokens
    for row, tokens in zip(rows, prompts, strict=True):
        while tokens:
            chunk.append(RowChunk(row, tokens[:room]))
            tokens, room = tokens[room:], room - len(tokens[:room])
            if room == 0:
                yield chunk
                chunk, room = [], max_num_tokens
    if chunk:
        yield chunk


def _trace_back(search: BeamSearch, num_tokens: int, beam: int, last_token: int) -> list[int]:
    """The tokens of a sequence of num_tokens tokens whose last one was appended to `beam`."""
    token_ids, parents = (np.concatenate(x, axis=1) for x in (search.token_ids, search.parents))
    tokens = [last_token]
    for step in range(num_tokens - 2, -1, -1):
        tokens.append(int(token_ids[beam, step]))
        beam = parents[beam, step]
    return tokens[::-1]
