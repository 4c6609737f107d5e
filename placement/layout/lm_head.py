"""Over which ranks of a stage the LM head is split: those of each DP rank, or those of all DP ranks together.

Two DP ranks (attn_dp) of two tp ranks, 100 vocabulary rows::

                     DP rank 0           DP rank 1
                     rank 0    rank 1    rank 2    rank 3
    lm_head=dp_rank  0-49      50-99     0-49      50-99     each DP rank chooses its tokens by itself
    lm_head=stage    0-24      25-49     50-74     75-99     all choose those of all DP ranks together

Over the stage a rank holds, and reads in every step, as many times less of the head as there are DP ranks. Before it the rows
that tokens are chosen from are gathered from all DP ranks, each rank bringing its share of its DP rank's; sampling exchanges
go over the same group. A DP rank without rows takes part, since the others need its part of the vocabulary.

The rule, where ``lm_head=auto``: over the stage where DP ranks meet in every layer anyway (models with experts) and a rank is
spared at least `WORTH_BYTES`: reading those takes a GPU of 3.35 TB/s about 20 µs, as long as the one gather takes to start.
"""

from __future__ import annotations

from collections.abc import Iterator

from placement.layout.layout import Layout
from placement.model.spec import DTYPE_BYTES, ModelSpec

WORTH_BYTES = 64 * 2**20


def is_over_stage(spec: ModelSpec, layout: Layout) -> bool:
    """Whether the head is split over all DP ranks of the last stage."""
    if layout.lm_head != "auto":
        return layout.lm_head == "stage"
    return spec.moe is not None and not _hindrance(spec, layout) and spared_bytes(spec, layout) >= WORTH_BYTES


def spared_bytes(spec: ModelSpec, layout: Layout) -> int:
    """Bytes of the head, in the model's own dtype, that a rank has less of when it is split over all DP ranks."""
    head = spec.vocab_size * spec.hidden_size * DTYPE_BYTES[spec.dtype]
    return head // layout.tp - head // (layout.tp * layout.attn_dp)


def head_can_be_sharded(layout: Layout, spec: ModelSpec) -> Iterator[tuple[str, str]]:
    """A rule of `placement.legality.rules`: what was asked for is possible, and means something."""
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
