"""From seats to running ranks: actors in their bundles, groups joined, weights loaded.

take seats ──→ make actors ──→ places ──→ rendezvous ──→ connect ──→ load ──→ run (a sentinel per rank)
"""

from __future__ import annotations

import ipaddress
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util import list_named_actors
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.config import Loaded, Place, RankConfig, RankStatus, Rendezvous
from cluster.local import NAMESPACE
from cluster.rank_actor import RankActor
from cluster.settings import ReplicaSettings
from placement.bundles import bundle_of
from placement.memory import BLOCK_TOKENS
from placement.model_spec import ModelError


class LaunchError(RuntimeError):
    """Ranks that did not come up: says which rank, what it was doing, and why it failed."""


@dataclass(frozen=True)
class Ranks:
    """The live ranks of one replica, in world-rank order."""

    actors: tuple[ActorHandle[Any], ...]
    places: tuple[Place, ...]
    loaded: tuple[Loaded, ...]
    token: str
    """Names this generation of ranks to the engine."""

    def run(self, address: str, num_blocks: int) -> list[ray.ObjectRef[Any]]:
        """Start every rank's endless loop; a reference that becomes ready is the death of that rank."""
        return [actor.run.remote(address, self.token, num_blocks) for actor in self.actors]

    def kill(self) -> None:
        """End every rank process now."""
        for actor in self.actors:
            ray.kill(actor)


def launch(settings: ReplicaSettings, seats: PlacementGroup, name: str) -> Ranks:
    """Bring up all ranks of one replica in its seats. On any failure every rank is ended, and `LaunchError` says why."""
    token, deadline = secrets.token_hex(8), time.monotonic() + settings.start_timeout_s
    actors = tuple(_make(settings, seats, rank, f"{name}-{token}-rank-{rank}") for rank in range(settings.layout.world))
    try:
        places = tuple(_all("start", [actor.where.remote() for actor in actors], deadline))
        _check_reachable(places)
        port = _all("serve the rendezvous store", [actors[0].serve_store.remote(token, places[0].host)], deadline)[0]
        rendezvous = Rendezvous(
            token=token,
            nodes=tuple(place.node_id for place in places),
            hosts=tuple(place.host for place in places),
            store_port=port,
        )
        _all("connect", [actor.connect.remote(rendezvous) for actor in actors], deadline)
        loaded = tuple(_all("load its weights", [actor.load.remote() for actor in actors], deadline))
    except BaseException:
        for actor in actors:
            ray.kill(actor)
        raise
    return Ranks(actors, places, loaded, token)


def rank_statuses(timeout_s: float = 1.0) -> dict[str, RankStatus]:
    """How far every rank actor of the connected cluster is, by actor name; ranks that do not answer are left out."""
    names = [each["name"] for each in list_named_actors(all_namespaces=True) if each["namespace"] == NAMESPACE]
    asked: dict[ray.ObjectRef[Any], str] = {}
    for name in names:
        with suppress(ValueError):  # gone since it was listed
            asked[ray.get_actor(name, namespace=NAMESPACE).progress.remote()] = name
    ready, _late = ray.wait(list(asked), num_returns=len(asked), timeout=timeout_s) if asked else ([], [])
    answers = {}
    for ref in ready:
        with suppress(ray.exceptions.RayError):
            answers[asked[ref]] = ray.get(ref)
    return dict(sorted(answers.items()))


def _make(settings: ReplicaSettings, seats: PlacementGroup, rank: int, name: str) -> ActorHandle[Any]:
    config = RankConfig(
        world_rank=rank,
        layout=settings.layout,
        spec=settings.spec,
        model_path=settings.model_path,
        device=settings.device,
        dtype=settings.dtype,
        block_size=BLOCK_TOKENS,
        threads=settings.threads_per_rank,
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
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=seats, placement_group_bundle_index=bundle_of(settings.layout, rank)
            ),
        )
        .remote(config)
    )
    return actor


def _all(what: str, refs: Sequence[ray.ObjectRef[Any]], deadline: float) -> list[Any]:
    """Every result, in rank order; the first failure or the deadline ends the wait. Raises `LaunchError`."""
    waiting, rank_of = list(refs), {ref: rank for rank, ref in enumerate(refs)}
    while waiting:
        left = deadline - time.monotonic()
        ready, waiting = ray.wait(waiting, num_returns=1, timeout=max(left, 0))
        if not ready:
            ranks = ", ".join(str(rank_of[ref]) for ref in waiting)
            raise LaunchError(f"timed out waiting for rank {ranks} to {what}")
        try:
            ray.get(ready)
        except ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None) or error
            if isinstance(cause, ModelError):
                raise LaunchError(str(cause)) from error
            raise LaunchError(f"rank {rank_of[ready[0]]} could not {what}: {cause}") from error
    return list(ray.get(list(refs)))


def _check_reachable(places: Sequence[Place]) -> None:
    nodes = {place.node_id for place in places}
    for place in places:
        if len(nodes) > 1 and ipaddress.ip_address(place.host).is_loopback:
            raise LaunchError(
                f"rank {place.world_rank} reports the loopback address {place.host} while the layout spans "
                f"{len(nodes)} nodes: start Ray on that node with --node-ip-address, or set GLOO_SOCKET_IFNAME there"
            )
