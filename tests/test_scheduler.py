"""The scheduler's pure functions: order, admission, budget, victims, and what is moved rather than computed again."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from doubles import cache_config

from paged_jax import SamplingParams, append_tokens, fork
from paged_jax.block_table import init, release_out_of_window
from paged_jax.config import SchedulerConfig
from paged_jax.scheduler import (
    Request,
    RequestState,
    Sample,
    choose_swap,
    choose_victim,
    num_blocks_to_admit,
    plan_chunks,
    start_order,
)
from paged_jax.state import FinishReason

CONFIG = cache_config(20)  # blocks of 4


def state(number=0, length=5, max_tokens=8, generated=0, n=1, *, active=False, priority=0, reserve=0, clock=0):
    """A request; active: it generates, and what it has is stored but for the last token."""
    request = Request(
        request_id=str(number),
        prompt=None,
        prompt_token_ids=tuple(range(length)),
        params=SamplingParams(n=n),
        max_tokens=max_tokens,
        stop_token_ids=(),
        seed=0,
        cache_salt=None,
        namespace=0,
        priority=priority,
        number=number,
        reserve=reserve,
    )
    samples = [
        Sample(
            row=number * n + i,
            token_ids=[7] * generated,
            is_active=active,
            num_computed_tokens=length + generated - 1 if active else 0,
        )
        for i in range(n)
    ]
    return RequestState(request=request, samples=samples, is_forked=active, clock=clock, has_progressed=active)


def queued(states, policy):
    return sorted(states, key=lambda s: start_order(s, policy))


def numbers(states):
    return [s.request.number for s in states]


def test_fcfs_is_the_order_of_arrival_whoever_was_preempted():
    waiting = [state(3), state(1), state(2)]
    assert numbers(queued(waiting, "fcfs")) == [1, 2, 3]


def test_b33_equal_priorities_go_by_arrival_and_lower_values_first():
    waiting = [state(n, n=3, priority=n % 2) for n in np.random.default_rng(0).permutation(64).tolist()]
    assert numbers(queued(waiting, "priority")) == [*range(0, 64, 2), *range(1, 64, 2)]


def test_sjf_takes_the_least_expected_work_and_counts_what_is_left():
    fresh, nearly_done, short = state(0, 5, 100), state(1, 5, 100, generated=95, active=True), state(2, 5, 8)
    assert numbers(queued([fresh, short, nearly_done], "sjf")) == [1, 2, 0]


def test_sjf_no_stream_of_short_requests_starves_a_long_one():
    """Short requests of 8 tokens arrive for ever, one at a time; the long one starts after 256 times its length."""
    long = state(0, 500, 500)
    clock, served = 0, 0
    for number in itertools.count(1):
        first = queued([long, state(number, 4, 4, clock=clock)], "sjf")[0]
        if first is long:
            break
        clock, served = clock + 8, served + 1
    assert 240 * 1000 / 8 < served < 257 * 1000 / 8


@pytest.mark.parametrize(("watermark", "num_free"), [(0, 2), (1, 3), (3, 5)])
def test_admission_needs_the_prompt_and_the_watermark_behind_what_was_promised(watermark, num_free):
    request = state(0, length=8)
    assert num_blocks_to_admit(request, [state(1, generated=3, active=True)], CONFIG, watermark, 256) == num_free
    half_done = state(1, length=20)
    half_done.samples[0].num_computed_tokens = 8
    assert num_blocks_to_admit(request, [half_done], CONFIG, watermark, 256) == num_free + 3


@pytest.mark.parametrize("watermark", [0, 1, 3, 4, 8])
def test_b38_first_request_needs_no_watermark(watermark):
    assert num_blocks_to_admit(state(0, length=8), [], CONFIG, watermark, 256) == 2


def test_preempted_request_comes_back_only_where_every_row_can_grow():
    request = state(0, length=6, generated=3)
    request.num_preemptions = 1
    running = [state(1, generated=3, active=True), state(2, n=2, generated=1, active=True)]
    assert num_blocks_to_admit(request, running, CONFIG, 0, 256) == 3 + 4
    assert num_blocks_to_admit(request, [], CONFIG, 0, 256) == 3


def test_samples_share_the_full_blocks_of_their_prompt():
    assert state(0, length=9, n=3).num_blocks_to_start(CONFIG, 256) == 3  # before they generate they share everything
    assert state(0, length=9, n=3, generated=2).num_blocks_to_start(CONFIG, 256) == 2 + 3
    assert state(0, length=9, n=3, max_tokens=8).request.num_blocks_needed(CONFIG, 256) == 2 + 3 * 2


@pytest.mark.parametrize("windows", [(None,), (8,), (None, 3)])
@pytest.mark.parametrize("length", [7, 8])
def test_forked_samples_that_were_preempted_never_take_more_than_was_promised(windows, length):
    """Each of two stores its own 12 tokens, one after the other: what leaves the window of one stays for the other."""
    groups = tuple((g,) for g in range(len(windows)))
    sizes = cache_config(40, num_layers=len(windows), layer_groups=groups, sliding_windows=windows, max_num_seqs=2)
    append, leave = (jax.jit(f, static_argnames="max_new_tokens") for f in (append_tokens, release_out_of_window))
    pool, table = init(sizes)
    pool, table, _ = append(pool, table, jnp.array([length, 0], jnp.int32), max_new_tokens=8)
    pool, table = leave(pool, table, jnp.zeros(2, jnp.int32), max_new_tokens=8)
    pool, table, _ = fork(pool, table, jnp.array([0, 0], jnp.int32))
    request = state(0, length=length, n=2, generated=12)
    request.is_forked, free, bounds = True, [], []
    for row, _ in itertools.product(range(2), range(12)):
        for sample, stored in zip(request.samples, table.seq_lens.tolist(), strict=True):
            sample.num_computed_tokens, sample.is_active = stored, stored == length + 12
        bounds.append(int(pool.num_free) - request.num_blocks_promised(sizes, 1))
        old = table.seq_lens
        pool, table, _ = append(pool, table, jnp.zeros(2, jnp.int32).at[row].set(1), max_new_tokens=1)
        free.append(int(pool.num_free))
        pool, table = leave(pool, table, old, max_new_tokens=1)
    assert all(min(free[moment:]) >= bound for moment, bound in enumerate(bounds))


def test_reserve_is_left_free_even_by_the_only_request():
    assert num_blocks_to_admit(state(0, length=8, reserve=5), [], CONFIG, 3, 256) == 7


def test_chunks_fill_the_budget_with_rows_that_generate_first_but_prompts_always_move():
    running = [state(n, generated=2, active=True) for n in range(6)] + [state(6, length=9), state(7, length=9)]
    for budget in range(1, 30):
        chunks = plan_chunks(running, budget)
        counts = [(c.request.request.number, c.count) for c in chunks]
        assert sum(n for _, n in counts) == min(budget, 6 + 18)
        assert dict(counts).get(6, 0) >= 1
        assert counts[: min(6, budget - 1)] == [(n, 1) for n in range(min(6, budget - 1))]
    assert plan_chunks(running[:6], 10) == []


def test_chunk_of_several_samples_ends_with_the_prompt_and_generates_only_if_nothing_was_generated_before():
    for generated in (0, 2):
        request = state(0, length=5, n=3, generated=generated)
        (chunk,) = plan_chunks([request], 99)
        assert (chunk.count, chunk.ends, chunk.generates, len(chunk.children)) == (5, True, generated == 0, 2)
        chunk.note_computed()
        assert [s.is_active for s in request.samples] == [generated == 0] * 3
        rest = plan_chunks([request], 99)
        assert [c.count for c in rest] == ([2] * 3 if generated else [])
        assert all(c.generates and not c.children for c in rest)


def test_victim_is_the_lowest_priority_then_the_latest():
    running = [state(0, priority=5), state(1, priority=5), state(2, priority=0)]
    assert choose_victim(running) is running[1]
    assert choose_victim(running[:1]) is None


def test_b34_victim_has_progressed_since_it_came_back_if_any_has():
    running = [state(0, active=True), state(1), state(2)]
    for back in running[1:]:
        back.num_preemptions = 1
    assert choose_victim(running) is running[0]
    running[1].has_progressed = True
    assert choose_victim(running) is running[1]
    running[1].has_progressed = running[0].has_progressed = False
    running[0].num_preemptions = 1
    assert choose_victim(running) is running[2]


@pytest.mark.parametrize(
    ("mode", "platform", "num_bytes", "swaps"),
    [
        ("swap", "gpu", 10**9, True),
        ("recompute", "gpu", 1, False),
        ("auto", "cpu", 10**6, True),  # 2e7 of 2.7e8 operations
        ("auto", "cpu", 10**8, False),
        ("auto", "gpu", 10**3, True),
        ("auto", "gpu", 10**5, False),
    ],
)
def test_auto_swaps_where_moving_takes_less_than_computing(mode, platform, num_bytes, swaps):
    assert choose_swap(mode, num_bytes, 1, 2 * 135e6, platform) == swaps


def test_tokens_of_a_sample_run_from_the_prompt_into_what_it_generated():
    request = state(0, length=3)
    request.samples[0].token_ids = [10, 11]
    whole = [0, 1, 2, 10, 11]
    for start in range(5):
        for count in range(1, 6 - start):
            assert list(request.tokens(request.samples[0], start, count)) == whole[start : start + count]


def test_finished_samples_need_nothing():
    request = state(0, length=6, n=3, generated=4, active=True)
    request.samples[0].finish = FinishReason.STOP
    assert request.num_blocks_to_start(CONFIG, 256) == 1 + 2 * 2
    assert request.num_tokens_to_recompute == 6 + 2 * 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "lifo"}, "policy"),
        ({"preemption_mode": "drop"}, "preemption_mode"),
        ({"watermark": 1.5}, "watermark"),
        ({"watermark": float("nan")}, "watermark"),
        ({"watermark": True}, "watermark"),
        ({"priority_reserve": -0.1}, "priority_reserve"),
        ({"num_host_blocks": -1}, "num_host_blocks"),
        ({"num_host_blocks": 2.0}, "num_host_blocks"),
    ],
)
def test_scheduler_options_out_of_range_are_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        SchedulerConfig(**options)
