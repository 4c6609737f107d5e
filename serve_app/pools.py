"""What is served: one pool of engine replicas that do everything, or one that computes prompts and one that decodes.

--layout tp=2,replicas=2                  Engine   2 x tp=2
--prefill 'tp=2*2' --decode 'pp=2'        Prefill  2 x tp=2     Engine  1 x pp=2
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

from cluster.settings import ReplicaSettings
from placement.handoff import Side, holdings
from placement.hardware import ClusterSpec
from placement.layout import Layout, LayoutError
from serve_app.names import ENGINE, PREFILL
from serve_app.settings import ServeArgs, replica_settings

_NIXL = ("nixl_cu12", "nixl_cu13")


@dataclass(frozen=True)
class Service:
    """Settings of the replicas that answer requests, and of those that compute prompts for them."""

    engine: ReplicaSettings
    prefill: ReplicaSettings | None = None

    @property
    def devices(self) -> int:
        """Ranks of all replicas."""
        return sum(settings.layout.devices for settings in self.by_name.values())

    @property
    def by_name(self) -> dict[str, ReplicaSettings]:
        """Each deployment's."""
        return {ENGINE: self.engine} | ({} if self.prefill is None else {PREFILL: self.prefill})

    def with_each(self, **changes: object) -> Service:
        """The same with these fields of all settings changed."""
        prefill = None if self.prefill is None else self.prefill.model_copy(update=changes)
        return Service(self.engine.model_copy(update=changes), prefill)

    def __str__(self) -> str:
        if self.prefill is None:
            return str(self.engine.layout)
        return f"{self.prefill.layout} for prompts and {self.engine.layout} for tokens"


def layouts(args: ServeArgs) -> list[Layout]:
    """Those of all pools. Raises `LayoutError`."""
    return [Layout.parse(each.layout) for each in _each(args)]


def devices(args: ServeArgs) -> int:
    """Ranks of all replicas. Raises `LayoutError`."""
    return sum(layout.devices for layout in layouts(args))


def service(args: ServeArgs, device: Literal["cpu", "cuda"], cluster: ClusterSpec | None = None) -> Service:
    """What `args` come to. Reads the model's header only. Raises `ModelError` or `LayoutError`."""
    found = [replica_settings(each, device, cluster, devices(args)) for each in _each(args)]
    if len(found) == 1:
        return Service(found[0])
    for settings in found:
        holdings(settings.spec, Side(settings.layout))  # raises where the model's KV cannot be handed over
    if cluster is not None and devices(args) > sum(node.slots for node in cluster.nodes):
        raise LayoutError(
            f"the pools {args.prefill!r} and {args.decode!r} are {devices(args)} ranks, but the cluster has "
            f"{sum(node.slots for node in cluster.nodes)} slots: take fewer replicas, or smaller layouts"
        )
    length = min(settings.max_model_len for settings in found)
    return Service(*found).with_each(max_model_len=length, in_pool=True)


def check_nixl() -> None:
    """Raise `LayoutError` where this machine cannot run ranks that hand KV over."""
    if not any(find_spec(name) for name in _NIXL):
        raise LayoutError("pools exchange KV over NIXL, which is not installed here: pip install 'shardwright[pools]'")


def _each(args: ServeArgs) -> Iterator[ServeArgs]:
    """The arguments of each pool by itself, that which answers requests first."""
    if not (args.prefill or args.decode):
        yield args
        return
    if not (args.prefill and args.decode):
        raise LayoutError(
            f"prefill={args.prefill!r} and decode={args.decode!r} go together: give both, or a layout alone for one pool"
        )
    if args.layout:
        raise LayoutError(f"layout={args.layout!r} is that of one pool; with prefill={args.prefill!r} leave it out")
    for text in (args.decode, args.prefill):
        yield args.model_copy(update={"layout": _pool_layout(text), "prefill": "", "decode": ""})


def _pool_layout(text: str) -> str:
    """``tp=2*3`` as ``tp=2,replicas=3``; ``*2`` is two replicas of one rank."""
    found = re.fullmatch(r"\s*([^*]*?)\s*(?:\*\s*(\d+))?\s*", text)
    if found is None or (found[2] is not None and "replicas" in found[1]):
        raise LayoutError(f"{text!r} is no pool: write a layout, or a layout and how many replicas, as in 'tp=2*3'")
    return ",".join(part for part in (found[1], f"replicas={found[2]}" if found[2] else "") if part)
