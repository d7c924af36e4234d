"""KVCache: the paged K and V arrays, their storage format, and the only functions that write them."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32, Shaped

from paged_jax._typing import typed
from paged_jax.block_pool import NULL_BLOCK
from paged_jax.config import SCALED_CACHE_DTYPES, CacheConfig
from paged_jax.dispatch import default_platform, require_mosaic, wants_mosaic

#: Formats whose bits are kept as integers on a CPU. XLA:CPU never updates 8-bit floats in place (64 tokens into a pool
#: of 64 MiB: 0.2 - 1 s with JAX 0.12, against 8 us for uint8), nor, before JAX 0.12, bfloat16.
_BITS_ON_CPU = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}
_FORMATS_OF_BITS = {"uint16": ("bfloat16",), "uint8": ("float8_e4m3fn", "float8_e5m2")}


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class LayerCache:
    """One layer's view of the cache: what `attend` takes and returns.

    Attributes:
        k, v: [num_blocks, block_size, num_kv_heads, head_dim], with the kernel's block size. A uint16 array holds the
            bits of bfloat16 values, a uint8 array those of 8-bit floats.
        k_scale, v_scale: float32 [num_blocks, num_kv_heads, block_size]: a value is the stored number times the scale
            of its slot and head. None: the format has no scales.
        group: static, the cache group whose block table and slots this layer uses.
        sliding_window: static, tokens that the group keeps for a row at least; None: all.
        dtype: static, the storage format, one of CACHE_DTYPES. None: the arrays' own dtype (uint16: bfloat16).
    """

    k: Shaped[Array, "B block K H"]
    v: Shaped[Array, "B block K H"]
    k_scale: Float32[Array, "B K block"] | None = None
    v_scale: Float32[Array, "B K block"] | None = None
    group: int = field(metadata={"static": True})
    sliding_window: int | None = field(default=None, metadata={"static": True})
    dtype: str | None = field(default=None, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class KVCache:
    """All layers' K and V.

    The arrays are cut into kernel blocks: block b of the block manager is the kernel blocks b * r ... b * r + r - 1 of
    every array, r = kernel_blocks_per_block. A slot has the same number in both.

    Attributes:
        k, v: one array per layer of a group, each [num_blocks * r, kernel_block_size, num_kv_heads, head_dim]; array j
            belongs to the j-th layer of every group.
        k_scale, v_scale: for 8-bit formats, one array for each of k and v, float32
            [num_blocks * r, num_kv_heads, kernel_block_size]; else None.
        layer_map: static, (group, array) of each layer.
        sliding_windows: static, per group the window of its layers in tokens, None = full attention.
        kernel_blocks_per_block: static, r.
        dtype: static, the storage format, as in LayerCache.
    """

    k: tuple[Shaped[Array, "B block K H"], ...]
    v: tuple[Shaped[Array, "B block K H"], ...]
    k_scale: tuple[Float32[Array, "B K block"], ...] | None = None
    v_scale: tuple[Float32[Array, "B K block"], ...] | None = None
    layer_map: tuple[tuple[int, int], ...] = field(metadata={"static": True})
    sliding_windows: tuple[int | None, ...] = field(metadata={"static": True})
    kernel_blocks_per_block: int = field(default=1, metadata={"static": True})
    dtype: str | None = field(default=None, metadata={"static": True})

    @property
    def num_layers(self) -> int:
        """Layers that own K/V."""
        return len(self.layer_map)

    @property
    def kernel_block_size(self) -> int:
        """Tokens per block of the arrays."""
        return self.k[0].shape[1]

    @property
    def block_size(self) -> int:
        """Tokens per block of the block manager."""
        return self.kernel_block_size * self.kernel_blocks_per_block

    @property
    def arrays(self) -> tuple[Array, ...]:
        """All K arrays, all V arrays, then the scales of each, if there are any."""
        return (*self.k, *self.v, *(self.k_scale or ()), *(self.v_scale or ()))

    def with_arrays(self, arrays: Sequence[Array]) -> "KVCache":
        """This cache with other `arrays`, in their order."""
        n = len(self.k)
        parts = [tuple(arrays[i : i + n]) for i in range(0, len(arrays), n)]
        names = ("k", "v", "k_scale", "v_scale")[: len(parts)]
        return replace(self, **dict(zip(names, parts, strict=True)))

    def layer(self, index: int) -> LayerCache:
        """The view of layer `index`; give the changed view back with `with_layer` before you take the next one."""
        if not 0 <= index < self.num_layers:
            raise ValueError(
                f"layer {index} of a cache with {self.num_layers} layers; CacheConfig.num_layers must count the model's"
            )
        group, array = self.layer_map[index]
        return LayerCache(
            k=self.k[array],
            v=self.v[array],
            k_scale=None if self.k_scale is None else self.k_scale[array],
            v_scale=None if self.v_scale is None else self.v_scale[array],
            group=group,
            sliding_window=self.sliding_windows[group],
            dtype=self.dtype,
        )

    def with_layer(self, index: int, layer: LayerCache) -> "KVCache":
        """This cache with layer `index` replaced by `layer`."""
        _, array = self.layer_map[index]
        return replace(
            self,
            k=_set(self.k, array, layer.k),
            v=_set(self.v, array, layer.v),
            k_scale=self.k_scale and _set(self.k_scale, array, layer.k_scale),
            v_scale=self.v_scale and _set(self.v_scale, array, layer.v_scale),
        )


def _set(arrays: Sequence[Array], index: int, value: Array | None) -> tuple[Array, ...]:
    if value is None:
        raise ValueError("with_layer(): the layer lacks the scales that the cache has; give back what layer() gave")
    return (*arrays[:index], value, *arrays[index + 1 :])


def storage_dtype(dtype: str) -> jnp.dtype:
    """The dtype of the arrays that hold K and V of format `dtype` on the default backend."""
    return jnp.dtype(_BITS_ON_CPU.get(dtype, dtype) if default_platform() == "cpu" else dtype)


def storage_format(array_dtype: jnp.dtype, dtype: str | None) -> str:
    """The storage format, one of CACHE_DTYPES, of arrays of `array_dtype` of which `dtype` is said.

    Raises:
        ValueError: they contradict each other, or it remains open which 8-bit float a uint8 array holds.
    """
    formats = _FORMATS_OF_BITS.get(array_dtype.name, (array_dtype.name,))
    if dtype is not None and dtype in formats:
        return dtype
    if dtype is None and len(formats) == 1:
        return formats[0]
    raise ValueError(
        f"arrays of {array_dtype} hold {' or '.join(formats)}, and the storage format is said to be {dtype!r}; pass "
        "the one that was written"
    )


def init_cache(config: CacheConfig) -> KVCache:
    """Allocates all K and V, zero-filled: config.num_blocks * config.bytes_per_block bytes. Scales are 1."""
    ratio = config.kernel_blocks_per_block
    shape = (config.num_blocks * ratio, config.block_size // ratio, config.num_kv_heads, config.head_dim)
    scale_shape = (shape[0], shape[2], shape[1])
    dtype = storage_dtype(config.dtype)

    def arrays() -> tuple[Array, ...]:
        return tuple(jnp.zeros(shape, dtype) for _ in range(config.num_arrays))

    def scales() -> tuple[Array, ...] | None:
        return (
            tuple(jnp.ones(scale_shape, jnp.float32) for _ in range(config.num_arrays)) if config.has_scales else None
        )

    return KVCache(
        k=arrays(),
        v=arrays(),
        k_scale=scales(),
        v_scale=scales(),
        layer_map=config.layer_map,
        sliding_windows=config.sliding_windows,
        kernel_blocks_per_block=ratio,
        dtype=config.dtype,
    )


def kernel_block_ids(block_ids: Array, kernel_blocks_per_block: int) -> Array:
    """The kernel blocks of blocks: int32 [..., n] -> [..., n * kernel_blocks_per_block]; those of null are null."""
    if kernel_blocks_per_block == 1:
        return block_ids
    first = block_ids[..., None] * kernel_blocks_per_block
    part = jnp.arange(kernel_blocks_per_block, dtype=jnp.int32)
    ids = jnp.where(first == NULL_BLOCK, NULL_BLOCK, first + jnp.expand_dims(part, range(block_ids.ndim)))
    return ids.reshape(*block_ids.shape[:-1], -1)


def to_storage(values: Array, array_dtype: jnp.dtype, dtype: str) -> Array:
    """Converts numbers to what an array of `array_dtype` stores of format `dtype`: rounded half to even."""
    if dtype == "int8":
        values = jnp.clip(jnp.round(values), -127, 127)
    values = values.astype(dtype)
    return values if array_dtype == values.dtype else jax.lax.bitcast_convert_type(values, array_dtype)


def quantise(values: Float[Array, "... H"], dtype: str) -> tuple[Array, Float32[Array, "..."]]:
    """Numbers of an 8-bit format and their scales: values[..., h] is about numbers[..., h] * scales[...].

    The largest magnitude of a row becomes the largest of the format (127, 448 or 57344: the formats are used
    symmetrically, so that int8 never holds -128). A row of zeros gets scale 1. A row that is not finite gets scale
    NaN, so that whatever is computed with it is NaN.

    Returns:
        (numbers float32 [..., H], not yet rounded; scales float32 [...]).
    """
    limit = 127.0 if dtype == "int8" else float(jnp.finfo(dtype).max)
    values = values.astype(jnp.float32)
    largest = jnp.max(jnp.abs(values), axis=-1)
    smallest_scale = float(jnp.finfo(jnp.float32).tiny)  # below, scales would be subnormal or zero
    scale = jnp.where(largest == 0, 1.0, jnp.maximum(largest / limit, smallest_scale))
    is_finite = jnp.isfinite(scale)
    numbers = jnp.where(is_finite[..., None], values / scale[..., None], 0.0)
    return numbers, jnp.where(is_finite, scale, jnp.nan)


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
        k, v: any float dtype; converted to the storage format, 8-bit ones with a scale per token and kv head.
        slot_mapping: int32 [T], block * block_size + offset; slots <= 0 are padding and go to the null block. The
            indices stay (block, offset): no element offset is ever formed in int32.
    """
    if k.shape[1:] != layer.k.shape[2:]:
        raise ValueError(
            f"write_kv(): k and v have (num_kv_heads, head_dim) = {k.shape[1:]}, the cache has {layer.k.shape[2:]}; "
            "make CacheConfig agree with the model"
        )
    dtype = storage_format(layer.k.dtype, layer.dtype)
    slot = jnp.maximum(slot_mapping, 0)  # a negative index would wrap to the last block
    block_size = layer.k.shape[1]
    block, offset = slot // block_size, slot % block_size
    if dtype not in SCALED_CACHE_DTYPES:
        k, v = to_storage(k, layer.k.dtype, dtype), to_storage(v, layer.v.dtype, dtype)
        return replace(layer, k=layer.k.at[block, offset].set(k), v=layer.v.at[block, offset].set(v))

    if layer.k_scale is None or layer.v_scale is None:
        raise ValueError(f"write_kv(): the layer stores {dtype} and has no scales; give it k_scale and v_scale")
    (k, k_scale), (v, v_scale) = quantise(k, dtype), quantise(v, dtype)
    head = jnp.arange(k.shape[1], dtype=jnp.int32)[None]
    return replace(
        layer,
        k=layer.k.at[block, offset].set(to_storage(k, layer.k.dtype, dtype)),
        v=layer.v.at[block, offset].set(to_storage(v, layer.v.dtype, dtype)),
        k_scale=layer.k_scale.at[block[:, None], head, offset[:, None]].set(k_scale),
        v_scale=layer.v_scale.at[block[:, None], head, offset[:, None]].set(v_scale),
    )


