"""Token dispatch and combine (expert parallelism): one layer's path through a MoE copy, in three modes.

Four ranks, ``tp=2, cp=2`` (two tp groups) and ``ep=4``, in mode ``a2a``; token c has experts on ranks 1 and 2::

                  rank 0          rank 1          rank 2          rank 3
    runs          a b             a b             c d             c d          a tp group runs the same tokens
    own           a               b               c               d            `tokens.py`: each is of one rank
    router        a → 0, 3        b → 1           c → 1, 2        d → 0        slots and weights, fp32
    counts        ── all_to_all: how many tokens each rank sends to each; only the routers know ──
    rows          ── all_to_all: a token once to each rank that has experts of it, its slots and weights beside it ──
    experts       a d             b c             c               a            own experts, own columns: partial sums
    results       ── all_to_all: the way back ──
    own           a0 + a3         b1              c1 + c2         d0           added up in rank order, in fp32
    join          a b             a b             c d             c d          all_gather over tp

With ``moe_tp > 1`` a token goes to all ranks that hold columns of its experts. A rank whose DP rank has no rows in the step
runs its experts for the others all the same, with no token of its own. In mode ``gather`` all own tokens go to all
ranks of the copy, which route them alike and run what is theirs, and a reduce_scatter adds up the results where the tokens
came from. In mode ``sum`` the tp group is the copy: everything is on every rank, so only results are added up.

Which mode a step takes is said in `placement.cost.expert_modes`. The shared expert is split over tp, and stays out of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from actors.groups.group import Group
from actors.model.moe.tokens import OwnTokens
from actors.model.step.exchange import Mixture
from actors.model.step.regions import Region

_WEIGHT_BYTES = 4


class TokenDispatcher(Protocol):
    """Dispatches a rank's own tokens to the ranks of their experts, and combines the results."""

    def dispatch_and_combine(self, mixture: Mixture, own: Tensor) -> Tensor:
        """[own, hidden] -> [own, hidden]. A collective of the copy."""


class SumExchange:
    """Every rank of the copy holds all its tokens. One that has none is in a copy that has none."""

    def __init__(self, copy_offset: int) -> None:
        self._copy_offset = copy_offset

    def through(self, mixture: Mixture, x: Tensor, region: Region) -> Tensor:
        partial = mixture.partial(region.gather(x), self._copy_offset)
        with mixture.timed_combine():
            return region.sum(partial)

    def serve(self, mixture: Mixture, none: Tensor) -> None:
        """Nothing."""


class DispatchExchange:
    """Dispatches each token from the rank whose own it is."""

    def __init__(self, own: OwnTokens, dispatcher: TokenDispatcher) -> None:
        self._own, self._dispatcher = own, dispatcher

    def through(self, mixture: Mixture, x: Tensor, region: Region) -> Tensor:
        complete = mixture.begin(x, region)
        routed = self._dispatcher.dispatch_and_combine(mixture, self._own.take(x, region))
        return complete(self._own.join(routed, region))

    def serve(self, mixture: Mixture, none: Tensor) -> None:
        self._dispatcher.dispatch_and_combine(mixture, none)


class IdleDispatcher:
    """For a copy without tokens in the step: no collective is issued."""

    def dispatch_and_combine(self, mixture: Mixture, own: Tensor) -> Tensor:
        return own


class AllGatherDispatcher:
    """All own tokens of the copy to every rank of it; `sizes` are those of each, `copy_offset` that of the first."""

    def __init__(self, copy: Group, sizes: Sequence[int], copy_offset: int) -> None:
        self._copy, self._sizes, self._copy_offset = copy, sizes, copy_offset

    def dispatch_and_combine(self, mixture: Mixture, own: Tensor) -> Tensor:
        tokens = self._copy.all_gather(own, self._sizes)
        partial = mixture.run(tokens, *mixture.route(tokens, self._copy_offset))
        with mixture.timed_combine():
            return self._copy.reduce_scatter(partial, self._sizes)


class AllToAllDispatcher:
    """A token once to each rank that has something of its experts."""

    def __init__(self, copy: Group, sizes: Sequence[int], copy_offset: int, ends: Tensor, moe_tp: int) -> None:
        """`ends` [ep] int64: one past the last slot of each ep rank; ep rank i is `moe_tp` ranks of `copy`, in order."""
        self._copy, self._ends, self._moe_tp = copy, ends, moe_tp
        self._copy_offset = copy_offset + sum(sizes[: copy.rank])

    def dispatch_and_combine(self, mixture: Mixture, own: Tensor) -> Tensor:
        weights, slots = mixture.route(own, self._copy_offset)
        sent_to = self._destinations(slots)
        send, receive = self.counts(sent_to)
        token = _sorted_by_rank(sent_to)[: sum(send)]
        arrived = self._copy.all_to_all(_pack(own, weights, slots)[token], send, receive)
        parts = mixture.run(*_unpack(arrived, own, weights.shape[1]))
        with mixture.timed_combine():
            back = self._copy.all_to_all(parts, receive, send)
        return _added_up(back, token, send, own)

    def counts(self, sent_to: Tensor) -> tuple[list[int], list[int]]:
        """Rows that this rank sends to each rank of the copy, and receives from each."""
        ones = [1] * self._copy.size
        send = sent_to.sum(0)
        send_list, receive = torch.stack((send, self._copy.all_to_all(send, ones, ones))).tolist()
        return send_list, receive

    def _destinations(self, slots: Tensor) -> Tensor:
        """[tokens, ranks of the copy]: whether a token is sent there."""
        on_ep_rank = torch.zeros(slots.shape[0], len(self._ends), dtype=torch.bool, device=slots.device)
        on_ep_rank.scatter_(1, torch.bucketize(slots, self._ends, right=True), True)
        return on_ep_rank.repeat_interleave(self._moe_tp, 1)


def _sorted_by_rank(sent_to: Tensor) -> Tensor:
    """Tokens in the order they are sent: those to rank 0, those to rank 1, ..., then entries of no meaning."""
    tokens, ranks = sent_to.shape
    order = sent_to.T.flatten().to(torch.uint8).sort(stable=True, descending=True).indices
    return torch.arange(tokens, device=sent_to.device).repeat(ranks)[order]


def _pack(x: Tensor, weights: Tensor, slots: Tensor) -> Tensor:
    """[tokens, bytes] uint8: hidden states, weights (fp32) and slots (int32), so that one message carries all."""
    parts = (x, weights, slots.to(torch.int32))
    return torch.cat([_in_rows(part).view(torch.uint8) for part in parts], 1)


def _in_rows(part: Tensor) -> Tensor:
    """The same with the strides of its shape, which `contiguous` does not give what has no rows or one column."""
    return part.clone(memory_format=torch.contiguous_format)


def _unpack(rows: Tensor, like: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """The inverse of `_pack`; hidden states are like those of `like`."""
    sizes = [like.shape[1] * like.itemsize, _WEIGHT_BYTES * top_k, _WEIGHT_BYTES * top_k]
    x, weights, slots = (_in_rows(part) for part in torch.split(rows, sizes, 1))
    return x.view(like.dtype), weights.view(torch.float32), slots.view(torch.int32).to(torch.int64)


def _added_up(back: Tensor, token: Tensor, send: Sequence[int], like: Tensor) -> Tensor:
    """[tokens, hidden]: the parts of each token, rank after rank, in fp32. A rank sends back one row a token."""
    total = torch.zeros(like.shape, dtype=torch.float32, device=like.device)
    for part, of_rank in zip(torch.split(back, list(send)), torch.split(token, list(send)), strict=True):
        total[of_rank] += part
    return total.to(like.dtype)
