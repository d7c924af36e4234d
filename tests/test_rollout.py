"""examples/rollout.py: what the engine generates and what optax trains are one model."""

import jax
import numpy as np
import pytest
from flax import nnx

from examples import rollout as example
from models.llama import init_params


@pytest.fixture(scope="module")
def trained():
    return example.train(num_rounds=5)


def test_training_on_what_the_engine_generates_reaches_the_goal(trained):
    _, mean_rewards = trained
    assert mean_rewards[0] < 0.15
    assert mean_rewards[-1] > 0.5


def test_rollout_equals_a_teacher_forced_pass_before_and_after_training(trained):
    llm, _ = trained
    trained_params = llm.core.runner.params
    for params in (trained_params, init_params(example.CONFIG, nnx.Rngs(0))):
        llm.update_params(params)
        assert all(a is b for a, b in zip(*map(jax.tree.leaves, (params, llm.core.runner.params)), strict=True))
        rollout = example.roll_out(llm, [[1, 2, 3], [4, 5, 6, 8, 9]], num_samples=16)
        assert rollout.token_ids.shape == rollout.logprobs.shape == (32, 5 + example.MAX_TOKENS)
        np.testing.assert_array_equal(rollout.prompt_lens, [3] * 16 + [5] * 16)
        is_generated = np.asarray(example.is_generated(rollout))
        np.testing.assert_array_equal(is_generated.sum(axis=1), rollout.seq_lens - rollout.prompt_lens)
        ends = rollout.token_ids[np.arange(32), rollout.seq_lens - 1] == example.END
        assert ((rollout.seq_lens == rollout.prompt_lens + example.MAX_TOKENS) | ends).all()
        expected = np.asarray(example.teacher_forced(params, rollout))
        np.testing.assert_allclose(rollout.logprobs, expected, atol=1e-4)
        assert rollout.logprobs[is_generated].min() < -2  # not what any model would give
        assert not rollout.logprobs[~is_generated].any()
    assert len(set(rollout.seq_lens - rollout.prompt_lens)) > 1  # some ended early
