"""Runs on a host, as a driver of the Ray cluster there: decode throughput of one placement. Prints a line of JSON.

    python throughput.py ADDRESS MODEL LAYOUT [forced|hold]

`forced` splits each tp group over both hosts, which the product never does: one bundle on each, two ranks in each bundle.
`hold` measures nothing: it prints address and process of each rank, and stays until it is ended.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time

import ray
from ray.util.placement_group import placement_group

from actors.messages import GenerateRequest, SamplingParams, TokenEvent
from cluster import local, seats
from cluster.replica import Replica
from cluster.seats import NODE_ID, Seats
from cluster.settings import ReplicaSettings, shared_variables
from serve_app.settings import ServeArgs, replica_settings

REQUESTS = 48
TOKENS = 8
TURNS = 3
"""The best counts: others use this machine too."""


def main(address: str, model: str, layout: str, how: str = "") -> None:
    """Start the replicas, warm them up, and time the same requests, dealt over them."""
    local.connect(address)
    args = ServeArgs(model=model, layout=layout, dtype="float32", threads_per_rank=1, max_model_len=512, kv_bytes=2**28)
    settings = replica_settings(args, "cpu").model_copy(update={"environment": shared_variables(os.environ)})
    if how == "forced":
        seats.take = split_seats  # type: ignore[assignment]
    replicas = [Replica(settings, f"bench{index}") for index in range(settings.layout.replicas)]
    if how == "hold":
        print(json.dumps([(place.host, place.pid) for place in replicas[0]._ranks.places]), flush=True)
        threading.Event().wait()
    generate(replicas, "warm", 4)
    seconds = min(timed(replicas, str(turn)) for turn in range(TURNS))
    print(json.dumps({"layout": layout, "how": how, "tokens_per_s": REQUESTS * TOKENS / seconds}), flush=True)
    for replica in replicas:
        replica.close()


def timed(replicas: list[Replica], name: str) -> float:
    """Seconds for all requests."""
    began = time.perf_counter()
    generate(replicas, f"timed{name}", TOKENS)
    return time.perf_counter() - began


def generate(replicas: list[Replica], name: str, tokens: int) -> None:
    """All requests at once, to their ends."""
    left = threading.Semaphore(0)
    errors: list[str] = []

    def deliver(event: TokenEvent) -> None:
        if event.finish is not None:
            errors.extend([event.error or event.finish] if event.finish != "length" else [])
            left.release()

    for index in range(REQUESTS):
        request = GenerateRequest(
            request_id=f"{name}{index}",
            prompt=[index + 5, 9, 42],
            max_tokens=tokens,
            sampling=SamplingParams(temperature=0),
        )
        replicas[index % len(replicas)].engine.submit(request, deliver)
    for _ in range(REQUESTS):
        assert left.acquire(timeout=240), "a request did not end"
    assert not errors, errors


def split_seats(settings: ReplicaSettings, home: str | None = None) -> Seats:
    """Half of the ranks on each of two nodes, whatever groups they are in."""
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= 2]
    half = settings.layout.world // 2
    bundles = [{"CPU": float(half)}] * 2
    group = placement_group(bundles, bundle_label_selector=[{NODE_ID: node} for node in nodes[:2]])
    assert group.wait(30)
    return Seats(group, tuple(rank // half for rank in range(settings.layout.world)), tuple(nodes[:2]))


if __name__ == "__main__":
    main(*sys.argv[1:])
