"""Queries for members of streams, streams of members, and changes of members, inside a transaction."""

from typing import Any

from oncelog.core.values import Settings
from oncelog.storage.side_state import compute_prefix_end, lane_of_scope
from oncelog.storage.sqlite.statements import SQL
from oncelog.storage.store import (
    MemberChange,
    MemberCursor,
    MemberPage,
    Membership,
    MembershipPage,
    StreamMember,
)


def list_members(connection: Any, scope: str, after: str, limit: int, settings: Settings) -> MemberPage:
    """A page of a stream's members."""
    bounds = (lane_of_scope(scope, settings.lanes), scope, after, limit + 1)
    rows = connection.execute(SQL["member_page"], bounds).fetchall()
    return MemberPage.from_members([StreamMember.from_row(*row) for row in rows], limit)


def list_memberships(connection: Any, member: str, prefix: str, after: str, limit: int) -> MembershipPage:
    """A page of a member's streams."""
    bounds = (member, after, prefix, compute_prefix_end(prefix), limit + 1)
    rows = connection.execute(SQL["membership_page"], bounds).fetchall()
    return MembershipPage.from_memberships([Membership.from_row(*row) for row in rows], limit)


def list_member_changes(connection: Any, lane: int, after: MemberCursor, limit: int) -> list[MemberChange]:
    """What has changed in a lane since."""
    rows = connection.execute(SQL["member_changes"], (lane, *after, limit)).fetchall()
    return [MemberChange.from_row(*row) for row in rows]
