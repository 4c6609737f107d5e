"""KV formats of context-parallel attention: how queries and cached values become kernel inputs, and outputs become heads.

Plain attention passes its tensors to the kernel unchanged. Latent attention (MLA, `placement.model.mla_spec`) has two forms and
uses both in one step: a rank's own queries may attend to fresh keys in one form, and attend to cached keys, together with the
queries of other ranks, in the other::

    queries ──→ kernel ──→ partial output (exchanged with its log-sum-exp, and merged) ──→ answer
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from actors.model.attention.context.local_rows import LocalRow


class AttentionForm(Protocol):
    """One way in which queries attend to keys. `partial_dim` is the size of a partial output; the kernel's own dimensions may
    differ."""

    @property
    def partial_dim(self) -> int:
        """Size of one head's partial output, as it is exchanged and merged."""
        ...

    def queries(self, q: Tensor) -> Tensor:
        """Return the kernel's queries [tokens, heads, dim], from those that the layer has made, `q` [tokens, heads, its
        dim]."""

    def keys_values(self, kv: Tensor) -> tuple[Tensor, Tensor]:
        """Return the kernel's keys and values, each [1, kv_heads, tokens, its own head size], from what the cache stores for
        these tokens, `kv` [tokens, kv_heads, cached_dim]."""

    def partial_outputs(self, out: Tensor) -> Tensor:
        """Return the part [heads, tokens, partial_dim] of the kernel's output `out` [heads, tokens, dim] that has to be
        merged."""

    def outputs(self, partial_outputs: Tensor) -> Tensor:
        """Return the layer's outputs [heads, tokens, output_dim] from merged `partial_outputs` [heads, tokens, partial_dim].
        The map is linear and works row by row."""


@dataclass(frozen=True)
class Plain:
    """Ordinary keys and values, cached side by side; nothing is converted."""

    key_dim: int
    partial_dim: int

    def queries(self, q: Tensor) -> Tensor:
        """See `AttentionForm.queries`."""
        return q

    def keys_values(self, kv: Tensor) -> tuple[Tensor, Tensor]:
        """See `AttentionForm.keys_values`."""
        both = kv.transpose(0, 1).unsqueeze(0)
        return both[..., : self.key_dim], both[..., self.key_dim :]

    def partial_outputs(self, out: Tensor) -> Tensor:
        """See `AttentionForm.partial_outputs`."""
        return out

    def outputs(self, partial_outputs: Tensor) -> Tensor:
        """See `AttentionForm.outputs`."""
        return partial_outputs


@dataclass(frozen=True)
class AttentionInputs:
    """The queries and keys of one layer, and the forms in which they meet.

    `fresh` gives the form in which a row attends to its fresh keys; `shared` is the form of all rows over cached keys.
    """

    q: Tensor
    """[tokens, heads, _]"""
    kv: Tensor
    """[tokens, kv_heads, _]: the values that the cache stores for each token (`KVCache.joined`)."""
    fresh: Callable[[LocalRow], AttentionForm]
    shared: AttentionForm
    output_dim: int


def plain_inputs(q: Tensor, k: Tensor, v: Tensor) -> AttentionInputs:
    """Return the inputs of attention without latents, from `q` [tokens, q_heads, dim], `k` and `v` [tokens, kv_heads, dim of
    each], in the form `Plain`."""
    form = Plain(k.shape[2], v.shape[2])
    return AttentionInputs(q, torch.cat((k, v), 2), lambda row: form, form, v.shape[2])
