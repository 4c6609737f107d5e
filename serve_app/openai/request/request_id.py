"""Request ids: the caller's ``x-request-id`` if it is valid, else a random one. Answers carry it."""

from __future__ import annotations

import re
import secrets

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "x-request-id"
_PLAIN = re.compile(r"[\x21-\x7e]{1,128}")


def choose(given: str | None) -> str:
    """Returns the id of a request whose header ``x-request-id`` is `given` (None: absent): `given` itself if it has 1 to 128
    printable ASCII characters without spaces, else a random id."""
    return given if given is not None and _PLAIN.fullmatch(given) else secrets.token_hex(16)


class RequestId:
    """ASGI middleware that stores the id as ``request.state.request_id``."""

    def __init__(self, app: ASGIApp, on_answers: bool) -> None:
        """`on_answers`: whether to put the id on answers; False if a proxy in front does so."""
        self._app, self._on_answers = app, on_answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = choose(Headers(scope=scope).get(HEADER))
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id if self._on_answers else send)
