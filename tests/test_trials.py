"""Faults that users of other paged-KV systems met, run against the whole engine. The numbers are those of the trials.

Trials about the block manager, attention, sampling and text alone stand beside those modules' tests.
"""

import time

import jax
import numpy as np
import pytest
from doubles import (
    TINY,
    VOCAB,
    cache_config,
    dense_tokens,
    ids,
    oracle_llm,
    oracle_tokens,
    prompt,
    tiny_llm,
    tiny_params,
    tokens_of,
    with_garbage_tables,
    with_several_sizes,
)

from paged_jax import LLM, CacheConfig, SamplingParams


def greedy(max_tokens, **options):
    return SamplingParams(temperature=0, max_tokens=max_tokens, **options)


def generate(llm, prompts, params):
    return llm.generate(ids(prompts), params, use_tqdm=False)


@pytest.fixture(scope="module")
def shared_llm():
    """An engine whose programs all tests of this file may use; it is idle and whole between them."""
    return with_several_sizes(tiny_llm(40))


@pytest.fixture
def llm(shared_llm):
    shared_llm.poison_value = shared_llm.watch = None
    shared_llm.num_steps = 0
    yield shared_llm
    assert shared_llm.is_whole


def test_b01_every_prompt_length_around_the_blocks_equals_dense(llm):
    prompts = [prompt(n) for n in range(1, 18)]
    assert tokens_of(generate(llm, prompts, greedy(3))) == [dense_tokens(p, 3) for p in prompts]


def test_b01_same_prompt_again_and_while_the_first_decodes_equals_dense(llm):
    once = prompt(8)
    assert tokens_of(generate(llm, [once, once, once], greedy(3))) == [dense_tokens(once, 3)] * 3


@pytest.mark.full_cache
def test_b08_capacity_is_exact():
    llm = tiny_llm(4, max_blocks_per_seq=16)
    fits, too_long = generate(llm, [prompt(16), prompt(17)], greedy(1))
    assert fits.outputs[0].token_ids == dense_tokens(prompt(16), 1)
    assert "5 blocks" in str(too_long.error)
    assert llm.is_whole


def test_b08_many_mixed_requests_never_touch_the_null_block(llm):
    rng = np.random.default_rng(0)
    seen = []
    # That block 0 is not in the queue is part of the audit after each step.
    llm.watch = lambda state: seen.append(int(state.pool.ref_count[0]) + int((state.table.block_ids < 0).sum()))
    prompts = [prompt(int(n)) for n in rng.integers(1, 20, 24)]
    generate(llm, prompts, [greedy(int(n)) for n in rng.integers(1, 9, 24)])
    assert len(seen) >= 6
    assert max(seen) == 0


@pytest.mark.full_cache
def test_b36_request_larger_than_the_pool_fails_alone_and_at_once():
    llm = tiny_llm(4, max_blocks_per_seq=16)
    params = [greedy(1), greedy(2), greedy(20)]
    too_long, fine, grows_too_long = generate(llm, [prompt(17), prompt(3), prompt(10)], params)
    assert "needs 5 blocks" in str(too_long.error)
    assert "only 4" in str(too_long.error)
    assert too_long.outputs[0].finish_reason == "error"
    assert fine.outputs[0].token_ids == dense_tokens(prompt(3), 2)
    assert llm.num_steps <= 3
    assert "needs 8 blocks" in str(grows_too_long.error)


@pytest.mark.parametrize(
    "field",
    ["num_blocks", "block_size", "max_num_seqs", "max_blocks_per_seq", "num_layers", "num_kv_heads", "head_dim"],
)
@pytest.mark.parametrize("value", [0, -1, 1.5, True, None])
def test_b41_useless_cache_size_is_refused_by_name(field, value):
    sizes = {"num_blocks": 4, "num_layers": 1, "num_kv_heads": 1, "head_dim": 8, "max_blocks_per_seq": 2}
    with pytest.raises(ValueError, match=field):
        CacheConfig(**(sizes | {field: value}))


@pytest.mark.parametrize("option", ["max_num_batched_tokens", "decode_steps"])
def test_b41_useless_engine_option_is_refused_by_name(option):
    start = time.monotonic()
    with pytest.raises(ValueError, match=option):
        LLM(TINY, tiny_params(), cache_config(4), **{option: 0})
    assert time.monotonic() - start < 1


@pytest.mark.full_cache
def test_b44_max_tokens_one_takes_no_decode_step_and_no_block_for_the_token(llm):
    generate(llm, [prompt(8)], greedy(1))  # programs are compiled
    llm.num_steps, free = 0, []
    admitted = llm._runner.prefill
    llm._runner.prefill = lambda chunks: free.append(admitted(chunks)) or free[-1]
    try:
        (output,) = generate(llm, [prompt(8)], greedy(1))
    finally:
        del llm._runner.prefill
    assert output.outputs[0].token_ids == dense_tokens(prompt(8), 1)
    assert llm.num_steps == 1
    assert llm.cache_config.num_blocks_for(8) == 2


def test_b44_max_tokens_zero_is_an_error():
    with pytest.raises(ValueError, match="max_tokens"):
        SamplingParams(max_tokens=0)


