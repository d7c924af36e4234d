"""What every model's config has, and how configs are checked."""

import math
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and constants that every family has; hashable, checked on construction.

    Attributes:
        vocab_size, hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads, head_dim: V, D, F, L, N, K, H.
        rms_norm_eps: added to the mean square in every norm.
        rope_theta: base of the rotation frequencies.
        tie_word_embeddings: the output head is the embedding matrix.
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
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 2048
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    def __post_init__(self) -> None:
        owner = type(self).__name__
        check_positive(self, *(f.name for f in fields(ModelConfig) if f.type in (int, float)))
        for name in (f.name for f in fields(self) if f.type is bool):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{owner}: {name} must be True or False, got {getattr(self, name)!r}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{owner}: num_heads must be a multiple of num_kv_heads = {self.num_kv_heads}, got {self.num_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"{owner}: head_dim must be even (rotation works on pairs), got {self.head_dim}")
        if not isinstance(self.eos_token_ids, tuple):
            raise ValueError(f"{owner}: eos_token_ids must be a tuple (hashable), got {self.eos_token_ids!r}")
        bos = () if self.bos_token_id is None else (self.bos_token_id,)
        last = self.vocab_size - 1
        for token in (*self.eos_token_ids, *bos):
            if not _is_number(token, int) or not 0 <= token <= last:
                raise ValueError(f"{owner}: eos and bos token ids must lie in 0 ... {last}, got {token!r}")

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """Sliding window of each layer: a token at position p sees p - window + 1 ... p. None: all up to p."""
        return (None,) * self.num_layers


def _is_number(value: object, kind: type) -> bool:
    return isinstance(value, (int, kind)) and not isinstance(value, bool)


def check_positive(config: Any, *names: str) -> None:
    """Raises ValueError unless each named field is a finite number > 0 (a float where it is annotated so, or whole)."""
    kinds = {f.name: f.type for f in fields(config)}
    for name in names:
        value = getattr(config, name)
        kind = float if kinds[name] is float else int
        if not _is_number(value, kind) or not 0 < value < (2**31 if kind is int else math.inf):
            expected = "a whole number > 0 and below 2**31" if kind is int else "a finite number > 0"
            raise ValueError(f"{type(config).__name__}: {name} must be {expected}, got {value!r}")
