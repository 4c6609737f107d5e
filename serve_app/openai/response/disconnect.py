"""Work that is cancelled when its client disconnects, and event streams, which are kept alive while there is no news.

Servers cancel a handler on disconnection only in some cases (mostly for streamed answers), so the connection is watched here,
in the same way for both kinds of answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")

_COMMENT = b": nothing new yet\n\n"
"""A comment, closed by an empty line so that clients that read up to empty lines do not take it for part of an event."""


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
    """Server-sent events from a generator, which is closed when the client disconnects.

    The head goes out at once, and a comment line, which clients skip, whenever nothing was sent for a while: otherwise proxies
    and clients may take the connection for dead, and a client that is gone may not be noticed.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], ping_s: float, headers: Mapping[str, str] | None = None) -> None:
        """`ping_s`: seconds of silence before a comment line; 0: no such lines."""
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})})
        del self.headers["content-length"]
        self._events, self._ping_s = events, ping_s
        self._sent_s = 0.0
        """Time at which something was sent last, on the event loop's clock."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._send(send))
        except (ClientGone, OSError):
            # No client is left to answer; the generator is closed and has counted the request.
            return

    async def _send(self, send: Send) -> None:
        async with aclosing(self._events):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async with self._pinging(send):
                async for event in self._events:
                    await self._send_part(send, event)
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_part(self, send: Send, part: bytes) -> None:
        self._sent_s = asyncio.get_running_loop().time()
        await send({"type": "http.response.body", "body": part, "more_body": True})

    @asynccontextmanager
    async def _pinging(self, send: Send) -> AsyncIterator[None]:
        """Returns a context during which silence is broken by comment lines. A task of its own, and not a time limit for each
        event, costs nothing while events come."""
        self._sent_s = asyncio.get_running_loop().time()
        task = asyncio.create_task(self._ping(send)) if self._ping_s else None
        try:
            yield
        finally:
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def _ping(self, send: Send) -> None:
        while True:
            left_s = self._sent_s + self._ping_s - asyncio.get_running_loop().time()
            if left_s > 0:
                await asyncio.sleep(left_s)
            else:
                await self._send_part(send, _COMMENT)
