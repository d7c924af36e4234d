"""prefill_step, decode_step, decode_many used directly: exhaustion, stops, donation, memory."""

import dataclasses
import re
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from doubles import (
    MIXED,
    TINY,
    VOCAB,
    audit,
    cache_config,
    dense_tokens,
    oracle_config,
    oracle_forward,
    oracle_tokens,
    prompt,
    tiny_params,
)

from paged_jax import (
    FinishReason,
    PrefillPlan,
    RowParams,
    Status,
    acquire_prefix,
    beam_search_many,
    decode_many,
    decode_step,
    init_beams,
    init_state,
    prefill_step,
    release_rows,
)
from paged_jax.config import CACHE_DTYPES
from paged_jax.decode import _decode_many
from paged_jax.sampling import init_sampling_state
from paged_jax.token_rules import init_rule_params

ROWS, STOPS, CHUNK = 8, 4, 32


def new_state(num_usable, block_size=4, *, caching=False, **sizes):
    config = cache_config(num_usable, block_size, max_num_seqs=ROWS, **sizes)
    return init_state(config, max_stop_token_ids=STOPS, enable_prefix_caching=caching)


def plan_of(prompts: dict[int, list[int]], max_tokens=99, stop=(), is_last=True, reserve=0) -> PrefillPlan:
    """One chunk with the whole prompt of each row."""
    counts = np.zeros(ROWS, np.int32)
    counts[list(prompts)] = [len(p) for p in prompts.values()]
    tokens = [token for row in sorted(prompts) for token in prompts[row]]
    stops = np.full((ROWS, STOPS), -1, np.int32)
    stops[:, : len(stop)] = stop
    return PrefillPlan(
        token_ids=jnp.asarray(tokens + [0] * (CHUNK - len(tokens)), jnp.int32),
        num_new_tokens=jnp.asarray(counts),
        is_last=jnp.asarray(counts > 0) & is_last,
        rows=RowParams(
            sampling=init_sampling_state(ROWS),
            num_remaining=jnp.full(ROWS, max_tokens, jnp.int32),
            stop_token_ids=jnp.asarray(stops),
            namespace=jnp.zeros(ROWS, jnp.int32),
            reserve=jnp.full(ROWS, reserve, jnp.int32),
            rules=init_rule_params(ROWS),
            num_logprobs=jnp.full(ROWS, -1, jnp.int32),
        ),
    )


def prefill(state, prompts, parents=None, **options):
    plan = plan_of(prompts, **options)
    if parents is not None:
        plan = dataclasses.replace(
            plan, parents=jnp.arange(ROWS).at[jnp.array(list(parents))].set(list(parents.values()))
        )
    state, output = prefill_step(TINY, tiny_params(), state, plan)
    audit(state)
    return state, output


def decode(state, num_steps=8, **options):
    state, output = decode_many(TINY, tiny_params(), state, num_steps=num_steps, **options)
    audit(state)
    return state, output


def generated(output, row):
    return np.asarray(output.token_ids)[row, : int(output.num_tokens[row])].tolist()


def test_decode_many_after_prefill_equals_dense():
    prompts = {0: prompt(5), 3: prompt(9), 6: prompt(4)}
    state, first = prefill(new_state(20), prompts)
    state, rest = decode(state)
    for row, p in prompts.items():
        assert generated(first, row) + generated(rest, row) == dense_tokens(p, 9)
    assert (int(rest.num_steps), int(rest.status)) == (8, Status.OK)


def test_decode_step_eight_times_equals_decode_many_of_eight():
    state, _ = prefill(new_state(20), {1: prompt(5), 2: prompt(8)})
    tokens = []
    for _ in range(8):
        state, output = decode_step(TINY, tiny_params(), state)
        tokens.append(output.token_ids[:, 0])
    other, together = decode(prefill(new_state(20), {1: prompt(5), 2: prompt(8)})[0])
    chex.assert_trees_all_equal(jnp.stack(tokens, axis=1), together.token_ids)
    chex.assert_trees_all_equal(state.table, other.table)


@pytest.mark.parametrize("num_rows", [2, 3, 4, 8])
def test_decode_many_number_of_computed_rows_does_not_matter(num_rows):
    state, _ = prefill(new_state(20), {1: prompt(5), 6: prompt(9)})
    _, output = decode(state, num_rows=num_rows)
    assert generated(output, 1) == dense_tokens(prompt(5), 9)[1:]
    assert generated(output, 6) == dense_tokens(prompt(9), 9)[1:]


