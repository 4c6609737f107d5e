"""What one layer asks of attention beside its tensors: the same in every step, and so made once, with the layer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from placement.model.spec import ModelSpec


@dataclass(frozen=True, eq=False)
class AttentionParams:
    """The constants of one layer's attention. They are exchanged together from the layer down to its kernels.

    ``softmax(cap(q k^T * scale)) v`` over the keys inside `window`, where ``cap(x) = softcap * tanh(x / softcap)``.
    """

    layer: int
    """Number of the layer in the model, by which its `KVCache` knows it."""
    scale: float
    """Multiplies the scores."""
    window: int | None = None
    """A query at position p sees the keys ``[p - window + 1, p]``; None: all up to p."""
    softcap: float | None = None
    """Bounds the scores, after the scale; None: they are not bounded."""
    sinks: Tensor | None = None
    """[q_heads] fp32, one score for each query head of this rank: see `actors.model.attention.backend.with_sinks`."""

    @classmethod
    def of(cls, spec: ModelSpec, layer: int, sinks: Tensor | None = None) -> AttentionParams:
        """Those of a layer of a model; `sinks` are this rank's."""
        return cls(layer, spec.scores_scale, spec.windows[layer], spec.attention_softcap, sinks)
