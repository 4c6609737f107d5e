"""The scheduler: continuous batching with chunked prefill, preemption and prefix caching. Every step is composed anew.

    add ──→ waiting ──admit──→ running ──finish──→ event
               ↑                  │
               └────preempt───────┘    out of blocks: the least urgent sequence frees its blocks and is recomputed later

`schedule` decides a step and `update` applies its result. Neither waits, sends messages or reads a clock.

A step is filled on each DP rank (`dp_rank.py`), within `max_batch_tokens`, in this order: one token of every decoding sequence
(with several pipeline stages, only of the micro-batch whose turn it is: `micro_batches.py`), then chunks of prompts that have
begun, then new admissions. On admission a sequence is assigned a DP rank, on which it stays, and all blocks for the tokens that
it has. A prompt that has begun therefore never lacks blocks; only a decode can run out of blocks and preempt.

A decode may be planned before its input token is known to the engine, since the ranks keep the tokens that they sample. A token
computed past a stop token is discarded when its result arrives.

Blocks may also be filled from a KV tier or by a prefill pool, and a prompt's blocks may be sent to a decode pool. The scheduler
asks its KV connector for that (`kv_connector.py`). An admitted sequence whose blocks are still being filled is `RESERVED`.
"""

from __future__ import annotations

from collections.abc import Sequence as Several

from actors.engine.batching.dp_rank import DPRank, choose, dp_ranks_of
from actors.engine.batching.draft import Draft, plan_of
from actors.engine.config.engine_config import EngineConfig
from actors.engine.config.stats import Counts
from actors.engine.disaggregation.kv_connector import NoKVConnector, SchedulerKVConnector, TransferChanges
from actors.engine.sequences import token_events
from actors.engine.sequences.fairness import TenantCounters
from actors.engine.sequences.live_requests import LiveRequests
from actors.engine.sequences.sequence import Sequence, State
from actors.engine.sequences.token_events import ResultMismatch
from actors.engine.sequences.waiting import WaitingQueue
from actors.wire.plans import Row, StepPlan
from actors.wire.requests import TokenEvent, TokenLogprob
from actors.wire.results import PromptLogprobs, Sampled, StepResult


