"""Request options through the engine: TINY against DENSE with the rules in NumPy, whatever else the engine does."""

import dataclasses
import itertools
import random

import numpy as np
import pytest
from doubles import TINY_CONFIG, ByteTokenizer, dense_logits, dense_tokens, ids, prompt, tiny_llm

from paged_jax import SamplingParams
from paged_jax.inputs import sample_seed

VOCAB = TINY_CONFIG.vocab_size
EOS = 7


@pytest.fixture(scope="module")
def llm():
    """One engine for all tests: 8 rows, ragged steps of 16 tokens, 4 decode steps a dispatch."""
    return tiny_llm(
        120, max_num_batched_tokens=16, eos_token_ids=EOS, tokenizer=ByteTokenizer(), preemption_mode="swap"
    )


def run(llm, prompts, params, *, before_step=lambda step: None):
    """Outputs in the order of the prompts; `before_step` may disturb the engine."""
    params = params if isinstance(params, list) else [params] * len(prompts)
    for i, (given, param) in enumerate(zip(ids(prompts), params, strict=True)):
        llm.add_request(f"r{i}", given, param)
    done, step = {}, 0
    while llm.has_unfinished_requests():
        before_step(step)
        done |= {o.request_id: o for o in llm.step()}
        step += 1
    assert llm.is_whole
    return [done[f"r{i}"] for i in range(len(prompts))]


def preempt(llm, state, mode):
    """Makes a running request wait again."""
    llm.core.preempt(state, mode)


def preempting(llm, seed):
    """Preempts a running request before every other step, by swap and by recompute in turns."""
    rng, modes = random.Random(seed), itertools.cycle([None, "swap", None, "recompute"])

    def before_step(_):
        mode = next(modes)
        if mode is not None and llm.core.running:
            preempt(llm, rng.choice(llm.core.running), mode)

    return before_step


# --- rules ---


def ruled(logits, given, generated, params, stop, minimum):
    """The rules on one row of logits, one after the other in float64."""
    x = logits.astype(np.float64)
    if params.allowed_token_ids is not None:
        x[~np.isin(np.arange(VOCAB), params.allowed_token_ids)] = -np.inf
    for token, bias in params.logit_bias:
        x[token] += bias
    for word in params.bad_words:
        word = list(word.encode())
        if generated[len(generated) - len(word) + 1 :] == word[:-1]:
            x[word[-1]] = -np.inf
    if len(generated) < minimum:
        x[list(stop)] = -np.inf
    seen = list({*given, *generated})
    x[seen] = np.where(x[seen] > 0, x[seen] / params.repetition_penalty, x[seen] * params.repetition_penalty)
    for token in set(generated):
        x[token] -= params.frequency_penalty * generated.count(token) + params.presence_penalty
    return x


def expected_tokens(given, params):
    """What TINY generates greedily under rules."""
    generated = []
    stop = {EOS, *params.stop_token_ids}
    while len(generated) < params.max_tokens and (not generated or generated[-1] not in stop):
        logits = dense_logits([*given, *generated])[-1]
        generated.append(int(np.argmax(ruled(logits, given, generated, params, stop, params.min_tokens))))
    return generated


def greedy(**options):
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 14} | options)


RULES = [
    greedy(),
    greedy(presence_penalty=2.0),
    greedy(frequency_penalty=1.5, repetition_penalty=1.3),
    greedy(repetition_penalty=0.7, max_tokens=9),
    greedy(logit_bias={5: 30.0, 6: 30.5}, presence_penalty=0.5),
    greedy(allowed_token_ids=[65, 66, 67, 68], bad_words=["AB", "CC", "D"], frequency_penalty=0.5),
    greedy(logit_bias={EOS: 60.0}, min_tokens=5),
    greedy(logit_bias={9: 40.0}, stop_token_ids=[9], min_tokens=3, presence_penalty=-1.0),
]
PROMPTS = [prompt(3 + 2 * i, first=i + 1) for i in range(len(RULES))]


def test_rules_for_mixed_neighbours_equal_numpy_on_dense_logits(llm):
    expected = [expected_tokens(p, r) for p, r in zip(PROMPTS, RULES, strict=True)]
    assert len({*map(tuple, expected)}) == len(RULES)
    outputs = run(llm, PROMPTS, RULES)
    assert [o.outputs[0].token_ids for o in outputs] == expected
    # The same rows again, each with another request: nothing of a former owner acts.
    outputs = run(llm, PROMPTS[3:] + PROMPTS[:3], RULES[3:] + RULES[:3])
    assert [o.outputs[0].token_ids for o in outputs] == expected[3:] + expected[:3]


@pytest.mark.parametrize("seed", range(4))
def test_rules_when_requests_are_preempted_give_the_same_tokens(llm, seed):
    expected = [expected_tokens(p, r) for p, r in zip(PROMPTS, RULES, strict=True)]
    llm.core.num_preemptions = dict.fromkeys(llm.core.num_preemptions, 0)
    outputs = run(llm, PROMPTS, RULES, before_step=preempting(llm, seed))
    assert [o.outputs[0].token_ids for o in outputs] == expected
    assert all(llm.core.num_preemptions.values())


