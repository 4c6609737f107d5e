"""Two hosts of two slots on a link of 200 Mbit/s: what the traffic account predicts is what is measured."""

from __future__ import annotations

import itertools
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from placement.cost.crossings import busiest_seconds, link_loads
from placement.cost.step_shape import StepShape
from placement.layout.layout import Layout
from placement.model.spec import ModelSpec
from placement.nodes.hardware import ClusterSpec, NodeSpec
from placement.nodes.links import Link, NodeLink
from serve_app.deployment.catalog import DEFAULT_MODEL
from tests.hosts.box import ROOT, Box, Host, box, need_hosts
from tests.hosts.throughput import REQUESTS, SPLIT
from tests.hosts.up_cluster import wait_until
from tests.support.models.tiny_models import TinyModel, tiny

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

RATE = "200mbit"
BYTES_PER_S = 25e6
SETTING = "RAY_AUTH_MODE=disabled RAY_USAGE_STATS_ENABLED=0 RAY_worker_niceness=0"
START = f"{SETTING} ray start --num-cpus=2 --num-gpus=0 --object-store-memory=200000000"
CLEAR = 0.25
"""Of a step of the faster one: no gap that is predicted is smaller, so that noise does not turn the order."""
ROUNDS = 2
CASES = {"two replicas": "tp=2,replicas=2", "stages apart": "tp=2,pp=2", "tp across": f"{SPLIT}tp=4"}


@pytest.fixture(scope="module")
def made() -> Iterator[Box]:
    need_hosts()
    with box(2) as made:
        head, other = made.hosts
        # Each node has a value of its own for one variable, as interfaces have.
        made.run(head, f"HERE=h1 {START} --head --port=6379 --include-dashboard=false --node-ip-address={head.address}")
        join(made, f"HERE=h2 {START}", other.address)
        for host in made.hosts:
            host.slow(RATE)
        yield made


def test_the_order_predicted_is_the_order_measured(made: Box) -> None:
    """Wide hidden states, little work: what crosses the link is most of a step wherever something does."""
    head, model = made.hosts[0], wide()
    link = measured(made, head)
    assert 0.4 * BYTES_PER_S < link.bytes_per_s < 1.6 * BYTES_PER_S
    told = throughput(made, head, model.folder)
    costs = {name: predicted(link, model.spec, layout) for name, layout in CASES.items()}
    print(json.dumps({"link": link.model_dump(), "told": told, "link_seconds_a_step": costs}, indent=1))
    here, there = (host.address for host in made.hosts)
    assert sorted(told["two replicas"]["hosts"]) == [[here] * 2, [there] * 2]
    assert sorted(told["stages apart"]["hosts"][0][::2]) == [here, there], "a stage on each"
    assert told["stages apart"]["hosts"][0][::2] == told["stages apart"]["hosts"][0][1::2], "tp inside"
    assert sorted(told["tp across"]["hosts"][0][1:3]) == [here, there], "tp over the link"
    speeds = {name: each["tokens_per_s"] for name, each in told.items()}
    order = sorted(costs, key=costs.__getitem__)
    for faster, slower in itertools.pairwise(order):
        assert costs[slower] - costs[faster] > CLEAR * REQUESTS / speeds[faster], f"too near: {faster}, {slower}"
    assert sorted(speeds, key=lambda name: -speeds[name]) == order


def test_ranks_take_what_is_listed_from_the_shell_and_the_rest_from_their_node(made: Box, tmp_path: Path) -> None:
    head = made.hosts[0]
    shell = "RAY_AUTH_MODE=disabled NCCL_DEBUG=WARN HERE=driver SECRET=mine"
    log = tmp_path / "log"
    line = f"{shell} python -P {ROOT}/tests/hosts/throughput.py {head.address}:6379 {DEFAULT_MODEL} hold tp=1,pp=2"
    process = made.start(head, line, log)
    try:
        found = wait_until(lambda: re.search(r"^\[\[.*\]\]", log.read_text(), re.M) or process.poll(), 120, log.read_text)
        locations = json.loads(found[0])
        assert len({host for host, _pid in locations}) == 2
        for host in made.hosts:
            [pid] = [pid for address, pid in locations if address == host.address]
            seen = made.run(host, f"tr '\\0' '\\n' < /proc/{pid}/environ").splitlines()
            assert "NCCL_DEBUG=WARN" in seen
            assert f"HERE={host.name}" in seen
            assert not [each for each in seen if each.startswith("SECRET")]
    finally:
        process.kill()


