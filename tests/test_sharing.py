"""The prefix cache and parallel samples through the whole engine: their trials, and equality with no sharing."""

import dataclasses
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from doubles import (
    TINY,
    dense_tokens,
    ids,
    oracle_llm,
    oracle_tokens,
    prompt,
    tiny_llm,
    tiny_params,
    tokens_of,
)

from paged_jax import SamplingParams
from paged_jax.inputs import MAX_CACHE_SALT, Namespaces, sample_seed

GREEDY = SamplingParams(temperature=0, max_tokens=3)


def generate(llm, prompts, params=GREEDY, **extra):
    return llm.generate([p | extra for p in ids(prompts)], params, use_tqdm=False)


def cached(outputs):
    return [o.num_cached_tokens for o in outputs]


@pytest.fixture(scope="module")
def shared_llm():
    """Blocks of 4 tokens; its programs are those of the shared engines of other files."""
    return tiny_llm(40)


@pytest.fixture
def llm(shared_llm):
    shared_llm.poison_value, shared_llm.watch = np.nan, None
    shared_llm.reset_prefix_cache()
    shared_llm.num_steps = 0
    yield shared_llm
    assert shared_llm.is_whole
    assert not shared_llm.has_unfinished_requests()


def difference(llm, before):
    return {name: count - before[name] for name, count in llm.block_counters.items() if count != before[name]}


# -- the prefix cache ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", range(1, 18))
def test_b01_prompt_of_every_length_twice_equals_dense_and_leaves_a_token_to_compute(llm, length):
    first, again = (generate(llm, [prompt(length)])[0] for _ in range(2))
    assert first.outputs[0].token_ids == again.outputs[0].token_ids == dense_tokens(prompt(length), 3)
    assert cached([first, again]) == [0, (length - 1) // 4 * 4]


def test_prompts_cached_or_not_alone_or_in_a_batch_give_the_same_tokens(llm):
    prompts = [prompt(n) for n in (5, 16, 17, 9)] + [[*prompt(17)[:12], 3, 1, 4], prompt(16)[:8]]
    expected = [dense_tokens(p, 3) for p in prompts]
    assert tokens_of(generate(llm, prompts)) == expected
    again = generate(llm, prompts)
    assert tokens_of(again) == expected
    assert cached(again) == [4, 12, 16, 8, 12, 4]
    assert [tokens_of(generate(llm, [p]))[0] for p in prompts] == expected
    off = tiny_llm(40, enable_prefix_caching=False)
    for _ in range(2):
        outputs = generate(off, prompts)
        assert (tokens_of(outputs), cached(outputs)) == (expected, [0] * 6)


def test_b01_prompt_is_hit_while_its_first_request_still_decodes(llm):
    text, shared = prompt(8), []
    llm.add_request("first", {"prompt_token_ids": text}, dataclasses.replace(GREEDY, max_tokens=14))
    llm.step()
    llm.step()
    held = np.asarray(llm._runner._state.table.block_ids)[0, 0, :2]
    before = [np.asarray(k)[held] for k in llm._runner._state.cache.k]
    llm.watch = lambda state: shared.append(int(state.pool.ref_count[held[0]]))
    llm.add_request("again", {"prompt_token_ids": text}, GREEDY)
    done = {}
    while llm.has_unfinished_requests():
        done |= {o.request_id: o for o in llm.step()}
    assert done["again"].num_cached_tokens == 4
    assert max(shared) == 2
    assert done["first"].outputs[0].token_ids == dense_tokens(text, 14)
    assert done["again"].outputs[0].token_ids == dense_tokens(text, 3)
    for old, new in zip(before, llm._runner._state.cache.k, strict=True):
        np.testing.assert_array_equal(old, np.asarray(new)[held])  # cached still, and bit for bit the same


def test_generated_text_is_cached_too(llm):
    (first,) = generate(llm, [prompt(6)], dataclasses.replace(GREEDY, max_tokens=8))
    text = prompt(6) + first.outputs[0].token_ids
    (longer,) = generate(llm, [[*text, 5]])
    assert longer.num_cached_tokens == 12  # 13 tokens were stored: the last one of the output never is
    assert longer.outputs[0].token_ids == dense_tokens([*text, 5], 3)


def test_b02_only_blocks_of_earlier_steps_are_hit():
    llm = tiny_llm(40, max_num_batched_tokens=6)
    llm.poison_value = np.nan
    text, hits = prompt(12), []
    look_up = llm._runner.acquire_prefix
    llm._runner.acquire_prefix = lambda *a: hits.append((llm.num_steps, look_up(*a))) or hits[-1][1]
    outputs = generate(llm, [text, text])
    # A stores 6 tokens in steps 1 and 2; B asks in step 3, the first that has room for it.
    assert hits == [(1, 0), (3, 8)]
    assert tokens_of(outputs) == [dense_tokens(text, 3)] * 2


def test_b02_equal_prompts_of_one_step_do_not_hit_each_other(llm):
    outputs = generate(llm, [prompt(12), prompt(12)])
    assert cached(outputs) == [0, 0]
    assert tokens_of(outputs) == [dense_tokens(prompt(12), 3)] * 2


def test_b06_weak_digest_serves_no_other_prompt(monkeypatch):
    from paged_jax import prefix_cache

    strong = prefix_cache.chain_digests
    monkeypatch.setattr(prefix_cache, "chain_digests", lambda *a: strong(*a) & jnp.uint32(1))
    llm = tiny_llm(23)  # a size of its own: traces of this digest must not be found by other tests
    prompts = [prompt(12, 1 + i % 3) for i in range(3)] + [
        [1 + i % 2, *np.random.default_rng(i).integers(1, 3, 11).tolist()] for i in range(17)
    ]
    for _ in range(2):
        assert tokens_of(generate(llm, prompts)) == [dense_tokens(p, 3) for p in prompts]
    assert llm.block_counters["hits"] > 0


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)])
def test_b10_rows_with_and_without_hits_in_one_step(llm, order):
    texts = [prompt(12, first) for first in (1, 2, 3)]
    generate(llm, [texts[0], texts[2][:6]])
    outputs = generate(llm, [texts[i] for i in order])
    assert cached(outputs) == [(8, 0, 4)[i] for i in order]
    assert tokens_of(outputs) == [dense_tokens(texts[i], 3) for i in order]


