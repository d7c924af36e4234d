"""What the families have in common: rotation, norms, products, grouped-query attention, the whole model.

The flax.nnx modules are weight containers that read like the papers. A family's `Forward` is the pure function of them
that the engine calls: it is hashable (a static jit argument), and its params are a plain pytree of arrays, so that
training code and generation can use the very same arrays.

Axes: T tokens, S sequences, R rows of logits, N query heads, K kv heads, H head_dim, D hidden, F ffw, V vocabulary.

The computation runs in the dtype of the weights; norms, softmax statistics, rotation angles and logits are float32. On
a GPU, JAX multiplies float32 matrices in TF32 unless `jax.default_matmul_precision("float32")` says otherwise.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Float32, Int32

from models.config import ModelConfig
from paged_jax.attention import attend
from paged_jax.batch import StepBatch

Params = dict[str, Any]


def rope_frequencies(head_dim: int, theta: float) -> np.ndarray:
    """Rotation frequencies of the H/2 pairs, float64 [H/2], in radians per position.

    Source: RoFormer (arXiv 2104.09864), section 3.2.2.
    """
    return theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)


def rope_angles(frequencies: np.ndarray, positions: Int32[Array, " T"]) -> Float32[Array, "T half_H"]:
    """Angle by which each of the H/2 pairs is rotated at each position, in radians; frequencies float32 [H/2]."""
    return positions.astype(jnp.float32)[:, None] * frequencies.astype(np.float32)[None, :]


def rotate(x: Float[Array, "T heads H"], angles: Float32[Array, "T half_H"]) -> Float[Array, "T heads H"]:
    """Rotary position embedding, half-split: element i of a head pairs with element i + H/2. Computed in float32."""
    cos, sin = jnp.cos(angles)[:, None, :], jnp.sin(angles)[:, None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


class RMSNorm(nnx.Module):
    """x / rms(x) * weight over the last axis, the division in float32. Source: arXiv 1910.07467."""

    def __init__(self, size: int, eps: float, dtype: Any) -> None:
        self.weight = nnx.Param(jnp.ones(size, dtype))
        self.eps = eps

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        normed = self.normed(x)
        return jnp.expand_dims(self.weight[...], range(x.ndim - 1)) * normed.astype(x.dtype)

    def normed(self, x: Float[Array, "*batch D"]) -> Float32[Array, "*batch D"]:
        """x / rms(x)."""
        x32 = x.astype(jnp.float32)
        return x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + self.eps)


class Linear(nnx.Module):
    """x @ kernel (+ bias); the kernel is [in, out], the layout that XLA:CPU multiplies fastest."""

    def __init__(self, size_in: int, size_out: int, use_bias: bool, rngs: nnx.Rngs, dtype: Any) -> None:
        self.kernel = nnx.Param(_normal(rngs, (size_in, size_out), size_in**-0.5, dtype))
        self.bias = nnx.Param(jnp.zeros(size_out, dtype)) if use_bias else None

    def __call__(self, x: Float[Array, "T in"]) -> Float[Array, "T out"]:
        y = x @ self.kernel[...]
        return y if self.bias is None else y + self.bias[...][None, :]


class Attention(nnx.Module):
    """Causal grouped-query attention with rotary positions over the paged cache; q, k and v in one product.

    Args:
        config: sizes.
        qkv_bias, out_bias: the projections have bias vectors.
        sliding_window: tokens that a token sees, itself included; None: all up to its own.
        scale: factor on the scores; None: 1 / sqrt(head_dim).
        qk_norm: the norm of every head of q and k before the rotation, as norm(size, eps, dtype); None: none.
    """

    def __init__(
        self,
        config: ModelConfig,
        rngs: nnx.Rngs,
        dtype: Any,
        *,
        qkv_bias: bool = False,
        out_bias: bool = False,
        sliding_window: int | None = None,
        scale: float | None = None,
        qk_norm: Callable[[int, float, Any], RMSNorm] | None = None,
    ) -> None:
        self.config, self.sliding_window, self.scale = config, sliding_window, scale
        width, width_kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.qkv = Linear(config.hidden_size, width + 2 * width_kv, qkv_bias, rngs, dtype)
        self.out = Linear(width, config.hidden_size, out_bias, rngs, dtype)
        norms = [qk_norm and qk_norm(config.head_dim, config.rms_norm_eps, dtype) for _ in range(2)]
        self.q_norm, self.k_norm = norms

    def __call__(
        self, x: Float[Array, "T D"], angles: Float32[Array, "T half_H"], batch: StepBatch, layer_cache: Any
    ) -> tuple[Float[Array, "T D"], Any]:
        c = self.config
        heads = self.qkv(x).reshape(x.shape[0], -1, c.head_dim)
        q, k, v = jnp.split(heads, [c.num_heads, c.num_heads + c.num_kv_heads], axis=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, angles), rotate(k, angles)
        out, layer_cache = attend(layer_cache, q, k, v, batch, scale=self.scale, sliding_window=self.sliding_window)
        return self.out(out.reshape(x.shape[0], -1)), layer_cache


class GatedMLP(nnx.Module):
    """down(activation(gate(x)) * up(x)), gate and up in one product. Source: arXiv 2002.05202."""

    def __init__(
        self, config: ModelConfig, rngs: nnx.Rngs, dtype: Any, *, activation: Callable[..., Array], bias: bool = False
    ) -> None:
        self.activation = activation
        self.gate_up = Linear(config.hidden_size, 2 * config.intermediate_size, bias, rngs, dtype)
        self.down = Linear(config.intermediate_size, config.hidden_size, bias, rngs, dtype)

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        gate, up = jnp.split(self.gate_up(x), 2, axis=-1)
        return self.down(self.activation(gate) * up)


class PreNormLayer(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, attention: Attention, mlp: GatedMLP, dtype: Any) -> None:
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.attention = attention
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.mlp = mlp

    def __call__(
        self, x: Float[Array, "T D"], angles: Float32[Array, "T half_H"], batch: StepBatch, layer_cache: Any
    ) -> tuple[Float[Array, "T D"], Any]:
        attended, layer_cache = self.attention(self.attention_norm(x), angles, batch, layer_cache)
        x = x + attended
        return x + self.mlp(self.mlp_norm(x)), layer_cache


class CausalModel(nnx.Module):
    """Embedding, decoder layers, final norm and head, with random weights until they are loaded or trained.

    A family's model says what a layer is (`make_layer`) and how its positions rotate (`angles`).

    Args:
        config: sizes and constants.
        rngs: source of the initial weights (stream "params").
        dtype: of the weights, and thus of the computation.
    """

    norm_type: ClassVar[type[RMSNorm]] = RMSNorm

    def __init__(self, config: Any, rngs: nnx.Rngs, dtype: Any = jnp.float32) -> None:
        self.config = config
        self.embedding = nnx.Param(_normal(rngs, (config.vocab_size, config.hidden_size), 0.02, dtype))
        self.layers = nnx.List([self.make_layer(i, rngs, dtype) for i in range(config.num_layers)])
        self.norm = self.norm_type(config.hidden_size, config.rms_norm_eps, dtype)
        is_tied = config.tie_word_embeddings
        self.head = None if is_tied else Linear(config.hidden_size, config.vocab_size, False, rngs, dtype)

    def __call__(self, batch: StepBatch, cache: Any) -> tuple[Float32[Array, "R V"], Any]:
        """One step: writes the K/V of the batch's tokens into the cache and predicts after batch.logits_indices.

        Args:
            batch: the step's tokens and where they belong.
            cache: KVCache with config.num_layers layers; donate it under jit.

        Returns:
            (logits float32 [R, V] for batch.logits_indices, the cache with the step's K/V written).
        """
        x = self.embed(batch.token_ids)
        angles = self.angles(batch.positions)
        for index, layer in enumerate(self.layers):
            x, layer_cache = layer(x, angles, batch, cache.layer(index))
            cache = cache.with_layer(index, layer_cache)
        return self.logits(self.norm(x[batch.logits_indices])), cache

    def make_layer(self, index: int, rngs: nnx.Rngs, dtype: Any) -> Any:
        """Decoder layer `index`: called as layer(x, angles, batch, layer_cache), it returns (x, layer_cache)."""
        raise NotImplementedError(f"{type(self).__name__} must say what its layers are")

    def embed(self, token_ids: Int32[Array, " T"]) -> Float[Array, "T D"]:
        """Input of the first layer."""
        return self.embedding[...][token_ids]

    def angles(self, positions: Int32[Array, " T"]) -> Any:
        """Rotation angles at these positions, as the layers take them."""
        raise NotImplementedError(f"{type(self).__name__} must say how its positions rotate")

    def logits(self, x: Float[Array, "R D"]) -> Float32[Array, "R V"]:
        """Scores of the vocabulary for normed hidden states."""
        if self.head is None:
            # A product over both last axes: XLA:CPU copies an explicit transpose of [V, D] at every step for R = 1.
            return jnp.einsum("rd,vd->rv", x, self.embedding[...], preferred_element_type=jnp.float32)
        return jnp.matmul(x, self.head.kernel[...], preferred_element_type=jnp.float32)


def _normal(rngs: nnx.Rngs, shape: tuple[int, ...], std: float, dtype: Any) -> Array:
    return (std * jax.random.normal(rngs.params(), shape, jnp.float32)).astype(dtype)


@functools.lru_cache(maxsize=16)
def structure(model_type: type[CausalModel], config: ModelConfig) -> tuple[nnx.GraphDef, nnx.State]:
    """The modules without their arrays, and the arrays' shapes (float32; the GraphDef does not depend on the dtype)."""
    return nnx.split(nnx.eval_shape(lambda: model_type(config, nnx.Rngs(0))))


@dataclass(frozen=True)
class Forward:
    """forward(params, batch, cache) -> (logits [R, V] float32, cache): a model as a pure function.

    Equal configs give equal (and equally hashed) functions, so it serves as a static argument of a plain `jax.jit`.
    Never use `nnx.jit` on a step: it walks all modules on the host at every call.
    """

    config: Any
    model_type: ClassVar[type[CausalModel]]

    def __call__(self, params: Params, batch: StepBatch, cache: Any) -> tuple[Float32[Array, "R V"], Any]:
        """See `CausalModel.__call__`; params is the nested dict of arrays that init_params or load_model returns."""
        return nnx.merge(structure(self.model_type, self.config)[0], params)(batch, cache)

    @classmethod
    def init_params(cls, config: Any, rngs: nnx.Rngs, dtype: Any = jnp.float32) -> Params:
        """Random weights as the nested dict of arrays that the forward takes; the same rngs give the same weights."""
        return nnx.to_pure_dict(nnx.state(cls.model_type(config, rngs, dtype)))

    @classmethod
    def abstract_params(cls, config: Any) -> Params:
        """The pytree of `init_params` as shapes only (jax.ShapeDtypeStruct, float32); allocates nothing."""
        return nnx.to_pure_dict(structure(cls.model_type, config)[1])
