"""Which tokens run next. Continuous batching: every step is put together anew from whatever is here.

    add ──→ waiting ──admit──→ running ──finish──→ event
               ↑                  │
               └────preempt───────┘    blocks ran out: the least urgent gives its own back and is recomputed later

`schedule` decides a step and `update` applies its result; nothing here waits, sends or looks at a clock.

A step is filled in this order, within `max_batch_tokens`: one token of every decoding sequence (or, over several stages, of
those whose turn it is: `micro_batches.py`), then chunks of prompts that have begun, then new admissions. A sequence gets all
blocks for the tokens it has on admission, so prompts never compete half way; only a decode can find no block and preempt.

A decode may be planned before its token is known: the ranks keep what they sample. A token computed past a stop is
discarded when it comes back.
"""

from __future__ import annotations

import heapq
from bisect import insort
from dataclasses import dataclass

from actors.engine import micro_batches
from actors.engine.blocks import BlockPool
from actors.engine.config import EngineConfig
from actors.engine.draft import Draft
from actors.engine.fairness import TenantCounters
from actors.engine.sequence import Sequence, State
from actors.engine.waiting import WaitingQueue
from actors.messages import FinishReason, PromptLogprobs, Row, Sampled, StepPlan, StepResult, TokenEvent, TokenLogprob


class ResultMismatch(RuntimeError):
    """A step result that does not answer the plan: engine and ranks no longer agree."""


@dataclass(slots=True)
class Counts:
    """What happened since the scheduler was made."""

    steps: int = 0
    tokens_run: int = 0
    tokens_sampled: int = 0
    tokens_discarded: int = 0
    """Sampled for a sequence that had ended, or left the ranks, meanwhile."""
    cache_hit_tokens: int = 0
    preemptions: int = 0
    aborts: int = 0
    finished: int = 0


