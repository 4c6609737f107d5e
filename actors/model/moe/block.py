"""The feed-forward part of a layer with experts (MoE block).

The path of a step in mode ``sum``, in which all tokens of a MoE copy are on all of its ranks (for the other modes see
`dispatch.py`)::

    attention ──partial──→ region.sum ──→ + residual ──→ norm ──→ region.gather ──→ [T, h] on every rank
                                                                                      │
                       ┌───────────────────────┬──────────────────────────────────────┤
                    router                  experts                             shared expert
               (whole, fp32)     (own ones, own columns of them)        (own columns, its gate whole)
                       │  weights, slots        │ partial [T, h]                       │ partial [T, h]
                       └──────────────────→    └───────────── + ──────────────────────┘
                                                              │
                        residual + ←── [T, h], or own tokens ←── region.sum (once, for both)

In this mode a layer with experts issues the same collectives as a dense one.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch import Tensor, nn

from actors.model.kernels.linear import linear
from actors.model.moe.experts import Experts, Gated
from actors.model.moe.layer_expert_map import LayerExpertMap
from actors.model.moe.load_counters import LoadCounters
from actors.model.moe.router import Router
from actors.model.moe.shared_expert import begin_on
from actors.model.step.exchange import Complete
from actors.model.step.regions import Region
from actors.model.step.step import Step


class MixtureOfExperts(nn.Module):
    """A router and the experts of this rank."""

    def __init__(self, router: Router, experts: Experts, expert_map: LayerExpertMap) -> None:
        super().__init__()
        self.router, self.experts, self.expert_map = router, experts, expert_map
        self.counters = LoadCounters(len(router.weight), router.weight.device)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """Return the output of the MoE block, with tokens dispatched as the exchange of `step` says. `x` and the result are
        this rank's part of [tokens, hidden] in the region. A collective of the ranks of the MoE copy."""
        return step.exchange.through(self, x, step.region)

    def route(self, x: Tensor, copy_offset: int) -> tuple[Tensor, Tensor]:
        """See `Mixture.route`."""
        weights, experts = self.router(x)
        return weights, self.expert_map.slots(experts, copy_offset)

    def run(self, x: Tensor, weights: Tensor, slots: Tensor) -> Tensor:
        """See `Mixture.run`. Counts the load of each expert, and its time."""
        own = self.expert_map.here(slots)
        tokens = self.experts.tokens(own)
        self.counters.ran(self.expert_map.held, tokens)
        with self.counters.experts.span():
            return self.experts.run(x, weights, own, tokens)

    def partial(self, x: Tensor, copy_offset: int) -> Tensor:
        """See `Mixture.partial`."""
        return self.run(x, *self.route(x, copy_offset))

    def timed_combine(self) -> AbstractContextManager[None]:
        """See `Mixture.timed_combine`."""
        return self.counters.combine.span()

    def begin(self, x: Tensor, region: Region) -> Complete:
        """See `Mixture.begin`; without a shared expert nothing is added."""
        return lambda routed: routed


class SharedExpert(nn.Module):
    """A gated MLP that every token goes through. It returns partial sums over this rank's columns."""

    linear_weights = ("gate_up", "down")

    def __init__(self, gate_up: nn.Parameter, down: nn.Parameter, gated: Gated) -> None:
        super().__init__()
        self.gate_up, self.down, self._gated = gate_up, down, gated

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's partial sums [tokens, hidden] for `x` [tokens, hidden]; the caller sums them over tp."""
        gate, up = linear(x, self.gate_up).chunk(2, -1)
        return linear(self._gated(gate, up), self.down)


class GatedSharedExpert(SharedExpert):
    """`SharedExpert` times the sigmoid of a projection of the token (Qwen2-MoE); `gate` is [1, hidden]."""

    def __init__(self, gate_up: nn.Parameter, down: nn.Parameter, gated: Gated, gate: nn.Parameter) -> None:
        super().__init__(gate_up, down, gated)
        self.gate = gate

    def forward(self, x: Tensor) -> Tensor:
        """See `SharedExpert.forward`. Each token's sums are multiplied by its gate."""
        gate: Tensor = linear(x, self.gate).sigmoid()
        return gate.mul(super().forward(x))


class MixtureWithShared(MixtureOfExperts):
    """`MixtureOfExperts` with a shared expert split over tp. In mode ``sum`` its part is added before the sum over tp."""

    def __init__(self, router: Router, experts: Experts, expert_map: LayerExpertMap, shared: SharedExpert) -> None:
        super().__init__(router, experts, expert_map)
        self.shared = shared
        self._begin = begin_on(router.weight.device)

    def partial(self, x: Tensor, copy_offset: int) -> Tensor:
        """See `Mixture.partial`. Includes the shared expert."""
        return super().partial(x, copy_offset) + self.shared(x)  # type: ignore[no-any-return]

    def begin(self, x: Tensor, region: Region) -> Complete:
        """See `Mixture.begin`. On CUDA the shared expert runs on a second stream meanwhile."""
        everything = region.gather(x)
        take = self._begin(lambda: self.shared(everything))
        return lambda routed: routed + region.sum(take())
