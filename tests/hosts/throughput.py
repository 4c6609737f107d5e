"""Runs on a host, as a driver of the Ray cluster there: decode throughput of some placements, in turn. Prints a line of JSON.

    python throughput.py ADDRESS MODEL ROUNDS LAYOUT...       each LAYOUT, ROUNDS times; of each, the best round counts
    python throughput.py ADDRESS MODEL hold LAYOUT            prints address and process of each rank, until it is ended

`split:LAYOUT` splits each tp group over both hosts, which the product never does: one bundle on each, two ranks in each bundle.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

import ray
from ray.util.placement_group import placement_group

from actors.wire.requests import GenerateRequest, SamplingParams, TokenEvent
from cluster.embedded import local
from cluster.replica import placement_group as placement_group_module
from cluster.replica.placement_group import NODE_ID, ReservedBundles
from cluster.replica.replica import Replica
from cluster.replica.settings import ReplicaSettings, shared_variables
from serve_app.deployment.replica_settings import replica_settings
from serve_app.deployment.settings import ServeArgs

REQUESTS = 48
TOKENS = 8
TURNS = 2
"""Of a round; the best counts: others use this machine too."""
SPLIT = "split:"


def main(address: str, model: str, how: str, *layouts: str) -> None:
    """Measure the layouts, or hold the only one."""
    local.connect(address)
    if how == "hold":
        with running(model, layouts[0]) as [replica]:
            print(json.dumps([(location.host, location.pid) for location in replica._ranks.locations]), flush=True)
            threading.Event().wait()
    rounds = [[measured(model, layout) for layout in layouts] for _ in range(int(how))]
    print(json.dumps([best(of_layout) for of_layout in zip(*rounds, strict=True)]), flush=True)


def best(rounds: Sequence[dict[str, object]]) -> dict[str, object]:
    """The fastest round of a layout, with the speeds of all."""
    speeds = [each["tokens_per_s"] for each in rounds]
    return {**max(rounds, key=lambda each: float(str(each["tokens_per_s"]))), "rounds": speeds}


def measured(model: str, layout: str) -> dict[str, object]:
    """Where the ranks of each replica are, and the tokens a second of all replicas together."""
    with running(model, layout) as replicas:
        hosts = [[location.host for location in replica._ranks.locations] for replica in replicas]
        generate(replicas, "warm", 2)
        seconds = min(timed(replicas, str(turn)) for turn in range(TURNS))
        return {"layout": layout, "hosts": hosts, "tokens_per_s": REQUESTS * TOKENS / seconds}


@contextmanager
def running(model: str, layout: str) -> Iterator[list[Replica]]:
    """The replicas of a layout, for the length of a block."""
    whole = layout.removeprefix(SPLIT)
    args = ServeArgs(model=model, layout=whole, dtype="float32", threads_per_rank=1, max_model_len=64, kv_bytes=2**26)
    settings = replica_settings(args, "cpu").model_copy(update={"environment": shared_variables(os.environ)})
    reserve = placement_group_module.reserve if whole == layout else split_bundles
    with patch.object(placement_group_module, "reserve", reserve):
        replicas = [Replica(settings, f"bench{index}") for index in range(settings.layout.replicas)]
    try:
        yield replicas
    finally:
        for replica in replicas:
            replica.close()


def timed(replicas: list[Replica], name: str) -> float:
    """Seconds for all requests."""
    began = time.perf_counter()
    generate(replicas, f"timed{name}", TOKENS)
    return time.perf_counter() - began


def generate(replicas: list[Replica], name: str, tokens: int) -> None:
    """All requests at once, to their ends. A prompt is one token, so that every step is one of decoding."""
    left = threading.Semaphore(0)
    errors: list[str] = []

    def deliver(event: TokenEvent) -> None:
        if event.finish is not None:
            errors.extend([event.error or event.finish] if event.finish != "length" else [])
            left.release()

    for index in range(REQUESTS):
        sampling = SamplingParams(temperature=0)
        request = GenerateRequest(request_id=f"{name}{index}", prompt=[index + 5], max_tokens=tokens, sampling=sampling)
        replicas[index % len(replicas)].engine.submit(request, deliver)
    for _ in range(REQUESTS):
        assert left.acquire(timeout=240), "a request did not end"
    assert not errors, errors


def split_bundles(settings: ReplicaSettings, home: str | None = None) -> ReservedBundles:
    """Half of the ranks on each of two nodes, whatever groups they are in."""
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= 2]
    half = settings.layout.world // 2
    bundles = [{"CPU": float(half)}] * 2
    group = placement_group(bundles, bundle_label_selector=[{NODE_ID: node} for node in nodes[:2]])
    assert group.wait(30)
    return ReservedBundles(group, tuple(rank // half for rank in range(settings.layout.world)), tuple(nodes[:2]))


if __name__ == "__main__":
    main(*sys.argv[1:])
