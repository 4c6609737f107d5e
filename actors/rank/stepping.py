"""A rank's step loop: plans in, results out, until the engine says goodbye. The same for process and thread ranks.

While a hand-off is under way, or blocks are fetched, the loop looks after it between plans.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress

from actors.engine.link.link import LinkClosed, LinkTimeout, PlanLink
from actors.groups.group import Group
from actors.rank.assembly import Parts
from actors.wire.plans import StepPlan
from placement.layout import mesh

_LISTEN_S = 3600.0
"""How long one wait for a plan lasts; then the next one begins."""
_GLANCE_S = 0.001
"""The same while there is something to look after."""


def run_plans(parts: Parts, link: PlanLink, stepped: Callable[[], None] = lambda: None) -> None:
    """Run what `link` brings until it is closed; the output rank of each DP rank answers. `stepped` is called after every step.

    Raises whatever else ends the rank, after telling the engine. Closes the link and the groups in any case.
    """
    layout, coords = parts.config.layout, parts.identity.coords
    answers = parts.config.world_rank in mesh.output_ranks(layout)
    reports_busy = layout.pp > 1 and coords.cp == coords.tp == 0
    parts.kv_connector.watch(parts.decoder)
    try:
        while True:
            plan = _next_plan(link, parts)
            parts.kv_offload.before(plan)
            parts.kv_connector.before(plan)
            _send_kv_reports(parts, link)
            result = parts.runner.step(plan)
            if reports_busy:
                link.send_busy(coords.attn_dp * layout.pp + coords.pp, parts.pipeline.busy_s)
            if answers and result is not None:
                link.send_result(result)
            if plan.asks_experts and (report := parts.experts.report(plan.step)) is not None:
                link.send_experts(report)
            parts.kv_connector.after()
            stepped()
    except LinkClosed:
        return
    except Exception as error:
        link.send_failure(f"{type(error).__name__}: {error}")
        raise
    finally:
        link.close()
        parts.kv_connector.close()
        parts.kv_offload.close()
        close_groups(parts.groups)


def close_groups(groups: Mapping[str, Group]) -> None:
    """Leave every group."""
    for group in groups.values():
        group.close()


def _next_plan(link: PlanLink, parts: Parts) -> StepPlan:
    """The next plan, however long it takes: an idle engine sends none, and a rank that waits for one is not stuck."""
    while True:
        _send_kv_reports(parts, link)
        is_busy = parts.kv_connector.is_busy or parts.kv_offload.is_busy
        with suppress(LinkTimeout):
            return link.receive_plan(_GLANCE_S if is_busy else _LISTEN_S)


def _send_kv_reports(parts: Parts, link: PlanLink) -> None:
    for report in (parts.kv_connector.poll(), parts.kv_offload.poll()):
        if report is not None:
            link.send_kv(report)
