"""Calls of the commands to their own endpoint: proxies of the environment, and answers that are no health."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from serve_app.commands.endpoint_health import health_line, uses_proxy


@contextmanager
def answering(status: int, body: bytes) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A proxy that answers everything with an error page, as a company's does for an address inside of a cluster."""
    with answering(502, b"<html>proxy</html>") as url:
        for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy"):
            monkeypatch.setenv(name, url)
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        yield


@pytest.mark.usefixtures("proxy")
@pytest.mark.parametrize(
    ("status", "health", "expected"),
    [
        (200, {"status": "ok", "reason": ""}, (True, "")),
        (200, {"status": "degraded", "reason": "1 of 2 replicas can serve"}, (True, "1 of 2 replicas can serve")),
        (503, {"status": "unhealthy", "reason": "no engine replica is running"}, (False, "no engine replica is running")),
    ],
)
def test_the_own_endpoint_is_asked_directly(status: int, health: dict[str, str], expected: tuple[bool, str]) -> None:
    with answering(status, json.dumps(health).encode()) as url:
        assert health_line(url) == expected


@pytest.mark.parametrize("body", [b"<html>no</html>", b"[]", b"{}", b"", b"null", b"\xff"])
@pytest.mark.parametrize("status", [200, 404, 502])
def test_another_answer_is_not_taken_for_good_health(status: int, body: bytes) -> None:
    with answering(status, body) as url:
        assert health_line(url) == (False, f"/health answers with status {status} and no health")


def test_no_answer_is_not_taken_for_good_health() -> None:
    with answering(200, b"") as url:
        pass
    is_ready, reason = health_line(url)
    assert not is_ready
    assert reason.startswith("/health does not answer: ")


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1:8000", False), ("localhost", False), ("a.localhost", False), ("[::1]:8000", False), ("0.0.0.0:1", False),
        ("10.1.2.3", False), ("192.168.0.7:8000", False), ("172.16.0.1", False), ("[fd00::1]", False), ("169.254.1.1", False),
        ("8.8.8.8", True), ("models.example.com", True), ("[2606:4700::1111]:80", True),
    ],
)  # fmt: skip
def test_only_addresses_outside_of_the_cluster_are_reached_through_a_proxy(host: str, expected: bool) -> None:
    assert uses_proxy(f"http://{host}") is expected
