"""Which exchange the layers of a step use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from actors.model.group import Group
from actors.model.moe.exchange import AllToAllExchange, Exchange, GatherExchange, SumExchange
from actors.model.moe.tokens import DealtTokens, OwnTokens, TokensOfRegion
from placement import expert_modes, expert_tokens, mesh
from placement.experts import map_of
from placement.layout import Layout
from placement.model_spec import ModelSpec


class Exchanges(Protocol):
    """Makes the exchange of each step."""

    def of(self, new_lens: Sequence[int]) -> Exchange:
        """The one of a step whose rows have `new_lens` new tokens."""


class OnlySums:
    """For models without experts, and ranks that all hold all tokens."""

    def of(self, new_lens: Sequence[int]) -> Exchange:
        return SumExchange()


class ExchangesByRule:
    """By the rule of `placement.expert_modes`, which every rank finds in the plan."""

    def __init__(
        self,
        spec: ModelSpec,
        layout: Layout,
        world_rank: int,
        groups: Mapping[str, Group],
        element_bytes: int,
        device: torch.device,
    ) -> None:
        """`element_bytes`: of one number of a hidden state."""
        assert spec.moe is not None
        self._spec, self._layout, self._element_bytes, self._device = spec, layout, element_bytes, device
        self._tp, self._cp, self._moe = groups["tp"], groups["cp"], groups["moe"]
        self._copy = mesh.moe_coords(layout, world_rank).moe_dp
        placed = map_of(spec.moe, layout)
        homes = [placed.rank_of(slots[0]) for slots in placed.holders[0]]
        self._homes = torch.tensor(homes, dtype=torch.int64, device=device)

    def of(self, new_lens: Sequence[int]) -> Exchange:
        mode = expert_modes.mode(self._spec, self._layout, new_lens, self._element_bytes)
        if mode == "sum":
            return SumExchange()
        own = self._own(new_lens)
        if mode == "a2a":
            return AllToAllExchange(own, self._moe, self._homes, self._layout.moe_tp)
        handed = expert_tokens.handed_in(new_lens, self._layout)
        return GatherExchange(own, self._moe, expert_tokens.of_copy(handed, self._layout, self._copy))

    def _own(self, new_lens: Sequence[int]) -> OwnTokens:
        if expert_tokens.num_common(new_lens, self._cp.size):
            return DealtTokens(self._tp, self._cp, new_lens, self._device)
        return TokensOfRegion()


def exchanges(
    spec: ModelSpec, layout: Layout, world_rank: int, groups: Mapping[str, Group], element_bytes: int, device: torch.device
) -> Exchanges:
    """Those of one rank; `groups` along the axes of `placement.mesh.talking_axes`."""
    if spec.moe is None:
        return OnlySums()
    return ExchangesByRule(spec, layout, world_rank, groups, element_bytes, device)