def test_b11_request_that_skips_reading_computes_everything_and_is_cached(llm):
    skips = dataclasses.replace(GREEDY, skip_reading_prefix_cache=True)
    outputs = [generate(llm, [prompt(12)], params)[0] for params in (skips, skips, GREEDY)]
    assert cached(outputs) == [0, 0, 8]
    assert tokens_of(outputs) == [dense_tokens(prompt(12), 3)] * 3


def test_b14_requests_of_another_salt_hit_nothing(llm):
    text = prompt(36)
    salts = [{"cache_salt": "x"}, {"cache_salt": "x"}, {"cache_salt": "y"}, {}, {"cache_salt": "x"}, {}]
    outputs = [generate(llm, [text], dataclasses.replace(GREEDY, max_tokens=1), **salt)[0] for salt in salts]
    assert cached(outputs) == [0, 32, 0, 0, 32, 32]
    assert len({tuple(t) for t in tokens_of(outputs)}) == 1


@pytest.mark.parametrize("salt", ["", "s" * (MAX_CACHE_SALT + 1), 5, b"x", ["x"]])
def test_b14_salt_that_cannot_be_fails_alone(llm, salt):
    prompts = ids([prompt(3), prompt(5)])
    failed, fine = llm.generate([prompts[0] | {"cache_salt": salt}, prompts[1]], GREEDY, use_tqdm=False)
    assert isinstance(failed.error, TypeError if not isinstance(salt, str) else ValueError)
    assert "cache_salt" in str(failed.error)
    assert fine.outputs[0].token_ids == dense_tokens(prompt(5), 3)


def test_namespaces_never_return_and_the_oldest_is_forgotten_first(monkeypatch):
    monkeypatch.setattr("paged_jax.inputs.MAX_NAMESPACES", 2)
    namespaces = Namespaces()
    assert [namespaces.number_of(s) for s in (None, "a", None, "b", None, "a")] == [0, 1, 0, 2, 0, 3]
    namespaces.forget()
    assert namespaces.number_of(None) == 4


def test_b16_nothing_of_ended_requests_stays_alive(llm):
    alive, arrays = [], {}
    gc.disable()
    try:
        for count in range(500):
            llm.add_request(
                str(count), {"prompt_token_ids": prompt(1 + count % 9)}, dataclasses.replace(GREEDY, max_tokens=1)
            )
            alive.append(weakref.ref(llm.core.waiting[-1]))
            if count % 8 == 7 or count == 499:
                while llm.has_unfinished_requests():
                    llm.step()
            if count in (103, 499):
                arrays[count] = len(jax.live_arrays())
                assert sum(r() is not None for r in alive) <= 8
    finally:
        gc.enable()
    assert arrays[103] == arrays[499]


