"""The handshake of two ranks that are to exchange KV: what must be equal, and what may differ.

Layouts, page sizes and DP ranks may differ: the hand-off map bridges them. What a value in a page *means* may not.
"""

from __future__ import annotations

from collections.abc import Iterator

from actors.wire.message import Message
from placement.model.spec import DType, ModelSpec

PROTOCOL = 1
"""Version of the messages between the two sides."""

PAGE_LAYOUT = "planes, kv_heads, pages, tokens, values"
"""How the pages of a layer lie in memory (`actors.model.kv.kv_cache`), outermost first."""


class IncompatiblePeerError(ValueError):
    """Two sides whose KV means different things: names each field that differs, with both values."""


class Compatibility(Message):
    """What both sides must agree on. Sizes are those of the whole model, never of one rank."""

    protocol: int = PROTOCOL
    model_digest: str
    dtype: DType
    num_layers: int
    kv_heads: int
    kv_planes: int
    kv_dim: int
    page_layout: str = PAGE_LAYOUT
    transport: str
    """Name and version of the transport."""

    @classmethod
    def of(cls, spec: ModelSpec, model_digest: str, dtype: DType, transport: str) -> Compatibility:
        return cls(
            model_digest=model_digest,
            dtype=dtype,
            num_layers=spec.num_layers,
            kv_heads=spec.num_kv_heads,
            kv_planes=spec.kv_planes,
            kv_dim=spec.kv_dim,
            transport=transport,
        )

    def differences(self, other: Compatibility) -> Iterator[str]:
        """Every field that differs, with both values."""
        for field in type(self).model_fields:
            ours, theirs = getattr(self, field), getattr(other, field)
            if ours != theirs:
                yield f"{field} is {ours!r} here and {theirs!r} there"

    def require(self, other: Compatibility, peer: str) -> None:
        """Raise `IncompatiblePeerError` with all differences, if there are any."""
        found = list(self.differences(other))
        if found:
            raise IncompatiblePeerError(
                f"KV cannot be exchanged with {peer}: {'; '.join(found)}. Both pools must serve one model in one dtype and "
                "run one version"
            )
