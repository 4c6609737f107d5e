"""Pass-KV in context parallelism (ring attention and all-gather): how keys and values of split rows reach the other ranks.

In each layer a rank contributes K and V of its own chunks, and of its own pages of the cached keys that are exchanged, as one
tensor ``[tokens, kv_heads, K and V]``, or latents ``[tokens, 1, latent_dim]``. Its queries then attend to a sequence of
*pass-KV steps*::

    allgather   one step: the tokens of all ranks, in order             one collective; all K and V of one layer at once,
                                                                        2 * (cached + new) * kv_heads * head_dim elements
    ring        cp steps: own tokens, the left neighbour's, ...         cp - 1 sends, each overlapped with attention to the
                                                                        tokens it carries; the parts of two ranks at once

The memory needed is that of one layer, whatever the number of layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from actors.groups.group import Group
from actors.model.attention.context.local_rows import KeyLayout, KeyRun, LocalRow
from placement.ownership.context import ContextRank


@dataclass(frozen=True)
class PassKVStep:
    """The contents of one tensor of keys and values: fresh and cached tokens by row, and the tokens that this rank owns."""

    fresh: list[KeyRun]
    cached: list[KeyRun]
    owned: Tensor
    slots: Tensor

    @classmethod
    def of(cls, layout: KeyLayout, rows: Sequence[LocalRow], place: ContextRank, device: torch.device) -> PassKVStep:
        """Return the description of a tensor of keys and values with the token order `layout`, which has tokens of `rows`, as
        seen by the rank `place`. Index tensors are on `device`."""
        owned, slots = layout.owned(rows, place.ownership(), device)
        return cls(layout.runs(KeyLayout.FRESH, rows), layout.runs(KeyLayout.CACHED, rows), owned, slots)


class Style(Protocol):
    """The pass-KV steps of one engine step, which are the same for every layer."""

    def kv_steps(self, own: Tensor) -> Iterator[tuple[PassKVStep, Tensor]]:
        """Yield every pass-KV step of one layer with its tensor [tokens, kv_heads, K and V]. `own` is this rank's contribution
        (split tokens, then own pages). A collective of the cp group: all ranks must exhaust the iterator."""


class Gathered:
    """All-gather pass-KV (``cp_style=allgather``): one step with the tokens of all ranks."""

    def __init__(
        self, cp: Group, layouts: Sequence[KeyLayout], rows: Sequence[LocalRow], place: ContextRank, device: torch.device
    ) -> None:
        self._cp, self._sizes = cp, [len(layout) for layout in layouts]
        everything = KeyLayout.joined(layouts)
        order = everything.sorting()
        self._order = torch.from_numpy(order).to(device)
        self._kv_step = PassKVStep.of(everything.reordered(order), rows, place, device)

    def kv_steps(self, own: Tensor) -> Iterator[tuple[PassKVStep, Tensor]]:
        """See `Style.kv_steps`."""
        yield self._kv_step, self._cp.all_gather(own, self._sizes)[self._order]


class Ring:
    """Ring attention (``cp_style=ring``; Liu et al. 2023, arXiv 2310.01889): a rank forwards each tensor to the right before it
    uses it."""

    def __init__(
        self, cp: Group, layouts: Sequence[KeyLayout], rows: Sequence[LocalRow], place: ContextRank, device: torch.device
    ) -> None:
        self._cp, self._sizes = cp, [len(layout) for layout in layouts]
        self._kv_steps = [PassKVStep.of(layout, rows, place, device) for layout in layouts]

    def kv_steps(self, own: Tensor) -> Iterator[tuple[PassKVStep, Tensor]]:
        """See `Style.kv_steps`."""
        cp, here = self._cp, own
        for step in range(cp.size):
            source = (cp.rank - step) % cp.size
            if step > 0:
                here = cp.recv((self._sizes[source], *own.shape[1:]), own.dtype, (cp.rank - 1) % cp.size)
            if step < cp.size - 1:
                cp.send(here, (cp.rank + 1) % cp.size)
            yield self._kv_steps[source], here