def test_eviction_changes_no_tokens_and_is_counted(llm):
    llm.poison_value, before = None, llm.block_counters
    prompts = [prompt(14, 1 + n) for n in range(30)]  # 30 times 3 full blocks in a pool of 40
    outputs = generate(llm, [*prompts, prompts[0], prompts[29]])
    assert tokens_of(outputs) == [dense_tokens(p, 3) for p in [*prompts, prompts[0], prompts[29]]]
    assert cached(outputs)[30:] == [0, 12]  # the first was evicted long ago, the last was not
    counts = difference(llm, before)
    assert counts["evictions"] >= 50
    assert (counts["queries"], counts["hits"]) == (14 * 32, 12)


def test_reset_forgets_and_running_requests_compute_again_what_they_need(llm):
    generate(llm, [prompt(12)])
    llm.add_request("a", {"prompt_token_ids": prompt(9)}, GREEDY)
    llm.step()
    llm.reset_prefix_cache()
    while llm.has_unfinished_requests():
        (output,) = llm.step()
    assert tokens_of([output]) == [dense_tokens(prompt(9), 3)]
    llm.reset_prefix_cache()
    outputs = [generate(llm, [prompt(12)])[0] for _ in range(2)]
    assert cached(outputs) == [0, 8]
    assert tokens_of(outputs) == [dense_tokens(prompt(12), 3)] * 2


def test_other_weights_never_meet_old_keys_and_values(llm):
    generate(llm, [prompt(12)])
    other = jax.tree.map(lambda x: 1.5 * x, tiny_params())
    llm.update_params(other)
    try:
        outputs = [generate(llm, [prompt(12)])[0] for _ in range(2)]
        assert cached(outputs) == [0, 8]
        fresh = tiny_llm(40, enable_prefix_caching=False)
        fresh.update_params(other)
        assert tokens_of(outputs) == tokens_of(generate(fresh, [prompt(12)])) * 2
    finally:
        llm.update_params(tiny_params())
    assert cached(generate(llm, [prompt(12)])) == [0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p | {"embedding": p["embedding"][:-1]}, r"\['embedding'\] must be float32\[97,32\]"),
        (lambda p: {k: v for k, v in p.items() if k != "norm"}, "structure"),
    ],
)
def test_other_weights_of_another_kind_are_refused(llm, change, message):
    with pytest.raises(ValueError, match=message):
        llm.update_params(change(dict(tiny_params())))


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_other_weights_between_steps_continue_the_tokens_so_far_as_if_they_were_the_prompt(llm, mode):
    """One request decodes, one is on the host or waits, when the weights change."""
    other = jax.tree.map(lambda x: 1.5 * x, tiny_params())
    for name, length in (("a", 9), ("b", 6)):
        llm.add_request(name, {"prompt_token_ids": prompt(length)}, dataclasses.replace(GREEDY, max_tokens=12))
    so_far = {o.request_id: o.outputs[0].token_ids for o in llm.step()}
    llm.core.preempt(llm.core.running[1], mode)
    try:
        llm.update_params(other)
        done = {}
        while llm.has_unfinished_requests():
            done |= {o.request_id: o.outputs[0].token_ids for o in llm.step()}
        fresh = tiny_llm(40, enable_prefix_caching=False)
        fresh.update_params(other)
        for name, length in (("a", 9), ("b", 6)):
            begun = so_far[name]
            rest = dataclasses.replace(GREEDY, max_tokens=12 - len(begun))
            assert done[name] == begun + tokens_of(generate(fresh, [prompt(length) + begun], rest))[0]
    finally:
        llm.update_params(tiny_params())
    assert cached(generate(llm, [prompt(9)])) == [0]


def test_long_shared_prefix_is_computed_once():
    llm = oracle_llm(140, 16, max_num_seqs=2, max_blocks_per_seq=64, max_num_batched_tokens=256)
    system = prompt(1000)
    texts = [system + prompt(10, first) for first in (2, 3)]
    computed, prefill = [], llm._runner.prefill
    llm._runner.prefill = lambda chunks: computed.append(sum(len(c[1]) for c in chunks)) or prefill(chunks)
    outputs, totals = [], []
    for text in texts:
        outputs += generate(llm, [text])
        totals.append(sum(computed))
    assert totals == [1010, 1010 + 18]  # 62 blocks of the 1000 tokens are full
    assert cached(outputs) == [0, 992]
    assert tokens_of(outputs) == [oracle_tokens(t, 3) for t in texts]


