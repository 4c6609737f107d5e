"""Counter-based sampling noise: a pure function of (seed, position, vocabulary id).

Nothing is stored and nothing advances, so the noise of a token is the same under any layout, batch, preemption,
hand-off or replay, and every rank can make its own slice of it::

    (seed, position) ── splitmix64, in Python ──→ two 32-bit keys a row
    (keys, id)       ── 32-bit mixer, in torch ──→ 31 random bits ──→ u in (0, 1) ──→ Gumbel value

Adding it to log-probabilities and taking the largest draws from their softmax (the Gumbel-max trick: Maddison,
Tarlow and Minka, "A* Sampling", 2014, section 2), without a sum over the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_WORD = (1 << 64) - 1
_ROWS_IN_CACHE = 1
"""Rows made at a time on a CPU: one row of a large vocabulary just fits the second-level cache, two do not."""


def gumbel(seeds: Sequence[int], positions: Sequence[int], vocab: range, device: torch.device | str = "cpu") -> Tensor:
    """[rows, len(vocab)] fp32 standard Gumbel values of the vocabulary ids `vocab`.

    `seeds` are taken modulo 2**64; `positions` are the places in the sequence of the tokens being drawn.
    """
    ids = torch.arange(vocab.start, vocab.stop, dtype=torch.int32, device=device)
    return gumbel_of(seeds, positions, ids)


def gumbel_of(seeds: Sequence[int], positions: Sequence[int], ids: Tensor) -> Tensor:
    """[rows, ids] fp32 Gumbel values of the int32 `ids`: [ids] for all rows, or [rows, ids] for each its own.

    Values lie in [-2.9, 22.2]: u has 31 bits and is kept half a step away from 0 and a rounding step away from 1.
    """
    first, second = _keys(seeds, positions, ids.device)
    if ids.device.type != "cpu" or ids.dim() == 2:
        return _gumbel(first, second, ids)
    rows = range(0, len(seeds), _ROWS_IN_CACHE)
    parts = [_gumbel(first[r : r + _ROWS_IN_CACHE], second[r : r + _ROWS_IN_CACHE], ids) for r in rows]
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _gumbel(first: Tensor, second: Tensor, ids: Tensor) -> Tensor:
    """Mixes keys [rows, 1] and ids to 31 bits, and those to Gumbel values.

    The logarithm of the right tail is taken as log1p of the small side: large Gumbel values decide who wins, and
    1 - u would round away the bits that tell them apart.
    """
    bits = _mix(first, second, ids)
    small = bits.to(torch.float32).add_(0.5).mul_(2.0**-31).clamp_(max=1.0 - 2.0**-24)
    return small.neg_().log1p_().neg_().log_().neg_()


def _mix(first: Tensor, second: Tensor, ids: Tensor) -> Tensor:
    """31 random bits, as int32, of each (row, id): two xor-shift-multiply rounds with a key before each.

    A single key would only permute ids between rows; the second one, between the rounds, undoes that. Shifts of
    int32 copy the sign, hence the masks. The last shift needs none: it stirs the sign into bits that stay uniform.
    """
    x = ids ^ first
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    x *= 0x21F0AAAD
    x += second
    x ^= (x >> 15).bitwise_and_(0x1FFFF)
    x *= _signed(0xD35A2D97)
    x ^= x >> 15
    return x.bitwise_and_(0x7FFFFFFF)


def _keys(seeds: Sequence[int], positions: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Two int32 keys [rows, 1] of each (seed, position)."""
    words = [_splitmix64(_splitmix64(seed) ^ position) for seed, position in zip(seeds, positions, strict=True)]
    keys = torch.tensor([[_signed(word >> 32), _signed(word)] for word in words], dtype=torch.int32, device=device)
    keys = keys.reshape(len(words), 2)
    return keys[:, :1], keys[:, 1:]


def _splitmix64(x: int) -> int:
    """The output function of splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014)."""
    x = (x + 0x9E3779B97F4A7C15) & _WORD
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _WORD
    return x ^ (x >> 31)


def _signed(word: int) -> int:
    """The low 32 bits of `word` as a signed number."""
    low = word & 0xFFFFFFFF
    return low - (1 << 32) if low >= 1 << 31 else low