def test_decode_many_pool_runs_out_keeps_every_token_and_goes_on_when_there_is_room():
    state, first = prefill(new_state(4), {0: prompt(6), 1: prompt(5)})
    state, output = decode(state, num_steps=8)
    assert (int(output.status), int(output.num_steps)) == (Status.OUT_OF_BLOCKS, 2)  # row 0 is full at 8 tokens
    before = jax.tree.map(np.asarray, state)
    state, refused = decode(state, num_steps=8)
    assert (int(refused.status), int(refused.num_steps), int(refused.num_tokens.sum())) == (Status.OUT_OF_BLOCKS, 0, 0)
    chex.assert_trees_all_equal(before, jax.tree.map(np.asarray, state))

    tokens = generated(first, 0) + generated(output, 0)
    state, status = release_rows(state, jnp.arange(ROWS) == 1)
    assert int(status) == Status.OK
    state, rest = decode(state, num_steps=8)
    assert tokens + generated(rest, 0) == dense_tokens(prompt(6), len(tokens) + 8)


def test_prefill_step_without_room_changes_nothing():
    state, _ = prefill(new_state(4), {0: prompt(9)})
    before = jax.tree.map(np.asarray, state)
    state, output = prefill(state, {1: prompt(3), 2: prompt(3)})
    assert int(output.status) == Status.OUT_OF_BLOCKS
    chex.assert_trees_all_equal(before, jax.tree.map(np.asarray, state))


def test_prefill_step_with_more_tokens_than_the_chunk_changes_nothing():
    plan = plan_of({0: prompt(10), 1: prompt(10)})
    plan = dataclasses.replace(plan, num_new_tokens=jnp.asarray([20, 20] + [0] * 6, jnp.int32))
    state = new_state(20)
    before = jax.tree.map(np.asarray, state)
    state, output = prefill_step(TINY, tiny_params(), state, plan)
    assert int(output.status) == Status.BAD_LENGTH
    chex.assert_trees_all_equal(before, jax.tree.map(np.asarray, state))


def test_prefill_step_on_an_active_row_changes_nothing():
    state, _ = prefill(new_state(20), {0: prompt(5)})
    before = jax.tree.map(np.asarray, state)
    state, output = prefill(state, {0: [7, 8], 1: prompt(3)})
    assert int(output.status) == Status.ROW_IN_USE
    chex.assert_trees_all_equal(before, jax.tree.map(np.asarray, state))


@pytest.mark.parametrize(
    ("parents", "is_last", "status"),
    [
        ({2: 1}, True, Status.OK),
        ({0: 1}, True, Status.ROW_IN_USE),  # row 0 holds a prompt
        ({1: 1, 3: 1, 4: 2}, True, Status.ROW_EMPTY),
        ({2: -1}, True, Status.ROW_EMPTY),
        ({2: ROWS}, True, Status.ROW_EMPTY),
        ({2: 1}, False, Status.OK),  # the prompt goes on, in both rows
        ({2: 3}, True, Status.ROW_EMPTY),
    ],
)
def test_prefill_step_fork_of_what_cannot_be_forked_changes_nothing(parents, is_last, status):
    state, _ = prefill(new_state(20), {0: prompt(5)}, parents={0: 0})
    before = jax.tree.map(np.asarray, state)
    state, output = prefill(state, {1: prompt(6)}, parents=parents, is_last=is_last)
    assert int(output.status) == status
    if status == Status.OK:
        assert generated(output, 1) == generated(output, 2) == dense_tokens(prompt(6), 1)[: int(is_last)]
        assert state.is_active.tolist() == [True, is_last, is_last] + [False] * 5
        assert state.table.seq_lens.tolist() == [5, 6, 6, 0, 0, 0, 0, 0]
    else:
        chex.assert_trees_all_equal(before, jax.tree.map(np.asarray, state))


