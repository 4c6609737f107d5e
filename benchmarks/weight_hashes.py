"""Measure what the model digest adds to loading: one rank loads a model as it is, with hashing, and with hashes that are kept.

    python -m benchmarks.weight_hashes [MODEL] [--dtype bfloat16] [--threads 2] [--rounds 5] [--cold]

MODEL is anything that ``serve`` takes. The three ways take turns, so that a drift in the machine's speed favours none; the
table shows medians of seconds, and of CPU seconds of all threads. With --cold the weight files leave the page cache before
every load.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from actors.groups.solo import SoloGroup
from actors.model.checkpoint.hash_cache import HashCache
from actors.model.checkpoint.weight_hasher import NoWeightHasher, WeightHasher
from actors.rank.assembly import identity_of, load_decoder
from actors.wire.rank_config import RankConfig
from placement.checkpoint import header
from placement.layout import mesh
from placement.layout.layout import Layout
from serve_app.deployment.catalog import resolve


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cold", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    path = resolve(asked.model).path
    spec = header.read(path)
    config = RankConfig.model_validate(
        {"world_rank": 0, "layout": Layout(), "spec": spec, "model_path": str(path), "device": "cpu", "block_size": 16}
        | {"dtype": asked.dtype}
    )
    files = sorted({entry.file for entry in header.read_tensors(path, spec).tensors.values()})
    print(f"{path}: {sum(file.stat().st_size for file in files) / 1e6:.0f} MB, {asked.threads} threads, {asked.rounds} rounds")
    with tempfile.TemporaryDirectory() as folder:
        kept, nothing = HashCache(Path(folder), settled_s=-1), HashCache(Path(os.devnull) / "none", settled_s=float("inf"))

        def hasher(cache: HashCache) -> WeightHasher:
            return WeightHasher(path, spec, Layout(), 0, asked.threads, cache)

        ways: dict[str, Callable[[], WeightHasher | NoWeightHasher]] = {
            "no digest": NoWeightHasher,
            "hashed": lambda: hasher(nothing),
            "hashes kept": lambda: hasher(kept),
        }
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        _load(config, ways["hashes kept"])
        for _ in range(asked.rounds):
            for name, way in ways.items():
                if asked.cold:
                    _forget(files)
                seconds[name].append(_load(config, way))
    for name, found in seconds.items():
        wall, cpu = zip(*found, strict=True)
        span = f"({min(wall):.2f} to {max(wall):.2f})"
        print(f"{name:12} {statistics.median(wall):7.2f} s {span}, CPU {statistics.median(cpu):.2f} s")


def _load(config: RankConfig, way: Callable[[], WeightHasher | NoWeightHasher]) -> tuple[float, float]:
    """Returns the seconds and the CPU seconds that one load takes."""
    groups = {axis: SoloGroup(axis) for axis in mesh.talking_axes(config.spec)}
    began, cpu = time.perf_counter(), time.process_time()
    with way() as hasher:
        load_decoder(config, identity_of(config), groups, on_filled=hasher.add)
        hasher.finish()
    return time.perf_counter() - began, time.process_time() - cpu


def _forget(files: list[Path]) -> None:
    """Drop the files from the page cache."""
    for file in files:
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    main()
