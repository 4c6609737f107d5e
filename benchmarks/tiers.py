"""Measure the benefit of KV offload to host memory and disk, with conversations that do not fit the KV cache together.

    python benchmarks/tiers.py [--conversations 16] [--turns 4] [--layout tp=1]

Conversations of several turns with SmolLM2 (float32, so that answers can be compared) take turns, so that each one finds its
history evicted from a device whose pages hold an eighth of all conversations (at least 640 tokens). Three replicas, without
tiers, with host memory and with a directory, stay up and get each turn one after the other. The figures are the hit rate of
prompt tokens and the time to the first token (TTFT). Requests go to the engine directly.
"""

from __future__ import annotations

import argparse
import queue
import random
import statistics
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from actors.wire.requests import GenerateRequest, SamplingParams, TokenEvent
from cluster.embedded.local import connect
from cluster.replica.replica import Replica
from placement.cost import memory
from placement.layout.layout import Layout
from placement.ownership.context import BLOCK_TOKENS
from serve_app.deployment.replica_settings import replica_settings
from serve_app.deployment.settings import ServeArgs

SYSTEM, USER, ANSWER = 96, 64, 8
"""Token counts: the beginning of each conversation (each has its own), the question of one turn, and its answer."""


def start(layout: str, tokens: int, **tiers: str) -> Replica:
    """Start a replica whose KV pages hold `tokens` tokens."""
    usual = replica_settings(ServeArgs(layout=layout, dtype="float32", max_model_len=600), "cpu")
    needs = memory.rank_memories(usual.spec, usual.layout, usual.dtype)
    kv_bytes = max(rank.block_bytes for rank in needs) * -(-tokens // BLOCK_TOKENS // usual.layout.kv_owners)
    args = ServeArgs(layout=layout, dtype="float32", max_model_len=600, kv_bytes=kv_bytes, **tiers)
    return Replica(replica_settings(args, "cpu"), f"benchmark-tiers-{len(tiers)}-{'-'.join(tiers)}")


def ask(replica: Replica, name: str, prompt: list[int]) -> tuple[float, int, list[int]]:
    """Returns the seconds to the first token, the number of cached tokens, and the answer."""
    events: queue.Queue[TokenEvent] = queue.Queue()
    sampling = SamplingParams(temperature=0, min_tokens=ANSWER)
    began, first, cached, tokens = time.perf_counter(), None, 0, list[int]()
    replica.engine.submit(GenerateRequest(request_id=name, prompt=prompt, max_tokens=ANSWER, sampling=sampling), events.put)
    while True:
        event = events.get(timeout=300)
        if event.tokens and first is None:
            first, cached = time.perf_counter() - began, event.cached_tokens
        tokens += event.tokens
        if event.finish is not None:
            assert event.finish == "length", event
            assert first is not None, event
            return first, cached, tokens


def main() -> None:
    """Measure the three replicas and print the table."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--conversations", type=int, default=16)
    options.add_argument("--turns", type=int, default=4)
    options.add_argument("--layout", default="tp=1")
    chosen = options.parse_args()
    working_set = chosen.conversations * (SYSTEM + chosen.turns * (USER + ANSWER))
    draw = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        connect(slots=3 * Layout.parse(chosen.layout).world)
        kinds = {
            "no tiers": {},
            "host memory": {"host_cache": "4GiB"},
            "directory": {"disk_cache": str(Path(folder) / "blocks")},
        }
        replicas = {name: start(chosen.layout, max(working_set // 8, 640), **kind) for name, kind in kinds.items()}
        history = [[draw.randrange(100, 49000) for _ in range(SYSTEM)] for _ in range(chosen.conversations)]
        times: dict[str, list[float]] = {name: [] for name in replicas}
        hits = dict.fromkeys(replicas, 0)
        total = 0
        for turn in range(chosen.turns):
            for at in range(chosen.conversations):
                history[at] += [draw.randrange(100, 49000) for _ in range(USER)]
                found = {name: ask(replica, f"{turn}-{at}", history[at]) for name, replica in replicas.items()}
                assert len({tuple(tokens) for _, _, tokens in found.values()}) == 1, "tiers change answers"
                if turn > 0:
                    total += len(history[at])
                    for name, (first, cached, _) in found.items():
                        times[name].append(first)
                        hits[name] += cached
                history[at] += found["no tiers"][2]
        table = Table(f"{chosen.layout}, {working_set} tokens", "hit rate", "first token, ms (median)", "p90", "of no tiers")
        base = times["no tiers"]
        for name, values in times.items():
            ratio = statistics.median(value / one for value, one in zip(values, base, strict=True))
            p90 = statistics.quantiles(values, n=10)[-1]
            cells = (f"{hits[name] / total:.0%}", f"{statistics.median(values) * 1e3:.0f}", f"{p90 * 1e3:.0f}", f"{ratio:.2f}")
            table.add_row(name, *cells)
        Console(width=100).print(table)
        for replica in replicas.values():
            replica.close()


if __name__ == "__main__":
    main()
