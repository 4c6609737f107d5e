"""Selects the token dispatch (exchange) of the MoE layers in each step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from actors.groups.group import Group
from actors.model.moe.dispatch import (
    AllGatherDispatcher,
    AllToAllDispatcher,
    DispatchExchange,
    IdleDispatcher,
    SumExchange,
    TokenDispatcher,
)
from actors.model.moe.tokens import OwnTokens, PartitionedTokens, TokensOfRegion
from actors.model.step.exchange import Exchange
from placement.cost import expert_modes
from placement.cost.expert_modes import Mode
from placement.experts.expert_map import map_of
from placement.layout import mesh
from placement.model.spec import ModelSpec
from placement.ownership import expert_tokens
from placement.ownership.expert_tokens import NewLensAcrossDP
from placement.ownership.rank_identity import RankIdentity


class Exchanges(Protocol):
    """Makes the exchange of each step."""

    def of(self, new_lens_across_dp: NewLensAcrossDP, copy_offset: int) -> Exchange:
        """Return the exchange that dispatches the tokens of a step. `new_lens_across_dp` are the new tokens of each sequence on
        each DP rank; `copy_offset` is the offset of the step's first token in the round robin over an expert's copies."""


class OnlySums:
    """For models without experts, and for ranks that all hold all tokens: always mode ``sum``."""

    def of(self, new_lens_across_dp: NewLensAcrossDP, copy_offset: int) -> Exchange:
        """See `Exchanges.of`. Always mode ``sum``."""
        return SumExchange(copy_offset)


class ExchangesByRule:
    """Selects the mode by the rule of `placement.cost.expert_modes`, which all ranks evaluate on the same step plan."""

    def __init__(
        self,
        spec: ModelSpec,
        identity: RankIdentity,
        groups: Mapping[str, Group],
        element_bytes: int,
        device: torch.device,
    ) -> None:
        """`element_bytes` is the size of one element of a hidden state."""
        assert spec.moe is not None
        layout = identity.layout
        self._spec, self._layout, self._element_bytes, self._device = spec, layout, element_bytes, device
        self._tp, self._cp, self._moe = groups["tp"], groups["cp"], groups["moe"]
        self._dp_rank = identity.coords.attn_dp
        self._copy = mesh.moe_coords_of(layout, identity.world_rank).moe_dp
        self._ends = torch.tensor([slots.stop for slots in map_of(spec.moe, layout).ranges], dtype=torch.int64, device=device)

    def of(self, new_lens_across_dp: NewLensAcrossDP, copy_offset: int) -> Exchange:
        """See `Exchanges.of`."""
        mode = expert_modes.mode(self._spec, self._layout, new_lens_across_dp, self._element_bytes)
        if mode == "sum":
            return SumExchange(copy_offset)
        own_tokens = expert_tokens.of_copy(expert_tokens.own_tokens(new_lens_across_dp, self._layout), self._layout, self._copy)
        return DispatchExchange(self._own(new_lens_across_dp[self._dp_rank]), self._dispatcher(mode, own_tokens, copy_offset))

    def _dispatcher(self, mode: Mode, own_tokens: Sequence[int], copy_offset: int) -> TokenDispatcher:
        if not any(own_tokens):
            return IdleDispatcher()
        if mode == "gather":
            return AllGatherDispatcher(self._moe, own_tokens, copy_offset)
        return AllToAllDispatcher(self._moe, own_tokens, copy_offset, self._ends, self._layout.moe_tp)

    def _own(self, new_lens: Sequence[int]) -> OwnTokens:
        if expert_tokens.num_common(new_lens, self._cp.size):
            return PartitionedTokens(self._tp, self._cp, new_lens, self._device)
        return TokensOfRegion()


def exchanges(
    spec: ModelSpec, identity: RankIdentity, groups: Mapping[str, Group], element_bytes: int, device: torch.device
) -> Exchanges:
    """Return the selection of the token dispatch of one rank. `groups` are its groups by axis, along the axes of
    `placement.layout.mesh.talking_axes`, and `element_bytes` the size of one element of a hidden state."""
    if spec.moe is None:
        return OnlySums()
    return ExchangesByRule(spec, identity, groups, element_bytes, device)
