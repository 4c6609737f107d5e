"""Communication volume of one step: every collective of every rank, counted before anything runs.

The counters of a process group (`calls`, `sent_bytes`) after a real step equal these numbers exactly; tests compare them for
many layouts. Each region of the forward pass has one function that yields its collectives; in execution order::

    first stage                    every layer                                  last stage
    [embed] all_reduce tp    [attention] all_reduce tp  [mlp] all_reduce tp     [sampling] all_gather tp
                                                                                [token feedback] send pp to every stage
                                                   │ send pp / recv pp
                                                   └─[stage boundary]→ next stage: all_gather tp

MoE layers that dispatch tokens to experts issue other collectives than dense layers (`placement.cost.expert_traffic`).

If the step is scattered (`placement.layout.sequence_parallel`), each all_reduce becomes a reduce_scatter, with an all_gather
before the next layer that needs all tokens, and the all_gather at a stage boundary is omitted.

Groups of one rank issue no collectives: regions may yield entries for them, which are dropped. DP ranks (attn_dp) run their own
rows. They communicate with each other only for expert dispatch and in an LM head that is split over them; every group of a
dense layer lies inside one DP rank.
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
    """The input of a region's function: one rank in one step. `whole` has the rows of all DP ranks."""

    spec: ModelSpec
    layout: Layout
    coords: Coords
    own: Shard
    whole: StepShape
    routed: Sequence[Routed] | None = None
    """Actual routing of the rank's MoE layers; None if unknown."""

    @cached_property
    def step(self) -> StepShape:
        """The part of the step that the rank's DP rank runs."""
        return self.whole.of_dp_rank(self.coords.attn_dp)

    @cached_property
    def dispatch(self) -> DispatchTraffic:
        """Expert dispatch traffic of the rank's MoE layers in this step."""
        return DispatchTraffic(self.spec, self.layout, self.coords, self.own, self.whole, self.routed)

    @property
    def num_split(self) -> int:
        """Number of the rank's layers with weights split over the tp group after attention: an MLP, a shared expert or all
        experts (no dispatch). Each needs one sum over the tp group."""
        return len(self.own.layers) - self.dispatch.num_layers + self.dispatch.num_shared

    @property
    def query_lens(self) -> list[int]:
        """Number of new tokens that this rank runs of each row of its DP rank; with cp a row may be split over the cp ranks."""
        cp, cp_rank = self.layout.cp, self.coords.cp
        return [sum(map(len, spans(row.context, row.tokens, cp, cp_rank))) for row in self.step.rows]

    @property
    def num_tokens(self) -> int:
        """Number of new tokens that this rank runs in this step, as do the other ranks of its tp group."""
        return sum(self.query_lens)

    @property
    def num_own(self) -> int:
        """Number of this rank's own tokens: its even part of the tp group's tokens."""
        return len(partition(self.num_tokens, self.layout.tp)[self.coords.tp])

    @property
    def num_hidden(self) -> int:
        """Number of tokens whose hidden states this rank holds between layers: its own if the step is scattered, else those of
        the tp group."""
        return self.num_own if self.is_scattered else self.num_tokens

    @property
    def own_bytes(self) -> int:
        """Bytes of the hidden states of this rank's own tokens (`num_own`)."""
        return self.hidden_bytes(self.num_own)

    @property
    def is_scattered(self) -> bool:
        """Whether the rank holds only its own tokens between layers in this step (sequence parallelism)."""
        return sequence_parallel.is_scattered(self.query_lens, sequence_parallel.scatter_from(self.layout))

    def hidden_bytes(self, rows: int) -> int:
        """Returns the bytes of the hidden states of `rows` tokens, in the step's data type."""
        return rows * self.spec.hidden_size * self.step.element_bytes


def rank_step_of(
    spec: ModelSpec, layout: Layout, world_rank: int, step: StepShape, routed: Sequence[Routed] | None = None
) -> RankStep:
    """Returns the input of the region functions for one world rank in a step. `step` has the rows of all DP ranks; `routed` has
    the actual routing of each dispatching layer of the rank (None: unknown). Raises `IndexError` if the layout has no such
    rank."""
    coords = coords_of(layout, world_rank)
    return RankStep(spec, layout, coords, shard(spec, layout, coords), step, routed)


