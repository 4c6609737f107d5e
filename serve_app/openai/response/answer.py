"""Runs a job on the backend and answers it, whole or as a stream, from the same deltas."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response
from starlette.types import Receive

from serve_app.openai.request.errors import ApiError, from_refusal
from serve_app.openai.request.settings import ApiSettings
from serve_app.openai.response.delta import Delta, join
from serve_app.openai.response.disconnect import EventStream, while_connected
from serve_app.openai.response.encoding import json_response, sse
from serve_app.openai.response.follow import follow, merge, started
from serve_app.openai.response.metrics import CLIENT_GONE, Observation
from serve_app.openai.response.response_builder import Job
from serve_app.openai.response.usage import Usage
from serve_app.openai.response.writer import Writer
from serve_app.routing.backend import Backend, BackendRefused

_log = logging.getLogger("shardwright.api")
_DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class Answering:
    """One job in progress. `observation` is closed here only for streams, which outlive the route."""

    job: Job
    backend: Backend
    settings: ApiSettings
    observation: Observation

    async def answer(self, receive: Receive) -> Response:
        """Run the job and return the response: whole at its end, or a stream as soon as every choice is admitted. `receive`
        is the request's ASGI channel, from which a disconnected client is noticed.

        Before the first byte is sent, raises `ApiError` if the engine fails or the time limit passes, `BackendRefused` if the
        backend does not accept the request, and `ClientGone` if the client disconnects. Later failures become an error event of
        the stream.
        """
        deltas = self._deltas()
        if not self.job.stream:
            body = await while_connected(receive, self._whole(deltas))
            self.observation.close(200)
            return json_response(body)
        held = await while_connected(receive, self._started(deltas))
        return EventStream(self._events(held, deltas), self.settings.sse_ping_s)

    def _deltas(self) -> AsyncGenerator[Delta, None]:
        writing = self.job.writing
        return merge(
            [
                follow(self.backend, choice.request, Writer(choice.index, writing, choice.prompt.ids, choice.prompt.text))
                for choice in self.job.choices
            ]
        )

    async def _whole(self, deltas: AsyncGenerator[Delta, None]) -> dict[str, Any]:
        gained: list[list[Delta]] = [[] for _ in self.job.choices]
        usage = Usage(self.job.choices)
        async with aclosing(deltas):
            async for delta in deltas:
                gained[delta.index].append(delta)
                self._count(usage, delta)
        self.observation.accepted(self.job)
        return self.job.response_builder.whole([join(index, parts) for index, parts in enumerate(gained)]) | {
            "usage": usage.body()
        }

    async def _started(self, deltas: AsyncGenerator[Delta, None]) -> list[Delta]:
        try:
            held = await started(deltas, len(self.job.choices))
        except BaseException:
            await deltas.aclose()
            raise
        self.observation.accepted(self.job)
        return held

    async def _events(self, held: list[Delta], deltas: AsyncGenerator[Delta, None]) -> AsyncGenerator[bytes, None]:
        """Yields the events of a stream. A failure is one error event; the end marker always comes last."""
        status = CLIENT_GONE
        try:
            async with aclosing(deltas):
                try:
                    async for chunk in self._chunks(held, deltas):
                        yield sse(chunk)
                    status = 200
                except Exception as failure:
                    error = as_api_error(failure, self.settings)
                    status = error.status
                    yield sse(error.body())
            yield _DONE
        finally:
            self.observation.close(status)

    async def _chunks(self, held: list[Delta], deltas: AsyncIterator[Delta]) -> AsyncIterator[dict[str, Any]]:
        job, usage = self.job, Usage(self.job.choices)
        # Not before there is something to tell: clients take the time of the first chunk for that of the first token.
        openings = [chunk for choice in job.choices for chunk in job.response_builder.opening(choice)]
        async for delta in _chain(held, deltas):
            self._count(usage, delta)
            if delta.text or delta.finish or (job.response_builder.shows_tokens and delta.entries) or delta.prompt_logprobs:
                for chunk in openings:
                    yield self._with_usage(chunk, usage)
                openings = []
                yield self._with_usage(job.response_builder.chunk(delta), usage)
        if job.include_usage:
            yield job.response_builder.last() | {"usage": usage.body()}

    def _with_usage(self, chunk: dict[str, Any], usage: Usage) -> dict[str, Any]:
        if not self.job.include_usage:
            return chunk
        return chunk | {"usage": usage.body() if self.job.continuous_usage else None}

    def _count(self, usage: Usage, delta: Delta) -> None:
        before = usage.cached_tokens
        usage.add(delta)
        self.observation.delta(delta, usage.cached_tokens - before)


def as_api_error(failure: Exception, settings: ApiSettings) -> ApiError:
    """Returns the error for the caller: `failure` itself, the error of a refusal by the backend, or (500) for any other
    failure, which is logged and whose details are not sent."""
    if isinstance(failure, ApiError):
        return failure
    if isinstance(failure, BackendRefused):
        return from_refusal(failure, settings.retry_after_s)
    _log.error("a request failed", exc_info=failure)
    return ApiError(500, "The server failed to answer; its log says why.", code="internal_error")


async def _chain(held: list[Delta], deltas: AsyncIterator[Delta]) -> AsyncIterator[Delta]:
    for delta in held:
        yield delta
    async for delta in deltas:
        yield delta
