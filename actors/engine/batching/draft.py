"""A step while it is being put together, per DP rank."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from actors.engine.sequences.sequence import Sequence
from actors.wire.plans import Row, SequenceStart, StepPlan


@dataclass(slots=True)
class Draft:
    """One DP rank's rows so far, and what is left of its token budget."""

    step: int
    budget: int
    dp_rank: int = 0
    owners: int = 1
    """KV owners: a rank knows a block by its place in its own pages (see `actors.engine.kv.blocks`)."""
    started: list[SequenceStart] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    sequences: list[Sequence] = field(default_factory=list)
    """The sequence of each row."""
    preempted: list[Sequence] = field(default_factory=list)
    """Those that gave their blocks back."""
    prompt_budget: int = 0
    """What of the budget chunks of prompts may take."""

    def start(self, sequence: Sequence, sequence_id: int) -> None:
        """Tell the ranks of a sequence, whole, under a new name."""
        sampling = sequence.request.sampling
        if sampling.prompt_logprobs is not None and not sequence.scores_prompt:
            sampling = sampling.model_copy(update={"prompt_logprobs": None})
        sequence.sequence_id = sequence_id
        sequence.num_tokens_on_ranks = len(sequence.tokens)
        self.started.append(
            SequenceStart(
                sequence_id=sequence_id,
                dp_rank=self.dp_rank,
                tokens=list(sequence.tokens),
                prompt_length=sequence.prompt_length,
                rope_length=sequence.rope_length,
                sampling=sampling,
            )
        )

    def run(self, sequence: Sequence, count: int) -> None:
        """Run the next `count` tokens; the last of them is followed by a sample, unless only the prompt is scored."""
        assert 0 < count <= min(self.budget, sequence.todo), f"{count} tokens, budget {self.budget}, todo {sequence.todo}"
        samples = count == sequence.todo and sequence.request.max_tokens > 0
        self.rows.append(
            Row(
                sequence_id=sequence.sequence_id,
                dp_rank=self.dp_rank,
                start=sequence.num_planned,
                count=count,
                append=sequence.tokens[sequence.num_tokens_on_ranks :],
                append_sampled=sequence.num_tokens_on_ranks < sequence.length > len(sequence.tokens),
                new_blocks=[block // self.owners for block in sequence.blocks[sequence.num_blocks_on_ranks :]],
                sample=samples,
            )
        )
        self.sequences.append(sequence)
        self.budget -= count
        sequence.num_planned += count
        sequence.num_tokens_on_ranks = sequence.length
        sequence.num_blocks_on_ranks = len(sequence.blocks)
        sequence.num_awaited += samples
        sequence.last_step = self.step

    def run_prompt(self, sequence: Sequence, count: int) -> None:
        """`run` a chunk of a prompt."""
        self.run(sequence, count)
        self.prompt_budget -= count


def plan_of(drafts: Iterable[Draft], ended: list[int], settled: int) -> StepPlan:
    """One plan for all DP ranks, in their order."""
    started = [start for draft in drafts for start in draft.started]
    rows = [row for draft in drafts for row in draft.rows]
    return StepPlan(step=next(iter(drafts)).step, settled=settled, ended=ended, started=started, rows=rows)
