"""The real command as a test subject: started in a child process on a free port, ended by Ctrl-C, watched for leftovers."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

READY_S = 120.0
END_S = 60.0


class Server:
    """A running ``shardwright serve``."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, log: Path) -> None:
        self.process, self.url, self.log = process, url, log
        self.client = httpx.Client(base_url=url, timeout=120)

    def post(self, path: str, body: Any) -> dict[str, Any]:
        """The answer to a request that must succeed."""
        response = self.client.post(path, json=body)
        assert response.status_code == 200, response.text
        return response.json()

    def processes(self) -> list[psutil.Process]:
        """Every process this server started, itself included."""
        mother = psutil.Process(self.process.pid)
        return [mother, *mother.children(recursive=True)]

    def ranks(self) -> list[psutil.Process]:
        """The processes of the ranks."""
        return [each for each in self.processes() if "RankActor" in _title(each)]


@contextmanager
def serving(*args: str, env: dict[str, str] | None = None) -> Iterator[Server]:
    """A server for the length of a block. Fails when it does not get ready, does not end, or leaves a process behind."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        process = start(*args, "--port", str(port), log=log, env=env)
        server = Server(process, f"http://127.0.0.1:{port}", log)
        try:
            wait_until(lambda: _ready(server), READY_S, lambda: f"not ready: {log.read_text()[-3000:]}")
            yield server
        finally:
            started = server.processes() if process.poll() is None else []
            process.send_signal(signal.SIGINT)
            try:
                process.wait(END_S)
            finally:
                _gone, left = psutil.wait_procs(started, timeout=10)
                for each in left:
                    each.kill()
        assert not left, f"left running: {left}"


def start(*args: str, log: Path, env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
    """``shardwright serve`` with these arguments, its output in `log`."""
    command = [sys.executable, "-m", "serve_app", "serve", *args]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    with log.open("wb") as out:
        return subprocess.Popen(command, stdout=out, stderr=out, env={**clean, **(env or {})}, start_new_session=True)


def run(*args: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    """Any ``shardwright`` command, to its end."""
    return subprocess.run([sys.executable, "-m", "serve_app", *args], capture_output=True, text=True, timeout=timeout_s)


def wait_until(happened: Any, timeout_s: float, otherwise: Any) -> Any:
    """The first true value of `happened()`; fails with `otherwise()` after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        value = happened()
        if value:
            return value
        time.sleep(0.05)
    raise AssertionError(otherwise())


def free_port() -> int:
    """A port nobody listens on right now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def _ready(server: Server) -> bool:
    assert server.process.poll() is None, f"ended: {server.log.read_text()[-3000:]}"
    try:
        return server.client.get("/health").status_code == 200
    except httpx.TransportError:
        return False


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
