"""The real command as a test subject: started in a child process on a free port, ended by Ctrl-C, watched for leftovers.

Every process it starts, however far removed, inherits a mark in its environment by which it is found again.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from tests.support.waiting import wait_until as wait_until

READY_S = 240.0
END_S = 60.0
_MARK = "SHARDWRIGHT_TEST_MARK"
SHARDWRIGHT = (sys.executable, "-m", "serve_app.commands")


class Server:
    """A running ``shardwright serve``."""

    def __init__(self, process: subprocess.Popen[bytes], mark: str, port: int, log: Path) -> None:
        self.process, self.mark, self.port, self.log = process, mark, port, log
        self.url = f"http://127.0.0.1:{port}"
        self.client = httpx.Client(base_url=self.url, timeout=120)

    def post(self, path: str, body: Any) -> dict[str, Any]:
        """The answer to a request that must succeed."""
        response = self.client.post(path, json=body)
        assert response.status_code == 200, response.text
        return response.json()

    def health(self) -> int:
        """Status of ``/health``; 0 where nobody answers."""
        try:
            return self.client.get("/health").status_code
        except httpx.TransportError:
            return 0

    def gauges(self) -> dict[str, dict[str, float]]:
        """The engine's numbers in ``/metrics``, by replica; those with another label as ``experts_balancedness:layer=1``."""
        found: dict[str, dict[str, float]] = {}
        for family in text_string_to_metric_families(self.client.get("/metrics").text):
            for sample in family.samples:
                if sample.name.startswith("shardwright_engine_"):
                    labels = dict(sample.labels)
                    of = found.setdefault(labels.pop("replica"), {})
                    rest = "".join(f":{label}={value}" for label, value in labels.items())
                    of[sample.name.removeprefix("shardwright_engine_") + rest] = sample.value
        return found

    def gauge(self, name: str) -> float:
        """One of the engine's numbers, summed over the replicas."""
        return sum(values[name] for values in self.gauges().values())

    def service_gauge(self, name: str) -> float:
        """One of the numbers of the whole service in ``/metrics``."""
        for family in text_string_to_metric_families(self.client.get("/metrics").text):
            for sample in family.samples:
                if sample.name == f"shardwright_{name}":
                    return sample.value
        raise AssertionError(f"/metrics has no {name}")

    def ranks(self) -> list[psutil.Process]:
        """The processes of the ranks."""
        return self.named("ray::RankActor")

    def named(self, title: str) -> list[psutil.Process]:
        """This server's processes with that title."""
        return [each for each in marked(self.mark) if _title(each).startswith(title)]


@contextmanager
def serving(*args: str, env: dict[str, str] | None = None) -> Iterator[Server]:
    """A server for the length of a block. Fails when it does not get ready, does not end, or leaves a process behind."""
    with tempfile.TemporaryDirectory() as folder:
        server = start(*args, log=Path(folder) / "log", env=env)
        try:
            wait_until(lambda: ready(server), READY_S, lambda: f"not ready: {server.log.read_text()[-3000:]}")
            yield server
            finish(server)
        finally:
            kill(server.process, server.mark)


def start(*args: str, log: Path, env: dict[str, str] | None = None, port: int | None = None) -> Server:
    """``shardwright serve`` with these arguments, its output in `log`; not ready yet."""
    mark, port = secrets.token_hex(8), port or free_port()
    command = [*SHARDWRIGHT, "serve", *args, "--port", str(port)]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment(mark, env), start_new_session=True)
    return Server(process, mark, port, log)


def finish(server: Server, sign: int = signal.SIGINT) -> int:
    """End a server as its user would; everything must be gone. Returns the exit status."""
    server.process.send_signal(sign)
    status = server.process.wait(END_S)
    all_gone(server.mark)
    return status


def run(
    *args: str,
    timeout_s: float = 120,
    env: dict[str, str] | None = None,
    typed: str = "",
    command: Sequence[str] = SHARDWRIGHT,
) -> subprocess.CompletedProcess[str]:
    """Any ``shardwright`` command, to its end, with `typed` on its standard input; it must leave nothing behind."""
    mark = secrets.token_hex(8)
    try:
        done = subprocess.run(
            [*command, *args], input=typed, capture_output=True, text=True, timeout=timeout_s, env=environment(mark, env)
        )
        all_gone(mark)
        return done
    finally:
        kill(None, mark)


def environment(mark: str, more: dict[str, str] | None = None) -> dict[str, str]:
    """The environment without anything that speaks to Ray, with the mark."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return {**clean, "COLUMNS": "200", **(more or {}), _MARK: mark}


def marked(mark: str) -> list[psutil.Process]:
    """Every live process that inherited the mark."""
    found = []
    for each in psutil.process_iter():
        with suppress(psutil.Error):
            if each.status() != psutil.STATUS_ZOMBIE and each.environ().get(_MARK) == mark:
                found.append(each)
    return found


def all_gone(mark: str, timeout_s: float = 10) -> None:
    """Every process with the mark ends in time."""
    wait_until(lambda: not marked(mark), timeout_s, lambda: f"left running: {[_title(each) for each in marked(mark)]}")


def kill(process: subprocess.Popen[bytes] | None, mark: str) -> None:
    """End whatever is left of a test, in order that the next one has the machine for itself."""
    for each in marked(mark):
        with suppress(psutil.Error):
            each.kill()
    if process is not None:
        process.wait()


def free_port() -> int:
    """A port nobody listens on right now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def ready(server: Server) -> bool:
    assert server.process.poll() is None, f"ended: {server.log.read_text()[-3000:]}"
    return "Shardwright is ready" in server.log.read_text() and server.health() == 200


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
