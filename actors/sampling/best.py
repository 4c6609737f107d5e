"""The top tokens of each row, in a total order without ties: by (-logit, id)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Candidates(NamedTuple):
    """Tokens of each row, best first: [rows, count] fp32 logits and int32 ids."""

    logits: Tensor
    ids: Tensor


def best(logits: Tensor, ids: Tensor, count: int) -> Candidates:
    """Return the `count` best columns of each row of `logits` [rows, columns] fp32, or all columns if there are not more,
    sorted by (-logit, id).

    `ids` are int32 vocabulary ids, [columns] or [rows, columns]. NaN counts as +inf, so it comes first, and a check of the best
    logit detects it.
    """
    ids = ids.expand(logits.shape)
    if count >= logits.shape[1]:
        return _sorted(logits, ids)
    # One more than needed: if the last one needed and the next are equal, topk may have returned either.
    values, at = logits.topk(count + 1, dim=-1)
    found = _sorted(values[:, :count], ids.gather(1, at[:, :count]))
    for row in torch.nonzero(values[:, count] == values[:, count - 1]).flatten().tolist():
        exact = _break_ties(logits[row], ids[row], values[row, count], count)
        found.logits[row], found.ids[row] = exact
    return found


def _break_ties(logits: Tensor, ids: Tensor, last: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` best of one row [columns], from all columns at least as good as `last`. Equal bf16 logits are
    common."""
    columns = torch.nonzero(torch.nan_to_num(logits, nan=torch.inf, posinf=torch.inf, neginf=-torch.inf) >= last).flatten()
    ordered = _sorted(logits[columns].unsqueeze(0), ids[columns].unsqueeze(0))
    return ordered.logits[0, :count], ordered.ids[0, :count]


def _sorted(logits: Tensor, ids: Tensor) -> Candidates:
    """Sort the columns of each row by (-logit, id).

    Logit and id are packed into one integer, the logit in the high bits, so that an unstable sort has no ties to break.
    """
    clean = torch.nan_to_num(logits, nan=torch.inf, posinf=torch.inf, neginf=-torch.inf) + 0.0  # -0.0 equals 0.0
    keys = ((_flip(clean.view(torch.int32)).to(torch.int64) << 32) - ids).sort(dim=-1, descending=True).values
    high = (keys + 0x7FFFFFFF) >> 32
    return Candidates(_flip(high.to(torch.int32)).view(torch.float32), ((high << 32) - keys).to(torch.int32))


def _flip(bits: Tensor) -> Tensor:
    """Convert fp32 bits to int32 that sort like the floats, and back, by inverting the magnitude of negative numbers."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)
