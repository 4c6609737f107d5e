"""Assignment: the least is crossed that can be, by brute force on small clusters, and what talks most sits nearest on large
ones."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from placement.layout.layout import Layout
from placement.layout.mesh import groups
from placement.model.moe_spec import MoESpec
from placement.model.spec import ModelSpec
from placement.nodes.assignment import assign_bundles, assign_replicas
from placement.nodes.hardware import ClusterSpec, NodeSpec
from tests.support.models.specs import DENSE

CASES = 300
MOST = 800
"""Assignments that are tried one by one."""
SPARSE = DENSE.model_copy(update={"moe": MoESpec(num_experts=16, top_k=2, expert_size=12, layers=(1, 2, 3))})


@pytest.mark.parametrize("seed", range(CASES))
def test_a_small_assignment_crosses_as_little_as_any(seed: int) -> None:
    draw = random.Random(seed)
    layout, model, cluster = _small_case(draw)
    assignments = assign_replicas(layout, model, cluster)
    room = [node.slots // layout.tp for node in cluster.nodes]
    bundles = layout.world // layout.tp
    if assignments is None:
        assert sum(room) < layout.replicas * bundles
        return
    assert len(assignments) == layout.replicas
    used: set[int] = set()
    for assignment in assignments:
        assert len(assignment.nodes) == bundles
        assert assignment.crossings.as_tuple() == _crossed(layout, model, cluster, assignment.nodes, used)
        legal = itertools.product(range(len(room)), repeat=bundles)
        least = min(
            _crossed(layout, model, cluster, nodes, used)
            for nodes in legal
            if all(nodes.count(node) <= room[node] for node in set(nodes))
        )
        assert assignment.crossings.as_tuple() == least, f"{layout} on {cluster}: {assignment}"
        for node in assignment.nodes:
            room[node] -= 1
        assert min(room) >= 0
        used |= set(assignment.nodes)
        for group in groups(layout, "tp"):
            assert len({assignment.node_of_rank(layout, rank) for rank in group}) == 1


def test_stages_sit_apart_and_tp_groups_together() -> None:
    nodes = ClusterSpec(nodes=tuple(NodeSpec(name=name, slots=2) for name in "ab"))
    assignment = assign_bundles(Layout(tp=2, pp=2), DENSE, nodes)
    assert assignment is not None
    assert sorted(assignment.nodes) == [0, 1]
    roomy = ClusterSpec(nodes=tuple(NodeSpec(name=name, slots=8) for name in "ab"))
    assignment = assign_bundles(Layout(tp=2, pp=2), DENSE, roomy)
    assert assignment is not None
    assert len(set(assignment.nodes)) == 2


def test_stages_share_a_node_rather_than_cross_a_slow_link() -> None:
    nodes = ClusterSpec(nodes=(NodeSpec(name="a", slots=4, rack="r0"), NodeSpec(name="b", slots=4, rack="r1")))
    assignment = assign_bundles(Layout(tp=2, pp=2), DENSE, nodes)
    assert assignment is not None
    assert len(set(assignment.nodes)) == 1
    assignment = assign_bundles(Layout(tp=2, pp=4), DENSE, nodes)
    assert assignment is not None
    assert assignment.nodes in ((0, 0, 1, 1), (1, 1, 0, 0))
    assert assignment.crossings.far_hops == 2, "another rack is another domain too"


def test_replicas_sit_apart() -> None:
    nodes = ClusterSpec(nodes=tuple(NodeSpec(name=str(at), slots=4) for at in range(3)))
    assignments = assign_replicas(Layout(tp=2, replicas=3), DENSE, nodes)
    assert assignments is not None
    assert sorted(assignment.nodes for assignment in assignments) == [(0,), (1,), (2,)]


def test_a_replica_begins_at_home() -> None:
    nodes = ClusterSpec(nodes=tuple(NodeSpec(name=str(at), slots=4) for at in range(3)))
    for home in range(3):
        assignment = assign_bundles(Layout(tp=2, pp=2), DENSE, nodes, home=home)
        assert assignment is not None
        assert assignment.nodes[0] == home


def test_experts_stay_inside_the_fastest_domain_that_holds_them() -> None:
    """Two racks of two NVLink domains of two nodes of 4: 16 ranks of an expert group fit one rack, 8 one domain."""
    nodes = tuple(NodeSpec(name=f"n{at}", slots=4, rack=f"r{at // 4}", domain=f"d{at // 2}", kind="cuda") for at in range(8))
    cluster = ClusterSpec(nodes=nodes)
    eight = assign_bundles(Layout(attn_dp=2, tp=4, ep=8), SPARSE, cluster)
    assert eight is not None
    assert len({nodes[node].domain for node in eight.nodes}) == 1
    sixteen = assign_bundles(Layout(attn_dp=4, tp=4, ep=16), SPARSE, cluster)
    assert sixteen is not None
    assert len({nodes[node].rack for node in sixteen.nodes}) == 1
    assert sixteen.crossings.far_groups == 1


def test_a_large_cluster_is_assigned_well_within_the_budget() -> None:
    nodes = tuple(NodeSpec(name=f"n{at}", slots=8, rack=f"r{at // 8}", kind="cuda") for at in range(64))
    assignment = assign_bundles(Layout(tp=8, pp=4, cp=2), DENSE, ClusterSpec(nodes=nodes))
    assert assignment is not None
    assert assignment.crossings.as_tuple() == (0, 0, 4, 0, 4, 0)
    assert len({nodes[node].rack for node in assignment.nodes}) == 1


def test_no_room_is_no_assignment() -> None:
    cluster = ClusterSpec(nodes=(NodeSpec(name="a", slots=3), NodeSpec(name="b", slots=3)))
    assert assign_bundles(Layout(tp=2, pp=3), DENSE, cluster) is None
    assert assign_bundles(Layout(tp=2, pp=2), DENSE, cluster, free=[3, 1]) is None
    assert assign_replicas(Layout(tp=2, replicas=3), DENSE, cluster) is None


def _small_case(draw: random.Random) -> tuple[Layout, ModelSpec, ClusterSpec]:
    while True:
        model = draw.choice((DENSE, SPARSE))
        tp, cp, dp_size, pp = draw.choice((1, 2, 3)), draw.choice((1, 1, 2, 3)), draw.choice((1, 1, 2)), draw.choice((1, 2, 3))
        fields: dict[str, int] = {}
        if model.moe is not None:
            stage = tp * cp * dp_size
            fields["ep"] = draw.choice([size for size in range(1, stage + 1) if stage % size == 0])
            fields["moe_dp"] = draw.choice([size for size in (1, 2) if stage // fields["ep"] % size == 0])
        layout = Layout(tp=tp, cp=cp, attn_dp=dp_size, pp=pp, replicas=draw.choice((1, 1, 2)), **fields)
        nodes = tuple(
            NodeSpec(
                name=f"n{at}",
                slots=draw.randint(0, 6),
                domain=draw.choice((None, "d0", "d1")),
                rack=draw.choice((None, None, "r0", "r1")),
                zone=draw.choice((None, None, None, "z0")),
            )
            for at in range(draw.randint(1, 4))
        )
        if len(nodes) ** (layout.world // layout.tp) <= MOST:
            return layout, model, ClusterSpec(nodes=nodes)


def _crossed(layout: Layout, model: ModelSpec, cluster: ClusterSpec, nodes: Sequence[int], used: set[int]) -> tuple[int, ...]:
    """The crossings of a finished assignment, from their definition and ranks alone."""
    node_of = [nodes[rank // layout.tp] for rank in range(layout.world)]

    def count(axes: Sequence[str], key) -> int:  # type: ignore[no-untyped-def]
        members = {frozenset(r // layout.tp for r in group) for axis in axes for group in groups(layout, axis)}
        return sum(len({key(nodes[bundle]) for bundle in group}) - 1 for group in members)

    def keys(node: int) -> list[tuple[object, ...]]:
        spec = cluster.nodes[node]
        return [(spec.zone,), (spec.zone, spec.rack), (spec.zone, spec.rack, spec.domain)]

    talking = ["cp"] if model.moe is None else ["cp", "moe"]
    far = sum(count(talking, lambda node, level=level: keys(node)[level]) for level in range(3))
    far_dp_ranks = sum(count(["attn_dp"], lambda node, level=level: keys(node)[level]) for level in range(3))
    hops = 0
    for column in groups(layout, "pp"):
        if column[0] % layout.tp == 0:
            for one, other in itertools.pairwise(column):
                hops += sum(a != b for a, b in zip(keys(node_of[one]), keys(node_of[other]), strict=True))
    stage = layout.stage_ranks // layout.tp
    stages = [set(nodes[start : start + stage]) for start in range(0, len(nodes), stage)]
    shared = sum(map(len, stages)) - len(set(nodes))
    spread = sum(len(each) - 1 for each in stages)
    return far, far_dp_ranks + hops, count(talking, lambda node: node), shared, spread, len(set(nodes) & used)
