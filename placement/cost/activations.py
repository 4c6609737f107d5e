"""Memory that a step takes on a rank besides weights and KV cache: hidden states, intermediate values, and logits.

    activations = gathered pages + hidden states + the largest of (attention, MLP or experts, logits)

The three alternatives are never in memory together: each is freed before the next begins. The buffer of gathered pages is kept
from step to step. The factors below count the tensors that the implementation has at once, and were compared with measurements.
Expert dispatch is counted at twice its mean, since the load of a rank depends on the router.
"""

from __future__ import annotations

from dataclasses import dataclass

from placement.layout.layout import Layout
from placement.layout.lm_head import is_over_stage
from placement.model.spec import DTYPE_BYTES, DType, ModelSpec
from placement.ownership.shard import Shard

GATHERED_TOKENS = 1 << 15
"""Maximum number of cached tokens that decode attention on a CPU gathers at once, in one layer; one longer row is gathered
whole."""
_SCORED_BYTES = 32 << 20
_SCORED_ROWS = 256
_HIDDEN_COPIES = 6
_ROTATED_BYTES = 12
"""Bytes per element of queries and keys during the rotation: three fp32 tensors."""
_MLP_COPIES = 4
"""Tensors as wide as the MLP at once: gate, up, activated gate, and product."""
_LOGIT_COPIES = 5
"""fp32 tensors of a step's logits that sampling has at once: raw, edited, scaled, filtered, and with noise."""
_EXPERT_SKEW = 2


@dataclass(frozen=True)
class StepLimits:
    """The largest step that a rank may have to run: the numbers of its tokens and of its sequences (of one attn_dp rank), and
    the length in tokens of the longest sequence."""

    tokens: int
    sequences: int
    length: int


def scored_rows(vocab_columns: int) -> int:
    """Returns the number of prompt tokens whose logits are computed at once when a prompt is scored: at most 256, and at most
    32 MiB of fp32 logits of `vocab_columns` columns each."""
    return max(1, min(_SCORED_ROWS, _SCORED_BYTES // (4 * max(1, vocab_columns))))


def activation_bytes(spec: ModelSpec, layout: Layout, own: Shard, dtype: DType, limits: StepLimits, gathers: bool) -> int:
    """Returns an upper bound of the bytes that the largest step of `limits` takes on the rank with the shard `own`, besides
    weights and KV cache.

    `dtype` is that of the weights. `gathers` is whether attention copies the cached keys and values of a sequence before it
    reads them (on CPU), in place of reading pages (on CUDA).
    """
    size = DTYPE_BYTES[dtype]
    hidden = _HIDDEN_COPIES * limits.tokens * spec.hidden_size * size
    gathered = _gathered(spec, layout, own, size, limits) if gathers else 0
    attention, mlp, logits = (part(spec, layout, own, size, limits) for part in (_attention, _mlp, _logits))
    return gathered + hidden + max(attention, mlp, logits)


def _gathered(spec: ModelSpec, layout: Layout, own: Shard, size: int, limits: StepLimits) -> int:
    """Returns the bytes of the buffers into which cached keys and values are gathered, one for each attention kind."""
    tokens = min(limits.sequences * limits.length, max(limits.length, GATHERED_TOKENS)) // layout.kv_owners
    return sum(
        tokens * len(kv_heads) * kind.cached_dim * size for kind, (_, kv_heads) in zip(spec.kinds, own.heads, strict=True)
    )


def _attention(spec: ModelSpec, layout: Layout, own: Shard, size: int, limits: StepLimits) -> int:
    """Returns the bytes of one layer's queries, keys and values, and with MLA of one sequence's latents expanded to keys and
    values of every head."""
    most = 0
    for kind, (q_heads, kv_heads) in zip(spec.kinds, own.heads, strict=True):
        width = len(q_heads) * (kind.key_dim + kind.value_dim) + len(kv_heads) * kind.cached_dim
        expanded = 0 if spec.mla is None else limits.length * len(q_heads) * (spec.mla.query_dim + spec.mla.value_dim) * size
        new = limits.tokens * width * (2 * size + _ROTATED_BYTES)
        most = max(most, new + expanded)
    return most


def _mlp(spec: ModelSpec, layout: Layout, own: Shard, size: int, limits: StepLimits) -> int:
    """Returns the bytes of one layer's intermediate values in the MLP, or in the rank's experts and the shared expert, and of
    a repacked copy of the gate and up weights (CPU kernels make one)."""
    dense = (limits.tokens * _MLP_COPIES + 2 * spec.hidden_size) * len(own.columns) * size
    if spec.moe is None or not own.expert_slots:
        return dense
    tokens = limits.tokens * layout.attn_dp
    chosen = min(_EXPERT_SKEW * spec.moe.top_k / layout.ep, spec.moe.top_k, len(own.expert_slots))
    routed = int(tokens * chosen) * (2 * spec.hidden_size + _MLP_COPIES * len(own.expert_columns)) * size
    shared = limits.tokens * len(own.shared_columns) * _MLP_COPIES * size
    return max(dense, routed + shared + 2 * tokens * spec.hidden_size * size)


def _logits(spec: ModelSpec, layout: Layout, own: Shard, size: int, limits: StepLimits) -> int:
    """Returns the bytes of the logits of sampled rows or of a piece of a scored prompt; 0 but on the last stage."""
    if not own.last_stage:
        return 0
    columns = len(own.head_vocab)
    rows = limits.sequences * (layout.attn_dp if is_over_stage(spec, layout) else 1)
    sampled = rows * columns * (size + 4 * _LOGIT_COPIES)
    return max(sampled, scored_rows(columns) * columns * (size + 8))
