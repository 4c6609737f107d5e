"""The deployments of a service: independent engine replicas, or pools with prefill/decode disaggregation.

--layout tp=2,replicas=2                  Engine   2 x tp=2
--prefill 'tp=2*2' --decode 'pp=2'        Prefill  2 x tp=2     Engine  1 x pp=2
--prefill 'tp=2' --mixed '*3'             Prefill  1 x tp=2     Mixed   3 x one rank
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

from actors.wire.roles import Role
from cluster.replica.settings import ReplicaSettings
from placement.layout.layout import Layout, LayoutError
from placement.legality.suggestions import devices_of
from placement.nodes.hardware import ClusterSpec
from placement.ownership.handoff import Side, holdings
from serve_app.deployment.deployment_names import ENGINE, MIXED, POOL_OF, PREFILL
from serve_app.deployment.replica_settings import replica_settings
from serve_app.deployment.settings import ServeArgs

_NIXL = ("nixl_cu12", "nixl_cu13")


@dataclass(frozen=True)
class Service:
    """The replica settings of each deployment by its name, beginning with the deployment that answers requests."""

    by_name: Mapping[str, ReplicaSettings]

    @property
    def engine(self) -> ReplicaSettings:
        """The settings of the replicas that answer requests (the decode pool, if there are pools, or else the mixed pool)."""
        return next(iter(self.by_name.values()))

    @property
    def in_pools(self) -> bool:
        """Whether the replicas are in pools, between which KV is handed off."""
        return self.engine.in_pool

    @property
    def devices(self) -> int:
        """The total number of ranks in all replicas of all deployments."""
        return sum(settings.layout.devices for settings in self.by_name.values())

    def with_each(self, **changes: object) -> Service:
        """Returns a copy with `changes`, fields of `ReplicaSettings` and their new values, made in the settings of every
        deployment. The values are not validated."""
        return Service({name: each.model_copy(update=changes) for name, each in self.by_name.items()})

    def __str__(self) -> str:
        if not self.in_pools:
            return str(self.engine.layout)
        return " and ".join(f"{self.by_name[name].layout} {_FOR[name]}" for name in reversed(POOL_OF) if name in self.by_name)


_FOR = {ENGINE: "for tokens", MIXED: "for both", PREFILL: "for prompts"}


def layouts(args: ServeArgs) -> dict[str, Layout]:
    """Returns the layout of each pool by the name of its deployment, with ``replicas`` set; one layout if there are no pools.

    Raises `LayoutError` if a text is no layout, or if the pools in `args` do not go together.
    """
    return {name: Layout.parse(each.layout) for name, each in _each(args).items()}


def devices(args: ServeArgs) -> int:
    """Returns the total number of ranks in all replicas of all pools. Raises `LayoutError` as `layouts` does."""
    return sum(layout.devices for layout in layouts(args).values())


def slots_for(args: ServeArgs) -> int:
    """Returns the number of slots that the axes of all pools need, which is that of `devices` for legal layouts; for an illegal
    one, so many that a layout with all its axes can be suggested. Raises `LayoutError` as `layouts` does."""
    return sum(devices_of(layout) for layout in layouts(args).values())


def service(
    args: ServeArgs, device: Literal["cpu", "cuda"], cluster: ClusterSpec | None = None, header_only: bool = False
) -> Service:
    """Returns the service that `args` describe, on ranks of `device`. Reads only the model's headers, which it may download.

    `cluster` contains the nodes on which it must fit; None: not known yet, and not checked. `header_only`: whether the model
    may lack its weights here. Raises `ModelError` if the model cannot be read or its KV cannot be handed off between the pools,
    and `LayoutError` if the pools do not go together, or a layout is illegal or does not fit.
    """
    each = _each(args)
    found = {name: replica_settings(pool, device, cluster, devices(args), header_only) for name, pool in each.items()}
    _check_required(args, len(found))
    if not _pools(args):
        return Service(found)
    for settings in found.values():
        holdings(settings.spec, Side(settings.layout))  # raises if the model's KV cannot be handed off
    if cluster is not None and devices(args) > sum(node.slots for node in cluster.nodes):
        raise LayoutError(
            f"the pools {' and '.join(map(repr, _pools(args).values()))} are {devices(args)} ranks, but the cluster has "
            f"{sum(node.slots for node in cluster.nodes)} slots: take fewer replicas, or smaller layouts"
        )
    length = min(settings.max_model_len for settings in found.values())
    pools = {name: settings.model_copy(update={"role": Role(POOL_OF[name])}) for name, settings in found.items()}
    return Service(pools).with_each(max_model_len=length)


def check_nixl() -> None:
    """Raises `LayoutError` if the NIXL package, over which ranks in pools hand off KV, is not installed on this machine."""
    if not any(find_spec(name) for name in _NIXL):
        raise LayoutError("pools exchange KV over NIXL, which is not installed here: pip install 'shardwright[pools]'")


def _pools(args: ServeArgs) -> dict[str, str]:
    """Returns the texts of the pools by deployment, beginning with the one that answers requests; empty if there is a single
    layout."""
    texts = {ENGINE: args.decode, MIXED: args.mixed, PREFILL: args.prefill}
    return {name: text for name, text in texts.items() if text}


def _each(args: ServeArgs) -> dict[str, ServeArgs]:
    """Returns the arguments of each pool on its own, by deployment."""
    pools = _pools(args)
    if not pools:
        return {ENGINE: args}
    if MIXED not in pools and len(pools) == 1:
        raise LayoutError(
            f"prefill={args.prefill!r} and decode={args.decode!r} go together: give both, or one with mixed, "
            "or a layout alone for one pool"
        )
    if args.layout:
        raise LayoutError(f"layout={args.layout!r} is that of one pool; with {_given(args)} leave it out")
    empty = {"prefill": "", "decode": "", "mixed": ""}
    return {name: args.model_copy(update=empty | {"layout": _pool_layout(text)}) for name, text in pools.items()}


def _given(args: ServeArgs) -> str:
    texts = {"prefill": args.prefill, "mixed": args.mixed, "decode": args.decode}
    return " and ".join(f"{name}={text!r}" for name, text in texts.items() if text)


def _check_required(args: ServeArgs, pools: int) -> None:
    """Raises `LayoutError` if hand-offs are required but there are fewer than two pools."""
    if args.require_prefill and pools < 2:
        raise LayoutError(
            f"require_prefill needs two pools, and {_given(args) or f'layout={args.layout!r}'} is {pools}: "
            "give prefill with decode or mixed, or leave it out"
        )


def _pool_layout(text: str) -> str:
    """Returns ``tp=2,replicas=3`` for ``tp=2*3``; ``*2`` means two replicas of one rank."""
    found = re.fullmatch(r"\s*([^*]*?)\s*(?:\*\s*(\d+))?\s*", text)
    if found is None or (found[2] is not None and "replicas" in found[1]):
        raise LayoutError(f"{text!r} is no pool: write a layout, or a layout and how many replicas, as in 'tp=2*3'")
    return ",".join(part for part in (found[1], f"replicas={found[2]}" if found[2] else "") if part)
