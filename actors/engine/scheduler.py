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

Blocks may also be filled by a KV tier or a prefill pool, and a prompt's blocks may leave for a decode pool. The scheduler asks
its connector for that (`connector.py`), and treats an admitted sequence whose blocks are still being filled as `RESERVED`.
"""

from __future__ import annotations

from collections.abc import Sequence as Several

from actors.engine.batching.dp_rank import DPRank, choose, dp_ranks_of
from actors.engine.batching.draft import Draft, plan_of
from actors.engine.config.engine_config import EngineConfig
from actors.engine.config.stats import Counts
from actors.engine.disaggregation.connector import NoKVConnector, SchedulerKVConnector, TransferChanges
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
    """Owns every sequence and block of one engine. Not thread-safe: one thread calls it."""

    def __init__(
        self, config: EngineConfig, dp_ranks: list[DPRank] | None = None, connector: SchedulerKVConnector | None = None
    ) -> None:
        """`connector`: where blocks come from and go to besides this engine, over the same `dp_ranks`; None: nowhere."""
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
        """Requests that have not ended."""
        return len(self.live)

    @property
    def running(self) -> list[Sequence]:
        """The sequences of all DP ranks, in DP rank order, most urgent first in each."""
        return [sequence for dp_rank in self.dp_ranks for sequence in dp_rank.running]

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that `check_request` has passed."""
        self.live.join(sequence)
        self.waiting.push(sequence)

    def cancel(self, request_id: str) -> list[TokenEvent]:
        """End a request early. Nothing for one that is unknown or has ended. What is in flight for it is ignored on arrival."""
        sequence = self.live.get(request_id)
        if sequence is None:
            return []
        self.counts.aborts += 1
        return self._finish(sequence, token_events.end_event(sequence, "abort"))

    def reap(self, now: float) -> list[TokenEvent]:
        """End the requests that are past their deadline, and those with nothing to sample or score."""
        due = self.live.due(now)
        return [event for sequence, why in due for event in self._finish(sequence, token_events.end_event(sequence, why))]

    def apply(self, changes: TransferChanges) -> list[TokenEvent]:
        """Apply what came of KV transfers."""
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
        """The next step, or None where there is nothing to run (or all of it is in flight)."""
        drafts = [self._draft(dp_rank, now) for dp_rank in self.dp_ranks]
        self._admit(drafts, now)
        transfers = self._connector.plan_fields()
        is_due = transfers or any(draft.rows or draft.started for draft in drafts)
        return self._commit(drafts, transfers) if is_due else None

    def _draft(self, dp_rank: DPRank, now: float) -> Draft:
        """A DP rank's part of the step, as far as those go that run there already."""
        draft = Draft(self.counts.steps, self.config.max_batch_tokens, dp_rank.index, self.config.kv_owners)
        dp_rank.plan_decodes(draft)
        for victim in draft.preempted:
            self._ended.append(victim.sequence_id)
            self._requeue(victim)
            self.counts.preemptions += 1
        # Those that start do so after what may preempt: ranks forget who ended before they hear of who started.
        for sequence in self._connector.loaded(dp_rank.index, now):
            self._begin(sequence, draft, now)
            if sequence.todo == 1:
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
            if self._connector.load(sequence, now):
                sequence.state = State.RESERVED
            else:
                self._begin(sequence, drafts[dp_rank.index], now)
                dp_rank.run_chunk(sequence, drafts[dp_rank.index])

    def _begin(self, sequence: Sequence, draft: Draft, now: float) -> None:
        """Run a sequence that has all its blocks, from its first token that is not computed."""
        self.dp_ranks[sequence.dp_rank].run(sequence)
        draft.start(sequence, self._next_sequence_id)
        self._next_sequence_id += 1
        self._connector.started(sequence, now)

    def _requeue(self, sequence: Sequence) -> None:
        """Put a sequence that has lost its blocks back into the queue: it starts again from its tokens."""
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
        """Apply what came out of the oldest step in flight. Raises `ResultMismatch` where it does not answer that step."""
        if result.step != next(iter(self._in_flight), None):
            raise ResultMismatch(f"result of step {result.step}, steps in flight: {list(self._in_flight)}")
        sampled = {item.sequence_id: item for item in result.sampled}
        scored = {part.sequence_id: part for part in result.prompt_logprobs}
        events = []
        for row, sequence in self._in_flight.pop(result.step):
            if sequence.sequence_id != row.sequence_id:  # it ended or was preempted meanwhile
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
        """Add a sampled token to its sequence, which may end with it."""
        sequence.tokens.append(token)
        event = token_events.token_event(sequence, token, logprobs)
        finish = sequence.finish_after(token, self.config.capacity)
        if finish is None:
            return [event]
        stop_token = token if finish == "stop" else None
        return self._finish(sequence, event.model_copy(update={"finish": finish, "stop_token": stop_token}))

    def _finish(self, sequence: Sequence, last: TokenEvent) -> list[TokenEvent]:
        """End a sequence, with `last`, which the connector holds back while its blocks are still being sent."""
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
