"""Stop strings and streamed text: every split of bytes over tokens and of tokens over calls gives the same answer."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_detokenizer import ByteTokenizer, all_splits

from paged_jax.text_stream import TextStream

MARK = "\ufffd"


def run(tokens: list[bytes], calls: list[int] | None = None, prompt: bytes = b"", **options):
    """(text, stop string, number of tokens kept, deltas) of tokens pushed in calls of the given sizes."""
    tokenizer = ByteTokenizer()
    stream = TextStream(tokenizer, tokenizer.encode(prompt) if prompt else [], **options)
    ids, num_kept, deltas = tokenizer.encode(*tokens), 0, []
    for size in calls or [1] * len(ids):
        part, ids = ids[:size], ids[size:]
        num_kept += stream.push(part)
        deltas.append(stream.delta())
        assert "".join(deltas) == stream.text
    text = stream.finish()
    deltas.append(stream.delta())
    return text, stream.stopped_by, num_kept, deltas


@pytest.mark.parametrize(
    ("stop", "text", "expected", "stopped_by"),
    [
        (["world"], "hello world!", "hello ", "world"),
        (["o w"], "hello world!", "hell", "o w"),
        (["wor", "hello w"], "hello world!", "", "hello w"),  # complete first, though it is listed last
        (["lo world", "o"], "hello world!", "hell", "o"),  # it starts later and is complete first
        (["o", "lo"], "hello world!", "hel", "lo"),  # complete at the same character: the longest
        (["!"], "hello world!", "hello world", "!"),
        (["hello"], "hello world!", "", "hello"),
        (["xyz"], "hello world!", "hello world!", None),
        (["ll", "ll"], "hello", "he", "ll"),
        (["aab"], "aaaab", "aa", "aab"),
        (["世"], "A 世界", "A ", "世"),
        (["😀"], "a😀b", "a", "😀"),
        ([], "hello", "hello", None),
    ],
)
@pytest.mark.parametrize("include", [False, True])
def test_stop_string_when_characters_are_tokens_ends_the_text_at_its_first_completion(
    stop, text, expected, stopped_by, include
):
    tokens = [c.encode() for c in text]
    got, by, num_kept, deltas = run(tokens, stop=stop, include_stop_str_in_output=include)
    assert (got, by) == (expected + (stopped_by or "" if include else ""), stopped_by)
    assert num_kept == len(expected) + len(stopped_by or "")
    assert "".join(deltas) == got


def test_stop_strings_of_equal_start_when_one_token_completes_both_are_the_longer():
    assert run([b"x", b"abc"], stop=["ab", "abc"])[:3] == ("x", "abc", 2)
    assert run([b"xab", b"c"], stop=["ab", "abc"])[:3] == ("x", "ab", 1)
    assert run([b"x", b"abcd"], stop=["abcd", "bc"])[:2] == ("xa", "bc")  # complete first, inside one token
    assert run([b"x", b"abc!"], stop=["ab", "abc"], include_stop_str_in_output=True)[:2] == ("xabc", "abc")


@pytest.mark.parametrize("text", ["A 世界;é", "x😀y", "e\u0301;"])
def test_answer_when_bytes_are_split_over_tokens_in_every_way_is_the_same(text):
    for stop in ([";"], ["界;", "y"], ["\u0301"], [" 世", "😀"], []):
        ends = [(text.find(s) + len(s), text.find(s), s) for s in stop if s in text]
        expected, by = (text[: min(ends)[1]], min(ends)[2]) if ends else (text, None)
        for parts in all_splits(text.encode()):
            got, stopped_by, _, deltas = run(parts, stop=stop)
            assert (got, stopped_by) == (expected, by), parts
            assert "".join(deltas) == got
            assert MARK not in "".join(deltas), parts


def test_answer_when_tokens_are_split_over_calls_in_every_way_is_the_same():
    tokens = [b"a", b"b\xe4", b"\xb8\x96", b" st", b"op", b" more"]
    for options in ({}, {"stop": ["stop"]}, {"stop": ["stop", "世 "], "min_tokens": 4}, {"stop": ["世"]}):
        expected = run(tokens, **options)[:3]
        for cuts in itertools.product([False, True], repeat=len(tokens) - 1):
            edges = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), len(tokens)]
            got = run(tokens, [b - a for a, b in itertools.pairwise(edges)], **options)
            assert got[:3] == expected, (options, edges)
            assert "".join(got[3]) == expected[0]


def test_push_when_stop_string_is_complete_keeps_no_later_token():
    tokenizer = ByteTokenizer()
    stream = TextStream(tokenizer, stop=["b"])
    assert stream.push(tokenizer.encode(b"a", b"b", b"c", b"d")) == 2
    assert stream.push(tokenizer.encode(b"e")) == 0
    assert (stream.text, stream.finish(), stream.stopped_by) == ("a", "a", "b")


@pytest.mark.parametrize(
    ("min_tokens", "expected", "num_kept"), [(0, "a", 2), (1, "a", 2), (2, "aXb", 4), (3, "aXb", 4), (4, "aXbXc", 5)]
)
def test_stop_string_when_completed_within_min_tokens_does_not_count(min_tokens, expected, num_kept):
    tokens = [b"a", b"X", b"b", b"X", b"c"]
    assert run(tokens, stop=["X"], min_tokens=min_tokens)[::2][:2] == (expected, num_kept)
    assert run(tokens, [5], stop=["X"], min_tokens=min_tokens)[::2][:2] == (expected, num_kept)


def test_delta_holds_back_what_a_stop_string_may_still_take():
    tokens = [c.encode() for c in "hello"]
    assert run(tokens, stop=["xyz"])[3] == ["", "", "h", "e", "l", "lo"]
    assert run(tokens, stop=["xyz", "w"], include_stop_str_in_output=True)[3] == ["h", "e", "l", "l", "o", ""]
    assert run(tokens, stop=["w"])[3] == ["h", "e", "l", "l", "o", ""]


def test_text_when_prompt_ends_inside_a_character_or_a_stop_string_has_nothing_of_the_prompt():
    assert run([b"\x96", b"!"], prompt=b"Hi \xe4\xb8")[0] == "世!"
    assert run([b"op", b" st", b"op"], prompt=b"st", stop=["stop"])[:2] == ("op ", "stop")


def test_finish_when_bytes_are_missing_shows_a_mark_and_searches_nothing_in_it():
    assert run([b"a", b"\xe4\xb8"], stop=[MARK])[:2] == ("a" + MARK, None)


def test_push_when_tokenizer_fails_raises_its_error():
    class Broken:
        def decode(self, ids, *, skip_special_tokens):
            if 7 in ids:
                raise KeyError(7)
            return "x" * len(ids)

    stream = TextStream(Broken())
    assert stream.push([1, 2]) == 2
    with pytest.raises(KeyError):
        stream.push([7])


FRAGMENTS = st.sampled_from([b"a", b"b", b"ab", b"ba", "世".encode(), b"\xe4", b"\xb8\x96", b"\xff"])
STOPS = st.lists(st.sampled_from(["a", "ab", "ba", "aab", "世", "b世", "bb"]), max_size=3)


@given(
    tokens=st.lists(FRAGMENTS, max_size=12),
    stop=STOPS,
    sizes=st.lists(st.integers(1, 5), min_size=12, max_size=12),
    min_tokens=st.integers(0, 3),
    include=st.booleans(),
)
def test_random_tokens_give_what_a_search_after_every_token_gives(tokens, stop, sizes, min_tokens, include):
    options = {"stop": stop, "min_tokens": min_tokens, "include_stop_str_in_output": include}
    text, stopped_by, num_kept, deltas = run(tokens, sizes, **options)
    assert "".join(deltas) == text
    expected, by, kept = run(tokens)[0], None, len(tokens)
    for count in range(1, len(tokens) + 1):
        before, now = (certain_text(tokens[:n]) for n in (count - 1, count))
        ends = [(e, -len(s), s) for s in stop for e in range(len(before) + 1, len(now) + 1) if now[:e].endswith(s)]
        if ends and count > min_tokens:
            end, length, by = min(ends)
            start = end + length
            by = max((s for s in stop if now.startswith(s, start)), key=len)
            expected, kept = now[: start + len(by) if include else start], count
            break
    assert (text, stopped_by, num_kept) == (expected, by, kept)


def certain_text(tokens: list[bytes]) -> str:
    """What no further byte can change."""
    text = b"".join(tokens).decode("utf-8", "replace")
    return text[: len(text) - min(3, len(text) - len(text.rstrip(MARK)))]
