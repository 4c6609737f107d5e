"""The engine's step loop, one thread for one set of ranks: intake → schedule → send → receive → update → deliver.

    submit, cancel, on_ticket_event ────→ inbox ──┐
                                                  ↓ between steps
                            ┌──→ intake → poll → reap → schedule ─→ link ─→ ranks     until `config.depth` plans are in flight
                            └──────── deliver ← update ←─────────── link ←───┘        one result

A loop ends for good, either by `stop` (the engine was closed, or the ranks are lost) or by its own failure. New ranks get a new
loop, since their KV cache is empty.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable

from actors.engine.admission import DuplicateRequest, EngineBusy, EngineDown, check_request
from actors.engine.batching.bubble import BubbleMeter
from actors.engine.batching.dp_rank import dp_ranks_of
from actors.engine.config.engine_config import EngineConfig
from actors.engine.config.stats import EngineStats
from actors.engine.disaggregation.engine_kv_connector import EngineKVConnector
from actors.engine.eplb import ExpertBalancer
from actors.engine.link.link import LinkError, LinkTimeout, RankLink
from actors.engine.scheduler import Scheduler
from actors.engine.sequences.event_delivery import Deliver, EventDelivery
from actors.engine.sequences.sequence import Sequence
from actors.wire.plans import StepPlan
from actors.wire.requests import GenerateRequest, TokenEvent
from actors.wire.results import StepResult

_POLL_S = 0.1
"""Seconds after which a loop that waits for its ranks checks whether it was stopped."""
_LISTEN_S = 0.002
"""Seconds that a loop with KV transfers but no plan in flight waits for its ranks before it checks for new requests."""
_RECENT_STEPS = 256

logger = logging.getLogger(__name__)

Clock = Callable[[], float]


class StepTimeout(LinkError):
    """Raised if a step takes longer than `step_timeout_s`."""


class StepLoop:
    """Runs requests over one link until it is stopped or fails."""

    def __init__(self, config: EngineConfig, link: RankLink, clock: Clock, flush: Callable[[], None]) -> None:
        self.config = config
        self.ended: str | None = None
        """Reason why this loop accepts no more requests; None while it does."""
        self._link = link
        self._clock = clock
        dp_ranks = dp_ranks_of(config)
        self._handoffs = EngineKVConnector(config, dp_ranks)
        self._scheduler = Scheduler(config, dp_ranks, self._handoffs if config.moves_kv else None)
        self._balancer = ExpertBalancer(config.experts) if config.experts is not None else None
        self._event_delivery = EventDelivery(flush)
        self._changed = threading.Condition()
        """Guards the inbox, the cancellations, `ended` and the step times."""
        self._inbox: list[Sequence] = []
        self._inbox_tokens = 0
        self._cancelled: list[str] = []
        self._ticket_events: list[TokenEvent] = []
        """Events of the prefill side for this engine's tickets, not yet handled."""
        self._in_flight: deque[tuple[StepPlan, float]] = deque()
        """Plans without a result, oldest first, each with the time at which it was sent."""
        self._order = itertools.count()
        self._busy_since: float | None = None
        self._starved_since: float | None = None
        """The time since which requests wait, no step runs, and ranks hold blocks that they are fetching."""
        self._last_step_at: float | None = None
        self._step_seconds = 0.0
        self._meter = BubbleMeter(config.stages * config.dp_size if config.stages > 1 else 1)
        self._recent: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._thread = threading.Thread(target=self._run, name="shardwright-engine", daemon=True)

    def start(self) -> None:
        """Start the loop's thread, which runs requests. Raises `RuntimeError` if it was started before."""
        self._thread.start()

    def submit(self, request: GenerateRequest, deliver: Deliver) -> None:
        """See `Engine.submit`. The first events may be delivered before this method returns."""
        check_request(request, self.config)
        sequence = self._sequence(request)
        with self._changed:
            if self.ended is not None:
                raise EngineDown(self.ended)
            if request.request_id in self._event_delivery:
                raise DuplicateRequest(request.request_id)
            self._check_room(sequence.length)
            self._event_delivery.open(request.request_id, deliver)
            self._inbox.append(sequence)
            self._inbox_tokens += sequence.length
            self._changed.notify()

    def _sequence(self, request: GenerateRequest) -> Sequence:
        config, pool = self.config, self.config.disaggregation
        expected = pool.expected_tokens if pool is not None else 0
        return Sequence.of(request, config.block_size, self._clock(), next(self._order), config.rope, config.capacity, expected)

    def _check_room(self, tokens: int) -> None:
        requests, queued = self._waiting()
        if requests >= self.config.max_waiting:
            raise EngineBusy("requests", requests, self.config.max_waiting)
        if requests and queued + tokens > self.config.max_waiting_tokens:
            raise EngineBusy("prompt tokens", queued, self.config.max_waiting_tokens)

    def _waiting(self) -> tuple[int, int]:
        """Return the numbers of requests and of tokens that are accepted but not running."""
        queue = self._scheduler.waiting
        return len(self._inbox) + queue.num_requests, self._inbox_tokens + queue.num_tokens

    def cancel(self, request_id: str) -> None:
        """End a request with ``abort`` before the next step is planned. Returns at once; does nothing if the request has ended
        or is unknown."""
        with self._changed:
            if self.ended is None:
                self._cancelled.append(request_id)
                self._changed.notify()

    def on_ticket_event(self, event: TokenEvent) -> None:
        """See `Engine.on_ticket_event`. Does nothing once the loop has ended."""
        with self._changed:
            if self.ended is None:
                self._ticket_events.append(event)
                self._changed.notify()

    def stop(self, reason: str) -> None:
        """Accept no more requests, and end every live one with a ``lost`` event with the text `reason` before this method
        returns. The thread then ends and closes the link."""
        with self._changed:
            if self.ended is None:
                self.ended = reason
            self._changed.notify()
        self._event_delivery.fail_all(reason)

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread to end, after `stop`. Returns whether it ended within `timeout_s` seconds; true if it was never
        started, and then the link is closed here. On the loop's own thread it does not wait."""
        if self._thread.ident is None:
            self._link.close()  # the thread, which would close it, was never started
        elif self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def healthy(self, now: float) -> str | None:
        """Return None if the loop is healthy, else the reason why it cannot serve requests, as text for people. `now` is in
        seconds on the engine's clock."""
        with self._changed:
            if self.ended is not None:
                return self.ended
            if self._busy_since is not None and now - self._busy_since > self.config.step_timeout_s:
                return f"a step has not ended for {now - self._busy_since:.1f} s (limit {self.config.step_timeout_s:g} s)"
            if self._starved_since is not None and now - self._starved_since > self.config.step_timeout_s:
                return f"requests wait for blocks that tiers have not filled for {now - self._starved_since:.1f} s"
        return None if self._thread.is_alive() else "the engine's thread is not running"

    def stats(self) -> EngineStats:
        """See `Engine.stats`."""
        with self._changed:
            scheduler, counts = self._scheduler, self._scheduler.counts
            waiting, waiting_tokens = self._waiting()
            return EngineStats(
                running=len(scheduler.running),
                waiting=waiting,
                waiting_tokens=waiting_tokens,
                total_blocks=sum(dp_rank.pool.num_blocks for dp_rank in scheduler.dp_ranks),
                free_blocks=sum(dp_rank.pool.num_blank for dp_rank in scheduler.dp_ranks),
                cached_blocks=sum(dp_rank.pool.num_cached for dp_rank in scheduler.dp_ranks),
                steps=counts.steps,
                tokens_run=counts.tokens_run,
                tokens_sampled=counts.tokens_sampled,
                tokens_discarded=counts.tokens_discarded,
                cache_hit_tokens=counts.cache_hit_tokens,
                preemptions=counts.preemptions,
                aborts=counts.aborts,
                finished=counts.finished,
                last_step_at=self._last_step_at,
                busy_since=self._busy_since,
                step_seconds=self._step_seconds,
                pipeline_seconds=self._meter.wall_s,
                stage_busy_seconds=self._meter.busy_s,
                pipeline_bubble=self._meter.bubble(),
                recent_step_s=tuple(self._recent),
                tier_saved_blocks=self._handoffs.offload.counts.saved_blocks,
                tier_asked_tokens=self._handoffs.offload.counts.asked_tokens,
                tier_found_tokens=self._handoffs.offload.counts.found_tokens,
                tier_late=self._handoffs.offload.counts.late,
                tier_hits=dict(self._handoffs.offload.counts.hits),
                experts=None if self._balancer is None else self._balancer.stats(),
                handoffs=None if self.config.disaggregation is None else self._handoffs.stats(),
            )

    def _run(self) -> None:
        try:
            while self._intake():
                self._poll_kv_reports()
                self._reap()
                self._send_plans()
                self._look_for_starvation()
                if self._in_flight:
                    self._take_result()
                elif self._handoffs:
                    self._link.listen(_LISTEN_S)
                else:
                    assert self._scheduler.num_live == 0, f"{self._scheduler.num_live} requests are live and none can run"
        except LinkError as error:
            logger.error("the ranks are lost: %s", error)
            self.stop(f"the ranks are lost: {error}")
        except Exception as error:
            logger.exception("the engine failed")
            self.stop(f"the engine failed: {error!r}")
        finally:
            if self._balancer is not None:
                self._balancer.close()
            self._link.close()

    def _intake(self) -> bool:
        """Take new requests, cancellations and ticket events, after waiting for work. Returns False if the loop ends."""
        with self._changed:
            while not (self._has_work() or self.ended):
                self._busy_since = None
                self._changed.wait()
            self._busy_since = self._clock()
            if self.ended is not None:
                return False
            for sequence in self._inbox:
                self._scheduler.add(sequence)
            self._inbox.clear()
            self._inbox_tokens = 0
            cancelled, self._cancelled = self._cancelled, []
            ticket_events, self._ticket_events = self._ticket_events, []
        self._deliver([event for each in ticket_events for event in self._take_remote(each)])
        self._deliver([event for request_id in cancelled for event in self._end(request_id)])
        return True

    def _take_remote(self, event: TokenEvent) -> list[TokenEvent]:
        return self._scheduler.apply(self._handoffs.on_remote_event(event, self._clock()))

    def _end(self, request_id: str) -> list[TokenEvent]:
        """End a request with ``abort``, and stop sending its KV."""
        return self._scheduler.cancel(request_id) or self._handoffs.stop(TokenEvent(request_id=request_id, finish="abort"))

    def _has_work(self) -> bool:
        came = self._inbox or self._cancelled or self._ticket_events
        return bool(came or self._in_flight or self._scheduler.num_live or self._handoffs)

    def _poll_kv_reports(self) -> None:
        """Handle the KV transfer reports of the ranks."""
        while self._link.kv_reports:
            changes = self._handoffs.on_report(self._link.kv_reports.popleft(), self._clock())
            self._deliver(self._scheduler.apply(changes))

    def _reap(self) -> None:
        """End what is past its deadline: KV transfers first, then requests."""
        changes = self._handoffs.poll(self._scheduler.live.tickets(), self._clock())
        self._deliver(self._scheduler.apply(changes) + self._scheduler.reap(self._clock()))

    def _send_plans(self) -> None:
        while len(self._in_flight) < self.config.depth:
            plan = self._scheduler.schedule(self._clock())
            if plan is None:
                return
            if self._balancer is not None:
                plan = self._balancer.into(plan)
            self._in_flight.append((plan, self._clock()))
            self._meter.sent(self._in_flight[-1][1])
            self._link.send(plan)

    def _look_for_starvation(self) -> None:
        is_starved = not self._in_flight and self._handoffs.offload.is_stuck and self._scheduler.waiting.num_requests > 0
        self._starved_since = (self._starved_since or self._clock()) if is_starved else None

    def _take_result(self) -> None:
        result = self._receive()
        if result is None:
            return
        _, sent_at = self._in_flight.popleft()
        while self._link.reports and self._balancer is not None:
            self._balancer.on_report(self._link.reports.popleft())
        self._handoffs.on_result(self._clock())
        events = self._scheduler.update(result)
        with self._changed:
            self._last_step_at = self._clock()
            self._step_seconds += self._last_step_at - sent_at
            self._recent.append(self._last_step_at - sent_at)
            self._meter.came_back(self._last_step_at, self._link.busy_s, len(self._in_flight))
        self._deliver(events)

    def _receive(self) -> StepResult | None:
        """Return the result of the oldest plan in flight, or None if the loop was stopped meanwhile.

        A plan's timeout starts when it is sent, or when the previous result arrives if that is later, since the plan had to
        wait until then. Raises `StepTimeout` after `step_timeout_s`.
        """
        plan, sent_at = self._in_flight[0]
        began = max(sent_at, self._last_step_at or sent_at)
        while self.ended is None:
            remaining_s = began + self.config.step_timeout_s - self._clock()
            if remaining_s <= 0:
                raise StepTimeout(f"step {plan.step} ({len(plan.rows)} rows) took over {self.config.step_timeout_s:g} s")
            try:
                return self._link.receive(min(_POLL_S, remaining_s))
            except LinkTimeout:
                continue
        return None

    def _deliver(self, events: list[TokenEvent]) -> None:
        if events:
            for request_id in self._event_delivery.deliver(events):
                self._end(request_id)
