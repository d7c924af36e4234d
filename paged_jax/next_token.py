"""From logits to the next token of each row: rules, draw, log-probabilities; what nobody asks for is not computed."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from paged_jax.logprobs import LogprobsMode, TokenLogprobs, init_logprobs, token_logprobs
from paged_jax.sampling import SamplingState, draw, filtered_logits, mask_padding, row_maximum
from paged_jax.token_rules import RuleParams, RuleTables, apply_rules, has_rules


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class NextTokens:
    """One token for each of R rows.

    Attributes:
        token_ids: int32 [R].
        is_finite: bool [R] False: the model's logits were not finite (see `sample`), the token is 0.
        has_token: bool [R] False: the logits were finite, but the rules left no token; it is 0.
        logprobs: [R] of rows that ask for them; others hold anything.
    """

    token_ids: Int32[Array, " R"]
    is_finite: Bool[Array, " R"]
    has_token: Bool[Array, " R"]
    logprobs: TokenLogprobs


def next_tokens(
    logits: Float[Array, "R V"],
    sampling: SamplingState,
    rules: RuleParams,
    tables: RuleTables,
    rows: Int32[Array, " R"],
    *,
    lengths: Int32[Array, " R"],
    num_remaining: Int32[Array, " R"],
    stop_token_ids: Int32[Array, "R K"],
    num_logprobs: Int32[Array, " R"],
    takes_part: Bool[Array, " R"],
    vocab_size: int,
    logprobs_mode: LogprobsMode,
) -> NextTokens:
    """Draws the next token of each row; it depends on nothing but that row.

    Args:
        logits: columns from `vocab_size` on are padding.
        sampling, rules: parameters of the R rows.
        tables: of all rows of the state.
        rows: rows of the tables; past the end = padding.
        lengths: tokens of each row so far, prompt and generated; also selects the random numbers.
        num_remaining: tokens that each row may still generate.
        stop_token_ids: tokens that end each row, padded with -1.
        num_logprobs: most likely tokens that each row wants to know, -1 = no log-probabilities at all.
        takes_part: rows whose token is wanted; what others hold costs nothing.
        vocab_size: static.
        logprobs_mode: static, what ranks the most likely tokens.
    """
    raw = mask_padding(logits.astype(jnp.float32), vocab_size)
    obeys = takes_part & has_rules(rules, num_remaining)

    def obey(raw: Array) -> tuple[Array, Array]:
        given = {"lengths": lengths, "num_remaining": num_remaining, "stop_token_ids": stop_token_ids}
        return apply_rules(raw, rules, tables, rows, **given), row_maximum(raw)[1]

    allowed, model_is_finite = lax.cond(jnp.any(obeys), obey, lambda raw: (raw, obeys), raw)
    draws = draw(allowed, sampling, lengths)
    is_finite = jnp.where(obeys, model_is_finite, draws.is_finite)

    def with_logprobs() -> TokenLogprobs:
        processed = filtered_logits(allowed, sampling, draws.threshold)
        has_top = jnp.any(takes_part & (num_logprobs > 0))
        return token_logprobs(raw, processed, draws.token_ids, mode=logprobs_mode, has_top=has_top)

    wants_logprobs = jnp.any(takes_part & (num_logprobs >= 0))
    return NextTokens(
        token_ids=jnp.where(is_finite, draws.token_ids, 0),
        is_finite=is_finite,
        has_token=draws.is_finite | ~is_finite,
        logprobs=lax.cond(wants_logprobs, with_logprobs, lambda: init_logprobs(len(rows))),
    )
