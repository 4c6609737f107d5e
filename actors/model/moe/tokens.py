"""The tokens that a rank contributes to the experts as its own, and how their results come back to where they are needed.

Which tokens these are is said in `placement.ownership.expert_tokens`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from actors.groups.group import Group
from actors.model.step.regions import Region
from placement.layout.partition import partition
from placement.ownership import expert_tokens


class OwnTokens(Protocol):
    """The tokens of one rank in one step. `hidden` is what it holds in the region."""

    def take(self, hidden: Tensor, region: Region) -> Tensor:
        """The rank's own tokens [own, hidden]."""

    def join(self, own: Tensor, region: Region) -> Tensor:
        """From each rank's results for its own tokens to what this rank holds in the region."""


class TokensOfRegion:
    """Those that the region gives the rank anyway: nobody else runs any of the tp group's tokens."""

    def take(self, hidden: Tensor, region: Region) -> Tensor:
        return region.slice(hidden)

    def join(self, own: Tensor, region: Region) -> Tensor:
        return region.join(own)


class PartitionedTokens:
    """Some tokens are run by all ranks of `cp`: these are split over them, and then with the others over `tp`."""

    def __init__(self, tp: Group, cp: Group, new_lens: Sequence[int], device: torch.device) -> None:
        single, common = expert_tokens.places(new_lens, cp.size, cp.rank)
        cp_parts = partition(len(common), cp.size)
        mine = cp_parts[cp.rank]
        group_tokens = [*single, *common[mine.start : mine.stop]]
        tp_parts = partition(len(group_tokens), tp.size)
        own = tp_parts[tp.rank]
        self._tp, self._cp = tp, cp
        self._tp_sizes, self._cp_sizes = [len(part) for part in tp_parts], [len(part) for part in cp_parts]
        self._own = torch.tensor(group_tokens[own.start : own.stop], dtype=torch.int64, device=device)
        self._order = torch.tensor([*single, *common], dtype=torch.int64, device=device)
        self._num_single = len(single)

    def take(self, hidden: Tensor, region: Region) -> Tensor:
        return region.gather(hidden)[self._own]

    def join(self, own: Tensor, region: Region) -> Tensor:
        of_group = self._tp.all_gather(own, self._tp_sizes)
        common = self._cp.all_gather(of_group[self._num_single :], self._cp_sizes)
        whole = own.new_empty(len(self._order), own.shape[1])
        whole[self._order] = torch.cat((of_group[: self._num_single], common))
        return region.keep(whole)
