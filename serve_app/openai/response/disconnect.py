"""Work that is cancelled when its client disconnects.

Servers cancel a handler on disconnection only in some cases (mostly for streamed answers), so the connection is watched here,
in the same way for both kinds of answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")


class ClientGone(Exception):
    """The client closed the connection before the answer was complete."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Returns the result of `work`, or raises its error. `receive` is the ASGI channel of its request, which is read until
    then.

    If the client disconnects first, cancels `work`, waits for it and raises `ClientGone`.
    """
    task, watch = asyncio.create_task(work), asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events from a generator, which is closed when the client disconnects."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], headers: Mapping[str, str] | None = None) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._send(send))
        except (ClientGone, OSError):
            # No client is left to answer; the generator is closed and has counted the request.
            return

    async def _send(self, send: Send) -> None:
        async with aclosing(self._events):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for event in self._events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
