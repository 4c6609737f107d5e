"""The placement of a layout on a cluster and its traffic over the links, as text and as plain values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from placement.cost.crossings import busiest_seconds, crossing_lines, link_loads, nodes_of_ranks, time_text
from placement.cost.step_shape import StepShape
from placement.layout.layout import Layout, LayoutError
from placement.legality.suggestions import sizes
from placement.model.spec import ModelSpec
from placement.nodes.assignment import BundleAssignment, assign_replicas
from placement.nodes.hardware import ClusterSpec


def assigned_replicas(layout: Layout, spec: ModelSpec, cluster: ClusterSpec) -> list[BundleAssignment]:
    """Returns the assignment of bundles to nodes for every replica, on the idle cluster. The layout must have passed
    `placement.legality.check` on this cluster. Raises `LayoutError` if not all replicas fit."""
    assignments = assign_replicas(layout, spec, cluster)
    if assignments is None:
        raise LayoutError(f"{layout} does not fit on {len(cluster.nodes)} nodes with {cluster.slots} slots")
    return assignments


def assignment_lines(spec: ModelSpec, layout: Layout, step: StepShape, cluster: ClusterSpec) -> Iterator[str]:
    """Yields lines of text, for each replica: the ranks of each node, then the traffic between nodes in one step, and the time
    that takes at least. `step` has the rows of all DP ranks. Raises `LayoutError` if not all replicas fit."""
    yield f"placement on {len(cluster.nodes)} nodes of {sizes(node.slots for node in cluster.nodes)} slots"
    for index, assignment in enumerate(assigned_replicas(layout, spec, cluster)):
        ranks = nodes_of_ranks(layout, assignment)
        for node in dict.fromkeys(ranks):
            here = sizes(rank for rank, other in enumerate(ranks) if other == node)
            replica = f"replica {index}, " if layout.replicas > 1 else ""
            yield f"  {cluster.nodes[node].name}: {replica}ranks {here}"
        loads = link_loads(spec, layout, step, cluster, ranks)
        yield from (f"  {line}" for line in crossing_lines(cluster, loads))
        if loads:
            yield f"  a step waits for the busiest link {time_text(busiest_seconds(loads))} at least"


def assignment_json(spec: ModelSpec, layout: Layout, step: StepShape, cluster: ClusterSpec) -> list[dict[str, Any]]:
    """Returns the placement of each replica as plain values: the node of each rank, the boundaries that its groups cross, and
    the traffic between nodes in one step (bytes, seconds). `step` has the rows of all DP ranks. Raises `LayoutError` if not all
    replicas fit."""
    found = []
    for assignment in assigned_replicas(layout, spec, cluster):
        ranks = nodes_of_ranks(layout, assignment)
        loads = link_loads(spec, layout, step, cluster, ranks)
        found.append(
            {
                "node_of_rank": [cluster.nodes[node].name for node in ranks],
                "crossings": asdict(assignment.crossings),
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
