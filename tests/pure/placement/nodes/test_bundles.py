"""Bundles of a replica, and telling an impossible placement from a busy cluster."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from placement.layout.layout import Layout
from placement.layout.mesh import coords_of, groups
from placement.nodes.bundles import bundle_of, bundles, impossible


def test_one_bundle_per_tp_group() -> None:
    assert bundles(Layout(tp=2, pp=2, replicas=3), "cpu") == [{"CPU": 2.0}, {"CPU": 2.0}]
    assert bundles(Layout(tp=4), "cuda") == [{"GPU": 4.0, "CPU": 4.0}]


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(1, 4))
def test_a_bundle_holds_exactly_one_tp_group(pp: int, attn_dp: int, cp: int, tp: int) -> None:
    layout = Layout(pp=pp, attn_dp=attn_dp, cp=cp, tp=tp)
    for index, group in enumerate(groups(layout, "tp")):
        assert {bundle_of(layout, rank) for rank in group} == {index}
    assert bundle_of(layout, layout.world - 1) == len(bundles(layout, "cpu")) - 1
    assert coords_of(layout, 0).tp == 0


def test_a_bundle_larger_than_every_node_is_impossible() -> None:
    reason = impossible(
        bundles(Layout(tp=2), "cpu"), {"a": {"CPU": 1.0, "memory": 5.0, "node:1.2.3.4": 1.0}, "b": {"CPU": 1.0}}
    )
    assert reason is not None
    assert all(part in reason for part in ["2 CPU", "largest node, a, has 1 CPU", "names seen: CPU, memory."])
    assert "node:" not in reason


def test_a_resource_no_node_has_is_named_with_those_that_were_seen() -> None:
    reason = impossible(bundles(Layout(), "cuda"), {"a": {"CPU": 8.0, "npu": 2.0}})
    assert reason is not None
    assert all(part in reason for part in ["1 GPU + 1 CPU", "no node has the resource GPU", "CPU, npu"])
    assert "Resource names seen: none" in str(impossible([{"CPU": 1.0}], {}))


def test_the_scarcer_resource_is_the_one_named() -> None:
    reason = impossible([{"GPU": 8.0, "CPU": 8.0}], {"a": {"GPU": 8.0, "CPU": 4.0}, "b": {"GPU": 2.0, "CPU": 64.0}})
    assert reason is not None
    assert "no single node has all of it" in reason
    assert "the largest node, a, has 4 CPU" in str(impossible([{"GPU": 8.0, "CPU": 8.0}], {"a": {"GPU": 8.0, "CPU": 4.0}}))


def test_bundles_that_fit_one_by_one_but_not_together_are_impossible() -> None:
    nodes = {"a": {"CPU": 3.0}, "b": {"CPU": 3.0}}
    reason = impossible(bundles(Layout(tp=2, pp=3), "cpu"), nodes)
    assert reason is not None
    assert all(part in reason for part in ["only 2 of 3", "2 CPU", "a (3 CPU)", "b (3 CPU)"])


def test_bundles_may_share_a_node() -> None:
    assert impossible(bundles(Layout(tp=2, pp=2), "cpu"), {"a": {"CPU": 4.0}}) is None
    assert impossible([{"CPU": 0.1}] * 10, {"a": {"CPU": 1.0}}) is None
    assert impossible([], {}) is None


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 5), st.integers(1, 8), st.lists(st.integers(0, 12), max_size=5))
def test_equal_bundles_fit_exactly_when_the_nodes_have_room_for_as_many(tp: int, pp: int, nodes: list[int]) -> None:
    reason = impossible(bundles(Layout(tp=tp, pp=pp), "cpu"), {f"n{i}": {"CPU": float(cpus)} for i, cpus in enumerate(nodes)})
    assert (reason is None) == (sum(cpus // tp for cpus in nodes) >= pp)
