"""Measurement of the links of the connected cluster, one pair of nodes at a time, so that no measurement disturbs another."""

from __future__ import annotations

import itertools
from typing import Any

import ray
from ray.actor import ActorHandle

from cluster.nodes.probe import Probe
from cluster.nodes.topology import device_link, with_links
from placement.nodes.hardware import ClusterSpec, NodeSpec
from placement.nodes.links import Link, NodeLink

_WAIT_S = 60.0


class MeasureError(RuntimeError):
    """Raised when a node fails to take part in a measurement. The message names the node and what it had to do."""


def measure(cluster: ClusterSpec, pairs: bool) -> ClusterSpec:
    """Measure links of the connected Ray cluster, and return a copy of `cluster` with them instead of its earlier links.

    The kind of link between the GPUs of a node (NVLink or PCIe) is read from ``nvidia-smi``. With `pairs`, latency and
    bandwidth between every two nodes are measured too, one pair at a time: about half a second and up to 256 MiB for each; if
    no node names a domain, fast domains are set from the results. Starts a Ray actor on each node that takes part, and kills
    it at the end. Raises `MeasureError` if a node fails or does not answer in time.
    """
    hosts = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    probes = {node.name: _probe(node, hosts[node.id]) for node in cluster.nodes if pairs or node.kind == "cuda"}
    try:
        inside = {
            name: device_link(_get(probe.gpu_topology.remote(), name, "look at its GPUs")) for name, probe in probes.items()
        }
        links = [_link(a, b, probes) for a, b in itertools.combinations(probes, 2)] if pairs else []
    finally:
        for probe in probes.values():
            ray.kill(probe)
    return with_links(cluster, links, {name: link for name, link in inside.items() if link is not None})


def _link(a: str, b: str, probes: dict[str, ActorHandle[Any]]) -> NodeLink:
    address = _get(probes[a].listen.remote(), a, "open a port")
    answer = probes[a].answer.remote()
    latency, speed = _get(probes[b].measure.remote(*address), b, f"send to {a}")
    _get(answer, a, f"answer {b}")
    return NodeLink(a=a, b=b, link=Link(bytes_per_s=speed, latency_s=latency, source="measured"))


def _probe(node: NodeSpec, host: str) -> ActorHandle[Any]:
    make: Any = ray.remote
    probe: ActorHandle[Any] = make(Probe).options(num_cpus=0, label_selector={"ray.io/node-id": node.id}).remote(host)
    return probe


def _get(ref: ray.ObjectRef[Any], name: str, what: str) -> Any:
    try:
        return ray.get(ref, timeout=_WAIT_S)
    except ray.exceptions.GetTimeoutError as error:
        raise MeasureError(f"node {name} did not {what} in {_WAIT_S:g} s") from error
    except ray.exceptions.RayError as error:
        raise MeasureError(f"node {name} could not {what}: {getattr(error, 'cause', None) or error}") from error
