"""An embedded cluster of several nodes: who sits where, what `status` and `cluster` say of it, and bundles without room."""

from __future__ import annotations

import json
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from actors.kv_transfer.nixl_transport import is_installed
from placement.nodes.hardware import ClusterSpec
from tests.ray.server import READY_S, Server, environment, finish, kill, marked, ready, run, serving, start, wait_until
from tests.ray.streaming import body
from tests.support.models.tiny_models import tiny

SOON_S = 30
OPEN = {"RAY_AUTH_MODE": "disabled"}
BUSY = "of 600 s: no room for 2 bundles of 2 CPU: the cluster is busy"

RESERVE = """
import threading, time
from cluster.embedded.local import EmbeddedShape, connect, disconnect
from cluster.replica.placement_group import reserve
from cluster.replica.settings import ReplicaSettings
from cluster.replica.placement_wait import PlacementError
from placement.checkpoint import header
from placement.layout.layout import Layout
from pathlib import Path

spec = header.read(Path({folder!r}))

def asked(layout, **more):
    options = {{"device": "cpu", "dtype": "bfloat16", "max_model_len": 10, **more}}
    return ReplicaSettings(model_path="", spec=spec, layout=Layout.parse(layout), **options)

def refused(settings):
    began = time.monotonic()
    try:
        reserve(settings)
    except PlacementError as error:
        return f"{{time.monotonic() - began:.1f}}|{{error}}"

cluster = connect(shape=EmbeddedShape(2, 1))
print("impossible|" + refused(asked("tp=2")))
print("no GPU|" + refused(asked("tp=1", device="cuda")))
print("missing|" + refused(asked("tp=2", nodes_wait_s=2, start_timeout_s=1)))
first = reserve(asked("pp=2"))
print("apart|" + str(len(set(first.nodes))) + "|" + str(first.are_whole()))
print("busy|" + refused(asked("tp=1", start_timeout_s=2)))
threading.Timer(2, first.free).start()
second = reserve(asked("pp=2", start_timeout_s=30))
print("freed|" + str(second.bundle_of_rank))
disconnect(cluster)
"""


RACKS = """
import sys
from ray.cluster_utils import Cluster

cluster = Cluster()
for index in range(2):
    only_head = {"include_dashboard": False} if index == 0 else {}
    labels = {"rack": f"r{index}", "shardwright/name": f"n{index}"}
    labels |= {"shardwright/pool": sys.argv[1 + index]} if sys.argv[1:] else {}
    cluster.add_node(num_cpus=2, object_store_memory=100 * 2**20, labels=labels, **only_head)
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""

ONE_SLOT = """
import sys
import ray
from ray.util.placement_group import placement_group

