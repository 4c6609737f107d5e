"""What the layers of a decoder are handed in each step, beside the hidden states."""

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
    """Where layers of one kind keep keys and values, and their backend's plan of the step."""

    cache: KVCache
    plan: Any


@dataclass(frozen=True)
class Step:
    """What every layer of a step shares."""

    rotations: Sequence[Rotate]
    """One for each rope of the model; a layer knows which is its own."""
    paged: Mapping[int, Paged]
    """One for each kind of attention in the stage; likewise."""
    region: Region
    exchange: Exchange
    """Token dispatch and combine, for layers with experts."""
