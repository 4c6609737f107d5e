"""The compatibility handshake of two ranks that exchange KV cache: which properties must be equal on both sides.

Layouts, page sizes and DP ranks may differ, because the hand-off map translates between them. The meaning of the values in a
page (model, dtype, cache geometry, memory order) must be the same.
"""

from __future__ import annotations

from collections.abc import Iterator

from actors.wire.message import Message
from placement.model.spec import DType, ModelSpec

PROTOCOL = 1
"""Version of the messages that the two sides exchange."""

PAGE_LAYOUT = "planes, kv_heads, pages, tokens, values"
"""Memory order of the pages of one layer (`actors.model.kv.kv_cache`), outermost dimension first."""


class IncompatiblePeerError(ValueError):
    """Raised when the KV of two sides is not interchangeable. The message names each field that differs, with both values."""


class Compatibility(Message):
    """The properties that both sides must have in common. Sizes describe the whole model, not the part that one rank holds."""

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
        """Returns the properties of a model, served with KV values of `dtype`. `model_digest` identifies the model's weights
        (`placement.model.digest`), and `transport` is the name and version of the transport."""
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
        """Yields a sentence for every field that differs between this side and `other`, with both values; nothing if KV can be
        exchanged."""
        for field in type(self).model_fields:
            ours, theirs = getattr(self, field), getattr(other, field)
            if ours != theirs:
                yield f"{field} is {ours!r} here and {theirs!r} there"

    def require(self, other: Compatibility, peer: str) -> None:
        """Raises `IncompatiblePeerError`, which lists all differences to `other`, if there are any. `peer` names the other side
        in the message."""
        found = list(self.differences(other))
        if found:
            raise IncompatiblePeerError(
                f"KV cannot be exchanged with {peer}: {'; '.join(found)}. Both pools must serve one model in one dtype and "
                "run one version"
            )
