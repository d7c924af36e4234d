"""From logits to the next token of each row: rules, draw, log-probabilities; what nobody asks for is not computed."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from paged_jax.logprobs import LogprobsMode, TokenLogprobs, init_logprobs, token_logprobs
from paged_jax.sampling import draw, filtered_logits, mask_padding, row_maximum
from paged_jax.state import RowParams
from paged_jax.token_rules import RuleTables, apply_rules, has_rules


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class NextTokens:
    """One token for each of R rows.

    Attributes:
        token_ids: int32 [R].
        is_finite: bool [R] False: the model's logits were not finite (see `sample`), the token is 0.
        has_token: bool [R] False: the logits were finite, but the rules left no token; it is 0.
        wants_logprobs: bool [] whether a row asks for log-probabilities; if not, logprobs are 0.
        logprobs: [R] of the tokens; meaningful for rows that ask for them.
    """

    token_ids: Int32[Array, " R"]
    is_finite: Bool[Array, " R"]
    has_token: Bool[Array, " R"]
    wants_logprobs: Bool[Array, ""]
    logprobs: TokenLogprobs


def next_tokens(
    logits: Float[Array, "R V"],
    rows: Int32[Array, " R"],
    params: RowParams,
    tables: RuleTables | None,
    *,
    lengths: Int32[Array, " R"],
    takes_part: Bool[Array, " R"],
    vocab_size: int,
    logprobs_mode: LogprobsMode,
) -> NextTokens:
    """Draws the next token of each row; it depends on nothing but that row.

    Args:
        logits: columns from `vocab_size` on are padding.
        rows: rows of params and tables; past the end = padding.
        params: of all rows.
        tables: of all rows; None: no row has rules that need them, and none is looked at.
        lengths: tokens of each row so far, prompt and generated; also selects the random numbers.
        takes_part: rows whose token is wanted; the options of others cost nothing.
        vocab_size: static.
        logprobs_mode: static, what ranks the most likely tokens.
    """

    def take(tree: Any) -> Any:
        return jax.tree.map(lambda x: x.at[rows].get(mode="clip"), tree)

    sampling = take(params.sampling)
    logits = mask_padding(logits.astype(jnp.float32), vocab_size)
    obeys = take(has_rules(params.rules, params.num_remaining)) & takes_part & (tables is not None)

    def obey(logits: Array) -> tuple[Array, Array]:
        allowed = apply_rules(
            logits,
            take(params.rules),
            take(tables),
            lengths=lengths,
            num_remaining=take(params.num_remaining),
            stop_token_ids=take(params.stop_token_ids),
        )
        return allowed, row_maximum(logits)[1]

    allowed, is_finite = logits, obeys
    if tables is not None:
        allowed, is_finite = lax.cond(jnp.any(obeys), obey, lambda logits: (logits, obeys), logits)
    draws = draw(allowed, sampling, lengths)
    is_finite = jnp.where(obeys, is_finite, draws.is_finite)

    num_logprobs = jnp.where(takes_part, take(params.num_logprobs), -1)
    wants_logprobs = jnp.any(num_logprobs >= 0)

    def with_logprobs() -> TokenLogprobs:
        processed = filtered_logits(allowed, sampling, draws.threshold)
        has_top = jnp.any(num_logprobs > 0)
        return token_logprobs(logits, processed, draws.token_ids, mode=logprobs_mode, has_top=has_top)

    return NextTokens(
        token_ids=jnp.where(is_finite, draws.token_ids, 0),
        is_finite=is_finite,
        has_token=draws.is_finite | ~is_finite,
        wants_logprobs=wants_logprobs,
        logprobs=lax.cond(wants_logprobs, with_logprobs, lambda: init_logprobs(len(rows))),
    )
