"""Beam search equals a plain one without any cache, and moves nothing but shared, partially filled blocks."""

import dataclasses
import functools
import json
import runpy
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from block_manager_model import PlainBlockManager
from doubles import (
    TINY_CONFIG,
    VOCAB,
    AuditedLLM,
    ByteTokenizer,
    audit,
    cache_config,
    dense_logits,
    dense_tokens,
    ids,
    oracle_forward,
    oracle_llm,
    oracle_next,
    prompt,
    tiny_llm,
)
from flax import nnx

from models.llama import init_params
from paged_jax import BeamSearchParams, FinishReason, SamplingParams, Status, init_beams, release_rows
from paged_jax.beam_engine import BeamSearch, max_blocks, plan_waves
from paged_jax.beam_search import advance
from paged_jax.block_pool import UNCACHED
from paged_jax.runner import RowChunk

ROWS = 8
DATA = Path(__file__).parent / "data"

# -- a plain beam search ---------------------------------------------------------------------------------------------


@jax.jit
def log_softmax(logits):
    return jax.nn.log_softmax(logits.astype(jnp.float32))


def plain_beam_search(next_logits, prompt, width, max_tokens, length_penalty=1.0, eos=()):
    """Lists and loops over whole sequences: [(tokens, cumulative log-probability, score)], best first.

    next_logits(tokens) are the logits after these. Ties go to what was found first, then to the better beam, then to
    the lower token.
    """
    running, kept = [([], np.float32(0))], []
    for length in range(1, max_tokens + 1):
        found = []
        for tokens, total in running:
            scores = np.asarray(log_softmax(next_logits([*prompt, *tokens]))) + total
            found += [([*tokens, t], scores[t]) for t in np.argsort(-scores, kind="stable")[: 8 * width].tolist()]
        found.sort(key=lambda x: -x[1])
        found = found[: max(2, 1 + len(eos)) * width]
        is_last = length == max_tokens
        ended = [f for f in found[:width] if f[0][-1] in eos or is_last]
        kept += [(tokens, total, total / np.float32(length) ** np.float32(length_penalty)) for tokens, total in ended]
        kept = sorted(kept, key=lambda x: -x[2])[:width]
        running = [f for f in found if f[0][-1] not in eos][:width]
        best = running[0][1] / np.float32(length) ** np.float32(length_penalty)
        if len(kept) == width and best <= kept[-1][2]:
            break
    return kept


def assert_equal(output, expected):
    assert output.error is None
    assert [s.token_ids for s in output.outputs] == [tokens for tokens, _, _ in expected]
    np.testing.assert_allclose([s.cumulative_logprob for s in output.outputs], [e[1] for e in expected], rtol=1e-4)
    np.testing.assert_allclose([s.score for s in output.outputs], [e[2] for e in expected], rtol=1e-4)


def last_logits(params, tokens):
    return dense_logits(tokens, params)[-1]


def plain_tiny(prompt, width, max_tokens, **options):
    """The plain search of TINY."""
    return plain_beam_search(functools.partial(last_logits, None), prompt, width, max_tokens, **options)


def test_plain_search_equals_transformers():
    """What the plain search is worth: recorded searches of all lengths, penalties and numbers of stop tokens."""
    recorded = json.loads((DATA / "beams.json").read_text())["cases"]
    recorder = runpy.run_path(str(DATA / "record_beams.py"))
    tables = [recorder["logits_table"](seed) for seed in recorder["SEEDS"]]
    assert len(recorded) == 96
    for case in recorded:
        found = plain_beam_search(
            lambda tokens, case=case: tables[case["seed"]][tokens[-1]],
            recorder["PROMPT"],
            len(case["sequences"]),
            recorder["MAX_TOKENS"],
            case["length_penalty"],
            case["eos"],
        )
        assert [tokens for tokens, _, _ in found] == case["sequences"], case
        np.testing.assert_allclose([score for _, _, score in found], case["scores"], rtol=1e-5)


# -- engines ---------------------------------------------------------------------------------------------------------


def watched(llm, watch=None):
    """The engine with every dispatch of a search audited, and shown to watch(state, beams, output)."""
    search = llm._runner.search

    def audited(beams):
        after, output = search(beams)
        audit(llm._runner._state)
        if watch is not None:
            watch(llm._runner._state, after, output)
        return after, output

    llm._runner.search = audited
    return llm