def rank_traffic(
    spec: ModelSpec, layout: Layout, world_rank: int, step: StepShape, routed: Sequence[Routed] | None = None
) -> list[TrafficEntry]:
    """Returns every collective of one world rank in one step, in the order of the forward pass.

    `step` has the rows of all DP ranks. The counts of expert dispatch are exact if `routed` has the actual routing of each
    dispatching layer of the rank; else they are expected values. Raises `IndexError` if the layout has no such rank.
    """
    rank_step = rank_step_of(spec, layout, world_rank, step, routed)
    return [entry for region in REGIONS for entry in _region_entries(region, rank_step)]


def traffic(spec: ModelSpec, layout: Layout, step: StepShape) -> list[tuple[TrafficEntry, tuple[int, ...]]]:
    """Returns every distinct traffic entry of a replica in one step, each with the world ranks that issue it, in the order of
    the forward pass. `step` has the rows of all DP ranks; the counts of expert dispatch are expected values."""
    rank_steps = [rank_step_of(spec, layout, rank, step) for rank in range(layout.world)]
    makers: dict[TrafficEntry, list[int]] = {}
    for region in REGIONS:
        for rank, rank_step in enumerate(rank_steps):
            for entry in _region_entries(region, rank_step):
                makers.setdefault(entry, []).append(rank)
    return [(entry, tuple(ranks)) for entry, ranks in makers.items()]


def counters(entries: Sequence[TrafficEntry], axis: str) -> tuple[Counter[str], Counter[str]]:
    """Returns what a rank's counters for the process group of `axis` will show after a step with these traffic entries: (calls,
    wire bytes sent), each by operation name."""
    calls: Counter[str] = Counter()
    sent_bytes: Counter[str] = Counter()
    for entry in entries:
        if entry.axis == axis:
            calls[entry.op] += entry.calls
            sent_bytes[entry.op] += entry.calls * entry.wire_bytes_per_rank
    return calls, sent_bytes


def stage_input(rank_step: RankStep) -> Iterator[TrafficEntry]:
    """Yields, on all stages but the first, the receive of the rank's own tokens from the previous stage, and their all-gather
    over the tp group (not in scattered steps)."""
    if not rank_step.own.first_stage:
        if rank_step.own_bytes:
            yield recv("stage boundary", "pp", rank_step.layout.pp, rank_step.own_bytes)
        if not rank_step.is_scattered:
            yield all_gather("stage boundary", "tp", rank_step.layout.tp, rank_step.own_bytes)


def embedding(rank_step: RankStep) -> Iterator[TrafficEntry]:
    """Yields, on the first stage, the sum over tp of the vocabulary-parallel embedding, in which each rank looks up the ids
    whose rows it holds: one all-reduce, or a reduce-scatter in scattered steps."""
    if rank_step.own.first_stage:
        yield _sum(rank_step, "embedding")


def attention_input(rank_step: RankStep) -> Iterator[TrafficEntry]:
    """Yields, in scattered steps, the all-gather over tp before the QKV projection, which needs all tokens; one call per layer
    of the rank."""
    yield from _gathered(rank_step, "attention input", len(rank_step.own.layers))


def width_norms(rank_step: RankStep) -> Iterator[TrafficEntry]:
    """Yields, if query and key norms extend over all heads (`qk_norm` is ``width``), their all-reduce over tp: two sums of
    squares per token (fp32) in each layer of the rank."""
    if rank_step.spec.qk_norm == "width":
        calls = len(rank_step.own.layers)
        yield all_reduce(
            "q and k norms", "tp", rank_step.layout.tp, rank_step.num_tokens * 2 * DTYPE_BYTES["float32"], calls=calls
        )


def attention_context(rank_step: RankStep) -> Iterator[TrafficEntry]:
    """Yields the exchange of queries, keys and partial outputs of context-parallel attention, in all layers of the rank;
    nothing without cp and dcp."""
    yield from context(rank_step.spec, rank_step.layout, rank_step.coords, rank_step.own, rank_step.step)


