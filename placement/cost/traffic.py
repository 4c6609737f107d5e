"""What one step puts on the wire: every collective of every rank, counted before anything runs.

The counters of a group (`calls`, `sent_bytes`) after a real step equal this exactly; a test holds it for every layout it
runs. One small function per region of the forward pass says what that region does, in the order of the pass::

    first stage                    every layer                                  last stage
    [embed] all_reduce tp    [attention] all_reduce tp  [mlp] all_reduce tp     [sampling] all_gather tp
                                                                                [token feedback] send pp to every stage
                                                   │ send pp / recv pp
                                                   └─[stage boundary]→ next stage: all_gather tp

Layers whose tokens are dispatched to experts say something else than a dense one there (`placement.cost.expert_traffic`).

Where the step is scattered (`placement.layout.sequence_parallel`) a sum is a reduce_scatter instead, with an all_gather before
the next layer that needs all tokens, and what arrives from the stage before needs none.

A group of one rank is silent: regions may name it, and its entries are dropped. DP ranks (attn_dp) run their own rows and meet
on the way to experts, and in a head that is split over them: every group of a dense layer lies inside one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from placement.cost.collectives import TrafficEntry, all_gather, all_reduce, recv, reduce_scatter, send
from placement.cost.context_traffic import context
from placement.cost.expert_traffic import DispatchTraffic, Routed, from_experts, to_experts
from placement.cost.sampling_traffic import sampling
from placement.cost.step_shape import StepShape
from placement.layout import sequence_parallel
from placement.layout.layout import Layout
from placement.layout.lm_head import is_over_stage
from placement.layout.mesh import HEAD_AXIS, Coords, coords_of
from placement.layout.partition import partition
from placement.model.spec import DTYPE_BYTES, ModelSpec
from placement.ownership.context import spans
from placement.ownership.shard import Shard
from placement.ownership.shards import head_vocabulary, shard


@dataclass(frozen=True)
class RankStep:
    """One rank in one step, of which `whole` has the rows of all DP ranks: all a region needs to know."""

    spec: ModelSpec
    layout: Layout
    coords: Coords
    own: Shard
    whole: StepShape
    routed: Sequence[Routed] | None = None
    """What the routers of its layers with experts did, where that is known."""

    @cached_property
    def step(self) -> StepShape:
        """The rows of the rank's DP rank."""
        return self.whole.of_dp_rank(self.coords.attn_dp)

    @cached_property
    def dispatch(self) -> DispatchTraffic:
        """Its layers whose tokens are dispatched to experts."""
        return DispatchTraffic(self.spec, self.layout, self.coords, self.own, self.whole, self.routed)

    @property
    def num_split(self) -> int:
        """Layers with an MLP, an expert for every token or all experts split over the tp group."""
        return len(self.own.layers) - self.dispatch.num_layers + self.dispatch.num_shared

    @property
    def query_lens(self) -> list[int]:
        """Tokens this rank runs of each row."""
        cp, cp_rank = self.layout.cp, self.coords.cp
        return [sum(map(len, spans(row.context, row.tokens, cp, cp_rank))) for row in self.step.rows]

    @property
    def num_tokens(self) -> int:
        """Token rows this rank runs."""
        return sum(self.query_lens)

    @property
    def num_own(self) -> int:
        """Tokens that are this rank's own: its share of the tp group's."""
        return len(partition(self.num_tokens, self.layout.tp)[self.coords.tp])

    @property
    def num_hidden(self) -> int:
        """Tokens whose hidden states this rank holds between layers."""
        return self.num_own if self.is_scattered else self.num_tokens

    @property
    def own_bytes(self) -> int:
        """Bytes of the hidden states of this rank's own tokens."""
        return self.hidden_bytes(self.num_own)

    @property
    def is_scattered(self) -> bool:
        """Whether the rank holds its own tokens only, between layers."""
        return sequence_parallel.is_scattered(self.query_lens, sequence_parallel.scatter_from(self.layout))

    def hidden_bytes(self, rows: int) -> int:
        """Bytes of the hidden states of `rows` tokens."""
        return rows * self.spec.hidden_size * self.step.element_bytes


def rank_step_of(
    spec: ModelSpec, layout: Layout, world_rank: int, step: StepShape, routed: Sequence[Routed] | None = None
) -> RankStep:
    """What a world rank does in a step."""
    coords = coords_of(layout, world_rank)
    return RankStep(spec, layout, coords, shard(spec, layout, coords), step, routed)


