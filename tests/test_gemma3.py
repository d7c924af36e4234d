"""Real weights: Gemma 3 270M equals the recorded reference (tests/data/record_gemma3.py), beyond its window too."""

import hashlib
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from doubles import AuditedLLM

from models.load import LoadError, find_wheel, load_model
from paged_jax import CacheConfig, ChatTemplate, SamplingParams, group_layers
from paged_jax.batch import StepBatch
from paged_jax.config import cdiv
from paged_jax.kv_cache import init_cache

try:
    FILES = find_wheel("gemma3")
    MISSING = ""
except LoadError as error:
    FILES, MISSING = [], str(error)

pytestmark = [pytest.mark.gemma3, pytest.mark.skipif(bool(MISSING), reason=MISSING)]
RECORDED = json.loads((Path(__file__).parent / "data" / "gemma3_reference.json").read_text())
PROMPTS = RECORDED["prompts"]
LENGTH = 768


@pytest.fixture(scope="module", autouse=True)
def _optimised():
    """These programs run long enough to be worth it."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture(scope="module")
def model():
    return load_model("gemma3", dtype="float32")


def cache_config(model, num_rows, layer_groups=(), sliding_windows=()):
    """The cache of the model for rows of LENGTH tokens, by default in one group."""
    c = model.config
    return CacheConfig(
        num_blocks=1 + num_rows * cdiv(LENGTH, 16) * max(1, len(layer_groups)),
        block_size=16,
        num_layers=c.num_layers,
        num_kv_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        max_num_seqs=num_rows,
        max_blocks_per_seq=cdiv(LENGTH, 16),
        layer_groups=layer_groups,
        sliding_windows=sliding_windows,
    )


def test_joined_parts_are_the_published_file():
    digest = hashlib.sha256()
    for path in FILES:
        digest.update(path.read_bytes())
    assert digest.hexdigest() == RECORDED["gguf_sha256"]


def test_config_equals_that_of_transformers(model):
    config, expected = model.config, RECORDED["config"]
    windows = [expected["sliding_window"] if kind == "sliding_attention" else None for kind in expected["layer_types"]]
    assert config.layer_windows == tuple(windows)
    thetas = [expected["rope_parameters"][kind]["rope_theta"] for kind in ("full_attention", "sliding_attention")]
    assert [config.rope_theta, config.rope_local_theta] == thetas
    assert config.query_pre_attn_scalar == expected["query_pre_attn_scalar"]


@pytest.mark.parametrize("name", ["france", "story", "bytes"])
def test_tokenizer_equals_that_of_transformers(model, name):
    p = PROMPTS[name]
    assert model.tokenizer.encode(p["prompt"]).ids == p["prompt_ids"]
    assert model.tokenizer.decode(p["generated_ids"], skip_special_tokens=False) == p["text"]
    assert model.tokenizer.decode(p["prompt_ids"]) == p["prompt"]


@pytest.mark.parametrize(("num_spaces", "lengths"), [(31, [31]), (33, [31, 2]), (70, [31, 31, 8])])
def test_tokenizer_takes_the_longest_run_of_spaces_as_sentencepiece_does(model, num_spaces, lengths):
    """transformers' conversion of the file halves long runs; SentencePiece with the same vocabulary does not."""
    ids = model.tokenizer.encode(" " * num_spaces, add_special_tokens=False).ids
    assert [len(model.tokenizer.id_to_token(i)) for i in ids] == lengths


def test_chat_template_text_is_encoded_with_its_special_tokens(model):
    assert model.chat_template is None  # the file is of the pretrained model
    source = "{{ bos_token }}<start_of_turn>{{ messages[0].role }}\n{{ messages[0].content }}<end_of_turn>"
    text = ChatTemplate(source=source, bos_token=model.bos_token).render([{"role": "user", "content": "Hi"}])
    ids = model.tokenizer.encode(text, add_special_tokens=False).ids
    names = ["<bos>", "<start_of_turn>", "user", "\n", "Hi", "<end_of_turn>"]
    assert [model.tokenizer.id_to_token(i) for i in ids] == names


@pytest.mark.parametrize("name", list(PROMPTS))
def test_logits_teacher_forced_equal_the_reference(model, name):
    """The whole sequence in one step; that of "license" has 730 tokens, the window 512."""
    p = PROMPTS[name]
    tokens = np.asarray([*p["prompt_ids"], *p["generated_ids"][:-1]], np.int32)
    config = cache_config(model, 1)
    table = np.arange(1, config.num_blocks, dtype=np.int32)
    positions = np.arange(LENGTH, dtype=np.int32)
    is_real = positions < len(tokens)
    wanted = [step["position"] for step in p["steps"]]
    batch = StepBatch(
        token_ids=jnp.asarray(np.pad(tokens, (0, LENGTH - len(tokens)))),
        positions=jnp.asarray(np.where(is_real, positions, 0)),
        seq_lens=jnp.asarray([len(tokens)], jnp.int32),
        query_start_loc=jnp.asarray([0, len(tokens)], jnp.int32),
        block_tables=jnp.asarray(table[None, None]),
        slot_mapping=jnp.asarray(np.where(is_real, positions + 16, 0)[None]),
        logits_indices=jnp.asarray(np.pad(wanted, (0, 48 - len(wanted))), jnp.int32),
    )
    logits = np.asarray(jax.jit(model.forward)(model.params, batch, init_cache(config))[0])
    for row, expected in zip(logits, p["steps"], strict=False):
        np.testing.assert_allclose(row[expected["top_ids"]], expected["top_logits"], atol=1e-3)
        np.testing.assert_allclose(jax.nn.logsumexp(row), expected["logsumexp"], atol=1e-3)


def test_greedy_ids_in_chunks_and_decode_steps_equal_the_reference(model):
    llm = AuditedLLM(
        model.forward,
        model.params,
        cache_config(model, len(PROMPTS), *group_layers(model.config.layer_windows)),
        model.tokenizer,
        eos_token_ids=model.config.eos_token_ids,
        max_num_batched_tokens=96,
        decode_steps=8,
    )
    llm._runner.row_buckets = (len(PROMPTS),)
    seen = []
    llm.watch = lambda state: seen.append((np.asarray(state.table.block_ids) != 0).sum(axis=-1).max(axis=1))
    prompts = [{"prompt_token_ids": p["prompt_ids"]} for p in PROMPTS.values()]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=32), use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == [p["generated_ids"] for p in PROMPTS.values()]
    assert [o.outputs[0].text for o in outputs][:2] == [p["text"] for p in PROMPTS.values()][:2]
    assert llm.is_whole
    # 730 tokens are 46 blocks; a window holds its 512 tokens, and a chunk of prompts before it has been read.
    for window, most in zip(llm.cache_config.sliding_windows, np.max(seen, axis=0), strict=True):
        assert most == (46 if window is None else cdiv(window, 16) + 1)
    assert llm.cache_config.num_groups == 6
