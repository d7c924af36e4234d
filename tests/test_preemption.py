"""Continuous batching under pressure: preemption by recompute and swap, admission, abort; trials by their numbers."""

import asyncio
import contextlib
import dataclasses
import gc
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from doubles import (
    Disturbance,
    audit,
    cache_config,
    dense_tokens,
    ids,
    oracle_llm,
    oracle_tokens,
    prompt,
    tiny_llm,
    tokens_of,
)

from paged_jax import AsyncStreams, RequestOutputKind, SamplingParams, Status, check_invariants
from paged_jax.block_table import append_tokens, fork, init, restore
from paged_jax.runner import ReturningRow, RowChunk

MODES = ["recompute", "swap"]
GREEDY = SamplingParams(temperature=0, max_tokens=8)
#: ORACLE's logits are 0 and 1: at this temperature every sample draws what greedy takes, and n > 1 is allowed.
NEARLY_GREEDY = SamplingParams(temperature=0.01, seed=0, max_tokens=8)


def greedy(max_tokens, **options):
    return dataclasses.replace(GREEDY, max_tokens=max_tokens, **options)


def generate(llm, prompts, params=GREEDY, **options):
    return llm.generate(ids(prompts), params, use_tqdm=False, **options)


def add(llm, name, token_ids, params, **options):
    llm.add_request(name, {"prompt_token_ids": list(token_ids)}, params, **options)


def run(llm, before_step=lambda: None) -> dict[str, list[list[int]]]:
    """Steps until nothing is unfinished: the tokens of all samples of each request."""
    done = {}
    while llm.has_unfinished_requests():
        before_step()
        for output in llm.step():
            if output.finished:
                assert output.error is None
                done[output.request_id] = [c.token_ids for c in output.outputs]
    return done


def test_mixed_steps_store_prompts_while_rows_generate():
    """A long prompt arrives while a row generates: both move in every step, and neither notices the other."""
    llm, kinds = tiny_llm(40, max_num_batched_tokens=4), []
    real = llm._runner.prefill
    llm._runner.prefill = lambda chunks: kinds.append(sorted(len(c.token_ids) for c in chunks)) or real(chunks)
    add(llm, "a", prompt(3), greedy(20))
    llm.step()
    add(llm, "b", prompt(11), greedy(4))
    assert run(llm) == {"a": [dense_tokens(prompt(3), 20)], "b": [dense_tokens(prompt(11), 4)]}
    assert kinds == [[3], [1, 3], [1, 3], [1, 3], [1, 2]]


@pytest.mark.parametrize("mode", MODES)
def test_b26_preempted_requests_come_back_in_chunks_with_every_token(mode):
    llm = oracle_llm(4, max_num_batched_tokens=4, preemption_mode=mode)
    outputs = generate(llm, [prompt(5, 1), prompt(5, 2)])
    assert tokens_of(outputs) == [oracle_tokens(prompt(5, n), 8) for n in (1, 2)]
    assert llm.core.num_preemptions[mode] >= 1
    assert llm.is_whole


@pytest.mark.parametrize("num_host_blocks", [0, 1, 2, None])
def test_b28_full_host_pool_falls_back_to_recompute(num_host_blocks):
    llm = oracle_llm(6, preemption_mode="swap", num_host_blocks=num_host_blocks)
    outputs = generate(llm, [prompt(5, 1), prompt(5, 2)], dataclasses.replace(NEARLY_GREEDY, n=2, max_tokens=6))
    for n, output in enumerate(outputs, 1):
        assert [c.token_ids for c in output.outputs] == [oracle_tokens(prompt(5, n), 6)] * 2
    used = llm.core.num_preemptions
    assert (used["swap"] > 0, used["recompute"] > 0) == ((True, False) if num_host_blocks is None else (False, True))
    assert (llm.core.num_host_blocks_used, llm.is_whole) == (0, True)


