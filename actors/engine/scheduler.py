"""Which tokens run next. Continuous batching: every step is put together anew from whatever is here.

    add ──→ waiting ──admit──→ running ──finish──→ event
               ↑                  │
               └────preempt───────┘    blocks ran out: the least urgent gives its own back and is recomputed later

`schedule` decides a step and `update` applies its result; nothing here waits, sends or looks at a clock.

A step is filled in this order, on each DP rank (`dp_rank.py`) within `max_batch_tokens`: one token of every decoding sequence
(or, over several stages, of those whose turn it is: `micro_batches.py`), then chunks of prompts that have begun, then new
admissions. On admission a sequence gets its DP rank, where it stays, and all blocks for the tokens it has, so prompts never
compete half way; only a decode can find no block and preempt.

A decode may be planned before its token is known: the ranks keep what they sample. A token computed past a stop is
discarded when it comes back.

In a pool the queue is the same: on the decode side a request gets blocks on admission and waits for them to be filled
(`decode_transfers.py`); on the prefill side it leaves with its first token, and its blocks when they are sent
(`prefill_transfers.py`).
"""

from __future__ import annotations

from collections.abc import Sequence as Several

from actors.engine.batching.dp_rank import DPRank, choose
from actors.engine.batching.draft import Draft, plan_of
from actors.engine.config.engine_config import EngineConfig
from actors.engine.config.stats import Counts
from actors.engine.disaggregation.decode_transfers import DecodeTransfer
from actors.engine.disaggregation.handoffs import Handoffs
from actors.engine.sequences import token_events
from actors.engine.sequences.fairness import TenantCounters
from actors.engine.sequences.live_requests import LiveRequests
from actors.engine.sequences.sequence import Sequence, State
from actors.engine.sequences.token_events import ResultMismatch
from actors.engine.sequences.waiting import WaitingQueue
from actors.wire.kv import KVReport
from actors.wire.plans import Row, StepPlan
from actors.wire.requests import FinishReason, TokenEvent, TokenLogprob
from actors.wire.results import PromptLogprobs, Sampled, StepResult

_WRITES_NO_MORE = ("handoff", "abort", "deadline")
"""Last events of a prefill engine that come when its ranks have stopped writing; of an ``error`` nobody knows."""


