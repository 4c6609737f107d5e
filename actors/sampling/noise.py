"""Counter-based sampling noise (Gumbel-max): a pure function of (seed, position, vocabulary id).

There is no generator state, so the noise of a token is the same under any layout, batch, preemption, hand-off or replay, and
every rank can compute its own slice of it::

    (seed, position) ── splitmix64, in Python ──→ two 32-bit keys a row
    (keys, id)       ── 32-bit mixer, in torch ──→ 31 random bits ──→ u in (0, 1) ──→ Gumbel value

Adding it to log-probabilities and taking the largest draws from their softmax (the Gumbel-max trick: Maddison, Tarlow and
Minka, "A* Sampling", 2014, section 2), without a sum over the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_WORD = (1 << 64) - 1


def gumbel(seeds: Sequence[int], positions: Sequence[int], vocab: range, device: torch.device | str = "cpu") -> Tensor:
    """Return standard Gumbel noise of the vocabulary ids `vocab`, [rows, len(vocab)] fp32 on `device`: a pure function of seed,
    position and id.

    `seeds` (one a row) are taken modulo 2**64; `positions` (one a row) are the positions in the sequence of the tokens being
    drawn.
    """
    return gumbel_of(seeds, positions, torch.arange(vocab.start, vocab.stop, dtype=torch.int32, device=device))


def gumbel_of(seeds: Sequence[int], positions: Sequence[int], ids: Tensor) -> Tensor:
    """Return standard Gumbel noise of the int32 `ids`, [rows, ids] fp32, for the seed and the position of each row, as `gumbel`
    does. `ids` is [ids] for all rows, or [rows, ids] with one set for each.

    Values lie in [-2.9, 22.2]: u has 31 bits and is kept half a step away from 0 and a rounding step away from 1. Its logarithm
    is computed with log1p from the small side, because large Gumbel values decide the draw, and 1 - u would round away the bits
    that distinguish them. fp32 then suffices: a value is within two roundings of the exact one.
    """
    bits = _mix(*_keys(seeds, positions, ids.device), ids)
    minus = bits.to(torch.float32).mul_(-(2.0**-31)).clamp_(2.0**-24 - 1.0, -(2.0**-32))
    return minus.log1p_().neg_().log_().neg_()


_ROUNDS = ((17, 0xED5AD4BB), (11, 0xAC4C1B51), (15, 0x31848BAB))
"""Shifts and multipliers of a 32-bit mixer found by search ("triple32" of Wellons, "hash-prospector").

Two rounds are not enough: ids 256 apart then had correlated values (chi-square of pairs 55 sigma off).
"""


def _mix(first: Tensor, second: Tensor, ids: Tensor) -> Tensor:
    """Return 31 random bits, as int32, for each (row, id), by xor-shift-multiply rounds and two keys [rows, 1].

    A single key would only permute ids between rows; the second one, after the first round, prevents that. Shifts of int32 copy
    the sign, hence the masks. The last shift needs none: bits mixed with the sign stay uniform, and the sign bit is dropped.
    """
    x = ids ^ first
    shifted = torch.empty_like(x)
    for (shift, multiplier), key in zip(_ROUNDS, (second, None, None), strict=True):
        torch.bitwise_right_shift(x, shift, out=shifted)
        x.bitwise_xor_(shifted.bitwise_and_((1 << (32 - shift)) - 1)).mul_(_signed(multiplier))
        if key is not None:
            x.add_(key)
    torch.bitwise_right_shift(x, 14, out=shifted)
    return x.bitwise_xor_(shifted).bitwise_and_(0x7FFFFFFF)


def _keys(seeds: Sequence[int], positions: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return two int32 keys [rows, 1] for each (seed, position)."""
    words = [_splitmix64(_splitmix64(seed & _WORD) ^ position) for seed, position in zip(seeds, positions, strict=True)]
    keys = torch.tensor([[_signed(word >> 32), _signed(word)] for word in words], dtype=torch.int32, device=device)
    first, second = torch.split(keys.reshape(len(words), 2), 1, dim=1)
    return first, second


def _splitmix64(x: int) -> int:
    """Return one output of splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014)."""
    x = (x + 0x9E3779B97F4A7C15) & _WORD
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _WORD
    return x ^ (x >> 31)


def _signed(word: int) -> int:
    """Return the low 32 bits of `word` as a signed number."""
    low = word & 0xFFFFFFFF
    return low - (1 << 32) if low >= 1 << 31 else low