def test_acquire_prefix_gives_a_row_its_cached_blocks_and_refuses_a_row_in_use():
    state, _ = prefill(new_state(20, caching=True), {0: prompt(13)})
    padded = jnp.asarray(prompt(13) + [0] * 19, jnp.int32)
    state, num_cached, status = acquire_prefix(state, jnp.int32(2), padded, jnp.int32(13), jnp.int32(0))
    audit(state)
    assert (int(num_cached), int(status), int(state.table.seq_lens[2])) == (12, Status.OK, 12)
    before = jax.tree.map(np.asarray, state)
    state, num_cached, status = acquire_prefix(state, jnp.int32(2), padded, jnp.int32(13), jnp.int32(0))
    assert (int(num_cached), int(status)) == (0, Status.ROW_IN_USE)
    chex.assert_trees_all_equal(before, jax.tree.map(np.asarray, state))
    state, output = prefill(state, {2: prompt(13)[12:]})
    assert generated(output, 2) == dense_tokens(prompt(13), 1)
    with pytest.raises(ValueError, match="enable_prefix_caching"):
        acquire_prefix(new_state(20), jnp.int32(2), padded, jnp.int32(13), jnp.int32(0))


@pytest.mark.parametrize("field", ["num_new_tokens", "is_last", "rows", "parents"])
def test_prefill_step_plan_of_other_rows_is_refused_by_name(field):
    plan = dataclasses.replace(plan_of({0: prompt(5)}), parents=jnp.arange(ROWS))
    short = jax.tree.map(lambda x: x[:1], getattr(plan, field))
    with pytest.raises(ValueError, match=field):
        prefill_step(TINY, tiny_params(), new_state(20), dataclasses.replace(plan, **{field: short}))


@pytest.mark.full_cache
def test_steps_leave_the_reserve_of_their_rows_free():
    _, output = prefill(new_state(4), {0: prompt(9)}, reserve=2)
    assert (int(output.status), int(output.num_free)) == (Status.OUT_OF_BLOCKS, 4)
    state, _ = prefill(new_state(4), {0: prompt(7)}, reserve=2)
    state, output = decode(state, num_steps=8)  # one more token fits, the next needs a block of the reserve
    assert (int(output.status), int(output.num_steps), int(output.num_free)) == (Status.OUT_OF_BLOCKS, 1, 2)
    state = dataclasses.replace(state, rows=dataclasses.replace(state.rows, reserve=jnp.zeros(ROWS, jnp.int32)))
    _, output = decode(state, num_steps=8)
    assert (int(output.status), int(output.num_steps), int(output.min_free)) == (Status.OK, 8, 0)


def test_prefill_step_with_rows_that_generate_equals_steps_of_their_own():
    state, first = prefill(new_state(40), {1: prompt(6), 4: prompt(3)})
    state, mixed = prefill(state, {1: [0], 2: prompt(9), 4: [0]})
    state, rest = decode(state, num_steps=4)
    for row, length in ((1, 6), (4, 3)):
        tokens = generated(first, row) + generated(mixed, row) + generated(rest, row)
        assert tokens == dense_tokens(prompt(length), 6)
    assert generated(mixed, 2) + generated(rest, 2) == dense_tokens(prompt(9), 5)


def test_decode_many_until_finish_stops_after_the_step_in_which_a_row_ends():
    state, _ = prefill(new_state(40), {0: prompt(6), 1: prompt(3)})
    state = dataclasses.replace(
        state, rows=dataclasses.replace(state.rows, num_remaining=state.rows.num_remaining.at[1].set(3))
    )
    state, output = decode(state, num_steps=8, until_finish=True)
    assert (int(output.num_steps), output.finish.tolist()[:2]) == (3, [FinishReason.NONE, FinishReason.LENGTH])
    _, rest = decode(state, num_steps=8, until_finish=True)
    assert generated(output, 0) + generated(rest, 0) == dense_tokens(prompt(6), 12)[1:]


def test_stop_token_ends_the_row_and_frees_its_blocks_inside_the_loop():
    expected = dense_tokens(prompt(5), 8)
    stop = expected[4]
    end = expected.index(stop) + 1
    state, first = prefill(new_state(20), {0: prompt(5), 1: prompt(9)}, stop=(96, stop))
    state, output = decode(state, num_steps=8)
    assert generated(first, 0) + generated(output, 0) == expected[:end]
    assert int(output.finish[0]) == FinishReason.STOP
    assert not state.is_active[0]
    assert int(state.table.seq_lens[0]) == 0


