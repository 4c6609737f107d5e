"""The chat command as a reader of event streams, also of other servers than this one."""

from __future__ import annotations

import json

import httpx
import pytest

from serve_app.commands.chat_command import _pieces

TEXTS = ["one\u2028two", "\x85", "", "é\u2029"]


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
@pytest.mark.parametrize("size", [1, 5, 10**6])
def test_only_newlines_end_a_line(line_end: str, size: int) -> None:
    events = [f"data: {json.dumps({'choices': [{'delta': {'content': text}}]}, ensure_ascii=False)}" for text in TEXTS]
    lines = [": a comment", "", *(line for event in events for line in (event, "")), ": another", "", "data: [DONE]", ""]
    body = (line_end.join(lines) + line_end).encode()

    def parts(_: httpx.Request) -> httpx.Response:
        return httpx.Response(200, content=(body[at : at + size] for at in range(0, len(body), size)))

    with httpx.Client(transport=httpx.MockTransport(parts), base_url="http://x") as client:
        assert list(_pieces(client, {})) == TEXTS
