"""ModelRunner: owns the device state and the compiled programs; turns plans into StepOutputs."""

from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from paged_jax.batch import build_ragged_batch
from paged_jax.beam_search import BeamState, BeamStepOutput, beam_search_many
from paged_jax.block_pool import Status
from paged_jax.block_table import append_tokens
from paged_jax.config import CacheConfig, check_positive
from paged_jax.decode import (
    EngineState,
    Forward,
    PrefillPlan,
    StepOutput,
    decode_many,
    init_state,
    prefill_step,
    release_rows,
)
from paged_jax.inputs import MAX_STOP_TOKEN_IDS
from paged_jax.sampling import seed_words
from paged_jax.sampling_params import SamplingParams

#: XLA:CPU multiplies a handful of rows faster with oneDNN than with its default library: decode steps of 4 to 16 rows
#: take 0.75 - 0.9 of the time; one row, and prefill chunks, are slower with it (benchmarks/README.md). XLA cannot store
#: such programs in the persistent compilation cache, so where one is configured the cache goes first.
_ONEDNN = {
    "xla_cpu_use_onednn": True,
    "xla_cpu_experimental_onednn_fusion_type": "LIBRARY_FUSION_TYPE_DOT",
    "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_REDUCE",
}
_ONEDNN_MIN_ROWS = 4


def bucket_sizes(maximum: int, minimum: int = 1) -> tuple[int, ...]:
    """Powers of two times `minimum` up to, and with, `maximum`: the sizes compiled for. 12 -> (1, 2, 4, 8, 12)."""
    sizes = []
    while minimum < maximum:
        sizes.append(minimum)
        minimum *= 2
    return (*sizes, maximum)


def bucket_for(size: int, buckets: Sequence[int]) -> int:
    """The smallest bucket that holds `size`."""
    return next(b for b in buckets if b >= size)


class ModelRunner:
    """Runs steps of one model.

    Every program is compiled ahead of its first run for a shape from a short list, so that no step retraces:
    prefill chunks of 16, 32, ... max_num_batched_tokens tokens, decode steps of 1, 2, 4, ... max_num_seqs rows.

    Args: as of LLM.
    """

    def __init__(
        self,
        forward: Forward,
        params: Any,
        cache_config: CacheConfig,
        *,
        vocab_size: int | None,
        max_num_batched_tokens: int,
        decode_steps: int,
        implementation: str | None,
    ) -> None:
        self.params = params
        self.token_buckets = bucket_sizes(max_num_batched_tokens, min(16, max_num_batched_tokens))
        self.row_buckets = bucket_sizes(cache_config.max_num_seqs)
        self._forward = forward
        self._cache_config = cache_config
        self._decode_steps = decode_steps
        self._state = init_state(cache_config, max_stop_token_ids=MAX_STOP_TOKEN_IDS)
        # The host's copy of the row parameters: written when a request gets its row, copied into each plan.
        self._rows = jax.tree.map(lambda x: np.array(x), self._state.rows)
        self._programs: dict[tuple[str | int, ...], Any] = {}
        self.vocab_size = check_contract(forward, params, self._state, implementation)
        if vocab_size is not None:
            check_positive("LLM", vocab_size=vocab_size)
            if vocab_size > self.vocab_size:
                raise ValueError(f"vocab_size must be in 1 ... {self.vocab_size}, the model's logits; got {vocab_size}")
            self.vocab_size = vocab_size
        self._static = {"vocab_size": self.vocab_size, "implementation": implementation}

    @property
    def num_free_blocks(self) -> int:
        """Blocks that the pool can hand out now."""
        return int(self._state.pool.num_free)

    @property
    def compile_count(self) -> int:
        """Programs compiled so far."""
        return len(self._programs)

    def set_row(
        self, row: int, params: SamplingParams, *, seed: int, max_tokens: int, stop_token_ids: Sequence[int]
    ) -> None:
        """Gives `row` the parameters of its new request; they travel with the first chunk of the prompt."""
        sampling = self._rows.sampling
        stop = np.full(MAX_STOP_TOKEN_IDS, -1, np.int32)
        stop[: len(stop_token_ids)] = stop_token_ids
        for array, value in (
            (sampling.temperature, params.temperature),
            (sampling.top_k, params.top_k),
            (sampling.top_p, params.top_p),
            (sampling.min_p, params.min_p),
            (sampling.seed, seed_words(seed)),
            (self._rows.num_remaining, max_tokens),
            (self._rows.stop_token_ids, stop),
        ):
            cast(np.ndarray, array)[row] = value

    def prefill(self, chunks: Sequence[tuple[int, Sequence[int], bool]]) -> StepOutput:
        """Stores prompt tokens.

        Args:
            chunks: (row, its next tokens, whether the prompt ends with them), together at most
                max_num_batched_tokens tokens.
        """
        counts = np.zeros(self._state.is_active.shape, np.int32)
        is_last = np.zeros(self._state.is_active.shape, bool)
        tokens: list[int] = []
        for row, token_ids, ends in sorted(chunks, key=lambda c: c[0]):
            tokens += token_ids
            counts[row], is_last[row] = len(token_ids), ends
        padded = np.zeros(bucket_for(len(tokens), self.token_buckets), np.int32)
        padded[: len(tokens)] = tokens
        # Fresh arrays: the device may read host memory after this returns, so nothing here is written again.
        plan = cast(Any, PrefillPlan)(
            token_ids=padded, num_new_tokens=counts, is_last=is_last, rows=jax.tree.map(np.copy, self._rows)
        )
        return self._run(self._program("prefill", len(padded)), plan)

    def decode(self, num_active: int) -> StepOutput:
        """Runs up to decode_steps steps of the `num_active` active rows."""
        return self._run(self._program("decode", bucket_for(num_active, self.row_buckets)))

    def search(self, beams: BeamState) -> tuple[BeamState, BeamStepOutput]:
        """Runs up to decode_steps steps of beam searches; one program per shape of `beams`."""
        key = ("search", *beams.last_token.shape, beams.eos_token_ids.shape[1])
        if key not in self._programs:
            static = self._static | {"num_steps": self._decode_steps}
            lowered = beam_search_many.lower(self._forward, self.params, self._state, beams, **static)
            self._programs[key] = _compile(lowered, "decode", beams.last_token.size)
        self._state, *result = self._programs[key](self.params, self._state, beams)
        beams, output = jax.device_get(result)
        return beams, output

    def reset(self) -> None:
        """Empties every row that the device holds, whatever was interrupted before the host heard of it."""
        if any(x.is_deleted() for x in jax.tree.leaves(self._state)):
            # A step took the donated state and its result never arrived.
            self._state = init_state(self._cache_config, max_stop_token_ids=MAX_STOP_TOKEN_IDS)
            return
        held = np.asarray(self._state.table.seq_lens) > 0
        if held.any():
            self._state, status = release_rows(self._state, held)
            if status != Status.OK:
                raise RuntimeError(
                    f"rows that hold tokens could not be released: {Status(int(status))!r}; this is a bug"
                )

    def warmup(self) -> list[str]:
        """Compiles every program that steps can need and returns a line for each."""
        for size in self.token_buckets:
            self._program("prefill", size)
        for size in self.row_buckets:
            self._program("decode", size)
        return [f"prefill_step: {size} tokens" for size in self.token_buckets] + [
            f"decode_many: {size} rows x {self._decode_steps} steps" for size in self.row_buckets
        ]

    def _run(self, program: Any, *plan: PrefillPlan) -> StepOutput:
        self._state, output = program(self.params, self._state, *plan)
        return jax.device_get(output)

    def _program(self, kind: str, size: int) -> Any:
        if (kind, size) not in self._programs:
            self._programs[kind, size] = _compile(self._lower(kind, size), kind, size)
        return self._programs[kind, size]

    def _lower(self, kind: str, size: int) -> Any:
        if kind == "prefill":
            plan = PrefillPlan(
                token_ids=jnp.zeros(size, jnp.int32),
                num_new_tokens=jnp.zeros(self._state.is_active.shape, jnp.int32),
                is_last=jnp.zeros(self._state.is_active.shape, bool),
                rows=self._state.rows,
            )
            return prefill_step.lower(self._forward, self.params, self._state, plan, **self._static)
        static = self._static | {"num_steps": self._decode_steps, "num_rows": size}
        return decode_many.lower(self._forward, self.params, self._state, **static)