@pytest.mark.full_cache
def test_b30_samples_come_back_into_exactly_the_blocks_that_they_shared():
    """Three samples, one of which has ended: 1 shared block and 2 private ones."""
    llm = oracle_llm(8)
    runner, params = llm._runner, dataclasses.replace(NEARLY_GREEDY, n=3, max_tokens=6)
    add(llm, "a", prompt(6, 1), params)
    llm.step()
    llm.step()  # 6 + 4 tokens in 3 rows: block 0 shared, two private ones each
    (state,) = llm.core.running
    runner.release([state.samples[0].row])
    rows = [s.row for s in state.samples[1:]]
    saved = runner.swap_out(rows)
    assert (saved.num_blocks, saved.seq_lens.tolist()) == (5, [10, 10])
    returning = [ReturningRow(row, 7, True) for row in rows]
    runner.prefill([RowChunk(5, prompt(13, 2))])  # 4 of 8 blocks
    before = jax.tree.map(np.array, runner._state)
    assert not runner.swap_in(saved, returning, 0)
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.array, runner._state))
    runner.release([5])
    runner.prefill([RowChunk(5, prompt(9, 2))])  # 3 of 8 blocks: exactly 5 are left
    assert not runner.swap_in(saved, returning, 1)
    assert runner.swap_in(saved, returning, 0)
    audit(runner._state)
    assert runner.num_free_blocks == 0
    assert np.asarray(runner._state.table.seq_lens)[rows].tolist() == [10, 10]
    llm.abort_all()


