"""Watches the engine's dispatches: a StepRecord of each for the metrics, and for a recorder if one is attached."""

import time

import numpy as np

from paged_jax.config import CacheConfig
from paged_jax.engine_core import EngineCore
from paged_jax.metrics import Metrics, StepRecord
from paged_jax.recorder import Recorder
from paged_jax.scheduler import RequestState


class Monitor:
    """Runs the core's dispatches and reports them to `metrics`."""

    def __init__(self, core: EngineCore, config: CacheConfig, metrics: Metrics) -> None:
        self._core = core
        self._config = config
        self._metrics = metrics

    def step(self, recorder: Recorder | None) -> list[RequestState]:
        """EngineCore.step(), watched."""
        core, runner = self._core, self._core.runner
        start, before = time.monotonic(), self._totals()
        changed = core.step()
        end, dispatch = time.monotonic(), core.last_dispatch
        if dispatch is None:
            return changed
        num_free = runner.num_free_blocks
        num_used = self._config.num_blocks - 1 - num_free
        record = StepRecord(
            time=end,
            seconds=end - start,
            kind=dispatch.kind,
            num_steps=dispatch.num_steps,
            num_prompt_tokens=dispatch.num_prompt_tokens,
            num_generated_tokens=dispatch.num_generated_tokens,
            num_running=len(core.running),
            num_waiting=len(core.waiting) - len(core.swapped),
            num_swapped=len(core.swapped),
            num_used_blocks=num_used,
            num_free_blocks=num_free,
            num_cached_blocks=runner.num_cached_blocks,
            num_stored_tokens=num_used * self._config.block_size - self._num_empty_slots(),
            compile_count=runner.compile_count,
            **{name: count - before[name] for name, count in self._totals().items()},
        )
        self._metrics.on_step(record)
        if recorder is not None:
            recorder.on_step(record, self._block_map() if recorder.wants_block_maps else None)
        return changed

    def _totals(self) -> dict[str, int]:
        core = self._core
        return {
            "num_preemptions_recompute": core.num_preemptions["recompute"],
            "num_preemptions_swap": core.num_preemptions["swap"],
            "num_swapped_out_blocks": core.num_swapped_blocks["out"],
            "num_swapped_in_blocks": core.num_swapped_blocks["in"],
            "prefix_queries": core.runner.counters["queries"],
            "prefix_hits": core.runner.counters["hits"],
        }

    def _num_empty_slots(self) -> int:
        """Slots in the last blocks of the rows; all other blocks in use are full."""
        num_slots, count = self._config.block_size, 0
        for state in self._core.running:
            prompt = len(state.request.prompt_token_ids)
            lengths = [s.num_computed_tokens for s in state.live_samples]
            forks = max(0, lengths.count(prompt) - 1)  # they share the last block until they write to it
            count += sum(-length % num_slots for length in lengths) - forks * (-prompt % num_slots)
        return count * self._config.num_groups

    def _block_map(self) -> np.ndarray:
        rows = {s.row: r.request.number for r in self._core.running for s in r.live_samples if s.row is not None}
        return self._core.runner.block_map(rows)
