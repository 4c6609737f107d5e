"""The endpoint's backend over Ray Serve: one streaming handle call a request, packed messages both ways."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from actors.messages import GenerateRequest, TokenEvent
from serve_app.backend import BackendRefused, Health

_PROBE_S = 5.0
"""A replica that does not answer a control call in this time is not healthy."""

_LOST = (RayError, RayServeException)


class HandleBackend:
    """Generates on the engine replicas behind a Serve handle; which replica, the handle's router decides."""

    def __init__(self, engine: DeploymentHandle[Any]) -> None:
        self._engine = engine
        self._stream: Any = engine.options(stream=True, method_name="generate")

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent, None]:
        """See `serve_app.backend.Backend`. A replica that dies ends the request with one error event.

        A replica that is down refuses before anything of the request has run, so each other replica is asked in its turn.
        """
        refused_by: list[str] = []
        while True:
            try:
                async with aclosing(self._ask(request, refused_by)) as events:
                    async for event in events:
                        yield event
                return
            except _ReplicaDown as down:
                if down.replica in refused_by:  # there is no other left
                    raise
                refused_by.append(down.replica)

    async def _ask(self, request: GenerateRequest, avoid: Sequence[str]) -> AsyncGenerator[TokenEvent, None]:
        response = self._stream.remote(request.pack(), avoid=tuple(avoid))
        finished = False
        try:
            async for packed in response:
                event = TokenEvent.unpack(packed)
                finished = event.finish is not None
                if event.refused is not None:
                    raise _refusal(event)
                yield event
            if not finished:
                yield _lost(request, "the replica ended the stream")
        except _LOST as error:
            finished = True
            yield _lost(request, f"the replica was lost: {type(error).__name__}")
        finally:
            if not finished:
                response.cancel()

    async def health(self) -> Health:
        """Healthy while at least one replica is; the reason is that of the first that is not."""
        answers = await self._ask_all("health")
        if not answers:
            return Health(ok=False, reason="no engine replica is running")
        well = sum(answer is None for answer in answers)
        reason = next((str(answer) for answer in answers if answer is not None), "")
        return Health(ok=well > 0, reason="" if well else reason, replicas=well)

    async def stats(self) -> Mapping[str, Mapping[str, float]]:
        """Numbers of each replica's engine, by replica name."""
        return dict(answer for answer in await self._ask_all("gauges") if isinstance(answer, tuple))

    async def _ask_all(self, method: str) -> list[Any]:
        """The answer of each replica to a control call; an exception in place of the answer that did not come."""
        try:
            return list(await self._engine.broadcast(method).results_async(timeout_s=_PROBE_S, return_exceptions=True))
        except (*_LOST, TimeoutError) as error:
            return [error]


class _ReplicaDown(BackendRefused):
    """One replica cannot serve now."""

    def __init__(self, replica: str, message: str) -> None:
        super().__init__("engine_down", message)
        self.replica = replica


def _refusal(event: TokenEvent) -> BackendRefused:
    if event.refused == "engine_down":
        return _ReplicaDown(event.refused_by or "", event.error or "")
    if event.refused in ("prompt_too_long", "engine_busy"):
        return BackendRefused(event.refused, event.error or "")  # type: ignore[arg-type]
    raise ValueError(f"the endpoint let through a request the engine cannot serve: {event.error}")


def _lost(request: GenerateRequest, reason: str) -> TokenEvent:
    return TokenEvent(request_id=request.request_id, finish="error", error=reason)
