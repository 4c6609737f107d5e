"""The logical-to-physical expert map of one layer on one rank (EPLB): from experts to slots, and to own slots.

`placement.experts.expert_map` defines slots. Ten experts and two redundant ones in three slots on each of four ranks, as seen
by rank 3::

    slots      0 1 2 | 3 4 5 | 6 7 8 | 9 10 11        holders of expert 0: 0, 9      copies 2
    experts    0 1 2 | 3 4 5 | 6 7 8 | 9  0  1        holders of expert 9: 9         copies 1
                                       └ own

Tokens are assigned round robin to the copies of an expert. A token's offset is the step's offset (`StepPlan.copy_offset`) plus
its index among the tokens of the copy, so every rank derives it from the plan, and even a single sequence uses all copies.
Copies are identical: results do not depend on offsets.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class LayerExpertMap:
    """The logical-to-physical expert map of one layer as tensors, seen from one rank."""

    held: Tensor
    """[own slots] int64: the expert in each own slot."""

    def __init__(self, experts: Sequence[int], own: range, device: torch.device) -> None:
        """`experts` is the expert in every slot of the copy; `own` are the slots of this rank."""
        self._own, self._device = own, device
        self.change(experts)

    def change(self, experts: Sequence[int]) -> None:
        """Use another map from now on. `experts` is the expert in every slot of the MoE copy, on all its ranks."""
        holders: list[list[int]] = [[] for _ in range(max(experts) + 1)]
        for slot, expert in enumerate(experts):
            holders[expert].append(slot)
        self.held = torch.tensor(experts[self._own.start : self._own.stop], dtype=torch.int64, device=self._device)
        most = max(map(len, holders))
        table = [[*slots, *[slots[0]] * (most - len(slots))] for slots in holders]
        self._table = torch.tensor(table, dtype=torch.int64, device=self._device)
        self._num_copies = torch.tensor([len(slots) for slots in holders], dtype=torch.int64, device=self._device)

    def slots(self, experts: Tensor, copy_offset: int) -> Tensor:
        """Return the slot of the MoE copy that runs each of `experts` [tokens, top_k], of the same shape. `copy_offset` is the
        offset of the first token in the round robin over an expert's copies."""
        if self._table.shape[1] == 1:
            return self._table[experts, 0]
        token = torch.arange(copy_offset, copy_offset + len(experts), device=self._device)[:, None]
        return self._table[experts, token % self._num_copies[experts]]

    def here(self, slots: Tensor) -> Tensor:
        """Return `slots` of the MoE copy as own slots of this rank, counted from 0, of the same shape. Slots of other ranks
        become one past the last own slot."""
        own = slots - self._own.start
        return torch.where((own >= 0) & (own < len(self._own)), own, len(self._own))
