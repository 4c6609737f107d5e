"""From the backend's events to deltas, for one choice and for several at once. Closing a generator cancels its running work."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from actors.wire.requests import GenerateRequest, TokenEvent
from serve_app.openai.request.errors import ApiError
from serve_app.openai.response.delta import Delta
from serve_app.openai.response.writer import Writer
from serve_app.routing.backend import Backend

_AHEAD = 64
"""Number of deltas that may be queued for a slow client."""


async def follow(backend: Backend, request: GenerateRequest, writer: Writer) -> AsyncGenerator[Delta, None]:
    """Yields the deltas of one choice, the last one with `finish`: `request` runs on `backend`, and `writer` makes text of its
    events.

    A stop string cancels the request before its delta is yielded. A request that finished by itself is not closed early, so
    that it does not count as cancelled. Raises `BackendRefused` if the backend does not accept the request, and `ApiError` if
    the engine fails (500), gives up (503), or the time limit passes (504).
    """
    last: TokenEvent | None = None
    done = False
    async with aclosing(backend.generate(request)) as events:
        async for event in events:
            if done or (last is not None and last.finish is not None):
                continue
            last, delta = event, writer.write(event)
            done = delta.finish is not None
            if done and event.finish is None:
                await events.aclose()
                yield delta
                return
            yield delta
    if not done:
        raise _broken_off(last)


def _broken_off(last: TokenEvent | None) -> ApiError:
    """Returns the error for a request that did not end properly."""
    if last is None or last.finish is None:
        return ApiError(500, "The engine ended the request without saying why.", code="engine_error")
    if last.finish == "deadline":
        return ApiError(504, "The request's time limit passed before it was done.", code="deadline_exceeded")
    if last.finish == "abort":
        return ApiError(503, last.error or "The engine gave up the request.", code="engine_abort")
    return ApiError(500, last.error or "The engine failed.", code="engine_error")


@dataclass(frozen=True)
class _Ended:
    """The end of a choice's stream, with its `error` if there is one."""

    error: Exception | None = None


async def merge(streams: Sequence[AsyncGenerator[Delta, None]]) -> AsyncGenerator[Delta, None]:
    """Yields the deltas of all `streams` (one per choice) as they arrive. The first failure cancels the other streams and is
    raised. Closing the generator cancels all."""
    queue: asyncio.Queue[Delta | _Ended] = asyncio.Queue(_AHEAD)
    tasks = [asyncio.create_task(_pump(stream, queue)) for stream in streams]
    running = len(tasks)
    try:
        while running:
            item = await queue.get()
            if isinstance(item, Delta):
                yield item
            elif item.error is not None:
                raise item.error
            else:
                running -= 1
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(stream: AsyncGenerator[Delta, None], queue: asyncio.Queue[Delta | _Ended]) -> None:
    error = None
    try:
        async with aclosing(stream):
            async for delta in stream:
                await queue.put(delta)
    except Exception as failure:
        error = failure
    await queue.put(_Ended(error))


async def started(deltas: AsyncGenerator[Delta, None], choices: int) -> list[Delta]:
    """Reads `deltas` up to the first one of every choice, and returns all that were read. From then on, no choice can be
    refused any more.

    `choices` is the number of choices. Returns earlier if the deltas end; raises what `deltas` raises.
    """
    held: list[Delta] = []
    seen: set[int] = set()
    while len(seen) < choices:
        delta = await anext(deltas, None)
        if delta is None:
            break
        held.append(delta)
        seen.add(delta.index)
    return held
