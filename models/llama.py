"""The Llama family (Llama 2 / 3, SmolLM2, Mistral and others of that architecture) over a paged K/V cache.

The blocks that it consists of, and the contract of the forward, are in models/layers.py.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float32, Int32

from models import layers
from models.checkpoint import TABLE, Family
from models.config import ModelConfig, check_positive
from models.layers import Attention, CausalModel, Forward, GatedMLP, Params, PreNormLayer
from models.settings import GgufSettings, HfSettings


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
        check_positive(self, "factor", "low_freq_factor", "high_freq_factor", "original_max_position")
        low, high = self.low_freq_factor, self.high_freq_factor
        if self.factor < 1:
            raise ValueError(f"RopeScaling: factor must be >= 1, got {self.factor}")
        if high <= low:
            raise ValueError(f"RopeScaling: high_freq_factor must exceed low_freq_factor = {low}, got {high}")


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(ModelConfig):
    """A model of the Llama family.

    Attributes:
        rope_scaling: Llama 3's frequency scaling, or None.
        attention_bias, mlp_bias: the projections have bias vectors.
        sliding_window: tokens that a token sees in every layer, itself included (Mistral 7B v0.1: 4096); None: all.
    """

    rope_scaling: RopeScaling | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sliding_window is not None:
            check_positive(self, "sliding_window")

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """Sliding window of each layer, in tokens, or None."""
        return (self.sliding_window,) * self.num_layers


def rope_frequencies(config: LlamaConfig) -> np.ndarray:
    """Rotation frequencies of the H/2 pairs, float32 [H/2], in radians per position.

    With `rope_scaling`, a frequency that turns more than high_freq_factor times in the original context stays, one that
    turns less than low_freq_factor times is divided by factor, and between them the two are blended linearly.

    Source of the scaling: the published configuration of Llama 3.1.
    """
    freqs = layers.rope_frequencies(config.head_dim, config.rope_theta)
    scaling = config.rope_scaling
    if scaling is not None:
        turns = scaling.original_max_position * freqs / (2 * np.pi)
        keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        keep = np.clip(keep, 0.0, 1.0)
        freqs = keep * freqs + (1 - keep) * freqs / scaling.factor
    return freqs.astype(np.float32)


class Llama(CausalModel):
    """Pre-norm decoder layers of grouped-query attention and SwiGLU."""

    def make_layer(self, index: int, rngs: nnx.Rngs, dtype: Any) -> PreNormLayer:
        """Decoder layer `index`."""
        c = self.config
        bias, window = c.attention_bias, c.layer_windows[index]
        attention = Attention(c, rngs, dtype, qkv_bias=bias, out_bias=bias, sliding_window=window)
        return PreNormLayer(c, attention, GatedMLP(c, rngs, dtype, activation=jax.nn.silu, bias=c.mlp_bias), dtype)

    def angles(self, positions: Int32[Array, " T"]) -> Float32[Array, "T half_H"]:
        """Rotation angles of all layers, in radians."""
        return layers.rope_angles(rope_frequencies(self.config), positions)


@dataclass(frozen=True)
class LlamaForward(Forward):
    """forward(params, batch, cache) -> (logits, cache) of a Llama model; see `Forward`."""

    config: LlamaConfig
    model_type = Llama


def init_params(config: LlamaConfig, rngs: nnx.Rngs, dtype: Any = jnp.float32) -> Params:
    """Random weights as the nested dict of arrays that `LlamaForward` takes; the same rngs give the same weights."""
    return LlamaForward.init_params(config, rngs, dtype)


def abstract_params(config: LlamaConfig) -> Params:
    """The pytree of `init_params` as shapes only (jax.ShapeDtypeStruct, float32); allocates nothing."""
    return LlamaForward.abstract_params(config)


def _rope_from_hf(settings: HfSettings) -> dict[str, Any]:
    table = settings.rope(("default", "llama3"))
    theta = {"rope_theta": table.get("rope_theta", settings.get("rope_theta", 10000.0))}
    if table["rope_type"] == "default":
        return theta
    scaling: dict[str, Any] = {
        "factor": table.get("factor"),
        "low_freq_factor": table.get("low_freq_factor"),
        "high_freq_factor": table.get("high_freq_factor"),
        "original_max_position": table.get("original_max_position_embeddings"),
    }
    return {**theta, "rope_scaling": RopeScaling(**scaling)}


def _config_from_hf(settings: HfSettings) -> LlamaConfig:
    settings.check_only(hidden_act="silu", quantization_config=None)
    is_mistral = settings.model_type == "mistral"
    return LlamaConfig(
        **settings.sizes(),
        **_rope_from_hf(settings),
        attention_bias=settings.get("attention_bias", False),
        mlp_bias=settings.get("mlp_bias", False),
        sliding_window=settings.values.get("sliding_window", 4096) if is_mistral else None,
    )


def _config_from_gguf(settings: GgufSettings) -> LlamaConfig:
    settings.check_only({".rope.scaling.type": "none"})
    return LlamaConfig(
        **settings.sizes(),
        rope_theta=settings.get(".rope.freq_base", float, 10000.0),
        attention_bias="blk.0.attn_q.bias" in settings.tensor_names,
        mlp_bias="blk.0.ffn_up.bias" in settings.tensor_names,
        sliding_window=settings.get(".attention.sliding_window", int, None),
    )


def unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from interleaved pairs to halves: (x0 y0 x1 y1) -> (x0 x1 y0 y1). [heads * H, ...]"""
    pairs = weight.reshape(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def _from_gguf(config: LlamaConfig, name: str, values: np.ndarray) -> np.ndarray:
    """GGUF holds the rows of Q and K interleaved, for the other convention of the rotation."""
    heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}.get(name.split(".")[-2])
    return values if heads is None else unpermute(values, heads)


FAMILY = Family(
    forward_type=LlamaForward,
    config_from_hf=_config_from_hf,
    config_from_gguf=_config_from_gguf,
    table=TABLE,
    from_gguf=_from_gguf,
)
