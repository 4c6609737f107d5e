"""What queries and keys become before a kernel sees them, and what its output means, where keys lie on several ranks.

Plain attention gives a kernel what it has. Latent attention has two forms (`placement.model.mla_spec`), and uses both in one
step:
own queries may attend to fresh keys in one and, with those of other ranks, cached keys in the other::

    queries ──→ kernel ──→ part (this is exchanged, with its log-sum-exp, and is merged) ──→ answer
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from actors.model.attention.context.local_rows import LocalRow


class AttentionForm(Protocol):
    """One way in which queries attend to keys. `partial_dim` is that of a part; a kernel's own dimensions are whatever it was
    given."""

    @property
    def partial_dim(self) -> int: ...

    def queries(self, q: Tensor) -> Tensor:
        """Queries of a layer [tokens, heads, _] -> of the kernel [tokens, heads, dim]."""

    def keys_values(self, kv: Tensor) -> tuple[Tensor, Tensor]:
        """What is cached of tokens [tokens, kv_heads, _] -> keys, values of the kernel, each [1, kv_heads, tokens, its dim]."""

    def partial_outputs(self, out: Tensor) -> Tensor:
        """A kernel's output [heads, tokens, dim] -> what of it is needed [heads, tokens, partial_dim]."""

    def outputs(self, partial_outputs: Tensor) -> Tensor:
        """[heads, tokens, partial_dim] -> [heads, tokens, output_dim]; linear, and row by row."""


@dataclass(frozen=True)
class Plain:
    """Keys and values as they are, kept side by side."""

    key_dim: int
    partial_dim: int

    def queries(self, q: Tensor) -> Tensor:
        return q

    def keys_values(self, kv: Tensor) -> tuple[Tensor, Tensor]:
        both = kv.transpose(0, 1).unsqueeze(0)
        return both[..., : self.key_dim], both[..., self.key_dim :]

    def partial_outputs(self, out: Tensor) -> Tensor:
        return out

    def outputs(self, partial_outputs: Tensor) -> Tensor:
        return partial_outputs


@dataclass(frozen=True)
class AttentionInputs:
    """One layer's queries and keys. `fresh`: the form of a row among its fresh keys; `shared`: of all rows over cached ones."""

    q: Tensor
    """[tokens, heads, _]"""
    kv: Tensor
    """[tokens, kv_heads, _]: what the cache holds of each token (`KVCache.joined`)."""
    fresh: Callable[[LocalRow], AttentionForm]
    shared: AttentionForm
    output_dim: int


def plain_inputs(q: Tensor, k: Tensor, v: Tensor) -> AttentionInputs:
    """Of plain attention: `q` [tokens, q_heads, dim], `k` and `v` [tokens, kv_heads, dim of each]."""
    form = Plain(k.shape[2], v.shape[2])
    return AttentionInputs(q, torch.cat((k, v), 2), lambda row: form, form, v.shape[2])
