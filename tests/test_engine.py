"""LLM: order of results, queueing, options, isolation of failures, its own API."""

import dataclasses
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from doubles import (
    TINY,
    AuditedLLM,
    ByteTokenizer,
    cache_config,
    dense_tokens,
    ids,
    oracle_llm,
    oracle_tokens,
    prompt,
    tiny_llm,
    tiny_params,
    tokens_of,
    with_several_sizes,
)

from paged_jax import LLM, RequestOutputKind, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=6)


@pytest.fixture(scope="module")
def shared_llm():
    return with_several_sizes(tiny_llm(40))


@pytest.fixture
def llm(shared_llm):
    yield shared_llm
    assert shared_llm.is_whole
    assert not shared_llm.has_unfinished_requests()


def generate(llm, prompts, params=GREEDY):
    return llm.generate(ids(prompts), params, use_tqdm=False)


def test_generate_more_prompts_than_rows_refills_rows_and_keeps_the_order(llm):
    prompts = [prompt(1 + n % 11, 1 + n) for n in range(30)]
    outputs = generate(llm, prompts)
    assert tokens_of(outputs) == [dense_tokens(p, 6) for p in prompts]
    assert [o.prompt_token_ids for o in outputs] == prompts


@pytest.mark.parametrize(("num_blocks", "decode_steps"), [(8, 5), (8, 1)])
def test_oracle_requests_through_a_scarce_pool_never_read_a_wrong_slot(num_blocks, decode_steps):
    llm = oracle_llm(num_blocks, decode_steps=decode_steps)
    prompts = [prompt(1 + (7 * n) % 13, 1 + n) for n in range(24)]
    params = [dataclasses.replace(GREEDY, max_tokens=1 + (5 * n) % 17) for n in range(24)]
    outputs = generate(llm, prompts, params)
    assert tokens_of(outputs) == [oracle_tokens(p, s.max_tokens) for p, s in zip(prompts, params, strict=True)]
    assert llm.is_whole


