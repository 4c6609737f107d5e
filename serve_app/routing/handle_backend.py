"""The endpoint's backend over Ray Serve: one handle call a request, its events over ZeroMQ.

    ingress ──handle call: request, where to answer──→ replica        (returns when the request has ended)
            ←───────────── events, over ZeroMQ ───────                (the first, empty, as soon as it has the call)

Ray Serve chooses the replica, tells when it is lost, and carries a cancellation; tokens do not pass through it. With several
pools the ingress chooses, and a replica may answer with a ticket first (`pooled_backend.py`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing, nullcontext
from contextvars import Context
from dataclasses import dataclass, field
from typing import Any

from ray.serve.handle import DeploymentHandle
from ray.util import get_node_ip_address

from actors.engine.link.token_stream import TokenReceiver
from actors.wire.kv import KVTicket
from actors.wire.requests import GenerateRequest, TokenEvent
from serve_app.routing.backend import BackendRefused, Health
from serve_app.routing.broadcast import LOST, broadcast

_LAST_EVENT_S = 10.0
"""The call of a request and its events take different ways; the last event may come after the call has returned."""

_SENT_S = 2.0
"""When a request has ended, its prefill replica knows so soon that it has sent everything; one that does not is told."""


@dataclass(frozen=True)
class Route:
    """Who is asked next, and for what. `generate`: a handle's method; `hints`: what the replica and the router are told
    besides.

    `replica`: the one that was chosen; empty where the router chooses.
    """

    generate: Any
    request: GenerateRequest
    hints: Mapping[str, object] = field(default_factory=dict)
    replica: str = ""


class HandleBackend:
    """Generates on the engine replicas behind a Serve handle; which replica, the handle's router decides."""

    def __init__(self, engine: DeploymentHandle[Any], wait_s: float) -> None:
        """`wait_s`: how long a request waits for a replica to take it while none can."""
        self._engine, self._wait_s = engine, wait_s
        self._generate: Any = engine.options(method_name="generate")
        self._receiver: TokenReceiver | None = None

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent, None]:
        """See `serve_app.routing.backend.Backend`. A replica that dies ends the request with one error event.

        A replica that is down refuses before anything of the request has run, so each other replica is asked in its turn.
        """
        refused_by: list[str] = []
        while True:
            try:
                async with aclosing(self._ask(await self._choose(request, refused_by))) as events:
                    async for event in events:
                        yield event
                return
            except _RefusedByOne as refused:
                if refused.replica in refused_by:  # there is no other left
                    raise
                refused_by.append(refused.replica)

    async def _choose(self, request: GenerateRequest, refused_by: Sequence[str]) -> Route:
        """Who is asked after those that have refused. Raises `BackendRefused` where nobody shall be."""
        return Route(self._generate, request, {"excluded_replicas": tuple(refused_by)})

    def _giving(self, route: Route) -> AbstractContextManager[None]:
        """For as long as a replica has a request."""
        return nullcontext()

    def _run_handoff(self, route: Route, ticket: KVTicket) -> Coroutine[Any, Any, None]:
        """Have a prompt computed by somebody else than the replica that has given the ticket."""
        raise AssertionError(f"a replica of the only pool gave the ticket {ticket.ticket_id}")

    async def _ask(self, route: Route) -> AsyncGenerator[TokenEvent, None]:
        with self._giving(route):
            async with aclosing(self._events(route)) as events:
                async for event in events:
                    yield event

    async def _events(self, route: Route) -> AsyncGenerator[TokenEvent, None]:
        receiver, request = self._listening(), route.request
        events = receiver.open(request.request_id)
        # In a context of its own: Serve gives all calls made for one HTTP request the same id, and a router that matches
        # by id loses all but one of those that wait at once (a request for several choices makes several calls).
        call = Context().run(route.generate.remote, request.pack(), receiver.reply_to.pack(), **route.hints)
        watch = asyncio.create_task(_watch(call, request, events))
        handoff: asyncio.Task[None] | None = None
        finished = False
        try:
            event = await self._taken(request, events)
            while not finished:
                event = _joined(event or await events.get(), events)
                finished = event.finish is not None
                if event.refused is not None:
                    raise _refusal(event)
                if event.ticket is not None:
                    handoff = asyncio.create_task(self._run_handoff(route, event.ticket))
                else:
                    yield event
                event = None
        finally:
            watch.cancel()
            if handoff is not None:  # a prompt that nobody waits for any more; usually it has been sent, and this is no news
                asyncio.get_running_loop().call_later(_SENT_S if finished else 0, handoff.cancel)
            receiver.forget(request.request_id)
            if not finished:
                call.cancel()

    async def _taken(self, request: GenerateRequest, events: asyncio.Queue[TokenEvent]) -> TokenEvent | None:
        """Wait until a replica has the request; None, or an event that says how it ended already.

        Serve itself would wait without a limit while no replica runs. Raises `BackendRefused` after `wait_s`.
        """
        own_s = math.inf if request.timeout_s is None else request.timeout_s
        try:
            # Not `wait_for`: before Python 3.12 it drops a cancellation that comes together with the result.
            async with asyncio.timeout(min(self._wait_s, own_s)):
                first = await events.get()
        except TimeoutError:
            if own_s <= self._wait_s:
                return TokenEvent(request_id=request.request_id, finish="deadline")
            raise BackendRefused("engine_down", f"no engine replica could take the request for {self._wait_s:g} s") from None
        return None if first.is_empty else first

    def _listening(self) -> TokenReceiver:
        """The receiver of this process, on the event loop that serves it; made when it is first needed."""
        if self._receiver is None:
            self._receiver = TokenReceiver.listen(get_node_ip_address())
        return self._receiver

    async def health(self) -> Health:
        """Healthy while at least one replica is; the reason is that of the first that is not."""
        answers = await broadcast(self._engine, "health")
        if not answers:
            return Health(ok=False, reason="no engine replica is running")
        well = sum(answer is None for answer in answers)
        reason = next((_health_text(answer) for answer in answers if answer is not None), "")
        return Health(ok=well > 0, reason="" if well else reason, replicas=well)

    async def stats(self) -> Mapping[str, Mapping[str, float]]:
        """Numbers of each replica's engine, by replica name."""
        answers = await asyncio.gather(*(broadcast(pool, "gauges") for pool in self._pools()))
        return dict(answer for each in answers for answer in each if isinstance(answer, tuple))

    def gauges(self) -> Mapping[str, float]:
        """Of one pool there is nothing to say that its replicas do not."""
        return {}

    def _pools(self) -> Sequence[DeploymentHandle[Any]]:
        return [self._engine]


