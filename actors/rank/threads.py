"""All ranks of one replica as threads of this process: the real parts and the real maths, joined by thread groups.

    maker of plans ──StepPlan──→ ThreadLink ─┬→ thread rank 0 ┐
         (an engine, or `verify`)            ├→ thread rank 1 ├ thread groups along every axis of the mesh
                    ←StepResult output ranks ┴→ thread rank 2 ┘

`ThreadRanks` is itself the link of an engine. Used by `shardwright verify`, by sweeps over layouts, and by tests.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress

import torch

from actors.engine.link.link import PlanLink
from actors.groups.base import DEFAULT_TIMEOUT_S
from actors.groups.group import Group
from actors.groups.solo import SoloGroup
from actors.groups.thread import thread_groups
from actors.rank.assembly import Parts, identity_of, load_decoder, put_together
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
    """The ranks of one replica as threads, and the link to them. `config` is that of any rank: the others are made from it.

    `attach` is called in each rank's own thread once its parts stand, before the first plan, and returns the parts to
    use: watched ones, for instance. `timeout_s`: how long one collective waits for its peers.
    """

    def __init__(
        self,
        config: RankConfig,
        num_blocks: int,
        attach: Callable[[Parts], Parts] = lambda parts: parts,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        link_end: Callable[[int], PlanLink] | None = None,
    ) -> None:
        """`link_end` gives each rank its end of another link than this one."""
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
        """Give `plan` to every rank. Several may be in flight."""
        self._link.send(plan)

    def receive(self, timeout_s: float) -> StepResult:
        """The next result, in plan order. Raises `LinkTimeout`, or `LinkError` when a rank failed."""
        return self._link.receive(timeout_s)

    def close(self) -> None:
        """End the ranks and wait for their threads. Calling twice is harmless."""
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
    """One started thread per rank; each loads its weights, then runs the plans of its link until that is closed."""
    layout = config.layout
    groups = {axis: _groups_along(layout, axis, timeout_s) for axis in mesh.talking_axes(config.spec, layout)}
    threads = []
    for rank in range(layout.world):
        own = config.model_copy(update={"world_rank": rank})
        mine = {axis: of_rank[rank] for axis, of_rank in groups.items()}
        arguments = (own, mine, num_blocks, link_end, attach)
        threads.append(threading.Thread(target=_run_rank, args=arguments, name=f"rank {rank} of {layout}", daemon=True))
    for thread in threads:
        thread.start()
    return threads


def _groups_along(layout: Layout, axis: str, timeout_s: float) -> dict[int, Group]:
    """The group of every world rank along `axis`."""
    found: dict[int, Group] = {}
    for members in mesh.groups(layout, axis):
        made = thread_groups(len(members), axis, timeout_s) if len(members) > 1 else [SoloGroup(axis)]
        found.update(zip(members, made, strict=True))
    return found


def _run_rank(
    config: RankConfig,
    groups: dict[str, Group],
    num_blocks: int,
    link_end: Callable[[int], PlanLink],
    attach: Callable[[Parts], Parts],
) -> None:
    torch.set_num_threads(config.threads_per_rank or 1)
    link = link_end(config.world_rank)
    try:
        identity = identity_of(config)
        decoder = load_decoder(config, identity, groups)
        parts = attach(put_together(config, identity, groups, decoder, num_blocks))
    except Exception as error:
        link.send_failure(f"{type(error).__name__}: {error}")
        link.close()
        close_groups(groups)
        return
    with suppress(Exception):  # it has been reported over the link, and a thread has nobody to raise to
        run_plans(parts, link)
