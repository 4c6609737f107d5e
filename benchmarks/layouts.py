"""What a layout costs on one machine: decode throughput of SmolLM2 (bf16, or fp32 where the CPU has no bf16 instructions)
under layouts, and the all-reduce beneath.

    python benchmarks/layouts.py [--rounds 3] [layout ...]

One rank gets all cores as threads, a layout's ranks share them. All replicas stay up and take turns in every round, so a
drifting machine favours none; medians are shown, and each layout's share of the one-rank throughput. Requests go to the
engine directly: HTTP is measured by `single.py`.
"""

from __future__ import annotations

import argparse
import queue
import random
import statistics
import time
import uuid

import collectives
from rich.console import Console
from rich.table import Table

from actors.wire.requests import GenerateRequest, SamplingParams, TokenEvent
from cluster.embedded.local import connect
from cluster.replica.replica import Replica
from placement.layout.layout import Layout
from placement.nodes.hardware import cpu_has_bfloat16
from serve_app.deployment.replica_settings import replica_settings
from serve_app.deployment.settings import ServeArgs

LAYOUTS = ("tp=1", "tp=2", "pp=2")
BATCHES = (1, 8, 32)
NEW_TOKENS = 64


def decode(replica: Replica, batch: int) -> float:
    """Tokens per second of `batch` sequences of 16 prompt tokens, NEW_TOKENS new ones each."""
    streams = []
    began = time.perf_counter()
    for _ in range(batch):
        events: queue.Queue[TokenEvent] = queue.Queue()
        prompt = [random.randrange(100, 49000) for _ in range(16)]
        request = GenerateRequest(
            request_id=uuid.uuid4().hex, prompt=prompt, max_tokens=NEW_TOKENS, sampling=SamplingParams(temperature=0)
        )
        replica.engine.submit(request, events.put)
        streams.append(events)
    for events in streams:
        while (event := events.get(timeout=600)).finish is None:
            pass
        assert event.finish == "length", event
    return batch * NEW_TOKENS / (time.perf_counter() - began)


def start(layout: str) -> Replica:
    """A replica of `layout` in this process's Ray."""
    args = ServeArgs(layout=layout, dtype="bfloat16" if cpu_has_bfloat16() else "float32", max_model_len=2048, kv_bytes=2**28)
    replica = Replica(replica_settings(args, "cpu"), f"benchmark-{layout}")
    decode(replica, 1)
    return replica


def show_layouts(figures: dict[str, dict[int, list[float]]]) -> None:
    """Tokens per second by layout and batch, and the share of the first layout's."""
    base = next(iter(figures.values()))
    table = Table("decode, tok/s", *(f"batch {batch}" for batch in BATCHES))
    for layout, by_batch in figures.items():
        cells = []
        for batch, values in by_batch.items():
            ratio = statistics.median(value / one for value, one in zip(values, base[batch], strict=True))
            cells.append(f"{statistics.median(values):,.0f}  ({ratio:.0%})")
        table.add_row(layout, *cells)
    Console(width=100).print(table)


def show_all_reduce() -> None:
    """The all-reduce of two ranks that every tp layer waits for twice."""
    sizes = (4 * collectives.KIB, 64 * collectives.KIB)
    table = Table("all-reduce, 2 ranks, us", *(f"{size // collectives.KIB} KiB" for size in sizes))
    medians = {name: collectives.measure_processes(name, 2, sizes, 0.3) for name in ("shared memory", "gloo")}
    for name, found in medians.items():
        table.add_row(name, *(f"{found['all_reduce', size]:.0f}" for size in sizes))
    ratios = (medians["gloo"]["all_reduce", size] / medians["shared memory"]["all_reduce", size] for size in sizes)
    table.add_row("gloo / shared memory", *(f"{ratio:.1f}" for ratio in ratios))
    Console(width=100).print(table)


def main() -> None:
    """Measure and print."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("layouts", nargs="*", default=LAYOUTS)
    options.add_argument("--rounds", type=int, default=3)
    chosen = options.parse_args()
    show_all_reduce()
    connect(slots=sum(Layout.parse(layout).world for layout in chosen.layouts))
    replicas = {layout: start(layout) for layout in chosen.layouts}
    figures: dict[str, dict[int, list[float]]] = {layout: {batch: [] for batch in BATCHES} for layout in replicas}
    for _ in range(chosen.rounds):
        for batch in BATCHES:
            for layout, replica in replicas.items():
                figures[layout][batch].append(decode(replica, batch))
    show_layouts(figures)
    for replica in replicas.values():
        replica.close()


if __name__ == "__main__":
    main()
