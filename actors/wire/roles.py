"""The roles of replicas in pools, and the kinds of work that each role takes."""

from __future__ import annotations

from enum import StrEnum

from actors.wire.requests import GenerateRequest


class Work(StrEnum):
    """What a replica can be asked for."""

    PROMPT = "prompt"
    """To compute a prompt for the replica that gave a ticket."""
    REQUEST = "request"
    """To answer, be it with a prompt that another one computes."""

    @classmethod
    def of(cls, request: GenerateRequest) -> Work:
        return cls.REQUEST if request.ticket is None else cls.PROMPT


class Role(StrEnum):
    """What a replica is for."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"

    @property
    def takes(self) -> frozenset[Work]:
        return _TAKES[self]


_TAKES = {
    Role.PREFILL: frozenset({Work.PROMPT}),
    Role.DECODE: frozenset({Work.REQUEST}),
    Role.MIXED: frozenset(Work),
}
