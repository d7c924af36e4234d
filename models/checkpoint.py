"""What every weight format is reduced to, and how a family's table maps its tensor names to our parameters."""

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from models.config import ModelConfig
    from models.layers import Forward
    from models.settings import GgufSettings, HfSettings

MAX_LISTED = 20  # problems shown in one message


class LoadError(ValueError):
    """A model cannot be loaded: the message says which file or tensor, why, and what to do."""


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor in a file.

    Attributes:
        shape: [out, in] for matrices, as Hugging Face stores them.
        dtype: the file's name for it.
        read: returns the values as float32, float16 or bfloat16; None if this dtype cannot be read.
    """

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], np.ndarray] | None


@dataclass(frozen=True)
class Part:
    """One stored tensor of a (possibly fused) parameter: its names without the suffix, and its number of rows."""

    hf: str
    gguf: str
    rows: Callable[["ModelConfig"], int]

    def name(self, naming: str, layer: int | None, suffix: str) -> str:
        """Full name in the file, e.g. ("hf", 3, "weight") -> model.layers.3.mlp.up_proj.weight."""
        prefix = {"hf": "model.layers.{}.", "gguf": "blk.{}."}[naming].format(layer) if layer is not None else ""
        return f"{prefix}{getattr(self, naming)}.{suffix}"


def _width_q(c: "ModelConfig") -> int:
    return c.num_heads * c.head_dim


def _width_kv(c: "ModelConfig") -> int:
    return c.num_kv_heads * c.head_dim


def _width(c: "ModelConfig") -> int:
    return c.hidden_size


def _width_head(c: "ModelConfig") -> int:
    return c.head_dim


def _width_ffw(c: "ModelConfig") -> int:
    return c.intermediate_size


def _vocab(c: "ModelConfig") -> int:
    return c.vocab_size


#: Our module path -> the stored tensors that are put side by side to make it.
Table = Mapping[str, tuple[Part, ...]]

#: What the families call alike.
TABLE: Table = {
    "embedding": (Part("model.embed_tokens", "token_embd", _vocab),),
    "norm": (Part("model.norm", "output_norm", _width),),
    "head": (Part("lm_head", "output", _vocab),),
    "attention_norm": (Part("input_layernorm", "attn_norm", _width),),
    "attention.qkv": (
        Part("self_attn.q_proj", "attn_q", _width_q),
        Part("self_attn.k_proj", "attn_k", _width_kv),
        Part("self_attn.v_proj", "attn_v", _width_kv),
    ),
    "attention.q_norm": (Part("self_attn.q_norm", "attn_q_norm", _width_head),),
    "attention.k_norm": (Part("self_attn.k_norm", "attn_k_norm", _width_head),),
    "attention.out": (Part("self_attn.o_proj", "attn_output", _width),),
    "mlp_norm": (Part("post_attention_layernorm", "ffn_norm", _width),),
    "mlp.gate_up": (Part("mlp.gate_proj", "ffn_gate", _width_ffw), Part("mlp.up_proj", "ffn_up", _width_ffw)),
    "mlp.down": (Part("mlp.down_proj", "ffn_down", _width),),
}

#: The table of models with norms after attention and MLP too.
TABLE_WITH_POST_NORMS: Table = {
    **TABLE,
    "attention_post_norm": (Part("post_attention_layernorm", "post_attention_norm", _width),),
    "mlp_norm": (Part("pre_feedforward_layernorm", "ffn_norm", _width),),
    "mlp_post_norm": (Part("post_feedforward_layernorm", "post_ffw_norm", _width),),
}


def _unchanged(config: Any, name: str, values: np.ndarray) -> np.ndarray:
    return values


@dataclass(frozen=True, kw_only=True)
class Family:
    """How a family of models is stored.

    Attributes:
        forward_type: of its models.
        config_from_hf, config_from_gguf: the model's config from what the files say; a ValueError of theirs is
            reported with the file.
        table: its tensor names.
        from_gguf: (config, name, values) -> values as Hugging Face stores them: undoes what converters to GGUF do.
    """

    forward_type: type["Forward"]
    config_from_hf: Callable[["HfSettings"], "ModelConfig"]
    config_from_gguf: Callable[["GgufSettings"], "ModelConfig"]
    table: Table
    from_gguf: Callable[[Any, str, np.ndarray], np.ndarray] = _unchanged


#: The module of models/ that describes the family: by model_type of config.json, by general.architecture of GGUF.
HF_FAMILIES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen3",
    "qwen3": "qwen3",
    "gemma3_text": "gemma3",
}
GGUF_FAMILIES = {"llama": "llama", "qwen2": "qwen3", "qwen3": "qwen3", "gemma3": "gemma3"}


def find_family(path: Path, names: Mapping[str, str], key: str, value: object) -> Family:
    """The family that a file belongs to.

    Raises:
        LoadError: there is no such family.
    """
    if not isinstance(value, str) or value not in names:
        raise LoadError(f"{path}: {key} {value!r:.80} is not supported, only {', '.join(names)}")
    return importlib.import_module(f"models.{names[value]}").FAMILY


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The content of a model file or folder, weights still on disk.

    Attributes:
        path: the file or folder.
        family: which kind of model it is.
        naming: "hf" or "gguf", the tensor names in use.
        config: sizes and constants.
        tensors: name -> tensor.
        tokenizer: a tokenizers.Tokenizer, or None if the folder has none.
        chat_template: jinja2 source, or None.
        bos_token, eos_token: their text, for chat templates.
    """

    path: Path
    family: Family
    naming: str
    config: "ModelConfig"
    tensors: Mapping[str, StoredTensor]
    tokenizer: Any | None
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None


