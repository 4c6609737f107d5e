"""The draft of a step plan for one DP rank, while the scheduler composes it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from actors.engine.sequences.sequence import Sequence
from actors.wire.plans import Row, SequenceStart, StepPlan


@dataclass(slots=True)
class Draft:
    """One DP rank's rows of the step so far, and the rest of its token budget."""

    step: int
    budget: int
    dp_rank: int = 0
    owners: int = 1
    """Number of KV owners. A rank identifies a block by its index in its own pages (see `actors.engine.kv.block_manager`)."""
    started: list[SequenceStart] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    sequences: list[Sequence] = field(default_factory=list)
    """The sequence of each row."""
    preempted: list[Sequence] = field(default_factory=list)
    """Sequences preempted by this step."""
    prompt_budget: int = 0
    """The part of the budget that prompt chunks may still use."""

    def start(self, sequence: Sequence, sequence_id: int) -> None:
        """Add the full state of a sequence that the ranks do not hold to the draft. `sequence_id` is the new id under which
        later rows refer to it; it is stored in the sequence."""
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
        """Add a row that runs the next `count` tokens of a started sequence, and count them as planned.

        If these are its last tokens, the row samples the next one, unless the request only scores its prompt. `count` must be
        at least 1, and fit the budget and the tokens that remain.
        """
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
        """Add a row like `run`, for a prompt chunk of `count` tokens, and charge it to the prompt budget too."""
        self.run(sequence, count)
        self.prompt_budget -= count


def plan_of(drafts: Iterable[Draft], ended: list[int], settled: int) -> StepPlan:
    """Return the plan with the starts and rows of all `drafts` (at least one, in DP rank order, all of the same step).

    `ended` has the ids of the sequences that ranks must drop, and `settled` is the newest step whose result has reached the
    engine (-1 for none).
    """
    started = [start for draft in drafts for start in draft.started]
    rows = [row for draft in drafts for row in draft.rows]
    return StepPlan(step=next(iter(drafts)).step, settled=settled, ended=ended, started=started, rows=rows)
