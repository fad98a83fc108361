"""Reading members of streams, streams of members, and who of them has changed."""

from typing import Any

from oncelog.core.values import Settings
from oncelog.stores.postgres import reading
from oncelog.stores.postgres.statements import SQL
from oncelog.stores.protocol import (
    MemberChange,
    MemberPage,
    MemberPlace,
    Membership,
    MembershipPage,
    StreamMember,
)
from oncelog.stores.side_state import behind_prefix, lane_of_scope


async def members(connection: Any, scope: str, after: str, limit: int, settings: Settings) -> MemberPage:
    """A page of a stream's members."""
    if not all(map(reading.can_be_stored, (scope, after))):
        return MemberPage([], has_more=False)
    bounds = (lane_of_scope(scope, settings.lanes), scope, after, limit + 1)
    rows = await connection.fetch(SQL["member_page"], *bounds)
    return MemberPage.of([StreamMember.of(*row) for row in rows], limit)


async def memberships(connection: Any, member: str, prefix: str, after: str, limit: int) -> MembershipPage:
    """A page of a member's streams."""
    if not all(map(reading.can_be_stored, (member, prefix, after))):
        return MembershipPage([], has_more=False)
    bounds = (member, after, prefix, behind_prefix(prefix), limit + 1)
    rows = await connection.fetch(SQL["membership_page"], *bounds)
    return MembershipPage.of([Membership.of(*row) for row in rows], limit)


async def member_changes(connection: Any, lane: int, after: MemberPlace, limit: int) -> list[MemberChange]:
    """What has changed in a lane since."""
    return [MemberChange.of(*row) for row in await connection.fetch(SQL["member_changes"], lane, *after, limit)]
