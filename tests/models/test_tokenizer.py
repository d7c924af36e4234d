"""Tokenizers: SentencePiece vocabularies against SentencePiece, Qwen's splitting, SmolLM2's recorded prompts."""

import json
from pathlib import Path

import pytest

from models.tokenizer import tokenizer_from_gguf
from paged_jax import ChatTemplate

MESSAGES = [{"role": "user", "content": "What is gravity? Answer in one sentence."}]


PROMPTS = ["france", "story", "code", "chat_gravity", "chat_long"]
SENTENCEPIECE = json.loads((Path(__file__).parents[1] / "data" / "sentencepiece_tiny.json").read_text())


def sentencepiece_metadata(variant, **changes):
    """Metadata of a GGUF file with the recorded vocabulary."""
    tokens, scores, types = map(list, zip(*SENTENCEPIECE[variant]["pieces"], strict=True))
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [float(score) for score in scores],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.add_space_prefix": variant == "llama",
        **{f"tokenizer.ggml.{key}": value for key, value in changes.items()},
    }


@pytest.mark.parametrize("variant", ["gemma", "llama"])
def test_sentencepiece_vocabulary_gives_the_ids_and_texts_of_sentencepiece(variant):
    tokenizer = tokenizer_from_gguf(Path("x"), sentencepiece_metadata(variant))
    for text, ids in SENTENCEPIECE[variant]["samples"]:
        assert tokenizer.encode(text).ids == ids, text
        assert tokenizer.decode(ids) == text


def test_sentencepiece_vocabulary_joins_by_score_not_by_id():
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "a", "b", "c", "ab", "bc"],
        "tokenizer.ggml.scores": [0.0, -9.0, -9.0, -9.0, -3.0, -1.0],
        "tokenizer.ggml.token_type": [3, 1, 1, 1, 1, 1],
        "tokenizer.ggml.add_space_prefix": False,
    }
    assert tokenizer_from_gguf(Path("x"), metadata).encode("abcab").ids == [1, 5, 4]
    metadata["tokenizer.ggml.scores"][5] = -4.0
    assert tokenizer_from_gguf(Path("x"), metadata).encode("abcab").ids == [4, 3, 4]


def test_sentencepiece_vocabulary_without_the_key_puts_a_space_in_front():
    metadata = sentencepiece_metadata("llama")
    del metadata["tokenizer.ggml.add_space_prefix"]
    text, ids = SENTENCEPIECE["llama"]["samples"][0]
    assert tokenizer_from_gguf(Path("x"), metadata).encode(text).ids == ids


def test_sentencepiece_vocabulary_parses_special_tokens_and_adds_bos():
    tokenizer = tokenizer_from_gguf(Path("x"), sentencepiece_metadata("gemma", add_bos_token=True))
    ids = tokenizer.encode("a</s>a").ids
    assert [tokenizer.id_to_token(i) for i in ids] == ["<s>", "a", "</s>", "a"]
    assert tokenizer.decode(ids) == "aa"
    assert tokenizer.encode("a", add_special_tokens=False).ids == ids[1:2]


def test_sentencepiece_vocabulary_without_bytes_gives_one_unknown_token_for_what_it_lacks():
    metadata = sentencepiece_metadata("gemma")
    types = metadata["tokenizer.ggml.token_type"]
    metadata["tokenizer.ggml.token_type"] = [3 if kind == 6 else kind for kind in types]
    assert tokenizer_from_gguf(Path("x"), metadata).encode("日本").ids == [0]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"scores": None}, "tokenizer.ggml.scores must be a list of float"),
        ({"scores": [0.0]}, "1 scores for 600 tokens"),
        ({"scores": ["high"] * 600}, "must be a list of float"),
        ({"unknown_token_id": 600}, "unknown_token_id 600"),
        ({"unknown_token_id": "<unk>"}, "unknown_token_id '<unk>'"),
        ({"token_type": [1]}, "1 types for 600 tokens"),
        ({"add_bos_token": True, "bos_token_id": -1}, "bos_token_id is -1"),
    ],
)
def test_sentencepiece_vocabulary_that_is_damaged_says_so(changes, match, refused):
    with refused(match):
        tokenizer_from_gguf(Path("x"), sentencepiece_metadata("gemma", **changes))


def test_qwen2_splitting_joins_no_digits_and_keeps_contractions_and_line_ends():
    words = ["don", "'t", "Ġstop", "12", "1", "2", "..Ċ", "é", "ĊĊ", "Ġ"]
    letters = sorted({c for word in words for c in word} | {"Ã", "©"})
    merges = ["d o", "do n", "' t", "Ġ s", "Ġs t", "Ġst o", "Ġsto p", "1 2", ". .", ".. Ċ", "Ċ Ċ", "Ã ©"]
    tokens = list(dict.fromkeys([*letters, *(merge.replace(" ", "") for merge in merges)]))
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.token_type": [1] * len(tokens),
    }
    tokenizer = tokenizer_from_gguf(Path("x"), metadata)
    decomposed = "e\u0301"  # composed by the normalisation
    ids = tokenizer.encode(f"don't stop12..\n\n\n{decomposed}").ids
    assert [tokenizer.id_to_token(i) for i in ids] == ["don", "'t", "Ġstop", "1", "2", "..Ċ", "ĊĊ", "Ã©"]


@pytest.mark.smollm2
@pytest.mark.parametrize("name", PROMPTS)
def test_smollm2_tokenizer_on_reference_prompt_gives_recorded_ids(smollm2, smollm2_reference, name):
    prompt = smollm2_reference[name]
    assert smollm2.tokenizer.encode(prompt["prompt"]).ids == prompt["prompt_ids"]


@pytest.mark.smollm2
@pytest.mark.parametrize("name", PROMPTS)
def test_smollm2_tokenizer_on_generated_ids_gives_recorded_text(smollm2, smollm2_reference, name):
    prompt = smollm2_reference[name]
    assert smollm2.tokenizer.decode(prompt["generated_ids"], skip_special_tokens=False) == prompt["text"]


@pytest.mark.smollm2
def test_smollm2_chat_template_gives_recorded_prompt(smollm2, smollm2_reference):
    assert ChatTemplate(source=smollm2.chat_template).render(MESSAGES) == smollm2_reference["chat_gravity"]["prompt"]