def attention_output(rank_step: RankStep) -> Iterator[TrafficEntry]:
    """Yields the sum over tp of the row-parallel output projection, one call per layer of the rank: an all-reduce, or a
    reduce-scatter in scattered steps."""
    yield _sum(rank_step, "attention output", len(rank_step.own.layers))


def mlp_input(rank_step: RankStep) -> Iterator[TrafficEntry]:
    """Yields the all-gather over tp before the gate and up projections in scattered steps, and the dispatch of tokens to
    experts, in all layers of the rank."""
    yield from _gathered(rank_step, "mlp input", rank_step.num_split + rank_step.dispatch.num_cp_split)
    if rank_step.dispatch.num_layers:
        yield from to_experts(rank_step.dispatch)


def mlp_output(rank_step: RankStep) -> Iterator[TrafficEntry]:
    """Yields the combine of expert results, and the sum over tp of the row-parallel down projection, in all layers of the
    rank."""
    if rank_step.dispatch.num_layers:
        yield from from_experts(rank_step.dispatch, rank_step.is_scattered)
    yield _sum(rank_step, "mlp output", rank_step.num_split)


def head_input(rank_step: RankStep) -> Iterator[TrafficEntry]:
    """Yields, on the last stage in scattered steps, the all-gather over tp before the LM head, which may need any token."""
    if rank_step.own.last_stage:
        yield from _gathered(rank_step, "head input", 1)


def stage_output(rank_step: RankStep) -> Iterator[TrafficEntry]:
    """Yields, on all stages but the last, the send of the rank's own tokens to the next stage, once per step. A rank without
    tokens sends nothing."""
    if not rank_step.own.last_stage and rank_step.own_bytes:
        yield send("stage boundary", "pp", rank_step.layout.pp, rank_step.own_bytes)


def sampled_tokens(rank_step: RankStep) -> Iterator[TrafficEntry]:
    """Yields the exchanges of sampling on the last stage, on cp rank 0, which runs the last token of every row; nothing on
    other ranks.

    If the head is split over all DP ranks, the rows of all DP ranks are sampled together. They are gathered before, each rank
    contributing its part of its DP rank's rows.
    """
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


def token_feedback(rank_step: RankStep) -> Iterator[TrafficEntry]:
    """Yields the feedback of sampled tokens, 8 bytes each, from the last stage to every other stage: a send there, a receive
    elsewhere.

    With it, the next step of a stage need not wait for the engine. On the last stage, cp rank 0 sends them to the other cp
    ranks as well. The tokens are received when a later step needs them, but counted here.
    """
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
    stage_input,
    embedding,
    attention_input,
    width_norms,
    attention_context,
    attention_output,
    mlp_input,
    mlp_output,
    head_input,
    stage_output,
    sampled_tokens,
    token_feedback,
)
"""Regions in the order of the forward pass. A new parallel axis adds a function here, or changes those of its regions."""


def _sum(rank_step: RankStep, where: str, calls: int = 1) -> TrafficEntry:
    """Returns the sum of partial results over the tp group: an all-reduce, or a reduce-scatter in scattered steps."""
    whole = rank_step.hidden_bytes(rank_step.num_tokens)
    if rank_step.is_scattered:
        return reduce_scatter(where, "tp", rank_step.layout.tp, whole, rank_step.own_bytes, calls)
    return all_reduce(where, "tp", rank_step.layout.tp, whole, calls)


def _gathered(rank_step: RankStep, where: str, calls: int) -> Iterator[TrafficEntry]:
    """Yields an all-gather of all tokens if the rank holds only its own tokens (scattered steps)."""
    if rank_step.is_scattered:
        yield all_gather(where, "tp", rank_step.layout.tp, rank_step.own_bytes, calls)


def _region_entries(region: RegionTraffic, rank_step: RankStep) -> list[TrafficEntry]:
    """Returns the entries of a region that cause traffic, that is, those of groups of more than one rank.

    A DP rank without rows only runs its experts, and its part of the head, for other DP ranks.
    """
    entries = [entry for entry in region(rank_step) if entry.group_size > 1 and entry.calls]
    return entries if rank_step.step.rows else [entry for entry in entries if entry.axis in ("moe", HEAD_AXIS)]