@typed
def copy_blocks(
    cache: KVCache,
    src: Int32[Array, " n"],
    dst: Int32[Array, " n"],
    *,
    are_disjoint: bool = False,
    implementation: str | None = None,
) -> KVCache:
    """Copies block src[i] to block dst[i] in every array, scales included, as if all copies happened at once.

    Sources are read before anything is written, so a destination may be another pair's source (1 -> 2 with 2 -> 3, or
    an exchange). Pairs of null blocks are padding. Destinations must differ.

    Args:
        src, dst: int32 [n] blocks of the block manager.
        are_disjoint: the caller's promise that no destination is another pair's source, as in copy-on-write. Lets a
            kernel copy in place, in one launch for K and V of a layer.
        implementation: of attention: "mosaic_gpu", or None on a GPU, takes the kernel where it can.
    """
    src, dst = (kernel_block_ids(ids, cache.kernel_blocks_per_block) for ids in (src, dst))
    num_payload = 2 * len(cache.k)
    payload, scales = cache.arrays[:num_payload], cache.arrays[num_payload:]
    if are_disjoint and wants_mosaic(implementation):
        with contextlib.suppress(NotImplementedError):
            require_mosaic()
            from pallas_kernels import move_kv  # it takes long to import

            pairs = [move_kv.copy_blocks(k, v, src, dst) for k, v in zip(cache.k, cache.v, strict=True)]
            payload = (*(k for k, _ in pairs), *(v for _, v in pairs))
            return cache.with_arrays((*payload, *_copied(scales, src, dst)))
    return cache.with_arrays(_copied((*payload, *scales), src, dst))


def _copied(arrays: Sequence[Array], src: Array, dst: Array) -> tuple[Array, ...]:
    return tuple(a.at[dst].set(a[src]) for a in arrays)


def read_blocks(cache: KVCache, block_ids: Int32[Array, " n"]) -> tuple[Shaped[Array, "m ..."], ...]:
    """The content of blocks of the block manager: of each of cache.arrays, [m, ...] for their m kernel blocks."""
    ids = kernel_block_ids(block_ids, cache.kernel_blocks_per_block)
    return tuple(array[ids] for array in cache.arrays)


def write_blocks(cache: KVCache, block_ids: Int32[Array, " n"], blocks: tuple[Shaped[Array, "m ..."], ...]) -> KVCache:
    """Writes what `read_blocks` gave into these blocks; ids differ, but for null blocks, which are padding."""
    ids = kernel_block_ids(block_ids, cache.kernel_blocks_per_block)
    return cache.with_arrays([a.at[ids].set(b) for a, b in zip(cache.arrays, blocks, strict=True)])
