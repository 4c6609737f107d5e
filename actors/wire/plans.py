"""Messages from an engine to its ranks: the step plan, which says what every rank does in the next step."""

from __future__ import annotations

from pydantic import Field

from actors.wire.experts import ExpertMove
from actors.wire.kv import KVExpect, KVFetch, KVSave, KVSend
from actors.wire.message import Message
from actors.wire.requests import SamplingParams


class SequenceStart(Message):
    """The full state of a sequence that the ranks do not hold yet: a new one, or one that resumes after preemption.

    The sequence stays on its `dp_rank` until it ends or is preempted: its KV is there, and only the ranks of that DP rank hold
    it.
    """

    sequence_id: int
    dp_rank: int = 0
    tokens: list[int]
    """Prompt tokens, followed by those generated before a preemption."""
    prompt_length: int
    sampling: SamplingParams
    rope_length: int | None = None
    """Sequence length that selects the rope frequencies, for ropes that depend on it; None uses the prompt length. See
    `RopeSpec.deciding_length`."""


class Row(Message):
    """One sequence's part of a step: the ranks run its tokens ``[start, start + count)``."""

    sequence_id: int
    dp_rank: int = 0
    """DP rank of the sequence. Repeated from its start so that a plan alone shows how many tokens each DP rank runs."""
    start: int
    """Number of tokens of the sequence whose KV is already in the cache."""
    count: int
    append: list[int] = Field(default_factory=list)
    """Tokens to append to the sequence first: those sampled since the last plan with this sequence."""
    append_sampled: bool = False
    """Whether to append the token that the ranks sampled last for the sequence, which the engine did not know yet."""
    new_blocks: list[int] = Field(default_factory=list)
    """Blocks to append to the sequence's block table.

    With several KV owners, block j of the table is a page of owner ``j % owners`` (`placement.ownership.context`).
    """
    sample: bool = False
    """Whether to sample the token that follows the last one run."""


class StepPlan(Message):
    """The work of every rank in the next step.

    The fields are applied in this order: `saves`, `fetches`, `expects`, `sends`, `forgets`, `moves`, `ended`, `started`,
    `rows`.
    """

    step: int
    moves: list[ExpertMove] = Field(default_factory=list)
    asks_experts: bool = False
    """Whether ranks with experts send an `ExpertReport` after the step."""
    settled: int = -1
    """The newest step whose result has reached the engine. Every stage can receive the tokens of steps up to this one."""
    ended: list[int] = Field(default_factory=list)
    """Ids of sequences to drop (finished, cancelled or preempted)."""
    started: list[SequenceStart] = Field(default_factory=list)
    expects: list[KVExpect] = Field(default_factory=list)
    sends: list[KVSend] = Field(default_factory=list)
    forgets: list[str] = Field(default_factory=list)
    """Ids of abandoned tickets: ranks stop sending and receiving for them."""
    saves: list[KVSave] = Field(default_factory=list)
    fetches: list[KVFetch] = Field(default_factory=list)
    rows: list[Row]

    @property
    def copy_offset(self) -> int:
        """The offset at which the step's tokens begin in the round robin over expert replicas (`placement.experts.expert_map`).

        It advances with the sequences, and is the same whenever the same rows run.
        """
        return sum(row.start for row in self.rows)

    def new_lens(self, dp_size: int) -> list[list[int]]:
        """Return the number of tokens that each row runs, as one list of row lengths for each of the `dp_size` DP ranks."""
        return [[row.count for row in self.rows if row.dp_rank == dp_rank] for dp_rank in range(dp_size)]

    def of_dp_rank(self, dp_rank: int) -> StepPlan:
        """Return a copy of this plan with only the started sequences and rows of the DP rank with index `dp_rank`.

        It keeps all ended sequences, since sequence ids are unique across DP ranks, and all other fields.
        """
        started = [start for start in self.started if start.dp_rank == dp_rank]
        return self.model_copy(update={"started": started, "rows": [row for row in self.rows if row.dp_rank == dp_rank]})

    @property
    def is_work(self) -> bool:
        """Whether the plan has rows, or orders for KV transfers and tiers, that must be sent to the ranks now."""
        return bool(self.rows or self.expects or self.forgets or self.saves or self.fetches)
