"""Measure how much of a prompt's KV transfer is still outstanding when the last chunk has been computed (prefill/decode
disaggregation over a slow link).

    namespace a: prefill engine, rank ──veth, 1 Gbit/s each way, UCX over TCP──→ namespace b: decode engine, ranks

The same prompt is handed off three times: in one chunk, sent after it has been computed, where almost nothing hides the
transfer (this gives the whole transfer time); in several chunks, each sent after it has been computed; and in chunks whose
layer ranges are each sent as soon as they have been computed, as pools do it.

The benchmark needs root, `ip` and `tc`. The two namespaces share the file system and the control messages.

    python -m benchmarks.handoff [--tokens 4096] [--rate 1gbit] [--decode pp=2] [--ranges 4]
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any

from actors.engine.config.engine_config import DisaggregationConfig, EngineConfig
from actors.engine.engine import Engine
from actors.wire.rank_config import RankConfig
from actors.wire.requests import GenerateRequest, SamplingParams, TokenEvent
from placement.checkpoint import header
from placement.layout.layout import Layout
from serve_app.deployment.catalog import resolve

ROOT = Path(__file__).resolve().parents[1]
WAIT_S = 600.0
BLOCK = 16


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--tokens", type=int, default=4096)
    options.add_argument("--chunk", type=int, default=512)
    options.add_argument("--rate", default="1gbit")
    options.add_argument("--prefill", default="tp=1")
    options.add_argument("--decode", default="pp=2")
    options.add_argument("--ranges", type=int, default=4)
    options.add_argument("--side", nargs=5, help=argparse.SUPPRESS)
    asked = options.parse_args()
    if asked.side:
        path, name, chunk, ranges, layout = asked.side
        serve_side(Client(path), name, layout, int(chunk), int(ranges), asked.tokens)
        return
    whole = measure(asked, asked.tokens, 1)
    found = {"chunks": measure(asked, asked.chunk, 1), "ranges": measure(asked, asked.chunk, asked.ranges)}
    assert all(each["tokens"] == whole["tokens"] for each in found.values()), "the same prompt was answered in two ways"
    shares = {name: round(each["exposed_s"] / whole["transfer_s"], 3) for name, each in found.items()}
    print(json.dumps({"whole": whole, **found, "exposed_share": shares}, indent=1))


def measure(asked: argparse.Namespace, chunk: int, ranges: int) -> dict[str, Any]:
    """Measure one hand-off, after a first one that connects the two sides."""
    with namespaces(asked.rate) as (one, other), sides(asked, chunk, ranges, one, other) as (prefill, decode):
        run_handoff(prefill, decode, 64, "warm")
        before = stats_of(prefill)
        tokens, first_s, second_s = run_handoff(prefill, decode, asked.tokens, "timed")
        after = stats_of(prefill)
    moved = {name: after[name] - before[name] for name in ("sent_bytes", "exposed_s", "transfer_s")}
    bits = 8 * moved["sent_bytes"] / moved["transfer_s"] if chunk >= asked.tokens else None
    return {
        "chunk": chunk,
        "ranges": ranges,
        **moved,
        "link_bits_per_s": bits,
        "first_token_s": first_s,
        "second_token_s": second_s,
        "tokens": tokens,
    }


def run_handoff(prefill: Connection, decode: Connection, length: int, name: str) -> tuple[list[int], float, float]:
    """Run a request through both sides, as the ingress does. Returns its tokens, and the seconds to the first and to the second
    token."""
    prompt = [(17 * at + at * at // 7) % 4000 + 50 for at in range(length, 2 * length)]
    request = GenerateRequest(
        request_id=name, prompt=prompt, max_tokens=3, sampling=SamplingParams(temperature=0.0), reserves=True
    )
    decode.send(("submit", request.pack()))
    tokens, times, began = list[int](), list[float](), time.perf_counter()
    while True:
        [ready, *_] = wait([prefill, decode], WAIT_S)
        event = TokenEvent.unpack(ready.recv())
        if ready is prefill:
            decode.send(("take", event.pack()))
        elif event.ticket is not None:
            ticket = event.ticket
            with_ticket = request.model_copy(update={"request_id": ticket.ticket_id, "ticket": ticket, "reserves": False})
            prefill.send(("submit", with_ticket.pack()))
            decode.send(("take", TokenEvent(request_id=ticket.ticket_id).pack()))
        else:
            tokens += event.tokens
            times += [time.perf_counter() - began] * len(event.tokens)
            if event.finish is not None:
                assert event.finish == "length", event
                return tokens, times[0], times[1]


def stats_of(side: Connection) -> dict[str, float]:
    side.send(("stats", b""))
    while isinstance(answer := side.recv(), bytes):
        pass  # the last event of the hand-off, which carries nothing more
    return answer


def serve_side(pipe: Connection, name: str, layout: str, chunk: int, ranges: int, tokens: int) -> None:
    """Run one engine and its ranks until the pipe is closed."""
    import torch

    from actors.rank.threads import ThreadRanks

    torch.set_num_threads(1)
    path = resolve("smollm2-135m").path
    parsed, spec = Layout.parse(layout), header.read(path)
    blocks = -(-(tokens + 256) // BLOCK)
    rank = RankConfig(
        world_rank=0,
        layout=parsed,
        spec=spec,
        model_path=str(path),
        device="cpu",
        dtype="float32",
        block_size=BLOCK,
        threads_per_rank=1,
        in_pool=True,
        handoff_ranges=ranges,
    )
    config = EngineConfig(
        num_blocks=blocks,
        block_size=BLOCK,
        stages=parsed.pp,
        max_model_len=tokens + 200,
        max_batch_tokens=max(tokens, 64),
        max_chunk_tokens=chunk,
        step_timeout_s=WAIT_S,
        disaggregation=DisaggregationConfig(layout=parsed, lease_s=WAIT_S, expected_tokens=8),
    )
    engine = Engine(config, ThreadRanks(rank, blocks))
    engine.start()
    pipe.send(name)
    try:
        while True:
            what, data = pipe.recv()
            if what == "submit":
                engine.submit(GenerateRequest.unpack(data), lambda event: pipe.send(event.pack()))
            elif what == "take":
                engine.on_ticket_event(TokenEvent.unpack(data))
            else:
                while engine.stats().handoffs.sending:  # type: ignore[union-attr]
                    time.sleep(0.001)
                pipe.send(engine.stats().handoffs.model_dump())  # type: ignore[union-attr]
    except EOFError:
        engine.close()


@contextmanager
def sides(asked: argparse.Namespace, chunk: int, ranges: int, one: str, other: str) -> Iterator[tuple[Connection, Connection]]:
    """Start one process in each namespace. Yields the pipes to the prefill and the decode process when both are ready."""
    with tempfile.TemporaryDirectory() as folder, Listener(f"{folder}/control") as listener:
        environment = {**os.environ, "UCX_TLS": "tcp", "UCX_NET_DEVICES": "e0"}
        command = [sys.executable, "-m", "benchmarks.handoff", "--tokens", str(asked.tokens), "--side", f"{folder}/control"]
        processes = [
            subprocess.Popen(
                ["ip", "netns", "exec", space, *command, name, str(chunk), str(ranges), layout], env=environment, cwd=ROOT
            )
            for space, name, layout in ((one, "prefill", asked.prefill), (other, "decode", asked.decode))
        ]
        pipes = {}
        try:
            for _ in processes:
                pipe = listener.accept()
                pipes[pipe.recv()] = pipe
            yield pipes["prefill"], pipes["decode"]
        finally:
            for pipe in pipes.values():
                pipe.close()
            for process in processes:
                try:
                    process.wait(30)
                except subprocess.TimeoutExpired:
                    process.kill()


@contextmanager
def namespaces(rate: str) -> Iterator[tuple[str, str]]:
    """Create two network namespaces, joined by a link of the given rate."""
    mark = secrets.token_hex(3)
    spaces = [f"sw{mark}a", f"sw{mark}b"]
    try:
        for space in spaces:
            run("ip", "netns", "add", space)
            run("ip", "-n", space, "link", "set", "lo", "up")
        run("ip", "link", "add", "e0", "netns", spaces[0], "type", "veth", "peer", "name", "e0", "netns", spaces[1])
        for number, space in enumerate(spaces, start=1):
            run("ip", "-n", space, "address", "add", f"10.77.0.{number}/24", "dev", "e0")
            run("ip", "-n", space, "link", "set", "e0", "up")
            run(
                *("tc", "-n", space, "qdisc", "add", "dev", "e0", "root", "tbf"),
                *("rate", rate, "burst", "256kb", "latency", "50ms"),
            )
        yield spaces[0], spaces[1]
    finally:
        for space in spaces:
            subprocess.run(["ip", "netns", "delete", space], check=False, capture_output=True)


def run(*command: str) -> None:
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
