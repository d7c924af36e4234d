"""What the user sees of requests: streams, stop strings, chat, metrics, records, through one tiny engine."""

import dataclasses
import gc
import weakref

import numpy as np
import pytest
from doubles import ByteTokenizer, dense_tokens, ids, prompt, tiny_llm

from paged_jax import ChatTemplate, Recorder, RequestOutputKind, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=12)
DELTA, CUMULATIVE, FINAL_ONLY = RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY
TEMPLATE = "{% if messages[0].content == 'bad' %}{{ raise_exception('no') }}{% endif %}{{ messages[0].content }}"


@pytest.fixture(scope="module")
def engine():
    return tiny_llm(40, tokenizer=ByteTokenizer(), chat_template=ChatTemplate(source=TEMPLATE))


@pytest.fixture
def llm(engine):
    engine.recorder = engine.watch = None
    yield engine
    assert not engine.has_unfinished_requests()
    assert engine.is_whole


def text_of(tokens) -> str:
    return bytes(tokens).decode()


def options(**changes) -> SamplingParams:
    return dataclasses.replace(GREEDY, **changes)


# -- streams ----------------------------------------------------------------------------------------------------------


def test_r120_streams_of_interleaved_requests_join_to_what_generate_gives(llm):
    prompts = [prompt(length, length) for length in (1, 4, 5, 9, 13, 3, 7, 8, 2, 6)]
    stops = [(), (text_of(dense_tokens(prompts[1], 12)[5:7]),), ("\x00\x00\x00",), (), ()] * 2
    params = [options(max_tokens=3 + i, stop=stop) for i, stop in enumerate(stops)]
    whole = llm.generate(ids(prompts), params, use_tqdm=False)
    for kind in (DELTA, CUMULATIVE, FINAL_ONLY):
        seen = {}
        for output in llm.stream(ids(prompts), [dataclasses.replace(p, output_kind=kind) for p in params]):
            seen.setdefault(int(output.request_id), []).append(output)
        assert len(seen) == len(prompts)
        for (_, outputs), expected in zip(sorted(seen.items()), whole, strict=True):
            parts = [o.outputs[0] for o in outputs]
            last, final = parts[-1], expected.outputs[0]
            assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
            assert [p.finish_reason for p in parts[:-1]] == [None] * (len(parts) - 1)
            assert (last.finish_reason, last.stop_reason) == (final.finish_reason, final.stop_reason)
            if kind == DELTA:
                assert "".join(p.text for p in parts) == final.text
                assert [t for p in parts for t in p.token_ids] == final.token_ids
            else:
                assert (last.text, last.token_ids) == (final.text, final.token_ids)
                assert all(final.text.startswith(p.text) for p in parts)
                assert len(parts) == 1 or kind == CUMULATIVE
            assert len(parts) > 1 or kind == FINAL_ONLY


# -- stop strings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("include", [False, True])
def test_stop_string_ends_its_request_alone_with_the_token_that_completes_it(llm, include):
    prompts = [prompt(length, 20 + length) for length in (3, 5, 6, 8)]
    expected = [dense_tokens(p, 12) for p in prompts]
    stops = [text_of(tokens[start : start + 2]) for start, tokens in enumerate(expected)]
    params = [options(stop=[stop, "\x00\x00\x00"], include_stop_str_in_output=include) for stop in stops]
    outputs = llm.generate(ids([*prompts, prompts[0]]), [*params, GREEDY], use_tqdm=False)
    for output, tokens, stop in zip(outputs[:4], expected, stops, strict=True):
        (completion,), text = output.outputs, text_of(tokens)
        start = text.index(stop)
        assert completion.token_ids == tokens[: start + 2]
        assert completion.text == text[: start + 2 * include]
        assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert outputs[4].outputs[0].token_ids == expected[0]
    assert outputs[4].outputs[0].finish_reason == "length"


def test_stop_string_does_not_count_within_min_tokens(llm):
    tokens = dense_tokens(prompt(5), 12)
    stop, last = text_of(tokens[3:4]), text_of(tokens[8:9])
    (output,) = llm.generate(ids([prompt(5)]), options(stop=(stop, last), min_tokens=4), use_tqdm=False)
    end = next(i for i in range(4, 12) if text_of(tokens[i : i + 1]) in (stop, last))
    assert output.outputs[0].token_ids == tokens[: end + 1]
    assert output.outputs[0].text == text_of(tokens[:end])


