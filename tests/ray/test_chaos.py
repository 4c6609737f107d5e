"""Ranks and replicas are killed and frozen at random while 64 clients stream: no accepted request is lost, cut or changed.

``SHARDWRIGHT_CHAOS_S=600`` runs each case for ten minutes.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from itertools import cycle
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from actors.kv_transfer.nixl_transport import is_installed
from tests.ray.server import Server, serving, wait_until
from tests.ray.streaming import body
from tests.support.models.tiny_models import tiny

SECONDS = float(os.environ.get("SHARDWRIGHT_CHAOS_S", "45"))
pytestmark = [pytest.mark.long, pytest.mark.timeout(SECONDS + 400)]

CLIENTS, EVERY_S, BACK_S, STEP_TIMEOUT_S = 64, 15.0, 90.0, 5
POOLS = ["--prefill", "tp=2", "--decode", "tp=2*2"]
needs_nixl = pytest.mark.skipif(not is_installed(), reason="NIXL is not installed: pip install 'shardwright[pools]'")


@pytest.mark.parametrize(
    "layout", [["--layout", "tp=2,replicas=2"], pytest.param(POOLS, marks=needs_nixl)], ids=["one", "pools"]
)
def test_no_accepted_request_is_lost_or_changed(layout: list[str]) -> None:
    draw, before = random.Random(8), shared_memory()
    asked = [questions(draw, number) for number in range(24)]
    options = ("--dtype", "float32", "--threads", "1", "--max-model-len", "256", "--step-timeout", str(STEP_TIMEOUT_S))
    with serving(str(tiny("llama3").folder), *layout, *options) as server:
        expected = [server.post("/v1/completions", each)["choices"][0]["token_ids"] for each in asked]
        replicas = server.client.get("/health").json()["replicas"]
        clients = Clients(server.url, asked, expected)
        with clients:
            back_after = list(disturb(server, draw, replicas))
        print(f"{clients.counts}; faults: {len(back_after)}; seconds until all was back: {back_after}")
        print(f"replayed: {server.service_gauge('requests_replayed'):.0f}")
        assert clients.wrong == []
        assert clients.counts["whole"] > CLIENTS
        assert server.service_gauge("requests_replayed") > 0
        assert server.service_gauge("requests_given_up") == 0
        wait_until(lambda: held_blocks(server) == 0, 30, lambda: f"{server.gauges()}")
    wait_until(lambda: shared_memory() <= before, 10, lambda: f"left in /dev/shm: {shared_memory() - before}")


def questions(draw: random.Random, number: int) -> dict[str, Any]:
    """A greedy request, or one that is sampled with a seed."""
    sampling = {"temperature": 1.0, "seed": number, "top_p": 0.9, "frequency_penalty": 0.3} if number % 3 == 2 else {}
    return body([draw.randrange(1, 100) for _ in range(draw.randint(1, 60))], draw.randint(40, 190), **sampling)


def disturb(server: Server, draw: random.Random, replicas: int) -> Iterator[float]:
    """Harm something every 15 s or as soon as all is well again. Yields the seconds until all was well."""
    ends_at = time.monotonic() + SECONDS
    for kind in cycle(("kill a replica", "kill a rank", "freeze a rank")):
        if time.monotonic() >= ends_at:
            return
        harmed_at = time.monotonic()
        harm(server, kind, draw)
        wait_until(lambda: is_whole(server, replicas), BACK_S, lambda: f"not back: {server.client.get('/health').text}")
        yield round(time.monotonic() - harmed_at, 1)
        time.sleep(max(0.0, min(harmed_at + EVERY_S, ends_at) - time.monotonic()))


def harm(server: Server, kind: str, draw: random.Random) -> None:
    """Kill or freeze a rank, or kill a replica's process."""
    found = (
        server.ranks()
        if "rank" in kind
        else [each for each in server.named("ray::ServeReplica") if "Ingress" not in title(each)]
    )
    victim = draw.choice(sorted(found, key=lambda each: each.pid))
    print(f"{kind}: {title(victim).strip()} {victim.pid}")
    with suppress(psutil.NoSuchProcess):
        victim.send_signal(signal.SIGSTOP if "freeze" in kind else signal.SIGKILL)
        if "kill" in kind:
            victim.wait(10)
        else:
            # Until its replica has noticed: the service counts as whole before that.
            wait_until(lambda: not victim.is_running(), STEP_TIMEOUT_S + 20, lambda: f"{victim} is still frozen")


def title(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def is_whole(server: Server, replicas: int) -> bool:
    with suppress(httpx.TransportError):
        found = server.client.get("/health").json()
        return bool(found["status"] == "ok" and found["replicas"] == replicas)
    return False


def held_blocks(server: Server) -> float:
    return sum(server.gauge(name) * sign for name, sign in (("total_blocks", 1), ("free_blocks", -1), ("cached_blocks", -1)))


def shared_memory() -> set[str]:
    """Segments in /dev/shm, other than those of Ray's own object store."""
    return {each.name for each in Path("/dev/shm").iterdir() if "plasma" not in each.name}


class Clients:
    """Threads that ask one question after the other and compare each stream with the answer of a quiet server."""

    def __init__(self, url: str, asked: list[dict[str, Any]], expected: list[list[int]]) -> None:
        self._url, self._asked, self._expected = url, asked, expected
        self.counts, self.wrong = Counter[str](), list[str]()
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(number,), daemon=True) for number in range(CLIENTS)]

    def __enter__(self) -> None:
        for thread in self._threads:
            thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(120)
        self.wrong += [f"a client got no end: {thread.name}" for thread in self._threads if thread.is_alive()]

    def _run(self, number: int) -> None:
        draw = random.Random(number)
        with httpx.Client(base_url=self._url, timeout=120) as client:
            while not self._stop.is_set():
                at = draw.randrange(len(self._asked))
                try:
                    found = self._ask(client, at)
                except httpx.TransportError as error:
                    found = repr(error)
                self.counts[found if found in ("whole", "refused") else "wrong"] += 1
                if found == "refused":
                    time.sleep(0.5)
                elif found != "whole":
                    self.wrong.append(f"question {at}: {found}")

    def _ask(self, client: httpx.Client, at: int) -> str:
        tokens: list[int] = []
        with client.stream("POST", "/v1/completions", json=self._asked[at] | {"stream": True}) as response:
            if response.status_code in (429, 503):
                return "refused"
            if response.status_code != 200:
                return f"status {response.status_code}: {response.read().decode()}"
            for line in response.iter_lines():
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    return (
                        "whole" if tokens == self._expected[at] else f"{len(tokens)} tokens, not {self._expected[at]}: {tokens}"
                    )
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    return f"after {len(tokens)} tokens: {chunk['error']}"
                tokens += [token for choice in chunk["choices"] for token in choice.get("token_ids", [])]
        return f"cut after {len(tokens)} tokens"
