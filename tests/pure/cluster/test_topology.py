"""A cluster as it is read from Ray's nodes: names, slots, domains, links; and how it looks."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.nodes.topology import (
    POOLS,
    cluster_of,
    device_link,
    domain_slots,
    free_slots,
    head_of,
    open_to,
    pool_selector,
    slotless,
    with_links,
)
from placement.explain.cluster_text import as_text
from placement.nodes.hardware import ClusterSpec, NodeSpec
from placement.nodes.links import NVLINK, PCIE, Link, NodeLink, fast_domains

TOPOLOGY = """\
\tGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity
GPU0\t X \tNV18\tPXB\t0-47\t0
GPU1\tNV18\t X \tSYS\t0-47\t0
NIC0\tPXB\tSYS\t X

Legend:
  NV#  = Connection traversing a bonded set of # NVLinks
"""


def ray_node(name: str, alive: bool = True, labels: dict[str, str] | None = None, **resources: float) -> dict[str, Any]:
    return {
        "NodeID": f"id-{name}-{len(labels or {})}",
        "Alive": alive,
        "NodeManagerAddress": name,
        "Resources": resources,
        "Labels": labels or {},
    }


def test_nodes_are_read_with_their_domains_in_the_order_of_their_names() -> None:
    labels = {"rack": "r1", "ray.io/availability-zone": "z1", "ray.io/gpu-domain": "d1", "ray.io/accelerator-type": "H100"}
    nodes = [
        ray_node("10.0.0.10", CPU=4.0, memory=8e9),
        ray_node("10.0.0.9", labels=labels, CPU=96.0, GPU=8.0),
        ray_node("10.0.0.8", alive=False, CPU=9.0),
        {**ray_node("10.0.0.1", memory=1e9), "Resources": {"node:__internal_head__": 1.0}},
    ]
    cpu = cluster_of(nodes, "cpu")
    assert [(node.name, node.slots) for node in cpu.nodes] == [("10.0.0.1", 0), ("10.0.0.9", 96), ("10.0.0.10", 4)]
    assert cpu.nodes[2].memory_bytes == 8_000_000_000
    cuda = cluster_of(nodes, "cuda")
    gpu = cuda.nodes[1]
    assert (gpu.slots, gpu.memory_bytes, gpu.accelerator) == (8, None, "H100")
    assert gpu.path == ("z1", "r1", "d1")
    assert slotless(nodes, "cpu") == ["id-10.0.0.1-0"]
    assert head_of(nodes) == "id-10.0.0.1-0"
    assert free_slots(cpu, {"id-10.0.0.10-0": {"CPU": 2.0}}, "cpu") == [0, 0, 2]
    assert free_slots(cuda, {gpu.id: {"GPU": 8.0, "CPU": 3.0}}, "cuda") == [0, 3, 0], "a rank on a GPU needs a CPU as well"
    assert domain_slots(nodes, "cuda") == {"d1": 8}


def test_a_node_kept_for_a_pool_is_not_the_other_ones() -> None:
    nodes = [ray_node("a", labels={"shardwright/pool": "decode"}, CPU=2.0), ray_node("b", CPU=2.0)]
    nodes.append(ray_node("c", labels={"shardwright/pool": "prefill", "rack": "r"}, CPU=2.0))
    names = {pool: [node["NodeManagerAddress"] for node in open_to(nodes, pool)] for pool in ("", *POOLS)}
    assert names == {"": ["a", "b", "c"], "decode": ["a", "b"], "prefill": ["b", "c"], "mixed": ["b"]}
    assert pool_selector("decode") == {"shardwright/pool": "!in(prefill, mixed)"}
    assert pool_selector("") == {}
    found = cluster_of(nodes, "cpu")
    assert [node.pool for node in found.nodes] == ["decode", None, "prefill"]
    assert "pool" in as_text(found, [2, 2, 2]).splitlines()[1]


def test_nodes_of_one_address_are_told_apart() -> None:
    nodes = [ray_node("10.0.0.1", labels={"shardwright/name": "node1"}, CPU=1.0), ray_node("10.0.0.1", CPU=1.0)]
    assert [node.name for node in cluster_of(nodes, "cpu").nodes] == ["node1", "10.0.0.1"]
    assert len({node.name for node in cluster_of([*nodes[1:], {**nodes[1], "NodeID": "zz"}], "cpu").nodes}) == 2


def test_distances_follow_what_nodes_have_in_common() -> None:
    def node(name: str, **where: str) -> NodeSpec:
        return NodeSpec(name=name, slots=1, **where)  # type: ignore[arg-type]

    spec = ClusterSpec(
        nodes=(
            node("a", zone="z", rack="r", domain="d"),
            node("b", zone="z", rack="r", domain="d"),
            node("c", zone="z", rack="r", domain="e"),
            node("d", zone="z", rack="s", domain="d"),
            node("e", zone="y", rack="r", domain="d"),
        )
    )
    assert [spec.distance(0, other) for other in range(5)] == [0, 1, 2, 3, 4]
    assert [spec.is_slow(0, other) for other in range(5)] == [False, False, True, True, True]
    speeds = [spec.link(0, other).bytes_per_s for other in range(5)]
    assert speeds == sorted(speeds, reverse=True)


def test_what_nvidia_smi_prints_is_understood() -> None:
    assert device_link(TOPOLOGY) == NVLINK
    assert device_link(TOPOLOGY.replace("NV18", "SYS")) == PCIE
    assert device_link("") is None
    assert device_link("\tGPU0\tCPU Affinity\nGPU0\t X \t0-7\n") is None


def test_measured_links_make_domains_where_none_are_named() -> None:
    def link(a: str, b: str, speed: float) -> NodeLink:
        return NodeLink(a=a, b=b, link=Link(bytes_per_s=speed, latency_s=1e-4, source="measured"))

    links = [link("a", "b", 1e9), link("a", "c", 25e6), link("b", "c", 25e6)]
    cluster = ClusterSpec(nodes=tuple(NodeSpec(name=name, slots=1) for name in "abc"))
    found = with_links(cluster, links, {"a": NVLINK})
    assert found.nodes[0].domain == found.nodes[1].domain != found.nodes[2].domain
    assert found.nodes[0].inside == NVLINK
    assert found.is_slow(0, 2)
    assert found.link(2, 0).bytes_per_s == 25e6
    named = ClusterSpec(nodes=(NodeSpec(name="a", slots=1, domain="x"), *cluster.nodes[1:]))
    assert [node.domain for node in with_links(named, links, {}).nodes] == ["x", None, None]
    assert fast_domains(["a", "b"], links[:1]) == {}
    assert fast_domains(["a"], []) == {}
    assert ClusterSpec.model_validate_json(found.model_dump_json(exclude_none=True)) == found


@pytest.mark.parametrize("labelled", [True, False])
def test_the_text_shows_table_drawing_and_links(labelled: bool) -> None:
    racks = ("r0", "r0", "r1") if labelled else (None,) * 3
    cluster = ClusterSpec(nodes=tuple(NodeSpec(name=name, slots=4, rack=rack) for name, rack in zip("abc", racks, strict=True)))
    text = as_text(cluster, [4, 1, 0])
    assert "3 nodes, 12 slots, 5 free" in text
    assert "■■■□" in text
    assert ("rack r1" in text) is labelled
    assert ("between racks: assumed 10 Gbit/s, 200 µs, slow" in text) is labelled
    if labelled:
        assert text.split("\n\n")[1].splitlines()[1:] == [
            "  ├─ rack r0",
            "  │  ├─ a  □□□□",
            "  │  └─ b  ■■■□",
            "  └─ rack r1",
            "     └─ c  ■■■■",
        ]
