"""Where a layout sits on a cluster and what it sends over its links, to read and as plain values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from placement.cost.crossings import busiest_seconds, crossing_lines, link_loads, nodes_of_ranks, time_text
from placement.cost.step_shape import StepShape
from placement.layout.layout import Layout, LayoutError
from placement.legality.suggestions import sizes
from placement.model.spec import ModelSpec
from placement.nodes.assignment import Seating, seat_all
from placement.nodes.hardware import ClusterSpec


def seated(layout: Layout, spec: ModelSpec, cluster: ClusterSpec) -> list[Seating]:
    """Seats for every replica of a layout that has passed `placement.legality.check` on this cluster."""
    seatings = seat_all(layout, spec, cluster)
    if seatings is None:
        raise LayoutError(f"{layout} has no seats on {len(cluster.nodes)} nodes with {cluster.slots} slots")
    return seatings


def seating_lines(spec: ModelSpec, layout: Layout, step: StepShape, cluster: ClusterSpec) -> Iterator[str]:
    """Who sits where, then what crosses between nodes in one step of each replica."""
    yield f"seats on {len(cluster.nodes)} nodes of {sizes(node.slots for node in cluster.nodes)} slots"
    for index, seating in enumerate(seated(layout, spec, cluster)):
        ranks = nodes_of_ranks(layout, seating)
        for node in dict.fromkeys(ranks):
            here = sizes(rank for rank, other in enumerate(ranks) if other == node)
            replica = f"replica {index}, " if layout.replicas > 1 else ""
            yield f"  {cluster.nodes[node].name}: {replica}ranks {here}"
        loads = link_loads(spec, layout, step, cluster, ranks)
        yield from (f"  {line}" for line in crossing_lines(cluster, loads))
        if loads:
            yield f"  a step waits for the busiest link {time_text(busiest_seconds(loads))} at least"


def seating_json(spec: ModelSpec, layout: Layout, step: StepShape, cluster: ClusterSpec) -> list[dict[str, Any]]:
    """The same of each replica."""
    found = []
    for seating in seated(layout, spec, cluster):
        ranks = nodes_of_ranks(layout, seating)
        loads = link_loads(spec, layout, step, cluster, ranks)
        found.append(
            {
                "node_of_rank": [cluster.nodes[node].name for node in ranks],
                "crossings": asdict(seating.crossings),
                "links": [
                    {
                        "from": cluster.nodes[load.source].name,
                        "to": cluster.nodes[load.target].name,
                        "where": load.where,
                        "axis": load.axis,
                        "bytes": load.num_bytes,
                        "calls": load.calls,
                        "seconds": load.seconds,
                        "slow": load.slow,
                        "link": load.link.model_dump(mode="json"),
                    }
                    for load in loads
                ],
                "busiest_link_seconds": busiest_seconds(loads),
            }
        )
    return found
