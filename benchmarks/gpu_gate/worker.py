"""Compiles one case for its GPU in a process of its own: `python -m benchmarks.gpu_gate.worker CASE DIRECTORY`.

A process each, because a kernel that the chip cannot run may abort it. The directory receives facts.json and what
XLA_FLAGS and MOSAIC_GPU_DUMP_TO, set by the caller, ask the compilers to write.
"""

import dataclasses
import importlib
import json
import pathlib
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from benchmarks.gpu_gate import controls
from benchmarks.gpu_gate.cases import ControlCase, KernelCase, ProgramCase, case_named
from benchmarks.gpu_gate.targets import CHIPS
from models.gemma3 import Gemma3Config, Gemma3Forward
from models.llama import LlamaConfig, LlamaForward, RopeScaling
from paged_jax.config import CacheConfig, group_layers
from paged_jax.decode import decode_many, prefill_step
from paged_jax.state import PrefillPlan, init_state
from pallas_kernels.shapes import MODEL_SHAPES

NUM_BLOCKS = 9001  # a prime: no other array has this length
NUM_ROWS = 64
NUM_STEPS = 16
TABLE_WIDTH = 512
NUM_PREFILL_TOKENS = 2048

MODELS = {
    "smollm2_135m": LlamaForward(
        LlamaConfig(
            vocab_size=49152,
            hidden_size=576,
            intermediate_size=1536,
            num_layers=30,
            num_heads=9,
            num_kv_heads=3,
            head_dim=64,
            rope_theta=1e5,
            tie_word_embeddings=True,
            max_position_embeddings=8192,
        )
    ),
    "llama3_8b": LlamaForward(
        LlamaConfig(
            vocab_size=128256,
            hidden_size=4096,
            intermediate_size=14336,
            num_layers=32,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            rope_theta=5e5,
            rope_scaling=RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192),
            max_position_embeddings=131072,
        )
    ),
    "gemma3_270m": Gemma3Forward(
        Gemma3Config(
            vocab_size=32768,  # of 262144: logits alone would take more than K and V of three layers
            hidden_size=640,
            intermediate_size=2048,
            num_layers=18,
            num_heads=4,
            num_kv_heads=1,
            head_dim=256,
            max_position_embeddings=32768,
        )
    ),
}


def _on(sharding: Any, tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def _num_bytes(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def program(case: ProgramCase, sharding: Any) -> tuple[Any, dict[str, Any]]:
    """The traced step of a model, and the sizes to check it by."""
    forward = MODELS[case.model]
    layers = case.num_layers or forward.config.num_layers
    forward = dataclasses.replace(forward, config=dataclasses.replace(forward.config, num_layers=layers))
    model = forward.config
    layer_groups, sliding_windows = group_layers(model.layer_windows)
    cache = CacheConfig(
        num_blocks=NUM_BLOCKS,
        num_layers=layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        max_blocks_per_seq=TABLE_WIDTH,
        dtype=case.cache_dtype,
        max_num_seqs=NUM_ROWS,
        layer_groups=layer_groups,
        sliding_windows=sliding_windows,
    )
    state = _on(sharding, jax.eval_shape(lambda: init_state(cache, vocab_size=model.vocab_size)))
    weights = forward.abstract_params(model)
    params = _on(sharding, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), weights))
    if case.program == "decode_many":
        traced = decode_many.trace(
            forward, params, state, num_steps=NUM_STEPS, num_rows=NUM_ROWS, implementation=case.implementation
        )
    else:
        plan = PrefillPlan(
            token_ids=jax.ShapeDtypeStruct((NUM_PREFILL_TOKENS,), jnp.int32),
            num_new_tokens=jax.ShapeDtypeStruct((NUM_ROWS,), jnp.int32),
            is_last=jax.ShapeDtypeStruct((NUM_ROWS,), bool),
            rows=state.rows,
            parents=jax.ShapeDtypeStruct((NUM_ROWS,), jnp.int32),
        )
        traced = prefill_step.trace(forward, params, state, _on(sharding, plan), implementation=case.implementation)
    # A prefill chunk may copy the block manager's own arrays (4 bytes a block; it does so four times with a prefix
    # cache): only K and V count. In the decode loop everything of the pool's length does.
    watched = state if case.program == "decode_many" else state.cache
    cache_bytes = _num_bytes(state.cache)
    return traced, {
        "num_layers": layers,
        "cache_bytes": cache_bytes,
        "state_bytes": _num_bytes(state),
        "layer_bytes": cache_bytes // cache.num_arrays,
        "pool_shapes": sorted({x.shape for x in jax.tree.leaves(watched) if NUM_BLOCKS in x.shape}),
    }


