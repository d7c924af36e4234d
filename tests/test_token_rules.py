"""Rules on logits: each against plain NumPy, their order, and that they act on nobody else."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_sampling import chi_square_is_plausible, make_state

from paged_jax import token_rules
from paged_jax.next_token import next_tokens
from paged_jax.sampling_params import MAX_INT32, MAX_LOGIT_BIASES
from paged_jax.state import RowParams
from paged_jax.token_rules import MAX_BAD_SEQUENCE_TOKENS, MAX_BAD_SEQUENCES

V, L, R = 97, 40, 8
TABLES = token_rules.init_rule_tables(R, L, V)
jit_next = jax.jit(next_tokens, static_argnames=("vocab_size", "logprobs_mode"))
jit_apply, jit_set = jax.jit(token_rules.apply_rules), jax.jit(token_rules.set_rules)
STOP = jnp.broadcast_to(jnp.asarray([7, 9, -1, -1], jnp.int32), (R, 4))


def params_of(**fields):
    """RuleParams of R rows from scalars or per-row lists."""
    params = vars(token_rules.init_rule_params(R))
    unknown = set(fields) - set(params)
    assert not unknown
    return token_rules.RuleParams(
        **{n: jnp.broadcast_to(jnp.asarray(fields.get(n, x), x.dtype), (R,)) for n, x in params.items()}
    )


def tables_of(rows):
    """Tables with these rows, each the keyword arguments of row_of_tables."""
    tables = TABLES
    for row, values in enumerate(rows):
        tables = jit_set(tables, jnp.int32(row), token_rules.row_of_tables(tables, **values))
    return tables


def apply(logits, params, rows, *, num_remaining=MAX_INT32):
    """The logits after the rules of rows 0 ... len(rows) - 1."""
    lengths = [len(r["token_ids"]) for r in rows]
    return np.asarray(
        jit_apply(
            jnp.asarray(logits, jnp.float32),
            params,
            tables_of(rows),
            lengths=jnp.asarray(lengths + [0] * (R - len(rows)), jnp.int32),
            num_remaining=jnp.broadcast_to(jnp.asarray(num_remaining, jnp.int32), (R,)),
            stop_token_ids=STOP,
        )
    )


def normal(seed=0):
    return np.random.default_rng(seed).normal(size=(R, V)).astype(np.float32)


# --- penalties ---


def penalised(logits, prompt, generated, presence, frequency, repetition):
    """vLLM's formulas, one token at a time in float64."""
    out = logits.astype(np.float64)
    for token in set(prompt) | set(generated):
        out[token] = out[token] / repetition if out[token] > 0 else out[token] * repetition
    for token in set(generated):
        out[token] -= frequency * generated.count(token) + presence
    return out


def test_penalties_for_random_histories_equal_numpy():
    rng = np.random.default_rng(0)
    logits, prompts, generated = normal(), [], []
    for r in range(R):
        prompts.append(rng.integers(0, 12, 1 + 2 * r).tolist())
        generated.append(rng.integers(0, 12, [0, 1, 25][r % 3]).tolist())
    values = {
        "presence_penalty": [0, 2, -2, 0, 0, 0.5, 1, 0],
        "frequency_penalty": [0, 0, 2, -2, 0, 0.5, 1, 0.1],
        "repetition_penalty": [2, 1, 1, 1, 0.5, 1.3, 1e-6, 1],
    }
    params = params_of(**values, num_prompt_tokens=[len(p) for p in prompts])
    # Beyond the row's length the history holds what a former owner left.
    rows = [{"token_ids": p + g} for p, g in zip(prompts, generated, strict=True)]
    stale = [{"token_ids": [96] * L}] * R
    tables = tables_of(stale)
    for row, (p, g) in enumerate(zip(prompts, generated, strict=True)):
        tables = dataclasses.replace(tables, history=tables.history.at[row, : len(p + g)].set(jnp.asarray(p + g)))
    got = jit_apply(
        jnp.asarray(logits),
        params,
        tables,
        lengths=jnp.asarray([len(r["token_ids"]) for r in rows], jnp.int32),
        num_remaining=jnp.full(R, MAX_INT32, jnp.int32),
        stop_token_ids=STOP,
    )
    expected = [penalised(logits[r], prompts[r], generated[r], *(values[n][r] for n in values)) for r in range(R)]
    np.testing.assert_allclose(got, expected, rtol=2e-6, atol=2e-6)
    assert not np.allclose(got, logits)


