"""Measure the decode throughput of parallel layouts on one machine, and the all-reduce under them.

    python benchmarks/layouts.py [--rounds 3] [layout ...]

The model is SmolLM2, in bf16, or in fp32 if the CPU has no bf16 instructions. A single rank gets all cores as threads; the
ranks of a layout share them. All replicas stay up and take turns in every round, so that a drift in the machine's speed favours
none of them. The table shows medians, and the throughput of each layout as a share of the one-rank throughput. Requests go to
the engine directly; `single.py` measures HTTP.
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
    """Returns the tokens per second of `batch` sequences with 16 prompt tokens and NEW_TOKENS new tokens each."""
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
    """Start a replica of `layout` in this process's Ray, and warm it up."""
    args = ServeArgs(layout=layout, dtype="bfloat16" if cpu_has_bfloat16() else "float32", max_model_len=2048, kv_bytes=2**28)
    replica = Replica(replica_settings(args, "cpu"), f"benchmark-{layout}")
    decode(replica, 1)
    return replica


def show_layouts(figures: dict[str, dict[int, list[float]]]) -> None:
    """Print the tokens per second by layout and batch, and their ratio to the first layout's."""
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
    """Print the time of a two-rank all-reduce; every TP layer waits for two of them."""
    sizes = (4 * collectives.KIB, 64 * collectives.KIB)
    table = Table("all-reduce, 2 ranks, us", *(f"{size // collectives.KIB} KiB" for size in sizes))
    medians = {name: collectives.measure_processes(name, 2, sizes, 0.3) for name in ("shared memory", "gloo")}
    for name, found in medians.items():
        table.add_row(name, *(f"{found['all_reduce', size]:.0f}" for size in sizes))
    ratios = (medians["gloo"]["all_reduce", size] / medians["shared memory"]["all_reduce", size] for size in sizes)
    table.add_row("gloo / shared memory", *(f"{ratio:.1f}" for ratio in ratios))
    Console(width=100).print(table)


def main() -> None:
    """Measure all layouts and print the tables."""
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
