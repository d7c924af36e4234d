"""LLM.from_pretrained: a folder on disk becomes an engine, its limits and defaults checked."""

import numpy as np
import pytest

from paged_jax import LLM, ChatTemplate, SamplingParams

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
        ({"decode_steps": 0}, "decode_steps"),
        ({"implementation": "cuda"}, "implementation"),
    ],
)
def test_from_pretrained_bad_option_is_refused_by_name(folder, options, message):
    with pytest.raises(ValueError, match=message):
        LLM.from_pretrained(folder, **options)


def test_from_pretrained_bfloat16_cache_is_stored_in_place_on_a_cpu(folder):
    llm = LLM.from_pretrained(folder, kv_cache_dtype="bfloat16", max_num_seqs=2)
    assert llm.cache_config.dtype == "bfloat16"
    assert llm._runner._state.cache.k[0].dtype == np.uint16
    assert llm.generate("abc", GREEDY, use_tqdm=False)[0].error is None
