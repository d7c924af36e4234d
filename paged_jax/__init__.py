"""PagedAttention for JAX."""

from paged_jax.attention import attend, paged_attention
from paged_jax.batch import StepBatch, build_decode_batch, build_ragged_batch
from paged_jax.block_pool import BlockPool, Status
from paged_jax.block_table import BlockTable
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
from paged_jax.kv_cache import KVCache, LayerCache
from paged_jax.outputs import CompletionOutput, RequestOutput
from paged_jax.sampling_params import SamplingParams
