"""Incremental text: exhaustive splits of characters over tokens, cut prompts, invalid bytes, real decoders."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged_jax.detokenizer import Detokenizer

MARK = "\ufffd"
BOS, EOS = 0, 1


class ByteTokenizer:
    """Tokens are arbitrary byte strings, numbered as they are first seen; ids 0 and 1 are special tokens."""

    def __init__(self):
        self.tokens = [b"<s>", b"</s>"]

    def encode(self, *parts: bytes) -> list[int]:
        self.tokens += [part for part in dict.fromkeys(parts) if part not in self.tokens]
        return [self.tokens.index(part) for part in parts]

    def decode(self, ids, *, skip_special_tokens):
        first = 2 if skip_special_tokens else 0
        return b"".join(self.tokens[i] for i in ids if i >= first).decode("utf-8", "replace")


def all_splits(data: bytes):
    """Every way to cut `data` into non-empty parts."""
    for cuts in itertools.product([False, True], repeat=max(0, len(data) - 1)):
        edges = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), len(data)]
        yield [data[a:b] for a, b in itertools.pairwise(edges)]


def stream(tokenizer, prompt_ids, output_ids, **kwargs) -> list[str]:
    """The deltas of one token per call, the last one from `finish`."""
    detokenizer = Detokenizer(tokenizer, prompt_ids, **kwargs)
    return [*(detokenizer.push([token]) for token in output_ids), detokenizer.finish()]


OUTPUTS = {
    "cjk": "A 世界".encode(),
    "emoji": "😀!".encode(),
    "nfd": "e\u0301x".encode(),
    "invalid": b"a\xffb",
    "all invalid": b"\xff\xfe\xff\xfe\xff\xfe",
    "truncated 3-byte": "A 世".encode()[:-1],
    "truncated 4-byte": "A😀".encode()[:-1],
    "truncated inside": b"\xe4\xb8A\xf0\x9f",
    "real mark": f"a{MARK}b{MARK}".encode(),
}


@pytest.mark.parametrize("prompt", [b"", b"Hi: ", "世".encode()], ids=["none", "ascii", "cjk"])
@pytest.mark.parametrize("output", OUTPUTS.values(), ids=OUTPUTS.keys())
def test_joined_text_when_split_in_every_way_equals_decoded_output(output, prompt):
    tokenizer = ByteTokenizer()
    prompt_ids = tokenizer.encode(prompt)
    for parts in all_splits(output):
        deltas = stream(tokenizer, prompt_ids, tokenizer.encode(*parts))
        assert "".join(deltas) == output.decode("utf-8", "replace"), parts


@pytest.mark.parametrize("output", OUTPUTS.values(), ids=OUTPUTS.keys())
def test_joined_text_when_pushed_at_once_equals_one_token_a_call(output):
    tokenizer = ByteTokenizer()
    for parts in all_splits(output):
        detokenizer = Detokenizer(tokenizer)
        text = detokenizer.push(tokenizer.encode(*parts)) + detokenizer.finish()
        assert text == output.decode("utf-8", "replace"), parts


def test_push_when_character_is_split_returns_it_with_its_last_byte():
    tokenizer = ByteTokenizer()
    output = "é世😀".encode()
    deltas = stream(tokenizer, [], tokenizer.encode(*(bytes([b]) for b in output)))
    assert deltas == ["", "é", "", "", "世", "", "", "", "😀", ""]


def test_push_when_token_ends_inside_next_character_returns_the_complete_one():
    tokenizer = ByteTokenizer()
    deltas = stream(tokenizer, [], tokenizer.encode(b"\xe4\xb8\x96\xe7", b"\x95\x8c"))
    assert deltas == ["世", "界", ""]


def test_push_when_bytes_stay_invalid_holds_back_at_most_three_marks():
    tokenizer = ByteTokenizer()
    deltas = stream(tokenizer, [], tokenizer.encode(*[b"\xff"] * 10))
    assert deltas == ["", "", "", *[MARK] * 7, MARK * 3]


@pytest.mark.parametrize(
    ("prompt", "output", "expected"),
    [
        (b"Hello \xe4\xb8", "世界".encode()[2:], "世界"),  # the output completes the character
        (b"Hello \xe4", "世".encode()[1:], "世"),
        (b"Hello \xf0\x9f\x98", b"\x80!", "😀!"),
        (b"Hello \xe4\xb8", b"A", "A"),  # it never will be completed: its mark belongs to the prompt
        (b"Hello \xe4\xb8", b"\xff", MARK),
        (b"Hello \xe4\xb8", b"\xe4\xb8\x96", "世"),
        (b"Hello \xe4", b"\xb8", ""),
        (b"\xff\xe4\xb8", b"\x96", "世"),
        (b"Hello \xe4\xb8", b"", ""),
    ],
)
def test_output_when_prompt_ends_inside_a_character_has_nothing_of_the_prompt(prompt, output, expected):
    for prompt_parts, parts in itertools.product(
        [[prompt], [prompt[i : i + 1] for i in range(len(prompt))]], all_splits(output)
    ):
        tokenizer = ByteTokenizer()
        prompt_ids = tokenizer.encode(*prompt_parts)
        assert "".join(stream(tokenizer, prompt_ids, tokenizer.encode(*filter(None, parts)))) == expected, parts


FRAGMENTS = st.sampled_from(
    [b"a", b" ", b"\xe4", b"\xb8", b"\x96", b"\xff", b"\xf0", b"\x9f\x98", "世".encode(), "😀".encode()]
)


@given(prompt=st.lists(FRAGMENTS, max_size=20), output=st.lists(FRAGMENTS, max_size=12))
def test_joined_text_for_random_bytes_equals_difference_of_decoded_texts(prompt, output):
    tokenizer = ByteTokenizer()
    deltas = stream(tokenizer, tokenizer.encode(*prompt), tokenizer.encode(*output))
    base = b"".join(prompt).decode("utf-8", "replace")
    full = b"".join(prompt + output).decode("utf-8", "replace")
    assert "".join(deltas) == full[len(base) if full.startswith(base) else len(base) - 1 :]


@pytest.mark.parametrize(("skip", "expected"), [(True, "ab"), (False, "a<s>b</s>")])
def test_special_tokens_when_skipped_or_kept_follow_the_flag(skip, expected):
    tokenizer = ByteTokenizer()
    a, b = tokenizer.encode(b"a", b"b")
    assert "".join(stream(tokenizer, [BOS, a], [a, BOS, b, EOS], skip_special_tokens=skip)) == expected


def test_finish_when_called_twice_returns_nothing_more():
    tokenizer = ByteTokenizer()
    detokenizer = Detokenizer(tokenizer)
    detokenizer.push(tokenizer.encode(b"\xe4"))
    assert [detokenizer.finish(), detokenizer.finish()] == [MARK, ""]


def test_push_when_output_is_long_decodes_a_bounded_window():
    tokenizer = ByteTokenizer()
    lengths = []
    decode = tokenizer.decode
    tokenizer.decode = lambda ids, **kwargs: lengths.append(len(ids)) or decode(ids, **kwargs)
    stream(tokenizer, tokenizer.encode(b"p") * 1000, tokenizer.encode(b"a", b" ") * 200)
    assert max(lengths) <= 17


# --- decoders of the `tokenizers` package ---


def byte_level_tokenizer():
    """One token per byte, as GPT-2 and SmolLM2 spell them."""
    tokenizers = pytest.importorskip("tokenizers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_end|>"])
    return tokenizer


BYTE_FALLBACK_PIECES = ["<unk>", "▁", "▁Hello", "▁world", "!", "<s>", "</s>"]


def byte_fallback_tokenizer():
    """Llama 2's decoder: bytes are tokens <0xNN>, and the first space of the whole text is removed."""
    tokenizers = pytest.importorskip("tokenizers")
    vocab = {piece: i for i, piece in enumerate([*BYTE_FALLBACK_PIECES, *(f"<0x{b:02X}>" for b in range(256))])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<unk>"))
    decoders = tokenizers.decoders
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def pieces(tokenizer, *parts: str | bytes) -> list[int]:
    """Ids of pieces given as str, and of single bytes given as bytes."""
    names = [[part] if isinstance(part, str) else [f"<0x{b:02X}>" for b in part] for part in parts]
    return [tokenizer.token_to_id(name) for group in names for name in group]


@pytest.mark.parametrize("text", ["A 世界", "😀 é e\u0301", "one two  three"])
def test_joined_text_for_byte_level_decoder_equals_text(text):
    tokenizer = byte_level_tokenizer()
    prompt_ids, ids = tokenizer.encode("Say: ").ids, tokenizer.encode(text).ids
    assert "".join(stream(tokenizer, prompt_ids, [*ids, tokenizer.token_to_id("<|im_end|>")])) == text


def test_output_for_byte_level_decoder_when_prompt_is_cut_has_nothing_of_the_prompt():
    tokenizer = byte_level_tokenizer()
    ids = tokenizer.encode("Hello world 世界").ids
    assert "".join(stream(tokenizer, ids[:-4], ids[-4:])) == "世界"


@pytest.mark.parametrize(
    ("prompt", "output", "expected"),
    [
        ((), ("▁Hello", "▁world"), "Hello world"),  # the leading space of the whole text is removed
        (("▁Hello",), ("▁world", "!"), " world!"),  # no other one is
        (("▁Hello", "</s>") + ("<s>",) * 20, ("▁world",), " world"),
        ((), ("▁", "▁Hello"), " Hello"),
        (("▁Hello",), ("世界".encode(), "!"), "世界!"),
        (("▁Hello",), ("世😀".encode(), "▁world"), "世😀 world"),
        (("▁Hello",), ("世".encode(), b"\xff", "!"), f"世{MARK}!"),  # a bad byte does not spoil its neighbours
        (("▁Hello",), ("世".encode(), b"\xe7\x95"), f"世{MARK * 2}"),
        (("▁Hello", b"\xe4\xb8"), (b"\x96", "!"), "世!"),
        (("▁Hello", "世".encode(), b"\xe7"), (b"\x95\x8c", "!"), "界!"),
        (("▁Hello", b"\xe4\xb8"), ("!",), "!"),
    ],
)
def test_joined_text_for_byte_fallback_decoder_keeps_spaces_and_finished_characters(prompt, output, expected):
    tokenizer = byte_fallback_tokenizer()
    deltas = stream(tokenizer, pieces(tokenizer, *prompt), pieces(tokenizer, *output))
    assert "".join(deltas) == expected, deltas
