"""Measure how evenly experts are placed on random skewed loads, compared with the public greedy algorithm (EPLB) and with the
upper bound, and how long placement takes.

    python -m benchmarks.experts [--skews N]
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from placement.experts.expert_map import balancedness, bound, place
from tests.support.expert_loads import public, skewed


def main() -> None:
    """Print the summary of the random loads, and one line for each kind of load of a large model."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--skews", type=int, default=1000)
    skews = parser.parse_args().skews
    source, rows = np.random.default_rng(0), []
    for _ in range(skews):
        load, ranks, redundant = skewed(source)
        placed = place([load], ranks, redundant)
        [ours], [theirs] = balancedness(placed, [load]), balancedness(public(load, ranks, redundant), [load])
        rows.append((ours, theirs, bound([load], placed.slots)[0]))
    ours, theirs, most = np.array(rows).T
    print(f"{skews} skews: mean/max {ours.mean():.4f}, greedy {theirs.mean():.4f}, bound {most.mean():.4f}")
    print(f"  below greedy {(ours < theirs - 1e-9).sum()}, within 5% of the bound {(ours >= 0.95 * most).mean():.1%}")
    print(f"  greedy {(theirs >= 0.95 * most).mean():.1%}; the least part of the bound {(ours / most).min():.3f}")
    for name, draw in (("lognormal", source.lognormal), ("zipf", lambda *_: source.permutation(1 / np.arange(1, 257)))):
        load = [draw(0, 1, 256).tolist() for _ in range(58)]
        start = time.perf_counter()
        placed = place(load, 64, 64)
        took = time.perf_counter() - start
        even = np.mean(balancedness(placed, load)) / np.mean(bound(load, placed.slots))
        print(f"58 layers of 256 experts, 320 slots on 64 ranks, {name}: {took:.1f} s, {even:.4f} of the bound")


if __name__ == "__main__":
    main()
