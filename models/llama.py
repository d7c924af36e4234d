"""The Llama family (Llama 2 / 3, SmolLM2 and others of that architecture) over a paged K/V cache.

The flax.nnx modules are weight containers that read like the paper. `LlamaForward` is the pure function of them that
the engine calls: it is hashable (a static jit argument), and its params are a plain pytree of arrays, so that training
code and generation can use the very same arrays.

Axes: T tokens, S sequences, R rows of logits, N query heads, K kv heads, H head_dim, D hidden, F ffw, V vocabulary.

The computation runs in the dtype of the weights; norms, softmax statistics, rotation angles and logits are float32. On
a GPU, JAX multiplies float32 matrices in TF32 unless `jax.default_matmul_precision("float32")` says otherwise.
"""

import functools
import math
from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Float32, Int32

from paged_jax.attention import attend
from paged_jax.batch import StepBatch

Params = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3's stretch of the low rotation frequencies (see `rope_frequencies`).

    Attributes:
        factor: how much the lowest frequencies are slowed down, >= 1.
        low_freq_factor, high_freq_factor: the band between slowed and kept, in rotations per original context.
        original_max_position: context length before stretching, in tokens.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int

    def __post_init__(self) -> None:
        _check_positive(self, "factor", "low_freq_factor", "high_freq_factor", "original_max_position")
        low, high = self.low_freq_factor, self.high_freq_factor
        if self.factor < 1:
            raise ValueError(f"RopeScaling: factor must be >= 1, got {self.factor}")
        if high <= low:
            raise ValueError(f"RopeScaling: high_freq_factor must exceed low_freq_factor = {low}, got {high}")


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Sizes and constants of one Llama model; hashable, checked on construction.

    Attributes:
        vocab_size, hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads, head_dim: V, D, F, L, N, K, H.
        rms_norm_eps: added to the mean square in every norm.
        rope_theta: base of the rotation frequencies.
        rope_scaling: Llama 3's frequency scaling, or None.
        tie_word_embeddings: the output head is the embedding matrix.
        attention_bias, mlp_bias: the projections have bias vectors.
        max_position_embeddings: longest sequence that the model was made for, in tokens.
        eos_token_ids: tokens that end a generation.
        bos_token_id: token that starts a text, or None.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    max_position_embeddings: int = 2048
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """Per layer the tokens that it sees, None = all."""
        return (None,) * self.num_layers

    def __post_init__(self) -> None:
        sizes = [f.name for f in fields(self) if f.type is int]
        _check_positive(self, *sizes, "rms_norm_eps", "rope_theta")
        for name in ("tie_word_embeddings", "attention_bias", "mlp_bias"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"LlamaConfig: {name} must be True or False, got {getattr(self, name)!r}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"LlamaConfig: num_heads must be a multiple of num_kv_heads = {self.num_kv_heads}, got {self.num_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"LlamaConfig: head_dim must be even (rotation works on pairs), got {self.head_dim}")
        if not isinstance(self.eos_token_ids, tuple):
            raise ValueError(f"LlamaConfig: eos_token_ids must be a tuple (hashable), got {self.eos_token_ids!r}")
        bos = () if self.bos_token_id is None else (self.bos_token_id,)
        last = self.vocab_size - 1
        for token in (*self.eos_token_ids, *bos):
            if not _is_number(token, int) or not 0 <= token <= last:
                raise ValueError(f"LlamaConfig: eos and bos token ids must lie in 0 ... {last}, got {token!r}")


def _is_number(value: object, kind: type) -> bool:
    return isinstance(value, (int, kind)) and not isinstance(value, bool)


def _check_positive(config: object, *names: str) -> None:
    """Raises ValueError unless each named field is a finite number > 0 (a whole one where it is annotated int)."""
    kinds = {f.name: f.type for f in fields(config)}  # pyright: ignore[reportArgumentType]
    for name in names:
        value = getattr(config, name)
        kind = int if kinds[name] is int else float
        if not _is_number(value, kind) or not 0 < value < (2**31 if kind is int else math.inf):
            expected = "a whole number > 0 and below 2**31" if kind is int else "a finite number > 0"
            raise ValueError(f"{type(config).__name__}: {name} must be {expected}, got {value!r}")


def rope_frequencies(config: LlamaConfig) -> np.ndarray:
    """Rotation frequencies of the H/2 pairs, float32 [H/2], in radians per position.

    With `rope_scaling`, a frequency that turns more than high_freq_factor times in the original context stays, one that
    turns less than low_freq_factor times is divided by factor, and between them the two are blended linearly.

    Source: RoFormer (arXiv 2104.09864), section 3.2.2; the scaling: the published configuration of Llama 3.1.
    """
    freqs = config.rope_theta ** -(np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim)
    scaling = config.rope_scaling
    if scaling is not None:
        turns = scaling.original_max_position * freqs / (2 * np.pi)
        keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        keep = np.clip(keep, 0.0, 1.0)
        freqs = keep * freqs + (1 - keep) * freqs / scaling.factor
    return freqs.astype(np.float32)


def rope_angles(config: LlamaConfig, positions: Int32[Array, " T"]) -> Float32[Array, "T half_H"]:
    """Angle by which each of the H/2 pairs is rotated at each position, in radians."""
    return positions.astype(jnp.float32)[:, None] * rope_frequencies(config)[None, :]


def rotate(x: Float[Array, "T heads H"], angles: Float32[Array, "T half_H"]) -> Float[Array, "T heads H"]:
    """Rotary position embedding, half-split: element i of a head pairs with element i + H/2. Computed in float32."""
    cos, sin = jnp.cos(angles)[:, None, :], jnp.sin(angles)[:, None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


class RMSNorm(nnx.Module):
    """x / rms(x) * weight, the division in float32. Source: arXiv 1910.07467."""

    def __init__(self, size: int, eps: float, dtype: Any) -> None:
        self.weight = nnx.Param(jnp.ones(size, dtype))
        self.eps = eps

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        x32 = x.astype(jnp.float32)
        normed = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + self.eps)
        return self.weight[...][None, :] * normed.astype(x.dtype)


class Linear(nnx.Module):
    """x @ kernel (+ bias); the kernel is [in, out], the layout that XLA:CPU multiplies fastest."""

    def __init__(self, size_in: int, size_out: int, use_bias: bool, rngs: nnx.Rngs, dtype: Any) -> None:
        self.kernel = nnx.Param(_normal(rngs, (size_in, size_out), size_in**-0.5, dtype))
        self.bias = nnx.Param(jnp.zeros(size_out, dtype)) if use_bias else None

    def __call__(self, x: Float[Array, "T in"]) -> Float[Array, "T out"]:
        y = x @ self.kernel[...]
        return y if self.bias is None else y + self.bias[...][None, :]


class Attention(nnx.Module):
    """Causal grouped-query attention with rotary positions over the paged cache; q, k and v in one product."""

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs, dtype: Any) -> None:
        self.config = config
        width, width_kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.qkv = Linear(config.hidden_size, width + 2 * width_kv, config.attention_bias, rngs, dtype)
        self.out = Linear(width, config.hidden_size, config.attention_bias, rngs, dtype)

    def __call__(
        self, x: Float[Array, "T D"], angles: Float32[Array, "T half_H"], batch: StepBatch, layer_cache: Any
    ) -> tuple[Float[Array, "T D"], Any]:
        c = self.config
        heads = self.qkv(x).reshape(x.shape[0], -1, c.head_dim)
        q, k, v = jnp.split(heads, [c.num_heads, c.num_heads + c.num_kv_heads], axis=1)
        out, layer_cache = attend(layer_cache, rotate(q, angles), rotate(k, angles), v, batch)
        return self.out(out.reshape(x.shape[0], -1)), layer_cache


