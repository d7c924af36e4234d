"""StepBatch: what a model needs to know about the tokens of one step. Built inside the step, never stored."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from paged_jax._typing import typed
from paged_jax.block_table import Appended, BlockTable
from paged_jax.kv_cache import kernel_block_ids


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class StepBatch:
    """The tokens of one step, where each of them is stored, and what it may look at.

    A decode batch (query_start_loc is None) has one token per row: token s belongs to row s. In a ragged batch (prefill
    chunks, or chunks and decode rows mixed) the tokens query_start_loc[s] ... query_start_loc[s + 1] - 1 belong to row
    s and are the last ones of the seq_lens[s] tokens that it holds.

    Attributes:
        token_ids: int32 [T], 0 for padding tokens.
        positions: int32 [T] index of each token in its sequence, 0 for padding tokens.
        seq_lens: int32 [S] tokens stored per row, this step's included; 0 for a row that does not take part.
        query_start_loc: int32 [S + 1] prefix sums of the rows' token counts, or None in a decode batch.
        block_tables: int32 [G, S, M] blocks of the K/V arrays, the null block past each row's end.
        slot_mapping: int32 [G, T] where each token's K and V go; padding tokens: slot 0, in the null block.
        logits_indices: int32 [R] the tokens whose logits the model must return, in this order. By default R = S: the
            last token of each row (any token for rows that do not take part).
        implementation: static, the attention implementation that the caller wants, None = by device.
        block_size: static, tokens per block that block_tables name; None: `attend` takes the layer's unchecked.
    """

    token_ids: Int32[Array, " T"]
    positions: Int32[Array, " T"]
    seq_lens: Int32[Array, " S"]
    query_start_loc: Int32[Array, " S1"] | None
    block_tables: Int32[Array, "G S M"]
    slot_mapping: Int32[Array, "G T"]
    logits_indices: Int32[Array, " R"]
    implementation: str | None = field(default=None, metadata={"static": True})
    block_size: int | None = field(default=None, metadata={"static": True})


@typed
def build_decode_batch(
    table: BlockTable,
    appended: Appended,
    rows: Int32[Array, " S"],
    token_ids: Int32[Array, " S"],
    *,
    kernel_block_size: int | None = None,
    implementation: str | None = None,
) -> StepBatch:
    """The batch of one decode step: one token for each listed row.

    Args:
        table, appended: after append_tokens(max_new_tokens=1) of one token for each listed row.
        rows: int32 [S] rows of the table, in any order; a value past the last row is padding.
        token_ids: int32 [S] the token that each listed row stores now.
        kernel_block_size: static, of the KVCache. Default: the table's block_size.
    """
    block_size = kernel_block_size or table.block_size
    in_table = rows < table.seq_lens.shape[0]
    seq_lens = table.seq_lens.at[rows].get(mode="fill", fill_value=0)
    return StepBatch(
        token_ids=jnp.where(in_table, token_ids, 0),
        positions=jnp.maximum(seq_lens - 1, 0),
        seq_lens=seq_lens,
        query_start_loc=None,
        block_tables=_expanded(table.block_ids.at[:, rows].get(mode="fill", fill_value=0), table, block_size),
        slot_mapping=appended.slot_mapping[:, :, 0].at[:, rows].get(mode="fill", fill_value=0),
        logits_indices=jnp.arange(rows.shape[0], dtype=jnp.int32),
        implementation=implementation,
        block_size=block_size,
    )


@typed
def build_ragged_batch(
    table: BlockTable,
    appended: Appended,
    num_new_tokens: Int32[Array, " S"],
    token_ids: Int32[Array, " T"],
    *,
    kernel_block_size: int | None = None,
    implementation: str | None = None,
) -> StepBatch:
    """The batch of a step in which row s stores num_new_tokens[s] tokens: prefill chunks, decode rows, or both.

    Args:
        table, appended: after append_tokens of num_new_tokens.
        num_new_tokens: int32 [S] over all rows of the table, 0 for rows that do not take part; the sum is <= T.
        token_ids: int32 [T] the rows' tokens one after the other in row order, then padding.
        kernel_block_size: static, of the KVCache. Default: the table's block_size.
    """
    block_size = kernel_block_size or table.block_size
    start = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(num_new_tokens, dtype=jnp.int32)])
    token = jnp.arange(token_ids.shape[0], dtype=jnp.int32)
    # Counts [2, 0, 3] have ends [2, 2, 5]: token 2 lies behind two ends and belongs to row 2.
    row = jnp.sum((token[:, None] >= start[None, 1:]).astype(jnp.int32), axis=1, dtype=jnp.int32)
    is_real = token < start[-1]
    row = jnp.where(is_real, row, 0)
    offset = jnp.where(is_real, token - start[row], 0)
    return StepBatch(
        token_ids=jnp.where(is_real, token_ids, 0),
        positions=jnp.where(is_real, (table.seq_lens - num_new_tokens)[row] + offset, 0),
        seq_lens=jnp.where(num_new_tokens > 0, table.seq_lens, 0),
        query_start_loc=start,
        block_tables=_expanded(table.block_ids, table, block_size),
        slot_mapping=jnp.where(is_real[None], appended.slot_mapping[:, row, offset], 0),
        logits_indices=jnp.maximum(start[1:] - 1, 0),
        implementation=implementation,
        block_size=block_size,
    )


def _expanded(block_ids: Array, table: BlockTable, block_size: int) -> Array:
    """The kernel blocks of block_ids [G, S, M], of block_size tokens each; slots keep their numbers."""
    if table.block_size % block_size:
        raise ValueError(
            f"kernel_block_size={block_size} does not divide the table's block_size={table.block_size}; pass the "
            "KVCache's"
        )
    return kernel_block_ids(block_ids, table.block_size // block_size)
