"""Another role for a replica that runs: refused where nobody would be left for what the service cannot be without."""

from __future__ import annotations

from collections.abc import Collection

from actors.wire.roles import Role, WorkKind
from cluster.replica.roles import RoleReport
from serve_app.routing.asking import ask_all
from serve_app.routing.roster import Member, Roster


class RoleRefused(ValueError):
    """A change of role that cannot be, with what would work."""


async def change_role(roster: Roster, replica: str, role: Role, within_s: float, needed: Collection[WorkKind]) -> RoleReport:
    """Have `replica` become `role` when it has nothing left of what that role does not take; given up after `within_s` seconds.

    Returns how it stands; `roster` tells how it goes on. Raises `RoleRefused` where a kind of work in `needed` would be left to
    nobody, in which case nothing changes.
    """
    await roster.refresh(at_once=True)
    member = _named(roster, replica)
    _check(roster, member, role, needed)
    told = await _tell(roster, member, role, within_s)
    await roster.refresh(at_once=True)
    try:
        _check(roster, member, role, needed)  # another one may have been changed at the same time
    except RoleRefused:
        await _tell(roster, member, member.told.role, within_s)
        raise
    return told


async def _tell(roster: Roster, member: Member, role: Role, within_s: float) -> RoleReport:
    answers = await ask_all(roster.pools[member.pool], "change_role", member.name, role.value, within_s)
    told = next((each for each in answers if isinstance(each, RoleReport)), None)
    if told is None:
        raise RoleRefused(f"replica {member.name} did not answer; it may be gone")
    return told


def _named(roster: Roster, name: str) -> Member:
    found = [each for each in roster if each.name == name]
    if not found:
        raise RoleRefused(f"there is no replica {name!r}; there are {_listed(list(roster))}")
    return found[0]


def _check(roster: Roster, member: Member, role: Role, needed: Collection[WorkKind]) -> None:
    for work in needed:
        left = [each for each in roster.able(work, [member.name])]
        if not left and work not in role.admits:
            rest = [each for each in roster if each.name != member.name]
            raise RoleRefused(
                f"if replica {member.name} became {role}, 0 of {len(rest) + 1} replicas would take {work}s: the others are "
                f"{_listed(rest) or 'none'}. Make one of them {_taking(work)} first, or this one mixed"
            )


def _taking(work: WorkKind) -> str:
    return " or ".join(role.value for role in Role if work in role.admits)


def _listed(members: list[Member]) -> str:
    return ", ".join(_described(each.told) for each in members)


def _described(told: RoleReport) -> str:
    return f"{told.name} ({told}{'' if told.down is None else f', down: {told.down}'})"
