"""What a replica takes by its role, and how it comes to another one while it has something to do."""

from __future__ import annotations

import pytest

from actors.wire.roles import Role, WorkKind
from cluster.replica.roles import ReplicaRole, WrongRole

ADMITS = {Role.PREFILL: {WorkKind.PROMPT}, Role.DECODE: {WorkKind.REQUEST}, Role.MIXED: {WorkKind.PROMPT, WorkKind.REQUEST}}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def replica_role(role: Role) -> tuple[ReplicaRole, Clock]:
    clock = Clock()
    return ReplicaRole("a", role, clock), clock


def refused(found: ReplicaRole) -> set[WorkKind]:
    """What it does not let in now."""
    refused = set()
    for work in WorkKind:
        try:
            found.admit(work)
            found.release(work)
        except WrongRole:
            refused.add(work)
    return refused


@pytest.mark.parametrize("role", Role)
def test_a_role_lets_in_what_it_takes(role: Role) -> None:
    assert refused(replica_role(role)[0]) == set(WorkKind) - ADMITS[role]


@pytest.mark.parametrize("old", Role)
@pytest.mark.parametrize("new", Role)
def test_a_change_waits_for_what_the_new_role_does_not_take(old: Role, new: Role) -> None:
    found, _ = replica_role(old)
    for work in ADMITS[old]:
        found.admit(work)
    found.change(new, 9.0)
    unwanted = ADMITS[old] - ADMITS[new]
    if unwanted:
        report = found.report()
        assert (report.role, report.becomes, report.waits_for) == (old, new, dict.fromkeys(unwanted, 1))
        assert refused(found) == set(WorkKind) - (ADMITS[old] & ADMITS[new])
        for work in unwanted:
            found.release(work)
    report = found.report()
    assert (report.role, report.becomes, report.waits_for) == (new, None, {})
    assert refused(found) == set(WorkKind) - ADMITS[new]


def test_a_change_that_takes_too_long_is_given_up() -> None:
    found, clock = replica_role(Role.DECODE)
    for _ in range(2):
        found.admit(WorkKind.REQUEST)
    found.change(Role.PREFILL, 9.0)
    clock.now = 8.9
    assert found.report().left_s == pytest.approx(0.1)
    clock.now = 9.0
    report = found.report()
    assert (report.role, report.becomes) == (Role.DECODE, None)
    assert report.gave_up == "it still had 2 requests when its time to become prefill was over"
    found.admit(WorkKind.REQUEST)
    for _ in range(3):
        found.release(WorkKind.REQUEST)
    assert found.role is Role.DECODE


def test_the_old_role_asked_for_again_ends_a_change() -> None:
    found, _ = replica_role(Role.DECODE)
    found.admit(WorkKind.REQUEST)
    found.change(Role.PREFILL, 9.0)
    found.change(Role.DECODE, 9.0)
    found.release(WorkKind.REQUEST)
    assert (found.role, found.report().gave_up) == (Role.DECODE, None)


def test_a_prefill_replica_stands_in_unless_it_changes() -> None:
    found, _ = replica_role(Role.PREFILL)
    found.admit(WorkKind.REQUEST, is_fallback=True)
    assert found.report().ongoing == 1
    found.admit(WorkKind.PROMPT)
    found.change(Role.DECODE, 9.0)
    with pytest.raises(WrongRole, match=r"replica a is prefill, becoming decode, and takes nothing new, not a request"):
        found.admit(WorkKind.REQUEST, is_fallback=True)
