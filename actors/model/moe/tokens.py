"""The own tokens of a rank in token dispatch (expert parallelism), and how their results return to the ranks that need them.

`placement.ownership.expert_tokens` defines which tokens are a rank's own.
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
    """The own tokens of one rank in one step. `hidden` is this rank's part of the hidden states in the region."""

    def take(self, hidden: Tensor, region: Region) -> Tensor:
        """Return the hidden states of this rank's own tokens [own, hidden], from its part `hidden` of those of the tp group in
        `region`. May be a collective of the tp group."""

    def join(self, own: Tensor, region: Region) -> Tensor:
        """Return this rank's part of the hidden states in `region`, from `own` [own, hidden], the results for its own tokens.
        May be a collective of the tp and cp groups."""


class TokensOfRegion:
    """The own tokens of the region itself: no other rank runs any of the tp group's tokens."""

    def take(self, hidden: Tensor, region: Region) -> Tensor:
        """See `OwnTokens.take`."""
        return region.slice(hidden)

    def join(self, own: Tensor, region: Region) -> Tensor:
        """See `OwnTokens.join`."""
        return region.join(own)


class PartitionedTokens:
    """Own tokens if all ranks of `cp` run some of the tokens: these are partitioned over cp, and then with the others over
    `tp`."""

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
        """See `OwnTokens.take`."""
        return region.gather(hidden)[self._own]

    def join(self, own: Tensor, region: Region) -> Tensor:
        """See `OwnTokens.join`."""
        of_group = self._tp.all_gather(own, self._tp_sizes)
        common = self._cp.all_gather(of_group[self._num_single :], self._cp_sizes)
        whole = own.new_empty(len(self._order), own.shape[1])
        whole[self._order] = torch.cat((of_group[: self._num_single], common))
        return region.keep(whole)