def test_a_host_whose_name_is_loopback_to_itself_is_refused_with_the_variable_that_mends_it(made: Box, tmp_path: Path) -> None:
    """As Debian's own /etc/hosts has it. Ray takes a name for an address, and the other hosts know better what it means."""
    other = made.hosts[1]
    names = other.folder / "etc" / "hosts"
    names.write_text(names.read_text().replace(f"{other.address} {other.name}", f"127.0.1.1 {other.name}"))
    made.run(other, "ray stop --force")
    join(made, START, other.name)
    refused = told(made, tmp_path / "refused")
    assert re.search(r"rank \d on h2 reports the loopback address 127\.0\.1\.1 .* GLOO_SOCKET_IFNAME set", refused), refused
    made.run(other, "ray stop --force")
    join(made, f"GLOO_SOCKET_IFNAME=e0 {START}", other.name)
    started = told(made, tmp_path / "started")
    assert {host for host, _pid in json.loads(started)} == {host.address for host in made.hosts}, started


def join(made: Box, start: str, address: str) -> None:
    """The second host's Ray joins the first's, under that address."""
    head, other = made.hosts
    made.run(other, f"{start} --address={head.address}:6379 --node-ip-address={address}")
    alive = "import ray; ray.init('auto', logging_level='error'); print(sum(each['Alive'] for each in ray.nodes()))"
    line = f"RAY_AUTH_MODE=disabled python -c {shlex.quote(alive)}"
    wait_until(lambda: made.run(head, line).split()[-1] == "2", 60, lambda: "the second host does not join")


def told(made: Box, log: Path) -> str:
    """Where the ranks of two stages are, or the error."""
    head = made.hosts[0]
    line = f"python -P {ROOT}/tests/hosts/throughput.py {head.address}:6379 {DEFAULT_MODEL} hold tp=1,pp=2"
    process = made.start(head, f"RAY_AUTH_MODE=disabled {line}", log)
    try:
        found = wait_until(lambda: re.search(r"^\[\[.*\]\]", log.read_text(), re.M) or process.poll(), 120, log.read_text)
        return str(found[0]) if isinstance(found, re.Match) else log.read_text()
    finally:
        process.kill()


def measured(made: Box, head: Host) -> Link:
    """The link between the hosts, as ``shardwright cluster --measure`` finds it."""
    told = made.run(head, f"RAY_AUTH_MODE=disabled shardwright cluster --measure --json --address {head.address}:6379")
    spec = ClusterSpec.model_validate_json(told)
    return spec.link(0, 1)


def wide() -> TinyModel:
    """A hidden state of 32 KiB a token, and 22 million parameters."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64}
    return tiny("llama2", hidden_size=8192, intermediate_size=64, num_hidden_layers=2, **heads)


def throughput(made: Box, head: Host, model: Path) -> dict[str, dict[str, Any]]:
    """Hosts of ranks and tokens a second of each case, measured in turn."""
    line = f"python -P {ROOT}/tests/hosts/throughput.py {head.address}:6379 {model} {ROUNDS} {' '.join(CASES.values())}"
    told = made.run(head, f"RAY_AUTH_MODE=disabled {line}", timeout_s=400)
    return dict(zip(CASES, json.loads(told.strip().splitlines()[-1]), strict=True))


def predicted(link: Link, spec: ModelSpec, layout_text: str) -> float:
    """What the link takes for a decode step of a replica's share of the requests."""
    layout = Layout.parse(layout_text.removeprefix(SPLIT))
    nodes = (NodeSpec(name="a", slots=2), NodeSpec(name="b", slots=2))
    cluster = ClusterSpec(nodes=nodes, links=(NodeLink(a="a", b="b", link=link),))
    step = StepShape.of(REQUESTS // layout.replicas, 1, context=4, dtype="float32")
    return busiest_seconds(link_loads(spec, layout, step, cluster, [0, 0, 1, 1][: layout.world]))
