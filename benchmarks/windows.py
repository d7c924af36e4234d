"""Counts the bytes of K and V that one sequence of Gemma 3 270M holds, with and without groups for its windows.

    python benchmarks/windows.py

The real block manager stores a prompt in chunks and decodes to 8192 tokens, once with Gemma's cache groups (15 layers
see a window of 512 tokens, 3 see everything), once with all layers in one group that keeps everything. Bytes of the
blocks that the row holds between steps, and the most that it held within one. Deterministic: no weights, no timing.
"""

import argparse
import pathlib

import _common
import jax
import jax.numpy as jnp

from paged_jax.block_table import append_tokens, init, release_out_of_window
from paged_jax.config import CacheConfig, group_layers

#: 15 local layers and 3 full ones, one kv head of 256 elements.
LAYER_WINDOWS = tuple(None if i % 6 == 5 else 512 for i in range(18))
SIZES = {"num_layers": 18, "num_kv_heads": 1, "head_dim": 256, "dtype": "bfloat16", "max_num_seqs": 1}
CONTEXTS = (256, 512, 1024, 2048, 4096, 8192)


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=1024)
    parser.add_argument("--chunk-tokens", type=int, default=256)
    parser.add_argument("--output", type=pathlib.Path, default=_common.ROOT / "benchmarks/results/windows.json")
    return parser.parse_args()


def bytes_held(layer_windows: tuple[int | None, ...], arguments: argparse.Namespace) -> dict[int, dict[str, int]]:
    """{context: {"held": bytes between steps, "most": bytes within any step so far}}."""
    layer_groups, sliding_windows = group_layers(layer_windows)
    width = CONTEXTS[-1] // arguments.block_size
    config = CacheConfig(
        num_blocks=1 + len(layer_groups) * width,
        block_size=arguments.block_size,
        max_blocks_per_seq=width,
        layer_groups=layer_groups,
        sliding_windows=sliding_windows,
        **SIZES,
    )
    pool, table = init(config)
    results, most = {}, 0
    append = jax.jit(append_tokens, static_argnames="max_new_tokens")
    leave = jax.jit(release_out_of_window, static_argnames="max_new_tokens")
    length = 0
    while length < CONTEXTS[-1]:
        count = arguments.chunk_tokens if length < arguments.prompt_tokens else 1
        old = table.seq_lens
        pool, table, _ = append(pool, table, jnp.array([count], jnp.int32), max_new_tokens=count)
        most = max(most, config.num_blocks - 1 - int(pool.num_free))
        pool, table = leave(pool, table, old, max_new_tokens=count)
        length += count
        if length in CONTEXTS:
            held = config.num_blocks - 1 - int(pool.num_free)
            assert held == config.num_blocks_for(length)
            results[length] = {"held": held * config.bytes_per_block, "most": most * config.bytes_per_block}
    return results


def main() -> None:
    """Counts, prints a table and writes the report."""
    arguments = parse_arguments()
    grouped, full = (bytes_held(windows, arguments) for windows in (LAYER_WINDOWS, (None,) * len(LAYER_WINDOWS)))
    print("| tokens | one full group, MiB | groups, MiB | ratio | ratio of the most held |\n|---|---|---|---|---|")
    rows = []
    for context, one in full.items():
        ratios = {kind: one[kind] / grouped[context][kind] for kind in one}
        rows.append({"tokens": context, "one_group": one, "groups": grouped[context], "ratios": ratios})
        mib = [x["held"] / 2**20 for x in (one, grouped[context])]
        print(f"| {context} | {mib[0]:.1f} | {mib[1]:.1f} | {ratios['held']:.2f} | {ratios['most']:.2f} |")
    settings = {k: v for k, v in vars(arguments).items() if k != "output"}
    _common.write_report(arguments.output, {"environment": _common.environment(), "settings": settings, "rows": rows})


if __name__ == "__main__":
    main()
