"""From files to the arguments of LLM: the model, and sizes that suit it and the device."""

from pathlib import Path
from typing import Any

import jax

from paged_jax.chat import ChatTemplate
from paged_jax.config import CacheConfig, cdiv, check_positive, group_layers

#: K/V memory when num_blocks is not given: this many bytes on a CPU, this share of the free memory elsewhere.
_DEFAULT_CPU_CACHE_BYTES = 1 << 30
_DEFAULT_DEVICE_MEMORY_SHARE = 0.9


def pretrained_arguments(
    path_or_name: str | Path,
    *,
    dtype: str,
    kv_cache_dtype: str,
    block_size: int,
    num_blocks: int | None,
    max_num_seqs: int,
    max_model_len: int | None,
    max_num_batched_tokens: int | None,
) -> dict[str, Any]:
    """Loads the model and chooses what is left open; arguments as of LLM.from_pretrained."""
    from models.load import load_model  # here, so that paged_jax itself never depends on any model

    on_cpu = jax.default_backend() == "cpu"
    check_positive("from_pretrained()", block_size=block_size, max_num_seqs=max_num_seqs)
    model = load_model(path_or_name, dtype=None if dtype == "auto" else dtype)
    limit = model.config.max_position_embeddings
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
    if num_blocks is None:
        num_blocks = _default_num_blocks(CacheConfig(num_blocks=2, **sizes), max_num_batched_tokens)
    return {
        "forward": model.forward,
        "params": model.params,
        "cache_config": CacheConfig(num_blocks=num_blocks, **sizes),
        "tokenizer": model.tokenizer,
        "chat_template": template,
        "vocab_size": model.config.vocab_size,
        "eos_token_ids": model.config.eos_token_ids,
        "max_model_len": max_model_len,
        "max_num_batched_tokens": max_num_batched_tokens,
    }


def _default_num_blocks(sizes: CacheConfig, max_num_batched_tokens: int) -> int:
    """Blocks for max_num_seqs sequences of full length, or as many as the default memory holds."""
    device = jax.devices()[0]
    budget = _DEFAULT_CPU_CACHE_BYTES
    if device.platform != "cpu":
        stats = device.memory_stats()
        budget = int(_DEFAULT_DEVICE_MEMORY_SHARE * (stats["bytes_limit"] - stats["bytes_in_use"]))
    wanted = sizes.max_num_seqs * sizes.max_blocks_for(sizes.max_model_len, max_num_batched_tokens)
    return 1 + max(1, min(wanted, budget // sizes.bytes_per_block))