def rank_traffic(
    spec: ModelSpec, layout: Layout, world_rank: int, step: StepShape, routed: Sequence[Routed] | None = None
) -> list[TrafficEntry]:
    """Every collective of one rank in one step, in the order of the forward pass.

    `routed` of each layer whose tokens were dispatched to experts makes these exact too; else they are what is expected.
    """
    rank_step = rank_step_of(spec, layout, world_rank, step, routed)
    return [entry for region in REGIONS for entry in _heard(region, rank_step)]


def traffic(spec: ModelSpec, layout: Layout, step: StepShape) -> list[tuple[TrafficEntry, tuple[int, ...]]]:
    """Every distinct entry of a replica, with the world ranks that make it; in the order of the forward pass."""
    rank_steps = [rank_step_of(spec, layout, rank, step) for rank in range(layout.world)]
    makers: dict[TrafficEntry, list[int]] = {}
    for region in REGIONS:
        for rank, rank_step in enumerate(rank_steps):
            for entry in _heard(region, rank_step):
                makers.setdefault(entry, []).append(rank)
    return [(entry, tuple(ranks)) for entry, ranks in makers.items()]


def counters(entries: Sequence[TrafficEntry], axis: str) -> tuple[Counter[str], Counter[str]]:
    """What the group of `axis` will have counted: (calls, wire bytes sent), each by operation name."""
    calls: Counter[str] = Counter()
    sent_bytes: Counter[str] = Counter()
    for entry in entries:
        if entry.axis == axis:
            calls[entry.op] += entry.calls
            sent_bytes[entry.op] += entry.calls * entry.wire_bytes_per_rank
    return calls, sent_bytes


def arriving(rank_step: RankStep) -> Iterator[TrafficEntry]:
    """Each rank's own tokens come from the stage before (the sender pays for the bytes), and are joined."""
    if not rank_step.own.first_stage:
        if rank_step.own_bytes:
            yield recv("stage boundary", "pp", rank_step.layout.pp, rank_step.own_bytes)
        if not rank_step.is_scattered:
            yield all_gather("stage boundary", "tp", rank_step.layout.tp, rank_step.own_bytes)


def embedding(rank_step: RankStep) -> Iterator[TrafficEntry]:
    """Each rank looks up the ids it has rows for; the sum is the embedding."""
    if rank_step.own.first_stage:
        yield _sum(rank_step, "embedding")


def attention_input(rank_step: RankStep) -> Iterator[TrafficEntry]:
    """The projections to queries, keys and values want all tokens."""
    yield from _gathered(rank_step, "attention input", len(rank_step.own.layers))


def width_norms(rank_step: RankStep) -> Iterator[TrafficEntry]:
    """Norms over all heads at once: two sums of squares a token (fp32) in each layer."""
    if rank_step.spec.qk_norm == "width":
        calls = len(rank_step.own.layers)
        yield all_reduce(
            "q and k norms", "tp", rank_step.layout.tp, rank_step.num_tokens * 2 * DTYPE_BYTES["float32"], calls=calls
        )


def attention_context(rank_step: RankStep) -> Iterator[TrafficEntry]:
    """Queries, keys and partial outputs are exchanged where a sequence's keys lie on several ranks."""
    yield from context(rank_step.spec, rank_step.layout, rank_step.coords, rank_step.own, rank_step.step)


def attention_output(rank_step: RankStep) -> Iterator[TrafficEntry]:
    """The output projection is row parallel: its partial sums are added, once a layer."""
    yield _sum(rank_step, "attention output", len(rank_step.own.layers))


def mlp_input(rank_step: RankStep) -> Iterator[TrafficEntry]:
    """The gate and up projections want all tokens; experts elsewhere want those that chose them."""
    yield from _gathered(rank_step, "mlp input", rank_step.num_split + rank_step.dispatch.num_cp_split)
    if rank_step.dispatch.num_layers:
        yield from to_experts(rank_step.dispatch)


def mlp_output(rank_step: RankStep) -> Iterator[TrafficEntry]:
    """The down projection is row parallel."""
    if rank_step.dispatch.num_layers:
        yield from from_experts(rank_step.dispatch, rank_step.is_scattered)
    yield _sum(rank_step, "mlp output", rank_step.num_split)


