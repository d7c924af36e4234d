"""ModelRunner: owns the device state and the compiled programs; turns plans into StepOutputs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from paged_jax.batch import build_ragged_batch
from paged_jax.beam_search import BeamState, BeamStepOutput, beam_search_many
from paged_jax.block_pool import Status
from paged_jax.block_table import append_tokens
from paged_jax.config import CacheConfig, check_positive
from paged_jax.decode import acquire_prefix, decode_many, prefill_step, release_rows, reset_prefix_cache
from paged_jax.inputs import MAX_STOP_TOKEN_IDS
from paged_jax.logprobs import LogprobsMode
from paged_jax.recorder import build_block_map
from paged_jax.request_rules import first_stop, needs_tables
from paged_jax.sampling import seed_words
from paged_jax.scheduler import Request
from paged_jax.state import EngineState, Forward, PrefillPlan, StepOutput, init_state
from paged_jax.swap import BlockContent, RowPlan, read_blocks, restore_rows, write_blocks
from paged_jax.token_rules import row_of_tables, set_rules

#: XLA:CPU multiplies a handful of rows faster with oneDNN than with its default library: decode steps of 4 to 16 rows
#: take 0.75 - 0.9 of the time; one row, and prefill chunks, are slower with it (benchmarks/README.md). XLA cannot store
#: such programs in the persistent compilation cache, so where one is configured the cache goes first.
_ONEDNN = {
    "xla_cpu_use_onednn": True,
    "xla_cpu_experimental_onednn_fusion_type": "LIBRARY_FUSION_TYPE_DOT",
    "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_REDUCE",
}
_ONEDNN_MIN_ROWS = 4
#: Blocks that one transfer between device and host moves.
_BLOCKS_PER_TRANSFER = 32
#: Tokens of a ragged step that returns log-probabilities of prompts: it holds their logits all at once.
MAX_PROMPT_LOGPROBS_TOKENS = 256


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


class RowChunk(NamedTuple):
    """What one row stores in a ragged step.

    Attributes:
        row: of the block tables.
        token_ids: its next tokens; a row that generates has one, which the device knows itself.
        is_last: it generates a token with this step.
        children: rows that fork it, and generate a token if it does.
        next_token_ids: the tokens that follow each of token_ids, if their log-probabilities are wanted.
    """

    row: int
    token_ids: Sequence[int]
    is_last: bool = False
    children: Sequence[int] = ()
    next_token_ids: Sequence[int] = ()


@dataclass(frozen=True, kw_only=True, eq=False)
class SavedRows:
    """Rows on the host: what swap_out took.

    Attributes:
        numbers: int32 [G, n, M] as in RowPlan, for n rows.
        seq_lens: int32 [n] tokens that each row held.
        num_blocks: blocks that the rows held together.
        content: of the blocks, in the order of their numbers, a few at a time.
    """

    numbers: np.ndarray
    seq_lens: np.ndarray
    num_blocks: int
    content: list[BlockContent]


class ReturningRow(NamedTuple):
    """A saved row comes back: into `row`, with the token that it generated last, if it generates already."""

    row: int
    last_token: int
    is_active: bool


class ModelRunner:
    """Runs steps of one model.

    Every program is compiled ahead of its first run for a shape from a short list, so that no step retraces:
    ragged steps of 16, 32, ... max_num_batched_tokens tokens, decode steps of 1, 2, 4, ... max_num_seqs rows, the
    look-up of a prompt in the prefix cache, and what swapping needs.

    Args: as of LLM.

    Attributes:
        counters: totals of BlockCounters as Python integers.
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
        enable_prefix_caching: bool,
        implementation: str | None,
        logprobs_mode: LogprobsMode,
    ) -> None:
        self.params = params
        self.token_buckets = bucket_sizes(max_num_batched_tokens, min(16, max_num_batched_tokens))
        self.row_buckets = bucket_sizes(cache_config.max_num_seqs)
        self._forward = forward
        self._decode_steps = decode_steps
        init = partial(
            init_state,
            cache_config,
            max_stop_token_ids=MAX_STOP_TOKEN_IDS,
            enable_prefix_caching=enable_prefix_caching,
        )
        self.vocab_size = check_contract(forward, params, jax.eval_shape(init), implementation)
        if vocab_size is not None:
            check_positive("LLM", vocab_size=vocab_size)
            if vocab_size > self.vocab_size:
                raise ValueError(f"vocab_size must be in 1 ... {self.vocab_size}, the model's logits; got {vocab_size}")
            self.vocab_size = vocab_size
        self._static = {"vocab_size": self.vocab_size, "implementation": implementation}
        self._static_draws = self._static | {"logprobs_mode": logprobs_mode}
        self._init_state = partial(init, vocab_size=self.vocab_size)
        self._state = self._init_state()
        self._block_transfer = min(_BLOCKS_PER_TRANSFER, cache_config.num_blocks - 1)
        self.counters = dict.fromkeys(vars(self._state.counters), 0)
        self._last_counters = self.counters
        # The host's copy of the row parameters: written when a request gets its row, copied into each plan.
        self._rows = jax.tree.map(lambda x: np.array(x), self._state.rows)
        self._programs: dict[tuple[str | int, ...], Any] = {}
        self._compile = _compile

    @property
    def num_free_blocks(self) -> int:
        """Blocks that the pool can hand out now."""
        return int(np.asarray(self._state.pool.count).sum())

    @property
    def num_cached_blocks(self) -> int:
        """Of these, blocks that hold a cached prefix."""
        return int(np.asarray(self._state.pool.count)[1])

    def block_map(self, requests: Mapping[int, int]) -> np.ndarray:
        """Whom each block belongs to, see build_block_map, given the number of its request for each row in use."""
        pool = self._state.pool
        block_ids, ref_count, content_uid = map(
            np.asarray, (self._state.table.block_ids, pool.ref_count, pool.content_uid)
        )
        return build_block_map(block_ids, ref_count, content_uid, requests)

    @property
    def has_prefix_cache(self) -> bool:
        """Whether prefix caching is on."""
        return self._state.prefix_cache is not None

    @property
    def _max_prompt_tokens(self) -> int:
        return self._state.table.block_ids.shape[-1] * self._state.table.block_size

    @property
    def max_prompt_logprobs_tokens(self) -> int:
        """Tokens of a ragged step at most if it returns log-probabilities of prompts."""
        return min(MAX_PROMPT_LOGPROBS_TOKENS, self.token_buckets[-1])

    @property
    def compile_count(self) -> int:
        """Programs compiled so far."""
        return len(self._programs)

    def set_row(self, row: int, request: Request, seed: int, num_generated: int) -> None:
        """Gives `row` the parameters of its request, which has generated tokens before if it was preempted; they travel
        with the row's next tokens."""
        self.set_namespace(row, request.namespace)
        sampling, rules, params = self._rows.sampling, self._rows.rules, request.params
        stop = np.full(MAX_STOP_TOKEN_IDS, -1, np.int32)
        stop[: len(request.stop_token_ids)] = request.stop_token_ids
        for array, value in (
            (sampling.temperature, params.temperature),
            (sampling.top_k, params.top_k),
            (sampling.top_p, params.top_p),
            (sampling.min_p, params.min_p),
            (sampling.seed, seed_words(seed)),
            (self._rows.num_remaining, request.max_tokens - num_generated),
            (self._rows.stop_token_ids, stop),
            (self._rows.reserve, request.reserve),
            (self._rows.num_logprobs, -1 if params.logprobs is None else params.logprobs),
            (rules.presence_penalty, params.presence_penalty),
            (rules.frequency_penalty, params.frequency_penalty),
            (rules.repetition_penalty, params.repetition_penalty),
            (rules.num_prompt_tokens, len(request.prompt_token_ids)),
            (rules.first_stop, first_stop(params, request.max_tokens)),
            (rules.has_bias, bool(params.logit_bias)),
            (rules.has_allowed, params.allowed_token_ids is not None),
            (rules.has_bad_words, bool(request.bad_words)),
        ):
            cast(np.ndarray, array)[row] = value

    def set_rules(self, row: int, request: Request, token_ids: Sequence[int]) -> None:
        """Gives `row` what the rules of its request need, if it has such rules.

        Args:
            token_ids: the tokens that the row has so far, prompt and generated.
        """
        if not needs_tables(request.params):
            return
        tables = self._state.rule_tables
        assert tables is not None
        values = row_of_tables(
            tables,
            token_ids=token_ids,
            logit_bias=request.params.logit_bias,
            allowed_token_ids=request.params.allowed_token_ids,
            bad_words=request.bad_words,
        )
        self._state = replace(self._state, rule_tables=self._program("set_rules", 1)(tables, np.int32(row), values))

    def set_namespace(self, row: int, namespace: int) -> None:
        """Decides under which namespace the blocks that `row` fills are cached, and that it may use every block; like
        the parameters it travels with the row's tokens."""
        cast(np.ndarray, self._rows.namespace)[row] = namespace
        cast(np.ndarray, self._rows.reserve)[row] = 0

    def acquire_prefix(self, row: int, token_ids: Sequence[int], namespace: int, num_blocks: int = 0) -> int | None:
        """Gives the empty `row` the cached blocks of its tokens and returns the number of tokens in them; None, and
        nothing happens, unless num_blocks blocks are free, cached ones that others hold already not counted."""
        padded = np.zeros(self._max_prompt_tokens, np.int32)
        padded[: len(token_ids)] = token_ids
        program = self._program("acquire", len(padded))
        arguments = (np.int32(row), padded, np.int32(len(token_ids)), np.int32(namespace), np.int32(num_blocks))
        self._state, num_cached, status = program(self._state, *arguments)
        if status == Status.OUT_OF_BLOCKS:
            return None
        _check("acquire_prefix", status)
        return int(num_cached)

    def prefill(self, chunks: Sequence[RowChunk]) -> StepOutput:
        """Runs one ragged step of at most max_num_batched_tokens tokens, or max_prompt_logprobs_tokens if one of the
        chunks wants log-probabilities; those of the chunks follow each other in order of their rows."""
        parents = np.arange(len(self._state.is_active), dtype=np.int32)
        counts = np.zeros(self._state.is_active.shape, np.int32)
        is_last = np.zeros(self._state.is_active.shape, bool)
        tokens: list[int] = []
        following: list[int] = []
        wants_logprobs = any(chunk.next_token_ids for chunk in chunks)
        for row, token_ids, ends, children, next_token_ids in sorted(chunks):
            tokens += token_ids
            following += next_token_ids or [0] * len(token_ids)
            counts[row], is_last[row] = len(token_ids), ends
            parents[list(children)] = row
        limit = self.max_prompt_logprobs_tokens
        size = limit if wants_logprobs else bucket_for(len(tokens), self.token_buckets)
        padded = np.zeros((2, size), np.int32)
        padded[:, : len(tokens)] = tokens, following
        # Fresh arrays: the device may read host memory after this returns, so nothing here is written again.
        plan = cast(Any, PrefillPlan)(
            token_ids=padded[0],
            num_new_tokens=counts,
            is_last=is_last,
            rows=jax.tree.map(np.copy, self._rows),
            parents=parents,
            next_token_ids=padded[1] if wants_logprobs else None,
        )
        return self._run(self._program("prefill_logprobs" if wants_logprobs else "prefill", size), plan)

    def decode(self, num_active: int, *, until_finish: bool = False) -> StepOutput:
        """Runs up to decode_steps steps of the `num_active` active rows, or until one of them finishes."""
        program = self._program("decode", bucket_for(num_active, self.row_buckets))
        return self._run(program, until_finish=np.bool_(until_finish))

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

    def num_blocks_of(self, rows: Sequence[int]) -> int:
        """Blocks that rows hold together."""
        return len(self._held_blocks(rows)[0])

    def _held_blocks(self, rows: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """(ids of the blocks that rows hold, numbers [G, n, M] as in SavedRows)."""
        table = np.asarray(self._state.table.block_ids)[:, list(rows)]
        ids, numbers = np.unique(np.append(table, 0), return_inverse=True)  # the null block gets number 0
        return ids[1:], numbers[:-1].reshape(table.shape).astype(np.int32)

    def swap_out(self, rows: Sequence[int]) -> SavedRows:
        """Copies what rows hold to the host and empties them."""
        ids, numbers = self._held_blocks(rows)
        seq_lens = np.array(self._state.table.seq_lens)[list(rows)]
        program = self._program("read_blocks", self._block_transfer)
        content = [_to_host(program(self._state, part)) for part in self._transfers(ids)]
        jax.block_until_ready(content)  # before the blocks are anyone else's
        self.release(rows)
        return SavedRows(numbers=numbers, seq_lens=seq_lens, num_blocks=len(ids), content=content)

    def swap_in(self, saved: SavedRows, rows: Sequence[ReturningRow], reserve: int) -> bool:
        """Brings saved rows back, with the parameters that set_row has given; False, and nothing happens, unless
        `reserve` blocks stay free."""
        table = self._state.table
        seq_lens, last_token = np.zeros((2, *table.seq_lens.shape), np.int32)
        numbers, is_active = np.zeros(table.block_ids.shape, np.int32), np.zeros(table.seq_lens.shape, bool)
        where = [r.row for r in rows]
        numbers[:, where], seq_lens[where] = saved.numbers, saved.seq_lens
        last_token[where], is_active[where] = [r.last_token for r in rows], [r.is_active for r in rows]
        plan = cast(Any, RowPlan)(
            numbers=numbers,
            num_blocks=np.int32(saved.num_blocks),
            seq_lens=seq_lens,
            rows=jax.tree.map(np.copy, self._rows),
            last_token=last_token,
            is_active=is_active,
            reserve=np.int32(reserve),
        )
        self._state, ids, status = self._program("restore_rows", len(is_active))(self._state, plan)
        if status == Status.OUT_OF_BLOCKS:
            return False
        _check("restore_rows", status)
        program = self._program("write_blocks", self._block_transfer)
        for part, content in zip(self._transfers(np.asarray(ids)[: saved.num_blocks]), saved.content, strict=True):
            self._state = program(self._state, part, _to_device(content))
        return True

    def _transfers(self, block_ids: np.ndarray) -> list[np.ndarray]:
        """The ids in parts of the size of a transfer, padded with null blocks."""
        size = self._block_transfer
        padded = np.pad(block_ids.astype(np.int32), (0, -len(block_ids) % size))
        return list(padded.reshape(-1, size))

    def release(self, rows: Sequence[int]) -> None:
        """Empties those of the rows that hold tokens."""
        chosen = np.zeros(self._state.is_active.shape, bool)
        chosen[list(rows)] = True
        held = chosen & (np.asarray(self._state.table.seq_lens) > 0)
        if held.any():
            self._state, status = self._program("release_rows", len(held))(self._state, held)
            _check("release_rows", status)

    def reset(self) -> None:
        """Empties every row that the device holds, whatever was interrupted before the host heard of it."""
        if any(x.is_deleted() for x in jax.tree.leaves(self._state)):
            # A step took the donated state and its result never arrived.
            self._state, self._last_counters = self._init_state(), dict.fromkeys(self.counters, 0)
        else:
            self.release(range(len(self._state.is_active)))

    def reset_prefix_cache(self) -> bool:
        """Forgets everything that is cached, unless blocks are in use."""
        self._state, status = reset_prefix_cache(self._state)
        return bool(status == Status.OK)

    def update_params(self, params: Any) -> None:
        """Takes other weights for the same programs.

        Raises:
            ValueError: their structure, shapes or dtypes differ.
        """
        (old, old_tree), (new, new_tree) = (jax.tree_util.tree_flatten_with_path(p) for p in (self.params, params))
        if old_tree != new_tree:
            raise ValueError("params must have the structure of the present ones: the same keys and containers")
        for (path, a), (_, b) in zip(old, new, strict=True):
            if jax.typeof(a) != jax.typeof(b):
                name = jax.tree_util.keystr(path)
                raise ValueError(f"params{name} must be {jax.typeof(a)} like the present one, got {jax.typeof(b)}")
        self.params = params

    def warmup(self) -> list[str]:
        """Compiles every program that steps can need and returns a line for each."""
        num_rows, prompt, chunk = len(self._state.is_active), self._max_prompt_tokens, self.max_prompt_logprobs_tokens
        programs = [
            *([("acquire", prompt, f"acquire_prefix: prompts of up to {prompt} tokens")] * self.has_prefix_cache),
            *(("prefill", size, f"prefill_step: {size} tokens") for size in self.token_buckets),
            ("prefill_logprobs", chunk, f"prefill_step with prompt_logprobs: {chunk} tokens"),
            *(("decode", size, f"decode_many: {size} rows x {self._decode_steps} steps") for size in self.row_buckets),
            *((kind, num_rows, f"{kind}: {num_rows} rows") for kind in ("restore_rows", "release_rows")),
            *(
                (kind, self._block_transfer, f"{kind}: {self._block_transfer} blocks")
                for kind in ("read_blocks", "write_blocks")
            ),
            ("set_rules", 1, "set_rules: 1 row"),
        ]
        for kind, size, _ in programs:
            self._program(kind, size)
        return [line for _, _, line in programs]

    def _run(self, program: Any, *plan: PrefillPlan, **options: Any) -> StepOutput:
        self._state, output = program(self.params, self._state, *plan, **options)
        # The log-probabilities stay on the device: nobody may want them.
        left = {"logprobs": output.logprobs, "prompt_logprobs": output.prompt_logprobs}
        output = replace(jax.device_get(replace(output, **dict.fromkeys(left))), **left)
        counters = {name: int(count) for name, count in vars(output.counters).items()}
        for name, count in counters.items():
            self.counters[name] += (count - self._last_counters[name]) % 2**32
        self._last_counters = counters
        return output

    def _program(self, kind: str, size: int) -> Any:
        if (kind, size) not in self._programs:
            self._programs[kind, size] = self._compile(self._lower(kind, size), kind, size)
        return self._programs[kind, size]

    def _lower(self, kind: str, size: int) -> Any:
        if kind == "acquire":
            one = np.int32(0)
            return acquire_prefix.lower(self._state, one, np.zeros(size, np.int32), one, one, one)
        if kind == "release_rows":
            return release_rows.lower(self._state, np.zeros(size, bool))
        if kind == "read_blocks":
            return read_blocks.lower(self._state, np.zeros(size, np.int32))
        if kind == "write_blocks":
            ids = np.zeros(size, np.int32)
            return write_blocks.lower(self._state, ids, jax.eval_shape(read_blocks, self._state, ids))
        if kind == "restore_rows":
            table = self._state.table
            plan = RowPlan(
                numbers=table.block_ids,
                num_blocks=jnp.int32(0),
                seq_lens=table.seq_lens,
                rows=self._state.rows,
                last_token=self._state.last_token,
                is_active=self._state.is_active,
                reserve=jnp.int32(0),
            )
            return restore_rows.lower(self._state, plan)
        if kind == "set_rules":
            tables = cast(Any, self._state.rule_tables)
            return jax.jit(set_rules, donate_argnames="tables").lower(
                tables, np.int32(0), row_of_tables(tables, token_ids=())
            )
        if kind in ("prefill", "prefill_logprobs"):
            plan = PrefillPlan(
                token_ids=jnp.zeros(size, jnp.int32),
                num_new_tokens=jnp.zeros(self._state.is_active.shape, jnp.int32),
                is_last=jnp.zeros(self._state.is_active.shape, bool),
                rows=self._state.rows,
                parents=jnp.zeros(self._state.is_active.shape, jnp.int32),
                next_token_ids=jnp.zeros(size, jnp.int32) if kind == "prefill_logprobs" else None,
            )
            return prefill_step.lower(self._forward, self.params, self._state, plan, **self._static_draws)
        static = self._static_draws | {"num_steps": self._decode_steps, "num_rows": size}
        return decode_many.lower(self._forward, self.params, self._state, until_finish=np.bool_(False), **static)


def _host_sharding() -> jax.sharding.Sharding | None:
    """Where swapped blocks go on an accelerator: pinned host memory, if it has it. None: plain memory."""
    device = jax.devices()[0]
    if device.platform == "cpu" or "pinned_host" not in {m.kind for m in device.addressable_memories()}:
        return None
    return jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")


def _to_host(content: BlockContent) -> BlockContent:
    sharding = _host_sharding()
    return jax.device_get(content) if sharding is None else jax.device_put(content, sharding)


def _to_device(content: BlockContent) -> BlockContent:
    sharding = _host_sharding()
    if sharding is None:
        return content
    return jax.device_put(content, jax.sharding.SingleDeviceSharding(jax.devices()[0]))


def _check(operation: str, status: Any) -> None:
    if status != Status.OK:
        raise RuntimeError(f"{operation}() was refused: {Status(int(status))!r}; this is a bug")


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
        tokens, block_size = jnp.zeros(1, jnp.int32), state.cache.kernel_block_size
        batch = build_ragged_batch(
            table, appended, counts, tokens, kernel_block_size=block_size, implementation=implementation
        )
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
