"""The tiers behind a replica's ranks, from what was asked for."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from actors.engine.config.engine_config import OffloadConfig
from actors.kv_offload.block_part import KVFormat
from actors.kv_offload.key_layout import own_folder
from actors.wire.tier_config import TierConfig, TierOptions
from cluster.replica.settings import ReplicaSettings
from placement.cost import memory
from placement.model.digest import model_digest
from placement.model.spec import ModelSpec
from placement.ownership.context import BLOCK_TOKENS


def tier_config(settings: ReplicaSettings) -> TierConfig | None:
    """None where none was asked for. Reads a sample of the weights. Raises `FileNotFoundError` where there are none, and
    `DirectoryError` where the replica's machine cannot have the directory: told here, a start ends before there are ranks."""
    if not settings.host_cache and settings.disk_cache is None:
        return None
    if settings.disk_cache is not None:
        own_folder(settings.disk_cache)
    return TierConfig(
        model_digest=_digest(settings.spec, settings.model_path),
        **{name: getattr(settings, name) for name in TierOptions.model_fields},
    )


def offload_config(settings: ReplicaSettings) -> OffloadConfig | None:
    """What the engine must know of them."""
    tiers = tier_config(settings)
    if tiers is None:
        return None
    needs = memory.rank_memories(settings.spec, settings.layout, settings.dtype)
    return OffloadConfig(
        tiers=tiers,
        layout=settings.layout,
        kv_format=KVFormat.of(settings.spec, tiers.model_digest, settings.dtype, BLOCK_TOKENS),
        block_bytes=max(rank.block_bytes for rank in needs),
    )


@lru_cache(maxsize=4)
def _digest(spec: ModelSpec, path: str) -> str:
    return model_digest(spec, Path(path))
