"""The inputs of every decoder layer in a step, besides the hidden states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from actors.model.kv.kv_cache import KVCache
from actors.model.step.exchange import Exchange
from actors.model.step.regions import Region
from actors.model.step.rope import Rotate


@dataclass(frozen=True)
class Paged:
    """The KV cache of the layers of one attention kind, and their backend's plan of the step."""

    cache: KVCache
    plan: Any


@dataclass(frozen=True)
class Step:
    """The inputs that all layers of a step share."""

    rotations: Sequence[Rotate]
    """One for each rope of the model; a layer stores the index of its own."""
    paged: Mapping[int, Paged]
    """One for each attention kind in the stage; a layer stores the index of its own."""
    region: Region
    exchange: Exchange
    """Token dispatch and combine, for layers with experts."""
