"""The engine as its replica sees it: requests in, token events out, over one set of ranks after another."""

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
    """Plans and delivers for the ranks behind a link. All methods may be called from any thread.

    ::

        start ──→ serving ──close──→ down
                    │  ↑
                fail↓  │restart(link)      `fail` is also what happens by itself when a step times out or the link breaks
                   down
    """

    def __init__(
        self, config: EngineConfig, link: RankLink, clock: Clock = time.monotonic, flush: Callable[[], None] = lambda: None
    ) -> None:
        """`link`: connected to every rank; the engine owns it from here on. `flush`: called after the events of each step."""
        self.config = config
        self._clock, self._flush = clock, flush
        self._lock = threading.Lock()
        self._loop = StepLoop(config, link, clock, flush)
        self._is_started = False

    def start(self) -> None:
        """Begin to serve."""
        with self._lock:
            self._is_started = True
            self._loop.start()

    def submit(self, request: GenerateRequest, deliver: Deliver) -> None:
        """Accept a request; its events go to `deliver`, on the engine's thread, the last one with `finish`.

        Raises a `RequestRefused` (`PromptTooLong`, `InvalidRequest`, `EngineBusy`, `DuplicateRequest`, `EngineDown`) at once,
        in which case `deliver` is never called.
        """
        if not self._is_started:
            raise EngineDown("it has not been started")
        self._loop.submit(request, deliver)

    def cancel(self, request_id: str) -> None:
        """End a request; its last event is ``abort``. Harmless for one that has ended or never was."""
        self._loop.cancel(request_id)

    def on_ticket_event(self, event: TokenEvent) -> None:
        """What the prefill side says of a ticket that this engine gave, by the ticket's id; or that nobody was asked.

        Harmless for a ticket that is done, or never was.
        """
        self._loop.on_ticket_event(event)

    def stats(self) -> EngineStats:
        """What the engine is doing; counters start anew with new ranks."""
        return self._loop.stats()

    def healthy(self, now: float | None = None) -> str | None:
        """None while a step finished in time or there is nothing to do; else the reason. `now`: on the engine's clock."""
        return self._loop.healthy(self._clock() if now is None else now)

    def fail(self, reason: str) -> None:
        """The ranks are gone: end every request with one ``error`` event and refuse new ones until `restart`."""
        self._loop.stop(reason)

    def restart(self, link: RankLink) -> None:
        """Serve over new ranks, with an empty cache. What the old ranks still held ends with an ``error`` event."""
        with self._lock:
            self._end_loop("the ranks were replaced")
            self._loop = StepLoop(self.config, link, self._clock, self._flush)
            self._loop.start()

    def close(self) -> None:
        """Stop serving; live requests end with an ``error`` event. Calling twice is harmless."""
        with self._lock:
            self._end_loop("it was closed")

    def _end_loop(self, reason: str) -> None:
        self._loop.stop(reason)
        if not self._loop.join(_JOIN_S):
            raise RuntimeError(f"the engine's thread did not end within {_JOIN_S:g} s after: {reason}")
