"""Qwen 2 (biases in the q, k and v projections) and Qwen 3 (a norm on every head of q and k) over a paged K/V cache.

The blocks that it consists of, and the contract of the forward, are in models/layers.py. Sources: arXiv 2407.10671
(Qwen 2), arXiv 2505.09388 (Qwen 3).
"""

from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Float32, Int32

from models.checkpoint import TABLE, Family, LoadError
from models.config import ModelConfig, check_positive
from models.layers import (
    Attention,
    CausalModel,
    Forward,
    GatedMLP,
    PreNormLayer,
    RMSNorm,
    rope_angles,
    rope_frequencies,
)
from models.settings import GgufSettings, HfSettings


@dataclass(frozen=True, kw_only=True)
class Qwen3Config(ModelConfig):
    """A model of the Qwen 2 or Qwen 3 family.

    Attributes:
        qkv_bias: the projections to q, k and v have bias vectors (Qwen 2).
        out_bias: the projection out of the attention has one.
        qk_norm: every head of q and k is normed before the rotation (Qwen 3).
        sliding_window: tokens that a token sees, itself included, in the layers from num_full_layers on; None: all.
        num_full_layers: layers, from the first, that are never windowed (transformers: max_window_layers).
    """

    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = True
    sliding_window: int | None = None
    num_full_layers: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sliding_window is not None:
            check_positive(self, "sliding_window")
        if not isinstance(self.num_full_layers, int) or self.num_full_layers < 0:
            raise ValueError(f"Qwen3Config: num_full_layers must be a whole number >= 0, got {self.num_full_layers!r}")

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """Sliding window of each layer, in tokens, or None."""
        return tuple(None if i < self.num_full_layers else self.sliding_window for i in range(self.num_layers))


class Qwen3(CausalModel):
    """Pre-norm decoder layers of grouped-query attention and SwiGLU."""

    def make_layer(self, index: int, rngs: nnx.Rngs, dtype: Any) -> PreNormLayer:
        """Decoder layer `index`."""
        c = self.config
        attention = Attention(
            c,
            rngs,
            dtype,
            qkv_bias=c.qkv_bias,
            out_bias=c.out_bias,
            sliding_window=c.layer_windows[index],
            qk_norm=RMSNorm if c.qk_norm else None,
        )
        return PreNormLayer(c, attention, GatedMLP(c, rngs, dtype, activation=jax.nn.silu), dtype)

    def angles(self, positions: Int32[Array, " T"]) -> Float32[Array, "T half_H"]:
        """Rotation angles of all layers, in radians."""
        return rope_angles(rope_frequencies(self.config.head_dim, self.config.rope_theta), positions)


@dataclass(frozen=True)
class Qwen3Forward(Forward):
    """forward(params, batch, cache) -> (logits, cache) of a Qwen 2 or 3 model; see `Forward`."""

    config: Qwen3Config
    model_type = Qwen3


def _windows_from_hf(settings: HfSettings) -> dict[str, Any]:
    """use_sliding_window, sliding_window and max_window_layers, or layer_types where the file has that list."""
    window = settings.get("sliding_window", 4096) if settings.get("use_sliding_window", False) else None
    if window is None:
        return {}
    types = settings.layer_types()
    if types is None:
        return {"sliding_window": window, "num_full_layers": settings.get("max_window_layers", 28)}
    num_full_layers = types.count("full_attention")
    if "full_attention" in types[num_full_layers:]:
        raise LoadError(f"{settings.path}: layer_types must have all full layers in front, got {types}")
    return {"sliding_window": window, "num_full_layers": num_full_layers}


def _config_from_hf(settings: HfSettings) -> Qwen3Config:
    settings.check_only(hidden_act="silu", quantization_config=None)
    is_qwen2 = settings.model_type == "qwen2"
    bias = settings.get("attention_bias", False)
    return Qwen3Config(
        **settings.sizes(max_position_embeddings=32768),
        rope_theta=settings.rope().get("rope_theta", settings.get("rope_theta", 10000.0)),
        qkv_bias=True if is_qwen2 else bias,
        out_bias=False if is_qwen2 else bias,
        qk_norm=not is_qwen2,
        **_windows_from_hf(settings),
    )


def _config_from_gguf(settings: GgufSettings) -> Qwen3Config:
    settings.check_only({".rope.scaling.type": "none", ".attention.sliding_window": 0})
    return Qwen3Config(
        **settings.sizes(),
        rope_theta=settings.get(".rope.freq_base", float, 10000.0),
        qkv_bias="blk.0.attn_q.bias" in settings.tensor_names,
        out_bias="blk.0.attn_output.bias" in settings.tensor_names,
        qk_norm=settings.get("general.architecture", str) == "qwen3",
    )


FAMILY = Family(
    forward_type=Qwen3Forward,
    config_from_hf=_config_from_hf,
    config_from_gguf=_config_from_gguf,
    table=TABLE,
)
