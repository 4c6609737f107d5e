"""Sharding of the LM head with DP attention: over the ranks of each DP rank, or over those of all DP ranks together.

Two DP ranks (attn_dp) of two tp ranks, 100 vocabulary rows::

                     DP rank 0           DP rank 1
                     rank 0    rank 1    rank 2    rank 3
    lm_head=dp_rank  0-49      50-99     0-49      50-99     each DP rank samples its own tokens
    lm_head=stage    0-24      25-49     50-74     75-99     all ranks sample the tokens of all DP ranks together

With ``lm_head=stage`` a rank holds, and reads in every step, ``1 / attn_dp`` of what it would hold otherwise. The hidden states
to sample from are first gathered from all DP ranks, each rank contributing its share of those of its DP rank; the exchanges of
sampling use the same group. A DP rank without rows takes part, since the others need its part of the vocabulary.

``lm_head=auto`` splits the head over the stage if DP ranks communicate in every layer anyway (MoE models) and a rank saves at
least `WORTH_BYTES`: reading that much takes a GPU of 3.35 TB/s about 20 µs, the start-up time of the additional gather.
"""

from __future__ import annotations

from collections.abc import Iterator

from placement.layout.layout import Layout
from placement.model.spec import DTYPE_BYTES, ModelSpec

WORTH_BYTES = 64 * 2**20


def is_over_stage(spec: ModelSpec, layout: Layout) -> bool:
    """Whether the LM head is split over the tp ranks of all DP ranks of the last stage together, instead of over those of each
    DP rank: as `lm_head` of the layout says, or by default if that saves a rank of an MoE model enough memory."""
    if layout.lm_head != "auto":
        return layout.lm_head == "stage"
    return spec.moe is not None and not _hindrance(spec, layout) and spared_bytes(spec, layout) >= WORTH_BYTES


def spared_bytes(spec: ModelSpec, layout: Layout) -> int:
    """Returns the bytes of the LM head, in the model's dtype, that a rank saves if the head is split over all DP ranks instead
    of those of one."""
    head = spec.vocab_size * spec.hidden_size * DTYPE_BYTES[spec.dtype]
    return head // layout.tp - head // (layout.tp * layout.attn_dp)


def head_can_be_sharded(layout: Layout, spec: ModelSpec) -> Iterator[tuple[str, str]]:
    """Checks that the requested `lm_head` is possible and has an effect (a rule of `placement.legality.rules`); yields the
    field at fault and a sentence if it is not."""
    if layout.lm_head == "stage" and (why := _hindrance(spec, layout)):
        yield "lm_head", f"lm_head=stage splits the head over the DP ranks of a stage, but {why}"
    if layout.lm_head == "dp_rank" and layout.attn_dp == 1:
        yield "lm_head", "lm_head=dp_rank keeps the head of each DP rank whole, but attn_dp=1"


def _hindrance(spec: ModelSpec, layout: Layout) -> str | None:
    ranks = layout.attn_dp * layout.tp
    if layout.attn_dp == 1:
        return "attn_dp=1"
    if spec.tie_embeddings and layout.pp == 1:
        return "it is the embedding (tie_word_embeddings), which each DP rank needs whole; with pp=2 or more it can be"
    if ranks > spec.vocab_size:
        product = f"attn_dp={layout.attn_dp} x tp={layout.tp}"
        return f"its {ranks} ranks ({product}) are more than the {spec.vocab_size} vocabulary rows (vocab_size)"
    return None
