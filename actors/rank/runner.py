"""The model runner of one rank: applies a step plan, runs the rank's part of the forward pass, and samples on the last stage.

plan ──→ sequences (token history, block tables) ──→ Batch ──→ stage ──→ hidden to the next stage
              ↑                                                   └────→ logits → sampler → StepResult
              └────────── tokens (`pipeline.py`) ───────────────────────────────────┘
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
from torch import Tensor

from actors.groups.group import Group
from actors.groups.solo import SoloGroup
from actors.model.decoder import Decoder
from actors.model.kv.kv_caches import KVCaches
from actors.model.moe.expert_mover import ExpertWeightMover, NoExperts
from actors.model.step.batch import Batch
from actors.rank.head import LMHead
from actors.rank.pipeline import Pipeline
from actors.sampling.sampler import Sampler, SampleRow
from actors.wire.plans import Row, SequenceStart, StepPlan
from actors.wire.requests import SamplingParams
from actors.wire.results import PromptLogprobs, Sampled, StepResult
from placement.cost.activations import scored_rows
from placement.ownership.context import ContextRank, is_split, restored_order
from placement.ownership.expert_tokens import NewLensAcrossDP


class PlanError(RuntimeError):
    """Raised if a plan contradicts the state of this rank, so that engine and rank are out of sync."""


@dataclass
class _Sequence:
    tokens: list[int]
    prompt_length: int
    rope_length: int
    sampling: SamplingParams
    blocks: list[int] = field(default_factory=list)
    sampled: int | None = None
    """The token sampled last, from the time this rank receives it until a plan appends it."""
    sampled_at: int = -1
    """The newest step that samples a token for this sequence."""


class Runner:
    """Runs step plans on one rank: one pipeline stage of one tensor-parallel (TP) slice, with its KV pages.

    `context` is the group of ranks over which context parallelism (CP) splits the positions, and `place` is this rank's part of
    them. Only cp rank 0 of the last stage samples, since it holds the last token of every row; all its tp ranks sample, with
    the same result.

    A rank applies only the rows of its own DP rank, and each DP rank samples its own tokens. If the LM head is split over all
    DP ranks (`placement.layout.lm_head`), the sampling ranks apply all rows instead, and sample for all DP ranks. A DP rank
    without rows skips the layers and returns an empty result; groups within that DP rank run no collectives.
    """

    def __init__(
        self,
        decoder: Decoder,
        head: LMHead,
        cache: KVCaches,
        pipeline: Pipeline,
        sampler: Sampler,
        context: Group | None = None,
        place: ContextRank | None = None,
        experts: ExpertWeightMover | NoExperts | None = None,
    ) -> None:
        """Create a runner. Without `context` and `place` this rank has every position; without `experts` it has no experts."""
        self._decoder, self._head, self._cache, self._pipeline, self._sampler = decoder, head, cache, pipeline, sampler
        self._context = context or SoloGroup("cp")
        self._place = place or ContextRank(cache.block_size)
        self._experts = experts or NoExperts()
        self._chooses_for_all = head.is_shared and pipeline.is_last and self._context.rank == 0
        self._scored_rows = scored_rows(sampler.vocab_columns)
        self._sequences: dict[int, _Sequence] = {}

    @torch.inference_mode()
    def step(self, plan: StepPlan) -> StepResult | None:
        """Apply a plan, the next in order, and run this rank's part of the forward pass, together with the other ranks of the
        replica.

        Returns the DP rank's result on the last stage's sampling ranks (cp rank 0), and None on all other ranks. Raises
        `PlanError` if the plan contradicts the state of this rank, and `GroupError` if another rank does not take part in time.
        """
        began, waited_s = time.perf_counter(), self._pipeline.waited_s
        mine, new_lens_across_dp = plan.of_dp_rank(self._place.dp_rank), plan.new_lens(self._place.dp_size)
        visible = plan if self._chooses_for_all else mine
        self._experts.move(plan.moves)
        self._apply(visible)
        result = self._run(visible, mine.rows, new_lens_across_dp, plan.copy_offset)
        seconds = time.perf_counter() - began - (self._pipeline.waited_s - waited_s)
        self._pipeline.busy_s += seconds
        return None if result is None else result.model_copy(update={"seconds": seconds})

    def catch_up(self) -> None:
        """Receive and store every token of earlier steps that the last stage samples, even if no plan needs it yet. Waits for
        them."""
        self._note(self._pipeline.receive_tokens(sys.maxsize))

    def _run(self, plan: StepPlan, rows: list[Row], new_lens_across_dp: NewLensAcrossDP, copy_offset: int) -> StepResult | None:
        """Run the DP rank's `rows`. `plan` is the plan visible to this rank, with all rows whose tokens are sampled here."""
        wanted = [row.sequence_id for row in rows if row.sample]
        for row in plan.rows:
            if row.sample:
                self._sequences[row.sequence_id].sampled_at = plan.step
        self._pipeline.expect(plan.step, wanted)
        hidden, last = self._forward(rows, new_lens_across_dp, copy_offset)
        if hidden is None:
            return None
        restored = self._restored(rows, hidden)
        if self._context.rank > 0:
            self._note(zip(wanted, self._pipeline.publish_tokens(None, len(wanted)), strict=True))
            return None
        sampled = self._sample(plan.rows, hidden[last])
        self._note((item.sequence_id, item.token) for item in sampled)
        own = set(wanted)
        mine = [item for item in sampled if item.sequence_id in own]
        self._pipeline.publish_tokens([item.token for item in mine], len(mine))
        return StepResult(step=plan.step, sampled=mine, prompt_logprobs=self._score(plan.rows, rows, restored))

    def _note(self, tokens: Iterable[tuple[int, int]]) -> None:
        for sequence_id, token in tokens:
            if sequence_id in self._sequences:  # otherwise it has ended meanwhile
                self._sequences[sequence_id].sampled = token

    def _apply(self, plan: StepPlan) -> None:
        wanted = [self._known(row).sampled_at for row in plan.rows if row.append_sampled]
        self._note(self._pipeline.receive_tokens(max([plan.settled, *wanted])))
        for sequence_id in plan.ended:
            self._sequences.pop(sequence_id, None)
        for start in plan.started:
            self._sequences[start.sequence_id] = _begin(start)
        for row in plan.rows:
            sequence = self._known(row)
            sequence.tokens.extend(self._sampled(row, sequence) if row.append_sampled else row.append)
            sequence.sampled = None
            sequence.blocks.extend(row.new_blocks)
            self._check(row, sequence)

    def _known(self, row: Row) -> _Sequence:
        if row.sequence_id not in self._sequences:
            raise PlanError(f"plan names sequence {row.sequence_id}, which this rank does not hold")
        return self._sequences[row.sequence_id]

    def _sampled(self, row: Row, sequence: _Sequence) -> list[int]:
        if sequence.sampled is None:
            raise PlanError(f"plan appends the last sampled token of sequence {row.sequence_id}, but none was sampled")
        return [sequence.sampled]

    def _check(self, row: Row, sequence: _Sequence) -> None:
        end, room = row.start + row.count, len(sequence.blocks) * self._cache.block_size
        if row.count < 1 or end > len(sequence.tokens) or end > room:
            raise PlanError(
                f"plan wants tokens {row.start}..{end} of sequence {row.sequence_id}, which has "
                f"{len(sequence.tokens)} tokens and room for {room} in {len(sequence.blocks)} blocks"
            )

    def _batch(self, rows: list[Row]) -> Batch:
        """Return the tokens that this rank runs in the step, row after row, with the KV slots in which it stores them."""
        place, own = self._place, self._place.ownership()
        tokens, positions, slots, output_rows = list[int](), list[int](), list[int](), list[int]()
        query_lens, block_tables, rope_lens = list[int](), list[list[int]](), list[int]()
        for row in rows:
            sequence = self._sequences[row.sequence_id]
            blocks = own.blocks(sequence.blocks)
            first = len(tokens)
            for span in place.spans(row.start, row.count):
                tokens += sequence.tokens[span.start : span.stop]
                positions += span
            query_lens.append(len(tokens) - first)
            if is_split(row.count, place.cp):
                slots += [-1] * query_lens[-1]  # attention stores these KV entries itself, as they pass around the ring
            else:
                slots += [own.slot(position, blocks) for position in positions[first:]]
            if row.sample:
                output_rows.append(len(tokens) - 1)
            block_tables.append(blocks)
            rope_lens.append(sequence.rope_length)
        return Batch(
            token_ids=self._tensor(tokens),
            positions=self._tensor(positions),
            slots=self._tensor(slots),
            query_lens=query_lens,
            context_lens=[row.start for row in rows],
            block_tables=block_tables,
            output_rows=self._tensor(output_rows),
            new_lens=[row.count for row in rows],
            rope_lens=rope_lens,
        )

    def _forward(self, rows: list[Row], new_lens_across_dp: NewLensAcrossDP, copy_offset: int) -> tuple[Tensor | None, Tensor]:
        """Run the layers of this stage.

        Returns the hidden states `[tokens, hidden]` on the last stage, or None on the other stages, which send theirs to the
        next one; and the index of the last token of each row that samples (`Batch.output_rows`).
        """
        if not rows:
            none = self._decoder.serve(new_lens_across_dp, copy_offset)
            return (none if self._pipeline.is_last else None), self._tensor([])
        batch = replace(self._batch(rows), new_lens_across_dp=new_lens_across_dp, copy_offset=copy_offset)
        before = self._pipeline.receive(len(self._decoder.regions.own(batch.num_tokens)))
        hidden: Tensor = self._decoder(batch, before, self._cache)
        if self._pipeline.is_last:
            return hidden, batch.output_rows
        self._pipeline.send(hidden)
        return None, batch.output_rows

    def _restored(self, rows: list[Row], hidden: Tensor) -> Tensor:
        """Return `hidden` with every token of the step in plan order if prompts are scored: gathered over cp if a row is split.

        Otherwise returns `hidden` unchanged.
        """
        cp = self._place.cp
        is_scored = any(_scored(row, self._sequences[row.sequence_id]) for row in rows)
        if not (is_scored and any(is_split(row.count, cp) for row in rows)):
            return hidden
        counts = [row.count for row in rows]
        sizes = [sum(len(run) for row in rows for run in self._place.spans(0, row.count, rank)) for rank in range(cp)]
        return self._context.all_gather(hidden, sizes)[self._tensor(restored_order(counts, cp))]

    def _sample(self, rows: list[Row], hidden: Tensor) -> list[Sampled]:
        """Sample a token for each row that asks for one, and return them in DP rank order.

        `hidden` holds the states `[rows, hidden]` of this DP rank's own sampling rows.
        """
        wanted = _by_dp_rank(row for row in rows if row.sample)
        if not wanted:
            return []
        counts = [sum(row.dp_rank == dp_rank for row in wanted) for dp_rank in range(self._place.dp_size)]
        held = [self._sequences[row.sequence_id] for row in wanted]
        rows_to_sample = [SampleRow(s.sampling, s.tokens, s.prompt_length) for s in held]
        choices = self._sampler.sample(self._head.logits(hidden, counts), rows_to_sample)
        return [
            Sampled(sequence_id=row.sequence_id, token=choice.token, logprob=choice.logprob, error=choice.error)
            for row, choice in zip(wanted, choices, strict=True)
        ]

    def _score(self, rows: list[Row], mine: list[Row], hidden: Tensor) -> list[PromptLogprobs]:
        """Return the log-probabilities of prompt tokens: the state at position ``p`` scores the token at ``p + 1``.

        `rows` are all rows scored here. The hidden states of `mine` are on this rank, and only their scores are returned.
        """
        ends = accumulate(row.count for row in mine)
        firsts = {row.sequence_id: end - row.count for row, end in zip(mine, ends, strict=True)}
        scored = []
        for row in _by_dp_rank(rows):
            held = self._sequences[row.sequence_id]
            top, count = held.sampling.prompt_logprobs, _scored(row, held)
            if top is None or count == 0:
                continue
            first = firsts.get(row.sequence_id)
            entries = []
            for part in _parts(count, self._scored_rows):
                own = hidden[:0] if first is None else hidden[first + part.start : first + part.stop]
                counts = [len(part) if dp_rank == row.dp_rank else 0 for dp_rank in range(self._place.dp_size)]
                targets = held.tokens[row.start + part.start + 1 : row.start + part.stop + 1]
                entries.extend(self._sampler.score(self._head.logits(own, counts), targets, top))
            if first is not None:
                scored.append(PromptLogprobs(sequence_id=row.sequence_id, first=row.start + 1, entries=entries))
        return scored

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self._cache.device)


def _begin(start: SequenceStart) -> _Sequence:
    rope_length = start.prompt_length if start.rope_length is None else start.rope_length
    return _Sequence(list(start.tokens), start.prompt_length, rope_length, start.sampling)


def _scored(row: Row, held: _Sequence) -> int:
    """Return the number of tokens of a row whose successors in the prompt have to be scored."""
    if held.sampling.prompt_logprobs is None:
        return 0
    return max(0, min(row.start + row.count, held.prompt_length - 1) - row.start)


def _by_dp_rank(rows: Iterable[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: row.dp_rank)


def _parts(total: int, size: int) -> Iterator[range]:
    for start in range(0, total, size):
        yield range(start, min(start + size, total))