def _has_compilation_cache() -> bool:
    return jax.config.jax_compilation_cache_dir is not None


def _compile(lowered: Any, kind: str, size: int) -> Any:
    is_small_product = jax.default_backend() == "cpu" and kind == "decode" and size >= _ONEDNN_MIN_ROWS
    # The options exist in JAX 0.10 too, but its compiler dies on such programs.
    if is_small_product and jax.__version_info__ >= (0, 12) and not _has_compilation_cache():
        try:
            return lowered.compile(compiler_options=_ONEDNN)
        except jax.errors.JaxRuntimeError as error:
            if "No such compile option" not in str(error):
                raise  # the options are experimental: some builds of XLA may not know them
    return lowered.compile()


def check_contract(forward: Forward, params: Any, state: EngineState, implementation: str | None) -> int:
    """Traces one step of the model, without running it, and returns the number of its logits columns.

    Raises:
        ValueError: forward does not return what the contract says.
    """
    num_rows = state.is_active.shape[0]

    def first_step(params: Any, state: EngineState) -> Any:
        counts = jnp.zeros(num_rows, jnp.int32).at[0].set(1)
        _, table, appended = append_tokens(state.pool, state.table, counts, max_new_tokens=1)
        batch = build_ragged_batch(table, appended, counts, jnp.zeros(1, jnp.int32), implementation=implementation)
        return forward(params, batch, state.cache)

    result = jax.eval_shape(first_step, params, state)
    if not (isinstance(result, tuple) and len(result) == 2):
        raise ValueError(f"forward must return (logits, cache), got {type(result).__name__}")
    logits, cache = result
    if getattr(logits, "ndim", 0) != 2 or logits.shape[0] != num_rows:
        raise ValueError(
            f"forward must return logits [R, V] of the R = {num_rows} tokens in batch.logits_indices, got shape "
            f"{getattr(logits, 'shape', None)}"
        )
    if cache != jax.eval_shape(lambda s: s.cache, state):
        raise ValueError("forward must return the cache with the structure, shapes and dtypes that it was given")
    return logits.shape[1]
