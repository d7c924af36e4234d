"""Beam search equals a plain one without any cache, and moves nothing but shared, partially filled blocks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from doubles import (
    TINY_CONFIG,
    VOCAB,
    AuditedLLM,
    audit,
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
from paged_jax import BeamSearchParams

ROWS = 8

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
    """Every prompt bucket is the largest one, so that a width is one program."""
    return watched(tiny_llm(96, max_num_seqs=ROWS, eos_token_ids=3))


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


@pytest.mark.parametrize("width", range(1, ROWS + 1))
def test_sequences_and_scores_of_random_models_equal_a_plain_search(llm, width, monkeypatch):
    params = jax.tree.map(lambda x: 6.0 * x if x.ndim == 2 else x, init_params(TINY_CONFIG, nnx.Rngs(width)))
    monkeypatch.setattr(llm._runner, "params", params)
    next_logits = functools.partial(last_logits, params)
    prompts = [prompt(3 + 4 * i, i + 1) for i in range(ROWS // width)]
    length_penalty = (1.0, 0.0, 2.0, -1.0)[width % 4]
    eos = frequent_token(plain_beam_search(next_logits, prompts[0], width, 8))
    monkeypatch.setattr(llm, "eos_token_ids", (eos,))
    outputs = search(llm, prompts, width, length_penalty=length_penalty)
    for p, output in zip(prompts, outputs, strict=True):
        assert output.prompt_token_ids == p
        assert_equal(output, plain_beam_search(next_logits, p, width, 8, length_penalty, (eos,)))


@jax.jit
def branches(token):
    """Logits with 2 or 4 equally likely tokens, and no other; after token 0 only 0."""
    offset = jnp.where(jnp.arange(4) < 2 + 2 * (token % 2), jnp.array([0, 17, 40, 71]), 0)
    chosen = jnp.where(token > 0, 1 + (token - 1 + offset) % 95, 0)
    return jnp.full(VOCAB, -1e30).at[chosen].set(0.0)


def branching_forward(params, batch, cache):
    """ORACLE with ties between nearly all sequences; a slip leads to token 0."""
    logits, cache = oracle_forward(params, batch, cache)
    return jax.vmap(branches)(jnp.argmax(logits, axis=-1)), cache


@pytest.mark.parametrize("width", [2, 5, 8])
def test_ties_go_to_the_better_beam_and_the_lower_token(width):
    llm = watched(AuditedLLM(branching_forward, {}, oracle_llm(96).cache_config, vocab_size=VOCAB, eos_token_ids=7))
    prompts = [prompt(2 + 3 * i, i + 1) for i in range(ROWS // width)]
    eos = frequent_token(plain_beam_search(next_branches, prompts[0], width, 9))
    llm.eos_token_ids = (eos,)
    expected = [plain_beam_search(next_branches, p, width, 9, eos=(eos,)) for p in prompts]
    for output, sequences in zip(search(llm, prompts, width, 9), expected, strict=True):
        assert_equal(output, sequences)
    assert any(len({score for _, _, score in sequences}) < width for sequences in expected)  # there are ties


def next_branches(tokens):
    return branches(jnp.array(oracle_next(tokens)))


def test_width_1_without_end_of_sequence_is_greedy(llm):
    prompts = [prompt(n, n) for n in (1, 4, 5, 8, 9, 13, 2, 3)]  # one token: nothing to prefill
    outputs = search(llm, prompts, 1, 10, ignore_eos=True)
    assert [o.outputs[0].token_ids for o in outputs] == [dense_tokens(p, 10) for p in prompts]
