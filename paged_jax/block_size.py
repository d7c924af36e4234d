"""Which block size suits sequences of given lengths: unused slots, table size and bookkeeping, before anything runs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral, Real

import numpy as np

from paged_jax.config import CacheConfig, cdiv, check_positive

_INT32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class BlockSizeCosts:
    """What one block size costs.

    Attributes:
        block_size: tokens per block.
        waste: share of the allocated slots that hold no token which the next one sees, over all sequences at their full
            lengths.
        wasted_slots, wasted_bytes: the same per sequence, over all cache groups: slots, and bytes of K and V.
        table_entries: blocks per sequence, over all cache groups: what attention looks up and release walks through.
        table_bytes: of the block tables on the device.
        blocks_per_step: blocks that a decode step of all rows allocates on average.
        uncached_tokens: tokens of a shared prefix that are computed again on average, because only whole blocks are
            found in the prefix cache.
    """

    block_size: int
    waste: float
    wasted_slots: float
    wasted_bytes: float
    table_entries: float
    table_bytes: int
    blocks_per_step: float
    uncached_tokens: float


@dataclass(frozen=True, kw_only=True)
class BlockSizeReport:
    """What `recommend_block_size` found; print it.

    Attributes:
        block_size: the recommendation.
        reason: why, in a sentence or two, with the numbers.
        costs: of each candidate, smallest block first.
        num_sequences, mean_length, max_waste: what it is based on.
    """

    block_size: int
    reason: str
    costs: tuple[BlockSizeCosts, ...]
    num_sequences: int
    mean_length: float
    max_waste: float

    def __str__(self) -> str:
        header = ("block", "waste", "bytes/seq", "entries/seq", "table", "blocks/step", "uncached")
        lines = [
            f"{self.num_sequences} sequences of {self.mean_length:.1f} tokens on average",
            "  " + "".join(f"{name:>13}" for name in header),
        ]
        for c in self.costs:
            columns = (
                str(c.block_size),
                f"{c.waste:.1%}",
                f"{c.wasted_bytes:.0f}",
                f"{c.table_entries:.1f}",
                f"{c.table_bytes} B",
                f"{c.blocks_per_step:.2f}",
                f"{c.uncached_tokens:.1f}",
            )
            mark = ">" if c.block_size == self.block_size else " "
            lines.append(f"{mark} " + "".join(f"{text:>13}" for text in columns))
        return "\n".join([*lines, f"block_size={self.block_size}: {self.reason}"])


def recommend_block_size(
    lengths: Iterable[int],
    config: CacheConfig,
    *,
    candidates: Sequence[int] = (8, 16, 32, 64, 128),
    max_waste: float = 0.04,
) -> BlockSizeReport:
    """Recommends the largest block whose unused slots are at most `max_waste` of what is allocated.

    A larger block makes tables shorter and allocations rarer; what it costs is the unused end of each sequence's last
    block, and cached prefixes that end at coarser bounds. Attention need not load more at once: see
    CacheConfig.kernel_block_size.

    Args:
        lengths: of finished sequences in tokens, prompt and output, e.g. from a log of requests.
        config: everything but the block size; its own is only looked at for the longest sequence that it allows.
        candidates: block sizes to compare; those that are no multiple of config.kernel_block_size are left out.
        max_waste: share in (0, 1). Default: 0.04, the bound that vLLM's paper reports.

    Returns:
        The report. If no candidate wastes so little, the smallest is recommended, and the reason says so.

    Raises:
        ValueError: lengths are empty, not integers >= 1 or longer than config.max_model_len; a candidate is no
            integer >= 1; max_waste is out of range.
    """
    if not isinstance(candidates, Iterable) or not (candidates := list(candidates)):
        raise ValueError(f"candidates must be at least one block size, got {candidates!r}")
    for size in candidates:
        check_positive("recommend_block_size()", candidates=size)
    sizes = sorted(size for size in set(candidates) if size % (config.kernel_block_size or 1) == 0)
    if not sizes:
        raise ValueError(
            f"candidates must have a multiple of config.kernel_block_size={config.kernel_block_size}, got {candidates}"
        )
    if isinstance(max_waste, bool) or not isinstance(max_waste, Real) or not 0 < max_waste < 1:
        raise ValueError(f"max_waste must be a share in (0, 1), got {max_waste!r}")
    counts = _checked_lengths(lengths, config)
    costs = tuple(_costs(counts, config, size) for size in sizes)
    fitting = [c for c in costs if c.waste <= max_waste]
    chosen = fitting[-1] if fitting else costs[0]
    return BlockSizeReport(
        block_size=chosen.block_size,
        reason=_reason(chosen, costs, max_waste),
        costs=costs,
        num_sequences=len(counts),
        mean_length=float(counts.mean()),
        max_waste=max_waste,
    )


def _checked_lengths(lengths: Iterable[int], config: CacheConfig) -> np.ndarray:
    if not isinstance(lengths, Iterable):
        raise ValueError(f"lengths must be integers >= 1, at least one of them, got {lengths!r}")
    values = list(lengths)
    wrong = next((v for v in values if isinstance(v, bool) or not isinstance(v, Integral) or v < 1), None)
    if not values or wrong is not None:
        raise ValueError(
            f"lengths must be integers >= 1, at least one of them, got {values if not values else wrong!r}"
        )
    if max(values) > config.max_model_len:
        raise ValueError(
            f"lengths contain {max(values)}, and a sequence has at most {config.max_model_len} tokens "
            "(config.max_model_len); raise max_blocks_per_seq"
        )
    return np.array(values, np.int64)


def _costs(lengths: np.ndarray, config: CacheConfig, block_size: int) -> BlockSizeCosts:
    blocks, needed = np.zeros_like(lengths), np.zeros_like(lengths)
    for window in config.sliding_windows:
        # As CacheConfig.num_blocks_for: the next token sees W - 1 earlier ones, and whole blocks before them are gone.
        seen = lengths if window is None else np.minimum(lengths, window - 1)
        blocks += cdiv(lengths, block_size) - (lengths - seen) // block_size
        needed += seen
    slots, wasted = blocks * block_size, blocks * block_size - needed
    width = cdiv(config.max_model_len, block_size)
    return BlockSizeCosts(
        block_size=block_size,
        waste=float(wasted.sum() / max(1, slots.sum())),  # a window of one token may own nothing
        wasted_slots=float(wasted.mean()),
        wasted_bytes=float(wasted.mean()) * config.bytes_per_block / config.block_size,
        table_entries=float(blocks.mean()),
        table_bytes=_INT32_BYTES * config.num_groups * config.max_num_seqs * width,
        blocks_per_step=config.num_groups * config.max_num_seqs / block_size,
        uncached_tokens=(block_size - 1) / 2,
    )


def _reason(chosen: BlockSizeCosts, costs: Sequence[BlockSizeCosts], max_waste: float) -> str:
    """Compares the chosen candidate with its neighbours."""
    at = costs.index(chosen)
    if chosen.waste > max_waste:
        return (
            f"no candidate leaves at most {max_waste:.1%} of the slots unused; this one leaves the least, "
            f"{chosen.waste:.1%}: the sequences are short"
        )
    reason = f"{chosen.waste:.1%} of the slots stay unused"
    if at + 1 < len(costs):
        larger = costs[at + 1]
        reason += f"; blocks of {larger.block_size} would leave {larger.waste:.1%}, more than {max_waste:.1%}"
    if at > 0:
        smaller = costs[at - 1]
        reason += (
            f"; blocks of {smaller.block_size} would leave {smaller.waste:.1%} but make tables "
            f"{smaller.table_bytes / chosen.table_bytes:.1f} times as large and allocate "
            f"{smaller.blocks_per_step:.1f} instead of {chosen.blocks_per_step:.1f} blocks a step"
        )
    return reason
