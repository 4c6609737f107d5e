"""Which experts each token went to in the reference, and ranks that send it there again.

In bfloat16 a router near a tie goes the other way than in float32, and nothing behind it can be compared any more. So a
verification judges routes in float32, where each rank finds its own, and in bfloat16 the maths along given ones::

    one rank, float32    router: x ──→ scores ──→ choice       noted: x, choice
    ranks, bfloat16      router: x ──→ scores ──→ weights ←── choice of the noted row that is nearest to x

Weights are computed from the rank's own scores. The nearest row is that of the same token, wherever x comes from (a DP rank, a
chunk, another rank): rounding moves a token by far less than what lies between two of them, and where two are that close it
is no matter which of them names the choice. So nobody need say on the wire whose tokens they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from actors.model.moe.router import Router
from actors.rank.assembly import Parts


@dataclass(frozen=True)
class LayerRoutes:
    """Of one layer: what its router saw [tokens, hidden] fp32, and the experts it chose [tokens, top_k]."""

    inputs: Tensor
    experts: Tensor

    def of(self, x: Tensor) -> Tensor:
        """The experts [rows, top_k] of the noted tokens that are nearest to the rows `x` [rows, hidden]."""
        # In fp64, because for many rows distances are found by matrix products, which lose half of the digits.
        return self.experts[torch.cdist(x.to(torch.float64), self.inputs.to(torch.float64)).argmin(1)]


Routes = Mapping[int, LayerRoutes]
"""By layer, of the layers with experts."""


class RouteNotes:
    """Notes the routes of one rank that has all layers."""

    def __init__(self) -> None:
        self._seen: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def attach(self, parts: Parts) -> Parts:
        """The same parts, from now on watched."""
        for layer, mixture in parts.decoder.mixtures.items():
            mixture.router.register_forward_hook(partial(self._note, layer))
        return parts

    def take(self) -> Routes:
        """What was noted since the last call."""
        seen, self._seen = self._seen, {}
        return {layer: LayerRoutes(*(torch.cat(parts) for parts in zip(*calls, strict=True))) for layer, calls in seen.items()}

    def _note(self, layer: int, router: nn.Module, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        self._seen.setdefault(layer, []).append((inputs[0].to(torch.float32, copy=True), output[1].clone()))


def replay(parts: Parts, routes: Routes) -> None:
    """From now on the rank's routers choose what `routes` say."""
    for layer, mixture in parts.decoder.mixtures.items():
        _Replayed(mixture.router, routes[layer])


class _Replayed:
    """Stands in for the choice of one router, which is not given what the router sees, and looks at that on its own."""

    def __init__(self, router: Router, routes: LayerRoutes) -> None:
        self._routes = routes
        router.register_forward_pre_hook(self._look)
        router.choose = self._choose  # type: ignore[method-assign]

    def _look(self, router: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._x: Tensor = inputs[0]

    def _choose(self, scores: Tensor) -> Tensor:
        return self._routes.of(self._x)
