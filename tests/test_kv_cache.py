"""KVCache: where writes and copies go."""

import jax.numpy as jnp
import numpy as np
import pytest
from doubles import cache_config

from paged_jax import copy_blocks, init_cache, write_kv


def ones(num_tokens):
    return jnp.ones((num_tokens, 2, 8))


@pytest.mark.parametrize("slot", [-1, -5, 0])
def test_write_kv_padding_slots_reach_no_block_but_the_null_block(slot):
    layer = write_kv(init_cache(cache_config(4)).layer(0), ones(1), ones(1), jnp.array([slot], jnp.int32))
    assert not np.asarray(layer.k)[1:].any()
    assert not np.asarray(layer.v)[1:].any()


def test_write_kv_stores_each_token_at_its_slot_only():
    layer = write_kv(init_cache(cache_config(4)).layer(0), ones(2), 2 * ones(2), jnp.array([7, 16], jnp.int32))
    written = np.asarray(layer.k)[:, :, 0, 0]
    assert np.argwhere(written).tolist() == [[1, 3], [4, 0]]
    np.testing.assert_array_equal(np.asarray(layer.v), 2 * np.asarray(layer.k))


def test_copy_blocks_chained_and_exchanged_pairs_happen_at_once():
    cache = init_cache(cache_config(6))
    layer = cache.layer(0)
    numbered = jnp.broadcast_to(jnp.arange(7.0)[:, None, None, None], layer.k.shape)
    cache = cache.with_layer(0, type(layer)(k=numbered, v=-numbered, group=0))
    copied = copy_blocks(cache, jnp.array([1, 2, 4, 5, 0], jnp.int32), jnp.array([2, 3, 5, 4, 0], jnp.int32))
    assert np.asarray(copied.k[0])[:, 0, 0, 0].tolist() == [0, 1, 1, 2, 5, 4, 6]
    assert np.asarray(copied.v[0])[:, 0, 0, 0].tolist() == [0, -1, -1, -2, -5, -4, -6]


def test_layer_beyond_the_cache_is_refused_with_the_remedy():
    with pytest.raises(ValueError, match="num_layers"):
        init_cache(cache_config(4)).layer(2)