ray.init(sys.argv[1], logging_level="error", log_to_driver=False)
ray.get(placement_group([{"CPU": 1}]).ready())
print("taken", flush=True)
sys.stdin.read()
"""


@pytest.mark.long
def test_stages_sit_on_two_nodes_and_status_says_so(tmp_path: Path) -> None:
    mine = {"XDG_RUNTIME_DIR": str(tmp_path)}  # where a command finds the cluster of another
    folder = str(tiny("llama3").folder)
    with serving(folder, "--layout", "tp=2,pp=2", "--dtype", "float32", "--nodes", "2x4", env=mine) as server:
        alone = server.post("/v1/completions", body([1, 2, 3], 4))["choices"][0]["token_ids"]
        assert len(alone) == 4
        address = server.log.read_text().split("(Ray at ")[1].split(")")[0]
        told = run("status", "--json", env=mine)
        assert told.returncode == 0, told.stderr
        state = json.loads(told.stdout)
        assert state["application"] == "RUNNING"
        [replica] = next(each for each in state["deployments"] if each["name"] == "Engine")["replicas"]
        assert replica["state"] == "RUNNING"
        ranks = replica["ranks"]
        assert [rank["world_rank"] for rank in ranks] == [0, 1, 2, 3]
        assert [rank["coords"]["pp"] for rank in ranks] == [0, 0, 1, 1]
        nodes = [rank["node"] for rank in ranks]
        assert nodes[0] == nodes[1] != nodes[2] == nodes[3]
        assert set(nodes) == {"node0", "node1"}
        known = {process.pid for process in server.ranks()}
        assert {rank["pid"] for rank in ranks} == known
        assert {(rank["device"], rank["state"]) for rank in ranks} == {("cpu", "running")}
        text = run("status", env=mine).stdout
        assert "pp 1 attn_dp 0 cp 0 tp 1" in text
        seen = ClusterSpec.model_validate_json(run("cluster", "--json", "--measure", env=mine).stdout)
        assert [(node.name, node.slots) for node in seen.nodes] == [("node0", 4), ("node1", 4)]
        assert seen.link(0, 1).source == "measured"
        assert seen.link(0, 1).bytes_per_s > 1e6
        refused = run("status", "--address", address)
        assert refused.returncode == 2, "without the token nobody gets in"
        raylet_of(server, "node1").kill()
        wait_until(
            lambda: {rank.pid for rank in server.ranks()}.isdisjoint(known) and ready(server), READY_S, server.log.read_text
        )
        assert server.post("/v1/completions", body([1, 2, 3], 4))["choices"][0]["token_ids"] == alone, "all on the other node"
    none = run("status", env=mine)
    assert none.returncode == 2
    assert "no shardwright serve runs" in none.stderr


def test_what_cannot_be_placed_is_refused_before_anything_starts() -> None:
    began = time.monotonic()
    refused = run("serve", str(tiny("llama3").folder), "--nodes", "2x1", "--layout", "tp=2")
    assert time.monotonic() - began < SOON_S
    assert refused.returncode == 2
    assert "tp=2 does not fit inside one node" in refused.stderr
    assert "has 1 slots" in refused.stderr
    wrong = run("serve", str(tiny("llama3").folder), "--nodes", "2by1")
    assert wrong.returncode == 2
    assert "as in 2x4" in wrong.stderr


@pytest.mark.long
def test_impossible_is_told_at_once_and_busy_waits() -> None:
    done = run("-c", RESERVE.format(folder=str(tiny("llama3").folder)), command=(sys.executable,), timeout_s=120)
    assert done.returncode == 0, done.stderr[-3000:]
    told = {line.split("|")[0]: line.split("|")[1:] for line in done.stdout.splitlines() if "|" in line}
    assert float(told["impossible"][0]) < 2
    assert "asks for 2 CPU" in told["impossible"][1]
    assert "has 1 CPU" in told["impossible"][1]
    assert float(told["no GPU"][0]) < 2
    assert "no node has the resource GPU. Resource names seen: CPU, memory, object_store_memory" in told["no GPU"][1]
    assert 2 <= float(told["missing"][0]) < 10
    assert "nodes are missing" in told["missing"][1]
    assert told["apart"] == ["2", "True"]
    assert 2 <= float(told["busy"][0]) < 10
    assert "no room for 1 bundle of 1 CPU: the cluster is busy" in told["busy"][1]
    assert told["freed"] == ["(0, 1)"]


@pytest.mark.long
def test_engines_that_start_together_do_not_meet() -> None:
    """Four pipelines over the same two nodes at the same instant, twice: each store is its own, no port was guessed."""
    options = ["--layout", "pp=2,replicas=4", "--dtype", "float32", "--nodes", "2x4", "--threads", "1", "--kv-bytes", "64MiB"]
    with serving(str(tiny("llama3").folder), *options) as server:
        first = server.ranks()
        assert len(first) == 8
        before = [asked(server, seed) for seed in range(8)]
        for rank in first:
            rank.kill()
        wait_until(lambda: len([rank for rank in server.ranks() if rank not in first]) == 8, 60, lambda: f"{server.ranks()}")
        wait_until(lambda: len(server.gauges()) == 4 and server.health() == 200, 60, lambda: f"{server.gauges()}")
        again = server.ranks()
        assert [asked(server, seed) for seed in range(8)] == before
        assert server.ranks() == again, "no second try"


@pytest.mark.long
def test_serve_waits_for_a_busy_cluster_and_tells_which_slow_link_the_layout_crosses(tmp_path: Path) -> None:
    """Two racks, on a cluster that is there before the command and after it; somebody else has one slot."""
    model = str(tiny("llama3").folder)
    with racks() as address:
        no_gpu = run("serve", model, "--device", "cuda", *address, env=OPEN)
        assert no_gpu.returncode == 2
        assert "no node has the resource GPU. Resource names seen: CPU, memory, object_store_memory" in no_gpu.stderr
        with one_slot_taken(address[1]) as free:
            server = start(model, "--layout", "tp=2,pp=2", *address, env=OPEN, log=tmp_path / "log")
            try:
                wait_until(lambda: BUSY in server.log.read_text(), READY_S, server.log.read_text)
                assert server.health() != 200
                assert server.process.poll() is None
                free()
                wait_until(lambda: ready(server), READY_S, server.log.read_text)
                told = server.log.read_text()
                assert re.search(r"stage boundary \(pp\) crosses (n0 -> n1|n1 -> n0)", told), told
                assert "slow link, assumed 10 Gbit/s" in told
                second = run("serve", model, *address, "--port", "0", env=OPEN)
                assert second.returncode == 2
                assert "an application shardwright is RUNNING on this cluster already" in second.stderr
                assert server.health() == 200, "it is not that of the second, which has ended"
                finish(server)
            finally:
                kill(server.process, server.mark)
        refused = run("serve", model, "--layout", "tp=4", *address, env=OPEN)
        assert refused.returncode == 2
        assert "tp=4 does not fit inside one node: the largest, n0, has 2 slots" in refused.stderr
        idle = run("status", *address, env=OPEN)
        assert (idle.returncode, idle.stdout) == (1, "application NOT_STARTED\n")


@pytest.mark.long
@pytest.mark.skipif(not is_installed(), reason="NIXL is not installed: pip install 'shardwright[pools]'")
def test_pools_sit_on_the_nodes_that_are_kept_for_them() -> None:
    """Their engines too. They are of one size: room alone would not tell them apart."""
    with racks("decode", "prefill") as address:
        with serving(str(tiny("llama3").folder), "--prefill", "tp=2", "--decode", "pp=2", *address, env=OPEN) as server:
            deployments = json.loads(run("status", "--json", *address, env=OPEN).stdout)["deployments"]
            replicas = {each["name"]: each["replicas"][0] for each in deployments}
            nodes = {name: {each["node"], *(rank["node"] for rank in each["ranks"])} for name, each in replicas.items()}
            assert nodes["Prefill"] == {"n1"}
            assert nodes["Engine"] == {"n0"}
            assert "crosses" not in server.log.read_text()
        refused = run("serve", str(tiny("llama3").folder), "--prefill", "*1", "--decode", "pp=3", *address, env=OPEN)
        assert refused.returncode == 2
        assert "only 2 of 3 bundles" in refused.stderr, "n1 has room for one more, but not for this pool"


def raylet_of(server: Server, node: str) -> psutil.Process:
    """The process that is an embedded node."""
    [found] = [each for each in marked(server.mark) if each.name() == "raylet" and node in " ".join(each.cmdline())]
    return found


@contextmanager
def racks(*pools: str) -> Iterator[list[str]]:
    """Two nodes of two slots, n0 and n1, in racks of their own, each kept for one of `pools`, if any: ``--address``."""
    mark, line = secrets.token_hex(8), [sys.executable, "-c", RACKS, *pools]
    process = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(mark, OPEN))
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        yield ["--address", process.stdout.readline().strip()]
        process.stdin.close()
        process.wait(60)
    finally:
        kill(process, mark)


@contextmanager
def one_slot_taken(address: str) -> Iterator[Callable[[], object]]:
    """Somebody else's program on the cluster, which has a slot until it is told to end."""
    mark, line = secrets.token_hex(8), [sys.executable, "-c", ONE_SLOT, address]
    process = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(mark, OPEN))
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "taken\n"
        yield process.stdin.close
    finally:
        kill(process, mark)


def asked(server: Server, seed: int) -> list[int]:
    """Tokens of one answer."""
    tokens: list[int] = server.post("/v1/completions", body([seed + 1, 2], 6))["choices"][0]["token_ids"]
    return tokens
