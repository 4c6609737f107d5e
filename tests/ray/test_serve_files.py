"""The application through Ray's own doors, on a cluster that somebody else started: `serve run` and `serve deploy`."""

from __future__ import annotations

import json
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import yaml

from actors.kv_transfer.nixl_transport import is_installed
from serve_app.deployment.settings import ServeArgs
from tests.ray.server import environment, free_port, kill, wait_until
from tests.ray.streaming import body
from tests.support.models.tiny_models import tiny

EXAMPLE = Path(__file__).parents[2] / "k8s" / "serve.yaml"
SCRIPTS = Path(sys.executable).parent


@dataclass(frozen=True)
class Head:
    """A Ray head with a dashboard."""

    address: str
    dashboard: str
    environment: dict[str, str]

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Ray's or Serve's command line against this head, to its end."""
        return subprocess.run(
            [str(SCRIPTS / command[0]), *command[1:]], env=self.environment, capture_output=True, text=True, timeout=120
        )

    def spawn(self, *command: str, log: Path) -> subprocess.Popen[bytes]:
        """The same, in the background."""
        with log.open("wb") as out:
            return subprocess.Popen([str(SCRIPTS / command[0]), *command[1:]], env=self.environment, stdout=out, stderr=out)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    """Started in the foreground, so that it ends with one signal to one process."""
    port, dashboard, mark = free_port(), free_port(), secrets.token_hex(8)
    address = f"127.0.0.1:{port}"
    env = environment(mark, {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_ADDRESS": address})
    command = ["ray", "start", "--head", "--block", "--node-ip-address=127.0.0.1", f"--port={port}", "--num-cpus=4"]
    command += [f"--dashboard-port={dashboard}", f"--dashboard-agent-listen-port={free_port()}", "--include-dashboard=true"]
    command += [f"--ray-client-server-port={free_port()}", "--object-store-memory=100000000"]
    folder = tempfile.mkdtemp(prefix="h", dir="/tmp")  # short: it holds Unix sockets; and Ray's notes stay in it
    command += [f"--temp-dir={folder}"]
    log = tmp_path_factory.mktemp("head") / "log"
    started = Head(address, f"http://127.0.0.1:{dashboard}", env)
    env = {name: value for name, value in env.items() if name != "RAY_ADDRESS"}
    with log.open("wb") as out:
        process = subprocess.Popen([str(SCRIPTS / command[0]), *command[1:]], env=env, stdout=out, stderr=out)
    try:
        wait_until(lambda: status(f"{started.dashboard}/api/serve/applications/") == 200, 90, log.read_text)
        yield started
    finally:
        kill(process, mark)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.long
@pytest.mark.parametrize("pools", [("layout=tp=2",), ("prefill=tp=2*1", "decode=pp=2")])
def test_serve_run_takes_strings(head: Head, tmp_path: Path, pools: tuple[str, ...]) -> None:
    if len(pools) > 1 and not is_installed():
        pytest.skip("NIXL is not installed: pip install 'shardwright[pools]'")
    model, log = str(tiny("llama3").folder), tmp_path / "log"
    given = [f"model={model}", *pools, "max_model_len=64", "kv_bytes=1MiB", "dtype=float32"]
    process = head.spawn("serve", "run", f"--address={head.address}", "serve_app.app:build", *given, log=log)
    try:
        wait_until(lambda: status("http://127.0.0.1:8000/health") == 200, 120, log.read_text)
        answer = httpx.post("http://127.0.0.1:8000/v1/completions", json=body([*range(1, 20)], 4), timeout=60).json()
        assert answer["usage"]["completion_tokens"] == 4
        assert httpx.get("http://127.0.0.1:8000/v1/models").json()["data"][0]["max_model_len"] == 64
        metrics = httpx.get("http://127.0.0.1:8000/metrics").text.splitlines()
        received = [float(line.split()[-1]) for line in metrics if line.startswith("shardwright_engine_handoff_received{")]
        assert sum(received) == (2 if len(pools) > 1 else 0), "one before it was ready, and this one"
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


@pytest.mark.long
def test_serve_run_refuses_an_argument_that_does_not_exist(head: Head) -> None:
    done = head.run("serve", "run", f"--address={head.address}", "serve_app.app:build", "modle=x")
    assert done.returncode != 0
    assert "modle" in done.stdout + done.stderr


@pytest.mark.long
def test_the_serve_file_deploys(head: Head, tmp_path: Path) -> None:
    config, port = yaml.safe_load(EXAMPLE.read_text()), 8000
    config["applications"][0]["args"] |= {"model": str(tiny("llama3").folder), "layout": "replicas=2", "dtype": "float32"}
    config["applications"][0]["name"] = "demo"
    deploy(head, tmp_path, config)
    wait_until(lambda: status(f"http://127.0.0.1:{port}/health") == 200, 120, lambda: head.run("serve", "status").stdout)
    answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body([1, 2, 3], 4), timeout=60).json()
    assert answer["usage"]["completion_tokens"] == 4
    found = head.run("shardwright", "status", "--json")
    assert (found.returncode, json.loads(found.stdout)["application"]) == (0, "RUNNING"), "the only one of ours"

    config["applications"][0]["args"]["layuot"] = "tp=2"
    deploy(head, tmp_path, config)
    wait_until(lambda: "layuot" in application(head)["message"], 60, lambda: str(application(head)))


def test_the_serve_files_arguments_are_the_commands() -> None:
    """Serve ignores keys it does not know, so the file's own are checked here."""
    config = yaml.safe_load(EXAMPLE.read_text())
    assert set(config) == {"proxy_location", "http_options", "applications"}
    [app] = config["applications"]
    assert set(app) == {"name", "route_prefix", "import_path", "args"}
    ServeArgs.model_validate(app["args"])


def deploy(head: Head, folder: Path, config: object) -> None:
    file = folder / "serve.yaml"
    file.write_text(yaml.safe_dump(config))
    done = head.run("serve", "deploy", str(file), "--address", head.dashboard)
    assert done.returncode == 0, done


def application(head: Head) -> dict[str, str]:
    found: dict[str, str] = httpx.get(f"{head.dashboard}/api/serve/applications/").json()["applications"]["demo"]
    return found


def status(url: str) -> int:
    try:
        return httpx.get(url, timeout=5).status_code
    except httpx.TransportError:
        return 0
