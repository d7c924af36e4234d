"""Rules that change a row's logits before its token is drawn: bias, allowed ids, bad words, min_tokens, penalties.

A rule looks at nothing but the request's parameters and its tokens so far, which the row keeps as one history: no
counts or other state to carry along when a request is preempted, swapped or forked. Rows without rules cost nothing:
the caller asks `has_rules` first. What a row's tables hold is used only where the row's parameters say so, so that
those of a former owner never act.

The formulas are those of vLLM, which took frequency and presence penalty from OpenAI's API and the repetition penalty
from CTRL (arXiv 1909.05858, section 4.1).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from paged_jax.sampling_params import MAX_INT32, MAX_LOGIT_BIASES

#: Token sequences of the bad words of one request, and tokens of one of them.
MAX_BAD_SEQUENCES, MAX_BAD_SEQUENCE_TOKENS = 128, 16


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class RuleParams:
    """What a request's rules say in a few numbers per row.

    Attributes:
        presence_penalty, frequency_penalty, repetition_penalty: float32 [S]; 0, 0, 1 = off.
        num_prompt_tokens: int32 [S] tokens of the history that are the prompt.
        first_stop: int32 [S] stop tokens are impossible while more tokens than this remain to be generated: max_tokens
            - min_tokens; MAX_INT32 = off.
        has_bias, has_allowed, has_bad_words: bool [S] whether the row's entries of RuleTables are this request's.
    """

    presence_penalty: Float32[Array, " S"]
    frequency_penalty: Float32[Array, " S"]
    repetition_penalty: Float32[Array, " S"]
    num_prompt_tokens: Int32[Array, " S"]
    first_stop: Int32[Array, " S"]
    has_bias: Bool[Array, " S"]
    has_allowed: Bool[Array, " S"]
    has_bad_words: Bool[Array, " S"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class RuleTables:
    """What a request's rules need in large: written by `set_rules` for requests that have some, else never looked at.

    Attributes:
        history: int32 [S, L] tokens of the row, prompt and generated ones; entries past its length are never looked at.
        bias_ids: int32 [S, J] tokens with a bias, no token twice, padded with MAX_INT32.
        bias_values: float32 [S, J].
        allowed: uint32 [S, ceil(V / 32)] bit t % 32 of word t // 32: token t may be generated.
        bad_words: int32 [S, W, N] token sequences, aligned right and padded with -1: the last token is impossible where
            the others were generated just before.
    """

    history: Int32[Array, "S L"]
    bias_ids: Int32[Array, "S J"]
    bias_values: Float32[Array, "S J"]
    allowed: UInt32[Array, "S V32"]
    bad_words: Int32[Array, "S W N"]


def init_rule_params(num_rows: int) -> RuleParams:
    """The parameters of `num_rows` rows without rules."""
    return RuleParams(
        presence_penalty=jnp.zeros(num_rows, jnp.float32),
        frequency_penalty=jnp.zeros(num_rows, jnp.float32),
        repetition_penalty=jnp.ones(num_rows, jnp.float32),
        num_prompt_tokens=jnp.zeros(num_rows, jnp.int32),
        first_stop=jnp.full(num_rows, MAX_INT32, jnp.int32),
        has_bias=jnp.zeros(num_rows, bool),
        has_allowed=jnp.zeros(num_rows, bool),
        has_bad_words=jnp.zeros(num_rows, bool),
    )


def init_rule_tables(num_rows: int, max_model_len: int, vocab_size: int) -> RuleTables:
    """Allocates the tables: about 4 * max_model_len + vocab_size / 8 + 16 Ki bytes for each row."""
    return RuleTables(
        history=jnp.zeros((num_rows, max_model_len), jnp.int32),
        bias_ids=jnp.full((num_rows, MAX_LOGIT_BIASES), MAX_INT32, jnp.int32),
        bias_values=jnp.zeros((num_rows, MAX_LOGIT_BIASES), jnp.float32),
        allowed=jnp.zeros((num_rows, -(-vocab_size // 32)), jnp.uint32),
        bad_words=jnp.full((num_rows, MAX_BAD_SEQUENCES, MAX_BAD_SEQUENCE_TOKENS), -1, jnp.int32),
    )


def row_of_tables(
    tables: RuleTables,
    *,
    token_ids: Sequence[int],
    logit_bias: Sequence[tuple[int, float]] = (),
    allowed_token_ids: Sequence[int] | None = None,
    bad_words: Sequence[Sequence[int]] = (),
) -> RuleTables:
    """One row of tables for `set_rules`, as NumPy arrays without the axis S (host).

    Args:
        tables: for their shapes; nothing is downloaded.
        token_ids: the request's tokens so far, at most L.
        logit_bias: up to J pairs (token id, bias).
        allowed_token_ids: at least one token id below V; None: all are allowed.
        bad_words: up to W sequences of 1 to N token ids.
    """
    row = jax.tree.map(lambda x: np.zeros(x.shape[1:], x.dtype), tables)
    row.history[: len(token_ids)] = token_ids
    row.bias_ids[:] = MAX_INT32
    for i, (token, bias) in enumerate(logit_bias):
        row.bias_ids[i], row.bias_values[i] = token, bias
    if allowed_token_ids is not None:
        tokens = np.asarray(allowed_token_ids)
        np.bitwise_or.at(row.allowed, tokens // 32, np.uint32(1) << (tokens % 32).astype(np.uint32))
    row.bad_words[:] = -1
    for i, word in enumerate(bad_words):
        row.bad_words[i, -len(word) :] = word
    return row


def set_rules(tables: RuleTables, row: Int32[Array, ""], values: RuleTables) -> RuleTables:
    """Writes one row of the tables.

    Args:
        tables: donated by the engine.
        row: int32 [].
        values: of `row_of_tables`.
    """
    return jax.tree.map(lambda table, value: table.at[row].set(value), tables, values)


def push_tokens(
    tables: RuleTables, rows: Int32[Array, " R"], lengths: Int32[Array, " R"], token_ids: Int32[Array, " R"]
) -> RuleTables:
    """Appends a drawn token to the history of each of the rows, which is `lengths` long; rows past the end: nothing."""
    return replace(tables, history=tables.history.at[rows, lengths].set(token_ids, mode="drop"))


def has_penalties(params: RuleParams) -> Array:
    """Bool [R]: rows with a penalty."""
    is_additive = (params.presence_penalty != 0) | (params.frequency_penalty != 0)
    return is_additive | (params.repetition_penalty != 1)


def has_rules(params: RuleParams, num_remaining: Int32[Array, " R"]) -> Array:
    """Bool [R]: rows whose logits `apply_rules` would change.

    Args:
        params: of the R rows.
        num_remaining: tokens that each row may still generate.
    """
    has_tables = params.has_bias | params.has_allowed | params.has_bad_words
    return has_tables | has_penalties(params) | (num_remaining > params.first_stop)


def apply_rules(
    logits: Float32[Array, "R V"],
    params: RuleParams,
    tables: RuleTables,
    *,
    lengths: Int32[Array, " R"],
    num_remaining: Int32[Array, " R"],
    stop_token_ids: Int32[Array, "R K"],
) -> Float32[Array, "R V"]:
    """The logits after the rules: -inf where a token is impossible.

    Order: allowed ids and bias -> bad words -> min_tokens -> penalties. A row that uses none keeps its logits bit for
    bit.

    Args:
        logits: of the R rows, padding columns included.
        params, tables: of the R rows.
        lengths: tokens of each row so far, prompt and generated.
        num_remaining: tokens that each row may still generate.
        stop_token_ids: tokens that end each row, padded with -1.
    """
    row = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]

    def when(chosen: Array, rule, logits: Array) -> Array:
        return lax.cond(jnp.any(chosen), lambda x: jnp.where(chosen[:, None], rule(x), x), lambda x: x, logits)

    def bias(x: Array) -> Array:
        return x.at[row, tables.bias_ids].add(tables.bias_values, mode="drop")

    def allow(x: Array) -> Array:
        token = jnp.arange(x.shape[1], dtype=jnp.int32)
        words = tables.allowed.at[:, token // 32].get(mode="fill", fill_value=0)
        bit = (words >> (token % 32).astype(jnp.uint32)[None]) & 1
        return jnp.where(bit == 1, x, -jnp.inf)

    def forbid_words(x: Array) -> Array:
        return _forbid(x, row, _last_tokens(tables.bad_words, tables.history, params.num_prompt_tokens, lengths))

    def forbid_stop(x: Array) -> Array:
        return _forbid(x, row, stop_token_ids)

    def penalise(x: Array) -> Array:
        return _penalise(x, row, params, tables.history, lengths)

    logits = when(params.has_allowed, allow, logits)
    logits = when(params.has_bias, bias, logits)
    logits = when(params.has_bad_words, forbid_words, logits)
    logits = when(num_remaining > params.first_stop, forbid_stop, logits)
    return when(has_penalties(params), penalise, logits)


def _forbid(logits: Array, row: Array, token_ids: Array) -> Array:
    """-inf at `token_ids [R, n]`, those below 0 excepted."""
    token = jnp.where(token_ids < 0, logits.shape[1], token_ids)
    return logits.at[row, token].set(-jnp.inf, mode="drop")


def _last_tokens(bad_words: Array, history: Array, num_prompt_tokens: Array, lengths: Array) -> Array:
    """The last token `[R, W]` of each bad word whose others were generated just before, else -1."""
    position = lengths[:, None] + jnp.arange(1 - bad_words.shape[2], 0, dtype=jnp.int32)[None]
    tail = jnp.take_along_axis(history, jnp.clip(position, 0, history.shape[1] - 1), axis=1)
    tail = jnp.where(position >= num_prompt_tokens[:, None], tail, -2)  # no token, nor padding
    before, last = bad_words[:, :, :-1], bad_words[:, :, -1]
    return jnp.where(jnp.all((before == -1) | (before == tail[:, None]), axis=2), last, -1)


def _penalise(logits: Array, row: Array, params: RuleParams, history: Array, lengths: Array) -> Array:
    position = jnp.arange(history.shape[1], dtype=jnp.int32)[None]
    is_token = position < lengths[:, None]
    is_output = is_token & (position >= params.num_prompt_tokens[:, None])

    def count(chosen: Array) -> Array:
        return (
            jnp.zeros(logits.shape, jnp.int32).at[row, jnp.where(chosen, history, logits.shape[1])].add(1, mode="drop")
        )

    num_seen, num_generated = count(is_token), count(is_output)
    factor = jnp.where(num_seen > 0, params.repetition_penalty[:, None], 1.0)
    logits = jnp.where(logits > 0, logits / factor, logits * factor)
    logits = logits - params.frequency_penalty[:, None] * num_generated.astype(jnp.float32)
    return logits - params.presence_penalty[:, None] * (num_generated > 0).astype(jnp.float32)