def test_one_rows_end_does_not_stop_the_others():
    state = prefill(new_state(20), {0: prompt(5)}, max_tokens=3)[0]
    state = prefill(state, {1: prompt(9)}, max_tokens=99)[0]
    state, output = decode(state, num_steps=8)
    assert (int(output.finish[0]), int(output.num_tokens[0]), int(output.num_tokens[1])) == (FinishReason.LENGTH, 2, 8)


@pytest.mark.full_cache
def test_loop_stops_computing_when_every_row_is_done():
    state, _ = prefill(new_state(20), {0: prompt(5)}, max_tokens=3)
    state, output = decode(state, num_steps=8)
    assert int(output.num_steps) == 2
    assert int(state.pool.num_free) == 20


def test_row_that_fills_its_table_ends_with_length_and_stops_nobody():
    state, _ = prefill(new_state(20, max_blocks_per_seq=3), {0: prompt(10), 1: prompt(2)})
    state, output = decode(state, num_steps=8)
    assert (int(output.finish[0]), int(output.num_tokens[0])) == (FinishReason.LENGTH, 2)
    assert (int(output.status), int(output.num_tokens[1])) == (Status.OK, 8)


def test_logits_that_are_not_finite_end_the_row_alone():
    def broken(params, batch, cache):
        logits, cache = TINY(params, batch, cache)
        bad = batch.seq_lens == 7  # row 0 in its second decode step
        return jnp.where(bad[:, None], jnp.nan, logits), cache

    state, _ = prefill(new_state(20), {0: prompt(5), 1: prompt(9)})
    state, output = decode_many(broken, tiny_params(), state, num_steps=4)
    audit(state)
    assert (int(output.finish[0]), int(output.num_tokens[0])) == (FinishReason.ERROR, 1)
    assert generated(output, 1) == dense_tokens(prompt(9), 5)[1:]


def test_b17_abort_of_a_row_that_finished_in_the_same_step_is_refused_bit_equal():
    state, _ = prefill(new_state(20), {0: prompt(5), 1: prompt(3)}, max_tokens=1)
    before = jax.tree.map(np.asarray, state)
    state, status = release_rows(state, jnp.arange(ROWS) == 0)
    assert int(status) == Status.ROW_EMPTY
    chex.assert_trees_all_equal(before, jax.tree.map(np.asarray, state))


