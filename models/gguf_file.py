"""GGUF files of the llama architecture.

The header is parsed here, against the file's size, rather than by the gguf package: a hostile or truncated file is
refused before anything of the size that it claims is allocated (and a vocabulary takes 0.1 s, not 5). The package's
tables and dequantisation are used.

Source: the GGUF specification, versions 2 and 3 (little endian).
"""

import functools
import math
import mmap
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from models.checkpoint import Checkpoint, LoadError, StoredTensor, make_config, raise_unsupported, require
from models.tokenizer import tokenizer_from_gguf

if TYPE_CHECKING:
    from models.llama import LlamaConfig

MAGIC = b"GGUF"
ARCHITECTURES = ("llama",)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MIN_BYTES_KEY_VALUE = 8 + 4 + 1  # key length, value type, one byte of value
_MIN_BYTES_TENSOR = 8 + 4 + 8 + 4 + 8  # name length, number of axes, one axis, type, offset


class _Cursor:
    """Reads little-endian fields in order and never past the end of the file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.offset = path, data, 0

    def fail(self, why: str) -> LoadError:
        return LoadError(f"{self.path}: not a valid GGUF file: {why} (at byte {self.offset}); download it again")

    def take(self, size: int, what: str) -> int:
        """Start of the next size bytes."""
        start = self.offset
        if size > len(self.data) - start:
            raise self.fail(f"{what} of {size} bytes reaches past the end of the file, {len(self.data)} bytes")
        self.offset = start + size
        return start

    def scalar(self, code: str, what: str) -> Any:
        fmt = "<" + code
        return struct.unpack_from(fmt, self.data, self.take(struct.calcsize(fmt), what))[0]

    def count(self, min_bytes: int, what: str) -> int:
        """A uint64 number of entries of at least min_bytes each, which must fit in the rest of the file."""
        count = self.scalar("Q", what)
        if count * min_bytes > len(self.data) - self.offset:
            raise self.fail(f"{what} is {count}, more than the rest of the file can hold")
        return count

    def text(self, what: str) -> str:
        size = self.count(1, f"length of {what}")
        start = self.take(size, what)
        try:
            return self.data[start : start + size].decode()
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} is not UTF-8") from error

    def value(self, kind: int, what: str) -> Any:
        if kind == _STRING:
            return self.text(what)
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind], what)
        if kind == _ARRAY:
            return self.array(what)
        raise self.fail(f"{what} has unknown type {kind}")

    def array(self, what: str) -> list[Any]:
        kind = self.scalar("I", f"type of {what}")
        if kind == _STRING:
            return [self.text(what) for _ in range(self.count(8, f"length of {what}"))]
        if kind not in _SCALARS:
            raise self.fail(f"{what} is an array of unsupported type {kind}")
        code = _SCALARS[kind]
        count = self.count(struct.calcsize(code), f"length of {what}")
        start = self.take(count * struct.calcsize(code), what)
        return list(struct.unpack_from(f"<{count}{code}", self.data, start))


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """One record of the tensor table; offset in bytes from the start of the data section."""

    shape: tuple[int, ...]  # outermost first (the file has it innermost first)
    kind: int
    offset: int


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(count):
        key = cursor.text("metadata key")
        if key in metadata:
            raise cursor.fail(f"duplicate metadata key {key!r}")
        metadata[key] = cursor.value(cursor.scalar("I", f"type of {key!r}"), repr(key))
    return metadata


def _read_entries(cursor: _Cursor, count: int) -> dict[str, _Entry]:
    entries: dict[str, _Entry] = {}
    for _ in range(count):
        name = cursor.text("tensor name")
        if name in entries:
            raise cursor.fail(f"duplicate tensor {name!r}")
        rank = cursor.scalar("I", f"rank of {name!r}")
        if not 1 <= rank <= 4:
            raise cursor.fail(f"tensor {name!r} has {rank} axes, expected 1 to 4")
        shape = tuple(cursor.scalar("Q", f"shape of {name!r}") for _ in range(rank))[::-1]
        kind = cursor.scalar("I", f"type of {name!r}")
        entries[name] = _Entry(shape=shape, kind=kind, offset=cursor.scalar("Q", f"offset of {name!r}"))
    return entries


def _permuted_heads(cursor: _Cursor, metadata: Mapping[str, Any], name: str, shape: tuple[int, ...]) -> int | None:
    """Heads of a projection whose rows are stored interleaved (x0 y0 x1 y1 ...) for the other RoPE convention."""
    part = name.rpartition(".")[0].rpartition(".")[2]
    if part not in ("attn_q", "attn_k"):
        return None
    heads = _get(cursor, metadata, "llama.attention.head_count", int)
    if part == "attn_k":
        heads = _get(cursor, metadata, "llama.attention.head_count_kv", int, heads)
    if heads <= 0 or shape[0] % (2 * heads):
        raise cursor.fail(f"tensor {name!r} of shape {list(shape)} does not divide into {heads} heads of even size")
    return heads


def unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from interleaved pairs to halves: (x0 y0 x1 y1) -> (x0 x1 y0 y1). [heads * H, ...]"""
    pairs = weight.reshape(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


@functools.cache
def _can_dequantize(quant: Any) -> bool:
    block_bytes = require("gguf.constants").GGML_QUANT_SIZES[quant][1]
    try:
        require("gguf.quants").dequantize(np.zeros((1, block_bytes), np.uint8), quant)
    except NotImplementedError:
        return False
    return True


def _reader(raw: np.ndarray, shape: tuple[int, ...], quant: Any, heads: int | None) -> Callable[[], np.ndarray] | None:
    """Dequantises the bytes on demand; None if the package has no dequantisation for this type."""
    if not _can_dequantize(quant):
        return None

    def read() -> np.ndarray:
        packed = raw.reshape(*shape[:-1], -1)
        # astype copies: float32 comes back as a view of the mapped file.
        values = require("gguf.quants").dequantize(packed, quant).reshape(shape).astype(np.float32)
        return values if heads is None else unpermute(values, heads)

    return read


def _num_bytes(cursor: _Cursor, name: str, entry: _Entry) -> tuple[int, Any]:
    """Size of a tensor in the file, and its GGMLQuantizationType."""
    constants = require("gguf.constants")
    try:
        quant = constants.GGMLQuantizationType(entry.kind)
        block, block_bytes = constants.GGML_QUANT_SIZES[quant]
    except (ValueError, KeyError) as error:
        raise cursor.fail(f"tensor {name!r} has unknown type {entry.kind}") from error
    size = math.prod(entry.shape)
    if size == 0 or entry.shape[-1] % block:
        raise cursor.fail(f"tensor {name!r} of type {quant.name} cannot have shape {list(entry.shape)}")
    return size // block * block_bytes, quant


def _stored_tensors(
    cursor: _Cursor, metadata: Mapping[str, Any], entries: dict[str, _Entry]
) -> dict[str, StoredTensor]:
    """The tensor table, each entry checked against the file's size and its neighbours; no weights are read."""
    alignment = _get(cursor, metadata, "general.alignment", int, 32)
    if alignment <= 0 or alignment % 8:
        raise cursor.fail(f"general.alignment is {alignment}, expected a multiple of 8")
    data_start = -(-cursor.offset // alignment) * alignment
    tensors: dict[str, StoredTensor] = {}
    end = data_start
    for name, entry in sorted(entries.items(), key=lambda item: item[1].offset):
        num_bytes, quant = _num_bytes(cursor, name, entry)
        start = data_start + entry.offset
        if start < end or start % alignment:
            raise cursor.fail(f"tensor {name!r} at offset {entry.offset} overlaps another one or is not aligned")
        end = start + num_bytes
        if end > len(cursor.data):
            raise cursor.fail(f"tensor {name!r} ends at byte {end}, past the end of the file, {len(cursor.data)} bytes")
        heads = _permuted_heads(cursor, metadata, name, entry.shape)
        raw = np.frombuffer(cursor.data, np.uint8, num_bytes, start)
        tensors[name] = StoredTensor(shape=entry.shape, dtype=quant.name, read=_reader(raw, entry.shape, quant, heads))
    return tensors


_REQUIRED = object()


def _get(cursor: _Cursor, metadata: Mapping[str, Any], key: str, kind: type, default: Any = _REQUIRED) -> Any:
    """metadata[key], checked to be of that type (an int also serves as a float)."""
    value = metadata.get(key, default)
    if value is _REQUIRED:
        raise cursor.fail(f"metadata key {key!r} is missing")
    if value is not default and not (isinstance(value, kind) or (kind is float and type(value) is int)):
        raise cursor.fail(f"metadata key {key!r} is {value!r:.80}, expected {kind.__name__}")
    return value


def _config(cursor: _Cursor, metadata: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> "LlamaConfig":
    """The sizes; whether there are biases and a head of its own is told by the tensors alone."""
    get = functools.partial(_get, cursor, metadata)
    num_heads = get("llama.attention.head_count", int)
    hidden_size = get("llama.embedding_length", int)
    head_dim = get("llama.attention.key_length", int, hidden_size // max(num_heads, 1))
    unsupported = {
        "llama.expert_count": (get("llama.expert_count", int, 0), 0),
        "llama.rope.scaling.type": (get("llama.rope.scaling.type", str, "none"), "none"),
        "llama.rope.dimension_count": (get("llama.rope.dimension_count", int, head_dim), head_dim),
        "llama.attention.value_length": (get("llama.attention.value_length", int, head_dim), head_dim),
    }
    raise_unsupported(cursor.path, unsupported)
    eos = [get(f"tokenizer.ggml.{name}_token_id", int, None) for name in ("eos", "eot")]
    return make_config(
        cursor.path,
        vocab_size=len(get("tokenizer.ggml.tokens", list)),
        hidden_size=hidden_size,
        intermediate_size=get("llama.feed_forward_length", int),
        num_layers=get("llama.block_count", int),
        num_heads=num_heads,
        num_kv_heads=get("llama.attention.head_count_kv", int, num_heads),
        head_dim=head_dim,
        rms_norm_eps=get("llama.attention.layer_norm_rms_epsilon", float),
        rope_theta=get("llama.rope.freq_base", float, 10000.0),
        tie_word_embeddings="output.weight" not in tensors,
        attention_bias="blk.0.attn_q.bias" in tensors,
        mlp_bias="blk.0.ffn_up.bias" in tensors,
        max_position_embeddings=get("llama.context_length", int),
        eos_token_ids=tuple(dict.fromkeys(token for token in eos if token is not None)),
        bos_token_id=get("tokenizer.ggml.bos_token_id", int, None),
    )


def read_gguf(path: Path) -> Checkpoint:
    """Opens a GGUF file: header and tokenizer are read, weights stay on disk.

    Raises:
        LoadError: not GGUF, damaged, or of an architecture, tokenizer or variant that is not supported.
    """
    with path.open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    cursor = _Cursor(path, data)
    cursor.take(len(MAGIC), "magic")
    version = cursor.scalar("I", "version")
    if version not in (2, 3):
        raise cursor.fail(f"version is {version}, supported are 2 and 3 (little endian)")
    num_tensors = cursor.count(_MIN_BYTES_TENSOR, "number of tensors")
    metadata = _read_metadata(cursor, cursor.count(_MIN_BYTES_KEY_VALUE, "number of metadata entries"))
    architecture = _get(cursor, metadata, "general.architecture", str)
    if architecture not in ARCHITECTURES:
        raise LoadError(f"{path}: architecture {architecture!r} is not supported, only {', '.join(ARCHITECTURES)}")
    tensors = _stored_tensors(cursor, metadata, _read_entries(cursor, num_tensors))
    config = _config(cursor, metadata, tensors)
    tokens = metadata["tokenizer.ggml.tokens"]
    return Checkpoint(
        path=path,
        naming="gguf",
        config=config,
        tensors=tensors,
        tokenizer=tokenizer_from_gguf(path, metadata),
        chat_template=_get(cursor, metadata, "tokenizer.chat_template", str, None),
        bos_token=None if config.bos_token_id is None else tokens[config.bos_token_id],
        eos_token=tokens[config.eos_token_ids[0]] if config.eos_token_ids else None,
    )
