"""Role changes of running replicas. A change is refused if no replica would be left for work that the service needs."""

from __future__ import annotations

from collections.abc import Collection

from actors.wire.roles import Role, WorkKind
from cluster.replica.roles import RoleReport
from serve_app.routing.broadcast import broadcast
from serve_app.routing.pool_members import PoolMember, PoolMembers


class RoleRefused(ValueError):
    """An impossible change of role, with alternatives."""


async def change_role(
    pool_members: PoolMembers, replica: str, role: Role, within_s: float, needed: Collection[WorkKind]
) -> RoleReport:
    """Have the replica named `replica` become `role` once it has finished the work that the new role does not include.

    The change is abandoned after `within_s` seconds. Returns the state after the begin of the change; `pool_members`, whose
    reports are refreshed, shows the progress. Raises `RoleRefused` if there is no such replica or it does not answer, or if a
    kind of work in `needed` would be left without a replica, in which case nothing changes.
    """
    await pool_members.refresh(at_once=True)
    member = _named(pool_members, replica)
    _check(pool_members, member, role, needed)
    report = await _request_change(pool_members, member, role, within_s)
    await pool_members.refresh(at_once=True)
    try:
        _check(pool_members, member, role, needed)  # another replica may have changed at the same time
    except RoleRefused:
        await _request_change(pool_members, member, member.report.role, within_s)
        raise
    return report


async def _request_change(pool_members: PoolMembers, member: PoolMember, role: Role, within_s: float) -> RoleReport:
    answers = await broadcast(pool_members.pools[member.pool], "change_role", member.name, role.value, within_s)
    report = next((each for each in answers if isinstance(each, RoleReport)), None)
    if report is None:
        raise RoleRefused(f"replica {member.name} did not answer; it may be gone")
    return report


def _named(pool_members: PoolMembers, name: str) -> PoolMember:
    found = [each for each in pool_members if each.name == name]
    if not found:
        raise RoleRefused(f"there is no replica {name!r}; there are {_listed(list(pool_members))}")
    return found[0]


def _check(pool_members: PoolMembers, member: PoolMember, role: Role, needed: Collection[WorkKind]) -> None:
    for work in needed:
        left = [each for each in pool_members.able(work, [member.name])]
        if not left and work not in role.admits:
            rest = [each for each in pool_members if each.name != member.name]
            raise RoleRefused(
                f"if replica {member.name} became {role}, 0 of {len(rest) + 1} replicas would take {work}s: the others are "
                f"{_listed(rest) or 'none'}. Make one of them {_taking(work)} first, or this one mixed"
            )


def _taking(work: WorkKind) -> str:
    return " or ".join(role.value for role in Role if work in role.admits)


def _listed(members: list[PoolMember]) -> str:
    return ", ".join(_described(each.report) for each in members)


def _described(report: RoleReport) -> str:
    return f"{report.name} ({report}{'' if report.down is None else f', down: {report.down}'})"