def test_penalties_when_tokens_are_pushed_one_by_one_equal_those_of_the_whole_history():
    params = params_of(frequency_penalty=0.3, repetition_penalty=1.2, num_prompt_tokens=2)
    history = [3, 4, 5, 5, 96, 3, 5]
    tables = tables_of([{"token_ids": history[:2]}] * R)
    rows, logits = jnp.arange(R, dtype=jnp.int32), jnp.asarray(normal())
    arguments = {"num_remaining": jnp.full(R, 9, jnp.int32), "stop_token_ids": STOP}
    for length in range(2, len(history) + 1):
        lengths = jnp.full(R, length, jnp.int32)
        got = jit_apply(logits, params, tables, lengths=lengths, **arguments)
        whole = tables_of([{"token_ids": history[:length]}] * R)
        np.testing.assert_array_equal(got, jit_apply(logits, params, whole, lengths=lengths, **arguments))
        if length < len(history):
            target = rows.at[1].set(R)  # row 1 does not take part
            tables = token_rules.push_tokens(tables, target, lengths, jnp.full(R, history[length], jnp.int32))
            tables = token_rules.push_tokens(tables, rows[1:2], lengths[1:2], jnp.asarray([history[length]], jnp.int32))


# --- bias, allowed ids ---


def test_bias_is_added_to_its_tokens_only():
    logits = normal()
    biases = [((0, -100.0), (96, 100.0)), ((5, 0.25),), tuple((t, t / 10) for t in range(V))]
    rows = [{"token_ids": [1], "logit_bias": b} for b in biases]
    got = apply(logits, params_of(has_bias=[True] * 3 + [False] * 5), rows)
    expected = logits.copy()
    for row, bias in enumerate(biases):
        for token, value in bias:
            expected[row, token] += np.float32(value)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("allowed", [(0,), (96,), (31, 32, 63, 64), tuple(range(0, 97, 2)), (5, 5, 5), range(V)])
def test_allowed_ids_leave_exactly_them(allowed):
    logits = normal()
    got = apply(logits, params_of(has_allowed=True), [{"token_ids": [1], "allowed_token_ids": tuple(allowed)}] * R)
    mask = np.isin(np.arange(V), list(allowed))[None]
    np.testing.assert_array_equal(got, np.where(mask, logits, -np.inf))


# --- bad words ---


@pytest.mark.parametrize(
    ("generated", "banned"),
    [
        ([], {8}),
        ([1], {8, 2}),
        ([1, 2], {8, 3}),
        ([9, 1, 2], {8, 3}),
        ([1, 2, 9], {8}),
        ([*range(20, 35)], {8, 35}),
        ([*range(21, 35)], {8}),
        ([5, 1, 2, 1], {8, 2}),
    ],
)
def test_bad_words_ban_the_last_token_behind_the_others(generated, banned):
    words = [(8,), (1, 2), (1, 2, 3), tuple(range(20, 36))]  # the last one is as long as a word may be
    assert len(words[-1]) == MAX_BAD_SEQUENCE_TOKENS
    logits = normal()
    rows = [{"token_ids": [4, 1, *generated], "bad_words": words}] * R
    got = apply(logits, params_of(has_bad_words=True, num_prompt_tokens=2), rows)
    assert set(np.flatnonzero(np.isneginf(got[0])).tolist()) == banned
    np.testing.assert_array_equal(got, np.where(np.isneginf(got), -np.inf, logits))


def test_bad_words_when_their_beginning_is_in_the_prompt_do_not_match():
    rows = [{"token_ids": [1, 2], "bad_words": [(1, 2, 3)]}, {"token_ids": [1, 2], "bad_words": [(1, 2, 3)]}]
    got = apply(normal(), params_of(has_bad_words=True, num_prompt_tokens=[2, 0] + [0] * 6), rows)
    assert (np.isfinite(got[0, 3]), np.isfinite(got[1, 3])) == (True, False)


