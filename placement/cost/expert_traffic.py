"""What tokens on their way to experts put on the wire, in each layer that has them (`placement.cost.expert_modes`).

`t` own tokens of this rank, rows of `b` bytes, `n` ranks in the MoE copy::

    gather   moe all_gather       own tokens, to the copy                   t b
             moe reduce_scatter   partial results, added up                 own tokens of the copy * b
    a2a      moe all_to_all       how many rows to each rank                8 n
             moe all_to_all       a row to each rank it has business with   rows * (b + 8 top_k)
             moe all_to_all       results, the way back                     rows received * b
    both     tp  all_gather       results, to the tp group                  t b          (not where tokens stay scattered)
             cp  all_gather       those of rows that all cp ranks run       this cp rank's share * b

How many rows go where only the routers know: without their numbers (`Routed`) the expected ones are stated, rounded. The
ranks of a DP rank without rows say what concerns the copy, and nothing else; a copy without tokens is silent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from placement.cost import expert_modes
from placement.cost.collectives import TrafficEntry, all_gather, all_to_all, reduce_scatter
from placement.cost.step_shape import StepShape
from placement.layout.layout import Layout
from placement.layout.mesh import Coords, moe_coords_of, world_rank
from placement.layout.partition import partition
from placement.model.spec import ModelSpec
from placement.ownership import expert_tokens
from placement.ownership.shard import Shard


@dataclass(frozen=True)
class Routed:
    """Rows of one layer on one rank in ``a2a``: all it sends, those of them to itself, and all it receives."""

    sent: int
    to_self: int
    received: int


@dataclass(frozen=True)
class DispatchTraffic:
    """One rank in one step (of all DP ranks): the layers whose tokens are dispatched to experts, and how. `routed`: those of
    each such layer."""

    spec: ModelSpec
    layout: Layout
    coords: Coords
    own: Shard
    step: StepShape
    routed: Sequence[Routed] | None = None

    @cached_property
    def mode(self) -> expert_modes.Mode:
        if self.spec.moe is None:
            return "sum"
        return expert_modes.mode(self.spec, self.layout, self.new_lens_across_dp, self.step.element_bytes)

    @cached_property
    def new_lens_across_dp(self) -> list[list[int]]:
        """New tokens of each row, per DP rank."""
        return self.step.new_lens(self.layout.attn_dp)

    @property
    def new_lens(self) -> list[int]:
        """Those of the rank's own DP rank."""
        return self.new_lens_across_dp[self.coords.attn_dp]

    @property
    def num_layers(self) -> int:
        """Layers of this rank whose tokens are dispatched."""
        return 0 if self.mode == "sum" else sum(self.spec.moe_of(layer) is not None for layer in self.own.layers)

    @property
    def num_shared(self) -> int:
        """Those of them with an expert that every token goes through, which is split over tp as an MLP is."""
        return self.num_layers if self.spec.moe is not None and self.spec.moe.shared_size else 0

    @property
    def num_cp_split(self) -> int:
        """Those of them in a step with tokens that all cp ranks run."""
        return self.num_layers if expert_tokens.num_common(self.new_lens, self.layout.cp) else 0

    @property
    def copy_ranks(self) -> int:
        return self.layout.ep * self.layout.moe_tp

    @property
    def own_tokens(self) -> list[int]:
        """Own tokens of each rank of the copy."""
        seen = moe_coords_of(self.layout, world_rank(self.layout, self.coords))
        return expert_tokens.of_copy(expert_tokens.own_tokens(self.new_lens_across_dp, self.layout), self.layout, seen.moe_dp)

    @property
    def num_calls(self) -> int:
        """Layers in which anything is said in the copy."""
        return self.num_layers if any(self.own_tokens) else 0

    @property
    def num_own(self) -> int:
        return self.own_tokens[world_rank(self.layout, self.coords) % self.copy_ranks]

    def bytes_of(self, rows: int) -> int:
        """Bytes of the hidden states of some tokens."""
        return rows * self.spec.hidden_size * self.step.element_bytes

    def rows(self) -> Iterator[tuple[Routed, int]]:
        """(rows, layers of which that is so)."""
        if self.routed is not None:
            yield from ((routed, 1) for routed in self.routed)
        else:
            yield self._expected(), self.num_calls

    def _expected(self) -> Routed:
        found = expert_modes.chances(self.spec, self.layout)
        here = found[moe_coords_of(self.layout, world_rank(self.layout, self.coords)).ep]
        sent = self.num_own * self.layout.moe_tp * sum(found)
        return Routed(round(sent), round(self.num_own * here), round(sum(self.own_tokens) * here))


def to_experts(rank: DispatchTraffic) -> Iterator[TrafficEntry]:
    """From the tokens a rank holds to those its experts run."""
    size, calls = rank.copy_ranks, rank.num_calls
    if rank.mode == "gather":
        yield all_gather("mlp input: own tokens", "moe", size, rank.bytes_of(rank.num_own), calls)
    if rank.mode == "a2a":
        yield all_to_all("mlp input: counts", "moe", size, 8 * size, 8, calls)
        row = rank.bytes_of(1) + expert_modes.extra_bytes(rank.spec)
        for routed, layers in rank.rows():
            yield all_to_all("mlp input: dispatched rows", "moe", size, routed.sent * row, routed.to_self * row, layers)


def from_experts(rank: DispatchTraffic, is_scattered: bool) -> Iterator[TrafficEntry]:
    """From the results of a rank's experts to what it holds."""
    layout, size, calls, own = rank.layout, rank.copy_ranks, rank.num_calls, rank.bytes_of(rank.num_own)
    if rank.mode == "gather":
        yield reduce_scatter("mlp output: routed", "moe", size, rank.bytes_of(sum(rank.own_tokens)), own, calls)
    if rank.mode == "a2a":
        for routed, layers in rank.rows():
            received, to_self = rank.bytes_of(routed.received), rank.bytes_of(routed.to_self)
            yield all_to_all("mlp output: combined rows", "moe", size, received, to_self, layers)
    if rank.num_cp_split or not is_scattered:
        yield all_gather("mlp output: joined", "tp", layout.tp, own, rank.num_layers)
    share = partition(expert_tokens.num_common(rank.new_lens, layout.cp), layout.cp)[rank.coords.cp]
    yield all_gather("mlp output: joined", "cp", layout.cp, rank.bytes_of(len(share)), rank.num_cp_split)
