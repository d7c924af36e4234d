"""Tokenizers. The package `tokenizers` is imported on first use."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from models.checkpoint import LoadError, require

_CONTROL, _USER_DEFINED = 3, 4  # token types of a GGUF vocabulary that are matched in the text as they are
PRE_TOKENIZERS = ("smollm",)


def tokenizer_from_file(path: Path) -> Any:
    """tokenizers.Tokenizer from a tokenizer.json.

    Raises:
        LoadError: the file is damaged.
    """
    tokenizers = require("tokenizers")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises plain Exception
        raise LoadError(f"{path}: not a valid tokenizer file: {error}") from error


def tokenizer_from_gguf(path: Path, metadata: Mapping[str, Any]) -> Any:
    """tokenizers.Tokenizer from a GGUF file's metadata: byte-level BPE; special tokens in a text are parsed as such.

    Raises:
        LoadError: another kind of tokenizer, or a damaged vocabulary.
    """
    model, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if model != "gpt2" or pre not in PRE_TOKENIZERS:
        raise LoadError(
            f"{path}: tokenizer {model!r} with pre-tokenizer {pre!r} is not supported, only 'gpt2' with "
            f"{', '.join(PRE_TOKENIZERS)}; load the Hugging Face folder of this model instead"
        )
    tokens, merges, types = (_texts(path, metadata, key) for key in ("tokens", "merges", "token_type"))
    if len(set(tokens)) != len(tokens) or len(types) != len(tokens):
        raise LoadError(f"{path}: the vocabulary has duplicate tokens, or {len(types)} types for {len(tokens)} tokens")
    return _byte_level_bpe(path, tokens, merges, types, _bos_token(path, metadata, tokens))


def _texts(path: Path, metadata: Mapping[str, Any], name: str) -> list[Any]:
    value = metadata.get(f"tokenizer.ggml.{name}")
    kind = int if name == "token_type" else str
    if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
        raise LoadError(f"{path}: tokenizer.ggml.{name} must be a list of {kind.__name__}")
    return value


def _bos_token(path: Path, metadata: Mapping[str, Any], tokens: Sequence[str]) -> str | None:
    """The token that the tokenizer itself puts before a text, if the file asks for that."""
    if not metadata.get("tokenizer.ggml.add_bos_token", False):
        return None
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    if not isinstance(bos, int) or not 0 <= bos < len(tokens):
        raise LoadError(f"{path}: add_bos_token is set and bos_token_id is {bos!r}")
    return tokens[bos]


def _byte_level_bpe(path: Path, tokens: list[str], merges: list[str], types: list[int], bos: str | None) -> Any:
    tokenizers = require("tokenizers")
    pre = tokenizers.pre_tokenizers
    vocab = {token: index for index, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ")) for merge in merges]
    try:
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=pairs))
    except Exception as error:  # the package raises plain Exception
        raise LoadError(f"{path}: the merges do not fit the vocabulary: {error}") from error
    tokenizer.pre_tokenizer = pre.Sequence([pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    as_is = [(token, kind) for token, kind in zip(tokens, types, strict=True) if kind in (_CONTROL, _USER_DEFINED)]
    added = [tokenizers.AddedToken(token, special=kind == _CONTROL, normalized=False) for token, kind in as_is]
    tokenizer.add_tokens(added)
    if bos is not None:
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single=[bos, "$A"], special_tokens=[(bos, vocab[bos])]
        )
    return tokenizer