# --- min_tokens ---


def test_min_tokens_masks_stop_tokens_until_they_are_generated():
    """B43: max 6, EOS the argmax, token 5 second. min_tokens 0, 1, 4 give 0, 1, 4 tokens 5, then EOS."""
    logits = np.zeros((R, V), np.float32)
    logits[:, 7], logits[:, 9], logits[:, 5] = 3, 2.5, 2
    minimum = np.array([0, 1, 4, 6, 0, 1, 4, 6])
    params = params_of(first_stop=(6 - minimum).tolist())
    drawn = []
    for generated in range(6):
        got = apply(logits, params, [{"token_ids": [1]}] * R, num_remaining=6 - generated)
        drawn.append(np.argmax(got, axis=1))
    expected = np.where(np.arange(6)[:, None] < minimum[None], 5, 7)
    np.testing.assert_array_equal(drawn, expected)


# --- order, isolation ---


def test_rules_apply_in_their_documented_order():
    logits = np.full((R, V), -1.0, np.float32)
    rows = [{"token_ids": [2, 3], "logit_bias": ((3, 2.0), (4, 5.0), (2, 4.0)), "allowed_token_ids": (2, 3, 5)}] * R
    params = params_of(
        has_bias=True, has_allowed=True, repetition_penalty=2.0, frequency_penalty=1.0, num_prompt_tokens=1
    )
    got = apply(logits, params, rows)[0]
    # 2 and 3: the bias makes them 3 and 1, then the penalties; 4: no bias brings back what is not allowed.
    assert {t: got[t] for t in np.flatnonzero(np.isfinite(got))} == {2: 1.5, 3: 0.5 - 1.0, 5: -1.0}


FULL_ROW = {
    "token_ids": list(range(30)),
    "logit_bias": tuple((t, 9.0) for t in range(V)),
    "allowed_token_ids": (1,),
    "bad_words": [(t,) for t in range(MAX_BAD_SEQUENCES)[:90]],
}
ROWS = jnp.arange(R, dtype=jnp.int32)


def rows_of(sampling, rules, *, num_remaining=6, num_logprobs=-1):
    """RowParams of R rows."""
    return RowParams(
        sampling=sampling,
        rules=rules,
        num_remaining=jnp.full(R, num_remaining, jnp.int32),
        stop_token_ids=STOP,
        namespace=jnp.zeros(R, jnp.int32),
        reserve=jnp.zeros(R, jnp.int32),
        num_logprobs=jnp.broadcast_to(jnp.asarray(num_logprobs, jnp.int32), (R,)),
    )


def draw(logits, state, params, tables, *, num_logprobs=-1, takes_part=True, mode="raw"):
    """next_tokens for rows of 30 tokens."""
    rows = rows_of(state, params, num_logprobs=num_logprobs)
    takes_part = jnp.broadcast_to(jnp.asarray(takes_part), (R,))
    options = {"lengths": jnp.full(R, 30, jnp.int32), "takes_part": takes_part, "vocab_size": V, "logprobs_mode": mode}
    return jit_next(jnp.asarray(logits), ROWS, rows, tables, **options)


def test_tables_of_a_former_owner_when_the_row_has_no_rules_do_nothing():
    logits, state = normal(), make_state(R, temperature=[0.0, 1.0] * 4)
    full = tables_of([FULL_ROW] * R)
    got = draw(logits, state, params_of(has_bias=[True] + [False] * 7), full)
    expected = draw(logits, state, params_of(), TABLES)
    np.testing.assert_array_equal(got.token_ids[1:], expected.token_ids[1:])


@pytest.mark.parametrize(
    "rule",
    [
        {"has_bias": True},
        {"has_allowed": True},
        {"has_bad_words": True},
        {"first_stop": 3},
        {"presence_penalty": 2.0},
        {"frequency_penalty": -2.0},
        {"repetition_penalty": 1.7},
    ],
    ids=lambda rule: next(iter(rule)),
)
def test_rule_of_one_row_changes_no_other_bit(rule):
    logits = normal(1)
    rules = params_of(
        **{name: [value if r == 3 else vars(params_of())[name][r] for r in range(R)] for name, value in rule.items()}
    )
    tables = tables_of([FULL_ROW] * R)
    got = jit_apply(
        jnp.asarray(logits), rules, tables,
        lengths=jnp.full(R, 30, jnp.int32), num_remaining=jnp.full(R, 6, jnp.int32), stop_token_ids=STOP,
    )  # fmt: skip
    changed = np.any(np.asarray(got) != logits, axis=1)
    np.testing.assert_array_equal(changed, np.arange(R) == 3)