def test_rules_when_one_step_runs_per_dispatch_give_the_same_tokens():
    one = tiny_llm(120, max_num_batched_tokens=16, eos_token_ids=EOS, tokenizer=ByteTokenizer(), decode_steps=1)
    outputs = run(one, PROMPTS, [dataclasses.replace(r, logprobs=1) for r in RULES])
    assert [o.outputs[0].token_ids for o in outputs] == [
        expected_tokens(p, r) for p, r in zip(PROMPTS, RULES, strict=True)
    ]


@pytest.mark.parametrize(("minimum", "expected"), [(0, [EOS]), (1, [5, EOS]), (4, [5] * 4 + [EOS])])
def test_b43_min_tokens_delays_the_end_of_sequence_by_exactly_that_many(llm, minimum, expected):
    params = greedy(max_tokens=6, logit_bias={EOS: 90.0, 5: 60.0}, min_tokens=minimum)
    stop_id = greedy(
        max_tokens=6, logit_bias={9: 90.0, 5: 60.0}, min_tokens=minimum, stop_token_ids=[9], ignore_eos=True
    )
    eos, stop = run(llm, [prompt(5)] * 2, [params, stop_id])
    assert eos.outputs[0].token_ids == expected
    assert stop.outputs[0].token_ids == [9 if t == EOS else t for t in expected]
    assert (eos.outputs[0].finish_reason, stop.outputs[0].stop_reason) == ("stop", 9)


@pytest.mark.parametrize(
    "options",
    [
        {"bad_words": ["A", "B"]},
        {"logit_bias": {40: 5.0, 41: 5.0}, "stop_token_ids": [40]},
        {"presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
        {"min_tokens": 6, "logit_bias": {EOS: 8.0}},
        {"allowed_token_ids": list(range(60, 97)), "logprobs": 2},
    ],
    ids=lambda o: next(iter(o)),
)
def test_b51_options_hold_for_each_of_n_samples(llm, options):
    params = SamplingParams(n=4, seed=1, temperature=1.5, max_tokens=8, **options)
    (together,) = run(llm, [prompt(6)], params, before_step=preempting(llm, 1))
    apart = [dataclasses.replace(params, n=1, seed=sample_seed(1, i)) for i in range(4)]
    alone = run(llm, [prompt(6)] * 4, apart)
    assert [o.token_ids for o in together.outputs] == [o.outputs[0].token_ids for o in alone]
    assert [o.finish_reason for o in together.outputs] == [o.outputs[0].finish_reason for o in alone]
    assert len({tuple(o.token_ids) for o in together.outputs}) >= 3  # two may draw a stop token at once
    tokens = [t for o in together.outputs for t in o.token_ids]
    if params.bad_words:
        assert not {65, 66} & set(tokens)
    if params.min_tokens:
        assert all(len(o.token_ids) >= 6 and EOS not in o.token_ids[:6] for o in together.outputs)
    if params.allowed_token_ids:
        assert min(tokens) >= 60
        assert all(len(o.logprobs) == len(o.token_ids) for o in together.outputs)


def test_rules_that_leave_no_token_end_that_request_alone(llm):
    params = [greedy(allowed_token_ids=[66], bad_words=["B"]), greedy(max_tokens=4)]
    impossible, fine = run(llm, [prompt(4), prompt(5, first=2)], params)
    assert (impossible.outputs[0].finish_reason, impossible.outputs[0].token_ids) == ("error", [])
    assert "leave no token to generate after 0 tokens" in str(impossible.error)
    assert (fine.error, fine.outputs[0].token_ids) == (None, dense_tokens(prompt(5, first=2), 4))
    # Bad words that leave none after some: "A" may be generated, "A" after "A" not, and nothing else is allowed.
    (later,) = run(llm, [prompt(4)], greedy(allowed_token_ids=[65], bad_words=["AA"]))
    assert (later.outputs[0].finish_reason, later.outputs[0].token_ids) == ("error", [65])


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"logit_bias": {VOCAB: 1.0}}, f"logit_bias: token id {VOCAB} is outside the vocabulary"),
        ({"allowed_token_ids": [2**31 - 1]}, "allowed_token_ids: token id 2147483647"),
        ({"bad_words": ["x" * 17]}, "has 17 tokens"),
    ],
)
def test_request_whose_options_do_not_fit_the_model_fails_alone(llm, params, message):
    given = ids([prompt(4), prompt(5, first=2)])
    refused, fine = llm.generate(given, [greedy(**params), greedy(max_tokens=4)], use_tqdm=False)
    assert message in str(refused.error)
    assert fine.outputs[0].token_ids == dense_tokens(prompt(5, first=2), 4)


