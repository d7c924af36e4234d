"""Chat templates, and the tokenizer of SmolLM2 against the recorded prompts."""

import pytest

from models import render_chat

MESSAGES = [{"role": "user", "content": "What is gravity? Answer in one sentence."}]


def test_render_chat_trims_blocks_and_passes_tokens():
    template = "{{ bos_token }}\n  {% for m in messages %}\n{{ m.role }}{% if loop.first %}{% break %}{% endif %}\n"
    template += "  {% endfor %}\nend"
    assert render_chat(template, [*MESSAGES, *MESSAGES], bos_token="<s>") == "<s>\nuserend"


def test_render_chat_writes_json_without_html_escapes():
    assert render_chat("{{ messages[0].content | tojson }}", [{"role": "user", "content": "<é>"}]) == '"<é>"'


def test_render_chat_without_generation_prompt_tells_the_template():
    assert render_chat("{{ add_generation_prompt }}", MESSAGES, add_generation_prompt=False) == "False"


@pytest.mark.parametrize(
    ("template", "match"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "TemplateSyntaxError"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
        ("{{ messages.clear() }}", "SecurityError"),
        ("{% for i in range(10**9) %}{% endfor %}", "OverflowError"),
    ],
)
def test_render_chat_with_bad_template_raises_value_error(template, match):
    with pytest.raises(ValueError, match=match):
        render_chat(template, list(MESSAGES))


@pytest.mark.parametrize("messages", [["hello"], [{"role": "user"}]])
def test_render_chat_with_malformed_message_names_it(messages):
    with pytest.raises(ValueError, match=r"messages\[0\] must have 'role' and 'content'"):
        render_chat("", messages)


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
    assert render_chat(smollm2.chat_template, MESSAGES) == smollm2_reference["chat_gravity"]["prompt"]
