"""The expert-parallel load balancer (EPLB) at run time: collects expert load reports, and adds expert moves to step plans.

    plan 64, 128, …  asks ──→ ranks ──ExpertReport──→ load ──→ Watch: due? ──→ decide, in a separate thread
                                                                                    │ worth its cost?
    plan n, n+1, …   one layer's move each ←────────────────────────────────────────┘

A move is part of a plan, so that all ranks make it between the same two steps and use the new expert map from then on. A plan
moves one layer at most, so that no step waits for more than one layer's experts. This module is the mechanism; the policy is
`placement.experts.rebalancer`.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Protocol

from actors.engine.config.balancing import Balancing
from actors.engine.config.stats import ExpertStats
from actors.wire.experts import ExpertMove, ExpertReport
from actors.wire.plans import StepPlan
from placement.experts.expert_map import ExpertMap
from placement.experts.rebalancer import Costs, Decision, Watch

_LEAST_TOKENS = 1.0
"""Load assumed for an expert without tokens: a map that relies on it staying idle would be fitted to noise."""

logger = logging.getLogger(__name__)


class Policy(Protocol):
    """The rebalancing policy, which decides when to look and what to move. See `placement.experts.rebalancer.Rebalancer`."""

    def after_step(self, watch: Watch, evenness: float) -> Watch:
        """See `Rebalancer.after_step`. Returns the state `watch` after one more step; its `due` is set if a decision is to be
        made now. `evenness` is the recent balancedness (mean over maximum of the ranks' tokens), from 0 to 1."""

    def decide(
        self, old: ExpertMap, load: Sequence[Sequence[float]], costs: Costs, nodes: int = 1, groups: int = 1
    ) -> Decision:
        """See `Rebalancer.decide`. Returns the expert map to use from now on, and the copies between slots that lead to it from
        `old`. `load` has the tokens of each expert, by layer."""


class ExpertBalancer:
    """Adds expert moves to plans, and evaluates expert reports. Not thread-safe: the engine's thread calls it."""

    def __init__(self, config: Balancing, policy: Policy | None = None) -> None:
        self._config, self._policy = config, policy or config.policy
        self.map = replace(config.experts, experts=config.experts.experts * len(config.layers))
        """The expert in every slot of every layer after all plans so far."""
        self._watch = Watch()
        self._is_due = False
        self._window = _Window(config)
        self._reports: dict[int, list[ExpertReport]] = {}
        """Reports by step, for the steps that not all ranks have reported."""
        self._settled = -1
        """The step with which the newest map took effect."""
        self._evenness = 1.0
        self._steps = 0
        self._bytes_per_s = config.bytes_per_s
        self._thinking = ThreadPoolExecutor(1, "shardwright-experts")
        self._decision: Future[Decision] | None = None
        self._moves: deque[ExpertMove] = deque()
        self._stats = ExpertStats(layers=list(config.layers))

    def into(self, plan: StepPlan) -> StepPlan:
        """Return a copy of `plan`, the next one to send, with the next expert move and the request for expert reports, if any
        are due.

        Counts the step, so it must be called once for each plan, in order. May start a decision on the balancer's own thread.
        """
        self._steps += 1
        self._watch = self._policy.after_step(self._watch, self._evenness)
        self._is_due = self._is_due or self._watch.due is not None  # until all have reported and the last moves are made
        self._advance_decision()
        moves = [self._moves.popleft()] if self._moves else []
        for move in moves:
            self._moved(move)
        ends = bool(moves) and not self._moves
        if ends:  # reports of earlier steps refer to other maps
            self._settled, self._window = plan.step, _Window(self._config)
        asks = ends or self._steps % self._config.ask_every == 0
        return plan.model_copy(update={"moves": moves, "asks_experts": asks})

    def on_report(self, report: ExpertReport) -> None:
        """Add the expert report of one rank. It counts once all ranks have reported the same step. Reports of steps up to the
        last move are dropped, since they refer to other expert maps."""
        if report.move_s and report.moved_bytes:
            self._bytes_per_s = report.moved_bytes / report.move_s
        reports = self._reports.setdefault(report.step, [])
        reports.append(report)
        if len(reports) == self._config.ranks:  # reports of faster ranks are kept until the others arrive
            del self._reports[report.step]
            self._apply_reports(report.step, reports)

    def _apply_reports(self, step: int, reports: Sequence[ExpertReport]) -> None:
        if step <= self._settled:
            return
        for report in reports:
            self._window.add(report)
        self._evenness = _mean(self._window.balancedness())
        self._stats = self._window.stats(self._stats)
        if not self._is_due and self._window.steps >= 2 * self._config.horizon:
            self._window = _Window(self._config)  # old load predicts future load poorly

    def stats(self) -> ExpertStats:
        """Return the expert statistics of the latest window of steps, as of the last step that all ranks have reported.

        A window begins when a rebalancing is considered and after its last move, and otherwise every ``2 * horizon`` steps.
        The lists are empty before the first report; `moved_experts` counts since the start.
        """
        return self._stats

    def close(self) -> None:
        """Stop the thread that decides on moves, without waiting for it."""
        self._thinking.shutdown(wait=False, cancel_futures=True)

    def _advance_decision(self) -> None:
        if self._decision is not None:
            if self._decision.done():
                self._decided(self._decision.result())
                self._decision = None
        elif self._is_due and self._window.steps and not self._moves:
            load = [[max(tokens, _LEAST_TOKENS) for tokens in row] for row in self._window.load]
            costs = Costs(self._window.slowest_s, self._config.expert_bytes, self._bytes_per_s, self._config.horizon)
            self._decision = self._thinking.submit(self._policy.decide, self.map, load, costs, 1, self._config.groups)
            self._window, self._is_due = _Window(self._config), False

    def _decided(self, decision: Decision) -> None:
        """Queue one move for each layer that `decision` changes."""
        logger.info("experts: %s: %s", "moving" if decision.transfers else "staying", decision.gain)
        by_layer: dict[int, list[tuple[int, int]]] = {}
        for transfer in decision.transfers:
            by_layer.setdefault(transfer.layer, []).append((transfer.source_slot, transfer.target_slot))
        for index, transfers in by_layer.items():
            experts = list(decision.experts.experts[index])
            self._moves.append(ExpertMove(layer=self._config.layers[index], experts=experts, transfers=transfers))

    def _moved(self, move: ExpertMove) -> None:
        rows = list(self.map.experts)
        rows[self._config.layers.index(move.layer)] = tuple(move.experts)
        self.map = replace(self.map, experts=tuple(rows))
        moved = len(move.transfers)
        self._stats = self._stats.model_copy(update={"moved_experts": self._stats.moved_experts + moved})


class _Window:
    """Sums of the expert reports since the window was opened."""

    def __init__(self, config: Balancing) -> None:
        self._config = config
        self.load = [[0] * config.experts.num_experts for _ in config.layers]
        self._expert_s: list[dict[int, float]] = [{} for _ in config.layers]
        self._combine_s = [0.0] * config.ranks
        self._sent_bytes = [0] * config.ranks
        self._tokens: list[dict[int, int]] = [{} for _ in config.layers]
        """Tokens by layer and world rank."""
        self.steps = 0
        """Number of steps that every rank has reported."""

    def add(self, report: ExpertReport) -> None:
        """Add the report of one rank. The window's number of steps advances with the report of world rank 0."""
        rank = report.world_rank
        for layer in report.layers:
            index = self._config.layers.index(layer.layer)
            self._expert_s[index][rank] = self._expert_s[index].get(rank, 0.0) + layer.expert_s
            self._combine_s[rank] += layer.combine_s
            if rank in self._config.counting:
                self.load[index] = [total + more for total, more in zip(self.load[index], layer.tokens, strict=True)]
                self._tokens[index][rank] = self._tokens[index].get(rank, 0) + sum(layer.tokens)
        self._sent_bytes[rank] += report.sent_bytes
        self.steps += report.steps if rank == 0 else 0

    def balancedness(self) -> list[float]:
        """Return the mean over the maximum of the tokens that the ranks ran, by layer; 1 for a layer without tokens."""
        return [_mean(list(ran.values())) / max(ran.values()) if any(ran.values()) else 1.0 for ran in self._tokens]

    @property
    def slowest_s(self) -> float:
        """Seconds per step that the slowest rank of each layer spends on expert computation, summed over layers."""
        return self._slowest / self.steps if self.steps else 0.0

    @property
    def _slowest(self) -> float:
        return sum(max(seconds.values(), default=0.0) for seconds in self._expert_s)

    def stats(self, before: ExpertStats) -> ExpertStats:
        """Return `before` with its fields replaced by the sums of this window, except for the number of moved experts."""
        by_rank = [sum(seconds.get(rank, 0.0) for seconds in self._expert_s) for rank in range(self._config.ranks)]
        used = sum(_mean(list(seconds.values())) for seconds in self._expert_s if seconds)
        return before.model_copy(
            update={
                "top_tokens": [max(row) for row in self.load],
                "mean_tokens": [sum(row) / len(row) for row in self.load],
                "balancedness": self.balancedness(),
                "sent_bytes": list(self._sent_bytes),
                "expert_s": by_rank,
                "combine_s": list(self._combine_s),
                "straggler_share": 1 - used / self._slowest if self._slowest else 0.0,
            }
        )


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers) if numbers else 1.0
