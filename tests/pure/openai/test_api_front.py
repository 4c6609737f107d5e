"""What stands in front of Serve's proxy: one request id, errors in one shape, and an end to every stream."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable

import httpx
import pytest
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from serve_app.deployment.settings import ArgumentError, parse_args
from serve_app.openai.proxy import Front
from serve_app.openai.request.timeout import timeout_of

Inner = Callable[[Scope, Receive, Send], Awaitable[None]]


def starts(status: int, kind: str, **headers: str) -> Message:
    raw = [(name.encode(), value.encode()) for name, value in {"content-type": kind, **headers}.items()]
    return {"type": "http.response.start", "status": status, "headers": raw}


def inner(*messages: Message) -> Inner:
    """Serve's proxy: sends these, then returns, whether the answer is complete or not."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for message in messages:
            await send(message)

    return app


async def asked(app: Inner, headers: dict[str, str] | None = None) -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=Front(app)), base_url="http://x") as client:
        return await client.get("/", headers=headers)


async def test_a_complete_answer_passes_unchanged() -> None:
    for status, kind in ((200, "text/event-stream"), (200, "text/plain"), (404, "application/json")):
        answer = await asked(inner(starts(status, kind), {"type": "http.response.body", "body": b"ab"}))
        assert (answer.status_code, answer.content, answer.headers["content-type"]) == (status, b"ab", kind)


async def test_an_answer_that_never_began_is_an_error_object() -> None:
    answer = await asked(inner(), {"x-request-id": "mine"})
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "ingress_lost"
    assert answer.headers["retry-after"] == "1"
    assert answer.headers.get_list("x-request-id") == ["mine"]


async def test_a_stream_that_breaks_off_ends_with_an_error_event() -> None:
    begun = {"type": "http.response.body", "body": b"data: {}\n\n", "more_body": True}
    answer = await asked(inner(starts(200, "text/event-stream; charset=utf-8"), begun))
    events = answer.text.removesuffix("\n\n").split("\n\n")
    assert [events[0], events[2], len(events)] == ["data: {}", "data: [DONE]", 3]
    assert json.loads(events[1].removeprefix("data: "))["error"]["code"] == "ingress_lost"


async def test_serves_own_errors_take_the_endpoints_shape() -> None:
    for status in (404, 408, 503):
        answer = await asked(inner(starts(status, "text/plain"), {"type": "http.response.body", "body": b"no such app"}))
        assert answer.status_code == status
        assert answer.json()["error"]["message"] == "no such app"
        assert ("retry-after" in answer.headers) == (status == 503)


@pytest.mark.parametrize("given", [None, "mine", "with space", "x" * 129])
async def test_serve_is_given_a_valid_request_id(given: str | None) -> None:
    seen: list[list[bytes]] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append([value for name, value in scope["headers"] if name == b"x-request-id"])
        await inner(starts(200, "text/plain"), {"type": "http.response.body"})(scope, receive, send)

    await asked(app, None if given is None else {"x-request-id": given})
    [[request_id]] = seen
    assert (request_id == b"mine") if given == "mine" else len(request_id) == 32


async def test_serve_is_not_told_the_time_limit() -> None:
    """It would end the answer itself when the limit passes, without a word in a stream; the engine does so properly."""
    seen: list[Headers] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(Headers(scope=scope))
        await inner(starts(200, "text/plain"), {"type": "http.response.body"})(scope, receive, send)

    await asked(app, {"x-request-timeout-seconds": "2.5"})
    assert "x-request-timeout-seconds" not in seen[0]
    assert timeout_of(seen[0]) == 2.5


async def test_its_own_errors_may_be_read_by_the_pages_that_may_read_the_answers() -> None:
    """It does not know the setting: it knows what the ingress last answered to a page."""
    told: dict[str, str] = {"http://a": "http://a", "http://b": "*"}
    is_lost = False

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        allowed = told.get(Headers(scope=scope).get("origin", ""))
        more = {} if allowed is None else {"access-control-allow-origin": allowed}
        if not is_lost:
            await inner(starts(200, "application/json", **more), {"type": "http.response.body"})(scope, receive, send)

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=Front(app)), base_url="http://x") as client:

        async def readers() -> list[str | None]:
            origins: list[dict[str, str]] = [{"origin": f"http://{each}"} for each in "abc"]
            answers = [await client.get("/", headers=headers) for headers in [*origins, {}]]
            assert all(answer.status_code == (503 if is_lost else 200) for answer in answers)
            return [answer.headers.get("access-control-allow-origin") for answer in answers]

        is_lost = True
        assert await readers() == [None] * 4
        is_lost = False
        assert await readers() == ["http://a", "*", None, None]
        is_lost = True
        assert await readers() == ["http://a", "*", None, None]
        is_lost = False
        del told["http://a"]
        await readers()
        is_lost = True
        assert await readers() == [None, "*", None, None]


def test_an_unknown_argument_is_told_in_one_sentence() -> None:
    with pytest.raises(ArgumentError) as found:
        parse_args({"bogus": "1", "model": "x", "step_timeout_s": "-1"})
    message = str(found.value)
    assert "unknown: bogus; the arguments are model, layout, " in message
    assert "step_timeout_s: Input should be greater than 0" in message
    assert "\n" not in message
    assert "pydantic" not in message