# -- parallel samples ------------------------------------------------------------------------------------------------

RANDOM = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=6)


def samples_of(output):
    return [o.token_ids for o in output.outputs]


def one_by_one(llm, text, params, **changes):
    """The samples as requests of their own, with the seeds of the samples."""
    seeds = [sample_seed(params.seed, i) for i in range(params.n)]
    params = dataclasses.replace(params, n=1, skip_reading_prefix_cache=True, **changes)
    return [generate(llm, [text], dataclasses.replace(params, seed=s))[0].outputs[0].token_ids for s in seeds]


@pytest.mark.parametrize(("length", "blocks", "num_copies"), [(6, 4, 2), (8, 5, 0), (3, 3, 2)])
@pytest.mark.full_cache
def test_b47_samples_share_full_blocks_and_copy_the_partial_one(llm, length, blocks, num_copies):
    before, steps = llm.block_counters, []
    llm.watch = lambda state: steps.append(
        (state.pool.num_blocks - 1 - int(state.pool.num_free), int(state.table.seq_lens[0]))
    )
    llm.add_request("a", {"prompt_token_ids": prompt(length)}, dataclasses.replace(RANDOM, max_tokens=2))
    outputs = []
    while llm.has_unfinished_requests():
        outputs += [o for o in llm.step() if o.finished]
    assert len(steps) == 2
    assert steps[0] == (-(-length // 4), length)  # the prompt, once
    assert llm.peak_blocks >= blocks
    assert difference(llm, before).get("copies", 0) == num_copies
    llm.watch = None
    (longer,) = generate(llm, [prompt(length)], dataclasses.replace(RANDOM, skip_reading_prefix_cache=True))
    assert [o.index for o in longer.outputs] == [0, 1, 2]
    assert samples_of(longer) == one_by_one(llm, prompt(length), RANDOM)
    assert len({tuple(t) for t in samples_of(longer)}) == 3
    assert [t[:2] for t in samples_of(longer)] == samples_of(outputs[-1])


def test_b51_options_apply_to_every_sample(llm):
    params = SamplingParams(n=4, temperature=0.9, seed=1, max_tokens=8)
    likeliest = generate(llm, [prompt(6)], dataclasses.replace(params, top_k=1))[0]
    assert samples_of(likeliest) == [dense_tokens(prompt(6), 8)] * 4
    free = generate(llm, [prompt(6)], params)[0]
    stops = tuple(t[i] for i, t in enumerate(samples_of(free)))  # each sample meets one of these, soon or late
    stopped = generate(llm, [prompt(6)], dataclasses.replace(params, stop_token_ids=stops))[0]
    for whole, cut in zip(free.outputs, stopped.outputs, strict=True):
        end = next(i for i, token in enumerate(whole.token_ids) if token in stops)
        assert (cut.token_ids, cut.finish_reason) == (whole.token_ids[: end + 1], "stop")
    assert samples_of(stopped) == one_by_one(llm, prompt(6), params, stop_token_ids=stops)


def test_samples_do_not_depend_on_the_batch_or_on_their_number(llm):
    alone = samples_of(generate(llm, [prompt(6)], RANDOM)[0])
    params = [RANDOM, dataclasses.replace(RANDOM, n=2), GREEDY, dataclasses.replace(RANDOM, n=1)]
    texts = [prompt(6), prompt(6), prompt(9), prompt(6)]
    three, two, greedy, one = generate(llm, texts, params)
    assert samples_of(three) == alone
    assert samples_of(two) == alone[:2]
    assert samples_of(one) == alone[:1]
    assert samples_of(greedy) == [dense_tokens(prompt(9), 3)]


def test_samples_of_a_cached_prompt_are_the_same_samples(llm):
    first, again = (generate(llm, [prompt(9)], RANDOM)[0] for _ in range(2))
    assert cached([first, again]) == [0, 8]
    assert samples_of(first) == samples_of(again)


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
@pytest.mark.full_cache
def test_b18_abort_gives_back_the_blocks_of_every_sample(llm, num_steps):
    llm.add_request("a", {"prompt_token_ids": prompt(6)}, dataclasses.replace(RANDOM, n=4, max_tokens=20))
    llm.add_request("b", {"prompt_token_ids": prompt(9)}, dataclasses.replace(GREEDY, max_tokens=20))
    llm.add_request("c", {"prompt_token_ids": prompt(5)}, dataclasses.replace(RANDOM, n=8))  # waits for rows
    for _ in range(num_steps):
        assert not any(o.finished for o in llm.step())
    assert [llm.abort(name) for name in ("a", "c", "a", "never")] == [True, True, False, False]
    outputs = []
    while llm.has_unfinished_requests():
        outputs += [o for o in llm.step() if o.finished]
    assert [o.request_id for o in outputs] == ["b"]
    assert tokens_of(outputs) == [dense_tokens(prompt(9), 20)]
    assert llm.num_free_blocks == 40


def test_b18_abort_after_one_sample_has_ended(llm):
    params = dataclasses.replace(RANDOM, n=4, max_tokens=20)
    whole = samples_of(generate(llm, [prompt(6)], params)[0])
    stop = next(t for t in whole[1][:4] if all(t not in other[:8] for other in (whole[0], whole[2], whole[3])))
    llm.add_request("a", {"prompt_token_ids": prompt(6)}, dataclasses.replace(params, stop_token_ids=(stop,)))
    llm.step()
    llm.step()
    assert [len(r.live_samples) for r in llm.core.running] == [3]
    assert llm.abort("a")
    assert not llm.has_unfinished_requests()


def test_b54_samples_through_a_scarce_pool_equal_those_of_an_ample_one(llm):
    scarce = tiny_llm(16)  # one group of three samples needs 10 blocks: the two get in each other's way
    for seed in range(1, 6):
        params = SamplingParams(n=3, temperature=1.0, seed=seed, max_tokens=12)
        texts = [prompt(5, seed), prompt(5, 40 + seed)]
        ample = [samples_of(o) for o in generate(llm, texts, params)]
        assert [samples_of(o) for o in generate(scarce, texts, params)] == ample
        assert scarce.is_whole
    assert sum(scarce.core.num_preemptions.values()) > 0


@pytest.mark.full_cache
def test_samples_that_can_never_fit_fail_alone_with_the_numbers(llm):
    params = [dataclasses.replace(RANDOM, n=9), dataclasses.replace(RANDOM, n=8, max_tokens=40), GREEDY]
    rows, blocks, fine = generate(llm, [prompt(5)] * 3, params)
    assert "n=9" in str(rows.error)
    assert "max_num_seqs=8" in str(rows.error)
    assert f"needs {1 + 8 * 10} blocks" in str(blocks.error)
    assert fine.outputs[0].token_ids == dense_tokens(prompt(5), 3)


def test_one_broken_sample_is_reported_and_the_others_are_whole():
    def broken(params, batch, cache):
        logits, cache = TINY(params, batch, cache)
        is_second = jnp.arange(logits.shape[0]) == 1
        return jnp.where((is_second & (batch.seq_lens == 7))[:, None], jnp.nan, logits), cache

    llm = tiny_llm(40, forward=broken, max_num_seqs=3)
    (output,) = generate(llm, [prompt(6)], RANDOM)
    assert isinstance(output.error, FloatingPointError)
    assert [o.finish_reason for o in output.outputs] == ["length", "error", "length"]
    assert [len(o.token_ids) for o in output.outputs] == [6, 1, 6]
    assert llm.is_whole


# -- the examples ----------------------------------------------------------------------------------------------------


class WordTokenizer:
    """A token per word, by its hash; the examples' texts fit into a small pool then."""

    def encode(self, text):
        return [1 + sum(word.encode()) % 95 for word in text.split()]

    def decode(self, ids, skip_special_tokens=True):
        return " ".join(map(str, ids))


@pytest.fixture
def llm_of_words(llm):
    llm.tokenizer, llm.poison_value = WordTokenizer(), None
    yield llm
    llm.tokenizer = None


@pytest.mark.full_cache
def test_example_parallel_sampling_stores_the_prompt_once(llm_of_words, capsys):
    from examples.parallel_sampling import main

    before = llm_of_words.block_counters["copies"]
    main(llm_of_words)
    assert "sample 2 alone is the same: True" in capsys.readouterr().out
    assert llm_of_words.block_counters["copies"] - before == 3


def test_example_shared_prompt_computes_the_system_prompt_once(llm_of_words, capsys):
    from examples.shared_prompt import main

    main(llm_of_words)
    lines = capsys.readouterr().out.splitlines()
    hits = [int(line.split()[0]) for line in lines if line.endswith("tokens cached")]
    assert hits[0] == 0
    assert min(hits[1:]) >= 60
    assert lines[-2:] == [
        "with a cache_salt of its own: 0 cached",
        "after reset_prefix_cache(): 0 cached, same answer: True",
    ]
