"""Engines whose model has a group with a window beside one with full attention: every answer equals DENSE."""

import jax
import numpy as np
import pytest
from doubles import (
    MIXED,
    TINY_SIZES,
    WINDOW,
    AuditedLLM,
    Disturbance,
    MixedConfig,
    audit,
    dense_logits,
    dense_tokens,
    ids,
    prompt,
    tiny_llm,
    tokens_of,
)
from flax import nnx

from models.llama import LlamaForward, init_params
from paged_jax import BeamSearchParams, CacheConfig, SamplingParams
from paged_jax.config import cdiv


def greedy(max_tokens, **options):
    return SamplingParams(temperature=0, max_tokens=max_tokens, **options)


def generate(llm, prompts, params):
    return llm.generate(ids(prompts), params, use_tqdm=False)


def mixed_llm(num_blocks_per_group, **options):
    return tiny_llm(num_blocks_per_group, forward=MIXED, **options)


@pytest.fixture(scope="module")
def shared_llm():
    """One step per dispatch; programs that many tests use."""
    return mixed_llm(40, decode_steps=1, max_num_seqs=3)


@pytest.fixture
def llm(shared_llm):
    shared_llm.poison_value = shared_llm.watch = None
    shared_llm.reset_prefix_cache()
    yield shared_llm
    shared_llm.poison_value = shared_llm.watch = None
    assert shared_llm.is_whole


def dense(prompts, num_tokens):
    return [dense_tokens(p, num_tokens, MIXED) for p in prompts]


@pytest.mark.parametrize("max_num_batched_tokens", [3, 32])
def test_prompts_shorter_and_longer_than_the_window_equal_dense(max_num_batched_tokens):
    llm = mixed_llm(40, max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=3)
    prompts = [prompt(n) for n in (1, 2, 4, 5, 6, 7, 8, 12, 13, 31)]
    assert tokens_of(generate(llm, prompts, greedy(14))) == dense(prompts, 14)
    assert llm.is_whole


def test_window_matters_here():
    """MIXED differs from TINY where a prompt is longer than the window: the comparisons above can fail."""
    differs = np.abs(dense_logits(prompt(31), forward=MIXED) - dense_logits(prompt(31))).max(axis=1) > 1e-3
    assert not differs[:WINDOW].any()
    assert differs[WINDOW:].mean() > 0.9


def test_b64_live_blocks_of_a_window_stay_few_for_four_windows_of_tokens(llm):
    seen = []
    llm.watch = lambda state: seen.append((np.asarray(state.table.block_ids) != 0).sum(axis=-1))
    generate(llm, [prompt(5, 1), prompt(2, 2)], greedy(4 * WINDOW))
    full, windowed = np.max(seen, axis=0)
    assert full[:2].tolist() == [cdiv(5 + 4 * WINDOW - 2, 4), cdiv(2 + 4 * WINDOW - 2, 4)]
    assert windowed.max() <= cdiv(WINDOW, 4) + 1


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_b64_request_preempted_after_its_window_moved_on_equals_dense(mode):
    """Two requests of 20 tokens in a pool so tight that one is preempted after it has given back window blocks."""
    options = {"max_num_batched_tokens": 4, "decode_steps": 1, "watermark": 0.0}
    llm = mixed_llm(6, preemption_mode=mode, max_blocks_per_seq=10, **options)
    prompts = [prompt(5, 1), prompt(5, 2)]
    gave_back = []
    real = llm.core.preempt

    def preempt(state, how):
        gave_back.append(state.live_samples[0].num_computed_tokens >= WINDOW + 3)
        real(state, how)

    llm.core.preempt = preempt
    assert tokens_of(generate(llm, prompts, greedy(15))) == dense(prompts, 15)
    assert any(gave_back)
    assert llm.core.num_preemptions[mode] == len(gave_back)
    assert llm.is_whole


@pytest.mark.parametrize("moment", range(1, 12, 2))
def test_b64_abort_right_after_a_block_has_left_is_clean(llm, moment):
    for number in (1, 2):
        llm.add_request(str(number), {"prompt_token_ids": prompt(5, number)}, greedy(16))
    for _ in range(moment):
        llm.step()
    llm.abort("1")
    audit(llm._runner._state)
    done = [o for _ in range(20) for o in llm.step() if o.finished]
    assert tokens_of(done) == dense([prompt(5, 2)], 16)
    assert llm.is_whole


def test_b12_hits_in_both_groups_equal_dense_whatever_the_window_has_lost(llm):
    first = prompt(20)
    generate(llm, [first], greedy(1))
    again = [*first, 50]
    (output,) = generate(llm, [again], greedy(6))
    assert (output.num_cached_tokens, tokens_of([output])) == (20, dense([again], 6))
    # Blocks are reused oldest first: a long stranger takes those that left the window first, then more.
    for length, usable in ((100, None), (120, None), (140, None)):
        stranger = prompt(length, 2)
        generate(llm, [stranger], greedy(1))
        (output,) = generate(llm, [again], greedy(6))
        assert output.num_cached_tokens in (0, 4, 8, 12, 16, 20), usable
        assert tokens_of([output]) == dense([again], 6)
    assert llm.is_whole


