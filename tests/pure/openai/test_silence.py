"""Streams say at once that the request is admitted, and comment lines break a long silence, in the queue too."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from actors.wire.requests import GenerateRequest, TokenEvent
from serve_app.openai.api import ApiSettings
from serve_app.routing.backend import BackendRefused
from tests.support.http_server import Server
from tests.support.stream_clients import READERS

DEADLINE_S = 10
ADMITTED = TokenEvent(request_id="")
PING_S = 0.02
PINGED = ApiSettings(sse_ping_s=PING_S)
CHAT = {"messages": [{"role": "user", "content": "x"}]}


class Call:
    """A streamed request as a server passes it to the application; `sent` are the messages of the answer so far."""

    def __init__(self, app: Any, body: dict[str, Any], path: str = "/v1/completions") -> None:
        self.sent: list[dict[str, Any]] = []
        self._gone, self._news = asyncio.Event(), asyncio.Condition()
        self._given = False
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "method": "POST", "path": path, "root_path": "", "scheme": "http",
            "query_string": b"", "headers": [(b"content-type", b"application/json")], "http_version": "1.1",
        }  # fmt: skip
        self._body = json.dumps(body | {"stream": True}).encode()
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if not self._given:
            self._given = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        async with self._news:
            self.sent.append(message)
            self._news.notify_all()

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S), self._news:
            await self._news.wait_for(holds)

    def leave(self) -> None:
        self._gone.set()

    @property
    def bodies(self) -> list[bytes]:
        return [message["body"] for message in self.sent[1:]]

    @property
    def comments(self) -> int:
        return sum(body.startswith(b":") for body in self.bodies)

    @property
    def events(self) -> list[str]:
        """The data of the events; each message but the last is one event or one comment, whole."""
        assert all(body.endswith(b"\n\n") for body in self.bodies if body)
        found = [body.decode() for body in self.bodies if body and not body.startswith(b":")]
        assert all(event.startswith("data: ") for event in found)
        return [event.removeprefix("data: ").removesuffix("\n\n") for event in found]


@pytest.mark.parametrize("body", [{"prompt": "x"}, {"prompt": ["x", "y"], "n": 2}, CHAT])
async def test_the_head_goes_out_when_all_are_admitted_and_comments_follow(
    endpoint: Callable[..., Any], body: dict[str, Any]
) -> None:
    hold, last = asyncio.Event(), asyncio.Event()
    choices = len(body["prompt"]) * body["n"] if "n" in body else 1

    def script(request: GenerateRequest) -> list[Any]:
        is_last = request.request_id.endswith(f"-{choices - 1}")
        return [*([last] if is_last else []), ADMITTED, hold, *b"abc"]

    api = endpoint(script, PINGED)
    call = Call(api.app, body, "/v1/chat/completions" if "messages" in body else "/v1/completions")
    async with asyncio.timeout(DEADLINE_S):
        while len(api.backend.requests) < choices:
            api.backend.changed.clear()
            await api.backend.changed.wait()
    await asyncio.sleep(2 * PING_S)
    assert call.sent == [], "one of the choices may still be refused"
    last.set()
    await call.until(lambda: len(call.sent) >= 1)
    assert call.sent[0]["status"] == 200
    assert (b"content-type", b"text/event-stream; charset=utf-8") in call.sent[0]["headers"]
    await call.until(lambda: call.comments >= 3)
    assert call.events == [], "nothing is told before there is something: clients measure the time to the first token"
    hold.set()
    await asyncio.wait_for(call.task, DEADLINE_S)
    assert call.events[-1] == "[DONE]"
    parts = [choice for event in call.events[:-1] for choice in json.loads(event)["choices"]]
    texts = [part["text"] if "text" in part else part["delta"].get("content", "") for part in parts]
    assert sorted("".join(texts)) == sorted("abc" * choices)
    if "messages" in body:
        assert parts[0]["delta"] == {"role": "assistant", "content": ""}


async def test_silence_between_tokens_is_broken_too_and_speech_is_not(endpoint: Callable[..., Any]) -> None:
    hold = asyncio.Event()
    api = endpoint([ADMITTED, *b"ab", hold, *b"cd"], ApiSettings(sse_ping_s=0.2))
    call = Call(api.app, {"prompt": "x"})
    began = time.monotonic()
    await call.until(lambda: call.comments == 2)
    assert time.monotonic() - began >= 0.4
    assert [body.startswith(b":") for body in call.bodies] == [False, False, True, True]
    hold.set()
    await asyncio.wait_for(call.task, DEADLINE_S)
    assert call.comments == 2


async def test_tokens_whose_text_is_held_back_are_silence(endpoint: Callable[..., Any]) -> None:
    hold = asyncio.Event()
    api = endpoint([ADMITTED, *b"stop", hold, *b"ped"], PINGED)
    call = Call(api.app, {"prompt": "x", "stop": "stopper"})
    await call.until(lambda: call.comments >= 2)
    assert call.events == []
    hold.set()
    await asyncio.wait_for(call.task, DEADLINE_S)
    assert "".join(json.loads(event)["choices"][0]["text"] for event in call.events[:-1]) == "stopped"


async def test_no_comments_where_none_are_wanted(endpoint: Callable[..., Any]) -> None:
    hold = asyncio.Event()
    api = endpoint([ADMITTED, hold, 65], ApiSettings(sse_ping_s=0))
    call = Call(api.app, {"prompt": "x"})
    await call.until(lambda: len(call.sent) == 1)
    await asyncio.sleep(5 * PING_S)
    assert len(call.sent) == 1
    hold.set()
    await asyncio.wait_for(call.task, DEADLINE_S)
    assert call.comments == 0


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (TokenEvent(request_id="", finish="error", error="a rank died"), "engine_error"),
        (TokenEvent(request_id="", finish="deadline"), "deadline_exceeded"),
        (TokenEvent(request_id="", finish="abort"), "engine_abort"),
    ],
)
async def test_what_fails_in_the_queue_is_an_error_event(endpoint: Callable[..., Any], failure: TokenEvent, code: str) -> None:
    hold = asyncio.Event()
    api = endpoint([ADMITTED, hold, failure], PINGED)
    call = Call(api.app, CHAT, "/v1/chat/completions")
    await call.until(lambda: call.comments >= 1)
    hold.set()
    await asyncio.wait_for(call.task, DEADLINE_S)
    assert call.sent[0]["status"] == 200
    error, end = call.events
    assert (json.loads(error)["error"]["code"], end) == (code, "[DONE]")


@pytest.mark.parametrize(("code", "status"), [("engine_busy", 429), ("engine_down", 503), ("prompt_too_long", 400)])
async def test_one_refused_choice_is_an_http_status(endpoint: Callable[..., Any], code: Any, status: int) -> None:
    """The others are admitted long before."""
    hold = asyncio.Event()
    refused = [hold, BackendRefused(code, "no")]
    api = endpoint(lambda request: refused if request.request_id.endswith("-2") else [ADMITTED, asyncio.Event()], PINGED)
    call = Call(api.app, {"prompt": "x", "n": 3})
    await asyncio.sleep(5 * PING_S)
    assert call.sent == []
    hold.set()
    await asyncio.wait_for(call.task, DEADLINE_S)
    assert call.sent[0]["status"] == status
    assert len(api.backend.cancelled) == 2


@pytest.mark.parametrize("tokens", [b"", b"ab"])
async def test_a_client_that_leaves_in_the_silence_is_noticed(endpoint: Callable[..., Any], tokens: bytes) -> None:
    api = endpoint([ADMITTED, *tokens, asyncio.Event()], PINGED)
    call = Call(api.app, {"prompt": "x", "n": 2})
    await call.until(lambda: call.comments >= 2)
    assert api.backend.cancelled == []
    call.leave()
    await asyncio.wait_for(call.task, DEADLINE_S)
    assert len(api.backend.cancelled) == 2
    told = len(call.sent)
    await asyncio.sleep(3 * PING_S)
    assert len(call.sent) == told, "a comment was sent to nobody"
    assert 'status="499"} 1.0' in (await api.client.get("/metrics")).text


@pytest.mark.parametrize("reader", READERS)
def test_comments_break_no_client(endpoint: Callable[..., Any], reader: str) -> None:
    calm = threading.Event()

    def script(_: Any) -> Any:
        yield ADMITTED
        for token in b"abc":
            yield pause
            yield token

    class Pause(asyncio.Event):
        async def wait(self) -> Any:
            await asyncio.sleep(6 * PING_S)
            calm.set()

    pause = Pause()
    api = endpoint(script, PINGED)
    with Server(api.app) as server:
        *events, end = READERS[reader](server.url, {"prompt": "x", "max_tokens": 3})
    assert end == "[DONE]"
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == "abc"
    assert calm.is_set()