def _is_ignored(name: str, tied: bool) -> bool:
    """Tensors that carry no weights of their own: old files store the rotation table, tied ones the head twice."""
    return name.endswith("rotary_emb.inv_freq") or (tied and name == "lm_head.weight")


def _locate(path: tuple[Any, ...]) -> tuple[str, int | None, str]:
    """Path in our params -> (row of the table, layer or None, leaf): (norm, weight) -> norm, None, weight."""
    keys = [key.key for key in path]
    layer = keys[1] if keys[0] == "layers" else None
    inner = keys[2:] if layer is not None else keys
    if inner == ["embedding"]:
        return "embedding", None, "weight"
    return ".".join(inner[:-1]), layer, inner[-1]


def _sources(
    checkpoint: Checkpoint, path: tuple[Any, ...], target: tuple[int, ...]
) -> tuple[dict[str, tuple[int, ...]], bool]:
    """The stored tensors (name -> shape) that make up one parameter of shape target, and whether they are transposed.

    Kernels are: stored [out, in], used as [in, out].
    """
    row, layer, leaf = _locate(path)
    is_kernel = leaf == "kernel"
    suffix = "bias" if leaf == "bias" else "weight"
    tail = target[:1] if is_kernel else target[1:]
    parts = checkpoint.family.table[row]
    return {
        part.name(checkpoint.naming, layer, suffix): (part.rows(checkpoint.config), *tail) for part in parts
    }, is_kernel


def _problems(expected: Mapping[str, tuple[int, ...]], checkpoint: Checkpoint) -> Iterator[str]:
    tensors = checkpoint.tensors
    for name, shape in expected.items():
        tensor = tensors.get(name)
        if tensor is None:
            yield f"missing tensor {name} {list(shape)}"
            continue
        if tensor.shape != shape:
            yield f"{name} has shape {list(tensor.shape)}, the config asks for {list(shape)}"
        if tensor.read is None:
            yield f"{name} has dtype {tensor.dtype}, which cannot be read"
    tied = checkpoint.config.tie_word_embeddings
    for name in tensors:
        if name not in expected and not _is_ignored(name, tied):
            yield f"unexpected tensor {name} {list(tensors[name].shape)}"


def _check(expected: Mapping[str, tuple[int, ...]], checkpoint: Checkpoint) -> None:
    """Raises one LoadError that lists all the problems (the first MAX_LISTED in full)."""
    problems = list(_problems(expected, checkpoint))
    if not problems:
        return
    shown = "".join(f"\n  - {problem}" for problem in problems[:MAX_LISTED])
    more = f"\n  ... and {len(problems) - MAX_LISTED} more" if len(problems) > MAX_LISTED else ""
    raise LoadError(f"{checkpoint.path}: the weights do not fit the model ({len(problems)} problems):{shown}{more}")


def _read(checkpoint: Checkpoint, name: str) -> np.ndarray:
    """One tensor as Hugging Face stores it."""
    read = checkpoint.tensors[name].read
    if read is None:
        raise LoadError(f"{checkpoint.path}: {name} has a dtype that cannot be read")
    values = read()
    return checkpoint.family.from_gguf(checkpoint.config, name, values) if checkpoint.naming == "gguf" else values


def read_params(checkpoint: Checkpoint, dtype: Any) -> Any:
    """The params pytree of the family's forward from a checkpoint, in dtype, on JAX's default device.

    Raises:
        LoadError: names, shapes or dtypes differ from what the config asks for; lists every difference.
    """
    import jax
    import jax.numpy as jnp

    config, tensors = checkpoint.config, checkpoint.tensors
    # Every layer needs tensors of its own: an absurd layer count is refused before a list of that length is made.
    if config.num_layers > len(tensors):
        raise LoadError(
            f"{checkpoint.path}: the config says {config.num_layers} layers, the files hold {len(tensors)} tensors"
        )
    abstract = checkpoint.family.forward_type.abstract_params(config)
    leaves, treedef = jax.tree_util.tree_flatten_with_path(abstract)
    plan = [_sources(checkpoint, path, leaf.shape) for path, leaf in leaves]
    _check({name: shape for sources, _ in plan for name, shape in sources.items()}, checkpoint)

    def build(sources: Mapping[str, tuple[int, ...]], is_kernel: bool) -> Any:
        parts = [_read(checkpoint, name) for name in sources]
        fused = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return jnp.asarray(np.ascontiguousarray(fused.T) if is_kernel else fused, dtype)

    return jax.tree_util.tree_unflatten(treedef, [build(*entry) for entry in plan])


def make_config(path: Path, make: Callable[[Any], "ModelConfig"], settings: Any) -> "ModelConfig":
    """make(settings), its complaints prefixed with the file that they are about."""
    try:
        return make(settings)
    except LoadError:
        raise
    except ValueError as error:
        raise LoadError(f"{path}: {error}") from error


def require(module: str) -> ModuleType:
    """Imports an optional dependency.

    Raises:
        ImportError: it is not installed; the message names the extra that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"loading this model needs {module}: pip install 'paged_jax[load]'") from error
