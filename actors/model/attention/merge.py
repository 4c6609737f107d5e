"""Merging attention over disjoint sets of keys, by the output and log-sum-exp (LSE) of each part.

With ``l_i`` the log-sum-exp of part i: ``out = sum(exp(l_i) out_i) / sum(exp(l_i))`` (the online softmax of Milakov &
Gimelshein 2018, arXiv 1805.02867). It is used for cached context + fresh chunk, and wherever keys lie on several ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def merge(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return the attention output and LSE over the keys of all `parts` together, in the dtype of the first output and fp32.

    Each part is (output [..., queries, dim], LSE [..., queries] fp32, natural log), over keys that no other part has. A part
    that saw no key has LSE -inf and no weight, even if its output is NaN. If no part saw a key, the output is 0 and the LSE
    -inf.
    """
    outputs, lses = zip(*parts, strict=True)
    lse = torch.stack(lses)
    top = lse.amax(0)
    top = top.masked_fill(torch.isneginf(top), 0)  # exp(-inf - -inf) would be NaN
    weights = (lse - top).exp()
    total = weights.sum(0)
    shares = weights / total.clamp_min(torch.finfo(torch.float32).tiny)
    joined = torch.zeros_like(outputs[0], dtype=torch.float32)
    for output, share in zip(outputs, shares, strict=True):
        share = share.unsqueeze(-1)
        joined += torch.where(share > 0, output.to(torch.float32) * share, 0.0)
    return joined.to(outputs[0].dtype), top + total.log()
