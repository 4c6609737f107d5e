"""The roles of replicas in prefill/decode disaggregation, and the kinds of work that each role admits."""

from __future__ import annotations

from enum import StrEnum

from actors.wire.requests import GenerateRequest


class WorkKind(StrEnum):
    """The kind of work that a request asks of a replica."""

    PROMPT = "prompt"
    """Computing a prompt for the replica that issued a KV transfer ticket."""
    REQUEST = "request"
    """Answering a request, whether or not another replica computes its prompt."""

    @classmethod
    def of(cls, request: GenerateRequest) -> WorkKind:
        """Return the kind of work that `request` asks for: ``PROMPT`` if it carries a KV transfer ticket, else ``REQUEST``."""
        return cls.REQUEST if request.ticket is None else cls.PROMPT


class Role(StrEnum):
    """The role of a replica in its deployment."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"

    @property
    def admits(self) -> frozenset[WorkKind]:
        """The kinds of work that a replica of this role accepts."""
        return _ADMITS[self]


_ADMITS = {
    Role.PREFILL: frozenset({WorkKind.PROMPT}),
    Role.DECODE: frozenset({WorkKind.REQUEST}),
    Role.MIXED: frozenset(WorkKind),
}