class Scheduler:
    """Owns every sequence and block of one engine. Not thread-safe: one thread calls it."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.pool = BlockPool(config.num_blocks, config.kv_owners)
        self.counts = Counts()
        self.tenants = TenantCounters()
        self.waiting = WaitingQueue(config.overdue_after_s, self.tenants)
        self.running: list[Sequence] = []
        """Most urgent first."""
        self._live: dict[str, Sequence] = {}
        self._in_flight: dict[int, list[tuple[Row, Sequence]]] = {}
        self._deadlines: list[tuple[float, int, str]] = []
        """(deadline, order, request id): ids only, because an entry outlives its request."""
        self._need_no_step: list[Sequence] = []
        self._ended: list[int] = []
        self._next_sequence_id = 0

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return len(self._live)

    def add(self, sequence: Sequence) -> None:
        """Take a sequence that `check_request` has passed."""
        self._live[sequence.request.request_id] = sequence
        self.tenants.join(sequence.request.tenant)
        self.waiting.push(sequence)
        if sequence.request.timeout_s is not None:
            heapq.heappush(self._deadlines, (sequence.deadline_s, sequence.order, sequence.request.request_id))
        if sequence.is_empty_work:
            self._need_no_step.append(sequence)

    def cancel(self, request_id: str) -> TokenEvent | None:
        """End a request early. None for one that is unknown or has ended. What is in flight for it is ignored on arrival."""
        sequence = self._live.get(request_id)
        if sequence is None:
            return None
        self.counts.aborts += 1
        return self._end(sequence, "abort")

    def reap(self, now: float) -> list[TokenEvent]:
        """End what needs no step: requests past their deadline, and those with nothing to sample or score."""
        events = [self._end(s, "length") for s in self._need_no_step if s.state is not State.FINISHED]
        self._need_no_step.clear()
        while self._deadlines and self._deadlines[0][0] <= now:
            _, order, request_id = heapq.heappop(self._deadlines)
            sequence = self._live.get(request_id)
            if sequence is not None and sequence.order == order:
                events.append(self._end(sequence, "deadline"))
        return events

    def schedule(self, now: float) -> StepPlan | None:
        """The next step, or None where there is nothing to run (or all of it is in flight)."""
        draft = Draft(self.counts.steps, self.config.max_batch_tokens, self.config.kv_owners)
        self._plan_decodes(draft)
        draft.prompt_budget = self._prompt_budget(draft.budget)
        self._plan_chunks(draft)
        if not draft.has_preempted:
            self._admit(draft, now)
        return self._commit(draft) if draft.rows else None

    def _plan_decodes(self, draft: Draft) -> None:
        decoding = [s for s in self.running if s.todo == 1 and not s.is_sampled_out(self.config.capacity)]
        for sequence in micro_batches.next_decodes(decoding, draft.step, self.config.stages, self.config.micro_batch_rows):
            # An earlier one of this loop may have preempted it. Never the reverse: the loop goes by urgency.
            if sequence.state is State.RUNNING and self._grow(sequence, draft):
                draft.run(sequence, 1)

    def _plan_chunks(self, draft: Draft) -> None:
        for sequence in self.running:
            if sequence.todo > 1 and draft.prompt_budget > 0:
                draft.run_prompt(sequence, self._chunk(sequence, draft.prompt_budget))

    def _prompt_budget(self, budget: int) -> int:
        """Prompt tokens this step may run."""
        in_sight = self.waiting.num_tokens + sum(s.todo for s in self.running if s.todo > 1)
        limit = micro_batches.prompt_tokens(in_sight, self.config.stages, self.config.micro_batch_tokens)
        return budget if limit is None else min(budget, limit)

    def _chunk(self, sequence: Sequence, budget: int) -> int:
        """Tokens of `sequence` to run now: at least 1; unless it is the last chunk it ends with a block where it can."""
        count = min(sequence.todo, budget, self.config.max_chunk_tokens)
        beyond_block = (sequence.num_planned + count) % self.config.block_size
        return count - beyond_block if count < sequence.todo and count > beyond_block else count

    def _grow(self, sequence: Sequence, draft: Draft) -> bool:
        """Make room for all tokens of `sequence`. False where it was itself the least urgent and had to go."""
        needed = range(len(sequence.blocks), self.config.blocks_for(sequence.length))
        while not self.pool.has_room(needed):
            victim = self.running[-1]
            self._preempt(victim)
            draft.has_preempted = True
            if victim is sequence:
                return False
        sequence.blocks += self.pool.allocate(needed)
        return True

    def _preempt(self, victim: Sequence) -> None:
        self._leave_ranks(victim)
        victim.forget_ranks()
        victim.state = State.WAITING
        victim.preemptions += 1
        self.waiting.push_back_in(victim)
        self.counts.preemptions += 1

    def _admit(self, draft: Draft, now: float) -> None:
        while draft.prompt_budget > 0 and len(self.running) < self.config.max_sequences:
            sequence = self.waiting.first(now)
            if sequence is None or not self._place(sequence):
                return
            self.waiting.remove(sequence)
            sequence.state = State.RUNNING
            insort(self.running, sequence, key=lambda s: s.urgency)
            draft.start(sequence, self._next_sequence_id)
            self._next_sequence_id += 1
            draft.run_prompt(sequence, self._chunk(sequence, draft.prompt_budget))

    def _place(self, sequence: Sequence) -> bool:
        """Give `sequence` the blocks of all its tokens, found or new. False where there are not enough.

        One block is left for each running sequence to grow into: else the next step would take this admission back.
        """
        hits = self._find(sequence)
        needed = range(len(hits), self.config.blocks_for(len(sequence.tokens)))
        if not self.pool.has_room(needed, hits, growing=[len(other.blocks) for other in self.running]):
            return False
        self.pool.acquire(hits)
        sequence.blocks = hits + self.pool.allocate(needed)
        sequence.num_registered = len(hits)
        sequence.num_planned = sequence.num_computed = len(hits) * self.config.block_size
        if sequence.cached_tokens is None:
            sequence.cached_tokens = sequence.num_computed
        self.counts.cache_hit_tokens += sequence.num_computed
        return True

    def _find(self, sequence: Sequence) -> list[int]:
        """Cached blocks of the sequence's front. Never its last token, whose logits are wanted; none where all logits are."""
        if not self.config.prefix_cache or sequence.scores_prompt:
            return []
        return self.pool.lookup(sequence.chain.hashes[: (len(sequence.tokens) - 1) // self.config.block_size])

    def _commit(self, draft: Draft) -> StepPlan:
        plan = draft.plan(self._ended, next(iter(self._in_flight), self.counts.steps) - 1)
        self._ended = []
        self._in_flight[plan.step] = list(zip(draft.rows, draft.sequences, strict=True))
        for row, sequence in self._in_flight[plan.step]:
            self.tenants.charge(sequence.request.tenant, row.count)
        self.counts.steps += 1
        self.counts.tokens_run += self.config.max_batch_tokens - draft.budget
        return plan

    def update(self, result: StepResult, now: float) -> list[TokenEvent]:
        """Apply what came out of the oldest step in flight. Raises `ResultMismatch` where it does not answer that step."""
        if result.step != next(iter(self._in_flight), None):
            raise ResultMismatch(f"result of step {result.step}, steps in flight: {list(self._in_flight)}")
        planned = self._in_flight.pop(result.step)
        sampled = {item.sequence_id: item for item in result.sampled}
        scored = {piece.sequence_id: piece for piece in result.prompt_logprobs}
        events = []
        for row, sequence in planned:
            if sequence.sequence_id != row.sequence_id:  # it ended or was preempted meanwhile
                self.counts.tokens_discarded += row.sample
            else:
                event = self._advance(sequence, row, sampled.get(row.sequence_id), scored.get(row.sequence_id))
                if event is not None:
                    events.append(event)
        return events

    def _advance(
        self, sequence: Sequence, row: Row, sampled: Sampled | None, scored: PromptLogprobs | None
    ) -> TokenEvent | None:
        sequence.num_computed = row.start + row.count
        self._register(sequence)
        if scored is not None and sequence.scores_prompt:
            self._gather(sequence, scored)
        if row.sample != (sampled is not None):
            raise ResultMismatch(f"step samples {row.sample} for sequence {row.sequence_id}, result holds {sampled!r}")
        if sampled is not None and sampled.error is not None:
            return self._end(sequence, "error", sampled.error)
        if sampled is not None:
            return self._speak(sequence, sampled)
        if sequence.request.max_tokens == 0 and sequence.num_computed == sequence.prompt_length:
            return self._end_scored(sequence)
        return None

    def _gather(self, sequence: Sequence, scored: PromptLogprobs) -> None:
        """Put a chunk's prompt logprobs in their places. A sequence recomputed after preemption overwrites its own."""
        end = scored.first + len(scored.entries)
        if not 1 <= scored.first <= end <= sequence.prompt_length:
            raise ResultMismatch(f"prompt logprobs for [{scored.first}, {end}), the prompt has {sequence.prompt_length} tokens")
        sequence.prompt_logprobs[scored.first : end] = scored.entries

    def _register(self, sequence: Sequence) -> None:
        """Name the blocks that are full now, so that others can find them."""
        full = sequence.num_computed // self.config.block_size
        if not self.config.prefix_cache or full == sequence.num_registered:
            return
        sequence.chain.extend(sequence.tokens[: full * self.config.block_size])
        for index in range(sequence.num_registered, full):
            self.pool.register(sequence.blocks[index], sequence.chain.hashes[index])
        sequence.num_registered = full

    def _speak(self, sequence: Sequence, sampled: Sampled) -> TokenEvent:
        if sequence.scores_prompt:
            return self._end_unscored(sequence)
        sequence.tokens.append(sampled.token)
        sequence.num_awaited -= 1
        self.counts.tokens_sampled += 1
        event = TokenEvent(
            request_id=sequence.request.request_id,
            tokens=[sampled.token],
            logprobs=[] if sampled.logprob is None else [sampled.logprob],
            prompt_logprobs=self._first_words(sequence),
            cached_tokens=sequence.cached_tokens or 0,
        )
        finish = sequence.finish_after(sampled.token, self.config.capacity)
        if finish is None:
            return event
        stop_token = sampled.token if finish == "stop" else None
        self._drop(sequence)
        return event.model_copy(update={"finish": finish, "stop_token": stop_token})

    def _end_scored(self, sequence: Sequence) -> TokenEvent:
        return self._end_unscored(sequence) if sequence.scores_prompt else self._end(sequence, "length")

    def _end_unscored(self, sequence: Sequence) -> TokenEvent:
        missing = sequence.prompt_logprobs[1:].count(None)
        return self._end(sequence, "error", f"the ranks left out the logprobs of {missing} prompt tokens")

    def _first_words(self, sequence: Sequence) -> list[TokenLogprob | None] | None:
        """The prompt's logprobs, once."""
        if sequence.has_spoken or not sequence.prompt_logprobs:
            return None
        sequence.has_spoken = True
        return sequence.prompt_logprobs

    def _end(self, sequence: Sequence, finish: FinishReason, error: str | None = None) -> TokenEvent:
        """End a sequence without a token."""
        event = TokenEvent(
            request_id=sequence.request.request_id,
            prompt_logprobs=self._first_words(sequence) if finish == "length" else None,
            cached_tokens=sequence.cached_tokens or 0,
            finish=finish,
            error=error,
        )
        self._drop(sequence)
        return event

    def _drop(self, sequence: Sequence) -> None:
        if sequence.state is State.RUNNING:
            self._leave_ranks(sequence)
        else:
            self.waiting.remove(sequence)
        sequence.forget_ranks()
        sequence.state = State.FINISHED
        del self._live[sequence.request.request_id]
        self.tenants.leave(sequence.request.tenant)
        self.counts.finished += 1

    def _leave_ranks(self, sequence: Sequence) -> None:
        """Take a running sequence out: its blocks back, its name forgotten with the next plan.

        Safe with its rows in flight: ranks run plans in order, so whoever gets the blocks writes them later.
        """
        self.running.remove(sequence)
        self.pool.free(sequence.blocks)
        self._ended.append(sequence.sequence_id)
