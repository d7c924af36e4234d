"""Tokenizer and chat template of SmolLM2 against the recorded prompts."""

import pytest

from paged_jax import ChatTemplate

MESSAGES = [{"role": "user", "content": "What is gravity? Answer in one sentence."}]


PROMPTS = ["france", "story", "code", "chat_gravity", "chat_long"]


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
