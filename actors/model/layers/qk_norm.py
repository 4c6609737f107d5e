"""RMS norm over all query heads, and over all key heads, of a layer whose heads are on several TP ranks (OLMo-2).

A rank holds some of the heads that the norm averages over, so the sums of squares are summed over the group: one all-reduce of
two numbers a token. A KV head that several ranks hold is counted only by the first of them::

    tp=3, 2 KV heads     rank 0: q0 q1 k0     rank 1: q2 k0     rank 2: q3 q4 q5 k1
    sum of k squares     k0                   0                 k1
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from actors.groups.group import Group
from placement.model.spec import ModelSpec
from placement.ownership.shard import Shard


class WidthNorm(nn.Module):
    """Scales this rank's heads [tokens, heads, head_dim] by a mean square over the heads of all ranks. It computes in fp32."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight, self._eps = weight, eps

    def forward(self, heads: Tensor, mean_square: Tensor) -> Tensor:
        """Return `heads` [tokens, heads, head_dim], this rank's, divided by the root of `mean_square` [tokens] fp32 and
        multiplied by the weight, in their dtype."""
        scale = (mean_square + self._eps).rsqrt()[:, None, None]
        weight = self.weight.to(torch.float32).view(1, *heads.shape[1:])
        return (heads.to(torch.float32) * scale * weight).to(heads.dtype)


def mean_squares(q: Tensor, k: Tensor, spec: ModelSpec, own: Shard, group: Group) -> tuple[Tensor, Tensor]:
    """Return the mean square over all query heads and over all key heads of all ranks, each [tokens] fp32, from this rank's `q`
    and `k` [tokens, heads, head_dim]. A collective of `group`."""
    first_holder = own.q_heads.start == own.kv_heads.start * spec.queries_per_kv
    sums = torch.stack((_sum_of_squares(q), _sum_of_squares(k) * first_holder), -1)
    q_sum, k_sum = group.all_reduce(sums).unbind(-1)
    return q_sum / (spec.num_heads * spec.head_dim), k_sum / (spec.num_kv_heads * spec.head_dim)


def _sum_of_squares(heads: Tensor) -> Tensor:
    return heads.to(torch.float32).square().sum((-2, -1))
