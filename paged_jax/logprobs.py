"""Log-probabilities of drawn tokens and of prompt tokens, and of the most likely alternatives.

"raw" is the log-softmax of the model's logits; "processed" that of what the token was drawn from: after the rules of
the request, temperature and filters. Both are float32.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int32

from paged_jax.sampling_params import MAX_LOGPROBS

LogprobsMode = Literal["raw", "processed"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class TokenLogprobs:
    """Log-probabilities of tokens, on the device; the axes ... are [R] or [S, K].

    Attributes:
        raw: float32 [...] of the token itself, by the model.
        processed: float32 [...] of the token itself, by what it was drawn from.
        rank: int32 [...] tokens that are at least as likely as it in the engine's mode, itself included.
        top_ids: int32 [..., MAX_LOGPROBS] the most likely tokens in the engine's mode, the most likely first, in order
            of id where they tie.
        top_logprobs: float32 [..., MAX_LOGPROBS] of these.
    """

    raw: Float32[Array, "*R"]
    processed: Float32[Array, "*R"]
    rank: Int32[Array, "*R"]
    top_ids: Int32[Array, "*R top"]
    top_logprobs: Float32[Array, "*R top"]


@dataclass(frozen=True, kw_only=True)
class Logprob:
    """What is known about one token at one position.

    Attributes:
        logprob: log-probability in the engine's mode.
        rank: 1 for the most likely token.
        decoded_token: text of the token alone; None without a tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


def check_logprobs_mode(mode: Any) -> LogprobsMode:
    """Raises ValueError unless mode is one of LogprobsMode."""
    if mode not in get_args(LogprobsMode):
        raise ValueError(f"logprobs_mode must be one of {get_args(LogprobsMode)}, got {mode!r}")
    return mode


def init_logprobs(*shape: int) -> TokenLogprobs:
    """Zeros for tokens of any shape."""
    top = (*shape, MAX_LOGPROBS)
    return TokenLogprobs(
        raw=jnp.zeros(shape, jnp.float32),
        processed=jnp.zeros(shape, jnp.float32),
        rank=jnp.zeros(shape, jnp.int32),
        top_ids=jnp.zeros(top, jnp.int32),
        top_logprobs=jnp.zeros(top, jnp.float32),
    )


def token_logprobs(
    raw_logits: Float32[Array, "R V"],
    processed_logits: Float32[Array, "R V"],
    token_ids: Int32[Array, " R"],
    *,
    mode: LogprobsMode,
    has_top: Array | bool = True,
) -> TokenLogprobs:
    """Log-probabilities of one token in each row.

    Args:
        raw_logits, processed_logits: -inf where a token is impossible.
        token_ids: ids outside [0, V) get the values of the nearest one.
        mode: static, what ranks the tokens.
        has_top: bool [], False: nobody looks at top_ids and top_logprobs; they are 0.
    """
    # Ranked by logits: distinct ones may have log-probabilities that round to the same float.
    by = raw_logits if mode == "raw" else processed_logits
    chosen = jnp.clip(token_ids, 0, by.shape[1] - 1)[:, None]
    none = init_logprobs(len(token_ids))
    top_ids, top_logprobs = lax.cond(has_top, _most_likely, lambda _: (none.top_ids, none.top_logprobs), by)
    return TokenLogprobs(
        raw=_logprobs(raw_logits, chosen)[:, 0],
        processed=_logprobs(processed_logits, chosen)[:, 0],
        rank=jnp.sum(by >= jnp.take_along_axis(by, chosen, axis=1), axis=1, dtype=jnp.int32),
        top_ids=top_ids,
        top_logprobs=top_logprobs,
    )


def _logprobs(logits: Array, token_ids: Array) -> Array:
    """Log-softmax of `logits [R, V]` at `token_ids [R, n]`."""
    shifted = logits - jnp.max(logits, axis=1, keepdims=True)
    log_sum = jnp.log(jnp.sum(jnp.exp(shifted), axis=1, keepdims=True))
    return jnp.take_along_axis(shifted, token_ids, axis=1) - log_sum


def _most_likely(logits: Array) -> tuple[Array, Array]:
    count = min(MAX_LOGPROBS, logits.shape[1])
    _, ids = lax.top_k(logits, count)
    missing = ((0, 0), (0, MAX_LOGPROBS - count))
    return jnp.pad(ids, missing), jnp.pad(_logprobs(logits, ids), missing, constant_values=-jnp.inf)


def logprobs_of(
    tokens: TokenLogprobs, index: Any, token_id: int, num_top: int, mode: LogprobsMode
) -> dict[int, Logprob]:
    """The entry of one token in vLLM's form: the token itself, then the `num_top` most likely ones (host).

    Args:
        tokens: on the host.
        index: of the token in them.
    """
    own = (tokens.raw if mode == "raw" else tokens.processed)[index]
    entries: list[tuple[Any, Any, Any]] = [(token_id, own, tokens.rank[index])]
    top_ids, top_logprobs = tokens.top_ids[index], tokens.top_logprobs[index]
    entries += zip(top_ids[:num_top], top_logprobs[:num_top], range(1, num_top + 1), strict=True)
    return {int(token): Logprob(logprob=float(value), rank=int(rank)) for token, value, rank in entries}


def with_text(entry: dict[int, Logprob], tokenizer: Any) -> dict[int, Logprob]:
    """The entry with the text of each token alone, if it has none yet (host)."""
    if any(logprob.decoded_token is not None for logprob in entry.values()):
        return entry
    return {
        token: replace(logprob, decoded_token=tokenizer.decode([token], skip_special_tokens=False))
        for token, logprob in entry.items()
    }


def cumulative_logprob(entries: Sequence[dict[int, Logprob]], token_ids: Sequence[int]) -> float:
    """Sum of the log-probabilities of the tokens themselves."""
    return sum(entry[token].logprob for entry, token in zip(entries, token_ids, strict=True))
