"""Inter-node traffic: what an assignment of bundles to nodes sends over each link in one step, and how long that takes.

The bytes are those of `placement.cost.traffic`. The destinations follow from the operation::

    all_reduce     the next rank of the group (a ring)
    send           the next rank of the group; for sampled tokens, every other rank
    the others     all other ranks of the group, evenly

The time is a lower bound: the bytes at the link's bandwidth, plus the latency of each call. Links work concurrently, so the
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
    """The traffic of one region of the forward pass from one node to another in a step."""

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
        """Time in seconds that the link needs for this traffic."""
        return self.link.seconds(self.num_bytes, self.calls)


def link_loads(
    spec: ModelSpec, layout: Layout, step: StepShape, cluster: ClusterSpec, node_of_rank: Sequence[int]
) -> list[LinkLoad]:
    """Returns all traffic of one replica between nodes in a step, by link and region of the forward pass; traffic inside a node
    is left out.

    `step` has the rows of all DP ranks. `node_of_rank` has the index into ``cluster.nodes`` of each world rank; it may split tp
    groups.
    """
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
    """Returns the time in seconds that the busiest link (one direction) needs for `loads`, a lower bound of what a step spends
    on communication; 0 if there are no loads."""
    by_link: Counter[tuple[int, int]] = Counter()
    for load in loads:
        by_link[load.source, load.target] += load.seconds  # type: ignore[assignment]
    return max(by_link.values(), default=0)


def crossing_lines(cluster: ClusterSpec, loads: Sequence[LinkLoad], only_slow: bool = False) -> Iterator[str]:
    """Yields one line of text for each of `loads`, the traffic of one link and region: its nodes, bytes, calls and time. Slow
    links are marked; with `only_slow` the others are left out."""
    for load in loads:
        if load.slow or not only_slow:
            a, b = cluster.nodes[load.source].name, cluster.nodes[load.target].name
            kind = "slow link, " if load.slow else ""
            speed = f"{kind}{load.link.source} {speed_text(load.link.bytes_per_s)}"
            cost = f"{size_text(load.num_bytes)} in {load.calls} call{'' if load.calls == 1 else 's'} a step"
            yield f"{load.where} ({load.axis}) crosses {a} -> {b}: {cost}, {time_text(load.seconds)} ({speed})"


def nodes_of_ranks(layout: Layout, assignment: BundleAssignment) -> list[int]:
    """Returns the index into ``ClusterSpec.nodes`` of the node of each world rank of one replica."""
    return [assignment.node_of_rank(layout, rank) for rank in range(layout.world)]


def speed_text(bytes_per_s: float) -> str:
    """Returns a network bandwidth, given in bytes per second, as text in bits: ``200 Mbit/s``, ``10 Gbit/s``."""
    bits = 8 * bytes_per_s
    return f"{bits / 1e9:,.3g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:,.3g} Mbit/s"


def time_text(seconds: float) -> str:
    """Returns a time, given in seconds, as text in a suitable unit: ``48 ms``, ``20 µs`` or ``1.2 s``."""
    scale, unit = next(
        ((scale, unit) for scale, unit in ((1.0, "s"), (1e-3, "ms")) if seconds >= scale),
        (1e-6, "µs"),
    )
    return f"{seconds / scale:.3g} {unit}"


def _peers(entry: TrafficEntry, layout: Layout, rank: int) -> Iterator[tuple[int, int]]:
    """Yields the ranks that a rank sends to, with the bytes sent to each in all calls of the entry."""
    group = mesh.group_of(layout, entry.axis, rank)
    total = entry.calls * entry.wire_bytes_per_rank
    at = group.index(rank)
    if entry.op == "all_reduce" or (entry.op == "send" and entry.where != "token feedback"):
        yield group[(at + 1) % len(group)], total
        return
    others = [peer for peer in group if peer != rank]
    yield from ((peer, total // len(others)) for peer in others)
