"""What a replica takes by its role, and how it comes to another one while it has something to do."""

from __future__ import annotations

import pytest

from actors.wire.roles import Role, Work
from cluster.replica.roles import Duty, WrongRole

TAKES = {Role.PREFILL: {Work.PROMPT}, Role.DECODE: {Work.REQUEST}, Role.MIXED: {Work.PROMPT, Work.REQUEST}}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def duty(role: Role) -> tuple[Duty, Clock]:
    clock = Clock()
    return Duty("a", role, clock), clock


def refused(found: Duty) -> set[Work]:
    """What it does not let in now."""
    refused = set()
    for work in Work:
        try:
            found.enter(work)
            found.leave(work)
        except WrongRole:
            refused.add(work)
    return refused


@pytest.mark.parametrize("role", Role)
def test_a_role_lets_in_what_it_takes(role: Role) -> None:
    assert refused(duty(role)[0]) == set(Work) - TAKES[role]


@pytest.mark.parametrize("old", Role)
@pytest.mark.parametrize("new", Role)
def test_a_change_waits_for_what_the_new_role_does_not_take(old: Role, new: Role) -> None:
    found, _ = duty(old)
    for work in TAKES[old]:
        found.enter(work)
    found.change(new, 9.0)
    unwanted = TAKES[old] - TAKES[new]
    if unwanted:
        report = found.report()
        assert (report.role, report.becomes, report.waits_for) == (old, new, dict.fromkeys(unwanted, 1))
        assert refused(found) == set(Work) - (TAKES[old] & TAKES[new])
        for work in unwanted:
            found.leave(work)
    report = found.report()
    assert (report.role, report.becomes, report.waits_for) == (new, None, {})
    assert refused(found) == set(Work) - TAKES[new]


def test_a_change_that_takes_too_long_is_given_up() -> None:
    found, clock = duty(Role.DECODE)
    for _ in range(2):
        found.enter(Work.REQUEST)
    found.change(Role.PREFILL, 9.0)
    clock.now = 8.9
    assert found.report().left_s == pytest.approx(0.1)
    clock.now = 9.0
    report = found.report()
    assert (report.role, report.becomes) == (Role.DECODE, None)
    assert report.gave_up == "it still had 2 requests when its time to become prefill was over"
    found.enter(Work.REQUEST)
    for _ in range(3):
        found.leave(Work.REQUEST)
    assert found.role is Role.DECODE


def test_the_old_role_asked_for_again_ends_a_change() -> None:
    found, _ = duty(Role.DECODE)
    found.enter(Work.REQUEST)
    found.change(Role.PREFILL, 9.0)
    found.change(Role.DECODE, 9.0)
    found.leave(Work.REQUEST)
    assert (found.role, found.report().gave_up) == (Role.DECODE, None)


def test_a_prefill_replica_stands_in_unless_it_changes() -> None:
    found, _ = duty(Role.PREFILL)
    found.enter(Work.REQUEST, stands_in=True)
    assert found.report().ongoing == 1
    found.enter(Work.PROMPT)
    found.change(Role.DECODE, 9.0)
    with pytest.raises(WrongRole, match=r"replica a is prefill, becoming decode, and takes nothing new, not a request"):
        found.enter(Work.REQUEST, stands_in=True)
