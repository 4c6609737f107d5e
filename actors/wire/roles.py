"""The roles of replicas in pools, and the kinds of work that each role takes."""

from __future__ import annotations

from enum import StrEnum

from actors.wire.requests import GenerateRequest


class WorkKind(StrEnum):
    """What a replica can be asked for."""

    PROMPT = "prompt"
    """To compute a prompt for the replica that gave a ticket."""
    REQUEST = "request"
    """To answer, be it with a prompt that another one computes."""

    @classmethod
    def of(cls, request: GenerateRequest) -> WorkKind:
        return cls.REQUEST if request.ticket is None else cls.PROMPT


class Role(StrEnum):
    """What a replica is for."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"

    @property
    def admits(self) -> frozenset[WorkKind]:
        return _ADMITS[self]


_ADMITS = {
    Role.PREFILL: frozenset({WorkKind.PROMPT}),
    Role.DECODE: frozenset({WorkKind.REQUEST}),
    Role.MIXED: frozenset(WorkKind),
}
