"""top-k, top-p (nucleus) and min-p filters over a row's candidates, and the draw among those that remain.

Candidates are sorted by (-logit, id), which is the same order everywhere, so that ties at a boundary are resolved identically
under any layout. Filters are applied in the order of transformers: temperature, top-k, top-p over what top-k left, min-p.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from actors.sampling.best import Candidates, best
from actors.sampling.blocks import blocks
from actors.sampling.noise import gumbel_of
from actors.sampling.rows import SampleRow

_TRIES = (128, 2048)
"""Numbers of candidates tried before a whole row is sorted: the first covers the top-p mass of most rows, in 1/40 of the
time."""
_SORTED_AT_ONCE = 1 << 18
"""Logits of whole rows that are sorted at once: a sort and the filters behind it take about 80 bytes for each."""


def draw(candidates: Candidates, rows: Sequence[SampleRow], mass: Tensor | None = None) -> Tensor:
    """Return the id drawn for each row, [rows] int32, from `candidates` [rows, count] after temperature, top-k, top-p and
    min-p. The draw depends only on the row's seed and position, the ids and the logits.

    `mass` [rows] fp64 is the weight of each row's whole vocabulary, for top-p (see `nucleus`); None if top-p counts only the
    candidates that top-k leaves.
    """
    device = candidates.logits.device
    params = [row.sampling for row in rows]
    scaled = candidates.logits / temperatures(rows, device)
    keep = _top_k(scaled, [one.top_k for one in params])
    if mass is not None or any(one.top_p < 1.0 for one in params):
        keep &= nucleus(scaled, keep, [one.top_p for one in params], mass)
    if any(one.min_p for one in params):
        keep &= scaled >= min_p_floor(scaled[:, :1], [one.min_p for one in params])
    noise = gumbel_of([one.seed for one in params], [row.position for row in rows], candidates.ids)
    at = noise.add_(scaled).masked_fill_(~keep, -torch.inf).argmax(dim=-1, keepdim=True)
    return candidates.ids.gather(1, at).squeeze(1)


def nucleus(scaled: Tensor, keep: Tensor, top_p: Sequence[float], mass: Tensor | None = None) -> Tensor:
    """Return the top-p mask, [rows, count] bool: a candidate stays if the weights of those before it sum to less than
    ``top_p[row]`` times the total. The first one always stays, and all stay if top_p is 1 or more.

    `scaled` [rows, count] are logits divided by the temperature, best first; a weight is exp(scaled - best), summed in fp64.
    Candidates outside of the mask `keep` [rows, count] bool (the result of top-k) weigh nothing, but may be marked in the
    result: combine both masks. `mass` [rows] fp64 is the total, the weight of a row's whole vocabulary; None: that of `keep`.
    """
    weights = _weights(scaled).masked_fill(~keep, 0.0).double()
    sums = weights.cumsum(dim=-1)
    whole = sums[:, -1] if mass is None else mass
    limit = torch.tensor(top_p, dtype=torch.float64, device=scaled.device)
    # 1.0 means "off", even if rounding makes the sum of all but the last reach the whole.
    stay = (sums - weights < (limit * whole).unsqueeze(1)) | (limit >= 1.0).unsqueeze(1)
    stay[:, 0] = True
    return stay


def min_p_floor(best_scaled: Tensor, min_p: Sequence[float]) -> Tensor:
    """Return the lowest scaled logit that passes min-p, [rows, 1]: p >= min_p * max p, which needs no sum over the vocabulary.
    `best_scaled` [rows, 1] is the best logit divided by the temperature; `min_p` has one value a row (0: no floor)."""
    return best_scaled + best_scaled.new_tensor(min_p).log().unsqueeze(1)


def draw_from_all(logits: Tensor, rows: Sequence[SampleRow]) -> tuple[Tensor, Tensor]:
    """Draw a token for each row from whole rows of `logits` [rows, vocab_size] fp32, where top-p needs the mass of all tokens.
    Returns the ids (int32) and the best logits, both [rows]."""
    ids = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
    mass = _mass(logits, rows)
    chosen, peaks = logits.new_zeros(len(rows), dtype=torch.int32), logits.amax(dim=-1)
    left = list(range(len(rows)))
    for count in _TRIES:
        members = [rows[at] for at in left]
        few = best(logits if len(left) == len(rows) else logits[left], ids, count)
        chosen[left] = draw(few, members, mass[left])
        short = _short(few, members, mass[left])
        left = [at for at, missing in zip(left, short, strict=True) if missing]
        if not left or count >= logits.shape[1]:
            return chosen, peaks
    size = max(1, _SORTED_AT_ONCE // logits.shape[1])
    for part in (left[start : start + size] for start in range(0, len(left), size)):
        chosen[part] = draw(best(logits[part], ids, logits.shape[1]), [rows[at] for at in part], mass[part])
    return chosen, peaks


def temperatures(rows: Sequence[SampleRow], device: torch.device) -> Tensor:
    """Return the sampling temperatures of the rows on `device`, [rows, 1] fp32."""
    return torch.tensor([[row.sampling.temperature] for row in rows], dtype=torch.float32, device=device)


def _mass(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Return the sums of exp((logit - best) / temperature), [rows] fp64."""
    temperature = temperatures(rows, logits.device)
    parts = [logits[block] / temperature[block] for block in blocks(logits)]
    return torch.cat([_weights(part, part.amax(dim=-1, keepdim=True)).sum(dim=-1, dtype=torch.float64) for part in parts])


def _short(few: Candidates, rows: Sequence[SampleRow], mass: Tensor) -> list[bool]:
    """Return which rows have a top-p that reaches beyond the given candidates. Every rank has the same values and finds the
    same rows."""
    held = _weights(few.logits / temperatures(rows, mass.device)).sum(dim=-1, dtype=torch.float64)
    top_p = torch.tensor([row.sampling.top_p for row in rows], dtype=torch.float64, device=mass.device)
    short: list[bool] = (held < top_p * mass).tolist()
    return short


def _weights(scaled: Tensor, peak: Tensor | None = None) -> Tensor:
    """Return exp(scaled - peak). The peak of sorted candidates is the first of them."""
    return (scaled - (scaled[:, :1] if peak is None else peak)).exp_()


def _top_k(scaled: Tensor, top_k: Sequence[int]) -> Tensor:
    """Return a mask of the first k candidates of each row (all if k is 0) that are not masked out (-inf)."""
    limit = torch.tensor([[k or scaled.shape[1]] for k in top_k], device=scaled.device)
    return (torch.arange(scaled.shape[1], device=scaled.device) < limit) & (scaled > -torch.inf)
