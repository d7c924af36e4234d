"""Gemma 3 (text) over a paged K/V cache.

Against Llama: norms multiply by 1 + weight and also follow attention and MLP, every head of q and k is normed, most
layers see a sliding window, with rotations of a base of their own, the embedding is scaled, and GELU is the gate.
Source: arXiv 2503.19786, section 2; the blocks that it consists of, and the contract of the forward, are in
models/layers.py.
"""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Float32, Int32

from models.checkpoint import TABLE_WITH_POST_NORMS, Family, LoadError
from models.config import ModelConfig, check_positive
from models.layers import (
    Attention,
    CausalModel,
    Forward,
    GatedMLP,
    RMSNorm,
    rope_angles,
    rope_frequencies,
)
from models.settings import GgufSettings, HfSettings
from paged_jax.batch import StepBatch

_NUM_LAYERS_27B = 62  # the size whose scores are scaled by hidden_size / num_heads; GGUF does not say so


@dataclass(frozen=True, kw_only=True)
class Gemma3Config(ModelConfig):
    """A Gemma 3 model; rope_theta is that of the full layers.

    Attributes:
        sliding_window: tokens that a token sees in the local layers, itself included.
        full_layer_interval: every so many layers, the last of them sees all tokens: 5 local ones, then a full one.
        rope_local_theta: base of the rotation frequencies of the local layers.
        rope_factor: by which the frequencies of the full layers are divided.
        query_pre_attn_scalar: scores are divided by its square root.
    """

    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e6
    tie_word_embeddings: bool = True
    sliding_window: int = 512
    full_layer_interval: int = 6
    rope_local_theta: float = 10000.0
    rope_factor: float = 1.0
    query_pre_attn_scalar: float = 256.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "sliding_window", "full_layer_interval")
        check_positive(self, "rope_local_theta", "rope_factor", "query_pre_attn_scalar")

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """Sliding window of each layer, in tokens, or None."""
        every = self.full_layer_interval
        return tuple(self.sliding_window if (i + 1) % every else None for i in range(self.num_layers))


class Norm(RMSNorm):
    """x / rms(x) * (1 + weight), all in float32."""

    def __init__(self, size: int, eps: float, dtype: Any) -> None:
        super().__init__(size, eps, dtype)
        self.weight = nnx.Param(jnp.zeros(size, dtype))

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        weight = 1.0 + self.weight[...].astype(jnp.float32)
        return (self.normed(x) * jnp.expand_dims(weight, range(x.ndim - 1))).astype(x.dtype)


