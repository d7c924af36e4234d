"""PagedAttention for JAX: a functional block manager, paged attention under jit, and the decode loop that owns both."""

from paged_jax.attention import attend, paged_attention
from paged_jax.batch import StepBatch, build_decode_batch, build_ragged_batch
from paged_jax.beam_search import BeamState, BeamStepOutput, KeptBeams, beam_search_many, init_beams
from paged_jax.block_pool import BlockPool, Status, allocate, init_pool
from paged_jax.block_table import (
    Appended,
    BlockTable,
    InvariantError,
    append_tokens,
    check_invariants,
    fork,
    init_table,
    release,
    reparent,
    truncate,
)
from paged_jax.config import CacheConfig
from paged_jax.decode import (
    EngineState,
    FinishReason,
    PrefillPlan,
    RowParams,
    StepOutput,
    decode_many,
    decode_step,
    init_state,
    prefill_step,
    release_rows,
)
from paged_jax.engine import LLM
from paged_jax.kv_cache import KVCache, LayerCache, copy_blocks, init_cache, write_kv
from paged_jax.outputs import BeamSearchOutput, BeamSequence, CompletionOutput, RequestOutput
from paged_jax.sampling import SamplingState, init_sampling_state, sample, seed_words
from paged_jax.sampling_params import BeamSearchParams, SamplingParams

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "Appended",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSequence",
    "BeamState",
    "BeamStepOutput",
    "BlockPool",
    "BlockTable",
    "CacheConfig",
    "CompletionOutput",
    "EngineState",
    "FinishReason",
    "InvariantError",
    "KVCache",
    "KeptBeams",
    "LayerCache",
    "PrefillPlan",
    "RequestOutput",
    "RowParams",
    "SamplingParams",
    "SamplingState",
    "Status",
    "StepBatch",
    "StepOutput",
    "allocate",
    "append_tokens",
    "attend",
    "beam_search_many",
    "build_decode_batch",
    "build_ragged_batch",
    "check_invariants",
    "copy_blocks",
    "decode_many",
    "decode_step",
    "fork",
    "init_beams",
    "init_cache",
    "init_pool",
    "init_sampling_state",
    "init_state",
    "init_table",
    "paged_attention",
    "prefill_step",
    "release",
    "release_rows",
    "reparent",
    "sample",
    "seed_words",
    "truncate",
    "write_kv",
]
