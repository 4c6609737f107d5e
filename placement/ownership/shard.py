"""The shard: the part of the model that one rank holds, as one value. `placement.ownership.shards` constructs it."""

from __future__ import annotations

from dataclasses import dataclass

from placement.experts.expert_map import ExpertMap


@dataclass(frozen=True)
class Shard:
    """The part of the model that one rank holds, as ranges of the whole model.

    `layers` are the rank's layers, `columns` its MLP columns, `vocab` and `head_vocab` its rows of the embedding and of the LM
    head. The vocabulary ranges may extend past ``vocab_size`` into padding rows.
    """

    layers: range
    heads: tuple[tuple[range, range], ...]
    """Pairs of (query heads, KV heads) in layers of each attention kind, in the order of `ModelSpec.kinds`."""
    columns: range
    vocab: range
    head_vocab: range
    first_stage: bool
    last_stage: bool
    expert_map: ExpertMap | None = None
    """Initial expert map, with the expert in every slot of every rank; it is the same for each MoE layer."""
    expert_slots: range = range(0)
    """Expert slots of this rank."""
    expert_columns: range = range(0)
    """Columns that this rank holds of each of its experts."""
    shared_columns: range = range(0)
    """Columns that this rank holds of the shared expert."""

    @property
    def experts(self) -> tuple[int, ...]:
        """The expert in each of this rank's slots, in slot order; empty for a dense model."""
        placed = self.expert_map
        return () if placed is None else placed.experts[0][self.expert_slots.start : self.expert_slots.stop]

    @property
    def q_heads(self) -> range:
        """Query heads in layers of the first attention kind (most models have only one)."""
        return self.heads[0][0]

    @property
    def kv_heads(self) -> range:
        """KV heads in layers of the first attention kind."""
        return self.heads[0][1]
