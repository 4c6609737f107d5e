"""The Ray cluster under a running server dies: the command says so and ends, and leaves nothing behind."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.ray.server import READY_S, Server, all_gone, kill, ready, start, wait_until
from tests.ray.streaming import Stream, body
from tests.support.models.tiny_models import tiny

pytestmark = pytest.mark.long

ENDS_S = 15
HEALTH_S = 8
"""The endpoint's own deadline for its health, and something for a loaded machine."""


@pytest.mark.parametrize("kind", ["raylet", "gcs_server"])
def test_the_command_ends_with_its_cluster(tmp_path: Path, kind: str) -> None:
    server = begin(tmp_path)
    try:
        stream = Stream(server.url, body([7, 8], 30_000)).wait_for(3)
        victim(server, kind).kill()
        assert server.process.wait(ENDS_S) == 2
        all_gone(server.mark)
        errors = [line for line in server.log.read_text().splitlines() if "error" in line]
        assert len(errors) == 1
        assert kind in errors[0]
        assert "SIGKILL" in errors[0]
        assert "Traceback" not in server.log.read_text()
        stream.finish()
    finally:
        kill(server.process, server.mark)


def test_health_is_told_in_time_without_the_cluster(tmp_path: Path) -> None:
    """The command is held still, so that it cannot end what is asked here."""
    server = begin(tmp_path)
    try:
        server.process.send_signal(signal.SIGSTOP)
        victim(server, "gcs_server").kill()
        for _ in range(3):
            began = time.monotonic()
            server.health()
            assert time.monotonic() - began < HEALTH_S
        server.process.send_signal(signal.SIGCONT)
        assert server.process.wait(ENDS_S) == 2
        all_gone(server.mark)
    finally:
        kill(server.process, server.mark)


def begin(folder: Path) -> Server:
    model = str(tiny("llama3", max_position_embeddings=2**16).folder)
    server = start(model, "--layout", "tp=2", "--dtype", "float32", "--max-model-len", "40000", log=folder / "log")
    try:
        wait_until(lambda: ready(server), READY_S, server.log.read_text)
    except BaseException:
        kill(server.process, server.mark)
        raise
    return server


def victim(server: Server, kind: str) -> psutil.Process:
    [process] = [each for each in server.named("") if Path(each.exe()).name == kind]
    return process
