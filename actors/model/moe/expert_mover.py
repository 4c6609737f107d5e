"""The expert weight mover of one rank: it reports expert load to the engine, and moves expert weights to rebalance it (EPLB).

A move of one layer, as rank 0 does it in a copy of three ranks (own slots 0 and 1; the plan's transfers are 0→2, 5→1, 1→0)::

    read      slot 0 ─→ to rank 1      slot 1 ─→ buffer         everything is read before anything is written
    wire      all_to_all: bytes to each rank, known from the plan
    write     slot 1 ←─ from rank 2    slot 0 ←─ from buffer
    map       the tokens of this step use the new map, on all ranks

With ``moe_tp > 1`` each rank exchanges its columns with the ranks that hold the same columns.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from actors.groups.group import Group
from actors.model.moe.block import MixtureOfExperts
from actors.wire.experts import ExpertMove, ExpertReport, LayerReport
from placement.experts.expert_map import ExpertMap


class ExpertWeightMover:
    """Moves the expert weights of a rank's layers (the worker side of EPLB), and reports their load."""

    def __init__(
        self, mixtures: Mapping[int, MixtureOfExperts], copy: Group, placed: ExpertMap, moe_tp: int, world_rank: int
    ) -> None:
        """`mixtures` are the MoE blocks by layer; `copy` is the group of a MoE copy, with `moe_tp` ranks for each ep rank of
        `placed`."""
        self._mixtures, self._copy, self._placed, self._world_rank = mixtures, copy, placed, world_rank
        self._ep, self._column = divmod(copy.rank, moe_tp)
        self._moe_tp = moe_tp
        self._own = placed.ranges[self._ep]
        self._moved_bytes, self._move_s = 0, 0.0
        self._sent_before, self._reported_step = 0, -1

    def move(self, moves: Sequence[ExpertMove]) -> None:
        """Make those of `moves` that are of this rank's layers: exchange the weights, then use the new expert map. A collective
        of the MoE copy; all its ranks pass the same moves."""
        began = time.perf_counter()
        mine = [move for move in moves if move.layer in self._mixtures]
        for move in mine:
            self._move(move, self._mixtures[move.layer])
        if mine:
            self._move_s += time.perf_counter() - began

    def report(self, step: int) -> ExpertReport:
        """Return the load of this rank's experts, and the bytes and seconds of moves, since the last report; `step` is the
        number of the current step. Resets the counters, and on CUDA waits for the device."""
        counted = {layer: mixture.counters.take() for layer, mixture in self._mixtures.items()}
        layers = [
            LayerReport(layer=layer, tokens=one.tokens, expert_s=one.expert_s, combine_s=one.combine_s)
            for layer, one in counted.items()
        ]
        sent = sum(self._copy.sent_bytes.values())
        report = ExpertReport(
            world_rank=self._world_rank,
            step=step,
            steps=step - self._reported_step,
            layers=layers,
            sent_bytes=sent - self._sent_before - self._moved_bytes,
            moved_bytes=self._moved_bytes,
            move_s=self._move_s,
        )
        self._sent_before, self._reported_step, self._moved_bytes, self._move_s = sent, step, 0, 0.0
        return report

    def _move(self, move: ExpertMove, mixture: MixtureOfExperts) -> None:
        transfers = [(source, target) for source, target in move.transfers if self._touches(source, target)]
        leaving = [slots for slots in transfers if slots[1] not in self._own]
        coming = [slots for slots in transfers if slots[0] not in self._own]
        inside = [slots for slots in transfers if slots[0] in self._own and slots[1] in self._own]
        taken = {
            source: mixture.experts.packed(source - self._own.start) for source in {slots[0] for slots in leaving + inside}
        }
        if any(self._placed.rank_of(source) != self._placed.rank_of(target) for source, target in move.transfers):
            arrived = self._exchange(leaving, coming, taken, mixture.experts.slot_bytes)
            for (_, target), expert in zip(self._by_rank(coming, 0), arrived, strict=True):
                mixture.experts.put(target - self._own.start, expert)
        for source, target in inside:
            mixture.experts.put(target - self._own.start, taken[source])
        mixture.expert_map.change(move.experts)

    def _touches(self, source: int, target: int) -> bool:
        return source in self._own or target in self._own

    def _exchange(
        self, leaving: Sequence[tuple[int, int]], coming: Sequence[tuple[int, int]], taken: Mapping[int, Tensor], size: int
    ) -> Sequence[Tensor]:
        """Exchange experts with the other ranks. Returns the received ones, in the order of the ranks they come from."""
        leaving = self._by_rank(leaving, 1)
        send, receive = self._counts(leaving, 1, size), self._counts(coming, 0, size)
        device = next(iter(self._mixtures.values())).experts.down.device
        rows = [taken[source] for source, _ in leaving] or [torch.empty(0, dtype=torch.uint8, device=device)]
        self._moved_bytes += sum(send)
        return torch.split(self._copy.all_to_all(torch.cat(rows), send, receive), size)[: len(coming)]

    def _by_rank(self, transfers: Sequence[tuple[int, int]], end: int) -> list[tuple[int, int]]:
        """Sort transfers by the rank at one end (0: source, 1: target), keeping the order of the plan for each rank."""
        return sorted(transfers, key=lambda slots: self._placed.rank_of(slots[end]))

    def _counts(self, transfers: Sequence[tuple[int, int]], end: int, size: int) -> list[int]:
        """Return the bytes exchanged with each rank of the copy. Only ranks that hold the same columns exchange any."""
        counts = [0] * self._copy.size
        for slots in transfers:
            counts[self._placed.rank_of(slots[end]) * self._moe_tp + self._column] += size
        return counts


class NoExperts:
    """Replaces the mover for a model without experts."""

    def move(self, moves: Sequence[ExpertMove]) -> None:
        """See `ExpertWeightMover.move`. Raises `ValueError` if `moves` is not empty."""
        if moves:
            raise ValueError(f"a plan moves experts of layers {[move.layer for move in moves]}, but the model has none")

    def report(self, step: int) -> ExpertReport | None:
        """See `ExpertWeightMover.report`. Returns None: there is nothing to report."""
        return None
