"""`ray up` for real against three hosts over ssh, then serve, chat, and down; and a host whose link is cut while it serves."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import yaml

from actors.kv_transfer.nixl_transport import is_installed
from serve_app.commands.render_command import RenderArgs, render
from tests.hosts.box import need_hosts
from tests.hosts.up_cluster import PORT, UpCluster, healthy, slots, up_cluster, wait_until
from tests.ray.streaming import Stream, body
from tests.support.models.tiny_models import tiny

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

POOLS = ("tp=2", "pp=2")
STREAMS = 32
LONG = 30_000
LOST_S = 30
ON_THEIR_WAY = 50
"""More events of a stream than can be on their way when the link is cut."""
BACK_S = 240


@pytest.fixture(scope="module")
def cluster() -> Iterator[UpCluster]:
    need_hosts()
    with up_cluster(2, *POOLS) as made:  # workers kept for a pool each, which says nothing to layouts of one pool
        yield made


def test_a_chat_with_stages_on_two_hosts(cluster: UpCluster) -> None:
    with cluster.serving("smollm2-135m", "--layout", "tp=2,pp=2"):
        question = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
        answer = httpx.post(f"{cluster.url}/v1/chat/completions", json={**question, "max_tokens": 16}, timeout=120)
        assert answer.status_code == 200, answer.text
        assert "Paris" in answer.json()["choices"][0]["message"]["content"]
        [replica] = replicas(cluster)
        nodes = [rank["node"] for rank in replica["ranks"]]
        assert nodes[0] == nodes[1] != nodes[2] == nodes[3]
        assert set(nodes) == {host.address for host in cluster.workers}, "the head does no model work"
        assert replica["node"] == nodes[0], "an engine lives with its first stage"


def test_every_worker_has_found_the_pool_it_is_kept_for(cluster: UpCluster) -> None:
    told = cluster.made.run(cluster.head, f"RAY_AUTH_MODE=token shardwright cluster --json --address {cluster.ray_address}")
    pools = {node["name"]: node.get("pool") for node in json.loads(told)["nodes"]}
    decode, prefill = (host.address for host in cluster.workers)
    assert pools == {cluster.head.address: None, decode: "decode", prefill: "prefill"}


@pytest.mark.skipif(not is_installed(), reason="NIXL is not installed: pip install 'shardwright[pools]'")
def test_a_prompt_goes_from_one_host_to_the_other(cluster: UpCluster) -> None:
    with cluster.serving(str(tiny("llama3").folder), "--prefill", POOLS[0], "--decode", POOLS[1], "--dtype", "float32"):
        decode, prefill = (host.address for host in cluster.workers)
        assert nodes_of(cluster, "Engine") == {decode}
        assert nodes_of(cluster, "Prefill") == {prefill}
        answer = httpx.post(f"{cluster.url}/v1/completions", json=body([*range(1, 40)], 4), timeout=120).json()
        assert answer["usage"]["completion_tokens"] == 4
        metrics = httpx.get(f"{cluster.url}/metrics", timeout=30).text.splitlines()
        received = [float(line.split()[-1]) for line in metrics if line.startswith("shardwright_engine_handoff_received{")]
        assert sum(received) == 2, "one before it was ready, and this one"


def test_streams_of_a_host_go_on_at_the_other_when_its_link_is_cut(cluster: UpCluster) -> None:
    model = str(tiny("llama3", max_position_embeddings=2**16).folder)
    options = ["--layout", "tp=2,replicas=2", "--dtype", "float32", "--max-model-len", "40000"]
    with cluster.serving(model, *options, "--kv-bytes", "1GiB"):
        before = {replica["id"]: replica["node"] for replica in replicas(cluster)}
        assert sorted(before.values()) == [host.address for host in cluster.workers], "one replica on each"
        streams = [Stream(cluster.url, body([index, 8], LONG)).wait_for(1) for index in range(STREAMS)]
        victim = cluster.workers[1]
        victim.cut()
        cut_at = time.monotonic()
        counts = [len(stream.data) for stream in streams]
        wait_until(
            lambda: all(len(stream.data) > count + ON_THEIR_WAY for stream, count in zip(streams, counts, strict=True)),
            LOST_S,
            lambda: f"{[len(stream.data) - count for stream, count in zip(streams, counts, strict=True)]}",
        )
        print(f"all streams went on within {time.monotonic() - cut_at:.1f} s of the cut")
        assert not any(stream.ended for stream in streams)
        assert healthy(cluster.url)
        for stream in streams:
            stream.leave()
        for index in (0, 1):
            answer = httpx.post(f"{cluster.url}/v1/completions", json=body([index, 8], 200), timeout=120).json()
            assert streams[index].tokens_so_far[:200] == answer["choices"][0]["token_ids"][: len(streams[index].tokens_so_far)]
        victim.mend()
        wait_until(lambda: slots(cluster) == 4, BACK_S, lambda: f"{slots(cluster)} slots")
        wait_until(lambda: both_run(cluster), BACK_S, lambda: json.dumps(replicas(cluster)))
        assert sorted(replica["node"] for replica in replicas(cluster)) == sorted(before.values())


def test_a_deployed_file_serves_on_every_worker_and_outlives_its_controller_and_a_proxy(cluster: UpCluster) -> None:
    """The Serve file of the KubeRay target, with which the head is not needed for answers."""
    model = str(tiny("llama3", max_position_embeddings=2**16).folder)
    with cluster.deployed(serve_file(model, "tp=2,replicas=2")):
        urls = [f"http://{host.address}:{PORT}" for host in cluster.workers]
        for url in urls:
            wait_until(
                lambda url=url: healthy(url), 120, lambda url=url: f"{url} is not healthy: {cluster.shardwright('status')}"
            )
        assert [each["state"] for each in replicas(cluster)] == ["RUNNING"] * 2
        before, first = {each["id"] for each in replicas(cluster)}, controller(cluster)
        streams = [Stream(url, body([index, 8], 400)) for index in range(25) for url in urls]
        for stream in streams:
            stream.wait_for(1)
        cluster.made.run(cluster.head, "pkill -KILL -f '^ray::ServeController'")
        cluster.made.run(cluster.workers[1], "pkill -KILL -f '^ray::ProxyActor'")
        for stream in streams[::2]:
            assert len(stream.finish().tokens) == 400, "the other proxy's streams finish"
        for stream in streams[1::2]:
            stream.finish()
        for url in urls:
            wait_until(lambda url=url: healthy(url), 60, lambda url=url: f"{url} does not come back")
        wait_until(lambda: {each["id"] for each in replicas(cluster)} == before, 60, lambda: json.dumps(replicas(cluster)))
        assert controller(cluster) != first, "it has returned, as another process"
        for url in urls:
            answer = httpx.post(f"{url}/v1/completions", json=body([1, 8], 4), timeout=60)
            assert answer.json()["usage"]["completion_tokens"] == 4, answer.text


def test_down_ends_the_head(cluster: UpCluster) -> None:
    """The last of this file: nothing is left of the cluster but workers, which end when they find no head."""
    cluster.down()
    assert cluster.made.run(cluster.head, "pgrep -c 'gcs_server|raylet' || true").strip() == "0"


def serve_file(model: str, layout: str) -> str:
    """What `render --target kuberay` puts into the service."""
    args = RenderArgs.model_validate({"model": model, "layout": layout, "target": "kuberay", "slots": 2, "memory": "4GiB"})
    [service] = render(args)["service.yaml"]
    config: dict[str, Any] = yaml.safe_load(service["spec"]["serveConfigV2"])
    more = {"dtype": "float32", "max_model_len": 1000, "kv_bytes": "256MiB", "threads_per_rank": 1}
    config["applications"][0]["args"] |= more
    return yaml.safe_dump(config)


def nodes_of(cluster: UpCluster, deployment: str) -> set[str]:
    """Where its replicas and their ranks are."""
    found = replicas(cluster, deployment)
    return {each["node"] for each in found} | {rank["node"] for each in found for rank in each["ranks"]}


def replicas(cluster: UpCluster, deployment: str = "Engine") -> list[dict[str, Any]]:
    """A deployment's replicas, of ``shardwright status --json``."""
    told = cluster.made.run(
        cluster.head, f"RAY_AUTH_MODE=token shardwright status --json --address {cluster.ray_address} || true"
    )
    deployments = json.loads(told)["deployments"]
    found: list[dict[str, Any]] = next(each for each in deployments if each["name"] == deployment)["replicas"]
    return found


def controller(cluster: UpCluster) -> int:
    """Serve's controller on the head: its process."""
    return int(cluster.made.run(cluster.head, "pgrep -f '^ray::ServeController'"))


def both_run(cluster: UpCluster) -> bool:
    return [(each["state"], len(each["ranks"])) for each in replicas(cluster)] == [("RUNNING", 2)] * 2