@pytest.mark.full_cache
def test_r61_swapped_blocks_come_back_bit_for_bit_into_other_blocks():
    """More blocks than one transfer moves, shared and partial ones, in rows that change their places."""
    llm = tiny_llm(80, max_num_batched_tokens=32)
    runner = llm._runner
    for row, length in ((0, 32), (1, 32), (4, 31)):  # three chunks of each
        for part in range(3):
            runner.prefill(
                [RowChunk(row, prompt(length, 1 + row + part), children=[row + 5] if part == 2 and row < 2 else [])]
            )

    def content(rows):
        state = runner._state
        table, lens = np.asarray(state.table.block_ids)[0], np.asarray(state.table.seq_lens)
        slots = [table[row, np.arange(lens[row]) // 4] * 4 + np.arange(lens[row]) % 4 for row in rows]
        return [np.asarray(a).reshape(-1, 2, 8)[s] for a in (*state.cache.k, *state.cache.v) for s in slots]

    rows = [0, 1, 4, 5, 6]
    before, ids = content(rows), np.asarray(runner._state.table.block_ids)[0, 0]
    saved = runner.swap_out(rows)
    assert saved.num_blocks == 24 + 24 + 24
    runner.prefill([RowChunk(7, prompt(30, 9))])  # takes the blocks that were free first
    returning = [ReturningRow(row, 0, False) for row in (6, 5, 4, 1, 0)]
    assert runner.swap_in(saved, returning, 0)
    audit(runner._state)
    assert not np.array_equal(np.asarray(runner._state.table.block_ids)[0, 6], ids)
    for old, new in zip(before, content([r.row for r in returning]), strict=True):
        np.testing.assert_array_equal(old, new)
    llm.abort_all()


@pytest.mark.parametrize("group", [0, 1, 2])
def test_b20_restore_that_lacks_one_block_of_a_group_changes_nothing(group):
    """Three groups; the rows need 3 * 2 blocks and one more of one group, of 6 in the pool."""
    sizes = {"num_layers": 3, "layer_groups": ((0,), (1,), (2,)), "sliding_windows": ()}
    config = cache_config(2, max_blocks_per_seq=6, **sizes)
    pool, table = init(config)
    numbers = np.zeros((3, 8, 6), np.int32)
    numbers[:, 1, :2] = np.arange(1, 7).reshape(3, 2)
    numbers[group, 2, 0] = 7
    lens = np.zeros(8, np.int32)
    lens[1], lens[2] = 8, 3
    refused = jax.jit(restore, static_argnames="max_blocks")(
        pool, table, jnp.asarray(numbers), jnp.asarray(lens), jnp.int32(7), max_blocks=12
    )
    assert refused[3] == Status.OUT_OF_BLOCKS
    jax.tree.map(np.testing.assert_array_equal, (pool, table), refused[:2])
    numbers[group, 2, 0], lens[2] = 0, 0
    pool, table, blocks, status = restore(
        pool, table, jnp.asarray(numbers), jnp.asarray(lens), jnp.int32(6), max_blocks=12
    )
    assert (int(status), sorted(blocks.tolist())) == (Status.OK, [0] * 6 + [1, 2, 3, 4, 5, 6])
    check_invariants(pool, table)


@pytest.mark.full_cache
def test_restore_into_a_row_in_use_is_refused_and_shared_blocks_count_their_owners():
    pool, table = init(cache_config(8))
    one = jnp.zeros(8, jnp.int32).at[0].set(6)
    pool, table, _ = append_tokens(pool, table, one, max_new_tokens=8)
    numbers = np.zeros((1, 8, 8), np.int32)
    numbers[0, 0, :2] = [1, 2]
    args = jnp.asarray(numbers), one, jnp.int32(2)
    assert restore(pool, table, *args, max_blocks=8)[3] == Status.ROW_IN_USE
    numbers = np.zeros((1, 8, 8), np.int32)
    numbers[0, [2, 4], 0], numbers[0, 2, 1], numbers[0, 4, 1] = 1, 2, 3
    lens = np.zeros(8, np.int32)
    lens[[2, 4]] = 7
    pool, table, blocks, _ = restore(pool, table, jnp.asarray(numbers), jnp.asarray(lens), jnp.int32(3), max_blocks=8)
    check_invariants(pool, table)
    assert pool.ref_count[blocks[:3]].tolist() == [2, 1, 1]
    pool, table, status = fork(pool, table, jnp.array([0, 1, 2, 2, 4, 5, 6, 7]))
    assert status == Status.OK
    check_invariants(pool, table)


@pytest.mark.parametrize("mode", MODES)
def test_b31_victim_of_a_refused_step_has_no_token_in_it_and_the_others_go_on(mode):
    """Two low rows and a high one; the pool is one block short when all of them grow."""
    llm = oracle_llm(8, decode_steps=1, preemption_mode=mode, scheduling_policy="priority")
    for number, (name, priority) in enumerate((("low", 5), ("later", 5), ("high", 0)), 1):
        add(llm, name, prompt(6, number), greedy(7), priority=priority)
    seen = {}
    while not sum(llm.core.num_preemptions.values()):
        seen = {r.request.request_id: len(r.samples[0].token_ids) for r in llm.core.running}
        step = {o.request_id: o for o in llm.step()}
    assert [r.request.request_id for r in llm.core.waiting] == ["later"]
    assert step == {}  # refused as a whole; nobody's tokens were counted twice or lost
    assert {r.request.request_id: len(r.samples[0].token_ids) for r in llm.core.running} == {
        name: seen[name] for name in ("low", "high")
    }
    done = run(llm)
    assert done == {name: [oracle_tokens(prompt(6, n), 7)] for n, name in enumerate(("low", "later", "high"), 1)}


def test_b33_equal_requests_of_several_samples_are_served_in_order():
    llm = oracle_llm(8, scheduling_policy="priority")
    params = dataclasses.replace(NEARLY_GREEDY, n=3, max_tokens=2)
    order = []
    for n in range(64):
        add(llm, str(n), prompt(5, 1 + n), dataclasses.replace(params, output_kind=RequestOutputKind.FINAL_ONLY))
    while llm.has_unfinished_requests():
        order += [int(o.request_id) for o in llm.step()]
    assert order == sorted(order)
    assert len(order) == 64


@pytest.mark.parametrize("mode", MODES)
def test_b34_two_requests_that_each_need_the_whole_pool_finish_without_ping_pong(mode):
    llm = oracle_llm(8, max_num_batched_tokens=4, decode_steps=1, preemption_mode=mode)
    add(llm, "a", prompt(24, 1), greedy(8))
    add(llm, "b", prompt(4, 2), greedy(28))
    committed = []
    real = llm.core.step

    def step():
        before = sum(len(s.token_ids) for r in llm.core.requests.values() for s in r.samples)
        changed = real()
        after = sum(len(s.token_ids) for r in llm.core.requests.values() for s in r.samples)
        committed.append(bool(changed) or after > before)
        return changed

    llm.core.step = step
    assert run(llm) == {"a": [oracle_tokens(prompt(24, 1), 8)], "b": [oracle_tokens(prompt(4, 2), 28)]}
    assert llm.num_steps <= 200
    assert sum(llm.core.num_preemptions.values()) <= 4
    assert all(any(committed[i : i + 50]) for i in range(max(1, len(committed) - 50)))


@pytest.mark.parametrize("watermark", [0.0, 0.25, 0.75, 1.0])
def test_b38_watermark_holds_back_the_second_request_only(watermark):
    llm = oracle_llm(4, watermark=watermark, decode_steps=1, enable_prefix_caching=False)
    add(llm, "a", prompt(7, 1), greedy(9))  # 2 blocks, and in the end all 4 of them
    add(llm, "b", prompt(3, 2), greedy(2))
    llm.step()
    assert [r.request.request_id for r in llm.core.running] == (["a", "b"] if watermark <= 0.25 else ["a"])
    assert run(llm) == {"a": [oracle_tokens(prompt(7, 1), 9)], "b": [oracle_tokens(prompt(3, 2), 2)]}


@pytest.mark.parametrize("mode", MODES)
def test_b39_admitted_requests_get_all_their_tokens(mode):
    llm = oracle_llm(6, preemption_mode=mode)
    outputs = generate(llm, [prompt(4, n) for n in (1, 2, 3)], greedy(20))
    assert tokens_of(outputs) == [oracle_tokens(prompt(4, n), 20) for n in (1, 2, 3)]
    assert [o.outputs[0].finish_reason for o in outputs] == ["length"] * 3


def test_several_half_done_prompts_cannot_block_each_other():
    """Eight prompts of half the pool each, a few tokens a step."""
    llm = oracle_llm(8, max_num_batched_tokens=4, decode_steps=1)
    prompts = [prompt(16, 1 + n) for n in range(8)]
    assert tokens_of(generate(llm, prompts, greedy(10))) == [oracle_tokens(p, 10) for p in prompts]


@pytest.mark.full_cache
def test_reserve_is_for_high_priorities():
    llm = oracle_llm(8, priority_reserve=0.5, scheduling_policy="priority", decode_steps=1)
    failed, low, high = generate(llm, [prompt(14, 1), prompt(9, 2), prompt(14, 3)], greedy(4), priority=[0, 0, -1])
    assert "beside the 4 blocks reserved" in str(failed.error)
    assert tokens_of([low, high]) == [oracle_tokens(prompt(9, 2), 4), oracle_tokens(prompt(14, 3), 4)]
    free = []
    llm.watch = lambda s: free.append(int(s.pool.num_free))
    generate(llm, [prompt(5, n) for n in range(1, 7)], greedy(8))
    assert min(free) == 4


@pytest.mark.parametrize(("priority", "message"), [("1", "priority"), (2**31, "priority"), (True, "priority")])
def test_priority_that_is_no_integer_fails_alone(priority, message):
    llm = oracle_llm(8)
    bad, fine = generate(llm, [prompt(3, 1), prompt(3, 2)], priority=[priority, 0])
    assert message in str(bad.error)
    assert tokens_of([fine]) == [oracle_tokens(prompt(3, 2), 8)]


def test_priorities_may_be_an_array():
    outputs = generate(oracle_llm(8), [prompt(3, 1), prompt(3, 2)], priority=np.array([1, -1]))
    assert tokens_of(outputs) == [oracle_tokens(prompt(3, n), 8) for n in (1, 2)]


def test_priorities_of_another_number_than_prompts_raise():
    with pytest.raises(ValueError, match="1 priorities for 2 prompts"):
        generate(oracle_llm(8), [prompt(3), prompt(4)], priority=[1])


@pytest.mark.parametrize("options", [{"preemption_mode": "x"}, {"scheduling_policy": "x"}, {"watermark": 2}])
def test_engine_options_of_scheduling_are_checked_at_once(options):
    with pytest.raises(ValueError, match=r"policy|mode|watermark"):
        oracle_llm(8, **options)


# -- forced preemption, aborts, everything at random -------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_b54_samples_that_are_preempted_again_and_again_equal_those_that_never_are(mode):
    params = [SamplingParams(n=3, temperature=0.8, seed=n, max_tokens=12) for n in (1, 2)]
    prompts = [prompt(5, 1), prompt(5, 2)]
    calm = generate(tiny_llm(40), prompts, params)
    llm = tiny_llm(16, decode_steps=1)
    for seed in range(3):
        for n, token_ids in enumerate(prompts):
            add(llm, str(n), token_ids, params[n])
        done = run(llm, Disturbance(llm, seed, modes=(mode,)))
        assert done == {str(n): [c.token_ids for c in o.outputs] for n, o in enumerate(calm)}
    assert llm.core.num_preemptions[mode] > 10
    assert llm.is_whole


@pytest.mark.parametrize("every", [1, 3])
def test_r63_retracting_every_few_steps_changes_nothing(every):
    llm = oracle_llm(8, decode_steps=1)
    for n in range(4):
        add(llm, str(n), prompt(3 + 4 * n, 1 + n), greedy(6))

    def retract():
        if llm.num_steps % every == 0 and len(llm.core.running) > 1:
            llm.core.preempt(llm.core.running[0], MODES[llm.num_steps % 2])

    assert run(llm, retract) == {str(n): [oracle_tokens(prompt(3 + 4 * n, 1 + n), 6)] for n in range(4)}


@pytest.mark.parametrize("moment", ["waiting", "first chunk", "second chunk", "generating", "on the host", "finished"])
def test_r59_abort_at_every_moment(moment):
    llm = oracle_llm(8, max_num_batched_tokens=4, decode_steps=1)
    add(llm, "other", prompt(2, 9), greedy(12))
    add(llm, "a", prompt(9, 1), greedy(5))
    steps = {"waiting": 0, "first chunk": 2, "second chunk": 3, "generating": 6, "on the host": 6, "finished": 12}
    for _ in range(steps[moment]):
        llm.step()
    if moment == "on the host":
        llm.core.preempt(next(r for r in llm.core.running if r.request.request_id == "a"), "swap")
        assert llm.core.num_host_blocks_used > 0
    assert llm.abort("a") == (moment != "finished")
    assert not llm.abort("a")
    assert not llm.abort("unknown")
    add(llm, "a", prompt(7, 2), greedy(3))  # the id is free at once
    done = run(llm)
    assert done["a"] == [oracle_tokens(prompt(7, 2), 3)]
    assert done.get("other", [oracle_tokens(prompt(2, 9), 12)]) == [oracle_tokens(prompt(2, 9), 12)]
    assert (llm.core.num_host_blocks_used, llm.is_whole) == (0, True)


def test_b22_host_arrays_changed_while_a_step_is_in_flight_change_nothing(monkeypatch):
    """Before the result of a step is fetched, the host's own arrays are overwritten."""
    llm = oracle_llm(8)
    expected = [oracle_tokens(prompt(5, n), 6) for n in (1, 2, 3)]
    runner, real = llm._runner, jax.device_get

    def scribble(tree):
        kept = jax.tree.map(np.copy, runner._rows)
        for array in jax.tree.leaves(runner._rows):
            array[...] = 1
        result = real(tree)
        jax.tree.map(lambda array, old: np.copyto(array, old), runner._rows, kept)
        return result

    monkeypatch.setattr(jax, "device_get", scribble)
    for _ in range(20):
        assert tokens_of(generate(llm, [prompt(5, n) for n in (1, 2, 3)], greedy(6))) == expected


def test_b87_the_same_requests_again_give_the_same_bits_and_alone_the_same_tokens():
    """Log-probabilities are bit-equal run after run; alone, in other rows and buckets, they agree within rounding."""
    llm = tiny_llm(40, enable_prefix_caching=False)
    params = dataclasses.replace(GREEDY, logprobs=0)
    prompts = [prompt(3 + 2 * n, 1 + n) for n in range(8)]

    def measured(some):
        return [
            (c.token_ids, [entry[t].logprob for entry, t in zip(c.logprobs, c.token_ids, strict=True)])
            for c in (o.outputs[0] for o in generate(llm, some, params))
        ]

    first = measured(prompts)
    assert all(measured(prompts) == first for _ in range(4))
    for (tokens, logprobs), token_ids in zip(first, prompts, strict=True):
        ((alone, alone_logprobs),) = measured([token_ids])
        assert alone == tokens == dense_tokens(token_ids, 8)
        np.testing.assert_allclose(alone_logprobs, logprobs, atol=1e-5)


def soak(llm, seed, num_requests, *, abort=0.02, preempt=0.5):
    """Random requests at random moments, disturbed; everything is compared with ORACLE."""
    rng, expected, done = np.random.default_rng(seed), {}, {}
    disturb = Disturbance(llm, seed, preempt, abort)
    capacity = llm.cache_config.longest_sequence(llm.max_num_batched_tokens)
    prefill, budget = llm._runner.prefill, llm.max_num_batched_tokens

    def counted(chunks):
        assert 0 < sum(len(c.token_ids) for c in chunks) <= budget
        assert len({c.row for c in chunks}) == len(chunks) <= llm.cache_config.max_num_seqs
        return prefill(chunks)

    llm._runner.prefill = counted
    while len(expected) < num_requests or llm.has_unfinished_requests():
        while len(expected) < num_requests and (rng.random() < 0.5 or not llm.has_unfinished_requests()):
            name, n = str(len(expected)), int(rng.choice([1, 1, 1, 2, 3]))
            length = int(rng.integers(1, 1 + min(24, capacity // 2)))
            max_tokens = int(
                rng.integers(1, 1 + min(16, capacity - length if n == 1 else max(1, capacity // n - length)))
            )
            token_ids = prompt(length, 1 + int(rng.integers(95)))
            params = dataclasses.replace(NEARLY_GREEDY, n=n, max_tokens=max_tokens)
            with contextlib.suppress(ValueError):  # several samples of it may not fit the pool
                add(llm, name, token_ids, params, priority=int(rng.integers(-2, 3)))
                expected[name] = [oracle_tokens(token_ids, max_tokens)] * n
        disturb()
        for output in llm.step():
            if output.finished:
                done[output.request_id] = [c.token_ids for c in output.outputs]
    llm._runner.prefill = prefill
    assert done.keys() | disturb.aborted == expected.keys()
    for name, tokens in done.items():
        assert tokens == expected[name], name
    assert (llm.core.num_host_blocks_used, llm.is_whole) == (0, True)


#: (usable blocks, K, caching, policy, watermark): from barely one request to ample.
SOAKS = [
    (4, 1, True, "fcfs", 0.0),
    (8, 4, True, "priority", 0.05),
    (8, 16, False, "sjf", 0.25),
    (24, 4, True, "sjf", 0.05),
    (64, 16, True, "priority", 0.05),
    (64, 1, False, "fcfs", 0.5),
]


def soaked(case, cache, num_requests):
    num_blocks, steps, caching, policy, watermark = case
    llm = oracle_llm(
        num_blocks,
        cache=cache,
        decode_steps=steps,
        enable_prefix_caching=caching,
        scheduling_policy=policy,
        watermark=watermark,
        max_num_batched_tokens=32 if num_blocks == 8 else 12,
        num_host_blocks=num_blocks // 2,
    )
    llm.warmup()
    compiled, alive = llm.compile_count, None
    for part in range(4):
        soak(llm, part, num_requests // 4)
        gc.collect()  # engines of other tests may still be there
        alive = alive or len(jax.live_arrays())
        assert (llm.compile_count, len(jax.live_arrays())) == (compiled, alive)


@pytest.mark.parametrize("cache", ["full", "windows", "int8"])
def test_soak_short(cache):
    soaked(SOAKS[1], cache, 40)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("case", "cache"),
    [*((case, "full") for case in SOAKS), (SOAKS[3], "windows"), (SOAKS[3], "int8")],
)
def test_soak_every_request_equals_oracle_whatever_happens(case, cache):
    soaked(case, cache, int(os.environ.get("SOAK_EXAMPLES", "3000")))


def test_async_streams_share_the_engine_and_end_alone():
    """Requests of several coroutines, one of which leaves early and one of which cannot be served."""
    llm = oracle_llm(8)

    async def consume(streams, name, token_ids, leave_after=None):
        outputs = []
        async for output in streams.stream(name, {"prompt_token_ids": token_ids}, greedy(9)):
            outputs.append(output)
            if leave_after == len(outputs):
                break
        return outputs

    async def everything():
        streams = AsyncStreams(llm)
        jobs = [consume(streams, str(n), prompt(5, n), 1 if n == 2 else None) for n in range(1, 5)]
        results = await asyncio.gather(*jobs, consume(streams, "bad", []), return_exceptions=True)
        again = await consume(streams, "2", prompt(3, 7))
        return results, again

    (first, left, *others, bad), again = asyncio.run(everything())
    for n, outputs in ((1, first), (3, others[0]), (4, others[1])):
        assert tokens_of(outputs[-1:]) == [oracle_tokens(prompt(5, n), 9)]
        assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
    assert len(left) == 1
    assert isinstance(bad, ValueError)
    assert tokens_of(again[-1:]) == [oracle_tokens(prompt(3, 7), 9)]
    assert (llm.has_unfinished_requests(), llm.is_whole) == (False, True)


def test_async_streams_failure_of_a_step_reaches_everyone_and_the_engine_lives(monkeypatch):
    llm = oracle_llm(8)

    async def consume(streams, name):
        return [o async for o in streams.stream(name, {"prompt_token_ids": prompt(5)}, greedy(4))]

    async def both():
        streams = AsyncStreams(llm)
        return await asyncio.gather(consume(streams, "a"), consume(streams, "b"), return_exceptions=True)

    def fails(_):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(llm._runner, "prefill", fails)
        assert [type(e) for e in asyncio.run(both())] == [MemoryError] * 2
    assert llm.is_whole
    assert [tokens_of(o[-1:]) for o in asyncio.run(both())] == [[oracle_tokens(prompt(5), 4)]] * 2


def test_async_stream_may_take_the_id_of_one_that_has_ended_but_was_not_read_yet():
    llm = oracle_llm(8)

    async def both():
        streams = AsyncStreams(llm)
        first = streams.stream("a", {"prompt_token_ids": prompt(5, 1)}, greedy(9))
        outputs = [await anext(first)]
        while llm.has_unfinished_requests():
            await asyncio.sleep(0.01)
        second = streams.stream("a", {"prompt_token_ids": prompt(5, 2)}, greedy(9))
        others = [await anext(second)]
        outputs += [o async for o in first]  # ends while the other goes on
        others += [o async for o in second]
        return outputs, others

    outputs, others = asyncio.run(asyncio.wait_for(both(), 60))
    assert tokens_of([outputs[-1], others[-1]]) == [oracle_tokens(prompt(5, n), 9) for n in (1, 2)]
