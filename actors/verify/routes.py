"""Replay of expert routing: the experts that the reference chose for each token are imposed on the ranks under test.

Near a tie, a router in bfloat16 may choose another expert than in float32, after which no later value can be compared. A
verification therefore checks the routing in float32, where each rank routes tokens itself, and checks bfloat16 along the given
routes of the reference::

    one rank, float32    router: x ──→ scores ──→ choice       recorded: x, choice
    ranks, bfloat16      router: x ──→ scores ──→ weights ←── choice of the recorded row that is nearest to x

The weights are computed from the rank's own scores. The nearest row belongs to the same token, regardless of where x comes from
(a DP rank, a chunk, another rank): rounding moves a token by much less than the distance between two tokens, and if two tokens
are that close, either choice will do. Messages therefore need not identify the tokens.
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
    """The routes of one layer: the inputs of its router [tokens, hidden] fp32, and the chosen experts [tokens, top_k]."""

    inputs: Tensor
    experts: Tensor

    def of(self, x: Tensor) -> Tensor:
        """Returns the experts [rows, top_k] of the recorded tokens whose router inputs are nearest (Euclidean) to the rows `x`
        [rows, hidden]."""
        # fp64, because `cdist` uses matrix products for many rows, which lose half of the digits.
        return self.experts[torch.cdist(x.to(torch.float64), self.inputs.to(torch.float64)).argmin(1)]


Routes = Mapping[int, LayerRoutes]
"""The routes by layer, for the MoE layers."""


class RouteNotes:
    """Records the routes of a rank that holds all layers."""

    def __init__(self) -> None:
        self._seen: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def attach(self, parts: Parts) -> Parts:
        """Register forward hooks on the routers of `parts`, one rank that holds all layers, which record its routes from now
        on. Returns the same parts."""
        for layer, mixture in parts.decoder.mixtures.items():
            mixture.router.register_forward_hook(partial(self._note, layer))
        return parts

    def take(self) -> Routes:
        """Returns the routes recorded since the last call, by MoE layer, and forgets them."""
        seen, self._seen = self._seen, {}
        return {layer: LayerRoutes(*(torch.cat(parts) for parts in zip(*calls, strict=True))) for layer, calls in seen.items()}

    def _note(self, layer: int, router: nn.Module, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        self._seen.setdefault(layer, []).append((inputs[0].to(torch.float32, copy=True), output[1].clone()))


def replay(parts: Parts, routes: Routes) -> None:
    """Make the routers of `parts`, one rank, choose the experts of `routes` from now on, in place. Raises `KeyError` if
    `routes` lacks one of the rank's MoE layers."""
    for layer, mixture in parts.decoder.mixtures.items():
        _Replayed(mixture.router, routes[layer])


class _Replayed:
    """Replaces `Router.choose` of one router. `choose` receives only the scores, so a pre-forward hook captures the input."""

    def __init__(self, router: Router, routes: LayerRoutes) -> None:
        self._routes = routes
        router.register_forward_pre_hook(self._look)
        router.choose = self._choose  # type: ignore[method-assign]

    def _look(self, router: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._x: Tensor = inputs[0]

    def _choose(self, scores: Tensor) -> Tensor:
        return self._routes.of(self._x)
