"""How tokens get to the experts and their results back: one layer's path through a MoE copy, in three modes.

Four ranks, ``tp=2, cp=2`` (two tp groups) and ``ep=4``, in mode ``a2a``; token c has experts on ranks 1 and 2::

                  rank 0          rank 1          rank 2          rank 3
    runs          a b             a b             c d             c d          a tp group runs the same tokens
    own           a               b               c               d            `tokens.py`: each is of one rank
    router        a → 0, 3        b → 1           c → 1, 2        d → 0        ids and weights, fp32
    counts        ── all_to_all: how many tokens each rank sends to each; only the routers know ──
    rows          ── all_to_all: a token once to each rank that has experts of it, its ids and weights beside it ──
    experts       a d             b c             c               a            own experts, own columns: partial sums
    results       ── all_to_all: the way back ──
    own           a0 + a3         b1              c1 + c2         d0           added up in rank order, in fp32
    join          a b             a b             c d             c d          all_gather over tp

With ``moe_tp > 1`` a token goes to all ranks that hold columns of its experts. In mode ``gather`` all own tokens go to all
ranks of the copy, which route them alike and run what is theirs, and a reduce_scatter adds up the results where the tokens
came from. In mode ``sum`` the tp group is the copy: everything is on every rank, so only results are added up.

Which mode a step takes is said in `placement.expert_modes`. The shared expert is split over tp, and stays out of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from actors.model.group import Group
from actors.model.moe.tokens import OwnTokens
from actors.model.regions import Region

_WEIGHT_BYTES = 4


class Mixture(Protocol):
    """What an exchange asks of a layer with experts."""

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[tokens, hidden] -> weights [tokens, top_k] fp32 and experts [tokens, top_k]."""

    def run(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """This rank's part of the routed sum [tokens, hidden]: its experts, its columns of them."""

    def partial(self, x: Tensor) -> Tensor:
        """This rank's part of everything, where `x` [tokens, hidden] is on every rank of the tp group."""

    def complete(self, routed: Tensor, x: Tensor, region: Region) -> Tensor:
        """The routed sum that the rank holds, and with it what every token goes through besides."""


class Exchange(Protocol):
    """One step's way to the experts."""

    def through(self, mixture: Mixture, x: Tensor, region: Region) -> Tensor:
        """What the rank holds of [tokens, hidden], before and after."""


class SumExchange:
    """Every rank of the copy holds all its tokens."""

    def through(self, mixture: Mixture, x: Tensor, region: Region) -> Tensor:
        return region.sum(mixture.partial(region.gather(x)))


class GatherExchange:
    """All own tokens of the copy to every rank of it; `sizes` are those of each."""

    def __init__(self, own: OwnTokens, copy: Group, sizes: Sequence[int]) -> None:
        self._own, self._copy, self._sizes = own, copy, sizes

    def through(self, mixture: Mixture, x: Tensor, region: Region) -> Tensor:
        tokens = self._copy.all_gather(self._own.take(x, region), self._sizes)
        routed = self._copy.reduce_scatter(mixture.run(tokens, *mixture.route(tokens)), self._sizes)
        return mixture.complete(self._own.join(routed, region), x, region)


class AllToAllExchange:
    """A token once to each rank that has something of its experts."""

    def __init__(self, own: OwnTokens, copy: Group, homes: Tensor, moe_tp: int) -> None:
        """`homes` [num_experts] int64: the ep rank of each expert; ep rank i is `moe_tp` ranks of `copy`, in order."""
        self._own, self._copy, self._homes, self._moe_tp = own, copy, homes, moe_tp

    def through(self, mixture: Mixture, x: Tensor, region: Region) -> Tensor:
        own = self._own.take(x, region)
        weights, experts = mixture.route(own)
        goes = self._destinations(experts)
        send, receive = self.counts(goes)
        token = _sorted_by_rank(goes)[: sum(send)]
        arrived = self._copy.all_to_all(_pack(own, weights, experts)[token], send, receive)
        parts = mixture.run(*_unpack(arrived, own, weights.shape[1]))
        back = self._copy.all_to_all(parts, receive, send)
        return mixture.complete(self._own.join(_added_up(back, token, send, own), region), x, region)

    def counts(self, goes: Tensor) -> tuple[list[int], list[int]]:
        """Rows that this rank sends to each rank of the copy, and receives from each."""
        ones = [1] * self._copy.size
        send = goes.sum(0)
        send_list, receive = torch.stack((send, self._copy.all_to_all(send, ones, ones))).tolist()
        return send_list, receive

    def _destinations(self, experts: Tensor) -> Tensor:
        """[tokens, ranks of the copy]: whether a token goes there."""
        num_homes = self._copy.size // self._moe_tp
        at_home = torch.zeros(experts.shape[0], num_homes, dtype=torch.bool, device=experts.device)
        at_home.scatter_(1, self._homes[experts], True)
        return at_home.repeat_interleave(self._moe_tp, 1)


def _sorted_by_rank(goes: Tensor) -> Tensor:
    """Tokens in the order they are sent: those to rank 0, those to rank 1, ..., then entries of no meaning."""
    tokens, ranks = goes.shape
    order = goes.T.flatten().to(torch.uint8).sort(stable=True, descending=True).indices
    return torch.arange(tokens, device=goes.device).repeat(ranks)[order]


def _pack(x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    """[tokens, bytes] uint8: hidden states, weights (fp32) and ids (int32), so that one message carries all."""
    parts = (x, weights, experts.to(torch.int32))
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], 1)


def _unpack(rows: Tensor, like: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """The inverse of `_pack`; hidden states are like those of `like`."""
    sizes = [like.shape[1] * like.itemsize, _WEIGHT_BYTES * top_k, _WEIGHT_BYTES * top_k]
    x, weights, experts = (part.clone(memory_format=torch.contiguous_format) for part in torch.split(rows, sizes, 1))
    return x.view(like.dtype), weights.view(torch.float32), experts.view(torch.int32).to(torch.int64)


def _added_up(back: Tensor, token: Tensor, send: Sequence[int], like: Tensor) -> Tensor:
    """[tokens, hidden]: the parts of each token, rank after rank, in fp32. A rank sends back one row a token."""
    total = torch.zeros(like.shape, dtype=torch.float32, device=like.device)
    for part, of_rank in zip(torch.split(back, list(send)), torch.split(token, list(send)), strict=True):
        total[of_rank] += part
    return total.to(like.dtype)
