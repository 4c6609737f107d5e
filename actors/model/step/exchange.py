"""The interface between the layers of a step and the token dispatch of expert parallelism (`actors.model.moe.dispatch`)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor

from actors.model.step.regions import Region

Complete = Callable[[Tensor], Tensor]
"""A function from this rank's part of the routed sum to its part of the whole sum, which includes the shared expert."""


class Mixture(Protocol):
    """The methods of a MoE layer that an exchange calls. Slots are numbered over all ranks of the MoE copy
    (`placement.experts.expert_map`)."""

    def route(self, x: Tensor, copy_offset: int) -> tuple[Tensor, Tensor]:
        """Route `x` [tokens, hidden]. Returns weights [tokens, top_k] fp32 and slots of the MoE copy [tokens, top_k] int64.

        `copy_offset` is the offset of the first of these tokens in the round robin over an expert's copies.
        """

    def run(self, x: Tensor, weights: Tensor, slots: Tensor) -> Tensor:
        """Return this rank's part of the weighted sum over each token's experts, [tokens, hidden]: that of its own slots, and
        its columns of them. `x` is [tokens, hidden]; `weights` and `slots` [tokens, top_k] are as `route` returns them."""

    def partial(self, x: Tensor, copy_offset: int) -> Tensor:
        """Return this rank's part of the whole output [tokens, hidden], shared expert included, if `x` [tokens, hidden] is on
        every rank of the tp group; the caller sums the parts. `copy_offset` is that of `route`."""

    def timed_combine(self) -> AbstractContextManager[None]:
        """Return a context manager that adds the time spent inside it to this layer's combine time (the wait for other ranks'
        results) in the load report."""

    def begin(self, x: Tensor, region: Region) -> Complete:
        """Begin the computation that every token needs besides the routed experts (the shared expert), on this rank's part `x`
        of the hidden states in `region`. Returns a function that adds its result to this rank's part of the routed sum. Both
        may be collectives of the tp group."""


class Exchange(Protocol):
    """Dispatches a step's tokens to the experts, and combines the results."""

    def through(self, mixture: Mixture, x: Tensor, region: Region) -> Tensor:
        """Return the output of the MoE layer `mixture`. `x` and the result are this rank's part of [tokens, hidden] in
        `region`. A collective of the ranks of the MoE copy."""

    def serve(self, mixture: Mixture, none: Tensor) -> None:
        """Run this rank's experts of `mixture` for the tokens of other ranks, in a step in which it has no tokens: `none` is an
        empty tensor [0, hidden] of the dtype of the hidden states. Takes part in the collectives of `through`."""
