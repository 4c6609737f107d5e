"""Suggestions: the legal layouts nearest to an illegal one.

The candidates are all (tp, pp) that suit the model and the cluster and use no more devices than the requested axes need
(`devices_of`). They are combined with the requested cp and attn_dp or halves of these, every legal dcp if one was requested,
the nearest legal expert axes, and as many of the requested replicas as fit. A candidate is suggested only if it passes every
rule, so a suggestion is never refused. Among those that pass, the ones that keep the most of the requested axes come first: an
axis of at least 2 ranks is dropped only if no legal candidate has them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import product

from placement.layout.layout import Layout
from placement.legality.dcp_sizes import legal_dcp
from placement.legality.expert_rules import nearest_expert_axes
from placement.model.spec import ModelSpec
from placement.nodes.hardware import ClusterSpec


def candidates(asked: Layout, spec: ModelSpec, cluster: ClusterSpec | None) -> list[Layout]:
    """Returns layouts for the model and the cluster (None: no limit by nodes) that resemble `asked` and use no more devices
    than its axes need; some may still break rules."""
    devices = devices_of(asked, has_experts=spec.moe is not None)
    most_tp = min(spec.num_heads, *spec.widths.values(), spec.vocab_size, devices)
    if cluster is not None:
        most_tp = min(most_tp, cluster.largest_node.slots if cluster.largest_node else 0)
    found: list[Layout] = []
    for tp in range(1, most_tp + 1):
        groups = devices // tp
        if cluster is not None:
            groups = min(groups, cluster.tp_groups(tp))
        for cp, dp_size in product(_halves(asked.cp), _halves(asked.attn_dp)):
            for pp in range(1, min(spec.num_layers, groups // (cp * dp_size)) + 1):
                replicas = min(asked.replicas, groups // (pp * cp * dp_size))
                experts = nearest_expert_axes(asked, spec, dp_size * cp * tp)
                # sp is kept if it was requested and there still is a tp group to split tokens over.
                plain = Layout(replicas=replicas, pp=pp, attn_dp=dp_size, cp=cp, tp=tp, sp=asked.sp and tp > 1, **experts)
                for split in _with_splits(plain, asked, spec):
                    found += _with_context(split, asked, spec)
    return found


def devices_of(asked: Layout, has_experts: bool = True) -> int:
    """Returns the number of devices that the axes of `asked` need together, even if it is illegal because one of them is too
    small for another: ``ep=2`` needs two, and so does ``sp=true``, though their tp is 1.

    Axes of experts count only with `has_experts`. The number is never less than ``asked.devices``.
    """
    stages = max(asked.pp, len(asked.stage_layers or ()))
    tp = max(asked.tp, len(asked.tp_shares or ()), asked.dcp, 2 if asked.sp else 1)
    moe_tp = asked.moe_tp if "moe_tp" in asked.asked else 1
    ep = max(asked.ep, 2 if asked.redundant_experts else 1)
    experts = asked.moe_dp * ep * moe_tp if has_experts else 1
    return asked.replicas * stages * max(asked.attn_dp * asked.cp * tp, experts)


def kept_axes(asked: Layout, other: Layout) -> int:
    """Returns how many of the requested axes the other layout has: those of at least 2 ranks in `asked` and in `other`, and
    whether it has redundant experts and sequence parallelism where they were requested."""
    sizes = sum(bool(min(getattr(asked, axis), getattr(other, axis)) > 1) for axis in _AXES if axis in asked.asked)
    extras = (asked.sp and other.sp, asked.redundant_experts and other.redundant_experts)
    return sizes + sum(map(bool, extras))


_AXES = ("replicas", "pp", "attn_dp", "cp", "tp", "dcp", "ep", "moe_dp", "moe_tp")


def _halves(size: int) -> list[int]:
    """Returns `size`, half of it (rounded down), and so on down to 1, always with the 2 with which the axis remains."""
    halves = [size]
    while halves[-1] > 1:
        halves.append(halves[-1] // 2)
    return halves if size < 3 or 2 in halves else [*halves[:-1], 2, 1]


def _with_context(candidate: Layout, asked: Layout, spec: ModelSpec) -> Iterator[Layout]:
    """Yields the candidate with every legal dcp (if one was requested), and with the requested and the automatic `lm_head`.

    The cp style is the requested one if the candidate has cp.
    """
    style = asked.cp_style if candidate.cp > 1 else "ring"
    for dcp in legal_dcp(spec, candidate.tp, candidate.tp_shares) if asked.dcp > 1 else [1]:
        for lm_head in dict.fromkeys((asked.lm_head, "auto")):
            yield candidate.model_copy(update={"dcp": dcp, "cp_style": style, "lm_head": lm_head})


def nearest(asked: Layout, field: str, among: list[Layout], is_legal: Callable[[Layout], bool]) -> list[Layout]:
    """Returns at most two of the layouts `among` that satisfy `is_legal`, of those that keep the most of the requested axes:
    the one with the fewest changes from `asked`, and the one that uses the most of its devices.

    `field` is the field at fault, whose change does not count. The result is empty if none is legal.
    """
    by_kept: dict[int, list[Layout]] = {}
    for other in among:
        by_kept.setdefault(kept_axes(asked, other), []).append(other)
    most = next((alike for _, alike in sorted(by_kept.items(), reverse=True) if any(map(is_legal, alike))), [])
    changes_least = sorted(most, key=lambda other: (_changes(asked, other, field), _distance(asked, other)))
    uses_most = sorted(most, key=lambda other: (-other.devices, _dropped(asked, other), _distance(asked, other)))
    best = (next(filter(is_legal, ranked), None) for ranked in (changes_least, uses_most))
    return list(dict.fromkeys(layout for layout in best if layout is not None))


def sizes(numbers: Iterable[int]) -> str:
    """Returns numbers as text, ascending, without duplicates and with runs as ranges: ``1-6, 8``."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _with_splits(candidate: Layout, asked: Layout, spec: ModelSpec) -> Iterator[Layout]:
    """Yields the candidate, and its variants with the user's `tp_shares`, `stage_layers` (adjusted if necessary), or both."""
    shares, layers = asked.tp_shares, asked.stage_layers
    kept: list[dict[str, object]] = [{}]
    if shares is not None and len(shares) == candidate.tp:
        kept.append({"tp_shares": shares})
    if layers is not None and len(layers) == candidate.pp:
        kept += [{**other, "stage_layers": _mended(layers, spec.num_layers)} for other in kept]
    for update in kept:
        yield candidate.model_copy(update=update)


