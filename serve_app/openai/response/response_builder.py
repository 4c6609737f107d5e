"""How an answer looks: what the generic request loop needs of each endpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from serve_app.openai.request.plan import ChoiceRequest
from serve_app.openai.response.delta import Delta
from serve_app.openai.response.writer import Writing


class ResponseBuilder(Protocol):
    """An endpoint's JSON. All objects lack ``usage``, which the loop adds."""

    @property
    def shows_tokens(self) -> bool:
        """Whether tokens are told of, even while their text is held back."""

    def opening(self, choice: ChoiceRequest) -> list[dict[str, Any]]:
        """Chunks that begin a choice's stream, before anything was generated."""

    def chunk(self, delta: Delta) -> dict[str, Any]:
        """A chunk of a stream."""

    def last(self) -> dict[str, Any]:
        """The chunk without choices that carries the usage."""

    def whole(self, choices: Sequence[Delta]) -> dict[str, Any]:
        """An answer that is not streamed."""


@dataclass(frozen=True)
class Job:
    """A request that passed every check: what to run, how to write it, and how to send it."""

    endpoint: str
    choices: list[ChoiceRequest]
    writing: Writing
    response_builder: ResponseBuilder
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False


@dataclass(frozen=True)
class ResponseEnvelope:
    """What every object of an answer starts with."""

    id: str
    model: str
    created: int

    def object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}
