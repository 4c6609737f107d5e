"""Ranks that run where nobody reaches them, or where nobody asked them to be, are refused with the reason; and so are nodes."""

from __future__ import annotations

import socket
from typing import Any, cast

import pytest
import ray

from actors.rank.rank import Rank
from actors.wire.rank_config import RankConfig, RankLocation
from cluster.nodes.discover import discover
from cluster.nodes.topology import POOL_LABEL
from cluster.replica.placement_group import ReservedBundles, node_resources
from cluster.replica.rank_checks import LaunchError, check_memory, check_placement, check_reachable, described
from placement.layout.layout import Layout
from placement.nodes.bundles import bundles, impossible
from tests.support.models.specs import DENSE


def location(rank: int, node: str, host: str, machine: str) -> RankLocation:
    return RankLocation(world_rank=rank, node_id=node, host=host, pid=1, machine=machine, name=f"{node}0")


def test_a_loopback_address_between_machines_names_the_variable() -> None:
    locations = [location(0, "a", "10.0.0.1", "x"), location(1, "b", "127.0.0.1", "y")]
    with pytest.raises(LaunchError, match=r"rank 1 on b0 reports the loopback address 127.0.0.1 while.*GLOO_SOCKET_IFNAME"):
        check_reachable(locations)


def test_a_node_whose_name_stands_for_the_loopback_address_is_refused_with_the_hint() -> None:
    config = RankConfig(
        world_rank=1, layout=Layout(pp=2), spec=DENSE, model_path="", device="cpu", dtype="float32", block_size=16
    )
    looked_up = Rank(config).location("b", "localhost")
    assert (looked_up.host, looked_up.interface, looked_up.name) == ("127.0.0.1", "lo", socket.gethostname())
    first = location(0, "a", "10.0.0.1", "another machine")
    with pytest.raises(LaunchError, match=r"127.0.0.1 \(interface lo\) while the layout spans 2 nodes.*GLOO_SOCKET_IFNAME"):
        check_reachable([first, looked_up])
    check_reachable([first.model_copy(update={"machine": looked_up.machine}), looked_up])
    assert described([first, looked_up]).startswith("0 on a0 at 10.0.0.1, 1 on ")


def test_nodes_of_one_machine_may_use_its_loopback() -> None:
    check_reachable([location(0, "a", "127.0.0.1", "x"), location(1, "b", "127.0.0.1", "x")])
    check_reachable([location(0, "a", "10.0.0.1", "x"), location(1, "b", "10.0.0.2", "y")])


def test_ranks_that_need_more_than_a_cgroup_of_their_machine_allows_are_refused() -> None:
    """Several Ray nodes of one machine share its memory; nodes of other machines have their own."""
    here = [location(at, node, "10.0.0.1", "x").model_copy(update={"memory_bytes": 100}) for at, node in enumerate("ab")]
    there = location(2, "c", "10.0.0.2", "y").model_copy(update={"memory_bytes": 60})
    check_memory([*here, there, location(3, "d", "10.0.0.3", "z")], [50, 50, 60, 10**12])
    with pytest.raises(LaunchError, match=r"rank 0, 1 on a0 may use 100 bytes .* would need 101 "):
        check_memory([*here, there], [50, 51, 60])
    with pytest.raises(LaunchError, match="rank 2 on c0 may use 60 bytes"):
        check_memory([*here, there], [50, 50, 61])


def test_nodes_kept_for_another_pool_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [
        {"NodeID": name, "Alive": True, "NodeManagerAddress": name, "Resources": {"CPU": cpus}, "Labels": labels}
        for name, cpus, labels in (("a", 2.0, {}), ("b", 2.0, {POOL_LABEL: "decode"}), ("c", 8.0, {POOL_LABEL: "prefill"}))
    ]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    three = bundles(Layout(tp=2, pp=3), "cpu")
    assert impossible(three, node_resources()) is None
    assert impossible(three, node_resources("prefill")) is None
    assert "only 2 of 3 bundles" in str(impossible(three, node_resources("decode")))
    assert [node.name for node in discover("cpu", "decode").nodes] == ["a", "b"]


def test_a_rank_on_another_node_than_its_bundle_is_refused() -> None:
    reserved = ReservedBundles(cast(Any, None), (0, 0, 1), ("a", "b"))
    ranks = [location(rank, node, "10.0.0.1", "x") for rank, node in enumerate("aab")]
    check_placement(ranks, reserved)
    with pytest.raises(LaunchError, match="rank 2 runs on node a, but its bundle is on b"):
        check_placement([*ranks[:2], location(2, "a", "10.0.0.1", "x")], reserved)
