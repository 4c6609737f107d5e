"""The interface between the common request loop and the endpoints' response formats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from serve_app.openai.request.plan import ChoiceRequest
from serve_app.openai.response.delta import Delta
from serve_app.openai.response.writer import Writing


class ResponseBuilder(Protocol):
    """The JSON of an endpoint. All objects lack ``usage``, which the request loop adds."""

    @property
    def shows_tokens(self) -> bool:
        """Whether a chunk is sent for tokens even while their text is held back, because the answer reports the tokens
        themselves."""

    def opening(self, choice: ChoiceRequest) -> list[dict[str, Any]]:
        """Returns the JSON objects of the chunks that begin the stream of `choice`, before anything was generated; may be
        empty."""

    def chunk(self, delta: Delta) -> dict[str, Any]:
        """Returns the JSON object of a chunk of a stream, with the text and tokens of `delta`."""

    def last(self) -> dict[str, Any]:
        """Returns the JSON object of the chunk without choices that ends a stream and carries the usage, if it was
        requested."""

    def whole(self, choices: Sequence[Delta]) -> dict[str, Any]:
        """Returns the JSON object of an answer that is not streamed. `choices` are the joined deltas of each choice, by
        index."""


@dataclass(frozen=True)
class Job:
    """A request that has passed all checks: the choices to run, how to write them, and how to send them."""

    endpoint: str
    choices: list[ChoiceRequest]
    writing: Writing
    response_builder: ResponseBuilder
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False


@dataclass(frozen=True)
class ResponseEnvelope:
    """The fields at the beginning of every object of an answer."""

    id: str
    model: str
    created: int

    def object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """Returns a JSON object of the type `kind` (its field ``object``) with the envelope's fields and `choices`."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}
