"""The MoE router: selects the experts of each token, and their weights.

All computation is in fp32 and identical on every rank: a rank with different rounding would send a token to other experts.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from actors.model.kernels.linear import linear
from placement.model.moe_spec import MoESpec

_TINY = 1e-20
"""Added to the divisor of the weights, as in the published models. In fp32 it changes no sum except zero."""


class Router(nn.Module):
    """Routes ``[tokens, hidden]`` to weights [tokens, top_k] fp32 and experts [tokens, top_k], the latter in ascending order.

    Among equal scores the lowest expert id is chosen.
    """

    def __init__(
        self, moe: MoESpec, weight: nn.Parameter, bias: nn.Parameter | None = None, choice_bias: nn.Parameter | None = None
    ) -> None:
        """`weight` is [num_experts, hidden] fp32; the biases are [num_experts] fp32."""
        super().__init__()
        self.weight, self.bias, self.choice_bias = weight, bias, choice_bias
        self._moe = moe

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights [tokens, top_k] fp32 and the experts [tokens, top_k] int64, ascending, of each token of `x`
        [tokens, hidden]."""
        scores = self.scores(x)
        experts = self.choose(scores)
        return self._weights(scores.gather(1, experts)), experts

    def scores(self, x: Tensor) -> Tensor:
        """Return the router's scores [tokens, num_experts] fp32 for `x` [tokens, hidden]: the softmax or sigmoid of its
        logits."""
        logits = linear(x.to(torch.float32), self.weight, self.bias)
        return logits.softmax(-1) if self._moe.scoring == "softmax" else logits.sigmoid()

    def choose(self, scores: Tensor) -> Tensor:
        """Return the experts of each token, [tokens, top_k] int64 in ascending order, from `scores` [tokens, num_experts].
        Among equal scores the lowest expert is chosen."""
        worth = scores if self.choice_bias is None else scores + self.choice_bias
        if self._moe.top_groups < self._moe.groups:
            worth = self._in_best_groups(worth)
        return _largest(worth, self._moe.top_k).sort(-1).values

    def _in_best_groups(self, worth: Tensor) -> Tensor:
        """Return the scores with -inf outside the token's best groups."""
        moe = self._moe
        groups = worth.view(-1, moe.groups, moe.group_size)
        of_group = groups.amax(-1) if moe.group_score == "best" else groups.topk(2, -1).values.sum(-1)
        best = torch.zeros_like(of_group, dtype=torch.bool).scatter_(1, _largest(of_group, moe.top_groups), True)
        return groups.masked_fill(~best.unsqueeze(-1), -torch.inf).view(worth.shape)

    def _weights(self, chosen: Tensor) -> Tensor:
        if self._moe.normalise:
            chosen = chosen / (chosen.sum(-1, keepdim=True) + _TINY)
        return chosen * self._moe.routed_scaling


def _largest(values: Tensor, count: int) -> Tensor:
    """Return the indices of the `count` largest values of each row. Among equals the lowest index comes first, which `topk`
    does not guarantee."""
    return values.sort(stable=True, dim=-1, descending=True).indices[:, :count]
