"""What an assignment of bundles to nodes sends between nodes in one step, and how long the links take for it.

The bytes are those of `placement.cost.traffic`. Whom they go to follows from the operation::

    all_reduce     the next rank of the group (a ring)
    send           the next rank of the group; tokens, to every other one
    the others     all other ranks of the group, evenly

The time is what the link needs at least: its bytes at its speed, and its latency for each call. Links work at the same time, so
times of different links do not add up; those of one link do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from placement.cost.collectives import TrafficEntry
from placement.cost.step_shape import StepShape
from placement.cost.traffic import rank_traffic
from placement.cost.units import size_text
from placement.layout import mesh
from placement.layout.layout import Layout
from placement.model.spec import ModelSpec
from placement.nodes.assignment import BundleAssignment
from placement.nodes.hardware import ClusterSpec
from placement.nodes.links import Link


@dataclass(frozen=True)
class LinkLoad:
    """What one region of the forward pass sends from one node to another in a step."""

    source: int
    target: int
    where: str
    axis: str
    num_bytes: int
    calls: int
    link: Link
    slow: bool

    @property
    def seconds(self) -> float:
        """What the link takes for it."""
        return self.link.seconds(self.num_bytes, self.calls)


def link_loads(
    spec: ModelSpec, layout: Layout, step: StepShape, cluster: ClusterSpec, node_of_rank: Sequence[int]
) -> list[LinkLoad]:
    """Everything one replica sends between nodes in a step, by link and region. `node_of_rank` may split tp groups."""
    sent: Counter[tuple[int, int, str, str]] = Counter()
    calls: Counter[tuple[int, int, str, str]] = Counter()
    for rank in range(layout.world):
        of_rank: Counter[tuple[int, int, str, str]] = Counter()
        for entry in rank_traffic(spec, layout, rank, step):
            for peer, num_bytes in _peers(entry, layout, rank):
                key = (node_of_rank[rank], node_of_rank[peer], entry.where, entry.axis)
                if key[0] != key[1] and num_bytes:
                    sent[key] += num_bytes
                    of_rank[key] = max(of_rank[key], entry.calls)
        calls |= of_rank
    return [
        LinkLoad(*key, num_bytes, calls[key], cluster.link(*key[:2]), cluster.is_slow(*key[:2]))
        for key, num_bytes in sorted(sent.items())
    ]


def busiest_seconds(loads: Sequence[LinkLoad]) -> float:
    """Time of the link that takes longest: what a step waits for at least, beside its work; 0 where nothing leaves a node."""
    by_link: Counter[tuple[int, int]] = Counter()
    for load in loads:
        by_link[load.source, load.target] += load.seconds  # type: ignore[assignment]
    return max(by_link.values(), default=0)


def crossing_lines(cluster: ClusterSpec, loads: Sequence[LinkLoad], only_slow: bool = False) -> Iterator[str]:
    """One line for each link and region, slow ones said to be so."""
    for load in loads:
        if load.slow or not only_slow:
            a, b = cluster.nodes[load.source].name, cluster.nodes[load.target].name
            kind = "slow link, " if load.slow else ""
            speed = f"{kind}{load.link.source} {speed_text(load.link.bytes_per_s)}"
            cost = f"{size_text(load.num_bytes)} in {load.calls} call{'' if load.calls == 1 else 's'} a step"
            yield f"{load.where} ({load.axis}) crosses {a} -> {b}: {cost}, {time_text(load.seconds)} ({speed})"


def nodes_of_ranks(layout: Layout, assignment: BundleAssignment) -> list[int]:
    """The node of every world rank."""
    return [assignment.node_of_rank(layout, rank) for rank in range(layout.world)]


def speed_text(bytes_per_s: float) -> str:
    """A network's speed as networks are sold: ``200 Mbit/s``, ``10 Gbit/s``."""
    bits = 8 * bytes_per_s
    return f"{bits / 1e9:,.3g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:,.3g} Mbit/s"


def time_text(seconds: float) -> str:
    """``48 ms``, ``20 µs`` or ``1.2 s``."""
    scale, unit = next(
        ((scale, unit) for scale, unit in ((1.0, "s"), (1e-3, "ms")) if seconds >= scale),
        (1e-6, "µs"),
    )
    return f"{seconds / scale:.3g} {unit}"


def _peers(entry: TrafficEntry, layout: Layout, rank: int) -> Iterator[tuple[int, int]]:
    """Whom a rank sends to, and how many bytes in all calls of the entry."""
    group = mesh.group_of(layout, entry.axis, rank)
    total = entry.calls * entry.wire_bytes_per_rank
    at = group.index(rank)
    if entry.op == "all_reduce" or (entry.op == "send" and entry.where != "token feedback"):
        yield group[(at + 1) % len(group)], total
        return
    others = [peer for peer in group if peer != rank]
    yield from ((peer, total // len(others)) for peer in others)
