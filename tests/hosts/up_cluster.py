"""A Ray cluster on hosts in a box, made by `ray up` from a rendered file, and commands on its head."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from tests.hosts.box import Box, Host, box
from tests.support import waiting

TOKEN = "0123456789abcdef" * 4
PORT = 8000
READY_S = 180
_ON = "RAY_AUTH_MODE=token"

wait_until = partial(waiting.wait_until, every_s=0.5)
"""What is asked here takes a command on a host."""


@dataclass
class UpCluster:
    """The running cluster: the first host is the head, the others are workers of two slots."""

    made: Box
    config: Path

    @property
    def head(self) -> Host:
        return self.made.hosts[0]

    @property
    def workers(self) -> list[Host]:
        return self.made.hosts[1:]

    @property
    def ray_address(self) -> str:
        return f"{self.head.address}:6379"

    @property
    def url(self) -> str:
        return f"http://{self.head.address}:{PORT}"

    def shardwright(self, command: str) -> str:
        """Output of a command on the head that joins the cluster."""
        return self.made.run(self.head, f"{_ON} shardwright {command} --address {self.ray_address}")

    @contextmanager
    def serving(self, model: str, *options: str) -> Iterator[Path]:
        """``shardwright serve --address`` on the head for the length of a block; its log."""
        log = self.made.folder / "serve.log"
        line = f"serve {model} --address {self.ray_address} --host 0.0.0.0 --port {PORT} --threads 1 {' '.join(options)}"
        process = self.made.start(self.head, f"{_ON} exec shardwright {line}", log)
        try:
            wait_until(lambda: process.poll() is not None or "Shardwright is ready" in log.read_text(), READY_S, log.read_text)
            assert process.poll() is None, log.read_text()[-3000:]
            yield log
        finally:
            self.made.run(self.head, "pkill -INT -x shardwright || true")  # in the host's own process namespace
            process.wait(60)

    @contextmanager
    def deployed(self, config: str) -> Iterator[None]:
        """A Serve file, put on the cluster with Serve's own command; nothing of Serve is left after the block."""
        file = self.made.folder / "serve.yaml"
        file.write_text(config)
        self.made.run(self.head, f"{_ON} serve shutdown -y -a http://127.0.0.1:8265")
        self.made.run(self.head, f"{_ON} serve deploy -a http://127.0.0.1:8265 {file}")
        try:
            yield
        finally:
            self.made.run(self.head, f"{_ON} serve shutdown -y -a http://127.0.0.1:8265")

    def down(self) -> str:
        """``ray down``: what it printed."""
        done = self.made.launch("ray", "down", "-y", str(self.config), timeout_s=120)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout


@contextmanager
def up_cluster(num_workers: int, prefill: str, decode: str) -> Iterator[UpCluster]:
    """`render --target ray-up` for these pools, then `ray up`, and all workers there."""
    with box(1 + num_workers) as made:
        token = made.folder / "launcher" / ".ray" / "auth_token"
        token.parent.mkdir()
        token.write_text(TOKEN)
        out = made.folder / "launcher" / "out"
        head, *workers = (host.address for host in made.hosts)
        where = [part for address in workers for part in ("--worker", address)]
        login = ["--ssh-user", "root", "--ssh-key", str(made.key), "--setup", "command -v shardwright"]
        name = made.folder.name.lower().replace("_", "-")
        shape = ["--prefill", prefill, "--decode", decode, "--slots", "2", "--memory", "4GiB", "--name", name]
        files = ["shardwright", "render", "--target", "ray-up", *shape, "--head", head, *where, *login, "--out", str(out)]
        _ran(made.launch(*files, timeout_s=60))
        cluster = UpCluster(made, out / "cluster.yaml")
        _ran(made.launch("ray", "up", "-y", "--no-config-cache", str(cluster.config), timeout_s=240))
        wait_until(lambda: slots(cluster) == 2 * num_workers, 120, lambda: f"{slots(cluster)} slots")
        yield cluster


def slots(cluster: UpCluster) -> int:
    """Slots of the workers that have joined."""
    found = re.search(r"(\d+) slots?", cluster.shardwright("cluster"))
    assert found is not None
    return int(found[1])


def healthy(url: str) -> bool:
    """Whether the endpoint says it can serve."""
    try:
        return httpx.get(f"{url}/health", timeout=10).status_code == 200
    except httpx.TransportError:
        return False


def _ran(done: Any) -> None:
    assert done.returncode == 0, f"{done.stdout[-3000:]}{done.stderr[-3000:]}"
