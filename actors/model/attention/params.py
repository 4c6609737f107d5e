"""The attention constants of one layer: the same in every step, and so created once, with the layer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from placement.model.spec import ModelSpec


@dataclass(frozen=True, eq=False)
class AttentionParams:
    """The constants of one layer's attention, passed together from the layer to its kernels.

    They define ``softmax(cap(q k^T * scale)) v`` over the keys inside `window`, where ``cap(x) = softcap * tanh(x / softcap)``.
    """

    layer: int
    """Number of the layer in the whole model, which is its index in a `KVCache`."""
    scale: float
    """Factor on the scores."""
    window: int | None = None
    """Sliding window in tokens: a query at position p sees the keys ``[p - window + 1, p]``; None: all up to p."""
    softcap: float | None = None
    """Bound on the scores, applied after the scale; None: no bound."""
    sinks: Tensor | None = None
    """[q_heads] fp32, one score for each query head of this rank: see `actors.model.attention.backend.with_sinks`."""

    @classmethod
    def of(cls, spec: ModelSpec, layer: int, sinks: Tensor | None = None) -> AttentionParams:
        """Return the attention constants of the layer `layer` (numbered in the whole model) of `spec`; `sinks` [q_heads] are
        the sink scores of this rank's heads, None if the model has none."""
        return cls(layer, spec.scores_scale, spec.windows[layer], spec.attention_softcap, sinks)
