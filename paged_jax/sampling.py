"""Token sampling on `[R]` parameter arrays: greedy, temperature, min_p, top_k, top_p; random by (seed, position).

Order of the filters: temperature -> min_p -> top_k -> top_p. All of them keep an upper set of the logits, so that
top_k and top_p are found as one threshold per row, by bisection on the bits of the float instead of a sort.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from paged_jax.sampling_params import GREEDY_TEMPERATURE

_SLACK = 1e-6
_BLOCK = 128  # tokens per block of the two-level draw; divides most vocabularies
_UNITS = 2.0**31  # a row's weights are rounded to integers whose sum is about this
_KEY_MIN = np.int32(-0x7F800001)  # the key of -inf
_KEY_MASK = np.int32(0x7FFFFFFF)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class SamplingState:
    """Sampling parameters of each row; every value may change between calls without a new trace.

    Attributes:
        temperature: `[S]` float32; below 1e-5 (so also 0) the row is greedy.
        top_k: `[S]` int32; keep the k most likely tokens, 0 or less = off.
        top_p: `[S]` float32; keep the smallest set with at least this probability, 1 or more = off.
        min_p: `[S]` float32; keep tokens at least this likely relative to the most likely one, 0 = off.
        seed: `[S, 2]` uint32; threefry key words of the row's seed, see `seed_words`.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    seed: jax.Array


def init_sampling_state(max_num_seqs: int) -> SamplingState:
    """Returns the state of `max_num_seqs` greedy rows with every filter off."""
    return SamplingState(
        temperature=jnp.zeros(max_num_seqs, jnp.float32),
        top_k=jnp.zeros(max_num_seqs, jnp.int32),
        top_p=jnp.ones(max_num_seqs, jnp.float32),
        min_p=jnp.zeros(max_num_seqs, jnp.float32),
        seed=jnp.zeros((max_num_seqs, 2), jnp.uint32),
    )


def seed_words(seed: int) -> np.ndarray:
    """Splits a seed in [0, 2**64) into the two key words `[2]` uint32, high word first (host).

    Raises:
        ValueError: the seed is outside [0, 2**64).
    """
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed must be in [0, 2**64), got {seed}; reduce it modulo 2**64.")
    return np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32)


def sample(
    logits: jax.Array, state: SamplingState, positions: jax.Array, *, vocab_size: int
) -> tuple[jax.Array, jax.Array]:
    """Draws one token for each row; a row's result depends on nothing but that row's logits, parameters and position.

    A row is finite when its largest logit is a finite number: NaN anywhere, +inf, or only -inf make it not finite.

    Args:
        logits: `[R, V']` of any float dtype, V' >= vocab_size; columns from `vocab_size` on are padding.
        state: parameters of the R rows.
        positions: `[R]` int32, position of the token whose successor is drawn; selects the random numbers.
        vocab_size: number of real tokens (static).

    Returns:
        token_ids `[R]` int32 in [0, vocab_size), 0 for a row that is not finite, and is_finite `[R]` bool.

    Raises:
        ValueError: `vocab_size` is not in [1, V'].
    """
    draws = draw(mask_padding(logits.astype(jnp.float32), vocab_size), state, positions)
    return draws.token_ids, draws.is_finite


class Draws(NamedTuple):
    """What `draw` returns: token_ids and is_finite as of `sample`, threshold `[R]` float32: logits below it were not
    drawn from, -inf for greedy rows."""

    token_ids: jax.Array
    is_finite: jax.Array
    threshold: jax.Array


def draw(logits: jax.Array, state: SamplingState, positions: jax.Array) -> Draws:
    """`sample` for logits `[R, V]` float32 without padding."""
    row_max, is_finite = row_maximum(logits)
    is_random = (state.temperature >= GREEDY_TEMPERATURE) & is_finite
    greedy = jnp.where(is_finite, _first_index_of(logits, row_max), 0), jnp.full_like(row_max, -jnp.inf)

    def random() -> tuple[jax.Array, jax.Array]:
        drawn = _draw_random(logits, row_max, is_random, state, positions)
        return jax.tree.map(lambda d, g: jnp.where(is_random, d, g), drawn, greedy)

    token_ids, threshold = lax.cond(jnp.any(is_random), random, lambda: greedy)
    return Draws(token_ids, is_finite, threshold)


