"""A real server on a folder with its text in many files: what they say decides prompts and ends of real answers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.ray.server import Server, serving
from tests.support.models.text_folders import BASE_END, START, TURN_END, write_tokenizer
from tests.support.models.tiny_models import tiny

pytestmark = pytest.mark.long

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if 'tool_calls' in m %}"
    "{% for k, v in m.tool_calls[0].function.arguments | items %}<{{ k }}={{ v }}>{% endfor %}"
    "{% else %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A model of bytes that has its start token in tokenizer.json, one end token in config.json and another in
    tokenizer_config.json, and its template in chat_template.json, behind a byte order mark."""
    folder = tmp_path_factory.mktemp("models") / "texts"
    made = tiny("llama2", vocab_size=264, bos_token_id=None, eos_token_id=BASE_END, max_position_embeddings=512)
    shutil.copytree(made.folder, folder)
    (folder / "generation_config.json").unlink()
    write_tokenizer(folder, "<s>")
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": {"content": "<|im_end|>"}}))
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}), encoding="utf-8-sig")
    with serving(str(folder)) as running:
        yield running


@pytest.mark.parametrize("end", [TURN_END, BASE_END])
def test_an_end_token_of_either_file_ends_an_answer(server: Server, end: int) -> None:
    body: dict[str, Any] = {"prompt": "Hi", "max_tokens": 20, "temperature": 0, "logit_bias": {str(end): 100}}
    answer = server.post("/v1/completions", body)
    [choice] = answer["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("", "stop", None)
    assert answer["usage"]["completion_tokens"] == 1
    answer = server.post("/v1/completions", body | {"ignore_eos": True})
    assert (answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]) == ("length", 20)


def test_a_chat_and_its_text_have_the_same_tokens(server: Server) -> None:
    chat = server.post("/tokenize", {"messages": [{"role": "user", "content": "Hi"}]})["tokens"]
    assert chat == [START, *b"[user]Hi"]
    for prompt in ("<s>[user]Hi", "[user]Hi"):
        assert server.post("/tokenize", {"prompt": prompt})["tokens"] == chat
        answer = server.post("/v1/completions", {"prompt": prompt, "max_tokens": 1, "return_token_ids": True})
        assert answer["choices"][0]["prompt_token_ids"] == chat
        assert answer["usage"]["prompt_tokens"] == len(chat)


def test_a_history_of_a_client(server: Server) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "w", "arguments": '{"city": "Paris"}'}}
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "w?", "name": None},
        {"role": "assistant", "content": None, "refusal": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "18"},
    ]
    ids = server.post("/tokenize", {"messages": messages})["tokens"]
    text = server.post("/detokenize", {"tokens": ids})["prompt"]
    assert text == "<s>[system]Be brief.[user]w?<city=Paris>[tool]18"
    answer = server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 2, "return_token_ids": True})
    assert answer["prompt_token_ids"] == ids
