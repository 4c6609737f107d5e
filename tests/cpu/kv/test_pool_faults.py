"""Faults at every state of a hand-off, on either side: nothing hangs, nothing leaks, and what is answered is right."""

from __future__ import annotations

import random
import time
from collections import Counter

import pytest
import torch

from actors.engine.admission import RequestRefused
from actors.engine.config.engine_config import EngineConfig
from actors.engine.disaggregation import prefill_transfers
from actors.kv_transfer import kv_connector_worker
from actors.wire.requests import GenerateRequest, SamplingParams, TokenEvent
from tests.support.inprocess import in_process
from tests.support.kv.pool_faults import CANCELLED, FAULTS, STATES, FaultyTransport, Injector, fault_of
from tests.support.kv.pools import pools
from tests.support.long_cases import long
from tests.support.models.tiny_models import tiny
from tests.support.waiting import wait_until

torch.set_num_threads(1)

LEASE_S, GRACE_S = 1.5, 0.6
SETTLED_S = LEASE_S + GRACE_S + 5
"""By then whatever a dead side had promised is given up."""
CONFIG = EngineConfig(
    block_size=4,
    num_blocks=96,
    max_model_len=96,
    max_batch_tokens=64,
    max_sequences=12,
    max_chunk_tokens=24,
    max_waiting=999,
)


def request(number: int, fault: str) -> GenerateRequest:
    draw = random.Random(number)
    prompt = [draw.randrange(101) for _ in range(draw.choice([3, 9, 16, 30, 60]))]
    return GenerateRequest(
        request_id=f"{number}:{fault}",
        prompt=prompt,
        max_tokens=draw.randint(2, 6),
        sampling=SamplingParams(temperature=draw.choice([0.0, 1.0]), seed=number),
        timeout_s=0.05 if fault == "a short deadline" else None,
    )


@pytest.fixture(scope="module")
def expected() -> dict[int, list[int]]:
    with in_process(tiny("llama3", num_hidden_layers=2), "", CONFIG.model_copy(update={"num_blocks": 900})) as replica:
        waiting = {number: replica.submit(request(number, "none")) for number in range(600)}
        return {number: replica.finish(events).tokens for number, events in waiting.items()}


@pytest.mark.parametrize(("prefill", "decode", "count"), [("", "tp=2", 100), *long(("tp=2", "pp=2", 500))])
def test_faults_at_every_state(expected: dict[int, list[int]], prefill: str, decode: str, count: int) -> None:
    faults = [FAULTS[number % len(FAULTS)] for number in range(count)]
    random.Random(count).shuffle(faults)
    model = tiny("llama3", num_hidden_layers=2)
    settings = {"lease_s": LEASE_S, "grace_s": GRACE_S, "expected_tokens": 4}
    with pools(model, prefill, decode, CONFIG, CONFIG, FaultyTransport, **settings) as both:
        injector, waiting = Injector(both), {}
        for number, fault in enumerate(faults):
            item = request(number, fault)
            waiting[number] = both.submit(item)
            if fault == "cancelled at once":
                both.decode.engine.cancel(item.request_id)
        began = time.monotonic()
        for number, events in waiting.items():
            check(number, faults[number], both.decode.finish(events), expected[number])
        assert time.monotonic() - began < 90
        both.wait_until_idle(2 * (LEASE_S + GRACE_S) + 5)
        assert all(events.empty() for events in waiting.values()), "something was said after the end"
        into, out = both.decode.engine.stats().handoffs, both.prefill.engine.stats().handoffs
        assert (into.reserved, into.draining, out.sending) == (0, 0, 0)
        assert min(into.fallen_back, 2 * into.received, 5 * into.outlived, 2 * out.failed) > count / 8
        unmet = STATES - injector.hits.keys()
        assert not unmet or count < 500, f"no fault met {unmet}"
        waiting = {number: both.submit(request(number, "none")) for number in range(500, 600)}
        for number, events in waiting.items():
            check(number, "none", both.decode.finish(events), expected[number])
        both.wait_until_idle()
        assert both.decode.engine.stats().handoffs.received - into.received > 50  # the others were late: a busy machine


def check(number: int, fault: str, found: TokenEvent, right: list[int]) -> None:
    """Tokens as they should be; an early end only where it was asked for."""
    early = ("abort",) if fault in CANCELLED else ("deadline",) if fault == "a short deadline" else ()
    assert found.finish in ("length", *early), (number, fault, found)
    assert found.tokens == (right if found.finish == "length" else right[: len(found.tokens)]), (number, fault)


def test_why_nothing_was_handed_off_names_both_values() -> None:
    """What `/health` repeats of a trial: the last event of the prefill side."""
    with pools(tiny("llama3", num_hidden_layers=2), "tp=2", "pp=2", CONFIG, CONFIG) as both:
        Injector(both)
        passed: list[TokenEvent] = []
        both.on_prefill_event = lambda event: (passed.append(event), event)[1]
        assert both.run(request(3, "agent metadata of another model")).finish == "length"
        both.wait_until_idle()
    assert (passed[-1].finish, passed[-1].request_id.split("~")[0]) == ("abort", "3:agent metadata of another model")
    assert "model_digest" in passed[-1].error
    assert all(digest in passed[-1].error for digest in ("a" * 64, "b" * 64))


