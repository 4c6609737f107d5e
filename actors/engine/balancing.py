"""The live expert balancer: from what ranks tell of their experts to moves in the plans that go to them.

    plan 64, 128, …  asks ──→ ranks ──ExpertReport──→ load ──→ Watch: due? ──→ decide, on a thread of its own
                                                                                    │ pays?
    plan n, n+1, …   one layer's move each ←────────────────────────────────────────┘

A move is in a plan, so all ranks make it between the same two steps and follow the new map from then on; a layer a step, so
that no step waits for more than one layer's experts. The policy is `placement.experts.rebalancer`; this is its mechanism.
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
"""Load of an expert nobody asked for yet: a map that counts on its staying idle would be fitted to noise."""

logger = logging.getLogger(__name__)


class Policy(Protocol):
    """What decides. `placement.experts.rebalancer.Rebalancer` is one."""

    def after_step(self, watch: Watch, evenness: float) -> Watch:
        """See `Rebalancer.after_step`."""

    def decide(
        self, old: ExpertMap, load: Sequence[Sequence[float]], costs: Costs, nodes: int = 1, groups: int = 1
    ) -> Decision:
        """See `Rebalancer.decide`."""


class ExpertBalancer:
    """Adds to plans, takes reports. One thread calls it: the engine's."""

    def __init__(self, config: Balancing, policy: Policy | None = None) -> None:
        self._config, self._policy = config, policy or config.policy
        self.map = replace(config.experts, experts=config.experts.experts * len(config.layers))
        """Which expert every slot of every layer has, after the plans so far."""
        self._watch = Watch()
        self._is_due = False
        self._window = _Window(config)
        self._reports: dict[int, list[ExpertReport]] = {}
        """Reports of steps of which not all ranks have told."""
        self._settled = -1
        """The step of the newest map."""
        self._evenness = 1.0
        self._steps = 0
        self._bytes_per_s = config.bytes_per_s
        self._thinking = ThreadPoolExecutor(1, "shardwright-experts")
        self._decision: Future[Decision] | None = None
        self._moves: deque[ExpertMove] = deque()
        self._stats = ExpertStats(layers=list(config.layers))

    def into(self, plan: StepPlan) -> StepPlan:
        """The plan with what is to be moved and asked in it."""
        self._steps += 1
        self._watch = self._policy.after_step(self._watch, self._evenness)
        self._is_due = self._is_due or self._watch.due is not None  # until all have told, and the last moves are made
        self._advance_decision()
        moves = [self._moves.popleft()] if self._moves else []
        for move in moves:
            self._moved(move)
        ends = bool(moves) and not self._moves
        if ends:  # what ranks tell of the steps until then was under other maps
            self._settled, self._window = plan.step, _Window(self._config)
        asks = ends or self._steps % self._config.ask_every == 0
        return plan.model_copy(update={"moves": moves, "asks_experts": asks})

    def on_report(self, report: ExpertReport) -> None:
        """What one rank tells. A load is known when all have."""
        if report.move_s and report.moved_bytes:
            self._bytes_per_s = report.moved_bytes / report.move_s
        reports = self._reports.setdefault(report.step, [])
        reports.append(report)
        if len(reports) == self._config.ranks:  # those that are ahead wait here for the others
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
            self._window = _Window(self._config)  # what was long ago says little about what is to come

    def stats(self) -> ExpertStats:
        """Numbers for people."""
        return self._stats

    def close(self) -> None:
        """Stop thinking."""
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
        """Line up the layers that change."""
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
    """What was told since the last look."""

    def __init__(self, config: Balancing) -> None:
        self._config = config
        self.load = [[0] * config.experts.num_experts for _ in config.layers]
        self._expert_s: list[dict[int, float]] = [{} for _ in config.layers]
        self._combine_s = [0.0] * config.ranks
        self._sent_bytes = [0] * config.ranks
        self._tokens: list[dict[int, int]] = [{} for _ in config.layers]
        """By layer and rank."""
        self.steps = 0
        """Steps that every rank has told of."""

    def add(self, report: ExpertReport) -> None:
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
        """Mean over maximum of the tokens that ranks ran, layer by layer; 1 where there were none."""
        return [_mean(list(ran.values())) / max(ran.values()) if any(ran.values()) else 1.0 for ran in self._tokens]

    @property
    def slowest_s(self) -> float:
        """Seconds a step that the slowest rank of each layer computes experts, all layers together."""
        return self._slowest / self.steps if self.steps else 0.0

    @property
    def _slowest(self) -> float:
        return sum(max(seconds.values(), default=0.0) for seconds in self._expert_s)

    def stats(self, before: ExpertStats) -> ExpertStats:
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
