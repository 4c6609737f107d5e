"""The hand-off probe: tests whether prompts can be handed off between the pools, with a trial request at start and after every
fault.

not tried ──trial──→ works ←──trial, or any client's prompt────┐
              │        │ a prompt was not handed off: trial    │
              └────────┴──trial failed, or no prompt replicas───→ fails: retried from time to time
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

log = logging.getLogger("shardwright.pools")

_LOOK_EVERY_S = 1.0
_TRY_EVERY_S = 10.0
"""Seconds between trials after a failure."""
NOT_TRIED = "no prompt has been handed off between the pools yet"


class HandoffProbe:
    """The verdict on hand-offs, and the task that keeps it up to date. `is_needed`: False if there is nothing to probe."""

    def __init__(self, is_needed: bool) -> None:
        self._failure = NOT_TRIED if is_needed else ""
        self._is_needed = is_needed
        self._tried_at: float | None = None
        self._is_suspect = False
        self._first = asyncio.Event()

    @property
    def failure(self) -> str:
        """The reason why prompts are not handed off; empty if they are, or if there is nothing to probe."""
        return self._failure

    @property
    def is_tried(self) -> bool:
        """Whether there has been a verdict, or none is needed."""
        return self._first.is_set() or not self._is_needed

    def gauges(self) -> dict[str, float]:
        """Returns the gauge for ``/metrics``: ``handoff_works``, 1 or 0; no gauge if there is nothing to probe."""
        return {"handoff_works": float(not self._failure)} if self._is_needed else {}

    def on_handoff_end(self, failure: str | None) -> None:
        """Record how the hand-off of a client's prompt ended: `failure` is the reason of its failure, or None if it succeeded.

        A success is a verdict. A failure may concern that prompt only, so it just causes a trial soon.
        """
        if failure is None:
            self.set_verdict("")
        else:
            self._is_suspect = True

    def set_verdict(self, failure: str) -> None:
        """Set the verdict: `failure` is the reason why prompts are not handed off, or empty if they are. A change is logged."""
        if failure and failure != self._failure:
            log.warning("prompts are not handed off between the pools, decode replicas compute them: %s", failure)
        elif self._failure and not failure and self._first.is_set():
            log.warning("prompts are handed off between the pools again")
        self._failure = failure
        self._is_suspect = self._is_suspect and bool(failure)
        self._first.set()

    async def first(self, within_s: float) -> None:
        """Wait for the first verdict, at most `within_s` seconds; then only a line is logged. Returns at once if there is
        nothing to probe."""
        if self._is_needed:
            try:
                async with asyncio.timeout(within_s):
                    await self._first.wait()
            except TimeoutError:
                log.warning("the hand-off probe has no result after %g s", within_s)

    async def run(self, look: Callable[[], Awaitable[str | None]], attempt: Callable[[], Awaitable[str]]) -> None:
        """Probe for as long as the process lives, about every second; it never returns. To be run as a task.

        `look` returns the reason why a trial must fail, None if it is too early for one, or ``""`` if one can be made.
        `attempt` makes a trial and returns its fault, or ``""`` if it succeeded. Their exceptions are logged.
        """
        while True:
            try:
                missing = await look()
                if missing and self._is_needed:
                    self.set_verdict(missing)
                elif missing == "" and self._is_due():
                    self._tried_at, self._is_suspect = time.monotonic(), False
                    self.set_verdict(await attempt())
            except Exception:
                log.exception("the hand-off probe failed")
            await asyncio.sleep(_LOOK_EVERY_S)

    def _is_due(self) -> bool:
        waited = self._tried_at is None or time.monotonic() - self._tried_at >= _TRY_EVERY_S
        return self._is_needed and (self._is_suspect or (bool(self._failure) and waited))
