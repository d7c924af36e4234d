"""Records sentencepiece_tiny.json: small BPE vocabularies and what SentencePiece makes of texts with them.

Run once, by hand, in an environment with sentencepiece and protobuf: python tests/data/record_sentencepiece.py
"gemma" treats texts as Gemma's vocabulary does (no space in front, runs of spaces and line breaks are tokens), "llama"
as Llama 2's and Mistral's (a space in front). Tokens are stored as GGUF has them: user-defined ones with plain spaces.
"""

import io
import json
import random
from pathlib import Path

ROOT = Path(__file__).parents[2]
USER_DEFINED = ["\n", "\n\n", "\n\n\n", "▁▁", "▁▁▁", "▁▁▁▁", "<table>"]
VARIANTS = {
    "gemma": {"add_dummy_prefix": False, "user_defined_symbols": USER_DEFINED},
    "llama": {"add_dummy_prefix": True, "user_defined_symbols": []},
}
FIXED = [
    "The block table of a sequence",
    " leading and trailing ",
    "two  three   four    nine         spaces",
    "line\nbreak\n\n\n\n\ttab\r\n",
    "<table><tr> cell </table>",
    "naïve 日本語 🤽‍♀️ \x00\x7f \ue123",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "12345 3.14",
]


def texts(alphabet: list[str]) -> list[str]:
    """Fixed texts, pieces of the licence, and pieces of the vocabulary in random order."""
    choose = random.Random(5)
    source = (ROOT / "LICENSE").read_text()
    starts = [choose.randrange(len(source) - 80) for _ in range(20)]
    mixed = ["".join(choose.choices(alphabet, k=12)).replace("▁", " ") for _ in range(40)]
    return FIXED + [source[start : start + choose.randrange(10, 80)] for start in starts] + mixed


def record(options: dict) -> dict:
    """Vocabulary, texts, ids."""
    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2

    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter((ROOT / "LICENSE").read_text().splitlines()),
        model_writer=written,
        model_type="bpe",
        vocab_size=600,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        character_coverage=1.0,
        allow_whitespace_only_pieces=True,
        minloglevel=2,
        **options,
    )
    model = sentencepiece_model_pb2.ModelProto.FromString(written.getvalue())
    processor = sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())
    pieces = [
        (p.piece.replace("▁", " ") if p.type == 4 else p.piece, round(p.score, 6), p.type) for p in model.pieces
    ]
    samples = texts([p.piece for p in model.pieces if p.type == 1])
    return {"pieces": pieces, "samples": [[text, processor.encode(text)] for text in samples]}


def main() -> None:
    """Writes the recording beside this script."""
    import sentencepiece

    recorded = {name: record(options) for name, options in VARIANTS.items()}
    recorded["versions"] = {"sentencepiece": sentencepiece.__version__}
    path = Path(__file__).with_name("sentencepiece_tiny.json")
    path.write_text(json.dumps(recorded, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
