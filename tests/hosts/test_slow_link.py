"""Two hosts of two slots on a link of 200 Mbit/s: what the traffic account predicts is what is measured."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from placement import checkpoint_header
from placement.crossings import busiest_seconds, link_loads
from placement.hardware import ClusterSpec, NodeSpec
from placement.layout import Layout
from placement.links import Link, NodeLink
from placement.step_shape import StepShape
from serve_app.catalog import DEFAULT_MODEL, resolve
from tests.hosts.box import ROOT, Box, Host, box, need_hosts
from tests.hosts.throughput import REQUESTS
from tests.hosts.up_cluster import wait_until

pytestmark = pytest.mark.timeout(600)

RATE = "200mbit"
BYTES_PER_S = 25e6
START = "RAY_AUTH_MODE=disabled RAY_USAGE_STATS_ENABLED=0 RAY_worker_niceness=0 ray start --num-cpus=2 --num-gpus=0"
CLEAR, NOISE = 0.1, 0.75
CASES = {"two replicas": ("tp=2,replicas=2", ""), "stages apart": ("tp=2,pp=2", ""), "tp across": ("tp=4", "forced")}


@pytest.fixture(scope="module")
def made() -> Iterator[Box]:
    need_hosts()
    with box(2) as made:
        head, other = made.hosts
        store = "--object-store-memory=200000000"
        # Each node has a value of its own for one variable, as interfaces have.
        made.run(head, f"HERE=h1 {START} --head --port=6379 {store} --include-dashboard=false --node-ip-address={head.address}")
        made.run(other, f"HERE=h2 {START} --address={head.address}:6379 {store} --node-ip-address={other.address}")
        for host in made.hosts:
            host.slow(RATE)
        yield made


@pytest.mark.long
def test_the_order_predicted_is_the_order_measured(made: Box) -> None:
    head = made.hosts[0]
    link = measured(made, head)
    assert 0.4 * BYTES_PER_S < link.bytes_per_s < 1.6 * BYTES_PER_S
    speeds = {name: throughput(made, head, *case) for name, case in CASES.items()}
    costs = {name: predicted(link, *case) for name, case in CASES.items()}
    print(json.dumps({"link": link.model_dump(), "tokens_per_s": speeds, "link_seconds_a_step": costs}, indent=1))
    for faster, slower in itertools.combinations(sorted(costs, key=costs.__getitem__), 2):
        gap, step_s = costs[slower] - costs[faster], REQUESTS / speeds[faster]
        # Where the account sees next to no difference there is none to measure, beside the noise of two cores.
        at_least = 1.0 if gap > CLEAR * step_s else NOISE
        assert speeds[faster] > at_least * speeds[slower], f"{faster} and {slower}"
    assert costs["tp across"] - costs["stages apart"] > CLEAR * REQUESTS / speeds["stages apart"]


def test_ranks_take_what_is_listed_from_the_shell_and_the_rest_from_their_node(made: Box, tmp_path: Path) -> None:
    head = made.hosts[0]
    shell = "RAY_AUTH_MODE=disabled NCCL_DEBUG=WARN HERE=driver SECRET=mine"
    log = tmp_path / "log"
    line = f"{shell} python -P {ROOT}/tests/hosts/throughput.py {head.address}:6379 {DEFAULT_MODEL} tp=1,pp=2 hold"
    process = made.start(head, line, log)
    try:
        found = wait_until(lambda: re.search(r"^\[\[.*\]\]", log.read_text(), re.M) or process.poll(), 120, log.read_text)
        places = json.loads(found[0])
        assert len({host for host, _pid in places}) == 2
        for host in made.hosts:
            [pid] = [pid for address, pid in places if address == host.address]
            seen = made.run(host, f"tr '\\0' '\\n' < /proc/{pid}/environ").splitlines()
            assert "NCCL_DEBUG=WARN" in seen
            assert f"HERE={host.name}" in seen
            assert not [each for each in seen if each.startswith("SECRET")]
    finally:
        process.kill()


def measured(made: Box, head: Host) -> Link:
    """The link between the hosts, as ``shardwright cluster --measure`` finds it."""
    told = made.run(head, f"RAY_AUTH_MODE=disabled shardwright cluster --measure --json --address {head.address}:6379")
    spec = ClusterSpec.model_validate_json(told)
    return spec.link(0, 1)


def throughput(made: Box, head: Host, layout: str, forced: str) -> float:
    """Tokens a second of all replicas together."""
    line = f"python -P {ROOT}/tests/hosts/throughput.py {head.address}:6379 {DEFAULT_MODEL} {layout} {forced}"
    told = made.run(head, f"RAY_AUTH_MODE=disabled {line}", timeout_s=240)
    return float(json.loads(told.strip().splitlines()[-1])["tokens_per_s"])


def predicted(link: Link, layout_text: str, forced: str) -> float:
    """What the link takes for a decode step of a replica's share of the requests."""
    layout = Layout.parse(layout_text)
    spec = checkpoint_header.read(Path(resolve(DEFAULT_MODEL).path))
    nodes = (NodeSpec(name="a", slots=2), NodeSpec(name="b", slots=2))
    cluster = ClusterSpec(nodes=nodes, links=(NodeLink(a="a", b="b", link=link),))
    step = StepShape.of(REQUESTS // layout.replicas, 1, context=16, dtype="float32")
    node_of_rank = [0, 0] if layout.world == 2 else [0, 0, 1, 1]
    assert bool(forced) == (layout.tp > 2)
    return busiest_seconds(link_loads(spec, layout, step, cluster, node_of_rank))