@pytest.mark.parametrize("num_real", range(1, 8))
@pytest.mark.full_cache
def test_b25_vacated_and_padding_rows_write_no_live_slot(num_real):
    """Rows come and go in a batch of 8; every slot that no row was to write keeps its bits."""
    state = new_state(24, max_blocks_per_seq=4)
    state, _ = prefill(state, {r: prompt(3, r + 1) for r in range(8)})
    gone = np.random.default_rng(num_real).permutation(8)[num_real:]
    mask = np.zeros(ROWS, bool)
    mask[gone] = True
    state, _ = release_rows(state, mask)
    marked = tuple(k.at[24, 3].set(7.0) for k in state.cache.k)  # the last slot of the pool
    state = dataclasses.replace(state, cache=dataclasses.replace(state.cache, k=marked))
    before = [np.asarray(k) for k in state.cache.k]
    tables, lens = np.asarray(state.table.block_ids)[0], np.asarray(state.table.seq_lens)
    state, output = decode(state, num_steps=1, num_rows=8)
    targets = {(int(tables[r, lens[r] // 4]) or None, int(lens[r] % 4)) for r in range(8) if lens[r]}
    assert len(targets) == num_real
    for old, new in zip(before, state.cache.k, strict=True):
        changed = {(int(b), int(o)) for b, o in np.argwhere((old != np.asarray(new)).any(axis=(2, 3))) if b}
        assert changed <= targets
    assert all(generated(output, r) == dense_tokens(prompt(3, r + 1), 2)[1:] for r in range(8) if lens[r])


def test_b52_rows_filled_in_any_order_equal_dense():
    state = new_state(20)
    for row, length in ((3, 1), (0, 4), (2, 5), (1, 9)):
        state, _ = prefill(state, {row: prompt(length)})
    _, output = decode(state)
    for row, length in ((3, 1), (0, 4), (2, 5), (1, 9)):
        assert generated(output, row) == dense_tokens(prompt(length), 9)[1:]


def test_fork_then_decode_copies_the_shared_block_before_it_is_written():
    """Copy-on-write inside the step: both rows go on from one prompt, and neither sees the other's tokens."""
    from paged_jax.block_table import fork

    state = init_state(oracle_config(20, max_num_seqs=ROWS), max_stop_token_ids=STOPS)
    state, _ = prefill_step(oracle_forward, {}, state, plan_of({0: prompt(6)}), vocab_size=VOCAB)
    pool, table, status = fork(state.pool, state.table, jnp.array([0, 0, *range(2, ROWS)], jnp.int32))
    assert int(status) == Status.OK
    state = dataclasses.replace(
        state,
        pool=pool,
        table=table,
        is_active=state.is_active.at[1].set(True),
        last_token=state.last_token.at[1].set(50),  # the child goes another way
        rows=dataclasses.replace(state.rows, num_remaining=state.rows.num_remaining.at[1].set(99)),
    )
    state, output = decode_many(oracle_forward, {}, state, num_steps=5, vocab_size=VOCAB)
    audit(state)
    assert generated(output, 0) == oracle_tokens(prompt(6), 6)[1:]
    assert generated(output, 1) == oracle_tokens([*prompt(6), 50], 5)


# -- donation and memory ---------------------------------------------------------------------------------------------


def test_b101_old_state_after_a_step_is_a_clear_error():
    state, _ = prefill(new_state(20), {0: prompt(5)})
    decode(state)
    with pytest.raises((RuntimeError, ValueError), match=r"deleted|donated"):
        decode(state)


def test_b101_without_donation_gives_the_same_bits_and_keeps_the_old_state():
    kept = jax.jit(_decode_many, static_argnames=("forward", "num_steps"))
    state, _ = prefill(new_state(20), {0: prompt(5), 1: prompt(8)})
    first = kept(TINY, tiny_params(), state, num_steps=8)
    chex.assert_trees_all_equal(first, kept(TINY, tiny_params(), state, num_steps=8))
    chex.assert_trees_all_equal(first, decode(state))


def test_b101_failed_trace_leaves_the_state_usable():
    def fails(params, batch, cache):
        raise RuntimeError("no")

    state, _ = prefill(new_state(20), {0: prompt(5)})
    with pytest.raises(RuntimeError, match="no"):
        decode_many(fails, tiny_params(), state, num_steps=8)
    assert generated(decode(state)[1], 0) == dense_tokens(prompt(5), 9)[1:]


def test_b101_two_layers_sharing_kv_arrays_work():
    """A layer without K/V of its own attends over another layer's: no array is donated twice."""
    from paged_jax import attend

    def forward(params, batch, cache):
        x = jax.nn.one_hot(batch.token_ids, 8)[:, None]
        out, layer = attend(cache.layer(0), x, x, x, batch)
        again, layer = attend(layer, x, None, None, batch)
        logits = (out + again)[:, 0][batch.logits_indices]
        return logits, cache.with_layer(0, layer)

    sizes = {"num_layers": 1, "num_kv_heads": 1, "layer_groups": (), "sliding_windows": ()}
    config = cache_config(8, max_num_seqs=ROWS, **sizes)
    state = init_state(config, max_stop_token_ids=STOPS)
    state, first = prefill_step(forward, {}, state, plan_of({0: [1, 2, 3]}))
    _, output = decode_many(forward, {}, state, num_steps=2)
    assert (int(first.num_tokens[0]), int(output.num_tokens[0])) == (1, 2)


def program(kind, num_usable=256, max_blocks_per_seq=64, forward=TINY, **sizes):
    state = new_state(num_usable, 16, max_blocks_per_seq=max_blocks_per_seq, caching=True, forward=forward, **sizes)
    if kind == "decode_many":
        lowered = decode_many.lower(forward, tiny_params(), state, num_steps=4)
    elif kind == "beam_search_many":
        tokens = jnp.ones(2, jnp.int32)
        beams = init_beams(tokens, tokens, beam_width=4, eos_token_ids=tokens)
        lowered = beam_search_many.lower(forward, tiny_params(), state, beams, num_steps=4)
    else:
        lowered = prefill_step.lower(forward, tiny_params(), state, plan_of({0: [1]}))
    return state, lowered.compile()


#: Every kind of step; then groups that share arrays, storage formats, and blocks of the arrays smaller than the block
#: manager's.
PROGRAMS = [
    *(pytest.param(kind, {}, id=kind) for kind in ("decode_many", "prefill_step", "beam_search_many")),
    *(
        pytest.param(kind, {"forward": MIXED}, id=f"{kind}_two_groups")
        for kind in ("decode_many", "prefill_step", "beam_search_many")
    ),
    pytest.param("decode_many", {"forward": MIXED, "dtype": "int8"}, id="decode_many_two_groups_int8"),
    *(pytest.param("decode_many", {"dtype": dtype}, id=dtype) for dtype in CACHE_DTYPES[1:]),
    pytest.param("prefill_step", {"dtype": "int8"}, id="prefill_step_int8"),
    pytest.param("decode_many", {"dtype": "int8", "kernel_block_size": 4}, id="int8_kernel_block_size_4"),
    pytest.param("decode_many", {"kernel_block_size": 4}, id="kernel_block_size_4"),
]


@pytest.mark.parametrize(("kind", "sizes"), PROGRAMS)
def test_compiled_step_updates_the_cache_in_place_and_copies_no_pool_shaped_array(kind, sizes):
    state, compiled = program(kind, **sizes)
    memory = compiled.memory_analysis()
    cache_bytes = sum(x.nbytes for x in jax.tree.leaves(state.cache))
    state_bytes = sum(x.nbytes for x in jax.tree.leaves(state))
    assert memory.alias_size_in_bytes >= cache_bytes
    assert memory.alias_size_in_bytes <= state_bytes
    layer_bytes = sum(x[0].nbytes for x in (state.cache.k, state.cache.v))
    if sizes.get("dtype", "float32") == "float32":  # the attention of TINY's rows needs as much as a layer of 8 bits
        assert memory.temp_size_in_bytes < layer_bytes
    text = compiled.as_text()
    for array in {x.shape: x for x in state.cache.arrays}.values():
        shape = f"{HLO_NAMES[array.dtype.name]}[{','.join(map(str, array.shape))}]"
        assert shape in text
        assert copies(text, shape) == []
    converted = f"f32[{','.join(map(str, state.cache.k[0].shape))}]"
    assert (converted in text) == (state.cache.k[0].dtype == jnp.float32)


HLO_NAMES = {"float32": "f32", "float16": "f16", "uint16": "u16", "int8": "s8", "uint8": "u8"}


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="XLA of older versions copies counts when rows are released")
@pytest.mark.parametrize("forward", [TINY, MIXED], ids=["one_group", "two_groups"])
def test_compiled_decode_many_copies_nothing_of_the_block_manager_that_is_as_large_as_the_pool(forward):
    state, compiled = program("decode_many", forward=forward)
    text = compiled.as_text()
    for array in jax.tree.leaves((state.pool, state.prefix_cache)):
        if array.size >= state.pool.num_blocks:
            shape = f"{'u' if array.dtype == jnp.uint32 else 's'}32[{','.join(map(str, array.shape))}]"
            assert shape in text
            assert copies(text, shape) == []


def copies(text, shape):
    return [line for line in text.splitlines() if re.search(r" copy(-start)?\(", line) and shape in line]


@pytest.mark.parametrize("kind", ["decode_many", "beam_search_many"])
def test_compiled_step_asks_the_host_nothing(kind):
    text = program(kind)[1].as_text()
    assert "callback" not in text
    assert "outfeed" not in text


def test_decode_many_is_traced_once_for_all_lengths_and_parameters():
    traced = chex.assert_max_traces(lambda p, s: _decode_many(TINY, p, s, num_steps=2), n=1)
    step = jax.jit(traced)
    state, _ = prefill(new_state(20), {0: prompt(5)})
    for temperature in (0.0, 0.7, 1.3):
        sampling = dataclasses.replace(state.rows.sampling, temperature=jnp.full(ROWS, temperature, jnp.float32))
        state = dataclasses.replace(state, rows=dataclasses.replace(state.rows, sampling=sampling))
        state, _ = step(tiny_params(), state)


def test_decode_many_bad_static_arguments_raise():
    for options in ({"num_steps": 0}, {"num_steps": 1, "num_rows": 0}, {"num_steps": 1, "num_rows": ROWS + 1}):
        with pytest.raises(ValueError, match="num_"):
            partial(decode_many, TINY, tiny_params(), new_state(4))(**options)
