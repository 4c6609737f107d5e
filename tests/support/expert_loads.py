"""Loads and maps of experts, and the public greedy placement (DeepSeek's EPLB) by its description: what ours is held against.

Replicate: one copy after another to the expert of largest load per copy. Pack: by descending load, each to the lightest
pack with room. With groups that divide over the nodes: groups to nodes, copies in a node, copies to the node's ranks.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from placement.experts.expert_map import ExpertMap, slots_of_ranks


def shuffled(old: ExpertMap, draw: random.Random) -> ExpertMap:
    """Another map of the same slots, at random: as many copies of each expert, no two of them on a rank."""

    def row(experts: tuple[int, ...]) -> tuple[int, ...]:
        cards = list(experts)
        while cards == list(experts) or any(len(set(cards[own.start : own.stop])) < len(own) for own in old.ranges):
            draw.shuffle(cards)
        return tuple(cards)

    return replace(old, experts=tuple(map(row, old.experts)))


def greedy(load: Sequence[float], physical: int, groups: int, nodes: int, ranks: int) -> list[int]:
    """The expert in each physical slot of one layer."""
    if groups % nodes:
        groups = nodes = 1
    size = len(load) // groups
    group_loads = [sum(load[group * size : (group + 1) * size]) for group in range(groups)]
    found: list[int] = []
    for members in _pack(group_loads, nodes):
        experts = [group * size + at for group in members for at in range(size)]
        copies = _replicate([load[expert] for expert in experts], physical // nodes)
        counts = [copies.count(at) for at in range(len(experts))]
        for held in _pack([load[experts[at]] / counts[at] for at in copies], ranks // nodes):
            found += [experts[copies[item]] for item in held]
    return found


def _replicate(load: Sequence[float], physical: int) -> list[int]:
    copies = list(range(len(load)))
    counts = [1] * len(load)
    while len(copies) < physical:
        heaviest = max(range(len(load)), key=lambda at: load[at] / counts[at])
        copies.append(heaviest)
        counts[heaviest] += 1
    return copies


def _pack(load: Sequence[float], packs: int) -> list[list[int]]:
    room = len(load) // packs
    held: list[list[int]] = [[] for _ in range(packs)]
    sums = [0.0] * packs
    if room == 1:
        return [[item] for item in range(packs)]
    for item in sorted(range(len(load)), key=lambda item: -load[item]):
        lightest = min((pack for pack in range(packs) if len(held[pack]) < room), key=lambda pack: sums[pack])
        held[lightest].append(item)
        sums[lightest] += load[item]
    return held


def skewed(source: np.random.Generator) -> tuple[list[float], int, int]:
    """(load, ranks, redundant) of a size people run, and a skew."""
    num_experts = int(source.choice([16, 32, 60, 64, 128, 256]))
    ranks = int(source.choice([size for size in (2, 4, 8, 16, 32, 64) if size * 2 <= num_experts]))
    redundant = int(source.integers(0, 3)) * ranks + -num_experts % ranks
    kinds = (
        lambda: source.pareto(1.5, num_experts) + 0.01,
        lambda: source.lognormal(0, 1.2, num_experts),
        lambda: source.permutation(1 / np.arange(1, num_experts + 1)),
        lambda: source.integers(0, 1000, num_experts).astype(float),
    )
    return kinds[source.integers(len(kinds))]().tolist(), ranks, min(redundant, num_experts)


def public(load: list[float], ranks: int, redundant: int, groups: int = 1, nodes: int = 1) -> ExpertMap:
    row = greedy(load, len(load) + redundant, groups, nodes, ranks)
    return ExpertMap(len(load), slots_of_ranks(len(load), ranks, redundant), (tuple(row),))
