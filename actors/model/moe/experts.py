"""The experts of a rank (grouped GEMM), and their partial sums over the tokens routed to them.

    tokens [T, h] ──rows of each expert together──→ [rows, h] ──gate_up──→ gate, up ──act──→ [rows, c] ──down──→ [rows, h]
                                                                                                          × weight │
    partial sums [T, h] ←──────────── each token's rows added up in the order of its experts ──────────────────────┘

A token may have experts on other ranks: their slot is `absent`, and they add nothing. The result is therefore a partial sum
over this rank's experts and its columns of them; the caller sums over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from actors.model.kernels.grouped import grouped_linear

Gated = Callable[[Tensor, Tensor], Tensor]
"""A function (gate, up) -> input of the down projection. It may reuse their memory."""


def gated_by(activation: Callable[[Tensor], Tensor]) -> Gated:
    """Return the function that computes ``activation(gate) * up`` from the two halves of the up projection."""
    return lambda gate, up: activation(gate).mul_(up)


def clamped_swiglu(limit: float, alpha: float) -> Gated:
    """Return the function that computes ``(up + 1) * gate * sigmoid(alpha * gate)`` with gate at most `limit` and up in
    ``[-limit, limit]`` (gpt-oss)."""

    def apply(gate: Tensor, up: Tensor) -> Tensor:
        gate = gate.clamp(max=limit)
        return (up.clamp(-limit, limit) + 1).mul_(gate).mul_((gate * alpha).sigmoid_())

    return apply


class Experts(nn.Module):
    """Stacked experts: `gate_up` [slots, 2 * columns, hidden], `down` [slots, hidden, columns], biases [slots, outputs]. The
    weights may be packed (`actors.model.kernels.linear.pack_weights`), alike on all ranks that move experts to each other."""

    linear_weights = ("gate_up", "down")

    def __init__(
        self,
        gate_up: nn.Parameter,
        down: nn.Parameter,
        gated: Gated,
        gate_up_bias: nn.Parameter | None = None,
        down_bias: nn.Parameter | None = None,
    ) -> None:
        super().__init__()
        self.gate_up, self.down, self.gate_up_bias, self.down_bias = gate_up, down, gate_up_bias, down_bias
        self._gated = gated
        self.absent = gate_up.shape[0]
        """The slot number that marks an expert on another rank."""

    def forward(self, x: Tensor, weights: Tensor, slots: Tensor) -> Tensor:
        """Return this rank's partial sums [tokens, hidden] in x's dtype, from `x` [tokens, hidden], `weights` [tokens, top_k]
        fp32 and `slots` [tokens, top_k] int64: own slots from 0, or `absent`."""
        return self.run(x, weights, slots, self.tokens(slots))

    def run(self, x: Tensor, weights: Tensor, slots: Tensor, tokens: Tensor) -> Tensor:
        """Return the same as `forward`, given the number of tokens of each own slot, `tokens` [slots] int64."""
        flat = slots.flatten()
        order = flat.sort(stable=True).indices
        ends = tokens.cumsum(0)
        here = order[: int(ends[-1])]
        rows = self._run(x[here // slots.shape[1]], flat[here], ends)
        return _added_up(rows, here, weights).to(x.dtype)

    def tokens(self, slots: Tensor) -> Tensor:
        """Return the number of tokens routed to each own slot, [slots] int64, from `slots` [tokens, top_k] as in `forward`."""
        return torch.bincount(slots.flatten(), minlength=self.absent + 1)[: self.absent]

    @property
    def slot_bytes(self) -> int:
        """Bytes of the weights and biases of one expert on this rank."""
        return sum(weight[0].nbytes for weight in self.parameters())

    def packed(self, slot: int) -> Tensor:
        """Return a copy of the weights and biases in the own slot `slot` (from 0), as bytes [slot_bytes] uint8."""
        return torch.cat([weight[slot].reshape(-1).view(torch.uint8) for weight in self.parameters()])

    def put(self, slot: int, packed: Tensor) -> None:
        """Fill the own slot `slot` (from 0) from `packed` [slot_bytes] uint8: the inverse of `packed`."""
        parts = torch.split(packed, [weight[slot].nbytes for weight in self.parameters()])
        for weight, part in zip(self.parameters(), parts, strict=True):
            weight[slot].view(-1).view(torch.uint8).copy_(part)

    def _run(self, x: Tensor, slots: Tensor, ends: Tensor) -> Tensor:
        """Return [rows, hidden] from rows that are sorted by slot."""
        gate, up = _plus(grouped_linear(x, self.gate_up, ends), self.gate_up_bias, slots).chunk(2, -1)
        return _plus(grouped_linear(self._gated(gate, up), self.down, ends), self.down_bias, slots)


def _plus(rows: Tensor, bias: Tensor | None, slots: Tensor) -> Tensor:
    return rows if bias is None else rows.add_(bias[slots])


def _added_up(rows: Tensor, here: Tensor, weights: Tensor) -> Tensor:
    """Return [tokens, hidden] fp32: the sum of each token's rows times their weights, in the order of its experts.

    `here` holds, for each row, its index in the flattened `weights`. Entries without a row add nothing.
    """
    tokens, top_k = weights.shape
    place = torch.full((tokens * top_k,), rows.shape[0], device=rows.device)
    place[here] = torch.arange(rows.shape[0], device=rows.device)
    place = place.view(tokens, top_k)
    if rows.shape[0] < place.numel():
        rows = F.pad(rows, (0, 0, 0, 1))  # a row of zeros for entries without a row
    total = torch.zeros(tokens, rows.shape[1], dtype=torch.float32, device=rows.device)
    for at in range(top_k):
        total += rows[place[:, at]] * weights[:, at, None]
    return total