def _health_text(answer: object) -> str:
    """Why a replica cannot serve. The text of an exception of Ray is about its own parts, over many lines."""
    return f"a replica does not answer: {type(answer).__name__}" if isinstance(answer, Exception) else str(answer)


class _RefusedByOne(BackendRefused):
    """One replica cannot serve now, or is for something else."""

    def __init__(self, replica: str, message: str) -> None:
        super().__init__("engine_down", message)
        self.replica = replica


def _refusal(event: TokenEvent) -> BackendRefused:
    if event.refused in ("engine_down", "wrong_role"):
        return _RefusedByOne(event.refused_by or "", event.error or "")
    if event.refused in ("prompt_too_long", "engine_busy"):
        return BackendRefused(event.refused, event.error or "")  # type: ignore[arg-type]
    raise ValueError(f"the endpoint let through a request the engine cannot serve: {event.error}")


async def _watch(call: Any, request: GenerateRequest, events: asyncio.Queue[TokenEvent]) -> None:
    """Put an event in the queue for what the replica cannot say itself: that it refused, or that it was lost."""
    try:
        refused = await call
    except LOST as error:
        events.put_nowait(_lost(request, f"the replica was lost: {type(error).__name__}"))
        return
    if refused is not None:
        events.put_nowait(TokenEvent.unpack(refused))
        return
    await asyncio.sleep(_LAST_EVENT_S)  # cancelled as soon as the last event is here
    events.put_nowait(_lost(request, f"the last event did not arrive {_LAST_EVENT_S:.0f} s after the replica sent it"))


def _joined(first: TokenEvent, events: asyncio.Queue[TokenEvent]) -> TokenEvent:
    """`first` and every event already waiting behind it, as one: text is made once for what piled up meanwhile."""
    parts = [first]
    while parts[-1].finish is None and not events.empty():
        parts.append(events.get_nowait())
    if len(parts) == 1:
        return first
    joined = {
        "tokens": [token for part in parts for token in part.tokens],
        "logprobs": [entry for part in parts for entry in part.logprobs],
        "prompt_logprobs": next((part.prompt_logprobs for part in parts if part.prompt_logprobs is not None), None),
        "cached_tokens": first.cached_tokens,
    }
    return parts[-1].model_copy(update=joined)


def _lost(request: GenerateRequest, reason: str) -> TokenEvent:
    return TokenEvent(request_id=request.request_id, finish="error", error=reason)
