"""Measures the block manager's share of a decode step on this CPU, and that it does not grow with the pool.

    python benchmarks/block_manager.py

256 rows append one token each; rows that reach their length are released and start again with one token in the next
step. Two ways to run it: one donated jitted call per step, and one donated call that loops over 64 steps on the device;
each without and with a prefix cache.
Pools of all sizes run the same lengths, which the smallest one can hold.
"""

import argparse
import dataclasses
import functools
import pathlib
import time

import _common
import jax
import jax.numpy as jnp
import numpy as np

from paged_jax.block_pool import BlockPool, Status
from paged_jax.block_table import BlockTable, append_tokens, init, release
from paged_jax.config import CacheConfig
from paged_jax.invariants import check_invariants
from paged_jax.prefix_cache import PrefixCache, init_prefix_cache, publish, write_tokens

STEPS_PER_LOOP = 64


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-blocks", nargs="*", type=int, default=[1_000, 10_000, 100_000])
    parser.add_argument("--num-rows", type=int, default=256)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--max-blocks-per-seq", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=30, help="samples per pool and way; each covers 64 steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--output", type=pathlib.Path, default=_common.ROOT / "benchmarks/results/block_manager_cpu.json"
    )
    return parser.parse_args()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """The block manager, and the status of all steps so far."""

    pool: BlockPool
    table: BlockTable
    cache: PrefixCache | None
    status: jax.Array


def decode_bookkeeping(state: State, max_lens: jax.Array) -> State:
    """One step: a token for every row, then the rows that are full give up their blocks. max_lens int32 [S].

    With a prefix cache the tokens are noted and full blocks are published, as decode_many does it. No two blocks hold
    the same, so that the cache is soon full of blocks and every new block evicts one.
    """
    old_lens, cache = state.table.seq_lens, state.cache
    pool, table, appended = append_tokens(state.pool, state.table, jnp.ones_like(old_lens), max_new_tokens=1)
    if cache is not None:
        tokens = cache.next_uid + jnp.arange(old_lens.shape[0], dtype=jnp.int32)
        cache = write_tokens(cache, tokens, appended.slot_mapping[0, :, 0])
        cache, pool = jax.lax.cond(
            jnp.any(table.seq_lens % table.block_size == 0),
            lambda c, p: publish(c, p, table, old_lens, 0 * old_lens, max_new_tokens=old_lens.shape[0]),
            lambda c, p: (c, p),
            cache,
            pool,
        )
    pool, table, released = release(pool, table, table.seq_lens >= max_lens)
    return State(pool, table, cache, jnp.maximum(state.status, jnp.maximum(appended.status, released)))


one_step = jax.jit(decode_bookkeeping, donate_argnums=0)


@functools.partial(jax.jit, donate_argnums=0)
def many_steps(state: State, max_lens: jax.Array) -> State:
    """STEPS_PER_LOOP steps in one dispatch."""
    return jax.lax.fori_loop(0, STEPS_PER_LOOP, lambda _, state: decode_bookkeeping(state, max_lens), state)


class Bench:
    """One pool size and the state of its rows."""

    def __init__(self, num_blocks: int, arguments: argparse.Namespace, *, caching: bool):
        """Fills rows to random lengths below their maxima, so that they end at different steps."""
        rng = np.random.default_rng(arguments.seed)
        smallest = min(arguments.num_blocks) - 1
        longest = smallest // arguments.num_rows * arguments.block_size
        if longest < 2 * arguments.block_size:
            raise SystemExit(f"--num-blocks {min(arguments.num_blocks)} is too few for {arguments.num_rows} rows")
        self.max_lens = jnp.asarray(rng.integers(longest // 2, longest + 1, arguments.num_rows), jnp.int32)
        config = CacheConfig(
            block_size=arguments.block_size,
            num_blocks=num_blocks,
            num_layers=1,
            num_kv_heads=1,
            head_dim=1,
            max_num_seqs=arguments.num_rows,
            max_blocks_per_seq=arguments.max_blocks_per_seq,
        )
        pool, table = init(config)
        start = jnp.asarray(rng.integers(1, np.asarray(self.max_lens)), jnp.int32)
        append = jax.jit(append_tokens, static_argnames="max_new_tokens", donate_argnums=(0, 1))
        pool, table, _ = append(pool, table, start, max_new_tokens=longest)
        self.state = State(pool, table, init_prefix_cache(config) if caching else None, jnp.int32(Status.OK))

    def run(self, step, calls: int) -> float:
        """Calls `step` so often; returns seconds per call."""
        start = time.perf_counter()
        for _ in range(calls):
            self.state = step(self.state, self.max_lens)
        jax.block_until_ready(self.state)
        return (time.perf_counter() - start) / calls

    def check(self) -> None:
        """Fails if a step was refused or the state is inconsistent."""
        if int(self.state.status) != Status.OK:
            raise SystemExit(f"a step was refused: {Status(int(self.state.status)).name}")
        check_invariants(self.state.pool, self.state.table, self.state.cache)


def measure(arguments: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Returns microseconds per step, per way and pool size, interleaved over the rounds."""
    benches = {
        (size, caching): Bench(size, arguments, caching=caching)
        for size in arguments.num_blocks
        for caching in (False, True)
    }
    samples: dict[str, dict[str, list[float]]] = {}
    for round_index in range(-1, arguments.rounds):  # round -1 compiles
        for (size, caching), bench in benches.items():
            single = bench.run(one_step, STEPS_PER_LOOP)
            looped = bench.run(many_steps, 1) / STEPS_PER_LOOP
            for way, seconds in (("one call per step", single), ("64 steps per call", looped)):
                way += ", prefix cache" * caching
                by_size = samples.setdefault(way, {}).setdefault(str(size), [])
                if round_index >= 0:
                    by_size.append(seconds * 1e6)
    for bench in benches.values():
        bench.check()
    return samples


def main() -> None:
    """Measures, prints the table and writes the report."""
    arguments = parse_arguments()
    report = {"environment": _common.environment(), "seed": arguments.seed, "num_rows": arguments.num_rows}
    samples = measure(arguments)
    report["microseconds_per_step"] = {
        way: {size: _common.summary(values) for size, values in by_size.items()} for way, by_size in samples.items()
    }
    print("| us per step, median (min) | " + " | ".join(f"{size} blocks" for size in arguments.num_blocks) + " |")
    print("|---" * (1 + len(arguments.num_blocks)) + "|")
    for way, by_size in report["microseconds_per_step"].items():
        print(f"| {way} | " + " | ".join(f"{s['median']:.0f} ({s['min']:.0f})" for s in by_size.values()) + " |")
    _common.write_report(arguments.output, report)


if __name__ == "__main__":
    main()
