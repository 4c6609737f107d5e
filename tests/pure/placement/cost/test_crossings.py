"""Bytes between nodes: those of the traffic account, on the links its ranks are apart by, and the time they take."""

from __future__ import annotations

import pytest

from placement.cost.crossings import busiest_seconds, crossing_lines, link_loads, nodes_of_ranks, speed_text, time_text
from placement.cost.step_shape import StepShape
from placement.layout.layout import Layout
from placement.nodes.assignment import assign_bundles
from placement.nodes.hardware import ClusterSpec, NodeSpec
from placement.nodes.links import Link, NodeLink
from tests.support.models.specs import DENSE

SPEC = DENSE
STEP = StepShape.of(4, 10, dtype="float32")
SLOW = Link(bytes_per_s=25e6, latency_s=1e-3, source="measured")
CLUSTER = ClusterSpec(
    nodes=(NodeSpec(name="a", slots=2, rack="r0"), NodeSpec(name="b", slots=2, rack="r1")),
    links=(NodeLink(a="b", b="a", link=SLOW),),
)


def test_a_stage_boundary_between_nodes_sends_the_hidden_states_once() -> None:
    layout = Layout(tp=2, pp=2)
    assignment = assign_bundles(layout, SPEC, CLUSTER)
    assert assignment is not None
    loads = link_loads(SPEC, layout, STEP, CLUSTER, nodes_of_ranks(layout, assignment))
    boundary = next(load for load in loads if load.where == "stage boundary")
    assert boundary.num_bytes == 4 * 10 * 64 * 4, "two ranks send half of the tokens each"
    assert boundary.calls == 1
    assert boundary.slow
    assert boundary.link == SLOW
    assert boundary.seconds == pytest.approx(1e-3 + boundary.num_bytes / 25e6)
    assert {(load.source, load.target) for load in loads if load.where == "token feedback"} == {(1, 0)}


def test_a_tp_group_over_a_link_sends_in_every_layer() -> None:
    layout = Layout(tp=4)
    loads = link_loads(SPEC, layout, STEP, CLUSTER, [0, 0, 1, 1])
    sums = [load for load in loads if load.where in ("attention output", "mlp output")]
    whole = 4 * 10 * 64 * 4
    assert {load.num_bytes for load in sums} == {4 * (2 * 3 * whole // 4)}, "one rank of a ring sends over each boundary"
    assert {load.calls for load in sums} == {4}
    split = busiest_seconds(loads)
    staged = busiest_seconds(link_loads(SPEC, Layout(tp=2, pp=2), STEP, CLUSTER, [0, 0, 1, 1]))
    apart = busiest_seconds(link_loads(SPEC, Layout(tp=2), STEP, CLUSTER, [0, 0]))
    assert split > 3 * staged > 0 == apart


def test_lines_name_the_link_and_what_it_costs() -> None:
    loads = link_loads(SPEC, Layout(tp=2, pp=2), STEP, CLUSTER, [0, 0, 1, 1])
    lines = list(crossing_lines(CLUSTER, loads, only_slow=True))
    assert lines[0] == ("stage boundary (pp) crosses a -> b: 10 KiB in 1 call a step, 1.41 ms (slow link, measured 200 Mbit/s)")
    near = CLUSTER.model_copy(update={"nodes": tuple(node.model_copy(update={"rack": None}) for node in CLUSTER.nodes)})
    assert list(crossing_lines(near, link_loads(SPEC, Layout(tp=2, pp=2), STEP, near, [0, 0, 1, 1]), only_slow=True)) == []


@pytest.mark.parametrize(("value", "text"), [(25e6, "200 Mbit/s"), (1.25e9, "10 Gbit/s"), (300e9, "2.4e+03 Gbit/s")])
def test_speeds_are_told_as_networks_are_sold(value: float, text: str) -> None:
    assert speed_text(value) == text


def test_times_have_a_unit_that_fits() -> None:
    assert [time_text(each) for each in (1.234, 0.0482, 20e-6)] == ["1.23 s", "48.2 ms", "20 µs"]
