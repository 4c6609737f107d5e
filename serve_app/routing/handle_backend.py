"""The endpoint's backend over Ray Serve: one handle call per request, with its events over ZeroMQ.

    ingress ──handle call: request, reply address──→ replica          (returns when the request has ended)
            ←───────────── events, over ZeroMQ ─────                  (the first, empty, as soon as its engine has admitted it)

Ray Serve chooses the replica, reports its loss, and carries a cancellation; tokens do not pass through it. With several pools
the ingress chooses the replica, which may answer with a KV transfer ticket first (`pooled_backend.py`).
"""

from __future__ import annotations

import asyncio
import logging
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
from serve_app.routing.replay import Replay

log = logging.getLogger("shardwright.routing")

_LAST_EVENT_S = 10.0
"""Seconds that the last event may arrive after the call has returned: the call and the events take different ways."""

_SENT_S = 2.0
"""Seconds after the end of a request in which its prefill replica normally knows that it has sent everything; then its call is
cancelled."""


_REPLAY_EVERY_S = 0.1
"""Seconds between two attempts to find a replica for a request that was lost."""


@dataclass(frozen=True)
class Route:
    """The replica that gets the request next. `generate`: a handle's method; `hints`: keyword arguments for the replica and the
    router.

    `replica`: the name of the chosen replica; empty if the router chooses.
    """

    generate: Any
    request: GenerateRequest
    hints: Mapping[str, object] = field(default_factory=dict)
    replica: str = ""


class HandleBackend:
    """Generates on the engine replicas behind a Serve handle, whose router chooses the replica."""

    def __init__(self, engine: DeploymentHandle[Any], deployed: int = 1, *, wait_s: float, replay_wait_s: float) -> None:
        """`wait_s`: seconds that a request waits for a replica to accept it while none can. `replay_wait_s`: the same for a
        request that a replica had accepted before it was lost. `deployed`: number of replicas that the service was deployed
        with, in all pools."""
        self._engine, self._wait_s, self._deployed, self._replay_wait_s = engine, wait_s, deployed, replay_wait_s
        self._replayed = self._given_up = 0
        self._generate: Any = engine.options(method_name="generate")
        self._receiver: TokenReceiver | None = None

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent, None]:
        """See `Backend.generate`. A request whose replica is lost is replayed on another one, see `Replay`; if that is not
        possible, it ends with one error event.

        Raises `BackendRefused` also if no replica takes a new request in `wait_s` seconds, or a lost one in `replay_wait_s`.
        """
        replay = Replay(request, self._wait_s, self._replay_wait_s)
        while (attempt := replay.attempt()) is not None:
            try:
                async with aclosing(self._run_once(attempt)) as events:
                    async for event in events:
                        if event.finish != "lost":
                            yield replay.on_event(event)
                            continue
                        if event.tokens:
                            yield replay.on_event(event.model_copy(update={"finish": None, "error": None}))
                        break
                    else:
                        return
            except BackendRefused as refused:
                replay.on_refusal()
                if not replay.was_taken or refused.code == "prompt_too_long" or not replay.may_wait():
                    self._given_up += replay.was_taken
                    raise
            else:
                fault = replay.on_loss()
                if fault is not None and not replay.was_taken:
                    raise BackendRefused("engine_down", f"{event.error}; {fault}")
                if fault is not None:
                    self._given_up += 1
                    yield TokenEvent(request_id=request.request_id, finish="error", error=f"{event.error}; {fault}")
                    return
                self._replayed += replay.was_taken
                log.warning("request %s is tried again: %s", request.request_id, event.error)
            await asyncio.sleep(_REPLAY_EVERY_S)
        yield TokenEvent(request_id=request.request_id, finish="deadline")

    async def _run_once(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent, None]:
        """Generate on one replica. A replica that is down refuses before any part of the request has run, so the other replicas
        are tried in turn."""
        refused_by: list[str] = []
        while True:
            try:
                async with aclosing(self._ask(await self._choose(request, refused_by))) as events:
                    async for event in events:
                        yield event
                return
            except _RefusedByOne as refused:
                if refused.replica in refused_by:  # no other replica is left
                    raise
                refused_by.append(refused.replica)

    async def _choose(self, request: GenerateRequest, refused_by: Sequence[str]) -> Route:
        """Choose the next replica, other than those that have refused. Raises `BackendRefused` if there is none to try."""
        return Route(self._generate, request, {"excluded_replicas": tuple(refused_by)})

    def _giving(self, route: Route) -> AbstractContextManager[None]:
        """Returns a context that lasts as long as a replica has the request."""
        return nullcontext()

    def _run_handoff(self, route: Route, ticket: KVTicket) -> Coroutine[Any, Any, None]:
        """Have the prompt computed by another replica than the one that issued the ticket."""
        raise AssertionError(f"a replica of the only pool gave the ticket {ticket.ticket_id}")

    async def _ask(self, route: Route) -> AsyncGenerator[TokenEvent, None]:
        with self._giving(route):
            async with aclosing(self._events(route)) as events:
                async for event in events:
                    yield event

    async def _events(self, route: Route) -> AsyncGenerator[TokenEvent, None]:
        receiver, request = self._listening(), route.request
        events = receiver.open(request.request_id)
        # Runs in a context of its own: Serve gives all calls made for one HTTP request the same id, and a router that matches
        # by id loses all but one of the calls waiting at once (a request for several choices makes several calls).
        call = Context().run(route.generate.remote, request.pack(), receiver.reply_to.pack(), **route.hints)
        watch = asyncio.create_task(_watch(call, request, events))
        handoff: asyncio.Task[None] | None = None
        finished = False
        try:
            event: TokenEvent | None = await self._taken(request, events)
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
            if handoff is not None:  # nobody waits for the prompt any more; usually it has been sent and this has no effect
                asyncio.get_running_loop().call_later(_SENT_S if finished else 0, handoff.cancel)
            receiver.forget(request.request_id)
            if not finished:
                call.cancel()

    async def _taken(self, request: GenerateRequest, events: asyncio.Queue[TokenEvent]) -> TokenEvent:
        """Wait until an engine has admitted or refused the request. Returns the first event, which is empty unless the request
        was refused, or has already ended or produced tokens.

        Serve itself would wait without a limit while no replica runs. Raises `BackendRefused` after `wait_s`.
        """
        own_s = math.inf if request.timeout_s is None else request.timeout_s
        try:
            # Not `wait_for`: before Python 3.12 it drops a cancellation that arrives together with the result.
            async with asyncio.timeout(min(self._wait_s, own_s)):
                return await events.get()
        except TimeoutError:
            if own_s <= self._wait_s:
                return TokenEvent(request_id=request.request_id, finish="deadline")
            raise BackendRefused("engine_down", f"no engine replica could take the request for {self._wait_s:g} s") from None

    def _listening(self) -> TokenReceiver:
        """Returns the receiver of this process, on the event loop that serves it. It is created on first use."""
        if self._receiver is None:
            self._receiver = TokenReceiver.listen(get_node_ip_address())
        return self._receiver

    async def health(self) -> Health:
        """See `Backend.health`. Healthy while at least one replica is. The reason counts the replicas if some are missing or
        unhealthy, and has that of the first unhealthy one."""
        answers = await broadcast(self._engine, "health")
        if not answers:
            return Health(ok=False, reason="no engine replica is running")
        well = sum(answer is None for answer in answers)
        reason = next((_health_text(answer) for answer in answers if answer is not None), "")
        return Health(ok=well > 0, reason=self._shortage(well, reason) if well else reason, replicas=well)

    def _shortage(self, well: int, reason: str = "") -> str:
        """Returns how many of the deployed replicas can serve, with the `reason`, if `well` are fewer than these; else an empty
        text."""
        if well >= self._deployed:
            return ""
        return f"{well} of {self._deployed} replicas can serve" + (f": {reason}" if reason else "; the others are not running")

    async def stats(self) -> Mapping[str, Mapping[str, float]]:
        """See `Backend.stats`. Replicas that do not answer are left out."""
        answers = await asyncio.gather(*(broadcast(pool, "gauges") for pool in self._pools()))
        return dict(answer for each in answers for answer in each if isinstance(answer, tuple))

    def gauges(self) -> Mapping[str, float]:
        """See `Backend.gauges`. Returns the numbers of replays, and of requests that were accepted, lost and given up."""
        return {"requests_replayed": float(self._replayed), "requests_given_up": float(self._given_up)}

    def _pools(self) -> Sequence[DeploymentHandle[Any]]:
        return [self._engine]