@pytest.mark.parametrize("position", range(3))
def test_b45_empty_prompt_fails_alone(llm, position):
    prompts = [prompt(3), prompt(5)]
    prompts.insert(position, [])
    outputs = generate(llm, prompts, greedy(2))
    failed = outputs.pop(position)
    assert isinstance(failed.error, ValueError)
    assert "empty" in str(failed.error)
    assert tokens_of(outputs) == [dense_tokens(prompt(3), 2), dense_tokens(prompt(5), 2)]


@pytest.mark.parametrize("block_size", [1, 16])  # 4: test_b01
def test_b45_one_token_prompt_works(block_size):
    llm = tiny_llm(8, block_size)
    assert tokens_of(generate(llm, [prompt(1)], greedy(4))) == [dense_tokens(prompt(1), 4)]


@pytest.mark.full_cache
def test_b59_slots_written_are_exactly_the_positions_of_the_sequence():
    llm = oracle_llm(8, decode_steps=1)
    lengths, holes = [], []

    def watch(state):
        length = int(state.table.seq_lens[0])
        stored = np.asarray(state.cache.k[0])[:, :, 1, 0]  # the position that each slot holds
        live = [stored[b, o] for b, o in zip(*divmod(np.asarray(slots(state, length)), 4), strict=True)]
        lengths.append(length)
        if length:  # the row is live: its slots hold its positions, every other slot is still poisoned
            holes.append(live != list(range(length)) or int(np.isfinite(stored[1:]).sum()) != length)

    llm.watch, llm.poison_value = watch, np.nan
    (output,) = generate(llm, [prompt(9)], greedy(6))
    assert output.outputs[0].token_ids == oracle_tokens(prompt(9), 6)
    assert lengths == [9, 10, 11, 12, 13, 0]
    assert holes == [False] * 5


def slots(state, length):
    position = np.arange(length)
    return np.asarray(state.table.block_ids)[0, 0, position // 4] * 4 + position % 4


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_b68_b84_poisoned_dead_slots_change_nothing_on_a_recycled_pool(llm, value):
    prompts = [prompt(n, n) for n in (1, 3, 4, 5, 8, 9, 13)]
    clean = tokens_of(generate(llm, prompts, greedy(9)))
    llm.poison_value = value
    assert tokens_of(generate(llm, prompts, greedy(9))) == clean == [dense_tokens(p, 9) for p in prompts]


def test_b68_garbage_in_dead_table_entries_changes_nothing():
    llm = tiny_llm(16, forward=with_garbage_tables(TINY))
    llm.poison_value = np.nan
    prompts = [prompt(n, n) for n in (1, 4, 5, 9)]
    assert tokens_of(generate(llm, prompts, greedy(5))) == [dense_tokens(p, 5) for p in prompts]


@pytest.mark.parametrize("bad", [-1, VOCAB, 2**31 - 1, 2**40])
def test_b90_prompt_token_outside_the_vocabulary_fails_alone(llm, bad):
    refused, fine = generate(llm, [[5, bad], [0, VOCAB - 1]], greedy(1))
    assert str(bad) in str(refused.error)
    assert "vocabulary" in str(refused.error)
    assert fine.outputs[0].token_ids == dense_tokens([0, VOCAB - 1], 1)


def test_b100_no_compilation_after_warmup_over_changing_lengths_batches_and_parameters(llm):
    lines = llm.warmup()
    generate(llm, [prompt(3)], greedy(2))
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, duration, **_: compiled.append(event) if "backend_compile" in event else None
    )
    rng, count = np.random.default_rng(0), llm.compile_count
    llm.num_steps = 0
    while llm.num_steps < 200:
        size = int(rng.integers(1, 9))
        prompts = [prompt(int(n)) for n in rng.integers(1, 64, size)]
        params = [
            SamplingParams(
                temperature=float(rng.choice([0.0, 0.5, 1.0])),
                top_k=int(rng.integers(0, 9)),
                top_p=float(rng.uniform(0.1, 1.0)),
                min_p=float(rng.choice([0.0, 0.1])),
                seed=int(rng.integers(2**40)),
                stop_token_ids=rng.integers(0, 97, int(rng.integers(0, 4))).tolist(),
                max_tokens=int(rng.integers(1, 12)),
                presence_penalty=float(rng.choice([0.0, 1.0])),
                repetition_penalty=float(rng.choice([1.0, 1.2])),
                min_tokens=int(rng.integers(0, 2)),
                logit_bias=dict.fromkeys(rng.integers(0, 97, int(rng.integers(0, 4))).tolist(), 2.0),
                allowed_token_ids=None if rng.random() < 0.5 else list(range(90)),
                logprobs=rng.choice([None, 0, 5]),
                prompt_logprobs=rng.choice([None, None, None, 2]),
            )
            for _ in prompts
        ]
        assert all(o.error is None for o in generate(llm, prompts, params))
    jax.monitoring.clear_event_listeners()
    assert compiled == []
    assert llm.compile_count == count == len(lines)


def test_b100_number_of_programs_does_not_depend_on_pool_or_length():
    def buckets(**sizes):
        runner = LLM(TINY, tiny_params(), cache_config(**sizes))._runner
        return runner.token_buckets, runner.row_buckets

    assert buckets(num_usable_blocks=8) == buckets(num_usable_blocks=500) == ((16, 32, 64, 128, 256, 512), (1, 2, 4, 8))
