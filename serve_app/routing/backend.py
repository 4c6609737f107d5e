"""The interface between the HTTP endpoint and the token generator (the cluster, or a script in a test).

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
    """A request that the backend does not start (or, for ``engine_down``, cannot continue).

    `retry_after_s`: seconds after which the caller may try again, if that is useful.
    """

    def __init__(self, code: RefusalCode, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.retry_after_s = retry_after_s


@dataclass(frozen=True)
class Health:
    """Whether requests can be served now. `replicas` is the number of replicas that can serve. `reason` explains why requests
    cannot be served, or, if they can, what is limited."""

    ok: bool
    reason: str = ""
    replicas: int = 0


class Backend(Protocol):
    """Generates tokens. All methods are called from one event loop."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent, None]:
        """Yields the events of one request. The last one carries `finish`, after which the generator ends by itself.

        The first event, which normally has no tokens, comes as soon as the request is admitted, while it may still wait in the
        queue: a streamed answer starts (status and headers) once every choice has had its first event. Closing the generator
        before its end cancels the request; a request that has finished is never closed early. Raises `BackendRefused` before
        the first event if the request is not accepted.
        """

    async def health(self) -> Health:
        """Returns whether requests can be served now, the reason if they cannot, and the number of replicas that can serve."""

    async def stats(self) -> Mapping[str, Mapping[str, float]]:
        """Returns the current gauges of each replica for ``/metrics``, by replica name, then by metric name in snake case, as
        in ``name`` or ``name:label=value``. May be empty."""

    def gauges(self) -> Mapping[str, float]:
        """Returns the current gauges of the whole service for ``/metrics``, by metric name in snake case. May be empty."""