def _health_text(answer: object) -> str:
    """Returns why a replica cannot serve. Only the type of a Ray exception is used, since its text has many lines about Ray's
    internals."""
    return f"a replica does not answer: {type(answer).__name__}" if isinstance(answer, Exception) else str(answer)


class _RefusedByOne(BackendRefused):
    """One replica cannot serve now, or does not accept this kind of work."""

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
    """Put an event in the queue for what the replica cannot send itself: a refusal, or its loss."""
    try:
        refused = await call
    except LOST as error:
        events.put_nowait(_lost(request, f"the replica was lost: {type(error).__name__}"))
        return
    if refused is not None:
        events.put_nowait(TokenEvent.unpack(refused))
        return
    await asyncio.sleep(_LAST_EVENT_S)  # cancelled as soon as the last event has arrived
    events.put_nowait(_lost(request, f"the last event did not arrive {_LAST_EVENT_S:.0f} s after the replica sent it"))


def _joined(first: TokenEvent, events: asyncio.Queue[TokenEvent]) -> TokenEvent:
    """Returns `first` and all events queued behind it as one event, so that text is made once for several."""
    parts = [first]
    while parts[-1].finish is None and not events.empty():
        parts.append(events.get_nowait())
    parts = [part for part in parts if not part.is_empty] or parts[:1]
    if len(parts) == 1:
        return parts[0]
    joined = {
        "tokens": [token for part in parts for token in part.tokens],
        "logprobs": [entry for part in parts for entry in part.logprobs],
        "prompt_logprobs": next((part.prompt_logprobs for part in parts if part.prompt_logprobs is not None), None),
        "cached_tokens": max(part.cached_tokens for part in parts),
    }
    return parts[-1].model_copy(update=joined)


def _lost(request: GenerateRequest, reason: str) -> TokenEvent:
    return TokenEvent(request_id=request.request_id, finish="lost", error=reason)
