"""Chat prompts of folders with their templates in every file, against the `transformers` library's reading of the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from serve_app.openai.request.messages import conversation
from tests.support.models.text_folders import PLAIN, START, opened, write_folder

TURNS = (
    "{{ bos_token }}{% for m in messages %}\n"
    "  {%- if m.role == 'assistant' and m.tool_calls %}\n"
    "    {%- for call in m.tool_calls %}{% set f = call.function %}<call>{{ f.name }} {{ f.arguments | tojson }}{% endfor %}\n"
    "  {%- else %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}{{ eos_token }}\n  {%- endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}\n"
)
DEFAULTING = (
    "{% if messages[0].role != 'system' %}[system]default{% endif %}"
    "{% for m in messages %}{{ '[' + m['role'] + ']' + m['content'] }}{% endfor %}"
)
PAIRS = "{% for m in messages %}{% for c in m.tool_calls %}{% for k, v in c.function.arguments.items() %}<{{ k }}={{ v }}>" + (
    "{% endfor %}{% endfor %}{{ m.content if m.content is string }}{% endfor %}"
)
KNOWN = "{% for m in messages %}{% if m.role == 'developer' %}<dev>{% endif %}{{ m.content }}{% endfor %}"

TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " 😀 hi\n"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "w?"},
]


def history(arguments: Any, **fields: Any) -> list[dict[str, Any]]:
    """A talk with a call and its result."""
    call = {"id": "c1", "type": "function", "function": {"name": "w", "arguments": arguments}}
    return [
        *TALK,
        {"role": "assistant", "content": "", "tool_calls": [call], **fields},
        {"role": "tool", "tool_call_id": "c1", "content": "18", **fields},
    ]


def prompts(folder: Path, talk: list[dict[str, Any]], theirs: list[dict[str, Any]] | None = None) -> None:
    """Compare texts and tokens; `theirs` is the conversation as transformers is to be given it."""
    ours, library = opened(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    assert ours.template is not None
    assert ours.tokenizer is not None
    for more in (False, True):
        text = ours.template.render(conversation(talk, ours.template), add_generation_prompt=more)
        assert text == library.apply_chat_template(theirs or talk, add_generation_prompt=more, tokenize=False)
        ids = library.apply_chat_template(theirs or talk, add_generation_prompt=more, return_dict=True)["input_ids"]
        assert ours.tokenizer.encode(text, add_special_tokens=False) == ids


@pytest.mark.parametrize("template", [TURNS, PLAIN, DEFAULTING])
@pytest.mark.parametrize("where", ["jinja", "jinja with CRLF", "text", "named", "named with a file", "folder"])
def test_a_template_in_every_file(tmp_path: Path, where: str, template: str) -> None:
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": template}]
    entry = {"text": template, "named": named, "named with a file": [{"name": "default", "template": "no"}]}.get(where)
    folder = write_folder(tmp_path, "<s>", bos_token="<s>", **({"chat_template": entry} if entry else {}))
    if entry is None or where == "named with a file":
        ends = "\r\n" if "CRLF" in where else "\n"
        (folder / "chat_template.jinja").write_text(template, newline=ends)
    if where == "folder":
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "rag.jinja").write_text("no")
    prompts(folder, TALK)


def test_templates_as_transformers_saves_them(tmp_path: Path) -> None:
    first, saved = tmp_path / "first", tmp_path / "saved"
    first.mkdir()
    library = PreTrainedTokenizerFast.from_pretrained(write_folder(first, "<s>", bos_token="<s>"))
    library.chat_template = {"default": TURNS, "tool_use": "no", "rag": "R"}
    library.save_pretrained(saved)
    (saved / "config.json").write_text((first / "config.json").read_text())
    assert (saved / "additional_chat_templates" / "rag.jinja").exists()
    prompts(saved, TALK)
    assert opened(saved).template_names == ("default", "rag", "tool_use")
    library.chat_template = {"tool_use": "no", "rag": "R"}
    (saved / "chat_template.jinja").unlink()
    library.save_pretrained(saved)
    assert (opened(saved).template, opened(saved).template_names) == (None, ("rag", "tool_use"))
    with pytest.raises(ValueError, match="rag"):
        PreTrainedTokenizerFast.from_pretrained(saved).apply_chat_template(TALK, tokenize=False)


@pytest.mark.parametrize("arguments", [{"city": "Zürich", "n": [1, None, True]}, {}, {"a": {"b": "c"}}])
@pytest.mark.parametrize("template", [TURNS, PAIRS])
def test_a_history_with_calls(tmp_path: Path, template: str, arguments: dict[str, Any]) -> None:
    """What clients send as text is what transformers is given as an object, and null fields are none."""
    folder = write_folder(tmp_path, bos_token="<s>", chat_template=template)
    nulls = {"refusal": None, "annotations": [], "function_call": None, "name": None}
    prompts(folder, history(json.dumps(arguments), **nulls), history(arguments))
    prompts(folder, history(arguments), history(arguments))
    prompts(folder, history(arguments, content=None), history(arguments, content=None))
    talk = [{**each, "tool_calls": [], **nulls} for each in TALK]
    prompts(folder, talk, TALK)


@pytest.mark.parametrize("template", [TURNS, PLAIN, DEFAULTING])
def test_a_developer_is_the_system_unless_the_template_knows_it(tmp_path: Path, template: str) -> None:
    developer = [{**TALK[0], "role": "developer"}, *TALK[1:]]
    prompts(write_folder(tmp_path, bos_token="<s>", chat_template=template), developer, TALK)
    prompts(write_folder(tmp_path, chat_template=KNOWN), developer)


def test_one_start_token(tmp_path: Path) -> None:
    """The text of a rendered template has the tokens of the chat; transformers would add a second start token to it."""
    folder = write_folder(tmp_path, "<s>", bos_token="<s>", chat_template=TURNS)
    ours, library = opened(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    text = library.apply_chat_template(TALK, tokenize=False)
    ids = library.apply_chat_template(TALK, return_dict=True)["input_ids"]
    assert ours.tokenizer is not None
    assert ours.tokenizer.encode(text) == ids
    assert ids.count(START) == 1
    assert library.encode(text) == [START, *ids]
    assert ours.tokenizer.encode("x") == library.encode("x")
