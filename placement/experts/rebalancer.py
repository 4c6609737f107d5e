"""Expert rebalancing policy (EPLB): decides when experts are moved at run time, and to which map.

The policy is pure; the engine calls it and carries out the transfers that it returns::

    ranks count tokens per expert ─→ Watch (every step) ─ due? ─→ decide: pack, settle, predict ─ pays? ─→ transfers

A check is due every `interval` steps (0: never by time), and at once if balancedness falls below `skew`. The skew trigger is
then disarmed until balancedness reaches ``skew + hysteresis``, so that a load that cannot be balanced, or one near the
threshold, does not trigger a check at every step. A check moves experts only if that saves more time than it takes
(`Gain.pays`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from placement.experts.expert_map import ExpertLoads, ExpertMap, balancedness, place, rank_loads_of
from placement.experts.moves import ExpertTransfer, moves, settled


@dataclass(frozen=True)
class Costs:
    """Measurements under the current map, from which the gain of a new one is predicted.

    `expert_s` is the time in seconds that the slowest rank spends on experts in one step, in all layers. `expert_bytes` is the
    size of one expert of one layer on a rank. `bytes_per_s` is the rate at which a rank sends and simultaneously receives.
    `steps` is the number of steps for which a new map is expected to be used.
    """

    expert_s: float
    expert_bytes: int
    bytes_per_s: float
    steps: int


@dataclass(frozen=True)
class Gain:
    """The predicted gain and cost of a new map.

    `before` and `after` are the balancedness, averaged over layers. `saved_s` is the time saved per step, in seconds, for
    `steps` steps. `moved_bytes` is the traffic of all ranks, `most_bytes` the maximum that one rank sends or receives, and
    `move_s` the time in seconds that the latter takes.
    """

    before: float
    after: float
    saved_s: float
    steps: int
    moved_bytes: int
    most_bytes: int
    move_s: float

    @property
    def pays(self) -> bool:
        """Whether the time saved over all `steps` exceeds the time of the move."""
        return self.saved_s * self.steps > self.move_s

    def __str__(self) -> str:
        saved = f"{self.saved_s * 1e3:.3g} ms a step saved for {self.steps:,} steps"
        moved = f"{self.moved_bytes:,} bytes moved in {self.move_s * 1e3:.3g} ms"
        return f"balancedness {self.before:.3f} to {self.after:.3f}: {saved}, {moved}"


@dataclass(frozen=True)
class Decision:
    """The result of a check: the map to use from now on, the transfers to it (empty: the map stays), and the gain."""

    experts: ExpertMap
    transfers: tuple[ExpertTransfer, ...]
    gain: Gain


@dataclass(frozen=True)
class Watch:
    """State since the last check: the number of steps, whether the skew trigger is armed, and why a check is due, or None."""

    steps: int = 0
    armed: bool = True
    due: str | None = None


@dataclass(frozen=True)
class Rebalancer:
    """The rebalancing policy.

    `interval` is the number of steps between checks (0: none by time). `skew` is the balancedness below which a check is due at
    once (None: never). With `must_pay` False, experts move whenever another map is better, whatever the move costs.
    """

    interval: int = 3000
    skew: float | None = None
    hysteresis: float = 0.05
    must_pay: bool = True

    def after_step(self, watch: Watch, evenness: float) -> Watch:
        """Returns the state after one more step. `watch` is the state before it, `evenness` the recent balancedness (mean over
        max of the ranks' loads, 0 to 1). If a check becomes due, `Watch.due` says why; the step after that starts a new
        count."""
        seen = Watch(1, watch.armed) if watch.due else replace(watch, steps=watch.steps + 1)
        if self.skew is not None and evenness >= self.skew + self.hysteresis:
            seen = replace(seen, armed=True)
        if self.skew is not None and seen.armed and evenness < self.skew:
            return replace(seen, armed=False, due=f"balancedness {evenness:.3f} is below {self.skew}")
        if self.interval and seen.steps >= self.interval:
            return replace(seen, due=f"{self.interval} steps since the last look")
        return seen

    def decide(self, old: ExpertMap, load: ExpertLoads, costs: Costs, nodes: int = 1, groups: int = 1) -> Decision:
        """Returns the map to use for a load, and the transfers to it: a better map if the move is worth its cost, else the map
        `old` without transfers.

        `load` has the load of each expert, ``[layers][experts]``. `nodes` is the number of nodes with equally many ep ranks,
        `groups` the number of expert groups of group-limited routing (see `place`). Raises `ValueError` if `load` and `old`
        have different numbers of layers or experts.
        """
        redundant = sum(old.slots) - old.num_experts
        new = _better_layers(old, settled(old, place(load, old.num_ranks, redundant, nodes, groups), nodes), load)
        transfers = moves(old, new)
        gain = predicted(old, new, transfers, load, costs)
        worth = gain.pays if self.must_pay else gain.saved_s > 0
        return Decision(new, tuple(transfers), gain) if worth else Decision(old, (), gain)


def _better_layers(old: ExpertMap, new: ExpertMap, load: ExpertLoads) -> ExpertMap:
    """Returns the new map in layers where it lowers the maximum load of a rank, and the old map in the others."""
    rows = []
    for layer, row in enumerate(load):
        before, after = (max(rank_loads_of(placed, layer, row)) for placed in (old, new))
        rows.append((new if after < before else old).experts[layer])
    return replace(new, experts=tuple(rows))


def predicted(old: ExpertMap, new: ExpertMap, transfers: Sequence[ExpertTransfer], load: ExpertLoads, costs: Costs) -> Gain:
    """Returns the predicted gain of the `transfers` from the map `old` to the map `new` if the load, ``[layers][experts]``,
    does not change.

    `costs` has the measurements under the old map. The time that a layer's experts take is taken to be proportional to the load
    of the most loaded rank.
    """
    before, after = (sum(max(rank_loads_of(placed, layer, row)) for layer, row in enumerate(load)) for placed in (old, new))
    sent, received = [0] * old.num_ranks, [0] * old.num_ranks
    for transfer in transfers:
        if not transfer.is_local:
            sent[transfer.source_rank] += costs.expert_bytes
            received[transfer.target_rank] += costs.expert_bytes
    return Gain(
        before=_mean(balancedness(old, load)),
        after=_mean(balancedness(new, load)),
        saved_s=costs.expert_s * (1 - after / before) if before else 0.0,
        steps=costs.steps,
        moved_bytes=sum(sent),
        most_bytes=max(*sent, *received),
        move_s=max(*sent, *received) / costs.bytes_per_s,
    )


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)
