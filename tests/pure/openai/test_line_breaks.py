"""No character of a text breaks an event or an answer in two, whatever the client takes for the end of a line."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest

from serve_app.openai.response.encoding import dumps, sse
from tests.support.http_server import Server
from tests.support.stream_clients import READERS

BREAKERS = [chr(code) for code in range(sys.maxunicode + 1) if len(f"a{chr(code)}b".splitlines()) > 1]
TEXT = "".join(f"{index}{breaker}" for index, breaker in enumerate(BREAKERS)) + "é€😀"


def test_every_character_at_which_python_breaks_lines_is_escaped() -> None:
    assert {"\x85", "\u2028", "\u2029", "\v", "\f", "\x1c", "\n"} <= set(BREAKERS)
    for breaker in BREAKERS:
        value = {f"key{breaker}": [f"one{breaker}two"]}
        written = dumps(value)
        assert len(written.decode().splitlines()) == len(written.splitlines()) == 1, repr(breaker)
        assert json.loads(written) == value
        assert sse(value).decode().splitlines() == [f"data: {written.decode()}", ""]


def test_other_characters_go_out_as_they_are() -> None:
    assert dumps("é€😀\u200b\ufeff\x7f").decode() == '"é€😀\u200b\ufeff\x7f"'


@pytest.mark.parametrize("chat", [False, True])
async def test_answers_and_streams_with_all_of_them(endpoint: Callable[..., Any], chat: bool) -> None:
    api = endpoint(list(TEXT.encode()))
    ask: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]} if chat else {"prompt": "x"}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    body = ask | {"max_tokens": 60, "logprobs": True if chat else 2}
    choices, answer = await api.both(path, body)
    assert choices[0]["text"] == TEXT
    assert all(len(line.splitlines()) == 1 for line in answer.data)
    whole = await api.post(path, body)
    assert len(whole.text.splitlines()) == 1


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/models/a%E2%80%A8b", "/detokenize"])
async def test_errors_and_other_routes(endpoint: Callable[..., Any], path: str) -> None:
    api = endpoint([])
    if "models" in path:
        answer = await api.client.get(path)
        assert answer.status_code == 404
    else:
        answer = await api.post(path, {"prompt": 7, "tokens": list(TEXT.encode()), "model": None})
    assert len(answer.text.splitlines()) == 1
    if path == "/detokenize":
        assert answer.json() == {"prompt": TEXT}


@pytest.mark.parametrize("reader", READERS)
def test_five_clients_read_the_same_text(endpoint: Callable[..., Any], reader: str) -> None:
    api = endpoint(list(TEXT.encode()))
    with Server(api.app) as server:
        *events, end = READERS[reader](server.url, {"prompt": "x", "max_tokens": 60})
    assert end == "[DONE]"
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == TEXT
