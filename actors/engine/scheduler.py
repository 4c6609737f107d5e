"""Which tokens run next. Continuous batching: every step is put together anew from whatever is here.

    add ──→ waiting ──admit──→ running ──finish──→ event
               ↑                  │
               └────preempt───────┘    blocks ran out: the least urgent gives its own back and is recomputed later

`schedule` decides a step and `update` applies its result; nothing here waits, sends or looks at a clock.

A step is filled in this order, in each lane (`lane.py`) within `max_batch_tokens`: one token of every decoding sequence (or,
over several stages, of those whose turn it is: `micro_batches.py`), then chunks of prompts that have begun, then new
admissions. On admission a sequence gets its lane, in which it stays, and all blocks for the tokens it has, so prompts never
compete half way; only a decode can find no block and preempt.

A decode may be planned before its token is known: the ranks keep what they sample. A token computed past a stop is
discarded when it comes back.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence as Several
from dataclasses import dataclass

from actors.engine.config import EngineConfig
from actors.engine.draft import Draft, plan_of
from actors.engine.fairness import TenantCounters
from actors.engine.lane import Lane, choose
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
        self.lanes = [Lane(index, config) for index in range(config.lanes)]
        self.counts = Counts()
        self.tenants = TenantCounters()
        self.waiting = WaitingQueue(config.overdue_after_s, self.tenants)
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

    @property
    def running(self) -> list[Sequence]:
        """The sequences of all lanes, lane after lane, most urgent first in each."""
        return [sequence for lane in self.lanes for sequence in lane.running]

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
        drafts = [self._draft(lane) for lane in self.lanes]
        self._admit(drafts, now)
        return self._commit(drafts) if any(draft.rows for draft in drafts) else None

    def _draft(self, lane: Lane) -> Draft:
        """A lane's part of the step, as far as those go that run there already."""
        draft = Draft(self.counts.steps, self.config.max_batch_tokens, lane.index, self.config.kv_owners)
        lane.plan_decodes(draft)
        for victim in draft.preempted:
            self._ended.append(victim.sequence_id)
            victim.forget_ranks()
            victim.preemptions += 1
            self.waiting.push_back_in(victim)
            self.counts.preemptions += 1
        lane.plan_chunks(draft, -(-self.waiting.num_tokens // len(self.lanes)))
        return draft

    def _admit(self, drafts: Several[Draft], now: float) -> None:
        """Start who comes next, until no lane that may start anyone has room for the head of the queue."""
        while open_lanes := [lane for lane in self.lanes if lane.is_open(drafts[lane.index])]:
            sequence = self.waiting.first(now)
            lane = choose(open_lanes, sequence) if sequence is not None else None
            if sequence is None or lane is None:
                return
            self.waiting.remove(sequence)
            lane.take_in(sequence)
            self.counts.cache_hit_tokens += sequence.num_computed
            drafts[lane.index].start(sequence, self._next_sequence_id)
            self._next_sequence_id += 1
            lane.run_chunk(sequence, drafts[lane.index])

    def _commit(self, drafts: Several[Draft]) -> StepPlan:
        plan = plan_of(drafts, self._ended, next(iter(self._in_flight), self.counts.steps) - 1)
        self._ended = []
        sequences = [sequence for draft in drafts for sequence in draft.sequences]
        self._in_flight[plan.step] = list(zip(plan.rows, sequences, strict=True))
        for row, sequence in self._in_flight[plan.step]:
            self.tenants.charge(sequence.request.tenant, row.count)
        self.counts.steps += 1
        self.counts.tokens_run += sum(row.count for row in plan.rows)
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
        self.lanes[sequence.lane].register(sequence)
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
            self.lanes[sequence.lane].let_go(sequence)
            self._ended.append(sequence.sequence_id)
        else:
            self.waiting.remove(sequence)
        sequence.forget_ranks()
        sequence.state = State.FINISHED
        del self._live[sequence.request.request_id]
        self.tenants.leave(sequence.request.tenant)
        self.counts.finished += 1
