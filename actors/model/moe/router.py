"""Which experts a token goes to, and with what weights.

Everything is fp32, on every rank alike: a rank that rounded otherwise would send a token elsewhere.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from actors.model.kernels.linear import linear
from placement.model.moe_spec import MoESpec

_TINY = 1e-20
"""Added to what weights are divided by, as in the published models. In fp32 it changes no sum but one of nothing."""


class Router(nn.Module):
    """``[tokens, hidden] -> weights [tokens, top_k] fp32, experts [tokens, top_k]``; a token's experts are in ascending order.

    Among equal scores the lowest id is chosen.
    """

    def __init__(
        self, moe: MoESpec, weight: nn.Parameter, bias: nn.Parameter | None = None, choice_bias: nn.Parameter | None = None
    ) -> None:
        """`weight` is [num_experts, hidden] fp32; the biases are [num_experts] fp32."""
        super().__init__()
        self.weight, self.bias, self.choice_bias = weight, bias, choice_bias
        self._moe = moe

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.scores(x)
        experts = self.choose(scores)
        return self._weights(scores.gather(1, experts)), experts

    def scores(self, x: Tensor) -> Tensor:
        """[tokens, num_experts] fp32."""
        logits = linear(x.to(torch.float32), self.weight, self.bias)
        return logits.softmax(-1) if self._moe.scoring == "softmax" else logits.sigmoid()

    def choose(self, scores: Tensor) -> Tensor:
        """The experts of each token, [tokens, top_k]."""
        worth = scores if self.choice_bias is None else scores + self.choice_bias
        if self._moe.top_groups < self._moe.groups:
            worth = self._in_best_groups(worth)
        return _largest(worth, self._moe.top_k).sort(-1).values

    def _in_best_groups(self, worth: Tensor) -> Tensor:
        """-inf outside the token's best groups."""
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
    """Indices of the `count` largest of each row; the lowest among equals, which `topk` does not promise."""
    return values.sort(stable=True, dim=-1, descending=True).indices[:, :count]
