"""Messages from an engine to its ranks: what every rank does in the next step."""

from __future__ import annotations

from pydantic import Field

from actors.wire.experts import ExpertMove
from actors.wire.kv import KVExpect, KVFetch, KVSave, KVSend
from actors.wire.message import Message
from actors.wire.requests import SamplingParams


class SequenceStart(Message):
    """A sequence the ranks do not know yet (new, or back after preemption), whole.

    It stays in its `dp_rank` until it ends or is preempted: its KV is there, and only ranks of that DP rank know it.
    """

    sequence_id: int
    dp_rank: int = 0
    tokens: list[int]
    """Prompt and whatever was generated before a preemption."""
    prompt_length: int
    sampling: SamplingParams
    rope_length: int | None = None
    """Length by which a rope that depends on it rotates the tokens; None: the prompt's. See `RopeSpec.deciding_length`."""


class Row(Message):
    """One sequence's part of a step: run its tokens ``[start, start + count)``."""

    sequence_id: int
    dp_rank: int = 0
    """That of its start; said again so that a plan tells by itself how many tokens each DP rank runs."""
    start: int
    """Tokens of the sequence whose KV is in the cache already."""
    count: int
    append: list[int] = Field(default_factory=list)
    """Tokens to add to the sequence first: those sampled since the ranks last heard of it."""
    append_sampled: bool = False
    """Add the token the ranks sampled last for the sequence: the plan was made before the engine knew it."""
    new_blocks: list[int] = Field(default_factory=list)
    """Blocks to add to the end of the sequence's block table.

    With several KV owners, block j of the table is a page of owner ``j % owners`` (`placement.ownership.context`).
    """
    sample: bool = False
    """Sample the token that follows the last one run."""


class StepPlan(Message):
    """What every rank does next. Applied in this order: `saves`, `fetches`, `expects`, `sends`, `forgets`, `moves`, `ended`,
    `started`, `rows`."""

    step: int
    moves: list[ExpertMove] = Field(default_factory=list)
    asks_experts: bool = False
    """Whether ranks with experts tell what these did (`ExpertReport`), after the step."""
    settled: int = -1
    """The newest step whose result has reached the engine; tokens of steps up to it wait at every stage to be taken."""
    ended: list[int] = Field(default_factory=list)
    """Sequences to forget (finished, cancelled or preempted)."""
    started: list[SequenceStart] = Field(default_factory=list)
    expects: list[KVExpect] = Field(default_factory=list)
    sends: list[KVSend] = Field(default_factory=list)
    forgets: list[str] = Field(default_factory=list)
    """Tickets given up: nothing more is sent, or expected, for them."""
    saves: list[KVSave] = Field(default_factory=list)
    fetches: list[KVFetch] = Field(default_factory=list)
    rows: list[Row]

    @property
    def copy_offset(self) -> int:
        """Where the step's tokens begin in the round robin over copies (`placement.experts.expert_map`): it moves on as
        sequences do, and is the same whenever the same rows run."""
        return sum(row.start for row in self.rows)

    def new_lens(self, dp_size: int) -> list[list[int]]:
        """New tokens of each row, per DP rank."""
        return [[row.count for row in self.rows if row.dp_rank == dp_rank] for dp_rank in range(dp_size)]

    def of_dp_rank(self, dp_rank: int) -> StepPlan:
        """What concerns the ranks of one DP rank. Ended sequences are named to all: names are unique across DP ranks."""
        started = [start for start in self.started if start.dp_rank == dp_rank]
        return self.model_copy(update={"started": started, "rows": [row for row in self.rows if row.dp_rank == dp_rank]})

    @property
    def is_work(self) -> bool:
        """Whether it holds anything that ranks must hear of now."""
        return bool(self.rows or self.expects or self.forgets or self.saves or self.fetches)