def _mended(split: tuple[int, ...], total: int) -> tuple[int, ...]:
    """Returns a split of `total` layers: takes layers from its longest stages, or adds layers to its shortest, as needed."""
    stages = [min(layers, total) for layers in split]
    while sum(stages) > total:
        stages[stages.index(max(stages))] -= 1
    while sum(stages) < total:
        stages[stages.index(min(stages))] += 1
    return tuple(stages)


def _changes(asked: Layout, other: Layout, field: str) -> int:
    """Returns the number of fields that differ, not counting the one at fault."""
    names = Layout.model_fields.keys() - {field, "moe_tp"}  # moe_tp follows from the others
    return sum(getattr(asked, name) != getattr(other, name) for name in names)


def _dropped(asked: Layout, other: Layout) -> int:
    """Returns the number of user-given lists (`stage_layers`, `tp_shares`) that the other layout lacks."""
    return sum(getattr(asked, name) is not None and getattr(other, name) is None for name in ("stage_layers", "tp_shares"))


def _distance(asked: Layout, other: Layout) -> tuple[int, ...]:
    return (
        abs(asked.tp - other.tp),
        abs(asked.pp - other.pp),
        abs(asked.attn_dp - other.attn_dp),
        abs(asked.cp - other.cp),
        abs(asked.ep - other.ep),
        abs(asked.moe_dp - other.moe_dp),
        abs(asked.redundant_experts - other.redundant_experts),
        abs(asked.dcp - other.dcp),
        abs(asked.replicas - other.replicas),
        (asked.stage_layers is None) != (other.stage_layers is None),
        (asked.tp_shares is None) != (other.tp_shares is None),
    )