def test_stop_string_of_one_sample_leaves_the_others_running(llm):
    sampled = options(temperature=10.0, seed=5, n=3, max_tokens=16)
    (whole,) = llm.generate(ids([prompt(6)]), sampled, use_tqdm=False)
    texts = [text_of(c.token_ids) for c in whole.outputs]
    stop = next(texts[1][i : i + 2] for i in range(14) if all(texts[1][i : i + 2] not in texts[j] for j in (0, 2)))
    (cut,) = llm.generate(ids([prompt(6)]), dataclasses.replace(sampled, stop=stop), use_tqdm=False)
    assert [c.finish_reason for c in cut.outputs] == ["length", "stop", "length"]
    assert [c.text for c in cut.outputs] == [texts[0], texts[1][: texts[1].index(stop)], texts[2]]


def test_stop_token_is_in_the_tokens_and_not_in_the_text(llm):
    tokens = dense_tokens(prompt(5), 12)
    for include in (False, True):
        params = options(stop_token_ids=(tokens[4],), include_stop_str_in_output=include)
        (output,) = llm.generate(ids([prompt(5)]), params, use_tqdm=False)
        end = tokens.index(tokens[4]) + 1
        assert output.outputs[0].token_ids == tokens[:end]
        assert output.outputs[0].text == text_of(tokens[: end - (not include)])
        assert output.outputs[0].stop_reason == tokens[4]


def test_stop_string_without_tokenizer_fails_alone_with_the_remedy(llm):
    llm.tokenizer, tokenizer = None, llm.tokenizer
    try:
        bad, good = llm.generate(ids([prompt(3)] * 2), [options(stop="x"), GREEDY], use_tqdm=False)
    finally:
        llm.tokenizer = tokenizer
    assert "stop_token_ids instead" in str(bad.error)
    assert good.outputs[0].token_ids == dense_tokens(prompt(3), 12)


def test_tokenizer_that_fails_in_mid_stream_ends_that_request_alone(llm):
    tokens = dense_tokens(prompt(5), 12)

    class Broken(ByteTokenizer):
        def decode(self, ids, skip_special_tokens=True):
            if list(ids[-2:]) == tokens[4:6]:
                raise KeyError("broken")
            return super().decode(ids, skip_special_tokens)

    llm.tokenizer, tokenizer = Broken(), llm.tokenizer
    try:
        bad, good = llm.generate(ids([prompt(5), prompt(6)]), GREEDY, use_tqdm=False)
    finally:
        llm.tokenizer = tokenizer
    assert isinstance(bad.error, KeyError)
    assert bad.outputs[0].finish_reason == "error"
    assert bad.outputs[0].token_ids == tokens[: len(bad.outputs[0].token_ids)] != tokens  # it did not go on
    assert (good.error, good.outputs[0].token_ids) == (None, dense_tokens(prompt(6), 12))


# -- chat -------------------------------------------------------------------------------------------------------------


def test_chat_continues_what_the_template_makes_of_each_conversation(llm):
    conversations = [[{"role": "user", "content": text}] for text in ("AB", "bad", "CDE")]
    good, bad, other = llm.chat(conversations, GREEDY, use_tqdm=False)
    assert (good.prompt, good.outputs[0].token_ids) == ("AB", dense_tokens([65, 66], 12))
    assert (other.prompt, other.outputs[0].token_ids) == ("CDE", dense_tokens([67, 68, 69], 12))
    assert "ValueError: no" in str(bad.error)
    assert bad.outputs[0].finish_reason == "error"
    (one,) = llm.chat(conversations[0], GREEDY, use_tqdm=False, chat_template="{{ messages[0].role | upper }}")
    assert (one.prompt, one.outputs[0].token_ids) == ("USER", dense_tokens(list(b"USER"), 12))
    assert llm.chat([], GREEDY) == []
    assert llm.chat_prompt(conversations[0]) == {"prompt": "AB", "prompt_token_ids": [65, 66]}
    with pytest.raises(ValueError, match="no"):
        llm.chat_prompt(conversations[1])


def test_chat_adds_no_special_tokens_to_those_of_the_template(llm):
    class WithBos(ByteTokenizer):
        def encode(self, text, add_special_tokens=True):
            return [1] * add_special_tokens + super().encode(text)

    llm.tokenizer, tokenizer = WithBos(), llm.tokenizer
    try:
        assert llm.chat_prompt([{"role": "user", "content": "A"}])["prompt_token_ids"] == [65]
    finally:
        llm.tokenizer = tokenizer


def test_chat_without_template_says_what_to_give(llm):
    llm.chat_template, template = None, llm.chat_template
    try:
        with pytest.raises(ValueError, match=r"chat\(chat_template=\.\.\.\)"):
            llm.chat([{"role": "user", "content": "x"}])
    finally:
        llm.chat_template = template


# -- metrics and records ----------------------------------------------------------------------------------------------


