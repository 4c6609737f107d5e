"""The step loop of a rank: receives plans and returns results until the engine closes the link.

Ranks in processes and ranks in threads share this loop. While a KV transfer or a KV offload is under way, the loop polls it
between plans.
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
"""Timeout in seconds of one wait for a plan, after which the loop waits again."""
_POLL_S = 0.001
"""Timeout in seconds of one wait for a plan while a KV transfer or offload has to be polled."""


def run_plans(parts: Parts, link: PlanLink, stepped: Callable[[], None] = lambda: None) -> None:
    """Run the plans that arrive on `link` with the `parts` of a rank until the engine closes the link. Results and reports are
    sent over it; only the output rank of each DP rank sends results.

    `stepped` is called after every step. An exception is reported to the engine and raised again. The link, the KV workers of
    `parts` and the groups are closed in any case.
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
    """Close every group of a rank, given by axis; no collective can follow."""
    for group in groups.values():
        group.close()


def _next_plan(link: PlanLink, parts: Parts) -> StepPlan:
    """Wait for the next plan without a time limit, since an idle engine sends none, and send KV reports meanwhile."""
    while True:
        _send_kv_reports(parts, link)
        is_busy = parts.kv_connector.is_busy or parts.kv_offload.is_busy
        with suppress(LinkTimeout):
            return link.receive_plan(_POLL_S if is_busy else _LISTEN_S)


def _send_kv_reports(parts: Parts, link: PlanLink) -> None:
    for report in (parts.kv_connector.poll(), parts.kv_offload.poll()):
        if report is not None:
            link.send_kv(report)
