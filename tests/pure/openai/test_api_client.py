"""The official client, over a real server and a real socket."""

from __future__ import annotations

import asyncio
import threading

import httpx
import openai
import pytest

from serve_app.openai.api import ApiSettings
from serve_app.routing.backend import BackendRefused
from tests.support.http_server import DEADLINE_S, Server

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
def serve(endpoint):
    """Serve an endpoint and make a client for it; both are closed at the end."""
    opened = []

    def make(script, key="one", **changes):
        api = endpoint(script, ApiSettings(api_keys=("one",)), **changes)
        server = Server(api.app).__enter__()
        client = openai.OpenAI(base_url=server.url + "/v1", api_key=key, max_retries=0, timeout=DEADLINE_S)
        opened.append((server, client))
        return api, client, server

    yield make
    for server, client in opened:
        client.close()
        server.__exit__()


def test_answers_and_streams(serve):
    _, client, _ = serve([b"\xf0\x9f", b"\x98\x80", b" the", b"AB"])
    assert [model.id for model in client.models.list()] == ["toy", "alias"]
    assert client.models.retrieve("toy").id == "toy"
    chat = client.chat.completions.create(model="toy", messages=MESSAGES, logprobs=True, top_logprobs=2, stop="AB")
    assert chat.choices[0].message.content == "😀 the"
    assert chat.choices[0].finish_reason == "stop"
    assert len(chat.choices[0].logprobs.content) == 4
    assert chat.usage.total_tokens == chat.usage.prompt_tokens + 4
    with client.chat.completions.create(
        model="toy", messages=MESSAGES, stream=True, stream_options={"include_usage": True}, stop="AB"
    ) as stream:
        chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "😀 the"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage == chat.usage
    assert len({chunk.id for chunk in chunks}) == 1
    text = client.completions.create(model="toy", prompt=["x", "y"], n=2, echo=True, logprobs=1, max_tokens=3)
    assert [choice.text for choice in text.choices] == ["x😀 the", "x😀 the", "y😀 the", "y😀 the"]
    assert text.choices[0].logprobs.text_offset == [0, 1, 1, 2]


@pytest.mark.parametrize(
    ("options", "error", "code"),
    [
        ({"model": "other"}, openai.NotFoundError, "model_not_found"),
        ({"temperature": 9}, openai.BadRequestError, "invalid_value"),
        ({"messages": MESSAGES * 2}, openai.BadRequestError, "invalid_value"),
        ({"messages": [{"role": "user", "content": "x" * 99}]}, openai.BadRequestError, "context_length_exceeded"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, openai.BadRequestError, "unsupported_parameter"),
        ({"user": "busy"}, openai.RateLimitError, "engine_busy"),
        ({"user": "down"}, openai.InternalServerError, "engine_down"),
        ({"user": "bug"}, openai.InternalServerError, "internal_error"),
    ],
)
def test_error_classes(serve, options, error, code):
    failures = {
        "busy": BackendRefused("engine_busy", "full"),
        "down": BackendRefused("engine_down", "down"),
        "bug": RuntimeError("bug"),
    }
    _, client, _ = serve(lambda request: [failures[request.tenant]])
    for stream in (False, True):
        with pytest.raises(error) as caught:
            client.chat.completions.create(**{"model": "toy", "messages": MESSAGES, "stream": stream} | options)
        assert caught.value.code == code
        assert caught.value.response.headers["content-type"] == "application/json"


def test_a_wrong_key(serve):
    _, client, _ = serve([], key="two")
    with pytest.raises(openai.AuthenticationError) as caught:
        client.models.list()
    assert caught.value.code == "invalid_api_key"


def test_a_failing_stream_raises_in_the_client_and_ends(serve):
    _, client, server = serve([*b"hello", RuntimeError("boom")])
    text = ""
    stream = client.chat.completions.create(model="toy", messages=MESSAGES, stream=True)
    with pytest.raises(openai.APIError) as caught:  # noqa: PT012  (what came before the error is kept)
        for chunk in stream:
            text += chunk.choices[0].delta.content or ""
    assert (text, caught.value.code) == ("hello", "internal_error")
    with httpx.Client(timeout=DEADLINE_S) as plain:
        body = {"messages": MESSAGES, "stream": True}
        raw = plain.post(server.url + "/v1/chat/completions", json=body, headers={"authorization": "Bearer one"})
    assert raw.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_closes_its_socket(serve, stream):
    freed = threading.Event()

    def script(request):
        return [*b"abc", *(asyncio.Event() for _ in range(1))] if request.tenant == "stuck" else [b"A"[0]]

    api, client, server = serve(script)
    generate = api.backend.generate

    async def watched(request):
        try:
            async for event in generate(request):
                yield event
        finally:
            freed.set()

    api.backend.generate = watched
    body = {"prompt": "x", "user": "stuck", "stream": stream}
    headers = {"authorization": "Bearer one"}
    with (
        httpx.Client(timeout=0.5) as plain,
        pytest.raises(httpx.ReadTimeout),
        plain.stream("POST", server.url + "/v1/completions", json=body, headers=headers) as response,
    ):
        for _ in response.iter_bytes():
            pass
    assert freed.wait(DEADLINE_S)
    assert client.completions.create(model="toy", prompt="x", max_tokens=1).choices[0].text == "A"
