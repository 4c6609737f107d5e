"""C02: a client that goes away frees its sequences at once, whichever way it was being answered."""

from __future__ import annotations

import asyncio
import json

import pytest

DEADLINE_S = 10


JSON = [(b"content-type", b"application/json")]


async def call(app, body, headers=JSON, gone: asyncio.Event | None = None, spec="2.4"):
    """Drive the application as a server does. `gone`: when set, the client has left. Returns the messages sent."""
    sent, first = [], asyncio.Event()
    given = False

    async def receive():
        nonlocal given
        if not given:
            given = True
            return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}
        await (gone or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)
        first.set()

    scope = {
        "type": "http", "asgi": {"version": "3.0", "spec_version": spec}, "method": "POST", "path": "/v1/completions",
        "raw_path": b"/v1/completions", "root_path": "", "scheme": "http", "query_string": b"", "headers": list(headers),
        "server": ("toy", 80), "client": ("toy", 1), "http_version": "1.1",
    }  # fmt: skip
    await app(scope, receive, send)
    return sent


async def until(backend, condition):
    """Wait for the backend to change until `condition` holds."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            backend.changed.clear()
            await backend.changed.wait()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokens", [0, 3])
@pytest.mark.parametrize("spec", ["2.0", "2.4"])
async def test_four_of_eight_clients_leave(endpoint, stream, tokens, spec):
    """They leave while queued (no token yet) or while decoding; the others' answers are as if alone."""
    hold = asyncio.Event()

    def script(request):
        return [*b"abc"[:tokens], hold, *b"xyz"]

    api = endpoint(script)
    gone = [asyncio.Event() for _ in range(8)]
    body = {"prompt": "p", "max_tokens": 40, "stream": stream, "n": 2}
    calls = [asyncio.create_task(call(api.app, body, gone=event, spec=spec)) for event in gone]
    await until(api.backend, lambda: len(api.backend.requests) == 16)
    for event in gone[:4]:
        event.set()
    await until(api.backend, lambda: len(api.backend.cancelled) == 8)
    hold.set()
    answers = await asyncio.wait_for(asyncio.gather(*calls), DEADLINE_S)
    for messages in answers[4:]:
        text = b"".join(message.get("body", b"") for message in messages).decode()
        assert text.count("[DONE]") == stream
        assert text.count("x") >= 2
    assert len(api.backend.finished) == 8
    assert len(api.backend.cancelled) == 8
    metrics = (await api.client.get("/metrics")).text
    assert 'shardwright_requests_total{endpoint="completions",status="499"} 4.0' in metrics
    assert 'shardwright_requests_total{endpoint="completions",status="200"} 4.0' in metrics
    assert 'shardwright_requests_running{endpoint="completions"} 0.0' in metrics


@pytest.mark.parametrize("stream", [False, True])
async def test_a_cancelled_handler_cancels_its_sequences(endpoint, stream):
    """Some servers cancel the handler instead of telling it."""
    hold = asyncio.Event()
    api = endpoint(lambda _: [*b"abc", hold])
    task = asyncio.create_task(call(api.app, {"prompt": "p", "stream": stream, "n": 2}))
    await until(api.backend, lambda: len(api.backend.requests) == 2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(api.backend.cancelled) == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_a_hundred_normal_requests_cancel_nothing(endpoint, stream):
    api = endpoint([b"AB", b"CD"])
    body = {"prompt": "p", "stream": stream, "n": 2, "max_tokens": 3}
    await asyncio.gather(*(call(api.app, body) for _ in range(100)))
    assert len(api.backend.finished) == 200
    assert api.backend.cancelled == []


async def test_a_client_that_leaves_while_sending_its_request(endpoint):
    api = endpoint([b"AB"])
    sent = []
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "method": "POST", "path": "/v1/completions", "root_path": "",
        "scheme": "http", "query_string": b"", "headers": JSON, "http_version": "1.1",
    }  # fmt: skip
    parts = iter([{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}])

    async def receive():
        return next(parts)

    async def send(message):
        sent.append(message)

    await api.app(scope, receive, send)
    assert api.backend.requests == []
    assert 'status="499"} 1.0' in (await api.client.get("/metrics")).text
