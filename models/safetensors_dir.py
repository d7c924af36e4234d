"""Folders in Hugging Face's layout: config.json, safetensors weights, tokenizer files. Nothing is ever unpickled."""

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from models.checkpoint import HF_FAMILIES, Checkpoint, LoadError, StoredTensor, find_family, make_config, require
from models.settings import HfSettings
from models.tokenizer import tokenizer_from_file

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_READABLE = ("F32", "F16", "BF16")
_PICKLED = ("*.bin", "*.pt", "*.pth")
_MAX_JSON_BYTES = 100_000_000
LFS_POINTER = b"version https://git-lfs"


def _member(folder: Path, name: object, named_by: str) -> Path | None:
    """Path of a file of the folder, or None if there is none.

    Weights may be links into the blob store of Hugging Face's cache (<repo>/snapshots/<revision>/<name> ->
    <repo>/blobs/<hash>); any other way out of the folder is refused.
    """
    if not isinstance(name, str) or not name or name in (".", "..") or any(c in name for c in "/\\\0"):
        raise LoadError(f"{folder}: {named_by} names {name!r}, expected the name of a file in this folder")
    path = folder / name
    if not path.exists():
        return None
    home = folder.resolve()
    allowed = [home] + ([home.parents[1] / "blobs"] if home.parent.name == "snapshots" else [])
    if path.resolve().parent not in allowed:
        raise LoadError(f"{path}: links to {path.resolve()}, outside the model's folder; copy the file there instead")
    if not path.is_file():
        raise LoadError(f"{path}: not a file")
    return path


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    if len(set(keys)) != len(keys):
        raise ValueError(f"duplicate key {next(key for key in keys if keys.count(key) > 1)!r}")
    return dict(pairs)


def _parse_json(path: Path, text: bytes) -> dict[str, Any]:
    try:
        value = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise LoadError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise LoadError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def _read_json(folder: Path, name: str) -> dict[str, Any] | None:
    path = _member(folder, name, "the loader")
    if path is None:
        return None
    if path.stat().st_size > _MAX_JSON_BYTES:
        raise LoadError(f"{path}: {path.stat().st_size} bytes of JSON, at most {_MAX_JSON_BYTES} are read")
    return _parse_json(path, path.read_bytes())


def _read_shard(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one file; the safetensors package checks the header against the file's size."""
    safetensors = require("safetensors")
    with path.open("rb") as file:
        start = file.read(len(LFS_POINTER))
    if start == LFS_POINTER:
        raise LoadError(f"{path}: a Git LFS pointer, not the weights; run `git lfs pull` in its repository")
    try:
        with safetensors.safe_open(path, framework="numpy"):
            pass
    except (safetensors.SafetensorError, OSError) as error:
        raise LoadError(f"{path}: not a valid safetensors file: {error}; download it again") from error
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header = _parse_json(path, file.read(size))
    return {
        name: StoredTensor(
            shape=tuple(entry["shape"]),
            dtype=entry["dtype"],
            read=_reader(path, name) if entry["dtype"] in _READABLE else None,
        )
        for name, entry in header.items()
        if name != "__metadata__"
    }


def _reader(path: Path, name: str) -> Callable[[], np.ndarray]:
    def read() -> np.ndarray:
        with require("safetensors").safe_open(path, framework="numpy") as file:
            return file.get_tensor(name)

    return read


def _shard_names(folder: Path) -> list[str]:
    """The weight files; none of them is opened."""
    if _member(folder, _SINGLE, "the loader") is not None:
        return [_SINGLE]
    index = _read_json(folder, _INDEX)
    if index is None:
        pickled = sorted(path.name for pattern in _PICKLED for path in folder.glob(pattern))
        if pickled:
            raise LoadError(
                f"{folder}: has only pickled weights ({', '.join(pickled[:3])}), which can run any code and are not "
                f"loaded; convert them to safetensors, e.g. with transformers' save_pretrained()"
            )
        raise LoadError(f"{folder}: has neither {_SINGLE} nor {_INDEX}; is this a model's folder?")
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict):
        raise LoadError(f"{folder / _INDEX}: has no 'weight_map' object")
    names = list({str(name): name for name in weight_map.values()}.values())
    missing = [name for name in names if _member(folder, name, _INDEX) is None]
    if missing:
        raise LoadError(f"{folder}: {_INDEX} names files that are missing: {', '.join(sorted(missing)[:20])}")
    return names


def _read_tensors(folder: Path) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for name in _shard_names(folder):
        held = _read_shard(folder / name)
        twice = sorted(held.keys() & tensors.keys())
        if twice:
            raise LoadError(f"{folder / name}: tensor {twice[0]} is in an earlier file too")
        tensors |= held
    return tensors


def _eos_token_ids(config: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[Any, ...]:
    """eos_token_id of the generation config, else of the config; either may be one id, a list or null."""
    for source in (generation, config):
        value = source.get("eos_token_id")
        if value is not None:
            return tuple(value) if isinstance(value, list) else (value,)
    return ()


def _token_text(value: Any) -> str | None:
    """A special token is written as its text, or as an object that holds it."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _chat_template(folder: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja, else the field of tokenizer_config.json (of a list of named ones, "default")."""
    path = _member(folder, "chat_template.jinja", "the loader")
    if path is not None:
        return path.read_text(encoding="utf-8")
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):
        named = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
        template = named[0].get("template") if named else None
    return template if isinstance(template, str) else None


def read_folder(folder: Path) -> Checkpoint:
    """Opens a model's folder: configs, tokenizer and headers are read, weights stay on disk.

    Raises:
        LoadError: files are missing or damaged, point outside the folder, or belong to a model that is not supported.
    """
    config = _read_json(folder, "config.json")
    if config is None:
        raise LoadError(f"{folder}: has no config.json; is this a model's folder?")
    generation = _read_json(folder, "generation_config.json") or {}
    settings = HfSettings(path=folder / "config.json", values=config, eos_token_ids=_eos_token_ids(config, generation))
    family = find_family(settings.path, HF_FAMILIES, "model_type", config.get("model_type"))
    tokenizer_config = _read_json(folder, "tokenizer_config.json") or {}
    tokenizer_path = _member(folder, "tokenizer.json", "the loader")
    return Checkpoint(
        path=folder,
        family=family,
        naming="hf",
        config=make_config(settings.path, family.config_from_hf, settings),
        tensors=_read_tensors(folder),
        tokenizer=None if tokenizer_path is None else tokenizer_from_file(tokenizer_path),
        chat_template=_chat_template(folder, tokenizer_config),
        bos_token=_token_text(tokenizer_config.get("bos_token")),
        eos_token=_token_text(tokenizer_config.get("eos_token")),
    )
