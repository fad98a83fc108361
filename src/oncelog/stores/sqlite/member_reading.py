"""Reading members of streams, streams of members, and who of them has changed. All of it inside a transaction."""

from typing import Any

from oncelog.core.values import Settings
from oncelog.stores.protocol import (
    MemberChange,
    MemberPage,
    MemberPlace,
    Membership,
    MembershipPage,
    StreamMember,
)
from oncelog.stores.side_state import behind_prefix, lane_of_scope
from oncelog.stores.sqlite.statements import SQL


def members(connection: Any, scope: str, after: str, limit: int, settings: Settings) -> MemberPage:
    """A page of a stream's members."""
    bounds = (lane_of_scope(scope, settings.lanes), scope, after, limit + 1)
    rows = connection.execute(SQL["member_page"], bounds).fetchall()
    return MemberPage.of([StreamMember.of(*row) for row in rows], limit)


def memberships(connection: Any, member: str, prefix: str, after: str, limit: int) -> MembershipPage:
    """A page of a member's streams."""
    bounds = (member, after, prefix, behind_prefix(prefix), limit + 1)
    rows = connection.execute(SQL["membership_page"], bounds).fetchall()
    return MembershipPage.of([Membership.of(*row) for row in rows], limit)


def member_changes(connection: Any, lane: int, after: MemberPlace, limit: int) -> list[MemberChange]:
    """What has changed in a lane since."""
    rows = connection.execute(SQL["member_changes"], (lane, *after, limit)).fetchall()
    return [MemberChange.of(*row) for row in rows]