@pytest.mark.soak
@pytest.mark.parametrize("num_blocks", [6, 30])
def test_oracle_many_random_requests_leave_the_pool_whole(num_blocks):
    rng, llm = np.random.default_rng(num_blocks), oracle_llm(num_blocks)
    for _ in range(int(os.environ.get("SOAK_EXAMPLES", "2000")) // 50):
        prompts = [prompt(int(n), 1 + i) for i, n in enumerate(rng.integers(1, 13, 40))]
        params = [dataclasses.replace(GREEDY, max_tokens=int(n)) for n in rng.integers(1, 13, 40)]
        expected = [oracle_tokens(p, s.max_tokens) for p, s in zip(prompts, params, strict=True)]
        assert tokens_of(generate(llm, prompts, params)) == expected
        assert llm.is_whole


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_prefill_chunks_of_any_size_give_the_same_tokens(chunk):
    llm = tiny_llm(40, max_num_batched_tokens=chunk)
    prompts = [prompt(n) for n in (1, 4, 9, 17)]
    assert tokens_of(generate(llm, prompts)) == [dense_tokens(p, 6) for p in prompts]


def test_generate_sampling_does_not_depend_on_neighbours_rows_or_steps(llm):
    params = SamplingParams(temperature=0.9, top_p=0.95, seed=7, max_tokens=6)
    alone = tokens_of(generate(llm, [prompt(9)], params))[0]
    crowd = tokens_of(generate(llm, [prompt(n) for n in (3, 9, 5, 9)], params))
    other = tokens_of(generate(tiny_llm(40, decode_steps=1), [prompt(9)], params))[0]
    assert alone == crowd[1] == crowd[3] == other


def test_generate_without_seed_draws_differently_per_request_and_repeats_with_the_engine():
    params = SamplingParams(temperature=1.0, max_tokens=8)
    first, again = (tokens_of(generate(tiny_llm(40, seed=3), [prompt(5)] * 3, params)) for _ in range(2))
    assert first == again
    assert len({tuple(t) for t in first}) == 3


@pytest.mark.parametrize(("ignore_eos", "length"), [(False, 3), (True, 6)])
def test_eos_token_ends_a_request_unless_ignored(ignore_eos, length):
    expected = dense_tokens(prompt(5), 6)
    llm = tiny_llm(40, eos_token_ids=[expected[2]])
    (output,) = generate(llm, [prompt(5)], dataclasses.replace(GREEDY, ignore_eos=ignore_eos))
    assert output.outputs[0].token_ids == expected[:length]
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == (
        ("length", None) if ignore_eos else ("stop", None)
    )


def test_stop_token_is_reported_as_the_reason(llm):
    stop = dense_tokens(prompt(5), 6)[2]
    (output,) = generate(llm, [prompt(5)], dataclasses.replace(GREEDY, stop_token_ids=(96, stop)))
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", stop)


def test_generation_stops_at_max_model_len():
    llm = tiny_llm(40, max_blocks_per_seq=3)  # 12 tokens
    (output,) = generate(llm, [prompt(9)], SamplingParams(temperature=0, max_tokens=None))
    assert output.outputs[0].token_ids == dense_tokens(prompt(9), 3)
    assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize(("length", "is_served"), [(11, True), (12, False)])
def test_prompt_must_leave_room_for_one_token(length, is_served):
    (output,) = generate(tiny_llm(40, max_blocks_per_seq=3), [prompt(length)])
    assert (output.error is None) == is_served
    if not is_served:
        assert "max_model_len=12" in str(output.error)


def test_generation_stops_at_max_model_len_inside_a_block():
    llm = tiny_llm(40, max_model_len=10)
    (output,) = generate(llm, [prompt(7)], SamplingParams(temperature=0, max_tokens=None))
    assert output.outputs[0].token_ids == dense_tokens(prompt(7), 3)


@pytest.mark.parametrize("max_model_len", [0, 161])
def test_max_model_len_beyond_the_block_table_is_refused(max_model_len):
    with pytest.raises(ValueError, match="max_model_len"):
        tiny_llm(40, max_model_len=max_model_len)


@pytest.mark.parametrize("bad", [5, None, [1, 2], b"ab", {"text": "x"}, {"prompt": 3}])
def test_generate_prompt_of_the_wrong_kind_fails_alone(llm, bad):
    outputs = llm.generate([{"prompt_token_ids": prompt(3)}, bad], GREEDY, use_tqdm=False)
    assert outputs[0].outputs[0].token_ids == dense_tokens(prompt(3), 6)
    assert isinstance(outputs[1].error, TypeError)
    assert outputs[1].outputs[0].finish_reason == "error"


@pytest.mark.parametrize("bad", [[1.5], [[1, 2]], ["a"], [True]])
def test_generate_token_ids_that_are_no_integers_fail_alone(llm, bad):
    (output,) = generate(llm, [bad])
    assert "integers" in str(output.error)


def test_generate_text_without_tokenizer_fails_with_the_remedy(llm):
    (output,) = llm.generate("hello", GREEDY, use_tqdm=False)
    assert "tokenizer" in str(output.error)


def test_generate_with_tokenizer_takes_and_gives_text():
    llm = tiny_llm(40)
    llm.tokenizer = ByteTokenizer()
    (output,) = llm.generate("AB", GREEDY, use_tqdm=False)
    expected = dense_tokens([65, 66], 6)
    assert (output.prompt, output.outputs[0].token_ids) == ("AB", expected)
    assert output.outputs[0].text == bytes(expected).decode(errors="replace")


def test_generate_tokenizer_failure_fails_that_request_alone(llm):
    class Broken(ByteTokenizer):
        def decode(self, ids, skip_special_tokens=True):
            raise KeyError("no such id")

    llm.tokenizer = Broken()
    try:
        params = [GREEDY, dataclasses.replace(GREEDY, detokenize=False)]
        failed, fine = generate(llm, [prompt(3), prompt(5)], params)
    finally:
        llm.tokenizer = None
    assert isinstance(failed.error, KeyError)
    assert fine.outputs[0].token_ids == dense_tokens(prompt(5), 6)


def test_generate_tokenizer_that_cannot_encode_fails_that_prompt_alone(llm):
    class Broken(ByteTokenizer):
        def encode(self, text):
            raise KeyError(text)

    llm.tokenizer = Broken()
    try:
        failed, fine = llm.generate(["x", {"prompt_token_ids": prompt(5)}], GREEDY, use_tqdm=False)
    finally:
        llm.tokenizer = None
    assert "cannot encode" in str(failed.error)
    assert fine.outputs[0].token_ids == dense_tokens(prompt(5), 6)


def test_generate_params_of_another_type_fail_alone(llm):
    failed, fine = llm.generate(ids([prompt(3), prompt(5)]), [{"temperature": 0}, GREEDY], use_tqdm=False)
    assert "SamplingParams" in str(failed.error)
    assert fine.outputs[0].token_ids == dense_tokens(prompt(5), 6)


def test_generate_logits_that_are_not_finite_fail_alone():
    def broken(params, batch, cache):
        logits, cache = TINY(params, batch, cache)
        return jnp.where((batch.seq_lens == 7)[:, None], jnp.inf, logits), cache

    llm = tiny_llm(40, forward=broken)
    failed, fine = generate(llm, [prompt(5), prompt(9)])
    assert isinstance(failed.error, FloatingPointError)
    assert failed.outputs[0].finish_reason == "error"
    assert fine.outputs[0].token_ids == dense_tokens(prompt(9), 6)


def test_generate_one_prompt_may_be_given_alone(llm):
    (output,) = llm.generate({"prompt_token_ids": prompt(3)}, GREEDY, use_tqdm=False)
    assert output.outputs[0].token_ids == dense_tokens(prompt(3), 6)


def test_generate_dict_with_a_text_is_the_text():
    llm = tiny_llm(40)
    llm.tokenizer = ByteTokenizer()
    (output,) = llm.generate({"prompt": "AB"}, GREEDY, use_tqdm=False)
    assert (output.prompt, output.outputs[0].token_ids) == ("AB", dense_tokens([65, 66], 6))


@pytest.mark.parametrize("seed", [None, -1, 2**64, True, 1.5])
def test_engine_seed_out_of_range_is_refused_at_once(seed):
    with pytest.raises(ValueError, match="seed"):
        tiny_llm(20, seed=seed)


@pytest.mark.parametrize("eos", [[2**31], [-1], ["a"], range(17)])
def test_eos_token_ids_that_cannot_be_are_refused_at_once(eos):
    with pytest.raises(ValueError, match="eos_token_ids"):
        tiny_llm(20, eos_token_ids=eos)


@pytest.mark.parametrize(("eos", "expected"), [(None, ()), (3, (3,)), ([3, 4], (3, 4))])
def test_eos_token_ids_take_what_model_configurations_hold(eos, expected):
    assert tiny_llm(20, eos_token_ids=eos).eos_token_ids == expected


@pytest.mark.full_cache
def test_cache_with_fewer_layers_than_the_model_is_refused_with_the_remedy():
    config = dataclasses.replace(cache_config(4), num_layers=1, layer_groups=())
    with pytest.raises(ValueError, match="num_layers"):
        LLM(TINY, tiny_params(), config)


def test_generate_no_prompts_gives_no_outputs(llm):
    assert llm.generate([], GREEDY, use_tqdm=False) == []


def test_generate_params_of_another_number_than_prompts_raise(llm):
    with pytest.raises(ValueError, match="2 sampling_params for 1 prompts"):
        generate(llm, [prompt(3)], [GREEDY, GREEDY])


def test_step_api_returns_each_request_once_if_only_its_end_is_wanted(llm):
    final = dataclasses.replace(GREEDY, output_kind=RequestOutputKind.FINAL_ONLY)
    llm.add_request("a", {"prompt_token_ids": prompt(3)}, final)
    llm.add_request("b", {"prompt_token_ids": prompt(5)}, dataclasses.replace(final, max_tokens=1))
    finished = []
    while llm.has_unfinished_requests():
        finished += llm.step()
    assert [o.request_id for o in finished] == ["b", "a"]
    assert tokens_of(finished) == [dense_tokens(prompt(5), 1), dense_tokens(prompt(3), 6)]
    assert llm.step() == []


@pytest.mark.parametrize("kind", [RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA])
def test_stream_gives_every_token_once_and_what_generate_gives(llm, kind):
    prompts, last, joined = [prompt(3), prompt(9), prompt(1)], {}, {}
    params = dataclasses.replace(GREEDY, output_kind=kind, max_tokens=11)
    for output in llm.stream([*ids(prompts), 5], params):
        last[output.request_id] = output
        joined.setdefault(output.request_id, []).extend(output.outputs[0].token_ids)
    first = min(map(int, last))
    *served, failed = (last[str(first + i)] for i in range(4))
    assert isinstance(failed.error, TypeError)
    tokens = [joined[o.request_id] for o in served] if kind == RequestOutputKind.DELTA else tokens_of(served)
    assert tokens == [dense_tokens(p, 11) for p in prompts]
    assert all(o.finished for o in served)


def test_stream_that_is_left_early_drops_its_requests(llm):
    for output in llm.stream(ids([prompt(3), prompt(9)]), dataclasses.replace(GREEDY, max_tokens=30)):
        assert not output.finished
        break
    assert llm.is_whole


def test_add_request_with_an_id_in_use_is_refused(llm):
    llm.add_request("a", {"prompt_token_ids": prompt(3)}, GREEDY)
    with pytest.raises(ValueError, match="'a' is already in use"):
        llm.add_request("a", {"prompt_token_ids": prompt(5)}, GREEDY)
    llm.abort_all()


def test_generate_while_requests_are_unfinished_is_refused(llm):
    llm.add_request("a", {"prompt_token_ids": prompt(3)}, GREEDY)
    with pytest.raises(RuntimeError, match="idle"):
        generate(llm, [prompt(3)])
    llm.abort_all()


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_abort_all_at_any_moment_gives_every_block_back(llm, num_steps):
    for n in range(3):
        llm.add_request(str(n), {"prompt_token_ids": prompt(20, n + 1)}, dataclasses.replace(GREEDY, max_tokens=20))
    for _ in range(num_steps):
        llm.step()
    llm.abort_all()
    assert llm.is_whole
    assert tokens_of(generate(llm, [prompt(9)])) == [dense_tokens(prompt(9), 6)]


def test_interrupted_generate_leaves_an_idle_engine(llm, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(llm._runner, "decode", interrupt)
    with pytest.raises(KeyboardInterrupt):
        generate(llm, [prompt(9)])


@pytest.mark.parametrize("moment", ["prefill", "decode with an ending row", "state lost"])
def test_interrupt_after_the_device_ran_leaves_an_idle_whole_engine(llm, monkeypatch, moment):
    """The host hears of nothing that this step did."""
    real_run, calls = llm._runner._run, []

    def interrupted(program, *plan, **options):
        calls.append(None)
        if len(calls) < (2 if moment == "decode with an ending row" else 1):
            return real_run(program, *plan, **options)
        if moment == "state lost":
            program(llm._runner.params, llm._runner._state, *plan, **options)  # takes the donated state
        else:
            real_run(program, *plan, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(llm._runner, "_run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        generate(llm, [prompt(9, 1), prompt(5, 2)], [dataclasses.replace(GREEDY, max_tokens=2), GREEDY])
    monkeypatch.undo()
    assert llm.is_whole
    assert tokens_of(generate(llm, [prompt(9, 3)])) == [dense_tokens(prompt(9, 3), 6)]


def test_step_that_fails_before_it_ran_leaves_nothing_behind(llm, monkeypatch):
    def fails(_):
        raise MemoryError

    monkeypatch.setattr(llm._runner, "prefill", fails)
    with pytest.raises(MemoryError):
        generate(llm, [prompt(9)])
    monkeypatch.undo()
    assert tokens_of(generate(llm, [prompt(9)])) == [dense_tokens(prompt(9), 6)]


def test_too_many_stop_tokens_fail_alone_with_the_limit(llm):
    (output,) = generate(llm, [prompt(3)], dataclasses.replace(GREEDY, stop_token_ids=tuple(range(17))))
    assert "limit is 16" in str(output.error)


@pytest.mark.full_cache
def test_occupancy_is_reported(llm):
    llm.core.peak_blocks = 0
    generate(llm, [prompt(9)], dataclasses.replace(GREEDY, max_tokens=8))  # 16 stored tokens
    assert llm.peak_blocks == 4
    assert (llm.num_free_blocks, llm.kv_cache_usage) == (40, 0.0)


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (lambda p, b, c: b.token_ids, "return"),
        (lambda p, b, c: (jnp.zeros((3, 97)), c), "logits"),
        (lambda p, b, c: (jnp.zeros((8, 97)), c.k), "cache"),
    ],
)
def test_model_that_breaks_the_contract_is_refused_at_once(forward, message):
    with pytest.raises(ValueError, match=message):
        LLM(forward, {}, cache_config(4))


def test_cache_config_that_does_not_fit_the_model_is_refused_with_the_remedy():
    config = dataclasses.replace(cache_config(4), head_dim=16)
    with pytest.raises(ValueError, match="CacheConfig"):
        LLM(TINY, tiny_params(), config)


@pytest.mark.parametrize("vocab_size", [0, 98, 50.5, True])
def test_vocab_size_beyond_the_logits_is_refused(vocab_size):
    with pytest.raises(ValueError, match="vocab_size"):
        LLM(TINY, tiny_params(), cache_config(4), vocab_size=vocab_size)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_implementation_option_reaches_the_model(implementation):
    llm = tiny_llm(40, implementation=implementation)
    assert tokens_of(generate(llm, [prompt(5)])) == [dense_tokens(prompt(5), 6)]


def test_unknown_implementation_is_refused_at_once():
    with pytest.raises(ValueError, match="implementation"):
        tiny_llm(20, implementation="cuda")


def test_bfloat16_cache_on_a_cpu_stays_close_to_float32():
    config = dataclasses.replace(cache_config(20), dtype="bfloat16")
    outputs = generate(AuditedLLM(TINY, tiny_params(), config, max_num_batched_tokens=16, decode_steps=4), [prompt(5)])
    assert outputs[0].error is None
    assert tokens_of(outputs)[0][:2] == dense_tokens(prompt(5), 2)


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="the options are used from JAX 0.12 on only")
@pytest.mark.parametrize("message", ["No such compile option: 'x'", "out of memory"])
def test_compile_option_unknown_to_xla_is_left_out_and_other_errors_are_not_hidden(message, monkeypatch):
    from paged_jax.runner import _compile

    monkeypatch.setattr("paged_jax.runner._has_compilation_cache", lambda: False)

    class Lowered:
        def compile(self, compiler_options=None):
            if compiler_options:
                raise jax.errors.JaxRuntimeError(message)
            return "plain"

    if message.startswith("No such"):
        assert _compile(Lowered(), "decode", 8) == "plain"
    else:
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            _compile(Lowered(), "decode", 8)
