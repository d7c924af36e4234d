"""Chat templates: rendered as transformers does it, sandboxed, bounded, and failing alone."""

import subprocess

import pytest

from paged_jax import ChatTemplate, chat

MESSAGES = [{"role": "user", "content": "What is gravity?"}]


def render(source: str, messages=MESSAGES, **options) -> str:
    return ChatTemplate(source=source, bos_token="<s>", eos_token="</s>").render(messages, **options)


def test_render_trims_blocks_and_knows_tokens_loops_and_the_generation_prompt():
    source = "{{ bos_token }}\n  {% for m in messages %}\n{{ m.role }}{{ eos_token }}{% if loop.first %}{% break %}"
    source += "{% endif %}\n  {% endfor %}\n{% if add_generation_prompt %}\n  <assistant>{% endif %}\n\n"
    assert render(source, MESSAGES * 2) == "<s>\nuser</s>  <assistant>"
    assert render(source, MESSAGES * 2, add_generation_prompt=False) == "<s>\nuser</s>"


def test_render_offers_what_templates_expect():
    source = "{% generation %}{{ messages[0].content | tojson }}{{ strftime_now('%Y') | length }}{% endgeneration %}"
    source += "{{ tools is none }}{{ [1, 2] | tojson(indent=1) }}"
    assert render(source, [{"role": "user", "content": "<é>"}]) == '"<é>"4True[\n 1,\n 2\n]'


@pytest.mark.parametrize(
    ("source", "match"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "TemplateSyntaxError"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
        ("{{ messages.clear() }}", "SecurityError"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{% for i in range(10**9) %}{% endfor %}", "OverflowError"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
        ("{{ 'a' * 10**10 }}", "MemoryError"),
        ("{{ '%2000000000d' % 1 }}", "MemoryError"),
        ("{% set n = namespace(x='a') %}{% for _ in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}", "MemoryError"),
        ("{% for _ in range(30000) %}{{ 'x' * 1000 }}{% endfor %}", "longer than 16777216 characters"),
    ],
)
def test_render_with_bad_template_raises_value_error_that_says_why(source, match):
    with pytest.raises(ValueError, match=f"the chat template failed: .*{match}"):
        render(source)


def test_render_all_when_some_conversations_fail_renders_the_others(monkeypatch):
    monkeypatch.setattr(chat, "MAX_CPU_SECONDS", 0.3)
    source = "{% if messages[0].content == 'hang' %}"
    source += "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    source += (
        "{% elif messages[0].content == 'refuse' %}{{ raise_exception('no') }}{% endif %}{{ messages[0].content }}"
    )
    conversations = [[{"role": "user", "content": text}] for text in ("a", "hang", "b", "refuse", "hang", "c")]
    results = ChatTemplate(source=source).render_all([*conversations, [], ["x"], [{"role": "user"}], "text"])
    assert [r for r in results if isinstance(r, str)] == ["a", "b", "c"]
    errors = [str(r) for r in results if not isinstance(r, str)]
    assert "more than 0.3 s" in errors[0]
    assert "more than 0.3 s" in errors[2]
    assert "ValueError: no" in errors[1]
    assert "at least one message" in errors[3]
    assert "messages[0] must have 'role' and 'content'" in errors[4]
    assert "messages[0] must have 'role' and 'content'" in errors[5]
    assert "at least one message" in errors[6]


def test_render_with_content_that_is_no_json_names_it():
    with pytest.raises(ValueError, match="must consist of texts, numbers, lists and dicts"):
        render("x", [{"role": "user", "content": object()}])


def test_render_without_jinja2_says_how_to_install_it(monkeypatch):
    def run(command, **options):
        return subprocess.CompletedProcess(command, 1, b"", b"ModuleNotFoundError: No module named 'jinja2'")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(ImportError, match=r"pip install 'paged_jax\[load\]'"):
        render("x")
