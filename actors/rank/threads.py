"""All ranks of one replica as threads of this process, which run the same model code as rank processes, over thread groups.

    sender of plans ─StepPlan──→ ThreadLink ─┬→ thread rank 0 ┐
         (an engine, or `verify`)            ├→ thread rank 1 ├ thread groups along every axis of the mesh
                    ←StepResult output ranks ┴→ thread rank 2 ┘

`ThreadRanks` is itself the `RankLink` of an engine. It is used by `shardwright verify`, by sweeps over layouts, and by tests.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import torch

from actors.engine.link.link import PlanLink
from actors.groups.base import DEFAULT_TIMEOUT_S
from actors.groups.group import Group
from actors.groups.solo import SoloGroup
from actors.groups.thread import thread_groups
from actors.model.checkpoint.hash_cache import HashCache
from actors.model.checkpoint.weight_hasher import whole_digest
from actors.rank.assembly import Parts, assemble_parts, identity_of, load_decoder
from actors.rank.stepping import close_groups, run_plans
from actors.rank.thread_link import ThreadLink
from actors.wire.experts import ExpertReport
from actors.wire.kv import KVReport
from actors.wire.plans import StepPlan
from actors.wire.rank_config import RankConfig
from actors.wire.results import StepResult
from placement.layout import mesh
from placement.layout.layout import Layout

_JOIN_S = 60.0


class ThreadRanks:
    """The ranks of one replica as threads, and the link to them.

    `config` is the configuration of any one rank; those of the others are derived from it. `attach` is called in each rank's
    own thread once its parts are built, before the first plan, and returns the parts to use (instrumented ones, for instance).
    `timeout_s` is the time that one collective waits for its peers.
    """

    def __init__(
        self,
        config: RankConfig,
        num_blocks: int,
        attach: Callable[[Parts], Parts] = lambda parts: parts,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        link_end: Callable[[int], PlanLink] | None = None,
    ) -> None:
        """Start the threads. `link_end` returns the end of a link for each rank, and replaces this object's own link."""
        self._link = ThreadLink(config.layout.world, mesh.output_ranks(config.layout))
        self._threads = start_ranks(config, num_blocks, link_end or self._link.end, attach, timeout_s)

    @property
    def busy_s(self) -> Mapping[int, float]:
        """See `RankLink.busy_s`."""
        return self._link.busy_s

    @property
    def reports(self) -> deque[ExpertReport]:
        """See `RankLink.reports`."""
        return self._link.reports

    @property
    def kv_reports(self) -> deque[KVReport]:
        """See `RankLink.kv_reports`."""
        return self._link.kv_reports

    def listen(self, timeout_s: float) -> None:
        """See `RankLink.listen`."""
        self._link.listen(timeout_s)

    def send(self, plan: StepPlan) -> None:
        """See `RankLink.send`. Never raises."""
        self._link.send(plan)

    def receive(self, timeout_s: float) -> StepResult:
        """See `RankLink.receive`."""
        return self._link.receive(timeout_s)

    def close(self) -> None:
        """See `RankLink.close`. Waits for the ranks' threads; raises `RuntimeError` if one does not end within 60 seconds."""
        self._link.close()
        for thread in self._threads:
            thread.join(_JOIN_S)
            if thread.is_alive():
                raise RuntimeError(f"{thread.name} did not end within {_JOIN_S:g} s")


def start_ranks(
    config: RankConfig,
    num_blocks: int,
    link_end: Callable[[int], PlanLink],
    attach: Callable[[Parts], Parts] = lambda parts: parts,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> list[threading.Thread]:
    """Start one thread per rank of `config.layout`, and return the threads, in world rank order.

    Each thread loads its rank's weights, allocates `num_blocks` KV pages, and runs the plans that arrive on
    ``link_end(world_rank)`` until that link is closed. A failure is reported over the link. `attach` receives the parts of each
    rank before the first plan, in the rank's thread, and returns the parts to use. `timeout_s` is the number of seconds that
    one collective waits for its peers.
    """
    layout = config.layout
    digest = _model_digest(config)
    groups = {axis: _groups_along(layout, axis, timeout_s) for axis in mesh.talking_axes(config.spec, layout)}
    threads = []
    for rank in range(layout.world):
        own = config.model_copy(update={"world_rank": rank})
        mine = {axis: of_rank[rank] for axis, of_rank in groups.items()}
        arguments = (own, mine, num_blocks, digest, link_end, attach)
        threads.append(threading.Thread(target=_run_rank, args=arguments, name=f"rank {rank} of {layout}", daemon=True))
    for thread in threads:
        thread.start()
    return threads


def _model_digest(config: RankConfig) -> str:
    if not config.needs_model_digest:
        return ""
    return whole_digest(Path(config.model_path), config.spec, HashCache.of_user(os.environ))


def _groups_along(layout: Layout, axis: str, timeout_s: float) -> dict[int, Group]:
    """Return the group of every world rank along `axis`, by world rank."""
    found: dict[int, Group] = {}
    for members in mesh.groups(layout, axis):
        made = thread_groups(len(members), axis, timeout_s) if len(members) > 1 else [SoloGroup(axis)]
        found.update(zip(members, made, strict=True))
    return found


def _run_rank(
    config: RankConfig,
    groups: dict[str, Group],
    num_blocks: int,
    model_digest: str,
    link_end: Callable[[int], PlanLink],
    attach: Callable[[Parts], Parts],
) -> None:
    torch.set_num_threads(config.threads_per_rank or 1)
    link = link_end(config.world_rank)
    try:
        identity = identity_of(config)
        decoder = load_decoder(config, identity, groups)
        parts = attach(assemble_parts(config, identity, groups, decoder, num_blocks, model_digest))
    except Exception as error:
        link.send_failure(f"{type(error).__name__}: {error}")
        link.close()
        close_groups(groups)
        return
    with suppress(Exception):  # already reported over the link; an exception in a thread reaches no caller
        run_plans(parts, link)
