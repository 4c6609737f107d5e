"""Random layouts, drawn from whatever the rules accept: a field that becomes legal is drawn without a change here."""

from __future__ import annotations

import random

from placement.layout.layout import Layout
from placement.legality import rules
from placement.model.moe_spec import MoESpec
from placement.model.spec import ModelSpec


def draw_layout(draw: random.Random, spec: ModelSpec, most_ranks: int = 8) -> Layout:
    """A legal layout of 2 to `most_ranks` ranks (one replica)."""
    while True:
        layout = Layout(**_fields(draw, spec))
        if 2 <= layout.world <= most_ranks and not rules.broken(layout, spec, None):
            return layout


def _fields(draw: random.Random, spec: ModelSpec) -> dict[str, object]:
    tp, pp, cp = draw.choice((1, 2, 2, 3, 4, 5, 6)), draw.choice((1, 1, 2, 3)), draw.choice((1, 1, 2, 3, 4))
    dp_size = draw.choice((1, 1, 1, 2, 3))
    fields: dict[str, object] = {
        "tp": tp,
        "pp": pp,
        "attn_dp": dp_size,
        "cp": cp,
        "dcp": draw.choice((1, 1, 2, 3)),
        "sp": draw.random() < 0.3,
        "lm_head": draw.choice(("auto", "stage")) if dp_size > 1 else "auto",
    }
    if cp > 1:
        fields["cp_style"] = draw.choice(("ring", "allgather"))
    if draw.random() < 0.25:
        fields["tp_shares"] = tuple(draw.choice((1.0, 1.5, 2.0)) for _ in range(tp))
    if pp > 1 and draw.random() < 0.5:
        fields["stage_layers"] = _split(draw, spec.num_layers, pp)
    if spec.moe is not None:
        fields |= _expert_fields(draw, spec.moe, dp_size * tp * cp)
    return fields


def _expert_fields(draw: random.Random, moe: MoESpec, stage_ranks: int) -> dict[str, object]:
    moe_dp = draw.choice([size for size in (1, 1, 1, 2, 3) if stage_ranks % size == 0])
    ep = draw.choice([size for size in range(1, stage_ranks + 1) if stage_ranks // moe_dp % size == 0])
    redundant = draw.randint(1, moe.num_experts) if ep > 1 and draw.random() < 0.3 else 0
    return {"moe_dp": moe_dp, "ep": ep, "redundant_experts": redundant, "dispatch": draw.choice(("auto", "gather", "a2a"))}


def _split(draw: random.Random, layers: int, stages: int) -> tuple[int, ...]:
    if layers < stages:
        return (1,) * stages
    cuts = sorted(draw.sample(range(1, layers), stages - 1))
    return tuple(stop - start for start, stop in zip((0, *cuts), (*cuts, layers), strict=True))
