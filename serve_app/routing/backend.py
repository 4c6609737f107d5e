"""The seam between the HTTP face and whatever generates tokens (the cluster, or a script in a test).

HTTP route ── GenerateRequest ──→ Backend.generate ──→ TokenEvent, TokenEvent, …, TokenEvent(finish=…)
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from actors.wire.requests import GenerateRequest, TokenEvent
from placement.model.errors import ReportedError

RefusalCode = Literal["prompt_too_long", "engine_busy", "engine_down"]


class BackendRefused(ReportedError):
    """A request the backend will not start (or, for ``engine_down``, cannot go on with).

    `retry_after_s`: seconds after which the caller may try again, where that makes sense.
    """

    def __init__(self, code: RefusalCode, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.retry_after_s = retry_after_s


@dataclass(frozen=True)
class Health:
    """Whether requests can be served now; `replicas` counts those that can. `reason` says why not, or, where they can be,
    what is amiss all the same."""

    ok: bool
    reason: str = ""
    replicas: int = 0


class Backend(Protocol):
    """Generates tokens. Everything is called from one event loop."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent, None]:
        """The events of one request; the last one carries `finish`, and then the generator ends by itself.

        An event without tokens may be sent as soon as the request is admitted: a streamed answer starts (status and
        headers) once every choice has had its first event. Raises `BackendRefused` before the first event.
        Closing the generator before it ended cancels the request; a request that finished is never closed early.
        """

    async def health(self) -> Health:
        """Whether requests can be served now."""

    async def stats(self) -> Mapping[str, Mapping[str, float]]:
        """Gauges by replica name, then by metric name in snake case, for ``/metrics``. May be empty."""

    def gauges(self) -> Mapping[str, float]:
        """Those of the whole service, by metric name in snake case. May be empty."""
