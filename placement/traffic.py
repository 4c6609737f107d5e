"""What one step puts on the wire: every collective of every rank, counted before anything runs.

The counters of a group (`calls`, `sent_bytes`) after a real step equal this exactly; a test holds it for every layout it
runs. One small function per region of the forward pass says what that region does, in the order of the pass::

    first stage                    every layer                                  last stage
    [embed] all_reduce tp    [attention] all_reduce tp  [mlp] all_reduce tp     [sampling] all_gather tp
                                                   │ send pp / recv pp
                                                   └─────[stage boundary]────→ next stage

A group of one rank is silent: regions may name it, and its entries are dropped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from placement.collectives import Entry, all_reduce, recv, send
from placement.layout import Layout
from placement.mesh import Coords, coords
from placement.model_spec import ModelSpec
from placement.sampling_traffic import sampling
from placement.shards import Shard, shard, vocabulary
from placement.step_shape import StepShape


@dataclass(frozen=True)
class Seat:
    """One rank in one step: all a region needs to know."""

    spec: ModelSpec
    layout: Layout
    at: Coords
    own: Shard
    step: StepShape

    @property
    def num_tokens(self) -> int:
        """Token rows this rank runs."""
        return self.step.num_tokens

    def hidden_bytes(self, rows: int) -> int:
        """Bytes of the hidden states of `rows` tokens."""
        return rows * self.spec.hidden_size * self.step.element_bytes


def rank_traffic(spec: ModelSpec, layout: Layout, world_rank: int, step: StepShape) -> list[Entry]:
    """Every collective of one rank in one step, in the order of the forward pass."""
    at = coords(layout, world_rank)
    seat = Seat(spec, layout, at, shard(spec, layout, at), step)
    return [entry for region in REGIONS for entry in region(seat) if entry.group_size > 1 and entry.calls]


def traffic(spec: ModelSpec, layout: Layout, step: StepShape) -> list[tuple[Entry, tuple[int, ...]]]:
    """Every distinct entry of a replica, with the world ranks that make it; in the order of the first such rank."""
    makers: dict[Entry, list[int]] = {}
    for rank in range(layout.world):
        for entry in rank_traffic(spec, layout, rank, step):
            makers.setdefault(entry, []).append(rank)
    return [(entry, tuple(ranks)) for entry, ranks in makers.items()]


def counters(entries: Sequence[Entry], axis: str) -> tuple[Counter[str], Counter[str]]:
    """What the group of `axis` will have counted: (calls, wire bytes sent), each by operation name."""
    calls: Counter[str] = Counter()
    sent_bytes: Counter[str] = Counter()
    for entry in entries:
        if entry.axis == axis:
            calls[entry.op] += entry.calls
            sent_bytes[entry.op] += entry.calls * entry.wire_bytes_per_rank
    return calls, sent_bytes


def arriving(seat: Seat) -> Iterator[Entry]:
    """Hidden states come from the stage before; the sender pays for the bytes."""
    if not seat.own.first_stage:
        yield recv("stage boundary", "pp", seat.layout.pp, seat.hidden_bytes(seat.num_tokens))


def embedding(seat: Seat) -> Iterator[Entry]:
    """Each rank looks up the ids it has rows for; the sum is the embedding."""
    if seat.own.first_stage:
        yield all_reduce("embedding", "tp", seat.layout.tp, seat.hidden_bytes(seat.num_tokens))


def attention_output(seat: Seat) -> Iterator[Entry]:
    """The output projection is row parallel: its partial sums are added, once a layer."""
    yield _layer_sum(seat, "attention output")


def mlp_output(seat: Seat) -> Iterator[Entry]:
    """The down projection likewise."""
    yield _layer_sum(seat, "mlp output")


def leaving(seat: Seat) -> Iterator[Entry]:
    """Hidden states go to the next stage: once, whatever the number of layers."""
    if not seat.own.last_stage:
        yield send("stage boundary", "pp", seat.layout.pp, seat.hidden_bytes(seat.num_tokens))


def choosing(seat: Seat) -> Iterator[Entry]:
    """The sampler's exchanges, on the last stage."""
    if seat.own.last_stage:
        rows = [row.choosing for row in seat.step.rows if row.choosing is not None]
        widths = [
            len(range(vocab.start, min(vocab.stop, seat.spec.vocab_size)))
            for vocab in vocabulary(seat.spec, seat.layout.tp, seat.layout.tp_shares)
        ]
        yield from sampling(rows, seat.spec.vocab_size, max(widths), seat.layout.tp)


Region = Callable[[Seat], Iterator[Entry]]
REGIONS: tuple[Region, ...] = (arriving, embedding, attention_output, mlp_output, leaving, choosing)
"""In the order of the forward pass. A new axis adds its own function here, or changes what the regions it touches yield."""


def _layer_sum(seat: Seat, where: str) -> Entry:
    """The sum of a row-parallel product in each of the rank's layers."""
    return all_reduce(where, "tp", seat.layout.tp, seat.hidden_bytes(seat.num_tokens), calls=len(seat.own.layers))