def test_b103_rules_move_with_their_request_and_not_with_the_row(llm):
    """32 requests on 8 rows, each allowed three tokens of its own; aborts, preemptions, ids chosen by the caller."""
    rng = random.Random(0)
    own = [range(3 * r, 3 * r + 3) for r in range(32)]
    for r in range(32):
        params = SamplingParams(
            seed=r, temperature=2.0, max_tokens=rng.randrange(1, 12), ignore_eos=True,
            allowed_token_ids=list(own[r]), presence_penalty=0.1 * (r % 3), logprobs=3 if r % 4 == 0 else None,
        )  # fmt: skip
        name = "" if r == 0 else f"r{r % 31}"
        if r == 31:
            with pytest.raises(ValueError, match="already in use"):
                llm.add_request("r1", {"prompt_token_ids": prompt(4)}, params)
        llm.add_request(name, {"prompt_token_ids": prompt(2 + r % 9, first=1 + r)}, params)
    disturb, seen = preempting(llm, 5), {}
    while llm.has_unfinished_requests():
        disturb(0)
        if rng.random() < 0.2 and llm.core.requests:
            llm.abort(rng.choice(list(llm.core.requests)))
        for output in llm.step():
            seen[output.prompt_token_ids[0] - 1] = output
    assert llm.is_whole
    assert len(seen) > 16
    for r, output in seen.items():
        completion = output.outputs[0]
        assert {*completion.token_ids} <= {*own[r]}
        for entry in completion.logprobs or []:
            assert all(e.logprob <= 0 for e in entry.values())


# --- log-probabilities ---


def log_softmax(x):
    x = np.asarray(x, np.float64)
    return x - x.max() - np.log(np.exp(x - x.max()).sum())


def check_entry(entry, logits, token, num_top):
    """One entry in vLLM's form against the model's logits."""
    expected = log_softmax(logits)
    assert entry[token].logprob == pytest.approx(expected[token], abs=1e-4)
    top = [t for t in entry if entry[t].rank <= num_top]
    assert len(top) == num_top
    assert sorted(top, key=lambda t: entry[t].rank) == np.argsort(-expected, kind="stable")[:num_top].tolist()
    assert entry[token].rank == 1 + np.sum(expected > expected[token])
    for t, found in entry.items():
        assert found.logprob == pytest.approx(expected[t], abs=1e-4)
        assert found.decoded_token == ByteTokenizer().decode([t])


def test_logprobs_of_generated_tokens_equal_the_dense_model(llm):
    params = [
        SamplingParams(seed=i, temperature=t, top_k=k, max_tokens=9, logprobs=n, ignore_eos=True)
        for i, (t, k, n) in enumerate([(1.0, 0, 3), (0.0, 0, 0), (2.0, 20, 20), (1.0, 0, None)])
    ]
    outputs = run(llm, PROMPTS[:4], params, before_step=preempting(llm, 2))
    for given, param, output in zip(PROMPTS, params, outputs, strict=False):
        completion = output.outputs[0]
        if param.logprobs is None:
            assert (completion.logprobs, completion.cumulative_logprob) == (None, None)
            continue
        tokens = completion.token_ids
        logits = dense_logits([*given, *tokens])[len(given) - 1 :]
        assert len(completion.logprobs) == len(tokens) == 9
        for entry, row, token in zip(completion.logprobs, logits, tokens, strict=False):
            check_entry(entry, row, token, param.logprobs)
        own = [entry[token].logprob for entry, token in zip(completion.logprobs, tokens, strict=True)]
        assert completion.cumulative_logprob == pytest.approx(sum(own))


@pytest.mark.parametrize("chunk", [1, 4, 5, 13])
@pytest.mark.parametrize("disturbed", [False, True])
def test_b96_prompt_logprobs_do_not_depend_on_chunks_or_preemption(llm, monkeypatch, chunk, disturbed):
    from paged_jax import engine_core

    real = engine_core.plan_chunks
    monkeypatch.setattr(engine_core, "plan_chunks", lambda running, limit: real(running, min(limit, chunk)))

    def disturb(step):
        if disturbed and step in (1, 3, 6) and llm.core.running:
            preempt(llm, llm.core.running[0], "recompute" if step == 3 else "swap")

    given = prompt(13)
    run(llm, [given], greedy(max_tokens=1))  # now its prompt is cached, which must not matter
    params = [greedy(max_tokens=2, prompt_logprobs=3), greedy(max_tokens=3)]
    asked, neighbour = run(llm, [given, prompt(7, first=2)], params, before_step=disturb)
    assert len(asked.prompt_logprobs) == 13
    assert asked.prompt_logprobs[0] is None
    logits = dense_logits(given)
    for position in range(1, 13):
        check_entry(asked.prompt_logprobs[position], logits[position - 1], given[position], 3)
    assert neighbour.prompt_logprobs is None
    assert [o.outputs[0].token_ids for o in (asked, neighbour)] == [
        dense_tokens(given, 2),
        dense_tokens(prompt(7, first=2), 3),
    ]


def test_prompt_logprobs_when_the_prompt_has_one_token_are_one_none(llm):
    (output,) = run(llm, [[5]], greedy(max_tokens=1, prompt_logprobs=1))
    assert output.prompt_logprobs == [None]
