"""Traffic of expert-parallel (EP) dispatch and combine in each MoE layer, by mode (`placement.cost.expert_modes`).

`t` is the number of own tokens of this rank, `b` the bytes of a row, `n` the number of ranks in the MoE copy::

    gather   moe all_gather       own tokens, to the copy                   t b
             moe reduce_scatter   partial results, summed                   own tokens of the copy * b
    a2a      moe all_to_all       row counts for each rank                  8 n
             moe all_to_all       dispatch: a row to each destination       rows * (b + 8 top_k)
             moe all_to_all       combine: results, returned                rows received * b
    both     tp  all_gather       results, to the tp group                  t b          (unless tokens stay scattered)
             cp  all_gather       results of rows that all cp ranks run     this cp rank's share * b

The actual number of rows per destination is known only after routing; without it (`Routed`), the expected number is used,
rounded. The ranks of a DP rank without rows take part only in the collectives of the MoE copy. A copy without any tokens issues
no collectives.
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
    """Row counts of one layer on one rank in mode ``a2a``: rows sent, those of them sent to itself, and rows received."""

    sent: int
    to_self: int
    received: int


@dataclass(frozen=True)
class DispatchTraffic:
    """The dispatch traffic of one rank in one step. `step` has the rows of all DP ranks.

    `routed` has the actual row counts of each layer whose tokens are dispatched; None: the expected counts are used.
    """

    spec: ModelSpec
    layout: Layout
    coords: Coords
    own: Shard
    step: StepShape
    routed: Sequence[Routed] | None = None

    @cached_property
    def mode(self) -> expert_modes.Mode:
        """How tokens reach their experts in this step (`expert_modes.mode`); ``sum``, that is no dispatch, for a dense
        model."""
        if self.spec.moe is None:
            return "sum"
        return expert_modes.mode(self.spec, self.layout, self.new_lens_across_dp, self.step.element_bytes)

    @cached_property
    def new_lens_across_dp(self) -> list[list[int]]:
        """Number of new tokens of each row of the step, one list per DP rank."""
        return self.step.new_lens(self.layout.attn_dp)

    @property
    def new_lens(self) -> list[int]:
        """Number of new tokens of each row of the step on the rank's own DP rank."""
        return self.new_lens_across_dp[self.coords.attn_dp]

    @property
    def num_layers(self) -> int:
        """Number of MoE layers of this rank that dispatch tokens to experts; 0 in mode ``sum``."""
        return 0 if self.mode == "sum" else sum(self.spec.moe_of(layer) is not None for layer in self.own.layers)

    @property
    def num_shared(self) -> int:
        """Number of the rank's dispatching layers (`num_layers`) that have a shared expert, which is split over tp like an
        MLP."""
        return self.num_layers if self.spec.moe is not None and self.spec.moe.shared_size else 0

    @property
    def num_cp_split(self) -> int:
        """Number of the rank's dispatching layers (`num_layers`) if the step has tokens that all cp ranks run and hence split,
        else 0."""
        return self.num_layers if expert_tokens.num_common(self.new_lens, self.layout.cp) else 0

    @property
    def copy_ranks(self) -> int:
        """Number of ranks that share one copy of the experts: ``ep * moe_tp``."""
        return self.layout.ep * self.layout.moe_tp

    @property
    def own_tokens(self) -> list[int]:
        """Number of tokens that each rank of this rank's MoE copy contributes, in rank order."""
        seen = moe_coords_of(self.layout, world_rank(self.layout, self.coords))
        return expert_tokens.of_copy(expert_tokens.own_tokens(self.new_lens_across_dp, self.layout), self.layout, seen.moe_dp)

    @property
    def num_calls(self) -> int:
        """Number of layers in which the ranks of this MoE copy issue collectives: `num_layers`, or 0 if none of them has
        tokens."""
        return self.num_layers if any(self.own_tokens) else 0

    @property
    def num_own(self) -> int:
        """Number of tokens of the step that this rank dispatches in each MoE layer: its part of its DP rank's new tokens,
        which the cp and tp ranks split so that each token belongs to one rank.
        """
        return self.own_tokens[world_rank(self.layout, self.coords) % self.copy_ranks]

    def bytes_of(self, rows: int) -> int:
        """Returns the bytes of the hidden states of `rows` tokens: one row of `hidden_size` elements each."""
        return rows * self.spec.hidden_size * self.step.element_bytes

    def rows(self) -> Iterator[tuple[Routed, int]]:
        """Yields pairs of the row counts of a layer (actual ones if `routed` is given, else expected ones) and the number of
        layers that have them."""
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
    """Yields the collectives by which this rank dispatches tokens to the ranks of their experts, in all its MoE layers; none in
    mode ``sum``. Entries of one-rank groups or without calls are included."""
    size, calls = rank.copy_ranks, rank.num_calls
    if rank.mode == "gather":
        yield all_gather("mlp input: own tokens", "moe", size, rank.bytes_of(rank.num_own), calls)
    if rank.mode == "a2a":
        yield all_to_all("mlp input: counts", "moe", size, 8 * size, 8, calls)
        row = rank.bytes_of(1) + expert_modes.extra_bytes(rank.spec)
        for routed, layers in rank.rows():
            yield all_to_all("mlp input: dispatched rows", "moe", size, routed.sent * row, routed.to_self * row, layers)


def from_experts(rank: DispatchTraffic, is_scattered: bool) -> Iterator[TrafficEntry]:
    """Yields the collectives that combine the results of the experts in all MoE layers of this rank. `is_scattered` is whether
    the rank holds only its own tokens between layers (sequence parallelism). Entries of one-rank groups or without calls are
    included."""
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
