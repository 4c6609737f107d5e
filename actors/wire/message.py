"""The base class of every message between processes: msgpack bytes, validated against a schema on arrival.

    ingress ── GenerateRequest ──→ engine ── StepPlan ──→ every rank                               requests.py, plans.py
    ingress ←─── TokenEvents ───── engine ←─ StepResult ─ the output rank of each DP rank          results.py
                                   engine ←─ ExpertReport ─ every rank with experts, on request    experts.py
                                   engine ←─── KVReport ─── every rank of a pool                   kv.py
    decode engine ── KVTicket ──→ ingress ── GenerateRequest with it ──→ prefill engine            kv.py

Messages hold token ids, never the text of a conversation.
"""

from __future__ import annotations

from typing import Self

import msgpack
from pydantic import BaseModel, ConfigDict


class Message(BaseModel):
    """A value that crosses a process boundary."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def pack(self) -> bytes:
        """Return this message as msgpack bytes, from which `unpack` makes an equal message."""
        packed: bytes = msgpack.packb(self.model_dump())
        return packed

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """Return the message that `pack` has packed into `data`. Raises `ValueError` (`pydantic.ValidationError` is one),
        `TypeError` or `msgpack.UnpackException` if `data` is not a message of this class."""
        return cls.model_validate(msgpack.unpackb(data, strict_map_key=False))
