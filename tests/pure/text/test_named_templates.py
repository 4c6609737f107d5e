"""The chat templates of a GGUF file by name. Those of folders are tested through the endpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from serve_app.text.named_templates import gguf_templates
from serve_app.text.template import ChatTemplate
from serve_app.text.tokenizer import TokenizerError

FILE = Path("model.gguf")


def test_templates_of_a_gguf_file():
    named = {"tokenizer.chat_templates": ["rag"], "tokenizer.chat_template.rag": "R", "tokenizer.ggml.model": "gpt2"}
    assert gguf_templates(FILE, named) == {"rag": "R"}
    assert gguf_templates(FILE, {**named, "tokenizer.chat_template": "D"}) == {"rag": "R", "default": "D"}
    assert gguf_templates(FILE, {}) == {}
    with pytest.raises(TokenizerError, match=r"model\.gguf"):
        gguf_templates(FILE, {"tokenizer.chat_template": 3})


def test_a_byte_order_mark_is_no_part_of_a_template():
    assert ChatTemplate("\ufeffa\ufeff").render([]) == "a\ufeff"


@pytest.mark.parametrize(
    ("source", "knows", "tests"),
    [
        ("{% if m['role'] == 'developer' %}{% endif %}", True, False),
        ("{% if 'developer' != m.role or false %}{% endif %}", True, False),
        ("{% macro turn(kind) %}{% if kind == 'developer' %}{% endif %}{% endmacro %}", True, False),
        ("{% if m['role'] in ('user', 'developer') %}{% endif %}", True, False),
        ("{% if m['role'] not in ['user', 'developer'] %}{% endif %}", True, False),
        ("{% set names = {'developer': 'system'} %}", True, False),
        ("{{ m.developer }}developer{# 'developer' #}{{ 'the developer' }}", False, False),
        ("{% if m.content is not none %}{% endif %}", False, True),
        ("{% if m['content'] != none %}{% endif %}", False, True),
        ("{% if m.tool_calls is none or 'content' == m.content or content is defined %}{% endif %}", False, False),
    ],
)
def test_what_a_template_asks_about(source, knows, tests):
    template = ChatTemplate(source)
    assert (template.knows_role("developer"), template.tests_content_for_none) == (knows, tests)


def test_the_function_of_a_call_is_no_role():
    calls = (
        "{% for c in m['tool_calls'] %}{% if 'function' in c and c['function'] and c.type == 'function' %}{{ c.function.name }}"
        "{% elif 'function' == c['type'] or c.function is defined %}{% endif %}{% endfor %}"
    )
    assert not ChatTemplate(calls).knows_role("function")
    assert ChatTemplate(calls + "{% if m.role == 'function' %}{% endif %}").knows_role("function")