@pytest.fixture(scope="module")
def llm():
    """Tests send as many prompts as there is room for, so that a width is one program; prompts come in chunks."""
    return watched(tiny_llm(96, max_num_seqs=ROWS, eos_token_ids=3, max_num_batched_tokens=16))


def search(llm, prompts, width, max_tokens=8, **options):
    outputs = llm.beam_search(
        ids(prompts), BeamSearchParams(beam_width=width, max_tokens=max_tokens, **options), use_tqdm=False
    )
    assert llm.is_whole
    assert llm.num_free_blocks == llm.cache_config.num_blocks - 1
    return outputs


# -- equality with the plain search ----------------------------------------------------------------------------------


def frequent_token(sequences):
    """A token in the middle of a good sequence: as the end-of-sequence token it ends some, and not all."""
    return sequences[0][0][len(sequences[0][0]) // 2]


@pytest.mark.parametrize("width", [1, 2, 4, 6, 8])
def test_sequences_and_scores_of_random_models_equal_a_plain_search(llm, width, monkeypatch, request):
    params = jax.tree.map(lambda x: 6.0 * x if x.ndim == 2 else x, init_params(TINY_CONFIG, nnx.Rngs(width)))
    request.addfinalizer(functools.partial(llm.update_params, llm._runner.params))
    llm.update_params(params)
    next_logits = functools.partial(last_logits, params)
    prompts = [prompt(3 + 4 * i, i + 1) for i in range(ROWS // width)]
    length_penalty = (1.0, 0.0, 2.0, -1.0)[width % 4]
    eos = frequent_token(plain_beam_search(next_logits, prompts[0], width, 8))
    monkeypatch.setattr(llm, "eos_token_ids", (eos,))
    outputs = search(llm, prompts, width, length_penalty=length_penalty)
    for p, output in zip(prompts, outputs, strict=True):
        assert output.prompt_token_ids == p
        assert_equal(output, plain_beam_search(next_logits, p, width, 8, length_penalty, (eos,)))


def test_prompt_of_a_search_is_cached_under_its_own_salt_only(llm):
    tokens, greedy = prompt(21, 77), SamplingParams(temperature=0.0, max_tokens=2)

    def cached(prompt_tokens, **salt):
        (output,) = llm.generate([{"prompt_token_ids": prompt_tokens, **salt}], greedy, use_tqdm=False)
        return output.num_cached_tokens

    assert cached(prompt(5, 78), cache_salt="a") == 0  # the row that the search will use had another namespace
    first = search(llm, [tokens], 2)
    assert cached(tokens, cache_salt="a") == 0
    assert cached(tokens) > 0
    again = search(llm, [tokens], 2)  # with what the cache has of its prompt
    assert [s.token_ids for s in again[0].outputs] == [s.token_ids for s in first[0].outputs]


@jax.jit
def branches(token):
    """Logits with 2 or 4 equally likely tokens, and no other; after token 0 only 0."""
    offset = jnp.where(jnp.arange(4) < 2 + 2 * (token % 2), jnp.array([0, 17, 40, 71]), 0)
    chosen = jnp.where(token > 0, 1 + (token - 1 + offset) % 95, 0)
    return jnp.full(VOCAB, -1e30).at[chosen].set(0.0)


def branching_forward(params, batch, cache):
    """ORACLE with ties between nearly all sequences; a slip leads to token 0. Not finite at the lengths in params."""
    logits, cache = oracle_forward(params, batch, cache)
    logits = jax.vmap(branches)(jnp.argmax(logits, axis=-1))
    for value, length in params.items():
        logits = logits.at[:, 50].set(jnp.where(batch.seq_lens == length, float(value), logits[:, 50]))
    return logits, cache


@pytest.fixture(scope="module")
def branching_llm():
    config = oracle_llm(96).cache_config
    params = {"nan": jnp.int32(-1), "inf": jnp.int32(-1)}
    return watched(AuditedLLM(branching_forward, params, config, eos_token_ids=7, max_num_batched_tokens=16))


def next_branches(tokens):
    return branches(jnp.array(oracle_next(tokens)))


@pytest.mark.parametrize("width", [3, 5, 7])
def test_ties_go_to_the_better_beam_and_the_lower_token(branching_llm, monkeypatch, width):
    prompts = [prompt(2 + 3 * i, i + 1) for i in range(ROWS // width)]
    eos = frequent_token(plain_beam_search(next_branches, prompts[0], width, 9))
    monkeypatch.setattr(branching_llm, "eos_token_ids", (eos,))
    expected = [plain_beam_search(next_branches, p, width, 9, eos=(eos,)) for p in prompts]
    for output, sequences in zip(search(branching_llm, prompts, width, 9), expected, strict=True):
        assert_equal(output, sequences)
    assert any(len({score for _, _, score in sequences}) < width for sequences in expected)  # there are ties


def test_one_logit_that_is_not_finite_fails_its_prompt_alone(branching_llm, monkeypatch):
    monkeypatch.setattr(branching_llm._runner, "params", {"nan": jnp.int32(7), "inf": jnp.int32(30)})
    prompts = [prompt(5), prompt(8, 2), prompt(9, 3), prompt(29, 4)]
    outputs = search(branching_llm, prompts, 3)
    assert [type(o.error) for o in outputs] == [FloatingPointError, type(None), type(None), FloatingPointError]
    assert "after 7 tokens were not finite" in str(outputs[0].error)
    assert "after 30 tokens were not finite" in str(outputs[3].error)
    for i in (1, 2):
        assert_equal(outputs[i], plain_beam_search(next_branches, prompts[i], 3, 8, eos=(7,)))


def test_sequences_of_probability_0_are_not_found():
    step = jax.jit(advance)
    logits = jnp.full((1, 3, 8), -jnp.inf).at[..., 5].set(0.0)
    beams = init_beams(jnp.zeros(1, jnp.int32), jnp.full(1, 3), beam_width=3, eos_token_ids=jnp.zeros(1, jnp.int32))
    for _ in range(3):
        beams, parents = step(beams, logits)
        assert parents[0, 0] == 0
    assert beams.finish.tolist() == [FinishReason.LENGTH]
    assert beams.kept.num_tokens.tolist() == [[3, 0, 0]]
    assert beams.kept.score.tolist() == [[0.0, -np.inf, -np.inf]]


def test_width_1_is_greedy(llm, monkeypatch):
    prompts = [prompt(n, n) for n in (1, 4, 5, 8, 9, 13, 2, 3)]  # one token: nothing to prefill
    monkeypatch.setattr(llm, "eos_token_ids", (VOCAB,))
    outputs = search(llm, prompts, 1, 10)
    assert [o.outputs[0].token_ids for o in outputs] == [dense_tokens(p, 10) for p in prompts]


# -- blocks ----------------------------------------------------------------------------------------------------------


class PlainBeams:
    """What the block manager must hold during a search, followed step by step with lists and loops."""

    def __init__(self, llm, prompts, width):
        config = llm.cache_config
        self.width, self.size = width, config.block_size
        self.manager = PlainBlockManager(config.num_blocks, self.size, ROWS, config.max_blocks_per_seq)
        first_rows = {p * width: tokens[:-1] for p, tokens in enumerate(prompts)}
        self.manager.append([first_rows.get(row, []) for row in range(ROWS)], 99)
        self.beams = [[tokens] for tokens in prompts]  # tokens of each running beam, the last one not stored yet
        self.num_copies = 0

    def step(self, tokens, parents, finish):
        """The next step; tokens and parents [P, k]."""
        new = [[] for _ in range(ROWS)]
        for p, beams in enumerate(self.beams):
            for j, beam in enumerate(beams):
                new[p * self.width + j] = beam[-1:]
        self.manager.append(new, 1)
        self.num_copies += len(self.manager.copies)
        rows = list(range(ROWS))
        for p, beams in enumerate(self.beams):
            mine = range(p * self.width, (p + 1) * self.width)
            if not beams:
                continue
            rows[mine.start : mine.stop] = [ROWS if finish[p] else mine.start + int(b) for b in parents[p]]
            moved = zip(parents[p], tokens[p], strict=True)
            self.beams[p] = [] if finish[p] else [[*beams[b], int(t)] for b, t in moved]
        self.manager.reparent(rows)

    @property
    def num_prefixes(self):
        """Distinct contents of blocks, each with all that precedes it: the fewest blocks that could hold the beams."""
        stored = [beam[:-1] for beams in self.beams for beam in beams]
        return len({tuple(s[: end + self.size]) for s in stored for end in range(0, len(s), self.size)})


@pytest.mark.full_cache
def test_b50_b47_every_step_shares_all_it_can_and_copies_only_shared_partial_blocks():
    # Without a prefix cache: all free blocks stand in one queue.
    llm = tiny_llm(96, decode_steps=1, max_num_seqs=ROWS, max_num_batched_tokens=16, enable_prefix_caching=False)
    prompts, history = [prompt(6), prompt(9, 2)], []
    eos = plain_tiny(prompts[1], 4, 6)[0][0][2]
    llm.eos_token_ids = (eos,)
    plain = PlainBeams(llm, prompts, 4)

    def watch(state, beams, output):
        plain.step(output.token_ids[..., 0], output.parents[..., 0], beams.finish)
        manager, count = plain.manager, int(state.pool.num_free)
        head, entries = int(state.pool.head[UNCACHED]), np.asarray(state.pool.free_queue[UNCACHED])
        queue = entries[(head + np.arange(count)) % state.pool.num_blocks]
        held = [[int(b) for b in row if b] for row in np.asarray(state.table.block_ids[0])]
        assert (held, queue.tolist()) == (manager.blocks[0], manager.free)
        assert state.pool.num_blocks - 1 - count == plain.num_prefixes
        history.append(int(output.num_copies))

    outputs = search(watched(llm, watch), prompts, 4, 20)
    for p, output in zip(prompts, outputs, strict=True):
        assert_equal(output, plain_tiny(p, 4, 20, eos=(eos,)))
    assert sum(history) == plain.num_copies > 0
    assert len(history) == 20
    assert llm.peak_blocks < 60  # of up to 2 + 4 * 5 and 2 + 4 * 6 without sharing


@pytest.mark.full_cache
def test_dispatches_of_many_steps_copy_no_more_and_find_the_same():
    llm, prompts, copies = tiny_llm(96, max_num_seqs=ROWS, max_num_batched_tokens=16), [prompt(8), prompt(3, 2)], []
    plain = PlainBeams(llm, prompts, 4)

    def watch(state, beams, output):
        for i in range(int(output.num_steps)):
            is_last = i == int(output.num_steps) - 1
            plain.step(output.token_ids[..., i], output.parents[..., i], beams.finish if is_last else [0, 0])
        copies.append(int(output.num_copies))

    outputs = search(watched(llm, watch), prompts, 4, 18)
    for p, output in zip(prompts, outputs, strict=True):
        assert_equal(output, plain_tiny(p, 4, 18))
    assert sum(copies) == plain.num_copies > 0
    assert len(copies) == 5  # of 4, 4, 4, 4 and 2 steps


# -- scarce memory ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scarce_llm():
    return watched(tiny_llm(14, max_num_seqs=5, max_blocks_per_seq=16, max_num_batched_tokens=16))


@pytest.mark.parametrize(
    ("lengths", "num_blocks", "max_num_seqs", "waves"),
    [
        # Prompt 6 and 7 new tokens: 1 + 3 * 2 blocks; prompt 8: 2 + 3 * 2; prompt 30: 7 + 3 * 2.
        ([6, 6, 6], 14, 12, [2, 1]),
        ([6, 8, 6], 14, 12, [1, 1, 1]),
        ([6, 8, 6], 21, 12, [2, 1]),
        ([6, 6, 6, 6, 6], 99, 11, [3, 2]),
        ([6, 30, 6, 6], 12, 12, [1, 1, 1, 1]),
        ([6, 30, 6, 6], 20, 12, [2, 2]),
        ([], 20, 12, []),
    ],
)
def test_waves_take_what_rows_and_blocks_hold_at_their_largest(lengths, num_blocks, max_num_seqs, waves):
    config = cache_config(num_blocks, max_num_seqs=max_num_seqs)
    searches = [BeamSearch(index=i, prompt_token_ids=(1,) * n, max_tokens=7) for i, n in enumerate(lengths)]
    planned = list(plan_waves(searches, 3, config, 256))
    assert [len(wave) for wave in planned] == waves
    assert [search for wave in planned for search in wave] == searches


def test_prompts_that_do_not_fit_together_run_one_after_the_other(scarce_llm):
    prompts = [prompt(n, n) for n in (5, 9, 2, 6, 1)]
    outputs = search(scarce_llm, prompts, 4, 5)
    for p, output in zip(prompts, outputs, strict=True):
        assert_equal(output, plain_tiny(p, 4, 5))


@pytest.mark.full_cache
def test_search_that_outgrows_the_pool_fails_alone_with_numbers(scarce_llm):
    prompts = [prompt(5), prompt(48, 2), prompt(6, 3), prompt(59, 4)]
    outputs = search(scarce_llm, prompts, 4, 5)
    assert [type(o.error) for o in outputs] == [type(None), RuntimeError, type(None), RuntimeError]
    assert "48 tokens stopped after 1 of 5 new tokens: OUT_OF_BLOCKS" in str(outputs[1].error)
    assert "59 tokens stopped after 0 of 5 new tokens: OUT_OF_BLOCKS" in str(outputs[3].error)
    assert "4 beams need up to 16 blocks of 4 tokens, and the pool has 14; raise num_blocks" in str(outputs[1].error)
    assert (outputs[1].outputs, outputs[3].outputs) == ([], [])
    for i in (0, 2):
        assert_equal(outputs[i], plain_tiny(prompts[i], 4, 5))


@pytest.mark.full_cache
def test_search_that_could_outgrow_the_pool_but_shares_enough_is_served(scarce_llm):
    one = BeamSearch(index=0, prompt_token_ids=(1,) * 33, max_tokens=5)
    assert max_blocks(one, 4, scarce_llm.cache_config, 256) == 16
    assert scarce_llm.cache_config.num_blocks - 1 < 16
    p = prompt(33, 6)
    assert_equal(search(scarce_llm, [p], 4, 5)[0], plain_tiny(p, 4, 5))


@pytest.mark.full_cache
def test_search_that_the_pool_stopped_goes_on_when_there_is_room(scarce_llm):
    runner, p = scarce_llm._runner, prompt(5)
    for start in range(0, 40, 10):
        runner.prefill([RowChunk(4, prompt(40, 9)[start : start + 10])])
    runner.prefill([RowChunk(0, p[:-1])])
    tokens = jnp.array(p[-1:], jnp.int32)
    beams = init_beams(tokens, jnp.array([5], jnp.int32), beam_width=4, eos_token_ids=jnp.zeros(0, jnp.int32))
    stopped, output = runner.search(beams)
    assert (int(output.status), int(output.num_steps)) == (Status.OUT_OF_BLOCKS, 1)
    again, output = runner.search(stopped)
    assert (int(output.status), int(output.num_steps)) == (Status.OUT_OF_BLOCKS, 0)
    chex.assert_trees_all_equal(again, stopped)
    runner._state, _ = release_rows(runner._state, np.arange(5) == 4)
    done, _ = runner.search(again)
    assert int(done.finish[0]) == FinishReason.LENGTH
    expected = plain_tiny(p, 4, 5)
    np.testing.assert_allclose(done.kept.score[0], [score for _, _, score in expected], rtol=1e-4)
    assert done.kept.last_token[0].tolist() == [tokens[-1] for tokens, _, _ in expected]
    assert scarce_llm.is_whole


# -- the interface ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad", ["text without a tokenizer", {"prompt_token_ids": []}, {"prompt_token_ids": [VOCAB]}, 3]
)
def test_bad_prompt_fails_alone(llm, bad):
    fine = {"prompt_token_ids": prompt(5)}
    outputs = llm.beam_search([fine, bad, fine], BeamSearchParams(beam_width=4, max_tokens=2))
    assert isinstance(outputs[1].error, ValueError | TypeError)
    assert [len(o.outputs) for o in outputs] == [4, 0, 4]
    assert llm.is_whole


def test_one_prompt_may_be_given_alone_and_none_gives_none(llm):
    params = BeamSearchParams(beam_width=8, max_tokens=2)
    assert len(llm.beam_search(ids([prompt(5)])[0], params)) == 1
    assert llm.beam_search([], params) == []


def test_search_ends_at_max_model_len(llm, monkeypatch):
    monkeypatch.setattr(llm, "max_model_len", 10)
    outputs = search(llm, [prompt(7), prompt(4)], 4, 99, ignore_eos=True)
    assert [[len(s.token_ids) for s in o.outputs] for o in outputs] == [[3] * 4, [6] * 4]
    assert {s.finish_reason for o in outputs for s in o.outputs} == {"length"}


def test_end_of_sequence_token_is_the_last_one_unless_ignored(llm, monkeypatch):
    monkeypatch.setattr(llm, "eos_token_ids", (eos := frequent_token(plain_tiny(prompt(5), 4, 8)),))
    sequences = search(llm, [prompt(5)] * 2, 4)[0].outputs
    assert {s.finish_reason for s in sequences} == {"stop", "length"}
    for s in sequences:
        assert (s.token_ids[-1] == eos) == (s.finish_reason == "stop")
        assert eos not in s.token_ids[:-1]
    assert any(eos in s.token_ids for s in search(llm, [prompt(5)] * 2, 4, ignore_eos=True)[0].outputs)


def test_text_is_decoded_and_a_tokenizer_that_fails_fails_its_prompt_alone(llm, monkeypatch):
    class Fails(ByteTokenizer):
        def decode(self, ids, skip_special_tokens=True):
            if 66 in ids:
                raise RuntimeError("no such text")
            return super().decode(ids, skip_special_tokens)

    monkeypatch.setattr(llm, "tokenizer", Fails())
    good, bad = llm.beam_search(["AAA", "CCB"], BeamSearchParams(beam_width=4, max_tokens=3), use_tqdm=False)
    assert (good.prompt, good.prompt_token_ids, good.error) == ("AAA", [65] * 3, None)
    assert [s.text for s in good.outputs] == [bytes(s.token_ids).decode() for s in good.outputs]
    assert "no such text" in str(bad.error)
    assert llm.is_whole


def test_unfinished_requests_and_wrong_parameters_are_refused(llm):
    params = BeamSearchParams(beam_width=2, max_tokens=2)
    llm.add_request("a", {"prompt_token_ids": [1, 2]})
    with pytest.raises(RuntimeError, match=r"beam_search\(\) needs an idle engine"):
        llm.beam_search(ids([prompt(3)]), params)
    llm.abort_all()
    with pytest.raises(TypeError, match="BeamSearchParams"):
        llm.beam_search(ids([prompt(3)]), {"beam_width": 2})
    with pytest.raises(ValueError, match="beam_width=9 needs as many rows, and max_num_seqs=8"):
        llm.beam_search(ids([prompt(3)]), dataclasses.replace(params, beam_width=9))
    llm.eos_token_ids = tuple(range(12))
    with pytest.raises(ValueError, match="compares 104 continuations in each step, and the vocabulary has only 97"):
        llm.beam_search(ids([prompt(3)]), dataclasses.replace(params, beam_width=8))
    llm.eos_token_ids = (3,)


@pytest.mark.parametrize("when", ["before", "after"])
def test_interrupted_search_leaves_an_idle_whole_engine(llm, monkeypatch, when):
    run = llm._runner.search

    def interrupted(beams):
        if when == "after":
            run(beams)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(llm._runner, "search", interrupted)
        with pytest.raises(KeyboardInterrupt):
            search(llm, [prompt(6), prompt(5, 2)], 4)
    assert llm.is_whole
    assert_equal(search(llm, [prompt(6), prompt(5, 2)], 4, ignore_eos=True)[0], plain_tiny(prompt(6), 4, 8))


def test_other_prompts_lengths_and_parameters_compile_nothing(llm):
    search(llm, [prompt(6), prompt(5, 2)], 4)
    num_programs = llm.compile_count
    for length, max_tokens, length_penalty in ((1, 1, 0.0), (9, 20, 1.5), (12, 7, -1.0)):
        search(llm, [prompt(length), prompt(5, 2)], 4, max_tokens, length_penalty=length_penalty)
    assert llm.compile_count == num_programs


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("beam_width", v) for v in (0, -1, 10**30, 2.0, True, None)),
        *(("max_tokens", v) for v in (0, 2**63, None, "3")),
        *(("length_penalty", v) for v in (float("nan"), float("inf"), 4.5, "1", True)),
        ("ignore_eos", 1),
    ],
)
def test_b104_parameters_out_of_range_are_refused_by_name(name, value):
    with pytest.raises(ValueError, match=name):
        BeamSearchParams(**({"beam_width": 2, "max_tokens": 5} | {name: value}))


def test_parameters_have_the_usual_defaults_and_hashes():
    params = BeamSearchParams(beam_width=np.int64(2), max_tokens=5)
    assert (params.length_penalty, params.ignore_eos) == (1.0, False)
    assert hash(params) == hash(BeamSearchParams(beam_width=2, max_tokens=5, length_penalty=1))
