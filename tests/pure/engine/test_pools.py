"""Prefill/decode disaggregation as the scheduler sees it: who holds which blocks in every state, and which event comes when."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from actors.engine.admission import InvalidRequest, check_request
from actors.engine.batching.dp_rank import dp_ranks_of
from actors.engine.config.engine_config import DisaggregationConfig, EngineConfig, OffloadConfig
from actors.engine.disaggregation.decode_transfers import DecodeTransferState
from actors.engine.disaggregation.engine_kv_connector import EngineKVConnector
from actors.engine.scheduler import Scheduler
from actors.engine.sequences.sequence import Sequence
from actors.kv_offload.block_part import KVFormat
from actors.wire.kv import KVReader, KVReport, KVSent, KVTicket
from actors.wire.plans import StepPlan
from actors.wire.requests import GenerateRequest, TokenEvent, TokenLogprob
from actors.wire.results import Sampled, StepResult
from actors.wire.tier_config import TierConfig
from placement.layout.layout import Layout
from tests.support.kv.handoff_cases import heads_model

LEASE_S, GRACE_S = 10.0, 2.0


def config(layout: str = "tp=2", **changes: Any) -> EngineConfig:
    disaggregation = DisaggregationConfig(
        layout=Layout.parse(layout), least_tokens=4, expected_tokens=6, lease_s=LEASE_S, grace_s=GRACE_S
    )
    sizes = {"num_blocks": 8, "block_size": 4, "max_model_len": 32, "max_batch_tokens": 8, "max_sequences": 4}
    return EngineConfig(**{**sizes, "disaggregation": disaggregation, **changes})


def request(prompt_length: int = 10, **changes: Any) -> GenerateRequest:
    return GenerateRequest(**{"request_id": "a", "prompt": list(range(prompt_length)), "max_tokens": 4, **changes})


class Side:
    """A scheduler with a clock, and what it has said."""

    def __init__(self, settings: EngineConfig | None = None) -> None:
        self.config = settings or config()
        dp_size = dp_ranks_of(self.config)
        self.handoffs = EngineKVConnector(self.config, dp_size)
        self.scheduler = Scheduler(self.config, dp_size, self.handoffs)
        self.events: list[TokenEvent] = []
        self.heartbeats: list[str] = []
        """Tickets of which it said that it has them, since somebody cleared this."""
        self.now = 0.0
        self._order = itertools.count()

    def add(self, item: GenerateRequest) -> None:
        check_request(item, self.config)
        expected = self.config.disaggregation.expected_tokens if self.config.disaggregation is not None else 0
        size, order = self.config.block_size, next(self._order)
        self.scheduler.add(Sequence.of(item, size, self.now, order, expected_tokens=expected))

    def plan(self) -> StepPlan | None:
        reaped = self.reap()
        self.heartbeats += [event.request_id for event in reaped if event.is_empty]
        self.events += [event for event in reaped if not event.is_empty]
        plan = self.scheduler.schedule(self.now)
        return None if plan is None else StepPlan.unpack(plan.pack())

    def reap(self) -> list[TokenEvent]:
        changes = self.handoffs.poll(self.scheduler.live.tickets(), self.now)
        return self.scheduler.apply(changes) + self.scheduler.reap(self.now)

    def step(self, token: int = 7) -> StepPlan:
        """Plan a step, and have the ranks run it."""
        plan = self.plan()
        assert plan is not None
        logprob = TokenLogprob(token=token, logprob=-1.0)
        sampled = [Sampled(sequence_id=row.sequence_id, token=token, logprob=logprob) for row in plan.rows if row.sample]
        self.update(StepResult(step=plan.step, sampled=sampled))
        return plan

    def update(self, result: StepResult) -> None:
        self.handoffs.on_result(self.now)
        self.events += self.scheduler.update(result)

    def report(self, rank: int, **what: Any) -> None:
        self.events += self.scheduler.apply(self.handoffs.on_report(KVReport(world_rank=rank, **what), self.now))

    def take(self, **what: Any) -> None:
        event = TokenEvent(request_id="a~0", **what)
        self.events += self.scheduler.apply(self.handoffs.on_remote_event(event, self.now))

    def cancel(self, request_id: str = "a") -> None:
        stopped = TokenEvent(request_id=request_id, finish="abort")
        self.events += self.scheduler.cancel(request_id) or self.handoffs.stop(stopped)

    @property
    def held(self) -> int:
        return sum(dp_rank.pool.num_held for dp_rank in self.scheduler.dp_ranks)

    def opened(self) -> KVTicket:
        """Take a request up to its ticket."""
        self.add(request(reserves=True))
        [expect] = self.step().expects
        for rank in range(2):
            self.report(rank, opened={expect.ticket_id: KVReader(world_rank=rank, agent_metadata=b"hello", staged_at=rank)})
        ticket = self.events.pop().ticket
        assert ticket is not None
        return ticket


def ticket(**changes: Any) -> KVTicket:
    fields = {"ticket_id": "a", "layout": "pp=2", "page_tokens": 4, "dp_rank": 0, "blocks": [3, 1, 2], "first": 4, "tokens": 10}
    return KVTicket(**{**fields, "rope_length": 10, "readers": [], "lease_s": LEASE_S, **changes})


def test_blocks_are_reserved_for_the_prompt_and_expected_output_before_there_is_a_ticket() -> None:
    side = Side()
    side.add(request(reserves=True))
    plan = side.step()
    assert (plan.rows, plan.started) == ([], [])
    [expect] = plan.expects
    assert (expect.first, expect.tokens, len(expect.blocks)) == (0, 10, 4)  # 10 + 4 tokens in blocks of 4
    assert (side.held, side.events) == (4, [])
    side.report(1, opened={"a~0": KVReader(world_rank=1, agent_metadata=b"one")})
    assert side.events == []
    side.now = 3.0
    side.report(0, opened={"a~0": KVReader(world_rank=0, agent_metadata=b"zero", staged_at=64)})
    [event] = side.events
    assert event.ticket is not None
    assert (event.ticket.blocks, event.ticket.lease_s) == (expect.blocks, LEASE_S - 3.0)
    assert [(each.world_rank, each.staged_at) for each in event.ticket.readers] == [(0, 64), (1, None)]
    assert not event.is_empty


@pytest.mark.parametrize("order", list(itertools.permutations(["token", "rank 0", "rank 1"])))
def test_it_runs_when_all_has_arrived_and_the_first_token_is_there(order: tuple[str, ...]) -> None:
    side = Side()
    side.opened()
    for index, what in enumerate(order):
        assert side.plan() is None, f"it runs after {order[:index]}"
        if what == "token":
            side.take(tokens=[5], logprobs=[TokenLogprob(token=5, logprob=-0.5)], cached_tokens=4)
        else:
            side.report(int(what[-1]), arrived=["a~0"])
    [event] = side.events
    assert (event.request_id, event.tokens, event.cached_tokens, event.finish) == ("a", [5], 4, None)
    plan = side.step()
    assert [(start.tokens, start.prompt_length) for start in plan.started] == [([*range(10), 5], 10)]
    assert [(row.start, row.count, len(row.new_blocks), row.sample) for row in plan.rows] == [(10, 1, 4, True)]
    side.take(finish="handoff")
    for _ in range(2):
        side.step()
    assert [event.tokens for event in side.events] == [[5], [7], [7], [7]]
    assert side.events[-1].finish == "length"
    assert (side.held, side.scheduler.num_live, bool(side.handoffs)) == (0, 0, False)


def test_a_request_that_goes_before_its_ticket_is_out_leaves_nothing() -> None:
    side = Side()
    side.add(request(reserves=True))
    side.step()
    side.cancel()
    assert (side.held, [event.finish for event in side.events]) == (0, ["abort"])
    plan = side.step()
    assert plan.forgets == ["a~0"]
    side.report(0, opened={"a~0": KVReader(world_rank=0, agent_metadata=b"late")}, arrived=["a~0"])
    assert (len(side.events), bool(side.handoffs)) == (1, False)


@pytest.mark.parametrize("how", ["handoff", "abort", "deadline", "refused", "arrived", "lease"])
def test_blocks_with_a_ticket_out_go_back_when_nobody_can_write_them(how: str) -> None:
    side = Side()
    side.opened()
    side.cancel()
    assert side.events[-1].finish == "abort"
    assert (side.held, side.handoffs.stats().draining) == (4, 1)
    if how == "refused":
        side.take(finish="error", refused="engine_busy")
    elif how == "arrived":
        side.report(0, arrived=["a~0"])
        assert side.held == 4
        side.report(1, arrived=["a~0"])
    elif how == "lease":
        side.take(finish="error", error="lost")  # whoever was lost may still write
        side.now = LEASE_S + GRACE_S - 0.1
        assert (side.plan(), side.held) == (None, 4)
        side.now += 0.2
        side.events += side.reap()
        assert side.handoffs.stats().outlived == 1
    else:
        side.take(finish=how)
    assert (side.held, bool(side.handoffs)) == (0, False)
    plan = side.plan()
    assert (plan.forgets if plan else []) == ([] if how == "arrived" else ["a~0"])
    assert len(side.events) == 1


def test_a_ticket_without_a_heartbeat_is_computed_here() -> None:
    side = Side(config())
    side.opened()
    side.now = 4.9
    assert side.plan() is None
    side.now = 5.0
    assert len(side.step().rows) == 1
    other = Side(config())
    other.opened()
    other.take()  # a replica has it
    other.now = 5.0
    assert other.plan() is None


@pytest.mark.parametrize("last", ["heartbeat", "token", "handoff", "all"])
def test_silence_after_a_heartbeat_costs_less_than_the_lease(last: str) -> None:
    side = Side(patient())
    side.opened()
    for side.now in (4.0, 23.0, 42.0):
        assert side.plan() is None, "it is slow, and lives"
        side.take(
            **({} if last == "heartbeat" or side.now < 42 else {"finish": "handoff"} if last == "handoff" else {"tokens": [5]})
        )
    side.now = 61.9
    assert side.plan() is None
    side.now = 62.0
    for rank in range(2 if last == "all" else 0):
        side.report(rank, arrived=["a~0"])
    plan = side.plan()
    assert bool(plan and plan.started) == (last != "handoff"), "a ticket that is all sent needs no heartbeat"
    assert side.handoffs.stats().fallen_back == (last in ("heartbeat", "token"))
    assert side.handoffs.stats().draining == (last in ("heartbeat", "token")), "somebody may still write"


def patient() -> EngineConfig:
    """A lease that is longer than anything here, and nothing else that is not as in service."""
    return config(
        disaggregation=DisaggregationConfig(layout=Layout.parse("tp=2"), least_tokens=4, expected_tokens=6, lease_s=600.0)
    )


def test_a_prompt_gets_a_heartbeat_a_second_while_it_waits_is_computed_and_is_sent() -> None:
    side = Side(config(max_sequences=1, disaggregation=patient().disaggregation))
    side.add(request(request_id="a", ticket=ticket(lease_s=600.0)))
    side.add(request(request_id="b", ticket=ticket(ticket_id="b", lease_s=600.0)))
    for side.now, heartbeats in ((1.0, ["a", "b"]), (1.5, []), (2.1, ["b", "a"])):
        side.step()
        assert side.heartbeats == heartbeats, side.now
        side.heartbeats.clear()
    for side.now in (5.0, 6.0):
        assert (side.plan(), side.heartbeats) == (None, ["a", "b"])
        side.heartbeats.clear()
    side.now = 7.0
    assert (side.plan(), side.heartbeats) == (None, []), "no rank has told anything for 4.9 s"
    side.report(0)
    assert (side.plan(), side.heartbeats) == (None, []), "one is frozen"
    side.report(1)
    assert (side.plan(), side.heartbeats) == (None, ["a", "b"])
    for rank in range(2):
        side.report(rank, sent=[KVSent(ticket_id="a"), KVSent(ticket_id="b")])
    side.heartbeats.clear()
    side.now = 9.0
    assert (side.plan(), side.heartbeats, side.held) == (None, [], 0)


@pytest.mark.parametrize("token_came", [False, True])
@pytest.mark.parametrize("how", ["lost", "aborted", "refused", "late"])
def test_a_prompt_that_does_not_come_is_computed_here(how: str, token_came: bool) -> None:
    side = Side()
    side.opened()
    if token_came:
        side.take(tokens=[5])
    if how == "late":
        side.now = LEASE_S
    elif how == "refused":
        side.take(finish="error", refused="engine_busy")
    else:
        side.take(finish="abort" if how == "aborted" else "error", error="why")
    held_before = side.held
    plan = side.step()
    tokens = [*range(10), 5] if token_came else [*range(10)]
    assert [start.tokens for start in plan.started] == [tokens]
    assert held_before == (4 if how in ("late", "lost") else 0)  # the old ones, where somebody may write to them
    assert side.held == held_before + 3
    stats = side.handoffs.stats()
    assert (stats.fallen_back, stats.received, stats.reserved) == (1, 0, 0)


def test_a_prompt_that_fell_back_ends_with_all_its_tokens() -> None:
    side = Side()
    side.opened()
    side.take(tokens=[5])
    side.take(finish="abort")
    while side.scheduler.num_live:
        side.step()
    assert [event.tokens for event in side.events] == [[5], [7], [7], [7]]
    assert (side.events[-1].finish, side.held) == ("length", 0)


def test_what_comes_twice_or_late_changes_nothing() -> None:
    side = Side()
    side.opened()
    side.take(tokens=[5])
    side.take(tokens=[6])
    for rank in (0, 0, 1):
        side.report(rank, arrived=["a~0"])
    side.step()
    side.take(tokens=[8], finish="abort")
    side.report(0, arrived=["a~0"])
    assert [event.tokens for event in side.events] == [[5], [7]]


def test_short_prompts_and_those_that_are_cached_are_computed_here() -> None:
    side = Side()
    side.add(request(3, reserves=True))
    plan = side.step()
    assert (plan.expects, len(plan.rows)) == ([], 1)


@pytest.mark.parametrize(("length", "found", "first"), [(20, 2, 8), (20, 1, 4), (20, 0, 0), (11, 2, None), (11, 0, 0)])
def test_tiers_are_read_first_and_the_rest_is_handed_off_if_it_is_worth_it(length: int, found: int, first: int | None) -> None:
    """Two blocks were put away and have left the device since; of the second and third prompt too few tokens remain."""
    side = tiered_side()
    side.add(request(prompt=list(range(9)) + list(range(30, 30 + length - 9)), reserves=True))
    [fetch] = side.step().fetches
    assert (fetch.first, len(fetch.hashes)) == (0, 2)
    for rank in range(2):
        side.report(rank, fetched={fetch.ticket_id: found})
    plan = side.step()
    assert [(expect.first, expect.tokens) for expect in plan.expects] == ([] if first is None else [(first, length)])
    assert [(row.start, row.count) for row in plan.rows] == ([(8, 3)] if first is None else [])
    side.cancel()
    assert side.held == 0


def test_tiers_that_do_not_answer_cost_their_deadline_and_no_more_blocks() -> None:
    side = tiered_side(fetch_timeout_s=5.0)
    side.add(request(max_tokens=1))
    [fetch] = side.step().fetches
    side.report(0, fetched={fetch.ticket_id: 2})
    side.now = 4.9
    assert side.plan() is None
    side.now = 5.0
    plan = side.step()
    assert (plan.fetches, [(row.start, row.count) for row in plan.rows]) == ([], [(0, 8)])
    assert not {block for row in plan.rows for block in row.new_blocks} & set(fetch.blocks), "a rank may still fill them"
    side.step()
    assert (side.events[-1].finish, side.held, side.handoffs.offload.counts.late) == ("length", 3, 1)
    side.add(request(request_id="b", prompt=[*range(20, 29)], max_tokens=1))
    assert side.step().fetches == [], "nobody asks tiers that are stuck"
    side.step()
    side.report(1, fetched={fetch.ticket_id: 2})
    assert side.held == 0
    run_alone(side, range(100, 131))
    side.add(request(request_id="c", prompt=[*range(20, 29)], max_tokens=1))
    assert len(side.step().fetches) == 1, "they answer again"


def test_one_that_waited_too_long_asks_the_tiers_no_more() -> None:
    side = tiered_side(fetch_timeout_s=5.0)
    side.add(request(max_tokens=1))
    [fetch] = side.step().fetches
    side.now = 5.0
    side.reap()
    for rank in range(2):
        side.report(rank, fetched={fetch.ticket_id: 2})
    assert (side.held, side.step().fetches) == (0, [])


def tiered_side(**changes: Any) -> Side:
    """Two blocks of ``range(9)`` and two of ``range(20, 29)`` are in the tiers, and have left the device since."""
    kv_format = KVFormat.of(heads_model(4), "a" * 64, "float32", 4)
    settings = TierConfig(host_cache=1 << 20)
    offload = OffloadConfig(tiers=settings, layout=Layout.parse("tp=2"), kv_format=kv_format, block_bytes=64, **changes)
    side = Side(config(offload=offload))
    for prompt in (range(9), range(20, 29), range(50, 81)):
        run_alone(side, prompt)
    return side


def run_alone(side: Side, prompt: range) -> None:
    side.add(request(request_id=f"alone {prompt}", prompt=list(prompt), max_tokens=1))
    while side.scheduler.num_live:
        side.step()
    side.events.clear()


def test_states_only_move_forward() -> None:
    side = Side()
    side.opened()
    [made] = side.handoffs.decode_transfers
    with pytest.raises(AssertionError, match="cannot go from OPEN to ASKED"):
        made.advance(DecodeTransferState.ASKED)


def test_blocks_are_held_until_every_rank_has_sent_and_stay_cached() -> None:
    side = Side()
    side.add(request(ticket=ticket()))
    first, second = side.step(), side.step()
    [send] = first.sends
    assert (send.sequence_id, send.ticket.first, second.sends) == (first.started[0].sequence_id, 4, [])
    assert [(event.tokens, event.finish) for event in side.events] == [([7], None)]
    assert (side.scheduler.num_live, side.held) == (0, 3)
    side.report(1, sent=[KVSent(ticket_id="a", num_bytes=100, busy_s=4.0, exposed_s=1.0)])
    assert side.held == 3
    side.report(0, sent=[KVSent(ticket_id="a", num_bytes=50)])
    assert [event.finish for event in side.events] == [None, "handoff"]
    stats = side.handoffs.stats()
    assert (stats.sent, stats.sent_bytes, stats.overlap) == (1, 150, 0.75)
    assert (side.held, side.scheduler.dp_ranks[0].pool.num_cached, bool(side.handoffs)) == (0, 2, False)


def test_the_last_event_comes_after_the_first_token_however_fast_ranks_are() -> None:
    side = Side()
    side.add(request(ticket=ticket()))
    side.step()
    plan = side.plan()
    for rank in range(2):
        side.report(rank, sent=[KVSent(ticket_id="a")])
    assert side.events == []
    result = StepResult(step=plan.step, sampled=[Sampled(sequence_id=plan.rows[0].sequence_id, token=7)])
    side.update(result)
    assert [(event.tokens, event.finish) for event in side.events] == [([7], None), ([], "handoff")]
    assert side.held == 0


@pytest.mark.parametrize("when", ["computing", "sending"])
@pytest.mark.parametrize("how", ["cancel", "rank", "deadline"])
def test_a_handoff_that_stops_ends_when_no_rank_writes(when: str, how: str) -> None:
    side = Side()
    side.add(request(ticket=ticket()))
    side.step()
    if when == "sending":
        side.step()
    waiting = [0, 1]
    if how == "cancel":
        side.cancel()
    elif how == "rank":
        side.report(0, sent=[KVSent(ticket_id="a", error="the peer may be gone")])
        waiting = [1]
    elif when == "computing":
        side.now = LEASE_S
    else:
        return  # ranks keep the lease of what they send by themselves
    plan = side.step()
    assert plan.forgets == ["a"]
    assert (side.held, side.scheduler.num_live) == (3, 0)
    assert not any(event.finish for event in side.events)
    for rank in waiting:
        side.report(rank, sent=[KVSent(ticket_id="a", error="it was given up")])
    assert side.events[-1].finish == ("deadline" if how == "deadline" else "abort")
    assert (side.held, bool(side.handoffs)) == (0, False)


def test_a_request_in_the_queue_ends_at_once() -> None:
    side = Side()
    side.add(request(ticket=ticket()))
    side.cancel()
    assert [event.finish for event in side.events] == ["abort"]
    assert not side.handoffs


def test_a_prompt_that_is_being_sent_is_not_preempted() -> None:
    """A decode that needs a block takes none of those; with nobody else there it goes itself."""
    side = Side(config(num_blocks=7, prefix_cache=False))
    side.add(request(8, request_id="decoding", max_tokens=12))
    side.step()
    side.add(request(10, ticket=ticket(ticket_id="a"), request_id="a"))
    for _ in range(8):
        side.step()
    assert (side.plan(), side.scheduler.counts.preemptions) == (None, 1)
    assert [event.tokens for event in side.events if event.request_id == "a"] == [[7]]
    assert side.held == 3  # those of the prompt, which nobody has sent


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (request(ticket=ticket(ticket_id="b")), "must be the request's own id, 'a'"),
        (request(ticket=ticket(tokens=9)), "must be the end of a prompt of 10 tokens"),
        (request(ticket=ticket(first=10)), "positions 10..10"),
        (request(ticket=ticket(blocks=[1])), "in 1 blocks of 4"),
        (request(max_tokens=0, ticket=ticket()), "with a ticket one token is sampled"),
        (request(reserves=True, ticket=ticket()), "has a ticket, or asks for one"),
    ],
)
def test_tickets_that_do_not_fit_are_refused(item: GenerateRequest, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        check_request(item, config())


def test_dp_ranks_hold_their_own_transfers() -> None:
    side = Side(config("attn_dp=2", dp_size=2))
    for name in "ab":
        side.add(request(request_id=name, reserves=True))
    expects = side.step().expects
    assert sorted(expect.dp_rank for expect in expects) == [0, 1]
    for expect in expects:
        rank = expect.dp_rank  # one rank a DP rank
        side.report(rank, opened={expect.ticket_id: KVReader(world_rank=rank, agent_metadata=b"x")})
    assert sorted(event.ticket.dp_rank for event in side.events if event.ticket) == [0, 1]
