"""Measures what each storage format of K and V changes in SmolLM2-135M's output, holds, and costs in time on this CPU.

    python benchmarks/cache_formats.py

* Quality: the recorded prompts and continuations, teacher-forced; logits of every generated position against float32.
* Capacity: tokens in the same bytes, scales included, relative to bfloat16.
* Decode step: the whole jitted step with a context of 2048 tokens in every row, over the same step with float32 K/V.
"""

import argparse
import functools
import json
import pathlib
import time
from dataclasses import replace
from typing import Any

import _common
import jax
import jax.numpy as jnp
import numpy as np

from models.load import load_model
from paged_jax import CacheConfig, append_tokens, build_ragged_batch, decode_many, init_state
from paged_jax.config import CACHE_DTYPES
from paged_jax.kv_cache import write_kv

REFERENCE = _common.ROOT / "tests/data/smollm2_reference.json"
LENGTH = 320  # tokens of the longest recorded sequence, rounded up
CONTEXT, NUM_STEPS = 2048, 8
MARGIN = 1.0


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--num-rows", type=int, nargs="*", default=[1, 8], help="none: no timing")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--output", type=pathlib.Path, default=_common.ROOT / "benchmarks/results/cache_formats_cpu.json"
    )
    return parser.parse_args()


def cache_config(model: Any, dtype: str, num_rows: int, num_tokens: int) -> CacheConfig:
    """Room for num_rows sequences of num_tokens."""
    c, width = model.config, -(-num_tokens // 16)
    return CacheConfig(
        num_blocks=1 + num_rows * width,
        num_layers=c.num_layers,
        num_kv_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        max_blocks_per_seq=width,
        max_num_seqs=num_rows,
        dtype=dtype,
    )


def teacher_forced(model: Any, dtype: str, prompts: list[dict]) -> list[np.ndarray]:
    """Logits float32 [generated tokens, V] of each recorded prompt, every K and V read back from the cache."""
    state = init_state(cache_config(model, dtype, 1, LENGTH))

    @jax.jit
    def step(params: Any, state: Any, token_ids: jax.Array, count: jax.Array) -> jax.Array:
        counts = count[None]
        _, table, appended = append_tokens(state.pool, state.table, counts, max_new_tokens=LENGTH)
        batch = build_ragged_batch(table, appended, counts, token_ids)
        batch = replace(batch, logits_indices=jnp.arange(LENGTH, dtype=jnp.int32))
        return model.forward(params, batch, state.cache)[0].astype(jnp.float32)

    logits = []
    for p in prompts:
        tokens = [*p["prompt_ids"], *p["generated_ids"][:-1]]
        padded = np.zeros(LENGTH, np.int32)
        padded[: len(tokens)] = tokens
        result = step(model.params, state, padded, np.int32(len(tokens)))
        logits.append(np.asarray(result)[p["n_prompt"] - 1 : len(tokens)])
    return logits


def quality(exact: list[np.ndarray], logits: list[np.ndarray], prompts: list[dict]) -> dict[str, float]:
    """What a format changes, over all generated positions."""
    a, b = (np.concatenate(x) for x in (exact, logits))
    log_p, log_q = (np.asarray(jax.nn.log_softmax(x)) for x in (a, b))
    kl = (np.exp(log_p) * (log_p - log_q)).sum(axis=1)
    top_a, top_b = (np.argpartition(x, -5, axis=1)[:, -5:] for x in (a, b))
    overlap = np.array([len(np.intersect1d(x, y)) / 5 for x, y in zip(top_a, top_b, strict=True)])
    steps = [s for p in prompts for s in p["steps"]]
    margin = np.array([s["top_logits"][0] - s["top_logits"][1] for s in steps])
    recorded = np.array([s["top_ids"][0] for s in steps])
    is_same = b.argmax(axis=1) == recorded
    return {
        "positions": len(a),
        "top5_overlap_mean": float(overlap.mean()),
        "kl_mean": float(kl.mean()),
        "kl_max": float(kl.max()),
        "argmax_equal": float(is_same.mean()),
        "positions_with_margin_above_1": int((margin > MARGIN).sum()),
        "argmax_equal_with_margin_above_1": float(is_same[margin > MARGIN].mean()),
        "largest_margin_of_a_changed_argmax": float(margin[~is_same].max(initial=0.0)),
    }


def capacity(model: Any) -> dict[str, dict[str, float]]:
    """Bytes per token, and tokens in the bytes of one bfloat16 token, for the model and for larger heads."""
    bytes_of = {dtype: cache_config(model, dtype, 1, 16).bytes_per_token for dtype in CACHE_DTYPES}
    sizes = {"num_blocks": 2, "num_layers": 1, "num_kv_heads": 1, "max_blocks_per_seq": 1}
    return {
        dtype: {
            "bytes_per_token": count,
            "tokens_over_bfloat16": bytes_of["bfloat16"] / count,
            **{
                f"tokens_over_bfloat16_head_dim_{h}": 2
                * h
                / (CacheConfig(dtype=dtype, head_dim=h, **sizes).bytes_per_token / 2)
                for h in (128, 256)
            },
        }
        for dtype, count in bytes_of.items()
    }


def full_state(model: Any, dtype: str, num_rows: int, num_tokens: int, seed: int) -> Any:
    """A state whose rows hold CONTEXT random tokens each and generate."""
    state = init_state(cache_config(model, dtype, num_rows, num_tokens))
    counts = jnp.full(num_rows, CONTEXT, jnp.int32)
    pool, table, appended = append_tokens(state.pool, state.table, counts, max_new_tokens=CONTEXT)
    slots, cache = appended.slot_mapping[0].reshape(-1), state.cache
    write = jax.jit(write_kv, donate_argnums=0)
    shape = slots.shape[0], model.config.num_kv_heads, model.config.head_dim
    k, v = (jax.random.normal(key, shape) for key in jax.random.split(jax.random.key(seed)))
    for layer in range(cache.num_layers):
        cache = cache.with_layer(layer, write(cache.layer(layer), k, v, slots))
    rows = replace(state.rows, num_remaining=jnp.full(num_rows, num_tokens, jnp.int32))
    active = jnp.ones(num_rows, bool)
    return replace(state, pool=pool, table=table, cache=cache, rows=rows, is_active=active)


def decode_times(model: Any, num_rows: int, rounds: int, seed: int) -> dict[str, list[float]]:
    """Milliseconds of a decode step of each format, one entry a round, formats interleaved."""
    num_tokens = CONTEXT + NUM_STEPS * (rounds + 2)
    states = {dtype: full_state(model, dtype, num_rows, num_tokens, seed) for dtype in CACHE_DTYPES}
    step = functools.partial(decode_many, num_steps=NUM_STEPS)
    times: dict[str, list[float]] = {dtype: [] for dtype in states}
    for r in range(rounds + 1):
        for dtype in states:
            start = time.perf_counter()
            states[dtype], output = step(model.forward, model.params, states[dtype])
            jax.block_until_ready(output)
            if r > 0:  # the first round compiles
                times[dtype].append((time.perf_counter() - start) * 1e3 / NUM_STEPS)
            assert int(output.num_steps) == NUM_STEPS
    return times


def main() -> None:
    """Runs everything, prints a table and writes the report."""
    arguments = parse_arguments()
    model = load_model("smollm2", dtype="float32")
    prompts = json.loads(REFERENCE.read_text())["prompts"]
    exact = teacher_forced(model, "float32", prompts)
    held = capacity(model)
    report: dict[str, Any] = {"environment": _common.environment(), "context": CONTEXT, "formats": {}}
    for dtype in CACHE_DTYPES:
        logits = exact if dtype == "float32" else teacher_forced(model, dtype, prompts)
        report["formats"][dtype] = {**held[dtype], **quality(exact, logits, prompts)}
        found = report["formats"][dtype]
        print(
            f"{dtype:14} {found['bytes_per_token']:6} B/token  x{found['tokens_over_bfloat16']:.2f}  top-5 "
            f"{found['top5_overlap_mean']:.3f}  KL {found['kl_mean']:.1e} (max {found['kl_max']:.1e})  argmax, margin "
            f"> 1: {found['argmax_equal_with_margin_above_1']:.4f}",
            flush=True,
        )
    for num_rows in arguments.num_rows:
        times = decode_times(model, num_rows, arguments.rounds, arguments.seed)
        for dtype, values in times.items():
            ratio = _common.summary([a / b for a, b in zip(values, times["float32"], strict=True)])
            report["formats"][dtype][f"decode_{num_rows}_rows"] = {
                "milliseconds": _common.summary(values),
                "over_float32": ratio,
            }
            print(
                f"{num_rows} rows  {dtype:14} {np.median(values):7.1f} ms  x{ratio['median']:.3f} of float32",
                flush=True,
            )
    _common.write_report(arguments.output, report)


if __name__ == "__main__":
    main()
