"""What the layers of a step ask of whoever brings their tokens to the experts (`actors.model.moe.dispatch`)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor

from actors.model.step.regions import Region

Complete = Callable[[Tensor], Tensor]
"""From the routed sum that the rank holds to the whole sum that it holds."""


class Mixture(Protocol):
    """What an exchange asks of a layer with experts. Slots are numbered over all ranks of the copy
    (`placement.experts.expert_map`)."""

    def route(self, x: Tensor, copy_offset: int) -> tuple[Tensor, Tensor]:
        """[tokens, hidden] -> weights [tokens, top_k] fp32 and slots [tokens, top_k].

        `copy_offset`: that of the first of these tokens; they go round robin over an expert's copies.
        """

    def run(self, x: Tensor, weights: Tensor, slots: Tensor) -> Tensor:
        """This rank's part of the routed sum [tokens, hidden]: its slots, its columns of them."""

    def partial(self, x: Tensor, copy_offset: int) -> Tensor:
        """This rank's part of everything, where `x` [tokens, hidden] is on every rank of the tp group."""

    def timed_combine(self) -> AbstractContextManager[None]:
        """Counts the seconds of the block as those of the combine."""

    def begin(self, x: Tensor, region: Region) -> Complete:
        """Begin what every token goes through besides, to be added to the routed sum when that is there."""


class Exchange(Protocol):
    """Dispatches a step's tokens to the experts, and combines the results."""

    def through(self, mixture: Mixture, x: Tensor, region: Region) -> Tensor:
        """What the rank holds of [tokens, hidden], before and after."""

    def serve(self, mixture: Mixture, none: Tensor) -> None:
        """Run this rank's experts for the others of its copy, of which it has no tokens itself: `none` is [0, hidden]."""
