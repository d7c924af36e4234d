"""The digest chain over full blocks: where the prefix cache looks. What it finds there is verified by content.

raw_i = raw_{i-1} * A + hash(block i) mod 2^32, in two lanes with odd A, so that
raw_i = A^(i+1) * (raw_{-1} + sum_{j<=i} hash(block j) * A^-(j+1)): a whole chain is one cumulative sum, and one more
block is one step. raw_{-1} comes from the chain's root. A weak digest costs hits, never a wrong one.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32, UInt32

LANES = 2
_FACTORS = (0x9E3779B1, 0x85EBCA77)  # odd, so that they have inverses
_KEY_SEED = 0x50A6ED


def _keys(block_size: int) -> np.ndarray:
    """Odd keys [block_size, LANES], one per position in a block: a permuted block has another hash."""
    return np.random.default_rng(_KEY_SEED).integers(2**32, size=(block_size, LANES), dtype=np.uint32) | np.uint32(1)


def mix(x: Array) -> Array:
    """The finaliser of MurmurHash3 (Appleby, public domain): every bit of the uint32 `x` moves every bit."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def block_hashes(token_ids: Int32[Array, "n block"]) -> UInt32[Array, "n lanes"]:
    """A hash of each block's tokens and their order."""
    words = token_ids.astype(jnp.uint32)[:, :, None] * _keys(token_ids.shape[1])[None]
    return mix(jnp.sum(mix(words), axis=1, dtype=jnp.uint32))


def root_digest(roots: Int32[Array, " n"]) -> UInt32[Array, "n lanes"]:
    """What stands before a chain's first block."""
    words = roots.astype(jnp.uint32)[:, None] + jnp.arange(1, LANES + 1, dtype=jnp.uint32)[None]
    return mix(mix(words))


def _powers(count: int, *, inverse: bool) -> np.ndarray:
    """A^(k+1), or its inverse, for k < count: [count, LANES] uint32."""
    bases = [pow(a, -1, 2**32) if inverse else a for a in _FACTORS]
    return np.array([[pow(b, k + 1, 2**32) for b in bases] for k in range(count)], np.uint32).reshape(count, LANES)


def chain_digests(
    before: UInt32[Array, "n lanes"], hashes: UInt32[Array, "n lanes"], start: Int32[Array, " n"]
) -> UInt32[Array, "n lanes"]:
    """The digest after each of n blocks that form one or more chains, one after the other.

    Args:
        before: digest before the first block of the chain that each block belongs to.
        hashes: of the blocks.
        start: int32 [n] index of the first block of each block's chain.
    """
    count = hashes.shape[0]
    place = jnp.arange(count, dtype=jnp.int32) - start
    terms = hashes * jnp.asarray(_powers(count, inverse=True))[place]
    sums = jnp.cumsum(terms, axis=0, dtype=jnp.uint32)
    sums = sums - (sums - terms)[start]
    return jnp.asarray(_powers(count, inverse=False))[place] * (before + sums)


def to_int32(digest: UInt32[Array, "n lanes"]) -> Int32[Array, "n lanes"]:
    """The same bits, as the records store them."""
    return jax.lax.bitcast_convert_type(digest, jnp.int32)


def to_uint32(digest: Int32[Array, "n lanes"]) -> UInt32[Array, "n lanes"]:
    """The inverse of to_int32."""
    return jax.lax.bitcast_convert_type(digest, jnp.uint32)