class DecoderLayer(nnx.Module):
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x)))."""

    def __init__(self, config: Gemma3Config, index: int, rngs: nnx.Rngs, dtype: Any) -> None:
        self.sliding_window = config.layer_windows[index]
        norm = functools.partial(Norm, config.hidden_size, config.rms_norm_eps, dtype)
        self.attention_norm, self.attention_post_norm = norm(), norm()
        self.attention = Attention(
            config,
            rngs,
            dtype,
            sliding_window=self.sliding_window,
            scale=config.query_pre_attn_scalar**-0.5,
            qk_norm=Norm,
        )
        self.mlp_norm, self.mlp_post_norm = norm(), norm()
        self.mlp = GatedMLP(config, rngs, dtype, activation=jax.nn.gelu)  # the approximation by tanh

    def __call__(
        self, x: Float[Array, "T D"], angles: dict[str, Array], batch: StepBatch, layer_cache: Any
    ) -> tuple[Float[Array, "T D"], Any]:
        chosen = angles["full" if self.sliding_window is None else "local"]
        attended, layer_cache = self.attention(self.attention_norm(x), chosen, batch, layer_cache)
        x = x + self.attention_post_norm(attended)
        return x + self.mlp_post_norm(self.mlp(self.mlp_norm(x))), layer_cache


class Gemma3(CausalModel):
    """Local and full layers in turn."""

    norm_type = Norm

    def make_layer(self, index: int, rngs: nnx.Rngs, dtype: Any) -> DecoderLayer:
        """Decoder layer `index`."""
        return DecoderLayer(self.config, index, rngs, dtype)

    def embed(self, token_ids: Int32[Array, " T"]) -> Float[Array, "T D"]:
        """Embeddings times sqrt(D), a factor that is rounded to the compute dtype first."""
        x = super().embed(token_ids)
        return x * jnp.asarray(self.config.hidden_size**0.5, x.dtype)

    def angles(self, positions: Int32[Array, " T"]) -> dict[str, Float32[Array, "T half_H"]]:
        """Rotation angles of the local and of the full layers, in radians."""
        c = self.config
        full = rope_frequencies(c.head_dim, c.rope_theta) / c.rope_factor
        local = rope_frequencies(c.head_dim, c.rope_local_theta)
        return {"full": rope_angles(full, positions), "local": rope_angles(local, positions)}


@dataclass(frozen=True)
class Gemma3Forward(Forward):
    """forward(params, batch, cache) -> (logits, cache) of a Gemma 3 model; see `Forward`."""

    config: Gemma3Config
    model_type = Gemma3


def _rope_from_hf(settings: HfSettings) -> dict[str, Any]:
    full = settings.rope(("default", "linear"), "full_attention")
    local = settings.rope(layer_type="sliding_attention") if settings.get("rope_parameters") else {}
    return {
        "rope_theta": full.get("rope_theta", settings.get("rope_theta", 1e6)),
        "rope_factor": full.get("factor") if full["rope_type"] == "linear" else 1.0,
        "rope_local_theta": local.get("rope_theta", settings.get("rope_local_base_freq", 10000.0)),
    }


def _interval(path: Path, is_full: list[bool]) -> int:
    """Every so many layers, one is full."""
    interval = is_full.index(True) + 1 if True in is_full else len(is_full) + 1
    if is_full != [(i + 1) % interval == 0 for i in range(len(is_full))]:
        raise LoadError(f"{path}: full attention must come at equal intervals, the layers that have it are {is_full}")
    return interval


def _full_layer_interval(settings: HfSettings) -> Any:
    """sliding_window_pattern, or what layer_types amounts to."""
    types = settings.layer_types()
    if types is None:
        return settings.get("sliding_window_pattern", settings.get("_sliding_window_pattern", 6))
    return _interval(settings.path, [kind == "full_attention" for kind in types])


def _config_from_hf(settings: HfSettings) -> Gemma3Config:
    settings.check_only(
        hidden_activation="gelu_pytorch_tanh",
        quantization_config=None,
        attention_bias=False,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        use_bidirectional_attention=False,
    )
    defaults = {"head_dim": 256, "tie_word_embeddings": True, "max_position_embeddings": 131072}
    return Gemma3Config(
        **settings.sizes(**defaults),
        **_rope_from_hf(settings),
        sliding_window=settings.get("sliding_window", 4096),
        full_layer_interval=_full_layer_interval(settings),
        query_pre_attn_scalar=settings.get("query_pre_attn_scalar", 256),
    )


def _full_layer_interval_of_gguf(settings: GgufSettings) -> int:
    """sliding_window_pattern: the interval, or a list that says for each layer whether it has a window."""
    key = ".attention.sliding_window_pattern"
    if not isinstance(settings.metadata.get(f"gemma3{key}"), list):
        return settings.get(key, int, 6)
    return _interval(settings.path, [not is_windowed for is_windowed in settings.get(key, list)])


def _config_from_gguf(settings: GgufSettings) -> Gemma3Config:
    get = settings.get
    scaling = get(".rope.scaling.type", str, "none")
    settings.check_only({".rope.scaling.type": "linear" if scaling == "linear" else "none"})
    settings.check_only({".attn_logit_softcapping": 0.0, ".final_logit_softcapping": 0.0})
    sizes = settings.sizes()
    is_27b = sizes["num_layers"] == _NUM_LAYERS_27B
    return Gemma3Config(
        **sizes,
        rope_theta=get(".rope.freq_base", float, 1e6),
        rope_local_theta=get(".rope.freq_base_swa", float, 10000.0),
        rope_factor=get(".rope.scaling.factor", float) if scaling == "linear" else 1.0,
        sliding_window=get(".attention.sliding_window", int),
        full_layer_interval=_full_layer_interval_of_gguf(settings),
        query_pre_attn_scalar=sizes["hidden_size"] / sizes["num_heads"] if is_27b else sizes["head_dim"],
    )


def _from_gguf(config: Gemma3Config, name: str, values: np.ndarray) -> np.ndarray:
    """GGUF holds 1 + weight for every norm."""
    return values - 1 if name.endswith("norm.weight") else values


FAMILY = Family(
    forward_type=Gemma3Forward,
    config_from_hf=_config_from_hf,
    config_from_gguf=_config_from_gguf,
    table=TABLE_WITH_POST_NORMS,
    from_gguf=_from_gguf,
)
