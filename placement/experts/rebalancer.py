"""When experts move: the policy of the live balancer. Pure; the engine asks it, and moves what it says.

    ranks count tokens per expert ─→ Watch (every step) ─ due? ─→ decide: pack, settle, predict ─ pays? ─→ transfers

A look is due every `interval` steps (0: none by time), and at once when balancedness falls below `skew`. That trigger then
rests until balancedness has been above ``skew + hysteresis`` again, so that a load nobody can balance, or one near the edge,
does not call for a look at every step. A look moves experts only when it saves more time than it takes (`Gain.pays`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from placement.experts.expert_map import ExpertLoads, ExpertMap, balancedness, place, rank_loads_of
from placement.experts.moves import ExpertTransfer, moves, settled


@dataclass(frozen=True)
class Costs:
    """What was measured under the map in use.

    `expert_s`: seconds that the slowest rank computes experts in one step, all layers together. `expert_bytes`: weights of
    one expert of one layer on a rank. `bytes_per_s`: what a rank sends, and receives at the same time. `steps`: how long a
    new map is expected to serve.
    """

    expert_s: float
    expert_bytes: int
    bytes_per_s: float
    steps: int


@dataclass(frozen=True)
class Gain:
    """What a new map brings: balancedness (mean over layers) before and after, seconds saved a step for `steps` steps, and
    bytes on the wire, of all ranks and of the one that sends or receives most, which takes `move_s` seconds."""

    before: float
    after: float
    saved_s: float
    steps: int
    moved_bytes: int
    most_bytes: int
    move_s: float

    @property
    def pays(self) -> bool:
        """Whether the steps to come save more time than the move takes."""
        return self.saved_s * self.steps > self.move_s

    def __str__(self) -> str:
        saved = f"{self.saved_s * 1e3:.3g} ms a step saved for {self.steps:,} steps"
        moved = f"{self.moved_bytes:,} bytes moved in {self.move_s * 1e3:.3g} ms"
        return f"balancedness {self.before:.3f} to {self.after:.3f}: {saved}, {moved}"


@dataclass(frozen=True)
class Decision:
    """What a look came to: the map to use from now on, the transfers to it (none: the map stays), and the numbers."""

    experts: ExpertMap
    transfers: tuple[ExpertTransfer, ...]
    gain: Gain


@dataclass(frozen=True)
class Watch:
    """Since the last look: how many steps, and whether skew may call for the next. `due`: why a look is due now, or None."""

    steps: int = 0
    armed: bool = True
    due: str | None = None


@dataclass(frozen=True)
class Rebalancer:
    """The policy. `interval`: steps between looks (0: none by time); `skew`: balancedness below which to look at once (None:
    never); `must_pay`: False moves whenever another map is better, whatever the move costs."""

    interval: int = 3000
    skew: float | None = None
    hysteresis: float = 0.05
    must_pay: bool = True

    def after_step(self, watch: Watch, evenness: float) -> Watch:
        """The watch after one more step; `evenness`: balancedness of the load counted of late. A due look starts it anew."""
        seen = Watch(1, watch.armed) if watch.due else replace(watch, steps=watch.steps + 1)
        if self.skew is not None and evenness >= self.skew + self.hysteresis:
            seen = replace(seen, armed=True)
        if self.skew is not None and seen.armed and evenness < self.skew:
            return replace(seen, armed=False, due=f"balancedness {evenness:.3f} is below {self.skew}")
        if self.interval and seen.steps >= self.interval:
            return replace(seen, due=f"{self.interval} steps since the last look")
        return seen

    def decide(self, old: ExpertMap, load: ExpertLoads, costs: Costs, nodes: int = 1, groups: int = 1) -> Decision:
        """The best map for a load, if it is worth moving to; else the old one."""
        redundant = sum(old.slots) - old.num_experts
        new = _better_layers(old, settled(old, place(load, old.num_ranks, redundant, nodes, groups), nodes), load)
        transfers = moves(old, new)
        gain = predicted(old, new, transfers, load, costs)
        worth = gain.pays if self.must_pay else gain.saved_s > 0
        return Decision(new, tuple(transfers), gain) if worth else Decision(old, (), gain)


def _better_layers(old: ExpertMap, new: ExpertMap, load: ExpertLoads) -> ExpertMap:
    """The new map where it leaves the most loaded rank of a layer with less, the old one elsewhere."""
    rows = []
    for layer, row in enumerate(load):
        before, after = (max(rank_loads_of(placed, layer, row)) for placed in (old, new))
        rows.append((new if after < before else old).experts[layer])
    return replace(new, experts=tuple(rows))


def predicted(old: ExpertMap, new: ExpertMap, transfers: Sequence[ExpertTransfer], load: ExpertLoads, costs: Costs) -> Gain:
    """What a move brings if the load stays as it is: a layer's experts take as long as its most loaded rank has work."""
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
