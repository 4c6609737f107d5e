"""Builds the parts of a rank (decoder, KV cache, sampler, runner, KV connector) from its configuration and its groups.

A rank in a process (`actors.rank.rank`) and a rank in a thread (`actors.rank.threads`) are both built here, and differ only in
their groups.

    config ──→ shard ──→ decoder ──weights──→ ┐
    groups ──→ decoder, sampler, runner       ├──→ runner ──→ `stepping.run_plans`
    num_blocks ──→ KV cache ────────────────→ ┘
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from actors.groups.group import Group
from actors.kv_offload.offload_worker import KVOffloadWorker, NoKVOffloadWorker
from actors.kv_transfer.kv_connector_worker import KVConnectorWorker, NoKVConnectorWorker
from actors.kv_transfer.nixl_transport import NixlTransport, nixl_version
from actors.model.attention.backend import AttentionBackend
from actors.model.attention.context.backend import ContextAttention
from actors.model.attention_selection import choose, choose_latent, choose_partial
from actors.model.checkpoint.load import LoadProgress, OnFilled, load
from actors.model.checkpoint.open_source import open_source
from actors.model.decoder import Decoder
from actors.model.kernels.linear import pack_weights
from actors.model.kernels.native import library as native
from actors.model.kv.kv_caches import KVCaches
from actors.model.latent.backend import LatentBackend
from actors.model.latent.context import ContextLatent
from actors.model.moe.dispatch_selection import exchanges
from actors.model.moe.expert_mover import ExpertWeightMover, NoExperts
from actors.rank.head import DPRankHead, StageHead
from actors.rank.pipeline import Pipeline
from actors.rank.runner import Runner
from actors.sampling.sampler import Sampler
from actors.wire.plans import StepPlan
from actors.wire.rank_config import RankConfig
from actors.wire.results import StepResult
from placement.layout import mesh, sequence_parallel
from placement.ownership.rank_identity import RankIdentity
from placement.ownership.shard import Shard

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class StepRunner(Protocol):
    """The interface of a `Runner` that the step loop uses."""

    def step(self, plan: StepPlan) -> StepResult | None:
        """See `Runner.step`."""


@dataclass(frozen=True)
class Parts:
    """The parts of a rank that is ready to run plans."""

    config: RankConfig
    identity: RankIdentity
    groups: Mapping[str, Group]
    decoder: Decoder
    cache: KVCaches
    sampler: Sampler
    pipeline: Pipeline
    runner: StepRunner
    experts: ExpertWeightMover | NoExperts
    kv_connector: KVConnectorWorker | NoKVConnectorWorker
    kv_offload: KVOffloadWorker | NoKVOffloadWorker


def identity_of(config: RankConfig) -> RankIdentity:
    """Return the identity of the rank of `config`: its coordinates in the layout, its shard of the model, and its positions.
    Make it once, and pass it to `load_decoder` and `assemble_parts`."""
    return RankIdentity.of(config.spec, config.layout, config.world_rank, config.block_size)


def load_decoder(
    config: RankConfig,
    identity: RankIdentity,
    groups: Mapping[str, Group],
    progress: LoadProgress = lambda done, total: None,
    on_filled: OnFilled = lambda parameter: None,
) -> Decoder:
    """Return the rank's pipeline stage of the decoder on its device, loaded from the rank's own slices of the checkpoint.

    `groups` has the rank's group along every parallel axis, by axis. `progress` is called with (bytes loaded, bytes in all),
    and `on_filled` with each parameter once it is loaded.
    Raises `ModelError` if the model cannot be served or the checkpoint does not fit it.
    """
    own, dtype, device = identity.shard, DTYPES[config.dtype], torch.device(config.device)
    if device.type == "cpu":
        native.start()
    backend = _attention(config, identity, groups)
    scatter_from = sequence_parallel.scatter_from(config.layout)
    moe_exchanges = exchanges(config.spec, identity, groups, dtype.itemsize, device)
    decoder = Decoder(config.spec, own, groups["tp"], backend, dtype, device, scatter_from, moe_exchanges)
    source = open_source(config.model_path, config.spec)
    try:
        load(dict(decoder.named_parameters()), config.spec, own, source, progress, on_filled)
    finally:
        source.close()
    native.wait()
    pack_weights(decoder)
    return decoder


def assemble_parts(
    config: RankConfig,
    identity: RankIdentity,
    groups: Mapping[str, Group],
    decoder: Decoder,
    num_blocks: int,
    model_digest: str = "",
) -> Parts:
    """Return the parts of a rank around a loaded decoder; allocates `num_blocks` KV pages, and opens the KV transport and tiers
    if there are any, which need the `model_digest` (`placement.model.digest`). A collective call: all ranks of the replica call
    this.

    Raises `ModelError` if the KV of the model cannot be handed off, `TransferError` if NIXL cannot be used, and
    `DirectoryError` if the disk cache cannot.
    """
    own, spec, dtype, device = identity.shard, config.spec, DTYPES[config.dtype], torch.device(config.device)
    cache = KVCaches.of(spec, own, num_blocks, config.block_size, dtype, device)
    shared = groups.get(mesh.HEAD_AXIS)
    head = DPRankHead(decoder) if shared is None else StageHead(decoder, shared, identity.coords, config.layout.tp)
    sampler = Sampler(shared or groups["tp"], own.head_vocab, spec.vocab_size, device)
    pipeline = Pipeline(groups["pp"], groups["cp"], spec.hidden_size, dtype, device)
    experts = _experts(config, own, groups, decoder)
    runner = Runner(decoder, head, cache, pipeline, sampler, groups["cp"], identity.place, experts)
    kv_connector = _kv_connector(config, identity, cache, model_digest)
    kv_offload = _kv_offload(config, identity, cache, model_digest)
    return Parts(config, identity, groups, decoder, cache, sampler, pipeline, runner, experts, kv_connector, kv_offload)


def _kv_connector(
    config: RankConfig, identity: RankIdentity, cache: KVCaches, model_digest: str
) -> KVConnectorWorker | NoKVConnectorWorker:
    if not config.in_pool:
        return NoKVConnectorWorker()
    transport = NixlTransport(f"rank{config.world_rank}")
    return KVConnectorWorker.of(config, identity, cache, transport, f"nixl {nixl_version()}", model_digest)


def _kv_offload(
    config: RankConfig, identity: RankIdentity, cache: KVCaches, model_digest: str
) -> KVOffloadWorker | NoKVOffloadWorker:
    if config.tiers is None:
        return NoKVOffloadWorker()
    return KVOffloadWorker(config, identity, cache, config.tiers, model_digest)


def _experts(config: RankConfig, own: Shard, groups: Mapping[str, Group], decoder: Decoder) -> ExpertWeightMover | NoExperts:
    if own.expert_map is None:
        return NoExperts()
    return ExpertWeightMover(decoder.mixtures, groups["moe"], own.expert_map, config.layout.moe_tp, config.world_rank)


def _attention(config: RankConfig, identity: RankIdentity, groups: Mapping[str, Group]) -> AttentionBackend | LatentBackend:
    """Return the attention backend: the device's own, or a context-parallel one if a sequence's KV is split over ranks."""
    device, dtype, layout = torch.device(config.device), DTYPES[config.dtype], config.layout
    spec, softcap = config.spec, config.spec.attention_softcap is not None
    if layout.kv_owners == 1:
        if spec.mla is not None:
            return choose_latent(spec.mla, device, dtype, config.block_size)
        dims = (spec.head_dim, spec.value_dim)
        return choose(device, dtype, config.block_size, softcap, spec.sinks != "none", *dims)
    kernel = choose_partial(device, dtype, config.block_size, softcap)
    context = ContextAttention.of(spec, layout, identity.coords, groups, kernel, config.block_size)
    return context if spec.mla is None else ContextLatent(context)
