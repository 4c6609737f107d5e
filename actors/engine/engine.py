"""The engine as its replica uses it: takes requests, returns token events, and survives the replacement of its ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from actors.engine.admission import EngineDown
from actors.engine.config.engine_config import EngineConfig
from actors.engine.config.stats import EngineStats
from actors.engine.link.link import RankLink
from actors.engine.loop import Clock, StepLoop
from actors.engine.sequences.event_delivery import Deliver
from actors.wire.requests import GenerateRequest, TokenEvent

_JOIN_S = 5.0


class Engine:
    """Serves requests with the ranks behind a link. All methods may be called from any thread.

    ::

        start ──→ serving ──close──→ down
                    │  ↑
                fail↓  │restart(link)      the engine also fails by itself if a step times out or the link breaks
                   down
    """

    def __init__(
        self, config: EngineConfig, link: RankLink, clock: Clock = time.monotonic, flush: Callable[[], None] = lambda: None
    ) -> None:
        """Create an engine, which does not serve before `start`.

        `link` is connected to every rank, and owned by the engine from now on. `flush` is called after the events of each step.
        """
        self.config = config
        self._clock, self._flush = clock, flush
        self._lock = threading.Lock()
        self._loop = StepLoop(config, link, clock, flush)
        self._is_started = False

    def start(self) -> None:
        """Start the engine's thread, which serves requests. Raises `RuntimeError` if it was started before."""
        with self._lock:
            self._is_started = True
            self._loop.start()

    def submit(self, request: GenerateRequest, deliver: Deliver) -> None:
        """Accept a request. `deliver` is called with each of its events, usually on the engine's thread (by `fail`, `restart`
        and `close` on their caller's); the last one has `finish` set. It must return quickly; an exception that it raises
        aborts the request.

        Raises a `RequestRefused` (`PromptTooLong`, `InvalidRequest`, `EngineBusy`, `DuplicateRequest`, `EngineDown`) at once if
        the request is not accepted; `deliver` is then never called.
        """
        if not self._is_started:
            raise EngineDown("it has not been started")
        self._loop.submit(request, deliver)

    def cancel(self, request_id: str) -> None:
        """End a request soon, with a last event ``abort``. Returns at once; does nothing if the request has ended or is
        unknown."""
        self._loop.cancel(request_id)

    def on_ticket_event(self, event: TokenEvent) -> None:
        """Take an event about a KV transfer that this engine, on the decode side, waits for. The event's `request_id` is the
        id of the transfer's ticket. Returns at once; the engine's thread handles the event before the next step.

        The event is a heartbeat, the first token, or the end. After a failure, or a refusal (no prefill replica took the
        ticket), this engine computes the prompt itself. Does nothing if the ticket is done or unknown, or the engine is down.
        """
        self._loop.on_ticket_event(event)

    def stats(self) -> EngineStats:
        """Return a snapshot of the state and counters of the engine. Counters restart at 0 with new ranks."""
        return self._loop.stats()

    def healthy(self, now: float | None = None) -> str | None:
        """Return None if the engine is idle or its steps finish in time, else the reason why it is unhealthy, as text for
        people.

        `now` is a time in seconds on the engine's clock; None reads the clock.
        """
        return self._loop.healthy(self._clock() if now is None else now)

    def fail(self, reason: str) -> None:
        """Report that the ranks are lost: ends every request with one ``lost`` event before it returns, and refuses new ones
        until `restart`. `reason` is the text of these events."""
        self._loop.stop(reason)

    def restart(self, link: RankLink) -> None:
        """Serve with the ranks behind `link`, which the engine owns from now on, and an empty KV cache. Requests of the old
        ranks end with a ``lost`` event. Raises `RuntimeError` if the old thread does not end within 5 seconds."""
        with self._lock:
            self._end_loop("the ranks were replaced")
            self._loop = StepLoop(self.config, link, self._clock, self._flush)
            self._loop.start()

    def close(self) -> None:
        """Stop serving and close the link; live requests end with a ``lost`` event. Calling this twice is harmless. Raises
        `RuntimeError` if the engine's thread does not end within 5 seconds."""
        with self._lock:
            self._end_loop("it was closed")

    def _end_loop(self, reason: str) -> None:
        self._loop.stop(reason)
        if not self._loop.join(_JOIN_S):
            raise RuntimeError(f"the engine's thread did not end within {_JOIN_S:g} s after: {reason}")
