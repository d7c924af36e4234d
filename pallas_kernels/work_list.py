"""Work lists: what every program of a kernel does, computed on the device from the lengths of the rows.

Built from arrays that all layers of a step share, so that XLA computes each list once a step; its cost depends on the
number of rows and programs, never on the width of the block table.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

# Columns of DecodeWork.items.
ROW, TOKEN, LOW, HIGH, NUM_CHUNKS, IS_FIRST = range(6)
# Columns of DecodeWork.rows.
FIRST_ITEM, ROW_CHUNKS, ROW_TOKEN = range(3)
# Columns of the prefill list.
TILE_ROW, TILE_TOKEN, TILE_FIRST, TILE_END, TILE_POSITION = range(5)


class DecodeWork(NamedTuple):
    """Rows cut by length into chunks of about equal size.

    items: int32[I, 6]: row, its query's index, the chunk's first tile, its last tile + 1, number of chunks of the row
        (0: nothing to do), and whether it is the row's first chunk. A row without visible tokens has one empty chunk.
    rows: int32[S, 3]: the row's first item, its number of chunks (0: not in this list), its query's index.
    """

    items: jax.Array
    rows: jax.Array


def _row_of(ends: jax.Array, num_items: int) -> jax.Array:
    """The row of every item, int32[num_items], from the rows' ends in the list; len(ends) for items past the last."""
    item = jnp.arange(num_items, dtype=jnp.int32)
    return jnp.sum(item[:, None] >= ends[None], axis=1, dtype=jnp.int32)


def decode_work(low: jax.Array, high: jax.Array, token: jax.Array, is_in: jax.Array, *, target: int) -> DecodeWork:
    """Cuts the tiles low[s] ... high[s] - 1 of each row into chunks, about `target` in total.

    Args:
        low, high: int32[S] first tile of the row that its query sees, and last one + 1; low >= high: it sees nothing.
        token: int32[S] index of the row's query.
        is_in: bool[S] rows that are worked on.
        target: chunks that fill the chip; there are at most target + S.
    """
    num_rows = low.shape[0]
    num_tiles = jnp.where(is_in, jnp.maximum(high - low, 0), 0)
    tiles_per_chunk = jnp.maximum(1, -(-jnp.sum(num_tiles, dtype=jnp.int32) // target))
    chunks = jnp.where(is_in, jnp.maximum(1, -(-num_tiles // tiles_per_chunk)), 0)
    ends = jnp.cumsum(chunks, dtype=jnp.int32)
    row = _row_of(ends, target + num_rows)
    # Even chunks: a row of 5 tiles in 2 chunks is 3 + 2, whatever tiles_per_chunk is.
    size = -(-num_tiles // jnp.maximum(chunks, 1))
    per_row = jnp.stack([low, low + num_tiles, token, chunks, ends - chunks, size], axis=1)
    low, high, token, chunks_of_item, first, size = per_row.at[row].get(mode="fill", fill_value=0).T
    chunk = jnp.arange(row.shape[0], dtype=jnp.int32) - first
    start = jnp.minimum(low + chunk * size, high)
    end = jnp.minimum(start + size, high)
    row = jnp.minimum(row, num_rows - 1)
    is_first = (chunk == 0).astype(jnp.int32)
    items = jnp.stack([row, token, start, end, chunks_of_item, is_first], axis=1)
    return DecodeWork(items, per_row[:, jnp.array([4, 3, 2])])


def prefill_work(query_start_loc: jax.Array, seq_lens: jax.Array, *, num_tokens: int, tile: int) -> jax.Array:
    """Cuts the queries of every row into tiles, on the grid of multiples of 8 of the packed queries.

    Rows with one query are left to the decode kernel. The padding tokens after the last row form a row of their own
    that sees nothing, so that their output is written (with zeros) like any other.

    Args:
        query_start_loc: int32[S + 1]. seq_lens: int32[S].
        num_tokens: static T. tile: static number of tokens per tile, a multiple of 8.

    Returns:
        int32[X, 5]: row (S - 1 for padding), first token of the tile (a multiple of 8), first and last + 1 token of the
        tile that belong to the row (equal: nothing to do), and the position in its sequence of the tile's first token
        (possibly negative; very negative for padding).
    """
    num_rows = seq_lens.shape[0]
    starts = query_start_loc
    ends = jnp.append(query_start_loc[1:], num_tokens)
    counts = ends - starts
    is_in = jnp.append(counts[:-1] != 1, True) & (counts > 0)
    aligned = starts // 8 * 8
    tiles = jnp.where(is_in, -(-(ends - aligned) // tile), 0)
    tile_ends = jnp.cumsum(tiles, dtype=jnp.int32)
    # Each row adds at most one partial tile and 7 tokens of alignment; only rows of two and more tokens have tiles.
    max_rows = min(num_rows, num_tokens // 2) + 1
    num_items = (num_tokens + max_rows * (tile + 6)) // tile
    row = _row_of(tile_ends, num_items)
    position = jnp.append(seq_lens - ends[:-1], -(2**30))  # of token 0, if it were in the row
    per_row = jnp.stack([starts, ends, aligned, tile_ends - tiles, position], axis=1)
    starts, ends, aligned, first, position = per_row.at[row].get(mode="fill", fill_value=0).T
    token = aligned + (jnp.arange(num_items, dtype=jnp.int32) - first) * tile
    token = jnp.where(row > num_rows, 0, token)
    begin, end = jnp.maximum(starts, token), jnp.minimum(ends, token + tile)
    return jnp.stack([jnp.minimum(row, num_rows - 1), token, begin, jnp.maximum(begin, end), position + token], axis=1)