def test_follow_up_turns_hit_what_earlier_ones_stored(llm):
    text, hits = prompt(9), []
    for turn in range(4):
        (output,) = generate(llm, [text], greedy(7))
        assert tokens_of([output]) == dense([text], 7)
        hits.append(output.num_cached_tokens)
        text = [*text, *output.outputs[0].token_ids, 60 + turn]
    assert hits == [0, 12, 20, 28]  # all full blocks of the turn before: its last token is never stored


def test_samples_and_disturbances_equal_dense():
    llm = mixed_llm(12, max_blocks_per_seq=16)
    llm.before_step = Disturbance(llm, seed=1)
    prompts = [prompt(n, n) for n in (3, 8, 11, 17)]
    nearly_greedy = SamplingParams(temperature=1e-4, top_k=1, max_tokens=11, n=2)
    outputs = generate(llm, prompts, nearly_greedy)
    assert [[c.token_ids for c in o.outputs] for o in outputs] == [[t, t] for t in dense(prompts, 11)]
    assert llm.is_whole


def test_beams_in_a_window_equal_beams_without_a_cache():
    llm = mixed_llm(40, max_num_seqs=4)
    p, width, num_tokens = prompt(9), 3, 10
    (found,) = llm.beam_search(ids([p]), BeamSearchParams(beam_width=width, max_tokens=num_tokens, ignore_eos=True))
    beams = [((), 0.0)]
    for _ in range(num_tokens):
        grown = [
            ((*tokens, t), total + logprob)
            for tokens, total in beams
            for t, logprob in enumerate(np.asarray(jax.nn.log_softmax(dense_logits([*p, *tokens], forward=MIXED)[-1])))
        ]
        beams = sorted(grown, key=lambda beam: -beam[1])[:width]
    assert [tuple(s.token_ids) for s in found.outputs] == [tokens for tokens, _ in beams]
    np.testing.assert_allclose([s.cumulative_logprob for s in found.outputs], [t for _, t in beams], atol=1e-3)
    assert llm.is_whole


def test_poison_outside_of_the_window_never_shows(llm):
    llm.poison_value = np.nan
    prompts = [prompt(n, n) for n in (3, 9, 14)]
    assert tokens_of(generate(llm, prompts, greedy(12))) == dense(prompts, 12)


def test_admission_counts_what_each_group_needs():
    """A long prompt fits where its window's share is counted, and the pool is never overrun."""
    llm = mixed_llm(12, max_blocks_per_seq=30, max_num_batched_tokens=4, watermark=0.0)
    sizes = llm.cache_config
    assert sizes.max_blocks_for(60, 4) == 15 + cdiv(WINDOW + 4 - 2 + 4, 4) <= 24 < 2 * 15
    p = prompt(56)
    assert tokens_of(generate(llm, [p], greedy(4))) == dense([p], 4)
    longest = sizes.longest_sequence(4)
    fits, too_long = generate(llm, [prompt(longest), prompt(longest + 1)], greedy(1))
    assert fits.error is None
    assert f"one sequence of {longest} tokens" in str(too_long.error)


def test_int8_in_two_groups_is_deterministic_under_preemption():
    llm = mixed_llm(8, dtype="int8", max_blocks_per_seq=12)
    prompts = [prompt(n, n) for n in (5, 9, 13)]
    calm = tokens_of(generate(llm, prompts, greedy(12)))
    llm.before_step = Disturbance(llm, 0)
    assert tokens_of(generate(llm, prompts, greedy(12))) == calm
    assert llm.is_whole


def test_group_with_fewer_layers_than_others_equals_dense():
    """Three layers in groups of two and one: the second array belongs to the first group alone."""
    config = MixedConfig(**(TINY_SIZES | {"num_layers": 3}))
    forward, params = LlamaForward(config), init_params(config, nnx.Rngs(2))
    groups = ((0, 2), (1,))
    sizes = {"num_layers": 3, "num_kv_heads": 2, "head_dim": 8, "max_num_seqs": 2, "block_size": 4}
    grouped = CacheConfig(
        num_blocks=41, max_blocks_per_seq=20, layer_groups=groups, sliding_windows=(None, WINDOW), **sizes
    )
    single = CacheConfig(num_blocks=41, max_blocks_per_seq=20, **sizes)
    assert (grouped.num_arrays, grouped.layer_map) == (2, ((0, 0), (1, 0), (0, 1)))
    options = {"max_num_batched_tokens": 8, "decode_steps": 3}
    a, b = (AuditedLLM(forward, params, cache, **options) for cache in (grouped, single))
    prompts = [prompt(n) for n in (3, 14)]
    assert tokens_of(generate(a, prompts, greedy(12))) == tokens_of(generate(b, prompts, greedy(12)))
    assert a.is_whole