def kernel(case: KernelCase, sharding: Any) -> tuple[Any, dict[str, Any]]:
    """The traced call of a kernel, and the sizes to check it by."""
    shape = MODEL_SHAPES[case.shape]
    n, k, h, block = shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.block_size
    storage = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn}.get(case.kernel.rpartition("_")[2], jnp.bfloat16)

    def array(*sizes: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)

    pool = array(NUM_BLOCKS, block, k, h, dtype=storage)
    sizes = {"pool_shapes": [list(pool.shape)], "cache_bytes": 0}
    if case.kernel == "write_kv":
        run = _load("pallas_kernels.move_kv", "write_kv")
        new = array(NUM_ROWS, k, h)
        args = (pool, pool, new, new, array(NUM_ROWS, dtype=jnp.int32))
        return jax.jit(run, donate_argnums=(0, 1)).trace(*args), sizes | {"cache_bytes": 2 * _num_bytes(pool)}
    if case.kernel == "copy_blocks":
        run = _load("pallas_kernels.move_kv", "copy_blocks")
        ids = array(NUM_ROWS, dtype=jnp.int32)
        traced = jax.jit(run, donate_argnums=(0, 1)).trace(pool, pool, ids, ids)
        return traced, sizes | {"cache_bytes": 2 * _num_bytes(pool)}

    run = _load("pallas_kernels.mosaic_gpu", "paged_attention_mosaic_gpu")
    is_decode = case.kernel.startswith("paged_decode")
    arrays = {
        "block_tables": array(NUM_ROWS, TABLE_WIDTH, dtype=jnp.int32),
        "seq_lens": array(NUM_ROWS, dtype=jnp.int32),
        "query_start_loc": None if is_decode else array(NUM_ROWS + 1, dtype=jnp.int32),
        "sinks": None,
    }
    scale = None if storage == jnp.bfloat16 else array(NUM_BLOCKS, k, block, dtype=jnp.float32)
    options = {
        "scale": None,
        "sliding_window": shape.sliding_window,
        "logits_soft_cap": shape.logits_soft_cap,
    }
    # No multiple of 8, of which TMA's tiles consist.
    query = array(NUM_ROWS if is_decode else NUM_PREFILL_TOKENS - 3, n, h)
    traced = jax.jit(lambda *args, **kwargs: run(*args, **kwargs, **options)).trace(
        query, pool, pool, **arrays, k_scale=scale, v_scale=scale
    )
    return traced, sizes


def _load(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def main(case_name: str, directory: str) -> None:
    """Compiles the case and writes facts.json."""
    case = case_named(case_name)
    chip = CHIPS[case.chip]
    # The "1x1x1" topology is one device. Everything that asks for the default backend must hear of the target's.
    topology = topologies.get_topology_desc(case.chip, "cuda", target_config=chip.target_config(), topology="1x1x1")
    device = topology.devices[0]
    jax.default_backend = lambda: "gpu"
    sharding = jax.sharding.SingleDeviceSharding(device)
    build = {ProgramCase: program, KernelCase: kernel, ControlCase: controls.build}[type(case)]
    start = time.perf_counter()
    with jax.default_device(device):  # Mosaic takes its architecture from the default device
        traced, sizes = build(case, sharding)
        compiled = traced.lower().compile()
    memory = compiled.memory_analysis()
    facts = sizes | {
        "seconds": round(time.perf_counter() - start, 1),
        "alias_bytes": memory.alias_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
    }
    pathlib.Path(directory, "facts.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main(*sys.argv[1:])
