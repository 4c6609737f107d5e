"""The order of the queue, and fairness between tenants."""

from typing import Any

from actors.engine.sequences.fairness import TenantCounters
from actors.engine.sequences.sequence import Sequence
from actors.engine.sequences.waiting import WaitingQueue
from actors.wire.requests import GenerateRequest


def make(order: int, **changes: Any) -> Sequence:
    item = GenerateRequest(request_id=str(order), prompt=[1], max_tokens=1, **changes)
    return Sequence.of(item, 4, float(order), order)


def queue_of(*sequences: Sequence, overdue_after_s: float = 1000.0) -> tuple[WaitingQueue, TenantCounters]:
    tenants = TenantCounters()
    queue = WaitingQueue(overdue_after_s, tenants)
    for sequence in sequences:
        tenants.join(sequence.request.tenant)
        queue.push(sequence)
    return queue, tenants


def take_all(queue: WaitingQueue, now: float = 100.0) -> list[int]:
    taken = []
    while (first := queue.first(now)) is not None:
        queue.remove(first)
        taken.append(first.order)
    assert queue.num_requests == queue.num_tokens == 0
    return taken


def test_the_preempted_go_back_before_later_arrivals() -> None:
    queue, _ = queue_of(*(make(order) for order in range(4)))
    first, second = make(-2), make(-1)
    for sequence in (first, second):
        sequence.preemptions = 1
        queue.push_back_in(sequence)
    assert take_all(queue) == [-2, -1, 0, 1, 2, 3]


def test_the_preempted_go_before_other_tenants_but_not_before_the_more_urgent() -> None:
    preempted = make(3, tenant="b")
    preempted.preemptions = 1
    queue, tenants = queue_of(make(0, tenant="a"), make(1, tenant="a", priority=-1))
    tenants.join("b")
    queue.push_back_in(preempted)
    tenants.charge("b", 1000)
    assert take_all(queue) == [1, 3, 0]


def test_the_overdue_go_first_in_order_of_arrival() -> None:
    queue, _ = queue_of(make(0, priority=5), make(10, priority=9), make(60), make(70, priority=-9), overdue_after_s=45.0)
    assert take_all(queue, now=60.0) == [0, 10, 70, 60]


def test_being_away_earns_no_credit_and_costs_none() -> None:
    tenants = TenantCounters()
    tenants.join("busy")
    tenants.charge("busy", 100)
    tenants.join("new")
    assert tenants.served("new") == 100
    tenants.charge("new", 50)
    tenants.leave("new")
    tenants.join("new")
    assert tenants.served("new") == 150, "leaving and coming back must not wash a tenant clean"
    tenants.leave("new")
    tenants.charge("busy", 900)
    tenants.join("other")
    assert tenants._served.keys() == {"busy", "other"}, "who would be lifted anyway is forgotten"
