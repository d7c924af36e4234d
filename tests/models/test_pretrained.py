"""LLM.from_pretrained: a folder on disk becomes an engine, its limits and defaults checked."""

import jax
import numpy as np
import pytest

from paged_jax import LLM, CacheConfig, ChatTemplate, SamplingParams
from paged_jax.pretrained import _default_num_blocks

GREEDY = SamplingParams(temperature=0, max_tokens=4)


def test_from_pretrained_folder_generates_from_text(folder):
    llm = LLM.from_pretrained(folder, max_num_seqs=2, block_size=4)
    (output,) = llm.generate("abc", GREEDY, use_tqdm=False)
    assert output.error is None
    assert len(output.outputs[0].token_ids) >= 1
    assert llm.eos_token_ids == (2, 7)
    assert llm.chat_template == ChatTemplate(source="{{ bos_token }}!", bos_token="<s>", eos_token="</s>")


def test_from_pretrained_default_pool_holds_every_row_at_full_length(folder):
    config = LLM.from_pretrained(folder, max_num_seqs=3, block_size=4).cache_config
    assert config.num_blocks - 1 == 3 * config.max_blocks_per_seq
    assert config.dtype == "float32"


def test_from_pretrained_default_pool_is_bounded_by_memory(folder, monkeypatch):
    monkeypatch.setattr("paged_jax.pretrained._DEFAULT_CPU_CACHE_BYTES", 10_000)
    config = LLM.from_pretrained(folder, max_num_seqs=3, block_size=4).cache_config
    assert (config.num_blocks - 1) * config.bytes_per_block <= 10_000


def test_from_pretrained_bytes_make_the_pool_and_are_all_used(folder):
    options = {"max_num_seqs": 3, "block_size": 4, "max_model_len": 16}
    config = LLM.from_pretrained(folder, kv_cache_memory_bytes=100_000, **options).cache_config
    assert config.num_blocks == 100_000 // config.bytes_per_block
    any_length = LLM.from_pretrained(folder, kv_cache_memory_bytes=5000, max_num_seqs=3, block_size=4).cache_config
    assert any_length.num_blocks == 5000 // config.bytes_per_block
    eight_bits = LLM.from_pretrained(folder, kv_cache_memory_bytes=100_000, kv_cache_dtype="int8", **options)
    assert eight_bits.cache_config.num_blocks == 100_000 // eight_bits.cache_config.bytes_per_block
    assert eight_bits.cache_config.num_blocks > config.num_blocks
    assert eight_bits.generate("abc", GREEDY, use_tqdm=False)[0].error is None


class Device:
    """A device with memory of its own, of which 1000 of 20,000 bytes are in use."""

    platform = "gpu"

    def memory_stats(self):
        return {"bytes_limit": 20_000, "bytes_in_use": 1000}


@pytest.mark.parametrize(("share", "budget"), [(0.9, 17_000), (0.5, 9000), (1, 19_000)])
def test_default_pool_on_a_device_takes_its_share_of_the_memory_less_what_is_in_use(share, budget, monkeypatch):
    sizes = CacheConfig(num_blocks=2, num_layers=1, num_kv_heads=1, head_dim=8, max_blocks_per_seq=100, block_size=4)
    monkeypatch.setattr(jax, "devices", lambda: [Device()])
    assert _default_num_blocks(sizes, share, 8) == budget // sizes.bytes_per_block
    with pytest.raises(ValueError, match=r"200 bytes are left .* take 512: raise gpu_memory_utilization=0.06"):
        _default_num_blocks(sizes, 0.06, 8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_len": 10**6}, "positions"),
        ({"max_model_len": 0}, "max_model_len"),
        ({"block_size": 0}, "block_size"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"num_blocks": 1}, "num_blocks"),
        ({"dtype": "int4"}, "dtype"),
        ({"kv_cache_dtype": "int3"}, "dtype"),
        ({"gpu_memory_utilization": 0}, "gpu_memory_utilization"),
        ({"gpu_memory_utilization": 1.1}, "gpu_memory_utilization"),
        ({"gpu_memory_utilization": "90%"}, "gpu_memory_utilization"),
        ({"kv_cache_memory_bytes": 0}, "kv_cache_memory_bytes"),
        ({"kv_cache_memory_bytes": "1G"}, "kv_cache_memory_bytes"),
        ({"kv_cache_memory_bytes": 10}, "10 bytes of K/V memory hold 0 blocks"),
        ({"kv_cache_memory_bytes": 10, "max_model_len": 16}, "10 bytes of K/V memory hold 0 blocks"),
        ({"kv_cache_memory_bytes": 10**6, "num_blocks": 9}, "give one of them"),
        ({"decode_steps": 0}, "decode_steps"),
        ({"implementation": "cuda"}, "implementation"),
    ],
)
def test_from_pretrained_bad_option_is_refused_by_name(folder, options, message):
    with pytest.raises(ValueError, match=message):
        LLM.from_pretrained(folder, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_blocks": 5}, "each of the 5 cache groups needs a block; give at least 6"),
        ({"kv_cache_memory_bytes": 2000}, "2000 bytes of K/V memory hold .* one sequence of 16 tokens needs 5 "),
    ],
)
def test_from_pretrained_pool_without_a_block_for_each_cache_group_is_refused(tiny_family, tmp_path, options, message):
    folder = tiny_family("gemma3").save(tmp_path)
    with pytest.raises(ValueError, match=message):
        LLM.from_pretrained(folder, **options)


def test_from_pretrained_bfloat16_cache_is_stored_in_place_on_a_cpu(folder):
    llm = LLM.from_pretrained(folder, kv_cache_dtype="bfloat16", max_num_seqs=2)
    assert llm.cache_config.dtype == "bfloat16"
    assert llm._runner._state.cache.k[0].dtype == np.uint16
    assert llm.generate("abc", GREEDY, use_tqdm=False)[0].error is None
