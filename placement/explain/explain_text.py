"""The text form of an explanation: the grid, the groups, one layer, the traffic, the memory and the balance, with their
numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from placement.cost.balance import MEASURE, bubble
from placement.cost.memory import parameter_count
from placement.cost.units import size_text
from placement.experts.expert_map import map_of
from placement.explain import drawing
from placement.explain.columns import columns
from placement.explain.explanation import Explanation, context_source, micro_batch_counts
from placement.layout.layout import Layout
from placement.layout.lm_head import is_over_stage, spared_bytes
from placement.legality.dcp_sizes import legal_dcp
from placement.legality.suggestions import sizes
from placement.model.moe_spec import MoESpec

_MOST_GROUPS = 8
"""Largest number of groups of an axis that are listed; of the others, only the number is given."""


def as_text(explained: Explanation, name: str) -> str:
    """Returns the complete report on a layout: rank grid, groups, one layer, traffic of a step, memory and balance. `name` is
    the model's name in its title."""
    sections = (_head(explained, name), drawing.grid(explained), _groups(explained), _layer(explained))
    rest = (_traffic(explained), _memory(explained), _balance(explained))
    return "\n\n".join("\n".join(section) for section in (*sections, *rest))


def _head(explained: Explanation, name: str) -> Iterator[str]:
    spec, layout, step = explained.spec, explained.layout, explained.step
    copies = f", {layout.replicas} replicas on {layout.devices} devices" if layout.replicas > 1 else ""
    yield f"{name} as {layout}: {_many(layout.world, 'rank')}{copies}"
    if layout.attn_dp > 1:
        ranks = _many(layout.world // layout.attn_dp, "rank")
        yield f"{layout.attn_dp} DP ranks of {ranks} each: a request and its KV cache are in one of them; one scheduler for all"
    if is_over_stage(spec, layout):
        spared = size_text(spared_bytes(spec, layout))
        yield f"one LM head for all DP ranks, over {layout.attn_dp * layout.tp} ranks, each of which is spared {spared}"
    if spec.moe is not None and layout.ep > 1:
        yield _experts(spec.moe, layout)
    yield f"{parameter_count(spec):,} parameters in {step.dtype}, {spec.num_layers} layers, hidden size {spec.hidden_size:,}"
    yield f"context of at most {spec.max_position:,} tokens: {context_source(spec)}"


def _experts(moe: MoESpec, layout: Layout) -> str:
    """Returns the distribution of the experts over the ep ranks, even or not."""
    extra = f" and {layout.redundant_experts:,} redundant ones" if layout.redundant_experts else ""
    held = Counter(map_of(moe, layout).slots)
    spread = ", ".join(f"{slots:,} on {'each' if len(held) == 1 else _many(ranks, 'rank')}" for slots, ranks in held.items())
    return f"{moe.num_experts:,} experts{extra} over {layout.ep} ep ranks: {spread}"


def _groups(explained: Explanation) -> Iterator[str]:
    shared = {axis: found for axis, found in explained.groups.items() if len(found[0]) > 1}
    yield "groups" if shared else "groups: none, with a single rank"
    wide = max((4, *map(len, shared)))
    for axis, found in shared.items():
        named = " ".join(f"[{' '.join(map(str, group))}]" for group in found[:_MOST_GROUPS])
        yield f"  {axis:<{wide}} {named}{f' and {len(found) - _MOST_GROUPS} more' if len(found) > _MOST_GROUPS else ''}"


def _layer(explained: Explanation) -> Iterator[str]:
    yield f"one layer on rank 0, in {_step(explained)}"
    yield from (f"  {line}" for line in drawing.layer_path(explained, 0))


def _traffic(explained: Explanation) -> Iterator[str]:
    if not explained.traffic:
        yield f"traffic of {_step(explained)}: none"
        return
    yield f"traffic of {_step(explained)}; bytes of one call, by rank"
    rows = [("where", "operation", "calls", "payload", "on the wire", "ranks")]
    for entry, ranks in explained.traffic:
        operation = f"{entry.op} {entry.axis} x{entry.group_size}"
        numbers = (f"{entry.calls:,}", f"{entry.payload_bytes:,}", f"{entry.wire_bytes_per_rank:,}")
        rows.append((entry.where, operation, *numbers, sizes(ranks)))
    yield from columns(rows, right={2, 3, 4})
    sent = [
        sum(entry.calls * entry.wire_bytes_per_rank for entry, ranks in explained.traffic if rank in ranks)
        for rank in range(explained.layout.world)
    ]
    most = max(sent)
    yield f"  most is sent by rank {sent.index(most)}: {size_text(most)} a step; all ranks together {size_text(sum(sent))}"


def _memory(explained: Explanation) -> Iterator[str]:
    lengths = {row.context + row.tokens for row in explained.step.rows}
    most = explained.spec.max_position
    beyond = f" (more than the {most:,} the model was made for)" if max(lengths) > most else ""
    yield f"memory with {_many(len(explained.step.rows), 'sequence')} of {sizes(lengths)} tokens in the cache{beyond}"
    rows: list[tuple[str, ...]] = [("ranks", "weights", "KV cache", "activations", "together")]
    alike: dict[tuple[int, int, int], list[int]] = {}
    for view in explained.ranks:
        parts = (view.memory.weight_bytes, view.kv_bytes, view.memory.activation_bytes)
        alike.setdefault(parts, []).append(view.world_rank)
    for parts, ranks in alike.items():
        rows.append((sizes(ranks), *map(size_text, parts), size_text(sum(parts))))
    of_all = [sum(parts[at] * len(ranks) for parts, ranks in alike.items()) for at in range(3)]
    rows.append(("all", *map(size_text, of_all), size_text(sum(of_all))))
    yield from columns(rows, right={1, 2, 3, 4})
    yield from _copies(explained)


def _copies(explained: Explanation) -> Iterator[str]:
    """Yields the number of copies of a token in the KV cache, if there are several, and the `dcp` that would leave one."""
    spec, layout = explained.spec, explained.layout
    largest = max(legal_dcp(spec, layout.tp, layout.tp_shares))
    if layout.dcp < largest:
        what, copies = "latents" if spec.mla is not None else "keys and values", largest // layout.dcp
        yield f"  {copies} ranks of a tp group keep the same {what}; with dcp={largest} each would keep a share of its own"


def _balance(explained: Explanation) -> Iterator[str]:
    found, layout = explained.balance, explained.layout
    slowest = found.work.index(max(found.work))
    yield f"balance {found.mean_over_max:.3f} (mean / max over ranks); rank {slowest} has most"
    if layout.tp_shares is not None:
        yield f"  on devices as fast as their shares: {found.for_shares:.3f}"
    yield f"  work: {MEASURE}"
    waits = [f"{bubble(layout.pp, count):.1%} with {count}" for count in micro_batch_counts(layout)]
    if waits:
        yield f"  bubble, by micro-batches in flight: {', '.join(waits)}"


def _step(explained: Explanation) -> str:
    step = explained.step
    tokens = sizes({row.tokens for row in step.rows})
    return f"a step of {_many(len(step.rows), 'row')} of {tokens} new token{'' if tokens == '1' else 's'}"


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"