class Scheduler:
    """The scheduler of one engine, which owns all its sequences and KV blocks. Not thread-safe: one thread calls it."""

    def __init__(
        self, config: EngineConfig, dp_ranks: list[DPRank] | None = None, connector: SchedulerKVConnector | None = None
    ) -> None:
        """Create a scheduler. `connector` transfers KV blocks of the same `dp_ranks`; None disables KV transfer and offload."""
        self.config = config
        self.dp_ranks = dp_ranks_of(config) if dp_ranks is None else dp_ranks
        self.counts = Counts()
        self.tenants = TenantCounters()
        self.waiting = WaitingQueue(config.overdue_after_s, self.tenants)
        self.live = LiveRequests(self.tenants)
        self._connector = NoKVConnector() if connector is None else connector
        self._in_flight: dict[int, list[tuple[Row, Sequence]]] = {}
        self._ended: list[int] = []
        self._next_sequence_id = 0

    @property
    def num_live(self) -> int:
        """Number of requests that have not ended: waiting, reserved and running ones."""
        return len(self.live)

    @property
    def running(self) -> list[Sequence]:
        """The running sequences of all DP ranks, in DP rank order, most urgent first within each."""
        return [sequence for dp_rank in self.dp_ranks for sequence in dp_rank.running]

    def add(self, sequence: Sequence) -> None:
        """Add a new sequence to the waiting queue. Its request must have passed `check_request`, and its id must differ from
        those of live requests."""
        self.live.join(sequence)
        self.waiting.push(sequence)

    def cancel(self, request_id: str) -> list[TokenEvent]:
        """End a request with ``abort``, free its blocks, and return its last events; none if the request is unknown or has
        ended.

        Results still in flight for it are ignored when they arrive.
        """
        sequence = self.live.get(request_id)
        if sequence is None:
            return []
        self.counts.aborts += 1
        return self._finish(sequence, token_events.end_event(sequence, "abort"))

    def reap(self, now: float) -> list[TokenEvent]:
        """End the requests that are past their deadline at `now` (seconds on the engine's clock) or have nothing to compute.
        Returns their last events."""
        due = self.live.due(now)
        return [event for sequence, why in due for event in self._finish(sequence, token_events.end_event(sequence, why))]

    def apply(self, changes: TransferChanges) -> list[TokenEvent]:
        """Apply the outcome of KV transfers: failed sequences are queued again, dropped ones end, and first tokens are
        appended. Returns the events to deliver."""
        for sequence in changes.dropped:
            self._drop(sequence)
        for sequence in changes.failed:
            self._requeue(sequence)
        events = list(changes.events)
        for sequence, event in changes.first_tokens:
            token_events.adopt(sequence, event)
            events += self._append(sequence, event.tokens[0], event.logprobs)
        return events

    def schedule(self, now: float) -> StepPlan | None:
        """Return the plan of the next step, which then counts as in flight, or None if there is nothing to run or all of it is
        in flight.

        Admits and preempts sequences. `now` is in seconds on the engine's clock; it decides which requests are overdue.
        """
        drafts = [self._draft(dp_rank, now) for dp_rank in self.dp_ranks]
        self._admit(drafts, now)
        transfers = self._connector.plan_fields()
        is_due = transfers or any(draft.rows or draft.started for draft in drafts)
        return self._commit(drafts, transfers) if is_due else None

    def _draft(self, dp_rank: DPRank, now: float) -> Draft:
        """Return a DP rank's part of the step, with the sequences that already run there or whose blocks were filled."""
        draft = Draft(self.counts.steps, self.config.max_batch_tokens, dp_rank.index, self.config.kv_owners)
        dp_rank.plan_decodes(draft)
        for victim in draft.preempted:
            self._ended.append(victim.sequence_id)
            self._requeue(victim)
            self.counts.preemptions += 1
        # Sequences start only after the decodes that may preempt: ranks apply `ended` before `started`.
        for sequence in self._connector.loaded(dp_rank.index, now):
            self._begin(sequence, draft, now)
            if sequence.todo == 1:
                draft.run(sequence, 1)
        dp_rank.plan_chunks(draft, -(-self.waiting.num_tokens // len(self.dp_ranks)))
        return draft

    def _admit(self, drafts: Several[Draft], now: float) -> None:
        """Admit sequences from the head of the queue until no DP rank that may admit has room for the next one."""
        while open_dp_ranks := [dp_rank for dp_rank in self.dp_ranks if dp_rank.is_open(drafts[dp_rank.index])]:
            sequence = self.waiting.first(now)
            dp_rank = choose(open_dp_ranks, sequence) if sequence is not None else None
            if sequence is None or dp_rank is None:
                return
            self.waiting.remove(sequence)
            dp_rank.take_in(sequence)
            self.counts.cache_hit_tokens += sequence.num_computed
            if self._connector.load(sequence, now):
                sequence.state = State.RESERVED
            else:
                self._begin(sequence, drafts[dp_rank.index], now)
                dp_rank.run_chunk(sequence, drafts[dp_rank.index])

    def _begin(self, sequence: Sequence, draft: Draft, now: float) -> None:
        """Start a sequence that has all its blocks. It runs from its first token that is not computed."""
        self.dp_ranks[sequence.dp_rank].run(sequence)
        draft.start(sequence, self._next_sequence_id)
        self._next_sequence_id += 1
        self._connector.started(sequence, now)

    def _requeue(self, sequence: Sequence) -> None:
        """Return a sequence that has lost its blocks to the waiting queue, to be recomputed from its tokens."""
        sequence.forget_ranks()
        sequence.state = State.WAITING
        sequence.preemptions += 1
        self.waiting.push_back_in(sequence)

    def _commit(self, drafts: Several[Draft], transfers: dict[str, object]) -> StepPlan:
        plan = plan_of(drafts, self._ended, next(iter(self._in_flight), self.counts.steps) - 1)
        plan = plan.model_copy(update=transfers)
        self._ended = []
        sequences = [sequence for draft in drafts for sequence in draft.sequences]
        self._in_flight[plan.step] = list(zip(plan.rows, sequences, strict=True))
        for row, sequence in self._in_flight[plan.step]:
            self.tenants.charge(sequence.request.tenant, row.count)
        self.counts.steps += 1
        self.counts.tokens_run += sum(row.count for row in plan.rows)
        return plan

    def update(self, result: StepResult) -> list[TokenEvent]:
        """Apply the result of the oldest step in flight, and return its token events.

        Raises `ResultMismatch` if the result is of another step, lacks a token that the plan samples, has one that it does not
        sample, or has prompt logprobs outside the prompt.
        """
        if result.step != next(iter(self._in_flight), None):
            raise ResultMismatch(f"result of step {result.step}, steps in flight: {list(self._in_flight)}")
        sampled = {item.sequence_id: item for item in result.sampled}
        scored = {part.sequence_id: part for part in result.prompt_logprobs}
        events = []
        for row, sequence in self._in_flight.pop(result.step):
            if sequence.sequence_id != row.sequence_id:  # the sequence ended or was preempted meanwhile
                self.counts.tokens_discarded += row.sample
            else:
                events += self._advance(sequence, row, sampled.get(row.sequence_id), scored.get(row.sequence_id))
        return events

    def _advance(
        self, sequence: Sequence, row: Row, sampled: Sampled | None, scored: PromptLogprobs | None
    ) -> list[TokenEvent]:
        sequence.num_computed = row.start + row.count
        self._connector.save(sequence, self.dp_ranks[sequence.dp_rank].register(sequence))
        if scored is not None and sequence.scores_prompt:
            token_events.add_prompt_logprobs(sequence, scored)
        if row.sample != (sampled is not None):
            raise ResultMismatch(f"step samples {row.sample} for sequence {row.sequence_id}, result holds {sampled!r}")
        if sampled is not None and sampled.error is not None:
            return self._finish(sequence, token_events.end_event(sequence, "error", sampled.error))
        is_scored_only = sequence.request.max_tokens == 0 and sequence.num_computed == sequence.prompt_length
        if sampled is None and not is_scored_only:
            return []
        if sequence.scores_prompt:
            return self._finish(sequence, token_events.end_event(sequence, "error", token_events.unscored_error(sequence)))
        if sampled is None:
            return self._finish(sequence, token_events.end_event(sequence, "length"))
        sequence.num_awaited -= 1
        self.counts.tokens_sampled += 1
        return self._append(sequence, sampled.token, [] if sampled.logprob is None else [sampled.logprob])

    def _append(self, sequence: Sequence, token: int, logprobs: list[TokenLogprob]) -> list[TokenEvent]:
        """Append a sampled token to its sequence, and end the sequence if the token completes it. Returns the events."""
        sequence.tokens.append(token)
        event = token_events.token_event(sequence, token, logprobs)
        finish = sequence.finish_after(token, self.config.capacity)
        if finish is None:
            return [event]
        stop_token = token if finish == "stop" else None
        return self._finish(sequence, event.model_copy(update={"finish": finish, "stop_token": stop_token}))

    def _finish(self, sequence: Sequence, last: TokenEvent) -> list[TokenEvent]:
        """End a sequence with the event `last`, which the connector holds back while the sequence's blocks are being sent."""
        events = self._connector.finish(sequence, last)
        self._drop(sequence)
        return events

    def _drop(self, sequence: Sequence) -> None:
        if sequence.state is State.RUNNING:
            self.dp_ranks[sequence.dp_rank].let_go(sequence)
            self._ended.append(sequence.sequence_id)
        elif sequence.state is State.WAITING:
            self.waiting.remove(sequence)
        sequence.forget_ranks()
        sequence.state = State.FINISHED
        self.live.leave(sequence)
        self.counts.finished += 1
