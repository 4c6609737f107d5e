"""Deterministic reduction: sums in rank order, bit-identical for every backend, run and position in the buffer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_NARROW = (torch.bfloat16, torch.float16)


def sum_in_rank_order(parts: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """Return the element-wise sum of `parts` (at least one, same shape and dtype), added one after another: ``((p0 + p1) + p2)
    + ...``.

    bf16 and fp16 are accumulated in fp32 and rounded once at the end; other dtypes are accumulated in their own precision.
    ``torch.sum`` is not used, because its order of additions may depend on the position of an element. The sum is written to
    `out` and `out` returned if given, otherwise it is new memory, or for a single part the part itself.
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
