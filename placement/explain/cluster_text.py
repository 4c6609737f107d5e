"""The text form of a cluster: its nodes as a table, a drawing of zones, racks, fast domains and nodes, and its links.

zone z1
├─ rack r1
│  ├─ fast domain d0
│  │  ├─ a  ■■■■■■■■
│  │  └─ b  ■■■■□□□□        ■ a slot that is taken, □ one that is free
│  └─ c  □□□□
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from placement.cost.crossings import speed_text, time_text
from placement.cost.units import size_text
from placement.explain.columns import columns
from placement.nodes.hardware import SLOW, ClusterSpec
from placement.nodes.links import Link

_LEVELS = ("zone", "rack", "fast domain")
_WIDEST = 64
"""Largest number of slots that are drawn one by one."""


def as_text(cluster: ClusterSpec, free: Sequence[int]) -> str:
    """Returns a cluster as text: a table of its nodes, a drawing of its topology, and its links. `free` has the number of free
    slots of each node, in the order of ``cluster.nodes``. Raises `ValueError` if the lengths differ."""
    sections = (_table(cluster, free), _drawing(cluster, free), _links(cluster))
    return "\n\n".join("\n".join(section) for section in sections)


def _table(cluster: ClusterSpec, free: Sequence[int]) -> Iterator[str]:
    yield f"{_many(len(cluster.nodes), 'node')}, {_many(cluster.slots, 'slot')}, {sum(free)} free"
    rows = [("node", "slots", "free", "kind", "memory", "domain", "rack", "zone", "pool", "id")]
    for node, left in zip(cluster.nodes, free, strict=True):
        memory = "" if node.memory_bytes is None else size_text(node.memory_bytes)
        where = (node.domain or "", node.rack or "", node.zone or "", node.pool or "")
        rows.append((node.name, str(node.slots), str(left), node.accelerator or node.kind, memory, *where, node.id[:8]))
    kept = [at for at in range(len(rows[0])) if any(row[at] for row in rows[1:])]
    yield from columns([[row[at] for at in kept] for row in rows], right={kept.index(1), kept.index(2)} if rows[1:] else set())


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _drawing(cluster: ClusterSpec, free: Sequence[int]) -> Iterator[str]:
    yield "topology; ■ taken, □ free"
    yield from _inside(cluster, free, list(range(len(cluster.nodes))), 0, "  ")


def _inside(cluster: ClusterSpec, free: Sequence[int], members: Sequence[int], level: int, margin: str) -> Iterator[str]:
    """Yields the regions of one level with their contents, then the nodes that belong to no region."""
    if level == len(_LEVELS):
        regions: list[tuple[str, list[int]]] = []
    else:
        names = list(dict.fromkeys(cluster.nodes[at].path[level] for at in members))
        if names == [None]:
            yield from _inside(cluster, free, members, level + 1, margin)
            return
        regions = [(name or "", [at for at in members if cluster.nodes[at].path[level] == name]) for name in names]
    if not regions:
        for at in members:
            corner = "└─" if at == members[-1] else "├─"
            yield f"{margin}{corner} {cluster.nodes[at].name}  {_slots(cluster.nodes[at].slots, free[at])}"
    for name, inner in regions:
        is_last = name == (regions[-1][0])
        yield f"{margin}{'└─' if is_last else '├─'} {_LEVELS[level]} {name or '(not named)'}"
        yield from _inside(cluster, free, inner, level + 1, margin + ("   " if is_last else "│  "))


def _slots(count: int, free: int) -> str:
    return "■" * (count - free) + "□" * free if 0 < count <= _WIDEST else f"{count} slots, {free} free"


def _links(cluster: ClusterSpec) -> Iterator[str]:
    yield "links, one direction" if cluster.nodes else "links: none"
    for at, node in enumerate(cluster.nodes):
        if node.inside is not None:
            yield f"  inside {node.name}: {_link(cluster.link(at, at))}"
    if cluster.links:
        rows = [
            [each.a, "-", each.b, _link(each.link), "slow" if _is_slow(cluster, each.a, each.b) else ""]
            for each in cluster.links
        ]
        yield from columns(rows, right=set())
        return
    kinds = {0: "inside a node", 1: "between nodes", 2: "between fast domains", 3: "between racks", 4: "between zones"}
    seen: dict[int, Link] = {}
    for one in range(len(cluster.nodes)):
        for other in range(one, len(cluster.nodes)):
            seen.setdefault(cluster.distance(one, other), cluster.link(one, other))
    for distance, link in sorted(seen.items()):
        yield f"  {kinds[distance]}: {_link(link)}{', slow' if distance >= SLOW else ''}"


def _link(link: Link) -> str:
    return f"{link.source} {speed_text(link.bytes_per_s)}, {time_text(link.latency_s)}"


def _is_slow(cluster: ClusterSpec, a: str, b: str) -> bool:
    names = [node.name for node in cluster.nodes]
    return cluster.is_slow(names.index(a), names.index(b))