def stored_slots(state) -> int:
    """Distinct slots that hold a token of a row."""
    ids, lengths = np.asarray(state.table.block_ids)[0], np.asarray(state.table.seq_lens)
    size = state.table.block_size
    return len({(ids[r, p // size], p % size) for r in range(len(lengths)) for p in range(lengths[r])})


def test_records_and_metrics_count_what_happened(llm):
    llm.reset_prefix_cache()
    truth = []
    llm.watch = lambda state: truth.append((stored_slots(state), np.asarray(state.pool.ref_count)[1:].copy()))
    llm.recorder = recorder = Recorder(block_maps=True)
    before = llm.metrics.snapshot()
    prompts = [prompt(9), prompt(17), prompt(6), prompt(9)]
    params = [GREEDY, GREEDY, options(temperature=1.0, n=3), options(max_tokens=1)]
    outputs = llm.generate(ids(prompts), params, use_tqdm=False)
    outputs += llm.generate(ids(prompts[:1]), GREEDY, use_tqdm=False)
    records, after = list(recorder.records), llm.metrics.snapshot()
    gained = lambda name: after[name] - before[name]  # noqa: E731
    num_tokens = sum(len(c.token_ids) for o in outputs for c in o.outputs)
    num_cached = sum(o.num_cached_tokens for o in outputs)
    assert num_cached >= 8
    assert gained("generation_tokens") == sum(r.num_generated_tokens for r in records) == num_tokens
    assert gained("prefix_cache_hits") == num_cached
    assert gained("prompt_tokens") == sum(map(len, prompts)) + 9 - num_cached
    assert after["request_success"]["length"] - before["request_success"]["length"] == 7
    first, between = (f"{name}_seconds" for name in ("time_to_first_token", "inter_token_latency"))
    assert after[first]["count"] - before[first]["count"] == 7
    assert after[between]["count"] - before[between]["count"] == num_tokens - 7
    assert (after["num_requests_running"], after["kv_cache_usage_perc"]) == (0, 0.0)
    assert [r.num_stored_tokens for r in records] == [stored for stored, _ in truth]
    for record, block_map, (_, ref_count) in zip(records, recorder.block_maps, truth, strict=True):
        assert record.num_used_blocks == np.sum(ref_count > 0) == np.sum((block_map >= 0) | (block_map == -3))
        assert record.num_cached_blocks == np.sum(block_map == -2)
        assert np.array_equal(block_map == -3, ref_count > 1)
        assert len(set(block_map[block_map >= 0].tolist())) <= record.num_running
    assert any((m == -3).any() for m in recorder.block_maps)
    assert {r.kind for r in records} >= {"prefill", "decode"}
    assert [r.time for r in records] == sorted(r.time for r in records)
    for output in outputs:
        times = output.metrics
        assert times.arrival_time <= times.first_scheduled_time <= times.first_token_time
        assert times.first_token_time <= times.last_token_time <= times.finished_time


def test_abort_is_counted_and_nothing_of_it_stays(llm):
    before = llm.metrics.snapshot()["request_success"]["abort"]
    llm.add_request("a", ids([prompt(5)])[0], GREEDY)
    alive = weakref.ref(llm.core.waiting[-1])
    (output,) = llm.step()
    assert output.metrics.finished_time is None
    assert llm.abort("a")
    assert llm.metrics.snapshot()["request_success"]["abort"] == before + 1
    gc.collect()
    assert alive() is None


# -- preemption -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_streams_and_stop_strings_do_not_notice_preemption(llm, monkeypatch, mode):
    config = dataclasses.replace(llm.scheduler_config, preemption_mode=mode, watermark=0.0)
    monkeypatch.setattr(llm.core, "_scheduler", config)
    prompts = [prompt(length, 40 + length) for length in (5, 9, 7, 3, 6, 10, 11, 8)]  # 8 rows of up to 34 tokens in 160
    tokens = [dense_tokens(p, 24) for p in prompts]
    stop = [text_of(t[20:22]) for t in tokens]
    params = [options(max_tokens=24, stop=s, output_kind=DELTA) for s in stop]
    before, text = llm.metrics.snapshot(), {}
    llm.recorder = recorder = Recorder()
    for output in llm.stream(ids(prompts), params):
        text[int(output.request_id)] = text.get(int(output.request_id), "") + output.outputs[0].text
    expected = [text_of(t)[: text_of(t).index(s)] for t, s in zip(tokens, stop, strict=True)]
    assert [text[i] for i in sorted(text)] == expected
    gained = {k: v - before[k] for k, v in llm.metrics.snapshot().items() if isinstance(v, int)}
    assert gained["num_preemptions"] == gained[f"num_preemptions_{mode}"] > 0
    assert gained["swapped_in_blocks"] == gained["swapped_out_blocks"]
    assert (gained["swapped_out_blocks"] > 0) == (mode == "swap")
    assert sum(r.num_preemptions for r in recorder.records) == gained["num_preemptions"]