class MLP(nnx.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)), gate and up in one product. Source: arXiv 2002.05202."""

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs, dtype: Any) -> None:
        self.gate_up = Linear(config.hidden_size, 2 * config.intermediate_size, config.mlp_bias, rngs, dtype)
        self.down = Linear(config.intermediate_size, config.hidden_size, config.mlp_bias, rngs, dtype)

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        gate, up = jnp.split(self.gate_up(x), 2, axis=-1)
        return self.down(jax.nn.silu(gate) * up)


class DecoderLayer(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs, dtype: Any) -> None:
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.attention = Attention(config, rngs, dtype)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.mlp = MLP(config, rngs, dtype)

    def __call__(
        self, x: Float[Array, "T D"], angles: Float32[Array, "T half_H"], batch: StepBatch, layer_cache: Any
    ) -> tuple[Float[Array, "T D"], Any]:
        attended, layer_cache = self.attention(self.attention_norm(x), angles, batch, layer_cache)
        x = x + attended
        return x + self.mlp(self.mlp_norm(x)), layer_cache


class Llama(nnx.Module):
    """The whole model, with random weights until it is loaded or trained.

    Args:
        config: sizes and constants.
        rngs: source of the initial weights (stream "params").
        dtype: of the weights, and thus of the computation.
    """

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs, dtype: Any = jnp.float32) -> None:
        self.config = config
        self.embedding = nnx.Param(_normal(rngs, (config.vocab_size, config.hidden_size), 0.02, dtype))
        self.layers = nnx.List([DecoderLayer(config, rngs, dtype) for _ in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        is_tied = config.tie_word_embeddings
        self.head = None if is_tied else Linear(config.hidden_size, config.vocab_size, False, rngs, dtype)

    def __call__(self, batch: StepBatch, cache: Any) -> tuple[Float32[Array, "R V"], Any]:
        """One step: writes the K/V of the batch's tokens into the cache and predicts after batch.logits_indices.

        Args:
            batch: the step's tokens and where they belong.
            cache: Any with config.num_layers layers; donate it under jit.

        Returns:
            (logits float32 [R, V] for batch.logits_indices, the cache with the step's K/V written).
        """
        x = self.embedding[...][batch.token_ids]
        angles = rope_angles(self.config, batch.positions)
        for index, layer in enumerate(self.layers):
            x, layer_cache = layer(x, angles, batch, cache.layer(index))
            cache = cache.with_layer(index, layer_cache)
        return self.logits(self.norm(x[batch.logits_indices])), cache

    def logits(self, x: Float[Array, "R D"]) -> Float32[Array, "R V"]:
        """Scores of the vocabulary for normed hidden states."""
        if self.head is None:
            # A product over both last axes: XLA:CPU copies an explicit transpose of [V, D] at every step for R = 1.
            return jnp.einsum("rd,vd->rv", x, self.embedding[...], preferred_element_type=jnp.float32)
        return jnp.matmul(x, self.head.kernel[...], preferred_element_type=jnp.float32)


def _normal(rngs: nnx.Rngs, shape: tuple[int, ...], std: float, dtype: Any) -> Array:
    return (std * jax.random.normal(rngs.params(), shape, jnp.float32)).astype(dtype)


@functools.lru_cache(maxsize=16)
def _structure(config: LlamaConfig) -> tuple[nnx.GraphDef, nnx.State]:
    """The modules without their arrays, and the arrays' shapes (float32; the GraphDef does not depend on the dtype)."""
    return nnx.split(nnx.eval_shape(lambda: Llama(config, nnx.Rngs(0))))


@dataclass(frozen=True)
class LlamaForward:
    """forward(params, batch, cache) -> (logits [R, V] float32, cache): the model as a pure function.

    Equal configs give equal (and equally hashed) functions, so it serves as a static argument of a plain `jax.jit`.
    Never use `nnx.jit` on a step: it walks all modules on the host at every call.
    """

    config: LlamaConfig

    def __call__(self, params: Params, batch: StepBatch, cache: Any) -> tuple[Float32[Array, "R V"], Any]:
        """See `Llama.__call__`; params is the nested dict of arrays that `init_params` or `load_model` returns."""
        return nnx.merge(_structure(self.config)[0], params)(batch, cache)


def init_params(config: LlamaConfig, rngs: nnx.Rngs, dtype: Any = jnp.float32) -> Params:
    """Random weights as the nested dict of arrays that `LlamaForward` takes; the same rngs give the same weights."""
    return nnx.to_pure_dict(nnx.state(Llama(config, rngs, dtype)))


def abstract_params(config: LlamaConfig) -> Params:
    """The pytree of `init_params` as shapes only (jax.ShapeDtypeStruct, float32); allocates nothing."""
    return nnx.to_pure_dict(_structure(config)[1])
