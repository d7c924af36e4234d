"""From files to the arguments of LLM: the model, and sizes that suit it and the device."""

from dataclasses import replace
from numbers import Real
from pathlib import Path
from typing import Any

import jax

from paged_jax.chat import ChatTemplate
from paged_jax.config import CacheConfig, cdiv, check_positive, group_layers

#: K/V memory on a CPU when neither blocks nor bytes are given.
_DEFAULT_CPU_CACHE_BYTES = 1 << 30


def pretrained_arguments(
    path_or_name: str | Path,
    *,
    dtype: str,
    kv_cache_dtype: str,
    block_size: int,
    num_blocks: int | None,
    gpu_memory_utilization: float,
    kv_cache_memory_bytes: int | None,
    max_num_seqs: int,
    max_model_len: int | None,
    max_num_batched_tokens: int | None,
) -> dict[str, Any]:
    """Loads the model and chooses what is left open; arguments as of LLM.from_pretrained."""
    from models.load import load_model  # here, so that paged_jax itself never depends on any model

    on_cpu = jax.default_backend() == "cpu"
    check_positive("from_pretrained()", block_size=block_size, max_num_seqs=max_num_seqs)
    _check_memory(num_blocks, gpu_memory_utilization, kv_cache_memory_bytes)
    model = load_model(path_or_name, dtype=None if dtype == "auto" else dtype)
    limit = model.config.max_position_embeddings
    takes_what_fits = max_model_len is None
    max_model_len = limit if max_model_len is None else max_model_len
    check_positive("from_pretrained()", max_model_len=max_model_len)
    if max_model_len > limit:
        raise ValueError(f"max_model_len={max_model_len} exceeds the model's {limit} positions; lower it")
    layer_groups, sliding_windows = group_layers(model.config.layer_windows)
    sizes = {
        "num_layers": model.config.num_layers,
        "layer_groups": layer_groups,
        "sliding_windows": sliding_windows,
        "num_kv_heads": model.config.num_kv_heads,
        "head_dim": model.config.head_dim,
        "max_blocks_per_seq": cdiv(max_model_len, block_size),
        "block_size": block_size,
        "dtype": jax.tree.leaves(model.params)[0].dtype if kv_cache_dtype == "auto" else kv_cache_dtype,
        "max_num_seqs": max_num_seqs,
    }
    template = model.chat_template and ChatTemplate(
        source=model.chat_template, bos_token=model.bos_token or "", eos_token=model.eos_token or ""
    )
    if max_num_batched_tokens is None:
        max_num_batched_tokens = 256 if on_cpu else 2048
    check_positive("from_pretrained()", max_num_batched_tokens=max_num_batched_tokens)
    if kv_cache_memory_bytes is not None:
        # Without max_model_len, a sequence of one block must fit; the longest that does is found below.
        shortest = sizes | {"max_blocks_per_seq": 1} if takes_what_fits else sizes
        num_blocks = CacheConfig.with_memory(kv_cache_memory_bytes, **shortest).num_blocks
    elif num_blocks is None:
        smallest = CacheConfig(num_blocks=2, **sizes)
        num_blocks = _default_num_blocks(smallest, gpu_memory_utilization, max_num_batched_tokens)
    cache_config = CacheConfig(num_blocks=num_blocks, **sizes)
    if takes_what_fits:
        max_model_len = cache_config.longest_sequence(max_num_batched_tokens)
        if max_model_len == 0:
            raise ValueError(
                f"num_blocks={num_blocks}, the null block included, hold no sequence: each of the "
                f"{cache_config.num_groups} cache groups needs a block; give at least {cache_config.num_groups + 1}"
            )
        cache_config = replace(cache_config, max_blocks_per_seq=cdiv(max_model_len, block_size))
    return {
        "forward": model.forward,
        "params": model.params,
        "cache_config": cache_config,
        "tokenizer": model.tokenizer,
        "chat_template": template,
        "vocab_size": model.config.vocab_size,
        "eos_token_ids": model.config.eos_token_ids,
        "max_model_len": max_model_len,
        "max_num_batched_tokens": max_num_batched_tokens,
    }


def _check_memory(num_blocks: int | None, gpu_memory_utilization: float, kv_cache_memory_bytes: int | None) -> None:
    """Raises ValueError unless these say at most once, and in range, how much memory K and V take."""
    share = gpu_memory_utilization
    if isinstance(share, bool) or not isinstance(share, Real) or not 0 < share <= 1:
        raise ValueError(f"gpu_memory_utilization must be a share of the memory, above 0 and up to 1, got {share!r}")
    if kv_cache_memory_bytes is not None:
        check_positive("from_pretrained()", kv_cache_memory_bytes=kv_cache_memory_bytes)
        if num_blocks is not None:
            raise ValueError(
                f"num_blocks={num_blocks} and kv_cache_memory_bytes={kv_cache_memory_bytes} both say how large the "
                "pool is; give one of them"
            )


def _default_num_blocks(sizes: CacheConfig, gpu_memory_utilization: float, max_num_batched_tokens: int) -> int:
    """Blocks for max_num_seqs sequences of full length, or as many as the default memory holds."""
    device = jax.devices()[0]
    budget = _DEFAULT_CPU_CACHE_BYTES
    if device.platform != "cpu":
        stats = device.memory_stats()
        budget = int(gpu_memory_utilization * stats["bytes_limit"]) - stats["bytes_in_use"]
    if budget < 2 * sizes.bytes_per_block:
        raise ValueError(
            f"{max(0, budget)} bytes are left for K and V, and a block and the null block take "
            f"{2 * sizes.bytes_per_block}: raise gpu_memory_utilization={gpu_memory_utilization}, give "
            "kv_cache_memory_bytes, or lower block_size"
        )
    wanted = 1 + sizes.max_num_seqs * sizes.max_blocks_for(sizes.max_model_len, max_num_batched_tokens)
    return min(wanted, budget // sizes.bytes_per_block)
