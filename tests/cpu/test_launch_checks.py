"""Ranks that run where nobody reaches them, or where nobody asked them to be, are refused with the reason; and so are nodes."""

from __future__ import annotations

from typing import Any, cast

import pytest
import ray

from actors.config import Place
from cluster.discover import discover
from cluster.launch import LaunchError, _check_reachable, _check_seats
from cluster.seats import Seats, node_resources
from cluster.topology import POOL_LABEL
from placement.bundles import bundles, impossible
from placement.layout import Layout


def place(rank: int, node: str, host: str, machine: str) -> Place:
    return Place(world_rank=rank, node_id=node, host=host, pid=1, machine=machine)


def test_a_loopback_address_between_machines_names_the_variable() -> None:
    places = [place(0, "a", "10.0.0.1", "x"), place(1, "b", "127.0.0.1", "y")]
    with pytest.raises(LaunchError, match=r"rank 1 reports the loopback address 127.0.0.1.*GLOO_SOCKET_IFNAME"):
        _check_reachable(places)


def test_nodes_of_one_machine_may_use_its_loopback() -> None:
    _check_reachable([place(0, "a", "127.0.0.1", "x"), place(1, "b", "127.0.0.1", "x")])
    _check_reachable([place(0, "a", "10.0.0.1", "x"), place(1, "b", "10.0.0.2", "y")])


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


def test_a_rank_on_another_node_than_its_seat_is_refused() -> None:
    seats = Seats(cast(Any, None), (0, 0, 1), ("a", "b"))
    ranks = [place(rank, node, "10.0.0.1", "x") for rank, node in enumerate("aab")]
    _check_seats(ranks, seats)
    with pytest.raises(LaunchError, match="rank 2 runs on node a, but its seat is on b"):
        _check_seats([*ranks[:2], place(2, "a", "10.0.0.1", "x")], seats)
