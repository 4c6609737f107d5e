"""Token dispatch and combine (the expert all-to-all, all2all): one layer through a MoE copy, in three modes.

Four ranks, ``tp=2, cp=2`` (two tp groups) and ``ep=4``, in mode ``a2a``; token c has experts on ranks 1 and 2::

                  rank 0          rank 1          rank 2          rank 3
    runs          a b             a b             c d             c d          a tp group runs the same tokens
    own           a               b               c               d            `tokens.py`: each token is own on one rank
    router        a → 0, 3        b → 1           c → 1, 2        d → 0        slots and weights, fp32
    counts        ── all_to_all: number of tokens from each rank to each; only the routers know it ──
    rows          ── all_to_all: a token once to each rank with one of its experts, with its slots and weights ──
    experts       a d             b c             c               a            own experts, own columns: partial sums
    results       ── all_to_all: back to the rank that owns the token ──
    own           a0 + a3         b1              c1 + c2         d0           added up in rank order, in fp32
    join          a b             a b             c d             c d          all_gather over tp

With ``moe_tp > 1`` a token is sent to all ranks that hold columns of its experts. A rank whose DP rank has no rows in the step
still runs its experts for the others, without tokens of its own. In mode ``gather`` all own tokens are gathered on all ranks of
the copy, which route them identically and run their own experts, and a reduce_scatter sums the results for the ranks that own
the tokens. In mode ``sum`` the tp group is the copy: everything is on every rank, so only results are summed.

`placement.cost.expert_modes` determines the mode of a step. The shared expert is split over tp and is not part of the dispatch.
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
        """Return the sums over their experts of this rank's own tokens, [own, hidden], from their hidden states `own` [own,
        hidden]; the ranks of the MoE copy run the experts of `mixture`. A collective of the copy, even without own tokens."""


class SumExchange:
    """Mode ``sum``: every rank of the copy holds all its tokens. If one rank has none, the whole copy has none."""

    def __init__(self, copy_offset: int) -> None:
        self._copy_offset = copy_offset

    def through(self, mixture: Mixture, x: Tensor, region: Region) -> Tensor:
        """See `Exchange.through`."""
        partial = mixture.partial(region.gather(x), self._copy_offset)
        with mixture.timed_combine():
            return region.sum(partial)

    def serve(self, mixture: Mixture, none: Tensor) -> None:
        """See `Exchange.serve`. Does nothing: no rank of the copy has tokens."""


class DispatchExchange:
    """Modes ``gather`` and ``a2a``: each token is dispatched from the rank that owns it."""

    def __init__(self, own: OwnTokens, dispatcher: TokenDispatcher) -> None:
        self._own, self._dispatcher = own, dispatcher

    def through(self, mixture: Mixture, x: Tensor, region: Region) -> Tensor:
        """See `Exchange.through`."""
        complete = mixture.begin(x, region)
        routed = self._dispatcher.dispatch_and_combine(mixture, self._own.take(x, region))
        return complete(self._own.join(routed, region))

    def serve(self, mixture: Mixture, none: Tensor) -> None:
        """See `Exchange.serve`."""
        self._dispatcher.dispatch_and_combine(mixture, none)


class IdleDispatcher:
    """The dispatcher of a copy without tokens in the step. It issues no collectives."""

    def dispatch_and_combine(self, mixture: Mixture, own: Tensor) -> Tensor:
        """See `TokenDispatcher.dispatch_and_combine`. Returns `own`, which is empty."""
        return own


class AllGatherDispatcher:
    """Mode ``gather``: all own tokens are gathered on every rank of the copy.

    `sizes` are the numbers of own tokens of each rank; `copy_offset` is the offset of the copy's first token.
    """

    def __init__(self, copy: Group, sizes: Sequence[int], copy_offset: int) -> None:
        self._copy, self._sizes, self._copy_offset = copy, sizes, copy_offset

    def dispatch_and_combine(self, mixture: Mixture, own: Tensor) -> Tensor:
        """See `TokenDispatcher.dispatch_and_combine`."""
        tokens = self._copy.all_gather(own, self._sizes)
        partial = mixture.run(tokens, *mixture.route(tokens, self._copy_offset))
        with mixture.timed_combine():
            return self._copy.reduce_scatter(partial, self._sizes)


class AllToAllDispatcher:
    """Mode ``a2a``: a token is sent once to each rank that holds columns of one of its experts."""

    def __init__(self, copy: Group, sizes: Sequence[int], copy_offset: int, ends: Tensor, moe_tp: int) -> None:
        """`ends` [ep] int64 holds one past the last slot of each ep rank; ep rank i is `moe_tp` consecutive ranks of `copy`."""
        self._copy, self._ends, self._moe_tp = copy, ends, moe_tp
        self._copy_offset = copy_offset + sum(sizes[: copy.rank])

    def dispatch_and_combine(self, mixture: Mixture, own: Tensor) -> Tensor:
        """See `TokenDispatcher.dispatch_and_combine`."""
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
        """Return the numbers of rows that this rank sends to each rank of the copy, and receives from each. `sent_to` [tokens,
        ranks] bool says whether a token is sent to a rank. A collective of the copy."""
        ones = [1] * self._copy.size
        send = sent_to.sum(0)
        send_list, receive = torch.stack((send, self._copy.all_to_all(send, ones, ones))).tolist()
        return send_list, receive

    def _destinations(self, slots: Tensor) -> Tensor:
        """Return [tokens, ranks of the copy] bool: whether a token is sent to a rank."""
        on_ep_rank = torch.zeros(slots.shape[0], len(self._ends), dtype=torch.bool, device=slots.device)
        on_ep_rank.scatter_(1, torch.bucketize(slots, self._ends, right=True), True)
        return on_ep_rank.repeat_interleave(self._moe_tp, 1)


def _sorted_by_rank(sent_to: Tensor) -> Tensor:
    """Return tokens in the order they are sent: those to rank 0, those to rank 1, ..., followed by meaningless entries."""
    tokens, ranks = sent_to.shape
    order = sent_to.T.flatten().to(torch.uint8).sort(stable=True, descending=True).indices
    return torch.arange(tokens, device=sent_to.device).repeat(ranks)[order]


def _pack(x: Tensor, weights: Tensor, slots: Tensor) -> Tensor:
    """Return [tokens, bytes] uint8: hidden states, weights (fp32) and slots (int32), so that one message carries all three."""
    parts = (x, weights, slots.to(torch.int32))
    return torch.cat([_in_rows(part).view(torch.uint8) for part in parts], 1)


def _in_rows(part: Tensor) -> Tensor:
    """Return a copy with standard strides. `contiguous` leaves the strides of a tensor with no rows or one column as they
    are."""
    return part.clone(memory_format=torch.contiguous_format)


def _unpack(rows: Tensor, like: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the hidden states, weights and slots of packed rows: the inverse of `_pack`. Hidden states have the dtype and
    width of `like`."""
    sizes = [like.shape[1] * like.itemsize, _WEIGHT_BYTES * top_k, _WEIGHT_BYTES * top_k]
    x, weights, slots = (_in_rows(part) for part in torch.split(rows, sizes, 1))
    return x.view(like.dtype), weights.view(torch.float32), slots.view(torch.int32).to(torch.int64)


def _added_up(back: Tensor, token: Tensor, send: Sequence[int], like: Tensor) -> Tensor:
    """Return [tokens, hidden]: the sum of each token's parts in rank order, in fp32. A rank returns one row a token."""
    total = torch.zeros(like.shape, dtype=torch.float32, device=like.device)
    for part, of_rank in zip(torch.split(back, list(send)), torch.split(token, list(send)), strict=True):
        total[of_rank] += part
    return total.to(like.dtype)
