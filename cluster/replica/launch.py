"""Launch of a replica's ranks: actors in reserved placement-group bundles, process groups connected, weights loaded.

reserve bundles ──→ create actors ──→ locations ──→ rendezvous ──→ connect ──→ load ──→ run (a sentinel per rank)
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util import list_named_actors
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.wire.rank_config import Loaded, RankConfig, RankLocation, RankReport, RankStatus, Rendezvous
from cluster.embedded.local import NAMESPACE
from cluster.replica.placement_group import ReservedBundles
from cluster.replica.rank_actor import RankActor
from cluster.replica.rank_checks import LaunchError, check_memory, check_placement, check_reachable, described
from cluster.replica.settings import ReplicaSettings
from cluster.replica.tiers import tier_config
from placement.cost import kv_budget, memory
from placement.model.digest import model_digest
from placement.model.spec import ModelError
from placement.ownership.context import BLOCK_TOKENS

_LOOK_EVERY_S = 2.0


@dataclass(frozen=True)
class ReplicaRanks:
    """The live ranks of one replica, in world-rank order."""

    actors: tuple[ActorHandle[Any], ...]
    locations: tuple[RankLocation, ...]
    loaded: tuple[Loaded, ...]
    token: str
    """Identifies this generation of ranks to the engine."""
    model_digest: str
    """The digest of the weights that they have loaded (`placement.model.digest`); empty if the replica needs none."""

    def run(self, address: str, num_blocks: int) -> list[ray.ObjectRef[Any]]:
        """Start the endless loop of every rank, which runs the plans of the engine that listens at the ZeroMQ `address`, with
        `num_blocks` KV blocks per rank.

        Returns one reference per rank, in world-rank order, which becomes ready when that rank ends. Does not wait.
        """
        return [actor.run.remote(address, self.token, num_blocks, self.model_digest) for actor in self.actors]

    def kill(self) -> None:
        """Kill every rank process, without a chance to clean up."""
        for actor in self.actors:
            ray.kill(actor)


def launch(settings: ReplicaSettings, reserved: ReservedBundles, name: str) -> ReplicaRanks:
    """Launch all ranks of one replica in its reserved bundles: start the processes, connect them, and load the weights.

    `name` is the replica's name, with which the names of its rank actors begin. Returns the ranks, which do not run yet.

    Raises `LaunchError` with the reason if a rank cannot start, connect or load, is misplaced, or if all together take more
    than ``settings.start_timeout_s`` seconds. On any failure all ranks are killed.
    """
    token, deadline = secrets.token_hex(8), time.monotonic() + settings.start_timeout_s
    actors = tuple(_make(settings, reserved, rank, f"{name}-{token}-rank-{rank}") for rank in range(settings.layout.world))
    try:
        locations = tuple(_all("start", [actor.where.remote() for actor in actors], deadline, reserved))
        check_placement(locations, reserved)
        check_reachable(locations)
        check_memory(locations, _host_bytes(settings))
        store = [actors[0].serve_store.remote(token, locations[0].host)]
        port = _all("serve the rendezvous store", store, deadline, reserved)[0]
        rendezvous = Rendezvous(
            token=token,
            nodes=tuple(location.node_id for location in locations),
            hosts=tuple(location.host for location in locations),
            store_port=port,
        )
        _connect(actors, rendezvous, locations, deadline, reserved)
        loaded = tuple(_all("load its weights", [actor.load.remote() for actor in actors], deadline, reserved))
    except BaseException:
        for actor in actors:
            ray.kill(actor)
        raise
    shares = [rank.chunk_digests for rank in loaded]
    return ReplicaRanks(actors, locations, loaded, token, model_digest(settings.spec, shares) if any(shares) else "")


def rank_statuses(timeout_s: float = 1.0) -> dict[str, RankStatus]:
    """Returns the status of every rank actor of the connected cluster, by actor name. Ranks that do not answer in `timeout_s`
    seconds are omitted."""
    return _asked("progress", timeout_s)


def rank_reports(timeout_s: float = 5.0) -> dict[str, RankReport]:
    """Returns the location and status of every rank actor of the connected cluster, by actor name (``REPLICA-TOKEN-rank-N``).
    Ranks that do not answer in `timeout_s` seconds are omitted."""
    return _asked("report", timeout_s)


def _asked(method: str, timeout_s: float) -> dict[str, Any]:
    names = [each["name"] for each in list_named_actors(all_namespaces=True) if each["namespace"] == NAMESPACE]
    asked: dict[ray.ObjectRef[Any], str] = {}
    for name in names:
        with suppress(ValueError):  # the actor has ended since it was listed
            asked[getattr(ray.get_actor(name, namespace=NAMESPACE), method).remote()] = name
    ready, _late = ray.wait(list(asked), num_returns=len(asked), timeout=timeout_s) if asked else ([], [])
    answers = {}
    for ref in ready:
        with suppress(ray.exceptions.RayError):
            answers[asked[ref]] = ray.get(ref)
    return dict(sorted(answers.items()))


def _host_bytes(settings: ReplicaSettings) -> list[int]:
    """Returns the bytes of host memory that each rank needs, by world rank."""
    needs = memory.rank_memories(settings.spec, settings.layout, settings.dtype, limits=settings.step_limits)
    kv_bytes = settings.kv_bytes if settings.device == "cpu" else None
    return [
        kv_budget.host_bytes(
            rank, settings.device, kv_bytes, settings.max_model_len, settings.max_sequences, settings.host_cache
        )
        for rank in needs
    ]


def _make(settings: ReplicaSettings, reserved: ReservedBundles, rank: int, name: str) -> ActorHandle[Any]:
    config = RankConfig(
        world_rank=rank,
        layout=settings.layout,
        spec=settings.spec,
        model_path=settings.model_path,
        device=settings.device,
        dtype=settings.dtype,
        block_size=BLOCK_TOKENS,
        tiers=tier_config(settings),
        in_pool=settings.in_pool,
        threads_per_rank=settings.threads_per_rank,
    )
    make: Any = ray.remote
    actor: ActorHandle[Any] = (
        make(concurrency_groups={"control": 1})(RankActor)
        .options(
            name=name,
            namespace=NAMESPACE,
            num_cpus=1,
            num_gpus=1 if settings.device == "cuda" else 0,
            max_restarts=0,
            runtime_env={"env_vars": settings.environment} if settings.environment else None,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=reserved.group, placement_group_bundle_index=reserved.bundle_of_rank[rank]
            ),
        )
        .remote(config)
    )
    return actor


def _connect(
    actors: Sequence[ActorHandle[Any]],
    rendezvous: Rendezvous,
    locations: Sequence[RankLocation],
    deadline: float,
    reserved: ReservedBundles,
) -> None:
    """Connect all ranks to their process groups. Raises `LaunchError`, with the locations of all ranks in the message."""
    try:
        _all("connect", [actor.connect.remote(rendezvous) for actor in actors], deadline, reserved)
    except LaunchError as error:
        raise LaunchError(f"{error}; ranks: {described(locations)}") from error


def _all(what: str, refs: Sequence[ray.ObjectRef[Any]], deadline: float, reserved: ReservedBundles) -> list[Any]:
    """Returns every result, in rank order. Raises `LaunchError` on the first failure, a lost bundle, or at the deadline."""
    waiting, rank_of = list(refs), {ref: rank for rank, ref in enumerate(refs)}
    while waiting:
        left = deadline - time.monotonic()
        ready, waiting = ray.wait(waiting, num_returns=1, timeout=max(min(left, _LOOK_EVERY_S), 0))
        ranks = ", ".join(str(rank_of[ref]) for ref in waiting)
        if not ready and not reserved.are_whole():
            raise LaunchError(f"a node was lost while waiting for rank {ranks} to {what}")
        if not ready and left > 0:
            continue
        if not ready:
            raise LaunchError(f"timed out waiting for rank {ranks} to {what}")
        try:
            ray.get(ready)
        except ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None) or error
            if isinstance(cause, ModelError):
                failure = LaunchError(str(cause))
                failure.code = cause.code
                raise failure from error
            raise LaunchError(f"rank {rank_of[ready[0]]} could not {what}: {cause}") from error
    return list(ray.get(list(refs)))
