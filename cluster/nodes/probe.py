"""The probe of one node in a link measurement: it sends bytes to other probes, answers them, and inspects its node's GPUs."""

from __future__ import annotations

import shutil
import socket
import statistics
import subprocess
import time

_PINGS = 20
_CHUNK = bytes(256 * 1024)
_SEND_S = 0.4
_MOST_BYTES = 256 * 2**20
_WAIT_S = 20.0


class Probe:
    """One end of a link measurement: call `listen` on one probe, then `answer` on it and `measure` on another concurrently."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._listener: socket.socket | None = None

    def listen(self) -> tuple[str, int]:
        """Open a TCP port on which another probe can measure the link to this node. Returns its (host, port), the same at every
        call.

        Raises `OSError` if the probe's host is not an address of this machine.
        """
        if self._listener is None:
            self._listener = socket.create_server((self._host, 0))
            self._listener.settimeout(_WAIT_S)
        return self._host, int(self._listener.getsockname()[1])

    def answer(self) -> None:
        """Serve one `measure` of another probe, on the port that `listen` has opened (it must be called first), and return at
        its end.

        Echoes single bytes, then reads everything until the end and confirms it. Raises `OSError` (`TimeoutError`) if no probe
        connects or sends in 20 s.
        """
        assert self._listener is not None
        connection, _ = self._listener.accept()
        with connection:
            connection.settimeout(_WAIT_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for _ in range(_PINGS):
                connection.sendall(connection.recv(1))
            while connection.recv(len(_CHUNK)):
                pass
            connection.sendall(b".")

    def measure(self, host: str, port: int) -> tuple[float, float]:
        """Measure the link to the probe that listens at `host` and `port` and runs `answer`.

        Returns the one-way latency in seconds (half the median round trip) and the bandwidth in bytes per second. Raises
        `OSError` (`TimeoutError`) if the other probe does not answer in 20 s.
        """
        with socket.create_connection((host, port), timeout=_WAIT_S) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            trips = [_round_trip(connection) for _ in range(_PINGS)]
            began, sent = time.perf_counter(), 0
            while time.perf_counter() - began < _SEND_S and sent < _MOST_BYTES:
                connection.sendall(_CHUNK)
                sent += len(_CHUNK)
            connection.shutdown(socket.SHUT_WR)
            connection.recv(1)
            return statistics.median(trips) / 2, sent / (time.perf_counter() - began)

    def gpu_topology(self) -> str:
        """Returns the output of ``nvidia-smi topo -m`` on this node; empty if the tool is not installed. Raises
        `subprocess.TimeoutExpired` if it takes more than 20 s."""
        tool = shutil.which("nvidia-smi")
        if tool is None:
            return ""
        return subprocess.run([tool, "topo", "-m"], capture_output=True, text=True, timeout=_WAIT_S).stdout


def _round_trip(connection: socket.socket) -> float:
    began = time.perf_counter()
    connection.sendall(b".")
    connection.recv(1)
    return time.perf_counter() - began
