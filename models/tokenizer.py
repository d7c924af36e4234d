"""Tokenizers. The package `tokenizers` is imported on first use."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from models.checkpoint import LoadError, require

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 3, 4, 5, 6  # token types of a GGUF vocabulary
_SPACE = "\u2581"  # what SentencePiece writes for " "
PRE_TOKENIZERS = ("smollm", "qwen2")
#: How the byte-level BPE of Qwen 2 and later splits a text; published in the tokenizer.json of these models.
_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


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
    """tokenizers.Tokenizer from a GGUF file's metadata; special tokens in a text are parsed as such.

    Byte-level BPE ("gpt2") or BPE by scores as SentencePiece does it ("llama").

    Raises:
        LoadError: another kind of tokenizer, or a damaged vocabulary.
    """
    model, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if model not in ("gpt2", "llama") or (model == "gpt2" and pre not in PRE_TOKENIZERS):
        raise LoadError(
            f"{path}: tokenizer {model!r} with pre-tokenizer {pre!r} is not supported, only 'llama', and 'gpt2' with "
            f"{', '.join(PRE_TOKENIZERS)}; load the Hugging Face folder of this model instead"
        )
    tokens, types = _list(path, metadata, "tokens", str), _list(path, metadata, "token_type", int)
    if len(set(tokens)) != len(tokens) or len(types) != len(tokens):
        raise LoadError(f"{path}: the vocabulary has duplicate tokens, or {len(types)} types for {len(tokens)} tokens")
    if model == "gpt2":
        tokenizer = _byte_level_bpe(path, tokens, _list(path, metadata, "merges", str), pre)
    else:
        tokenizer = _sentencepiece_bpe(path, metadata, tokens, types)
    _add_special_tokens(tokenizer, tokens, types, _bos_token(path, metadata, tokens))
    return tokenizer


def _list(path: Path, metadata: Mapping[str, Any], name: str, kind: type) -> list[Any]:
    value = metadata.get(f"tokenizer.ggml.{name}")
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


def _byte_level_bpe(path: Path, tokens: list[str], merges: list[str], pre: str | None) -> Any:
    tokenizers = require("tokenizers")
    steps = tokenizers.pre_tokenizers
    vocab = {token: index for index, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ")) for merge in merges]
    try:
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=pairs))
    except Exception as error:  # the package raises plain Exception
        raise LoadError(f"{path}: the merges do not fit the vocabulary: {error}") from error
    if pre == "qwen2":
        tokenizer.normalizer = tokenizers.normalizers.NFC()
        split = steps.Split(tokenizers.Regex(_QWEN2_SPLIT), behavior="isolated")
        tokenizer.pre_tokenizer = steps.Sequence([split, steps.ByteLevel(add_prefix_space=False, use_regex=False)])
    else:
        digits = steps.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = steps.Sequence([digits, steps.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return tokenizer


def _merges(tokens: list[str], scores: list[float], types: list[int]) -> list[tuple[str, str]]:
    """The pairs whose concatenation is a token, best score first.

    SentencePiece joins the two neighbours that give the best token until none do; this is the same by pairs. Pairs of
    one token are ordered by their ids.
    """
    vocab = {t: i for i, (t, kind) in enumerate(zip(tokens, types, strict=True)) if kind in (_NORMAL, _UNUSED)}
    ranked: list[tuple[float, int, int, int]] = []
    for token, index in vocab.items():
        score = -scores[index]
        for cut in range(1, len(token)):
            left = vocab.get(token[:cut])
            if left is not None:
                right = vocab.get(token[cut:])
                if right is not None:
                    ranked.append((score, index, left, right))
    ranked.sort()
    return [(tokens[left], tokens[right]) for _, _, left, right in ranked]


def _sentencepiece_bpe(path: Path, metadata: Mapping[str, Any], tokens: list[str], types: list[int]) -> Any:
    """BPE by scores, spaces as \u2581, characters outside the vocabulary as bytes where it has all 256."""
    tokenizers = require("tokenizers")
    scores = _list(path, metadata, "scores", float)
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    if len(scores) != len(tokens) or not isinstance(unknown, int) or not 0 <= unknown < len(tokens):
        raise LoadError(
            f"{path}: the vocabulary has {len(scores)} scores for {len(tokens)} tokens, or none with the "
            f"unknown_token_id {unknown!r}"
        )
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            vocab=vocab,
            merges=_merges(tokens, scores, types),
            unk_token=tokens[unknown],
            fuse_unk=True,
            byte_fallback=types.count(_BYTE) == 256,
        )
    )
    normalizers, decoders = tokenizers.normalizers, tokenizers.decoders
    steps = [normalizers.Replace(" ", _SPACE)]
    decoding = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        steps.insert(0, normalizers.Prepend(_SPACE))
        decoding.append(decoders.Strip(content=" ", left=1, right=0))
    tokenizer.normalizer, tokenizer.decoder = normalizers.Sequence(steps), decoders.Sequence(decoding)
    return tokenizer


def _add_special_tokens(tokenizer: Any, tokens: list[str], types: list[int], bos: str | None) -> None:
    """Tokens that are matched in a text as they are; bos, if given, goes in front of every text."""
    tokenizers = require("tokenizers")
    as_is = [(token, kind) for token, kind in zip(tokens, types, strict=True) if kind in (_CONTROL, _USER_DEFINED)]
    added = [tokenizers.AddedToken(token, special=kind == _CONTROL, normalized=False) for token, kind in as_is]
    tokenizer.add_tokens(added)
    if bos is not None:
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single=[bos, "$A"], special_tokens=[(bos, tokens.index(bos))]
        )
