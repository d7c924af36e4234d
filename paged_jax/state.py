"""What the steps of generation take, keep and give: EngineState, PrefillPlan, StepOutput."""

import enum
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32, UInt32

from paged_jax import block_table
from paged_jax.batch import StepBatch
from paged_jax.block_pool import BlockPool
from paged_jax.block_table import BlockTable
from paged_jax.config import CacheConfig
from paged_jax.kv_cache import KVCache, init_cache
from paged_jax.logprobs import TokenLogprobs
from paged_jax.prefix_cache import PrefixCache, init_prefix_cache
from paged_jax.sampling import SamplingState, init_sampling_state
from paged_jax.token_rules import RuleParams, RuleTables, init_rule_params, init_rule_tables

#: forward(params, batch, cache) -> (logits [R, V] of batch.logits_indices, cache). Pure; hashable, for it is static.
#: JAX keeps it for ever: use one function for all engines, and pass weights through params, never through a closure.
Forward = Callable[[Any, StepBatch, KVCache], tuple[Array, KVCache]]


class FinishReason(enum.IntEnum):
    """Why a row stopped, as it comes from the device."""

    NONE = 0
    STOP = 1  # it drew one of its stop tokens
    LENGTH = 2  # it has its number of tokens, or its row of the block table is full
    ERROR = 3  # its logits were not finite; the token of that step is not part of the output
    NO_TOKEN = 4  # its rules left no token


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class RowParams:
    """What a request brings to its row.

    Attributes:
        sampling: [S] arrays of sampling parameters.
        rules: [S] arrays of what changes the logits first; without effect in a state without rule_tables.
        num_remaining: int32 [S] tokens that the row may still generate, at least 1.
        stop_token_ids: int32 [S, J] tokens that end the row, padded with -1, which no token equals.
        namespace: int32 [S] >= 0: rows share cached blocks with rows of the same namespace only.
        reserve: int32 [S] blocks that must stay free when the row takes one; 0 for privileged rows.
        num_logprobs: int32 [S] most likely tokens whose log-probabilities the row wants to know beside that of its own,
            at most MAX_LOGPROBS; -1 = none at all.
    """

    sampling: SamplingState
    rules: RuleParams
    num_remaining: Int32[Array, " S"]
    stop_token_ids: Int32[Array, "S J"]
    namespace: Int32[Array, " S"]
    reserve: Int32[Array, " S"]
    num_logprobs: Int32[Array, " S"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class BlockCounters:
    """Totals since the state was made; all wrap around at 2^32.

    Attributes:
        queries: uint32 [] prompt tokens that were looked up in the prefix cache.
        hits: uint32 [] of these, tokens that were found.
        evictions: uint32 [] cached blocks that were taken for other content.
        copies: uint32 [] blocks copied on write.
    """

    queries: UInt32[Array, ""]
    hits: UInt32[Array, ""]
    evictions: UInt32[Array, ""]
    copies: UInt32[Array, ""]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class EngineState:
    """Everything that lives on the device between steps.

    Attributes:
        pool: free queues, reference counts and identities.
        table: block tables and sequence lengths.
        cache: K and V.
        prefix_cache: what the blocks hold; None: prefix caching is off.
        counters: totals for the host.
        rows: per-row parameters of the requests.
        rule_tables: what their rules need in large; None: no row has rules.
        last_token: int32 [S] the token that the row generated last; its K/V are stored by the next step.
        is_active: bool [S] rows that take part in decode steps: the prompt is complete, the row has not finished.
    """

    pool: BlockPool
    table: BlockTable
    cache: KVCache
    prefix_cache: PrefixCache | None
    counters: BlockCounters
    rows: RowParams
    rule_tables: RuleTables | None
    last_token: Int32[Array, " S"]
    is_active: Bool[Array, " S"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class PrefillPlan:
    """One ragged step, made on the host: chunks of prompts, and the next token of rows that generate already.

    Attributes:
        token_ids: int32 [T] the rows' tokens one after the other in row order, padded with 0. An active row has one
            token, and what stands here for it is not looked at: it stores the token that it generated last.
        num_new_tokens: int32 [S] tokens per row in this step.
        is_last: bool [S] rows whose prompt is complete with this chunk: they generate a token now, like active rows.
        rows: parameters of the rows with new tokens that are not active, and of those that fork them; others are not
            looked at.
        parents: int32 [S] or None. A row s != parents[s] shares all that row parents[s] holds after this step, which
            must bring it tokens, and if that row generates a token draws one of its own; parents[s] == s, or None:
            nothing is forked.
        next_token_ids: int32 [T] or None. The token that follows each one of token_ids in its prompt: the step returns
            their log-probabilities. None: it returns none.
    """

    token_ids: Int32[Array, " T"]
    num_new_tokens: Int32[Array, " S"]
    is_last: Bool[Array, " S"]
    rows: RowParams
    parents: Int32[Array, " S"] | None = None
    next_token_ids: Int32[Array, " T"] | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class StepOutput:
    """What the host reads after a dispatch; nothing else is downloaded.

    Attributes:
        token_ids: int32 [S, K] generated tokens per row; the first num_tokens[s] are meaningful.
        num_tokens: int32 [S].
        finish: int32 [S] FinishReason of the rows that ended in this dispatch and gave back their blocks.
        num_steps: int32 [] steps that ran, <= K.
        num_free: int32 [] free blocks afterwards.
        num_cached: int32 [] of these, blocks whose content is cached.
        min_free: int32 [] the fewest free blocks that there were at any moment.
        status: int32 [] Status. Not OK: the next step was refused; the state is as after num_steps steps, so that no
            token is lost and the same call can be made again when there is room.
        counters: of the state.
        logprobs: [S, K] of token_ids, meaningful for rows that ask for them.
        prompt_logprobs: [T] of the plan's next_token_ids after the tokens before them, ranked by the raw ones; None:
            there were none.
    """

    token_ids: Int32[Array, "S K"]
    num_tokens: Int32[Array, " S"]
    finish: Int32[Array, " S"]
    num_steps: Int32[Array, ""]
    num_free: Int32[Array, ""]
    num_cached: Int32[Array, ""]
    min_free: Int32[Array, ""]
    status: Int32[Array, ""]
    counters: BlockCounters
    logprobs: TokenLogprobs
    prompt_logprobs: TokenLogprobs | None


def init_state(
    config: CacheConfig,
    *,
    max_stop_token_ids: int = 8,
    enable_prefix_caching: bool = True,
    vocab_size: int | None = None,
) -> EngineState:
    """Allocates all device memory of the engine, once.

    Args:
        config: sizes.
        max_stop_token_ids: static width of the per-row list of stop tokens.
        enable_prefix_caching: keep what full blocks hold, for `acquire_prefix`.
        vocab_size: tokens of the model; with it the state has tables for the rules of SamplingParams (bias, allowed
            ids, bad words, min_tokens, penalties), without it steps do not look at them.
    """
    pool, table = block_table.init(config)
    num_rows = config.max_num_seqs
    return EngineState(
        pool=pool,
        table=table,
        cache=init_cache(config),
        prefix_cache=init_prefix_cache(config) if enable_prefix_caching else None,
        # An array each: a donated buffer cannot be given twice.
        counters=BlockCounters(**{f.name: jnp.zeros((), jnp.uint32) for f in fields(BlockCounters)}),
        rows=RowParams(
            sampling=init_sampling_state(num_rows),
            rules=init_rule_params(num_rows),
            num_remaining=jnp.zeros(num_rows, jnp.int32),
            stop_token_ids=jnp.full((num_rows, max_stop_token_ids), -1, jnp.int32),
            namespace=jnp.zeros(num_rows, jnp.int32),
            reserve=jnp.zeros(num_rows, jnp.int32),
            num_logprobs=jnp.full(num_rows, -1, jnp.int32),
        ),
        rule_tables=None if vocab_size is None else init_rule_tables(num_rows, config.max_model_len, vocab_size),
        last_token=jnp.zeros(num_rows, jnp.int32),
        is_active=jnp.zeros(num_rows, bool),
    )
