"""What one rank holds of the model, as one value. `placement.ownership.shards` makes it."""

from __future__ import annotations

from dataclasses import dataclass

from placement.experts.expert_map import ExpertMap


@dataclass(frozen=True)
class Shard:
    """What one rank holds. Ranges index the whole model; `vocab`, of the embedding, and `head_vocab` may reach past
    ``vocab_size`` into padding rows."""

    layers: range
    heads: tuple[tuple[range, range], ...]
    """(query heads, KV heads) in layers of each kind, in the order of `ModelSpec.kinds`."""
    columns: range
    vocab: range
    head_vocab: range
    first_stage: bool
    last_stage: bool
    expert_map: ExpertMap | None = None
    """Which expert every slot of every rank has at first, the same in each layer with experts."""
    expert_slots: range = range(0)
    """The slots of this rank."""
    expert_columns: range = range(0)
    """Columns of each of these experts."""
    shared_columns: range = range(0)
    """Columns of the shared expert."""

    @property
    def experts(self) -> tuple[int, ...]:
        """The expert in each of this rank's slots."""
        placed = self.expert_map
        return () if placed is None else placed.experts[0][self.expert_slots.start : self.expert_slots.stop]

    @property
    def q_heads(self) -> range:
        """Query heads in layers of the first kind; most models have no other."""
        return self.heads[0][0]

    @property
    def kv_heads(self) -> range:
        """KV heads there."""
        return self.heads[0][1]