def row_maximum(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The largest of each row `[R]`, 0 for a row that is not finite, and is_finite `[R]` (see `sample`)."""
    # XLA:CPU's maximum may lose a NaN; +inf cannot get lost.
    row_max = jnp.max(jnp.where(jnp.isnan(logits), jnp.inf, logits), axis=1)
    is_finite = jnp.isfinite(row_max)
    return jnp.where(is_finite, row_max, 0.0), is_finite


def filtered_logits(logits: jax.Array, state: SamplingState, threshold: jax.Array) -> jax.Array:
    """Logits `[R, V]` float32 whose softmax random rows draw from: tempered, -inf where a filter drops the token.

    They are shifted so that each row's largest is 0. Greedy rows keep all tokens, at temperature 1, as in vLLM.

    Args:
        logits, state: as for `draw`. threshold: from it.
    """
    temperature = jnp.where(state.temperature >= GREEDY_TEMPERATURE, state.temperature, 1.0)
    scaled = (logits - row_maximum(logits)[0][:, None]) / temperature[:, None]
    return jnp.where(logits >= threshold[:, None], scaled, -jnp.inf)


def mask_padding(logits: jax.Array, vocab_size: int) -> jax.Array:
    """-inf in the columns from `vocab_size` on; a ValueError unless it is in [1, V']."""
    if not 1 <= vocab_size <= logits.shape[1]:
        raise ValueError(
            f"vocab_size must be in [1, {logits.shape[1]}], the number of logits of a row, got {vocab_size}; "
            "pass the tokenizer's vocabulary size, without padding."
        )
    if logits.shape[1] == vocab_size:
        return logits
    token = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    return jnp.where(token < vocab_size, logits, -jnp.inf)


def _first_index_of(logits: jax.Array, value: jax.Array) -> jax.Array:
    """First column equal to `value [R]`: with the row's maximum an argmax, several times faster than it on a CPU."""
    token = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    return jnp.min(jnp.where(logits == value[:, None], token, logits.shape[1]), axis=1)


def _draw_random(
    logits: jax.Array, row_max: jax.Array, is_random: jax.Array, state: SamplingState, positions: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Draws a token `[R]` among those that the filters keep, using two random words a row; and their threshold.

    First a block of the vocabulary, then a token of that block: no cumulative sum over the vocabulary, no stored
    probabilities, and each choice has a whole random word for itself.
    """
    num_rows, num_tokens = logits.shape
    logits = jnp.pad(logits, ((0, 0), (0, -num_tokens % _BLOCK)), constant_values=-jnp.inf)
    temperature = jnp.where(is_random, state.temperature, 1.0)
    threshold = filter_threshold(logits, row_max, temperature, is_random, state)
    bits = _random_words(state.seed, positions)

    weights = _weights(logits, row_max, temperature, threshold)
    block = _pick(jnp.sum(weights.reshape(num_rows, -1, _BLOCK), axis=2), bits[:, 0])
    block_logits = jnp.take_along_axis(logits.reshape(num_rows, -1, _BLOCK), block[:, None, None], axis=1)[:, 0]
    return block * _BLOCK + _pick(_weights(block_logits, row_max, temperature, threshold), bits[:, 1]), threshold


def _random_words(seed: jax.Array, positions: jax.Array) -> jax.Array:
    """Two words `[R, 2]` uint32 that depend on nothing but the row's seed and position.

    They are the words of the folded key itself: one threefry block, used for nothing else.
    """
    keys = jax.random.wrap_key_data(seed, impl="threefry2x32")
    return jax.random.key_data(jax.vmap(jax.random.fold_in)(keys, positions))


def _weights(logits: jax.Array, row_max: jax.Array, temperature: jax.Array, threshold: jax.Array) -> jax.Array:
    """Probability relative to the row's most likely token, 0 below the threshold; `[R, n]` float32."""
    scaled = (logits - row_max[:, None]) * (1.0 / temperature)[:, None]
    return jnp.where(logits >= threshold[:, None], jnp.exp(scaled), 0.0)


def filter_threshold(
    logits: jax.Array, row_max: jax.Array, temperature: jax.Array, is_random: jax.Array, state: SamplingState
) -> jax.Array:
    """The threshold `[R]` float32 of all filters: tokens with a logit of at least this are kept, so ties are too.

    min_p and top_p compare with a slack of 1e-6 (relative) in favour of keeping a token: a float32 sum over the
    vocabulary is no more exact, and probabilities of exactly .5 and .25 must satisfy top_p = .75.
    """
    threshold = row_max + temperature * jnp.log(state.min_p * (1.0 - _SLACK))

    def with_top_k():
        return jnp.where(has_top_k, jnp.maximum(threshold, _top_k_threshold(logits, row_max, state.top_k)), threshold)

    has_top_k = is_random & (state.top_k > 0) & (state.top_k < logits.shape[1])
    threshold = lax.cond(jnp.any(has_top_k), with_top_k, lambda: threshold)

    def with_top_p():
        weights = _weights(logits, row_max, temperature, threshold)
        return jnp.where(has_top_p, _top_p_threshold(logits, row_max, weights, state.top_p), threshold)

    has_top_p = is_random & (state.top_p < 1.0)
    return lax.cond(jnp.any(has_top_p), with_top_p, lambda: threshold)


def _top_k_threshold(logits: jax.Array, row_max: jax.Array, top_k: jax.Array) -> jax.Array:
    """The k-th largest logit `[R]`."""

    def has_k(threshold):
        return jnp.sum(logits >= threshold[:, None], axis=1, dtype=jnp.int32) >= top_k

    return _largest_threshold(has_k, row_max)


def _top_p_threshold(logits: jax.Array, row_max: jax.Array, weights: jax.Array, top_p: jax.Array) -> jax.Array:
    """The largest logit `[R]` such that it and all larger ones hold the share `top_p` of `weights [R, V]`."""
    enough = top_p * (1.0 - _SLACK) * jnp.sum(weights, axis=1)

    def has_p(threshold):
        return jnp.sum(jnp.where(logits >= threshold[:, None], weights, 0.0), axis=1) >= enough

    return _largest_threshold(has_p, row_max)


def _largest_threshold(is_enough: Callable[[jax.Array], jax.Array], row_max: jax.Array) -> jax.Array:
    """Largest float32 `[R]`, at most `row_max`, for which the monotone `is_enough([R]) -> [R]` holds."""
    first, last = jnp.full_like(row_max, _KEY_MIN, jnp.int32), _key_of_float(row_max)
    return _float_of_key(_bisect(lambda key: is_enough(_float_of_key(key)), first, last + 1, num_steps=32))


def _bisect(holds: Callable[[jax.Array], jax.Array], low: jax.Array, high: jax.Array, *, num_steps: int) -> jax.Array:
    """Largest integer `[R]` in [low, high) for which `holds`: true for `low`, and never true again once false."""

    def halve(_, bracket):
        low, high = bracket
        middle = (low & high) + ((low ^ high) >> 1)  # the mean, rounded down, without overflow
        is_true = holds(middle)
        return jnp.where(is_true, middle, low), jnp.where(is_true, high, middle)

    def search(low: jax.Array, high: jax.Array, *, unroll: bool) -> jax.Array:
        return lax.fori_loop(0, num_steps, halve, (low, high), unroll=unroll)[0]

    # A loop inside a conditional keeps XLA:GPU from making the whole decode step one command buffer.
    return lax.platform_dependent(low, high, cpu=partial(search, unroll=False), default=partial(search, unroll=True))


def _key_of_float(x: jax.Array) -> jax.Array:
    """Maps float32 to int32 with the same order: negative floats have descending bits, hence the flip."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return bits ^ ((bits >> 31) & _KEY_MASK)


def _float_of_key(key: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(key ^ ((key >> 31) & _KEY_MASK), jnp.float32)


def _pick(weights: jax.Array, bits: jax.Array) -> jax.Array:
    """Draws a column of `weights [R, n]` with one random word `bits [R]`, by the inverse of the cumulative sum.

    Weights are rounded to integers of about 2**-31 of their sum. The cumulative sum is then exact: a float32 sum near 1
    would swallow a probability of 1e-7. A weight of zero owns no integer and is never drawn.
    """
    scale = _UNITS / jnp.sum(weights, axis=1)
    units = (weights * scale[:, None] + 0.5).astype(jnp.uint32)
    target = lax.mulhi(bits, jnp.sum(units, axis=1, dtype=jnp.uint32))  # uniform in [0, number of units)
    column = lax.broadcasted_iota(jnp.int32, units.shape, 1)

    def starts_before(index):
        preceding = jnp.where(column < index[:, None], units, np.uint32(0))
        return jnp.sum(preceding, axis=1, dtype=jnp.uint32) <= target

    first = jnp.zeros_like(target, jnp.int32)
    num_columns = weights.shape[1]
    return _bisect(starts_before, first, first + num_columns, num_steps=num_columns.bit_length())
