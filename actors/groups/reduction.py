"""Sums in rank order: the same bits whatever the backend, the run, or an element's place in the buffer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_NARROW = (torch.bfloat16, torch.float16)


def sum_in_rank_order(parts: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """The element-wise sum of `parts` (same shape and dtype), added one after another: ``((p0 + p1) + p2) + ...``.

    bf16 and fp16 are accumulated in fp32 and rounded once at the end; other dtypes in their own. ``torch.sum`` is not
    used: its order of additions may depend on where an element sits. Returns `out`, else new memory, else (for a single
    part) the part itself.
    """
    if len(parts) == 1:
        return parts[0] if out is None else out.copy_(parts[0])
    dtype = parts[0].dtype
    narrow = dtype in _NARROW
    total = parts[0].float().add_(parts[1]) if narrow else torch.add(parts[0], parts[1], out=out)
    for part in parts[2:]:
        total.add_(part)
    if not narrow:
        return total
    return total.to(dtype) if out is None else out.copy_(total)