def test_what_ends_between_the_two_sides_holds_nothing_on_either(expected: dict[int, list[int]]) -> None:
    """C04, with leases as long as in service: 50 requests are gone from the decode side when their prompt is computed, 50 are
    left by their client, so that an ingress tells both sides, before it is; 50 the decode side would never have taken."""
    with pools(tiny("llama3", num_hidden_layers=2), "tp=2", "pp=2", CONFIG, CONFIG, FaultyTransport) as both:
        submit, decode, prefill = both.prefill.engine.submit, both.decode.engine, both.prefill.engine

        def left(item: GenerateRequest, deliver: object) -> None:
            submit(item, deliver)
            if fault_of(item.request_id) == "left before it runs":
                leave(item.request_id)

        def leave(ticket_id: str) -> None:
            decode.cancel(ticket_id.split("~")[0])
            prefill.cancel(ticket_id)

        def gone(event: TokenEvent) -> TokenEvent:
            if event.tokens and fault_of(event.request_id) == "gone":
                decode.cancel(event.request_id.split("~")[0])
            if event.tokens and fault_of(event.request_id) == "left while it is sent":
                leave(event.request_id)
            return event

        prefill.submit, both.on_prefill_event = left, gone
        ways = ("gone", "left before it runs", "gone", "left while it is sent")
        waiting = [both.submit(request(number, ways[number % 4])) for number in range(100)]
        ends = Counter(both.decode.finish(events).finish for events in waiting)
        both.wait_until_idle(2.0)
        assert ends["abort"] > 90, ends
        for number in range(50):
            bad = {"prompt": [1] * 200} if number % 2 else {"prompt": [5] * 20, "max_tokens": -1}
            with pytest.raises(RequestRefused):
                both.submit(request(number, "refused here").model_copy(update=bad))
        assert len(both.tickets) == 100
        assert (decode.stats().handoffs.outlived, prefill.stats().handoffs.sending) == (0, 0)
        before = decode.stats().handoffs.received
        check(200, "none", both.run(request(200, "none")), expected[200])
        assert decode.stats().handoffs.received == before + 1


def test_a_prefill_replica_that_freezes_after_its_first_heartbeat_costs_its_silence(expected: dict[int, list[int]]) -> None:
    """Its later heartbeats, and nothing else, are lost; with leases as long as in service."""
    seen = set[str]()
    with pools(tiny("llama3", num_hidden_layers=2), "tp=2", "pp=2", CONFIG, CONFIG, heartbeat_timeout_s=0.5) as both:
        both.on_prefill_event = lambda event: None if event.request_id in seen else (seen.add(event.request_id), event)[1]
        began = time.monotonic()
        waiting = {number: both.submit(request(number, "none")) for number in range(8)}
        for number, events in waiting.items():
            check(number, "none", both.decode.finish(events), expected[number])
        assert time.monotonic() - began < 20
        stats = both.decode.engine.stats().handoffs
        assert (stats.received, stats.fallen_back) == (0, len(both.tickets))
        both.wait_until_idle(20)


def test_ranks_that_send_for_long_send_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that does not end is no silence: what ends it is the lease. All in a fifth of the usual time."""
    monkeypatch.setattr(kv_connector_worker, "_HEARTBEAT_INTERVAL_S", 0.2)
    monkeypatch.setattr(prefill_transfers, "_HEARTBEAT_INTERVAL_S", 0.2)
    monkeypatch.setattr(prefill_transfers, "_RANK_TIMEOUT_S", 0.8)
    settings = {"lease_s": 3.5, "grace_s": 0.6, "heartbeat_timeout_s": 1.5}
    with pools(tiny("llama3", num_hidden_layers=2), "tp=2", "pp=2", CONFIG, CONFIG, FaultyTransport, **settings) as both:
        began = time.monotonic()
        assert both.run(request(4, "a write never ends")).finish == "length"
        assert time.monotonic() - began > 3.2, "a prefill side that lives was given up"
        both.wait_until_idle(20)


@pytest.mark.parametrize("when", ["computing", "sending"])
def test_a_prefill_replica_that_dies_costs_time_only(expected: dict[int, list[int]], when: str) -> None:
    """Its engine ends; later requests find it down."""
    settings = {"lease_s": LEASE_S, "grace_s": GRACE_S}
    with pools(tiny("llama3", num_hidden_layers=2), "tp=2", "pp=2", CONFIG, CONFIG, **settings) as both:
        if when == "computing":
            both.on_prefill_request = lambda item: (
                both.prefill.engine.fail("killed") if item.request_id.startswith("9:") else None
            )
        else:
            both.on_prefill_event = lambda event: (
                (both.prefill.engine.fail("killed"), event)[1] if event.request_id[0] == "9" else event
            )
        waiting = {number: both.submit(request(number, "none")) for number in range(20)}
        for number, events in waiting.items():
            check(number, "none", both.decode.finish(events), expected[number])
        stats = both.decode.engine.stats().handoffs
        assert stats.fallen_back > 0
        stats_now = both.decode.engine.stats
        wait_until(lambda: not stats_now().handoffs.draining, SETTLED_S, lambda: f"still draining: {stats_now()}")
        held = stats_now()
        assert held.free_blocks + held.cached_blocks == held.total_blocks


def test_a_decode_replica_that_dies_frees_the_prefill_side() -> None:
    with pools(tiny("llama3", num_hidden_layers=2), "tp=2", "pp=2", CONFIG, CONFIG, lease_s=LEASE_S, grace_s=GRACE_S) as both:
        both.on_prefill_request = lambda item: both.decode.engine.fail("killed") if item.request_id.startswith("9:") else None
        waiting = {number: both.submit(request(number, "none")) for number in range(12)}
        for events in waiting.values():
            assert both.decode.finish(events).finish in ("length", "lost")
        stats_now = both.prefill.engine.stats

        def idle() -> bool:
            return not stats_now().handoffs.sending and not stats_now().running

        wait_until(idle, SETTLED_S, lambda: f"still sending or running: {stats_now()}")
        held = stats_now()
        assert held.free_blocks + held.cached_blocks == held.total_blocks