def test_rules_when_they_leave_no_token_say_so_for_that_row_only():
    logits, state = normal(), make_state(R, temperature=[0.0, 1.0] * 4)
    logits[5, 50] = np.nan  # a masked NaN is still the model's failure
    rows = [{"token_ids": [1], "allowed_token_ids": (4,), "bad_words": [(4,)]}] * 2
    rows += [{"token_ids": [1], "allowed_token_ids": (4,)}] * 6
    params = params_of(has_allowed=True, has_bad_words=[True] * 2 + [False] * 6)
    got = draw(logits, state, params, tables_of(rows))
    assert got.has_token.tolist() == [False, False] + [True] * 6
    assert got.is_finite.tolist() == [True] * 5 + [False] + [True] * 2
    assert got.token_ids.tolist() == [0, 0, 4, 4, 4, 0, 4, 4]


def test_draws_under_rules_follow_the_softmax_of_what_they_leave():
    logits = normal(3)[0] * 2
    prompt, generated = [1, 2, 3], [10, 11, 10]
    bias, banned = ((20, 1.5), (21, -1.0)), list(range(40, 60))
    rows = {"token_ids": prompt + generated, "logit_bias": bias, "bad_words": [(t,) for t in banned]}
    params = params_of(
        has_bias=True, has_bad_words=True, num_prompt_tokens=3,
        presence_penalty=0.5, frequency_penalty=0.7, repetition_penalty=1.4, first_stop=2,
    )  # fmt: skip
    expected = logits.astype(np.float64)
    for token, value in bias:
        expected[token] += value
    expected[[*banned, 7, 9]] = -np.inf
    expected = penalised(expected, prompt, generated, 0.5, 0.7, 1.4)
    probabilities = np.exp(expected / 0.8 - expected.max())
    allowed = probabilities > 0

    @jax.jit
    def draw_chunk(first, state):
        def step(i):
            # The seed varies and not the position, which is the length of the history.
            words = state.seed.at[:, 1].set((first + i * R + ROWS).astype(jnp.uint32))
            return next_tokens(
                jnp.broadcast_to(jnp.asarray(logits)[None], (R, V)), ROWS,
                rows_of(dataclasses.replace(state, seed=words), params), tables, lengths=jnp.full(R, 6, jnp.int32),
                takes_part=ROWS >= 0, vocab_size=V, logprobs_mode="raw",
            ).token_ids  # fmt: skip

        return jax.lax.map(step, jnp.arange(2500, dtype=jnp.int32))

    tables = tables_of([rows] * R)
    drawn = np.asarray(draw_chunk(jnp.int32(0), make_state(R, temperature=0.8)))
    counts = np.bincount(drawn.ravel(), minlength=V)
    assert counts[~allowed].sum() == 0
    assert chi_square_is_plausible(counts[allowed], (probabilities / probabilities.sum())[allowed])


# --- programs ---


def test_next_tokens_when_options_change_never_retraces():
    draw(normal(), make_state(R), params_of(), TABLES)
    before = jit_next._cache_size()
    draw(normal(), make_state(R, top_k=3), params_of(has_bias=True, presence_penalty=1.0), TABLES, num_logprobs=5)
    assert jit_next._cache_size() == before


def test_row_of_tables_at_its_limits_fits():
    row = token_rules.row_of_tables(
        TABLES,
        token_ids=range(L),
        logit_bias=tuple((t, 1.0) for t in range(MAX_LOGIT_BIASES)),
        bad_words=[tuple(range(MAX_BAD_SEQUENCE_TOKENS))] * MAX_BAD_SEQUENCES,
    )
    assert row.history[-1] == L - 1
    assert row.bias_ids[-1] == MAX_LOGIT_BIASES - 1
    assert row.bad_words.min() == 0
