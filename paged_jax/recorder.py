"""What happened step by step, of bounded length, for plots and analysis. Nothing is recorded unless it is attached."""

from collections import deque
from collections.abc import Mapping

import numpy as np

from paged_jax.config import check_positive
from paged_jax.metrics import StepRecord

#: Entries of a block map that are not the number of a request.
FREE, CACHED, SHARED = -1, -2, -3


class Recorder:
    """The latest dispatches of an engine.

    Args:
        max_steps: dispatches that are kept; older ones are dropped.
        block_maps: keep whom each block belonged to as well; the engine then reads the block tables after each
            dispatch, which costs time.

    Attributes:
        records: a StepRecord per dispatch.
        block_maps: an int32 array [num_blocks - 1] per dispatch: for each block but the null block the number of the
            request that owns it, or FREE, CACHED (free, but still holding a cached prefix) or SHARED (owned by several
            rows). Empty unless asked for.

    Example:
        >>> llm.recorder = Recorder(block_maps=True)
        >>> llm.generate(prompts)
        >>> plot_steps(llm.recorder, llm.cache_config.block_size).savefig("steps.png")
    """

    def __init__(self, max_steps: int = 10_000, *, block_maps: bool = False) -> None:
        check_positive("Recorder", max_steps=max_steps)
        self.wants_block_maps = block_maps
        self.records: deque[StepRecord] = deque(maxlen=max_steps)
        self.block_maps: deque[np.ndarray] = deque(maxlen=max_steps)

    def on_step(self, record: StepRecord, block_map: np.ndarray | None = None) -> None:
        """Keeps a dispatch.

        Raises:
            ValueError: block maps were asked for and there is none, or the other way round.
        """
        if (block_map is not None) != self.wants_block_maps:
            raise ValueError(f"a recorder with block_maps={self.wants_block_maps} got block_map={block_map!r:.40}")
        self.records.append(record)
        if block_map is not None:
            self.block_maps.append(block_map)


def build_block_map(
    block_ids: np.ndarray, ref_count: np.ndarray, content_uid: np.ndarray, requests: Mapping[int, int]
) -> np.ndarray:
    """Whom each block belongs to: one entry of `Recorder.block_maps`.

    Args:
        block_ids: block tables [groups, rows, blocks]; 0 behind a row's blocks.
        ref_count: rows per block [num_blocks].
        content_uid: above 0 where a block holds a cached prefix [num_blocks].
        requests: the number of its request for each row in use.
    """
    owners = np.where((ref_count == 0) & (content_uid > 0), CACHED, FREE).astype(np.int32)
    for row, number in requests.items():
        owners[block_ids[:, row]] = number
    owners[ref_count > 1] = SHARED
    return owners[1:]
