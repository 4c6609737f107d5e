"""top-k, top-p and min-p over a row's candidates, and the draw among those that stay.

Candidates are sorted by (-logit, id), which is the same order everywhere, so ties at a boundary fall the same way under
any layout. Filters come in the order of transformers: temperature, top-k, top-p over what top-k left, min-p.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from actors.noise import gumbel_of
from actors.sampling.rows import SampleRow

_PROBABLY_ENOUGH = 512
"""Candidates tried before the whole vocabulary is sorted: they nearly always hold the top-p mass, at 1/20 of the time."""


class Candidates(NamedTuple):
    """The best `count` tokens of each row, best first: [rows, count] fp32 logits and int32 ids."""

    logits: Tensor
    ids: Tensor


def best(logits: Tensor, ids: Tensor, count: int) -> Candidates:
    """The `count` best columns of each row by (-logit, id). `logits` [rows, columns]; `ids` [columns] or [rows, columns].

    Logit and id are packed in one integer, so that selection has no ties to break. NaN counts as +inf: it comes first
    and is seen by whoever looks at the best logit.
    """
    clean = torch.nan_to_num(logits, nan=torch.inf, posinf=torch.inf, neginf=-torch.inf) + 0.0
    bits = clean.view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    keys = (ordered.to(torch.int64) << 32) - ids
    top = keys.topk(min(count, logits.shape[1]), dim=-1).values
    high = (top + 0x7FFFFFFF) >> 32
    found = ((high << 32) - top).to(torch.int32)
    high = high.to(torch.int32)
    return Candidates(torch.where(high < 0, high ^ 0x7FFFFFFF, high).view(torch.float32), found)


def draw(candidates: Candidates, rows: list[SampleRow], mass: Tensor | None = None) -> Tensor:
    """[rows] index of each row's drawn candidate. `mass`: as in `nucleus`."""
    device = candidates.logits.device
    params = [row.sampling for row in rows]
    temperature = _column([one.temperature for one in params], device)
    scaled = candidates.logits / temperature
    keep = _top_k(scaled, [one.top_k for one in params])
    keep &= nucleus(scaled, keep, [one.top_p for one in params], mass)
    keep &= scaled >= min_p_floor(scaled[:, :1], [one.min_p for one in params])
    noise = gumbel_of([one.seed for one in params], [row.position for row in rows], candidates.ids)
    return (scaled + noise).masked_fill_(~keep, -torch.inf).argmax(dim=-1)


def nucleus(scaled: Tensor, keep: Tensor, top_p: list[float], mass: Tensor | None = None) -> Tensor:
    """Mask of the candidates before which less than `top_p` of the mass lies; the first always stays.

    Sums run in fp64 over weights exp(scaled - best). `mass` [rows, 1] is the weight of the row's whole vocabulary;
    None where only the candidates that `keep` marks count (after top-k).
    """
    weights = (scaled - scaled[:, :1]).exp().masked_fill(~keep, 0.0).double()
    sums = weights.cumsum(dim=-1)
    whole = sums[:, -1:] if mass is None else mass
    limit = torch.tensor(top_p, dtype=torch.float64, device=scaled.device).unsqueeze(1)
    # 1.0 means "off", also where rounding makes the sum of all but the last reach the whole.
    stay = (sums - weights < limit * whole) | (limit >= 1.0)
    stay[:, 0] = True
    return stay


def min_p_floor(best_scaled: Tensor, min_p: list[float]) -> Tensor:
    """[rows, 1] lowest scaled logit that stays: p >= min_p * max p, which needs no sum over the vocabulary."""
    return best_scaled + _column(min_p, best_scaled.device).log()


def draw_from_all(logits: Tensor, rows: list[SampleRow]) -> tuple[Tensor, Tensor]:
    """[rows] ids and best logits: a draw from whole rows [rows, vocab_size], where top-p needs the mass of all tokens."""
    ids = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
    few = best(logits, ids, _PROBABLY_ENOUGH)
    temperature = _column([row.sampling.temperature for row in rows], logits.device)
    scaled = logits / temperature
    mass = (scaled - scaled.max(dim=-1, keepdim=True).values).exp().double().sum(dim=-1, keepdim=True)
    chosen = few.ids.gather(1, draw(few, rows, mass).unsqueeze(1)).squeeze(1)
    for row in _unfinished(few, rows, temperature, mass):
        every = best(logits[row : row + 1], ids, logits.shape[1])
        at = draw(every, rows[row : row + 1], mass[row : row + 1])
        chosen[row] = every.ids[0, at[0]]
    return chosen, few.logits[:, 0]


def _unfinished(few: Candidates, rows: list[SampleRow], temperature: Tensor, mass: Tensor) -> list[int]:
    """Rows whose filters reach beyond the candidates at hand. Every rank holds the same values and finds the same rows."""
    scaled = few.logits / temperature
    held = (scaled - scaled[:, :1]).exp().double().sum(dim=-1)
    top_p = torch.tensor([row.sampling.top_p for row in rows], dtype=torch.float64, device=scaled.device)
    short = held < top_p * mass.squeeze(1)
    top_k = torch.tensor([row.sampling.top_k or 1 << 30 for row in rows], device=scaled.device)
    return torch.nonzero(short & (top_k > few.logits.shape[1])).flatten().tolist()


def _top_k(scaled: Tensor, top_k: list[int]) -> Tensor:
    """Mask of the first k candidates of each row (all where k is 0) that are not masked out (-inf)."""
    limit = torch.tensor([k or scaled.shape[1] for k in top_k], device=scaled.device).unsqueeze(1)
    return (torch.arange(scaled.shape[1], device=scaled.device) < limit) & (scaled > -torch.inf)


def _column(values: list[float], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device).unsqueeze(1)
