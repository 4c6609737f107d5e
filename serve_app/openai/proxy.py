"""Middleware in front of Ray Serve's own HTTP proxy, in its process, so that clients always get answers of the same form.

    client ──→ uvicorn ──→ Front ──→ Serve's proxy ──→ ingress

Serve itself answers in plain text when no ingress runs, and does not answer when the ingress dies during a request. An embedded
cluster loads the middleware by `SETTING`; on an existing cluster, the operator may set it before Serve starts.
"""

from __future__ import annotations

import json
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.openai.request.errors import ApiError
from serve_app.openai.request.request_id import HEADER, choose
from serve_app.openai.request.timeout import hide_timeout

SETTING = {"RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "serve_app.openai.proxy.in_front"}

_ALLOWED = "access-control-allow-origin"
_MOST_ORIGINS = 1000

_LOST = ApiError(503, "The server lost the process that was answering; ask again.", code="ingress_lost")


def in_front() -> list[Middleware]:
    """Returns the middleware to put in front of Serve's HTTP proxy (`Front`). The proxy calls this function when it starts, by
    its import path in `SETTING`."""
    return [Middleware(Front)]


class Front:
    """ASGI middleware that ensures one valid request id, errors in the endpoint's own shape, and an end marker for every
    stream."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._readers = AllowedReaders()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id, origin = choose(Headers(scope=scope).get(HEADER)), Headers(scope=scope).get("origin")
        scope = {**scope, "headers": list(scope["headers"])}
        headers = MutableHeaders(scope=scope)
        headers[HEADER] = request_id  # Serve copies the request's id to the answer
        hide_timeout(headers)
        answer = _Answer(send, request_id, origin, self._readers)
        await self._app(scope, receive, answer.send)
        await answer.complete()


class AllowedReaders:
    """The origins whose web pages the ingress lets read its answers (CORS), as seen in these answers: this process does not
    know the setting, and its own errors are to be readable too."""

    def __init__(self) -> None:
        self._headers: dict[str, dict[str, str]] = {}

    def learn(self, origin: str, answer: Headers) -> None:
        """Remember from an answer of the ingress whether pages of `origin` may read it."""
        self._headers.pop(origin, None)
        if _ALLOWED in answer and len(self._headers) < _MOST_ORIGINS:
            self._headers[origin] = {_ALLOWED: answer[_ALLOWED], "vary": "Origin"}

    def headers(self, origin: str | None) -> dict[str, str]:
        """Returns the headers with which pages of `origin` (None: no web page asks) may read an error, or none."""
        return {} if origin is None else self._headers.get(origin, {})


class _Answer:
    """One answer on its way to the client."""

    def __init__(self, send: Send, request_id: str, origin: str | None, readers: AllowedReaders) -> None:
        self._send, self._request_id = send, request_id
        self._origin, self._readers = origin, readers
        self._start: Message | None = None
        self._plain: list[bytes] | None = None
        """Text of a plain-text error, which is replaced by JSON."""
        self._done = False

    async def send(self, message: Message) -> None:
        """Forward an ASGI message to the client, or hold it back if it belongs to an error in plain text, which `complete`
        sends as JSON."""
        if message["type"] == "http.response.start":
            self._start = message
            if message["status"] >= 400 and self._type().startswith("text/plain"):
                self._plain = []
                return
            if self._origin is not None:
                self._readers.learn(self._origin, Headers(raw=message["headers"]))
        elif message["type"] == "http.response.body":
            self._done = not message.get("more_body", False)
            if self._plain is not None:
                self._plain.append(message.get("body", b""))
                return
        await self._send(message)

    async def complete(self) -> None:
        """Send the missing rest of the answer, after the application has returned: the JSON of a plain-text error, an error
        (503) if there was no answer, or an error event and the end marker of a broken-off event stream."""
        if self._start is None:
            await self._error(_LOST)
        elif self._plain is not None:
            await self._error(
                ApiError(self._start["status"], b"".join(self._plain).decode(errors="replace"), code="serve_error")
            )
        elif not self._done and self._type().startswith("text/event-stream"):
            event = b"data: " + json.dumps(_LOST.body()).encode() + b"\n\ndata: [DONE]\n\n"
            await self._send({"type": "http.response.body", "body": event, "more_body": False})

    def _type(self) -> str:
        return Headers(raw=self._start["headers"]).get("content-type", "") if self._start else ""

    async def _error(self, error: ApiError) -> None:
        body = json.dumps(error.body()).encode()
        headers: dict[str, Any] = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            HEADER: self._request_id,
        } | self._readers.headers(self._origin)
        if error.status == 503:
            headers["retry-after"] = "1"
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": error.status, "headers": raw})
        await self._send({"type": "http.response.body", "body": body})
