"""Queries for members of streams, streams of members, and changes of members."""

from typing import Any

from oncelog.core.values import Settings
from oncelog.storage.postgres import record_queries
from oncelog.storage.postgres.statements import SQL
from oncelog.storage.side_state import compute_prefix_end, lane_of_scope
from oncelog.storage.store import (
    MemberChange,
    MemberCursor,
    MemberPage,
    Membership,
    MembershipPage,
    StreamMember,
)


async def list_members(connection: Any, scope: str, after: str, limit: int, settings: Settings) -> MemberPage:
    """A page of a stream's members."""
    if not all(map(record_queries.is_storable, (scope, after))):
        return MemberPage([], has_more=False)
    bounds = (lane_of_scope(scope, settings.lanes), scope, after, limit + 1)
    rows = await connection.fetch(SQL["member_page"], *bounds)
    return MemberPage.from_members([StreamMember.from_row(*row) for row in rows], limit)


async def list_memberships(connection: Any, member: str, prefix: str, after: str, limit: int) -> MembershipPage:
    """A page of a member's streams."""
    if not all(map(record_queries.is_storable, (member, prefix, after))):
        return MembershipPage([], has_more=False)
    bounds = (member, after, prefix, compute_prefix_end(prefix), limit + 1)
    rows = await connection.fetch(SQL["membership_page"], *bounds)
    return MembershipPage.from_memberships([Membership.from_row(*row) for row in rows], limit)


async def list_member_changes(connection: Any, lane: int, after: MemberCursor, limit: int) -> list[MemberChange]:
    """What has changed in a lane since."""
    return [MemberChange.from_row(*row) for row in await connection.fetch(SQL["member_changes"], lane, *after, limit)]
