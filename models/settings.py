"""What the files say about a model, under one set of names: config.json of Hugging Face, and the metadata of GGUF."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.checkpoint import LoadError


def raise_unsupported(path: Path, settings: Mapping[str, tuple[Any, Any]]) -> None:
    """Raises one LoadError for all settings (name -> (value, the only supported value)) that differ."""
    wrong = [f"{name} = {value!r}, supported is {only!r}" for name, (value, only) in settings.items() if value != only]
    if wrong:
        raise LoadError(f"{path}: this variant of the model is not supported: {'; '.join(wrong)}")


@dataclass(frozen=True, kw_only=True)
class HfSettings:
    """A config.json.

    Attributes:
        path: the file.
        values: its content.
        eos_token_ids: of the generation config, else of the config.
    """

    path: Path
    values: Mapping[str, Any]
    eos_token_ids: tuple[Any, ...]

    @property
    def model_type(self) -> str:
        """Family and variant, e.g. "mistral"."""
        return self.values["model_type"]

    def get(self, name: str, default: Any = None) -> Any:
        """values[name]; default if it is missing or null."""
        value = self.values.get(name)
        return default if value is None else value

    def check_only(self, **only: Any) -> None:
        """Raises LoadError for settings that have another value than the only one supported; missing ones have it."""
        raise_unsupported(self.path, {name: (self.get(name, value), value) for name, value in only.items()})

    def sizes(self, **defaults: Any) -> dict[str, Any]:
        """The fields of ModelConfig but for the rotation; defaults replace those of the Llama family."""
        get = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "max_position_embeddings": 2048, **defaults}
        get |= {name: value for name, value in self.values.items() if value is not None}
        num_heads, hidden_size, head_dim = (
            get.get(name) for name in ("num_attention_heads", "hidden_size", "head_dim")
        )
        if head_dim is None and isinstance(num_heads, int) and isinstance(hidden_size, int) and num_heads > 0:
            head_dim = hidden_size // num_heads
        return {
            "vocab_size": get.get("vocab_size"),
            "hidden_size": hidden_size,
            "intermediate_size": get.get("intermediate_size"),
            "num_layers": get.get("num_hidden_layers"),
            "num_heads": num_heads,
            "num_kv_heads": get.get("num_key_value_heads", num_heads),
            "head_dim": head_dim,
            "rms_norm_eps": get["rms_norm_eps"],
            "tie_word_embeddings": get["tie_word_embeddings"],
            "max_position_embeddings": get["max_position_embeddings"],
            "eos_token_ids": self.eos_token_ids,
            "bos_token_id": get.get("bos_token_id"),
        }

    def rope(self, supported: tuple[str, ...] = ("default",), layer_type: str | None = None) -> dict[str, Any]:
        """The rotation's settings with its "rope_type", from the fields of transformers 5 or of earlier versions.

        Args:
            supported: the rope types that the family implements.
            layer_type: for families whose layers differ in rotation, the entry of rope_parameters.
        """
        table = self.get("rope_parameters") or self.get("rope_scaling") or {}
        if isinstance(table, dict) and layer_type is not None and self.get("rope_parameters"):
            if layer_type not in table:
                raise LoadError(f"{self.path}: rope_parameters must have an entry {layer_type!r}, got {table!r:.200}")
            table = table[layer_type]
        if not isinstance(table, dict):
            raise LoadError(f"{self.path}: rope_scaling must be an object, got {table!r:.80}")
        kind = table.get("rope_type", table.get("type", "default"))
        if kind not in supported:
            names = " and ".join(repr(name) for name in supported)
            raise LoadError(f"{self.path}: rope type {kind!r} is not supported, only {names}")
        return {**table, "rope_type": kind}

    def layer_types(self) -> tuple[str, ...] | None:
        """The kind of attention of each layer, "full_attention" or "sliding_attention", or None if it is not listed."""
        types = self.get("layer_types")
        if types is None:
            return None
        known = ("full_attention", "sliding_attention")
        if not isinstance(types, list) or len(types) != self.get("num_hidden_layers") or set(types) - set(known):
            raise LoadError(f"{self.path}: layer_types must list one of {known} for each layer, got {types!r:.200}")
        return tuple(types)


_REQUIRED = object()


@dataclass(frozen=True, kw_only=True)
class GgufSettings:
    """The metadata of a GGUF file.

    Attributes:
        path: the file.
        metadata: key -> value.
        tensor_names: what it holds; whether there are biases and a head of its own is told by the tensors alone.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensor_names: frozenset[str]

    def get(self, key: str, kind: type, default: Any = _REQUIRED) -> Any:
        """metadata[key], checked to be of that type (an int also serves as a float); a dot in front: the family's."""
        if key.startswith("."):
            key = self.get("general.architecture", str) + key
        value = self.metadata.get(key, default)
        if value is _REQUIRED:
            raise self._invalid(f"metadata key {key!r} is missing")
        if value is not default and not (isinstance(value, kind) or (kind is float and type(value) is int)):
            raise self._invalid(f"metadata key {key!r} is {value!r:.80}, expected {kind.__name__}")
        return value

    def _invalid(self, why: str) -> LoadError:
        return LoadError(f"{self.path}: not a valid GGUF file: {why}; download it again")

    def check_only(self, only: Mapping[str, Any]) -> None:
        """Raises LoadError for keys of the family that have another value than the only one supported; missing fit."""
        architecture = self.get("general.architecture", str)
        values = {key: (self.get(key, type(value), value), value) for key, value in only.items()}
        raise_unsupported(self.path, {architecture + key: pair for key, pair in values.items()})

    def sizes(self) -> dict[str, Any]:
        """The fields of ModelConfig but for the rotation's base."""
        get = self.get
        num_heads, hidden_size = get(".attention.head_count", int), get(".embedding_length", int)
        head_dim = get(".attention.key_length", int, hidden_size // max(num_heads, 1))
        self.check_only({".expert_count": 0, ".rope.dimension_count": head_dim, ".attention.value_length": head_dim})
        eos = [get(f"tokenizer.ggml.{name}_token_id", int, None) for name in ("eos", "eot")]
        return {
            "vocab_size": len(get("tokenizer.ggml.tokens", list)),
            "hidden_size": hidden_size,
            "intermediate_size": get(".feed_forward_length", int),
            "num_layers": get(".block_count", int),
            "num_heads": num_heads,
            "num_kv_heads": get(".attention.head_count_kv", int, num_heads),
            "head_dim": head_dim,
            "rms_norm_eps": get(".attention.layer_norm_rms_epsilon", float),
            "tie_word_embeddings": "output.weight" not in self.tensor_names,
            "max_position_embeddings": get(".context_length", int),
            "eos_token_ids": tuple(dict.fromkeys(token for token in eos if token is not None)),
            "bos_token_id": get("tokenizer.ggml.bos_token_id", int, None),
        }
