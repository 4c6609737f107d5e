"""What `serve` says of slow links when it is ready: of the replicas of each deployment under their own layout."""

from __future__ import annotations

from typing import Any

import pytest

from actors.wire.rank_config import RankLocation, RankReport, RankStatus
from cluster.replica import status
from cluster.replica.settings import ReplicaSettings
from placement.layout.layout import Layout
from placement.nodes.hardware import ClusterSpec, NodeSpec
from tests.support.models.specs import DENSE

RACKS = ClusterSpec(nodes=tuple(NodeSpec(name=name, id=name, slots=2, rack=name) for name in "ab"))


def reports(replica: str, nodes: str) -> dict[str, RankReport]:
    """A replica whose ranks are on these nodes, a letter each."""
    return {
        f"{replica}-cafe-rank-{rank}": RankReport(
            location=RankLocation(world_rank=rank, node_id=node, host="h", pid=1),
            device="cpu",
            coords={},
            status=RankStatus(state="running"),
        )
        for rank, node in enumerate(nodes)
    }


def crossings(layout: Layout, replicas: set[str]) -> list[str]:
    settings = ReplicaSettings(model_path="", spec=DENSE, layout=layout, device="cpu", dtype="float32", max_model_len=8)
    return status.slow_crossings(settings, replicas)


def test_pools_of_one_size_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks each: the decode pool's pipeline crosses, the prefill pool's tp group does not."""
    monkeypatch.setattr(status, "discover", lambda device: RACKS)
    monkeypatch.setattr(status, "rank_reports", lambda: {**reports("pre1", "bb"), **reports("dec1", "ab")})
    assert crossings(Layout(tp=2), {"pre1"}) == []
    staged = crossings(Layout(pp=2), {"dec1"})
    assert [line.split(":")[0] for line in staged] == [
        "stage boundary (pp) crosses a -> b",
        "token feedback (pp) crosses b -> a",
    ]
    assert crossings(Layout(pp=2), {"pre1"}) == []
    assert crossings(Layout(pp=2), set()) == [], "a replica that is not known is nobody's"


def test_replicas_are_those_of_their_deployment() -> None:
    deployments = {name: {"replicas": [{"replica_id": name.lower() + "1"}]} for name in ("Engine", "Prefill")}
    details: dict[str, Any] = {"applications": {"llm": {"deployments": deployments}}}
    assert status.replica_ids(details, "llm", "Prefill") == {"prefill1"}
    assert status.replica_ids(details, "llm", "Ingress") == status.replica_ids({}, "llm", "Engine") == set()
