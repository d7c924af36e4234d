"""GGUF files.

The header is parsed here, against the file's size, rather than by the gguf package: a hostile or truncated file is
refused before anything of the size that it claims is allocated (and a vocabulary takes 0.1 s, not 5). The package's
tables and dequantisation are used.

Source: the GGUF specification, versions 2 and 3 (little endian).
"""

import functools
import math
import mmap
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from models.checkpoint import GGUF_FAMILIES, Checkpoint, LoadError, StoredTensor, find_family, make_config, require
from models.settings import GgufSettings
from models.tokenizer import tokenizer_from_gguf

MAGIC = b"GGUF"
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

    def texts(self, what: str) -> list[str]:
        """As many calls of `text`, in one loop: a vocabulary has hundreds of thousands of them."""
        count, read_size, data = self.count(8, f"length of {what}"), struct.Struct("<Q").unpack_from, self.data
        found, offset, end = [], self.offset, len(self.data)
        for _ in range(count):
            start = offset + 8
            size = read_size(data, offset)[0] if start <= end else end
            offset = start + size
            if offset > end:
                raise self.fail(f"length of {what} is more than the rest of the file can hold")
            found.append(data[start:offset])
        self.offset = offset
        try:
            return [text.decode() for text in found]
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} is not UTF-8") from error

    def array(self, what: str) -> list[Any]:
        kind = self.scalar("I", f"type of {what}")
        if kind == _STRING:
            return self.texts(what)
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


@functools.cache
def _can_dequantize(quant: Any) -> bool:
    block_bytes = require("gguf.constants").GGML_QUANT_SIZES[quant][1]
    try:
        require("gguf.quants").dequantize(np.zeros((1, block_bytes), np.uint8), quant)
    except NotImplementedError:
        return False
    return True


def _reader(raw: np.ndarray, shape: tuple[int, ...], quant: Any) -> Callable[[], np.ndarray] | None:
    """Dequantises the bytes on demand; None if the package has no dequantisation for this type."""
    if not _can_dequantize(quant):
        return None

    def read() -> np.ndarray:
        values = require("gguf.quants").dequantize(raw.reshape(*shape[:-1], -1), quant).reshape(shape)
        # float32 comes back as a view of the mapped file: copied
        return values.astype(np.float32, copy=np.may_share_memory(values, raw))

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


def _stored_tensors(cursor: _Cursor, alignment: int, entries: dict[str, _Entry]) -> dict[str, StoredTensor]:
    """The tensor table, each entry checked against the file's size and its neighbours; no weights are read."""
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
        raw = np.frombuffer(cursor.data, np.uint8, num_bytes, start)
        tensors[name] = StoredTensor(shape=entry.shape, dtype=quant.name, read=_reader(raw, entry.shape, quant))
    return tensors


def join_files(paths: Sequence[Path]) -> mmap.mmap:
    """The files' bytes one after the other, in anonymous memory that is freed with its last use."""
    joined = mmap.mmap(-1, sum(path.stat().st_size for path in paths))
    for path in paths:
        joined.write(path.read_bytes())
    return joined


def _map_file(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def read_gguf(path: Path, data: mmap.mmap | None = None) -> Checkpoint:
    """Opens a GGUF file: header and tokenizer are read, weights stay on disk.

    Args:
        path: the file.
        data: its bytes; None: those of the file.

    Raises:
        LoadError: not GGUF, damaged, or of an architecture, tokenizer or variant that is not supported.
    """
    cursor = _Cursor(path, _map_file(path) if data is None else data)
    cursor.take(len(MAGIC), "magic")
    version = cursor.scalar("I", "version")
    if version not in (2, 3):
        raise cursor.fail(f"version is {version}, supported are 2 and 3 (little endian)")
    num_tensors = cursor.count(_MIN_BYTES_TENSOR, "number of tensors")
    metadata = _read_metadata(cursor, cursor.count(_MIN_BYTES_KEY_VALUE, "number of metadata entries"))
    entries = _read_entries(cursor, num_tensors)
    settings = GgufSettings(path=path, metadata=metadata, tensor_names=frozenset(entries))
    architecture = settings.get("general.architecture", str)
    family = find_family(path, GGUF_FAMILIES, "architecture", architecture)
    tensors = _stored_tensors(cursor, settings.get("general.alignment", int, 32), entries)
    config = make_config(path, family.config_from_gguf, settings)
    tokens = metadata["tokenizer.ggml.tokens"]
    return Checkpoint(
        path=path,
        family=family,
        naming="gguf",
        config=config,
        tensors=tensors,
        tokenizer=tokenizer_from_gguf(path, metadata),
        chat_template=settings.get("tokenizer.chat_template", str, None),
        bos_token=None if config.bos_token_id is None else tokens[config.bos_token_id],
        eos_token=tokens[config.eos_token_ids[0]] if config.eos_token_ids else None,
    )