class Scheduler:
    """Owns every sequence and block of one engine. Not thread-safe: one thread calls it."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.dp_ranks = [DPRank(index, config) for index in range(config.dp_size)]
        self.counts = Counts()
        self.tenants = TenantCounters()
        self.waiting = WaitingQueue(config.overdue_after_s, self.tenants)
        self.handoffs = Handoffs(config, self.dp_ranks)
        self.decode_transfers, self.prefill_transfers = self.handoffs.decode_transfers, self.handoffs.prefill_transfers
        self.offload = self.handoffs.offload
        self._live_requests = LiveRequests(self.tenants)
        self._in_flight: dict[int, list[tuple[Row, Sequence]]] = {}
        self._need_no_step: list[Sequence] = []
        self._ended: list[int] = []
        self._next_sequence_id = 0

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return len(self._live_requests)

    @property
    def running(self) -> list[Sequence]:
        """The sequences of all DP ranks, in DP rank order, most urgent first in each."""
        return [sequence for dp_rank in self.dp_ranks for sequence in dp_rank.running]

    def add(self, sequence: Sequence) -> None:
        """Take a sequence that `check_request` has passed."""
        if self.config.disaggregation is not None and sequence.request.reserves:
            sequence.reserves = True
            sequence.spare_tokens = min(sequence.request.max_tokens, self.config.disaggregation.expected_tokens)
        self._live_requests.join(sequence)
        self.waiting.push(sequence)
        if sequence.is_empty_work:
            self._need_no_step.append(sequence)

    def cancel(self, request_id: str) -> TokenEvent | None:
        """End a request early. None for one that is unknown or has ended. What is in flight for it is ignored on arrival."""
        sequence = self._live_requests.get(request_id)
        if sequence is None:
            return self.prefill_transfers.stop(request_id, TokenEvent(request_id=request_id, finish="abort"))
        self.counts.aborts += 1
        return self._end(sequence, "abort")

    def reap(self, now: float) -> list[TokenEvent]:
        """End what needs no step: requests past their deadline, and those with nothing to sample or score. Between two steps,
        or while none is in flight: so prompts on their way out get their heartbeats only while steps end."""
        for transfer in self.decode_transfers.expired(now):
            self._compute_here(transfer)
        for sequence in self.offload.expired(now):
            self._start_over(sequence)
        events = [self._end(s, "length") for s in self._need_no_step if s.state is not State.FINISHED]
        self._need_no_step.clear()
        events += [self._end(sequence, "deadline") for sequence in self._live_requests.late(now)]
        if self.config.disaggregation is not None:
            events += self.prefill_transfers.heartbeats(self._live_requests.tickets(), now)
        return [event for event in events if event is not None]

    def on_kv_report(self, report: KVReport, now: float) -> list[TokenEvent]:
        """Apply what a rank tells of hand-offs and fetches."""
        self.offload.on_report(report)
        last, failed = self.prefill_transfers.on_report(report, now)
        for sequence in failed:
            self._drop(sequence)
        return self.decode_transfers.on_report(report, now) + last

    def on_ticket_event(self, event: TokenEvent, now: float) -> list[TokenEvent]:
        """Apply what the prefill side says of a ticket (or whoever was to ask it): that it has it, its first token, its end.

        Where it failed, this engine computes the prompt itself. What is said of a ticket that is done changes nothing.
        """
        transfer, events = self.decode_transfers.get(event.request_id), list[TokenEvent]()
        if transfer is None:
            return events
        self.decode_transfers.on_heartbeat(transfer, event.finish == "handoff", now)
        if event.tokens and transfer.is_live and not transfer.is_committed:
            transfer.is_committed = True
            events += self._first_token(transfer.sequence, event)
        if event.finish not in (None, "handoff") and transfer.is_live:
            self._compute_here(transfer)
        if event.finish in _WRITES_NO_MORE or event.refused is not None:
            self.decode_transfers.close(transfer)
        return events

    def _first_token(self, sequence: Sequence, event: TokenEvent) -> list[TokenEvent]:
        if sequence.prompt_logprobs and event.prompt_logprobs is not None:
            sequence.prompt_logprobs = event.prompt_logprobs
        sequence.cached_tokens = max(sequence.cached_tokens or 0, event.cached_tokens)
        return self._add_token(sequence, event.tokens[0], event.logprobs)

    def _compute_here(self, transfer: DecodeTransfer) -> None:
        """Nobody will fill these blocks: their sequence starts from its tokens, like one that was preempted."""
        self.decode_transfers.abandon(transfer)
        self.decode_transfers.counts.fallen_back += 1
        self._start_over(transfer.sequence)

    def _start_over(self, sequence: Sequence) -> None:
        """Back into the queue, without the blocks that it was reserved."""
        sequence.forget_ranks()
        sequence.state = State.WAITING
        sequence.preemptions += 1
        self.waiting.push_back_in(sequence)

    def schedule(self, now: float) -> StepPlan | None:
        """The next step, or None where there is nothing to run (or all of it is in flight)."""
        drafts = [self._draft(dp_rank, now) for dp_rank in self.dp_ranks]
        self._admit(drafts, now)
        is_due = self.handoffs.has_updates or any(draft.rows or draft.started for draft in drafts)
        return self._commit(drafts) if is_due else None

    def _draft(self, dp_rank: DPRank, now: float) -> Draft:
        """A DP rank's part of the step, as far as those go that run there already."""
        draft = Draft(self.counts.steps, self.config.max_batch_tokens, dp_rank.index, self.config.kv_owners)
        dp_rank.plan_decodes(draft)
        for victim in draft.preempted:
            self._ended.append(victim.sequence_id)
            victim.forget_ranks()
            victim.preemptions += 1
            self.waiting.push_back_in(victim)
            self.counts.preemptions += 1
        # Those that start do so after what may preempt: ranks forget who ended before they hear of who started.
        for sequence in self.offload.ready(dp_rank.index):
            self._register(sequence)
            if not self._start_handoff(sequence, now):
                self._begin(sequence, draft, now)
        for sequence in self.decode_transfers.ready(dp_rank.index):
            sequence.num_planned = sequence.num_computed = sequence.prompt_length
            dp_rank.run(sequence)
            self._register(sequence)
            self._start(sequence, draft)
            draft.run(sequence, 1)
        dp_rank.plan_chunks(draft, -(-self.waiting.num_tokens // len(self.dp_ranks)))
        return draft

    def _admit(self, drafts: Several[Draft], now: float) -> None:
        """Start who comes next, until no DP rank that may start anyone has room for the head of the queue."""
        while open_dp_ranks := [dp_rank for dp_rank in self.dp_ranks if dp_rank.is_open(drafts[dp_rank.index])]:
            sequence = self.waiting.first(now)
            dp_rank = choose(open_dp_ranks, sequence) if sequence is not None else None
            if sequence is None or dp_rank is None:
                return
            self.waiting.remove(sequence)
            dp_rank.take_in(sequence)
            self.counts.cache_hit_tokens += sequence.num_computed
            num_matched = self.offload.num_matched_blocks(sequence)
            if num_matched:
                sequence.state = State.RESERVED
                self.offload.fetch(sequence, num_matched, now)
            elif not self._start_handoff(sequence, now):
                self._begin(sequence, drafts[dp_rank.index], now)
                dp_rank.run_chunk(sequence, drafts[dp_rank.index])

    def _start_handoff(self, sequence: Sequence, now: float) -> bool:
        """Whether a prefill side computes what is left of a prompt. Asked once: preempted, it computes itself."""
        is_worth, sequence.reserves = self.decode_transfers.is_worth(sequence), False
        if is_worth:
            sequence.state = State.RESERVED
            self.decode_transfers.reserve(sequence, now)
        return is_worth

    def _begin(self, sequence: Sequence, draft: Draft, now: float) -> None:
        """Run a sequence whose front is in its blocks, from there on."""
        self.dp_ranks[sequence.dp_rank].run(sequence)
        self._start(sequence, draft)
        if sequence.request.ticket is not None:
            self.prefill_transfers.begin(sequence, sequence.request.ticket, now)

    def _register(self, sequence: Sequence) -> None:
        """Its full blocks can be found from now on, and outlive the device."""
        self.offload.save(sequence, self.dp_ranks[sequence.dp_rank].register(sequence))

    def _start(self, sequence: Sequence, draft: Draft) -> None:
        draft.start(sequence, self._next_sequence_id)
        self._next_sequence_id += 1

    def _commit(self, drafts: Several[Draft]) -> StepPlan:
        plan = plan_of(drafts, self._ended, next(iter(self._in_flight), self.counts.steps) - 1)
        self._ended = []
        if self.handoffs or self.handoffs.has_updates:
            plan = plan.model_copy(update=self.handoffs.drain_updates())
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
        self.prefill_transfers.ran(now)
        sampled = {item.sequence_id: item for item in result.sampled}
        scored = {part.sequence_id: part for part in result.prompt_logprobs}
        events = []
        for row, sequence in planned:
            if sequence.sequence_id != row.sequence_id:  # it ended or was preempted meanwhile
                self.counts.tokens_discarded += row.sample
            else:
                events += self._advance(sequence, row, sampled.get(row.sequence_id), scored.get(row.sequence_id))
        return events

    def _advance(
        self, sequence: Sequence, row: Row, sampled: Sampled | None, scored: PromptLogprobs | None
    ) -> list[TokenEvent]:
        sequence.num_computed = row.start + row.count
        self._register(sequence)
        if scored is not None and sequence.scores_prompt:
            token_events.add_prompt_logprobs(sequence, scored)
        if row.sample != (sampled is not None):
            raise ResultMismatch(f"step samples {row.sample} for sequence {row.sequence_id}, result holds {sampled!r}")
        if sampled is not None and sampled.error is not None:
            return _some(self._end(sequence, "error", sampled.error))
        if sampled is not None:
            return self._add_sampled(sequence, sampled)
        if sequence.request.max_tokens == 0 and sequence.num_computed == sequence.prompt_length:
            return _some(self._end_unscored(sequence) if sequence.scores_prompt else self._end(sequence, "length"))
        return []

    def _add_sampled(self, sequence: Sequence, sampled: Sampled) -> list[TokenEvent]:
        if sequence.scores_prompt:
            return _some(self._end_unscored(sequence))
        sequence.num_awaited -= 1
        self.counts.tokens_sampled += 1
        return self._add_token(sequence, sampled.token, [] if sampled.logprob is None else [sampled.logprob])

    def _add_token(self, sequence: Sequence, token: int, logprobs: list[TokenLogprob]) -> list[TokenEvent]:
        """The next token, which may be the last, or the last that is sampled here."""
        sequence.tokens.append(token)
        event = token_events.token_event(sequence, token, logprobs)
        if sequence.request.ticket is not None:
            self._drop(sequence)
            return [event, *_some(self.prefill_transfers.computed(sequence.request.request_id))]
        finish = sequence.finish_after(token, self.config.capacity)
        if finish is None:
            return [event]
        self._drop(sequence)
        return [event.model_copy(update={"finish": finish, "stop_token": token if finish == "stop" else None})]

    def _end_unscored(self, sequence: Sequence) -> TokenEvent | None:
        return self._end(sequence, "error", token_events.unscored_error(sequence))

    def _end(self, sequence: Sequence, finish: FinishReason, error: str | None = None) -> TokenEvent | None:
        """End a sequence without a token. None where ranks may still write for its ticket: the event comes later."""
        event = token_events.end_event(sequence, finish, error)
        is_sent = sequence.state is State.RUNNING and sequence.request.ticket is not None
        self._drop(sequence)
        if is_sent:
            last = event if finish in _WRITES_NO_MORE else event.model_copy(update={"finish": "abort"})
            return self.prefill_transfers.stop(event.request_id, last)
        return event

    def _drop(self, sequence: Sequence) -> None:
        if sequence.state is State.RUNNING:
            self.dp_ranks[sequence.dp_rank].let_go(sequence)
            self._ended.append(sequence.sequence_id)
        elif sequence.state is State.RESERVED and not self.offload.abandon(sequence):
            self.decode_transfers.abandon(self.decode_transfers.of(sequence))
        elif sequence.state is State.WAITING:
            self.waiting.remove(sequence)
        sequence.forget_ranks()
        sequence.state = State.FINISHED
        self._live_requests.leave(sequence)
        self.counts.finished += 1


def _some(event: TokenEvent | None) -> list[TokenEvent]:
    return [] if event is None else [event]
