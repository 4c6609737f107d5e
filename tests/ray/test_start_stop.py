"""Servers that start together, and servers that are told to end before they are ready."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.ray.server import END_S, READY_S, all_gone, finish, kill, ready, start, wait_until
from tests.ray.streaming import body
from tests.support.models.tiny_models import tiny

pytestmark = pytest.mark.long

SERVE = ["--dtype", "float32"]


def test_two_servers_started_at_once_do_not_meet(tmp_path: Path) -> None:
    """Each embeds its own Ray: ports, session folders, tokens and shared memory must not be confused."""
    models = [str(tiny("llama3").folder), str(tiny("qwen3").folder)]
    servers = [
        start(model, "--layout", layout, *SERVE, log=tmp_path / f"log{index}")
        for index, (model, layout) in enumerate(zip(models, ["tp=2", "pp=2"], strict=True))
    ]
    try:
        for server in servers:
            wait_until(lambda server=server: ready(server), 2 * READY_S, server.log.read_text)
        names = [server.client.get("/v1/models").json()["data"][0]["id"] for server in servers]
        assert names == [Path(model).name for model in models]
        assert [len(server.ranks()) for server in servers] == [2, 2]
        assert [server.gauge("finished") for server in servers] == [0, 0]
        servers[0].post("/v1/completions", body([1, 2], 3))
        assert [server.gauge("finished") for server in servers] == [1, 0]
        assert finish(servers[0]) == 0
        servers[1].post("/v1/completions", body([1, 2], 3))
        assert finish(servers[1], signal.SIGTERM) == 0
    finally:
        for server in servers:
            kill(server.process, server.mark)
    assert [line for line in servers[0].log.read_text().splitlines() if "ray" in line.lower()] == [ready_line(servers[0].log)]


def ready_line(log: Path) -> str:
    return next(line for line in log.read_text().splitlines() if line.startswith("Shardwright is ready"))


def test_interrupted_while_its_ranks_start(tmp_path: Path) -> None:
    server = start(str(tiny("llama3").folder), "--layout", "tp=2", *SERVE, log=tmp_path / "log")
    try:
        wait_until(lambda: server.ranks(), READY_S, server.log.read_text)
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(END_S) == 130
        all_gone(server.mark)
        assert "Traceback" not in server.log.read_text()
    finally:
        kill(server.process, server.mark)


def test_interrupted_while_ray_starts(tmp_path: Path) -> None:
    server = start(str(tiny("llama3").folder), *SERVE, log=tmp_path / "log")
    try:
        wait_until(lambda: server.named("/") and len(server.named("")) > 1, READY_S, server.log.read_text)
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(END_S) == 130
        all_gone(server.mark)
        assert server.log.read_text() == ""
    finally:
        kill(server.process, server.mark)
