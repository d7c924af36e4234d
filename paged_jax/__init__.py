"""PagedAttention for JAX: a functional block manager, paged attention under jit, and the decode loop that owns both."""

from paged_jax.attention import attend, paged_attention
from paged_jax.batch import StepBatch, build_decode_batch, build_ragged_batch
from paged_jax.beam_search import BeamState, BeamStepOutput, KeptBeams, beam_search_many, init_beams
from paged_jax.block_pool import BlockPool, Status, allocate, init_pool
from paged_jax.block_size import BlockSizeCosts, BlockSizeReport, recommend_block_size
from paged_jax.block_table import (
    Appended,
    BlockTable,
    append_tokens,
    fork,
    init_table,
    release,
    release_out_of_window,
    reparent,
    truncate,
)
from paged_jax.chat import ChatTemplate
from paged_jax.config import CacheConfig, SchedulerConfig, group_layers
from paged_jax.decode import (
    acquire_prefix,
    decode_many,
    decode_step,
    prefill_step,
    release_rows,
    reset_prefix_cache,
)
from paged_jax.engine import LLM
from paged_jax.inputs import sample_seed
from paged_jax.invariants import InvariantError, check_invariants
from paged_jax.kv_cache import KVCache, LayerCache, copy_blocks, init_cache, write_kv
from paged_jax.logprobs import Logprob, TokenLogprobs
from paged_jax.metrics import Metrics, RequestMetrics, StepRecord
from paged_jax.outputs import BeamSearchOutput, BeamSequence, CompletionOutput, RequestOutput
from paged_jax.plots import plot_steps
from paged_jax.prefix_cache import PrefixCache, copy_tokens, init_prefix_cache, match_prefix, publish, write_tokens
from paged_jax.recorder import Recorder, build_block_map
from paged_jax.sampling import SamplingState, init_sampling_state, sample, seed_words
from paged_jax.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from paged_jax.state import (
    BlockCounters,
    EngineState,
    FinishReason,
    PrefillPlan,
    RowParams,
    StepOutput,
    init_state,
)
from paged_jax.streaming import AsyncStreams
from paged_jax.text_stream import TextStream
from paged_jax.token_rules import RuleParams, RuleTables, init_rule_params, row_of_tables, set_rules

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "Appended",
    "AsyncStreams",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSequence",
    "BeamState",
    "BeamStepOutput",
    "BlockCounters",
    "BlockPool",
    "BlockSizeCosts",
    "BlockSizeReport",
    "BlockTable",
    "CacheConfig",
    "ChatTemplate",
    "CompletionOutput",
    "EngineState",
    "FinishReason",
    "InvariantError",
    "KVCache",
    "KeptBeams",
    "LayerCache",
    "Logprob",
    "Metrics",
    "PrefillPlan",
    "PrefixCache",
    "Recorder",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "RowParams",
    "RuleParams",
    "RuleTables",
    "SamplingParams",
    "SamplingState",
    "SchedulerConfig",
    "Status",
    "StepBatch",
    "StepOutput",
    "StepRecord",
    "TextStream",
    "TokenLogprobs",
    "acquire_prefix",
    "allocate",
    "append_tokens",
    "attend",
    "beam_search_many",
    "build_block_map",
    "build_decode_batch",
    "build_ragged_batch",
    "check_invariants",
    "copy_blocks",
    "copy_tokens",
    "decode_many",
    "decode_step",
    "fork",
    "group_layers",
    "init_beams",
    "init_cache",
    "init_pool",
    "init_prefix_cache",
    "init_rule_params",
    "init_sampling_state",
    "init_state",
    "init_table",
    "match_prefix",
    "paged_attention",
    "plot_steps",
    "prefill_step",
    "publish",
    "recommend_block_size",
    "release",
    "release_out_of_window",
    "release_rows",
    "reparent",
    "reset_prefix_cache",
    "row_of_tables",
    "sample",
    "sample_seed",
    "seed_words",
    "set_rules",
    "truncate",
    "write_kv",
    "write_tokens",
]
