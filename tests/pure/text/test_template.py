"""Chat templates: the conventions models are written for, and what they may not do."""

from __future__ import annotations

import pickle

import pytest

from serve_app.text.template import ChatTemplate, TemplateError

TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": " well "}]
PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"


def render(source, messages=TALK, **options):
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages, **options)


def test_blocks_leave_no_white_space():
    source = "  {% if true %}\na\n  {% endif %}\nb"
    assert render(source) == "a\nb"


def test_generation_prompt():
    assert render(PLAIN) == "[user]hi[assistant] well [assistant]"
    assert render(PLAIN, add_generation_prompt=False) == "[user]hi[assistant] well "


def test_the_final_message_is_left_open():
    closed = PLAIN.replace("{{ m.content }}", "{{ m.content }}<end>\n")
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert render(closed, **options) == "[user]hi<end>\n[assistant] well "
    trimmed = closed.replace("{{ m.content }}", "{{ m.content | trim }}")
    assert render(trimmed, **options) == "[user]hi<end>\n[assistant]well"
    with pytest.raises(TemplateError, match="final message"):
        render("{{ messages[0].content }}", **options)


def test_names_a_template_may_use():
    assert render("{{ bos_token }}{{ thinking }}", arguments={"thinking": "no"}) == "<s>no"
    assert render("{{ messages[0] | tojson }}{{ '<é>' | tojson }}") == '{"role": "user", "content": "hi"}"<é>"'
    assert render("{{ strftime_now('%Y') | length }}") == "4"
    assert render("{% for m in messages %}{% if loop.index0 == 1 %}{% break %}{% endif %}{{ m.role }}{% endfor %}") == "user"
    assert render("{% generation %}a{% endgeneration %}{{ 'tools' if tools is not none }}") == "a"
    assert render("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}") == "2"


def test_a_template_may_refuse():
    with pytest.raises(TemplateError, match=r"^no system$"):
        render("{{ raise_exception('no system') }}")
    with pytest.raises(TemplateError, match="failed"):
        render("{{ messages[9].content.x }}")
    with pytest.raises(TemplateError, match="cannot be read"):
        render("{% if %}")


@pytest.mark.parametrize(
    "source",
    ["{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ messages.append(1) }}", "{{ raise_exception.__globals__['json'] }}"],
)
def test_a_template_is_kept_in_its_sandbox(source):
    with pytest.raises(TemplateError):
        render(source)


def test_a_template_survives_a_pickle():
    assert pickle.loads(pickle.dumps(ChatTemplate(PLAIN))).render(TALK) == render(PLAIN)
