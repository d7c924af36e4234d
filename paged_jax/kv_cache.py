"""KVCache: the paged K and V arrays, their storage format, and the only functions that write them."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, Shaped

from paged_jax._typing import typed
from paged_jax.config import CacheConfig
from paged_jax.dispatch import default_platform, require_mosaic, wants_mosaic


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class LayerCache:
    """One layer's view of the cache: what `attend` takes and returns.

    Attributes:
        k, v: [num_blocks, block_size, num_kv_heads, head_dim]. A uint16 array holds the bits of bfloat16 values.
        group: static, the cache group whose block table and slots this layer uses.
        sliding_window: static, tokens that the group keeps for a row at least; None: all.
    """

    k: Shaped[Array, "B block K H"]
    v: Shaped[Array, "B block K H"]
    group: int = field(metadata={"static": True})
    sliding_window: int | None = field(default=None, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class KVCache:
    """All layers' K and V.

    Attributes:
        k, v: one array per layer of a group, each [num_blocks, block_size, num_kv_heads, head_dim]; array j belongs to
            the j-th layer of every group.
        layer_map: static, (group, array) of each layer.
        sliding_windows: static, per group the window of its layers in tokens, None = full attention.
    """

    k: tuple[Shaped[Array, "B block K H"], ...]
    v: tuple[Shaped[Array, "B block K H"], ...]
    layer_map: tuple[tuple[int, int], ...] = field(metadata={"static": True})
    sliding_windows: tuple[int | None, ...] = field(metadata={"static": True})

    @property
    def num_layers(self) -> int:
        """Layers that own K/V."""
        return len(self.layer_map)

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.k[0].shape[1]

    def layer(self, index: int) -> LayerCache:
        """The view of layer `index`; give the changed view back with `with_layer` before you take the next one."""
        if not 0 <= index < self.num_layers:
            raise ValueError(
                f"layer {index} of a cache with {self.num_layers} layers; CacheConfig.num_layers must count the model's"
            )
        group, array = self.layer_map[index]
        window = self.sliding_windows[group]
        return LayerCache(k=self.k[array], v=self.v[array], group=group, sliding_window=window)

    def with_layer(self, index: int, layer: LayerCache) -> "KVCache":
        """This cache with layer `index` replaced by `layer`."""
        _, array = self.layer_map[index]
        return replace(self, k=_set(self.k, array, layer.k), v=_set(self.v, array, layer.v))


def _set(arrays: Sequence[Array], index: int, value: Array) -> tuple[Array, ...]:
    return (*arrays[:index], value, *arrays[index + 1 :])


def storage_dtype(dtype: str) -> jnp.dtype:
    """The dtype of the arrays that hold K and V of `dtype` on the default backend.

    XLA:CPU never updates bfloat16 arrays in place (64 tokens into a 64 MiB pool: 85 ms, against 8 - 36 us for uint16),
    so on a CPU the bits of bfloat16 values are kept as uint16.
    """
    if dtype == "bfloat16" and default_platform() == "cpu":
        return jnp.dtype(jnp.uint16)
    return jnp.dtype(dtype)


def init_cache(config: CacheConfig) -> KVCache:
    """Allocates all K and V, zero-filled: config.num_blocks * config.bytes_per_block bytes."""
    shape = (config.num_blocks, config.block_size, config.num_kv_heads, config.head_dim)
    dtype = storage_dtype(config.dtype)
    arrays = [jnp.zeros(shape, dtype) for _ in range(2 * config.num_arrays)]
    k, v = tuple(arrays[::2]), tuple(arrays[1::2])
    return KVCache(k=k, v=v, layer_map=config.layer_map, sliding_windows=config.sliding_windows)


def to_storage(values: Array, dtype: jnp.dtype) -> Array:
    """Converts K or V values to what an array of `dtype` stores (uint16: the bits of bfloat16)."""
    if dtype == jnp.uint16:
        return jax.lax.bitcast_convert_type(values.astype(jnp.bfloat16), jnp.uint16)
    return values.astype(dtype)


@typed
def write_kv(
    layer: LayerCache,
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    slot_mapping: Int32[Array, " T"],
) -> LayerCache:
    """Stores each token's K and V at its slot, in place where the layer's arrays are donated or loop-carried.

    By XLA's scatter on GPUs too: it takes the rotary embedding and the slices of a joint projection along, so that a
    layer has one launch less than with `pallas_kernels.move_kv.write_kv`, which needs dense K and V.

    Args:
        layer: may be donated.
        k, v: any float dtype; converted to the storage format.
        slot_mapping: int32 [T], block * block_size + offset; slots <= 0 are padding and go to the null block. The
            indices stay (block, offset): no element offset is ever formed in int32.
    """
    if k.shape[1:] != layer.k.shape[2:]:
        raise ValueError(
            f"write_kv(): k and v have (num_kv_heads, head_dim) = {k.shape[1:]}, the cache has {layer.k.shape[2:]}; "
            "make CacheConfig agree with the model"
        )
    k, v = to_storage(k, layer.k.dtype), to_storage(v, layer.v.dtype)
    slot = jnp.maximum(slot_mapping, 0)  # a negative index would wrap to the last block
    block_size = layer.k.shape[1]
    block, offset = slot // block_size, slot % block_size
    return replace(layer, k=layer.k.at[block, offset].set(k), v=layer.v.at[block, offset].set(v))


@typed
def copy_blocks(
    cache: KVCache,
    src: Int32[Array, " n"],
    dst: Int32[Array, " n"],
    *,
    are_disjoint: bool = False,
    implementation: str | None = None,
) -> KVCache:
    """Copies block src[i] to block dst[i] in every array, as if all copies happened at once.

    Sources are read before anything is written, so a destination may be another pair's source (1 -> 2 with 2 -> 3, or
    an exchange). Pairs of null blocks are padding. Destinations must differ.

    Args:
        are_disjoint: the caller's promise that no destination is another pair's source, as in copy-on-write. Lets a
            kernel copy in place, in one launch for K and V of a layer.
        implementation: of attention: "mosaic_gpu", or None on a GPU, takes the kernel where it can.
    """
    if are_disjoint and wants_mosaic(implementation):
        with contextlib.suppress(NotImplementedError):
            require_mosaic()
            from pallas_kernels import move_kv  # it takes long to import

            pairs = [move_kv.copy_blocks(k, v, src, dst) for k, v in zip(cache.k, cache.v, strict=True)]
            return replace(cache, k=tuple(k for k, _ in pairs), v=tuple(v for _, v in pairs))

    def copied(arrays: tuple[Array, ...]) -> tuple[Array, ...]:
        return tuple(a.at[dst].set(a[src]) for a in arrays)

    return replace(cache, k=copied(cache.k), v=copied(cache.v))


def read_blocks(cache: KVCache, block_ids: Int32[Array, " n"]) -> tuple[Shaped[Array, "n block K H"], ...]:
    """The content of blocks: for each K array, then for each V array, [n, block_size, num_kv_heads, head_dim]."""
    return tuple(array[block_ids] for array in (*cache.k, *cache.v))


def write_blocks(
    cache: KVCache, block_ids: Int32[Array, " n"], blocks: tuple[Shaped[Array, "n block K H"], ...]
) -> KVCache:
    """Writes what `read_blocks` gave into these blocks; ids differ, but for null blocks, which are padding."""
    num_arrays = len(cache.k)
    written = [a.at[block_ids].set(b) for a, b in zip((*cache.k, *cache.v), blocks, strict=True)]
    return replace(cache, k=tuple(written[:num_arrays]), v=tuple(written[num_arrays:]))
