"""What the layers of a decoder are handed in each step, beside the hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from actors.model.kv_cache import KVCache
from actors.model.moe.exchange import Exchange
from actors.model.regions import Region
from actors.model.rope import Rotate


@dataclass(frozen=True)
class Step:
    """What every layer of a step shares."""

    rotations: Sequence[Rotate]
    """One for each rope of the model; a layer knows which is its own."""
    plan: Any
    cache: KVCache
    region: Region
    exchange: Exchange
    """The way to the experts, for layers that have some."""