def head_input(rank_step: RankStep) -> Iterator[TrafficEntry]:
    """The head wants rows of any token."""
    if rank_step.own.last_stage:
        yield from _gathered(rank_step, "head input", 1)


def leaving(rank_step: RankStep) -> Iterator[TrafficEntry]:
    """Each rank's own tokens go to the next stage: once, whatever the number of layers. A rank without any sends nothing."""
    if not rank_step.own.last_stage and rank_step.own_bytes:
        yield send("stage boundary", "pp", rank_step.layout.pp, rank_step.own_bytes)


def choosing(rank_step: RankStep) -> Iterator[TrafficEntry]:
    """The sampler's exchanges, on the last stage: those of cp rank 0, which runs the last token of every row. Where the head is
    split over all DP ranks these are of all DP ranks' rows, which are gathered before: each rank brings its share of its DP
    rank's."""
    if not rank_step.own.last_stage or rank_step.coords.cp > 0:
        return
    axis, size, step = "tp", rank_step.layout.tp, rank_step.step
    if is_over_stage(rank_step.spec, rank_step.layout):
        axis, size, step = HEAD_AXIS, rank_step.layout.attn_dp * rank_step.layout.tp, rank_step.whole
    rows = [row.choosing for row in step.rows if row.choosing is not None]
    if rows and axis == HEAD_AXIS:
        mine = sum(row.choosing is not None for row in rank_step.step.rows)
        yield all_gather(
            "head rows", axis, size, rank_step.hidden_bytes(len(partition(mine, rank_step.layout.tp)[rank_step.coords.tp]))
        )
    ends = [min(part.stop, rank_step.spec.vocab_size) for part in head_vocabulary(rank_step.spec, rank_step.layout)]
    widths = [
        len(range(part.start, end)) for part, end in zip(head_vocabulary(rank_step.spec, rank_step.layout), ends, strict=True)
    ]
    yield from sampling(rows, rank_step.spec.vocab_size, max(widths), axis, size)


def telling(rank_step: RankStep) -> Iterator[TrafficEntry]:
    """The last stage tells each other stage the step's tokens, 8 bytes each, so that their next step need not wait for the
    engine. They are taken when a later step needs them, and counted here."""
    rows, stages = sum(row.choosing is not None for row in rank_step.step.rows), rank_step.layout.pp
    if rows and rank_step.own.last_stage:
        if rank_step.coords.cp == 0:
            yield send("token feedback", "cp", rank_step.layout.cp, 8 * rows, rank_step.layout.cp - 1)
        else:
            yield recv("token feedback", "cp", rank_step.layout.cp, 8 * rows)
        yield send("token feedback", "pp", stages, 8 * rows, stages - 1)
    elif rows:
        yield recv("token feedback", "pp", stages, 8 * rows)


RegionTraffic = Callable[[RankStep], Iterator[TrafficEntry]]
REGIONS: tuple[RegionTraffic, ...] = (
    arriving,
    embedding,
    attention_input,
    width_norms,
    attention_context,
    attention_output,
    mlp_input,
    mlp_output,
    head_input,
    leaving,
    choosing,
    telling,
)
"""In the order of the forward pass. A new axis adds its own function here, or changes what the regions it touches yield."""


def _sum(rank_step: RankStep, where: str, calls: int = 1) -> TrafficEntry:
    """Partial sums over the tp group, added; each rank keeps all tokens of the sum or its own."""
    whole = rank_step.hidden_bytes(rank_step.num_tokens)
    if rank_step.is_scattered:
        return reduce_scatter(where, "tp", rank_step.layout.tp, whole, rank_step.own_bytes, calls)
    return all_reduce(where, "tp", rank_step.layout.tp, whole, calls)


def _gathered(rank_step: RankStep, where: str, calls: int) -> Iterator[TrafficEntry]:
    """All tokens where the rank holds its own only."""
    if rank_step.is_scattered:
        yield all_gather(where, "tp", rank_step.layout.tp, rank_step.own_bytes, calls)


def _heard(region: RegionTraffic, rank_step: RankStep) -> list[TrafficEntry]:
    """The entries of a region that anybody else hears of. A DP rank without rows only runs its experts, and its part of
    the head, for the others."""
    said = [entry for entry in region(rank_step) if entry.group_size > 1 and entry.calls]
    return said if rank_step.step.rows else [entry for entry in said if entry.axis in ("moe", HEAD_AXIS)]
