"""Ray placement groups: the resource bundles that one replica requests, and whether a cluster could ever grant them.

There is one bundle per tp group. A bundle never spans nodes, so the ranks of a tp group always share a node::

    tp=2,pp=2     world ranks  0 1 | 2 3
                  bundles        0 |   1      each {"CPU": 2}

Ray waits for ever for a placement group that cannot fit, so a request is compared with the nodes' total resources first. A
request that exceeds the totals is *impossible* and refused at once; one that exceeds only the free resources is *busy* and can
be waited for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from placement.layout.layout import Layout
from placement.nodes.hardware import DeviceKind

Bundle = dict[str, float]

_UNITS_PER_RESOURCE = 10_000
"""Ray's resolution of resource amounts: ten-thousandths."""


def bundles(layout: Layout, kind: DeviceKind) -> list[Bundle]:
    """Returns the resource bundles of one replica, one per tp group in world-rank order: one CPU per rank, and on CUDA (`kind`)
    one GPU per rank as well."""
    per_rank = {"cpu": ("CPU",), "cuda": ("GPU", "CPU")}[kind]
    return [{resource: float(layout.tp) for resource in per_rank} for _ in range(layout.world // layout.tp)]


def bundle_of(layout: Layout, world_rank: int) -> int:
    """Returns the index, in the replica's list of bundles, of the bundle that a world rank runs in."""
    return world_rank // layout.tp


def counted(wanted: Sequence[Mapping[str, float]]) -> str:
    """Returns the text for a list of equal bundles, for example ``2 bundles of 4 CPU``. `wanted` maps resource names to amounts
    for each bundle. Raises `IndexError` if it is empty."""
    return f"{len(wanted)} bundle{'' if len(wanted) == 1 else 's'} of {_text(wanted[0])}"


def impossible(wanted: Sequence[Mapping[str, float]], nodes: Mapping[str, Mapping[str, float]]) -> str | None:
    """Returns why these bundles can never be placed together, as a sentence, or None if they fit on the idle nodes.

    `wanted` maps resource names to amounts for each bundle; `nodes` maps node names to total resources. Bundles may share a
    node. The check places the largest bundles first (first-fit decreasing), which is exact if all bundles are equal, as those
    of `bundles` are.
    """
    if not wanted:
        return None
    for bundle in wanted:
        if not any(_fits(bundle, node) for node in nodes.values()):
            return _too_large(bundle, nodes)
    placed = _first_fit_decreasing(wanted, nodes)
    if placed == len(wanted):
        return None
    sizes = ", ".join(f"{name} ({_text(_relevant(node, wanted))})" for name, node in nodes.items())
    return (
        f"only {placed} of {len(wanted)} bundles (the largest asks for {_text(max(wanted, key=_size))}) fit on all nodes "
        f"at once, and a bundle cannot span nodes: {sizes}. Use fewer replicas or stages, or a smaller tp."
    )


def _first_fit_decreasing(wanted: Sequence[Mapping[str, float]], nodes: Mapping[str, Mapping[str, float]]) -> int:
    """Returns how many bundles fit when the largest are placed first."""
    free = [{resource: _units(amount) for resource, amount in node.items()} for node in nodes.values()]
    placed = 0
    for bundle in sorted(wanted, key=_size, reverse=True):
        need = {resource: _units(amount) for resource, amount in bundle.items()}
        home = next((node for node in free if all(node.get(name, 0) >= amount for name, amount in need.items())), None)
        if home is not None:
            placed += 1
            home.update({name: home.get(name, 0) - amount for name, amount in need.items()})
    return placed


def _too_large(bundle: Mapping[str, float], nodes: Mapping[str, Mapping[str, float]]) -> str:
    seen = sorted({name for node in nodes.values() for name in node if not name.startswith("node:")})
    names = f"Resource names seen: {', '.join(seen) or 'none'}."
    for resource, amount in bundle.items():
        largest = max(nodes, key=lambda name: nodes[name].get(resource, 0.0), default=None)
        most = nodes[largest].get(resource, 0.0) if largest is not None else 0.0
        if largest is None or most == 0 < amount:
            return f"a bundle asks for {_text(bundle)}, but no node has the resource {resource}. {names}"
        if _units(most) < _units(amount):
            return (
                f"a bundle asks for {_text(bundle)}, but the largest node, {largest}, has {most:g} {resource}, and a bundle "
                f"cannot span nodes. {names}"
            )
    return f"a bundle asks for {_text(bundle)}, but no single node has all of it. {names}"


def _fits(bundle: Mapping[str, float], node: Mapping[str, float]) -> bool:
    return all(_units(node.get(resource, 0.0)) >= _units(amount) for resource, amount in bundle.items())


def _relevant(node: Mapping[str, float], wanted: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {resource: node.get(resource, 0.0) for bundle in wanted for resource in bundle}


def _size(bundle: Mapping[str, float]) -> float:
    return max(bundle.values(), default=0.0)


def _units(amount: float) -> int:
    return round(amount * _UNITS_PER_RESOURCE)


def _text(resources: Mapping[str, float]) -> str:
    return " + ".join(f"{amount:g} {resource}" for resource, amount in resources.items())
