"""The configuration of the KV offload tiers of a replica, from its settings."""

from __future__ import annotations

from actors.engine.config.engine_config import OffloadConfig
from actors.kv_offload.block_part import KVFormat
from actors.kv_offload.key_layout import own_folder
from actors.wire.tier_config import TierConfig, TierOptions
from cluster.replica.settings import ReplicaSettings
from placement.cost import memory
from placement.ownership.context import BLOCK_TOKENS


def tier_config(settings: ReplicaSettings) -> TierConfig | None:
    """Returns the configuration of the KV offload tiers for the ranks, or None if the settings request none. Creates the tier's
    folder if there is a disk tier.

    Raises `DirectoryError` if the directory cannot be used on this machine, so that the start fails before any ranks are
    launched.
    """
    if not settings.host_cache and settings.disk_cache is None:
        return None
    if settings.disk_cache is not None:
        own_folder(settings.disk_cache)
    return TierConfig(**{name: getattr(settings, name) for name in TierOptions.model_fields})


def offload_config(settings: ReplicaSettings, model_digest: str) -> OffloadConfig | None:
    """Returns the configuration of the KV offload tiers for the engine, or None if the settings request no tiers.

    `model_digest` identifies the weights that the ranks have loaded (`placement.model.digest`). Creates and raises what
    `tier_config` does.
    """
    tiers = tier_config(settings)
    if tiers is None:
        return None
    needs = memory.rank_memories(settings.spec, settings.layout, settings.dtype)
    return OffloadConfig(
        tiers=tiers,
        layout=settings.layout,
        kv_format=KVFormat.of(settings.spec, model_digest, settings.dtype, BLOCK_TOKENS),
        block_bytes=max(rank.block_bytes for rank in needs),
    )
