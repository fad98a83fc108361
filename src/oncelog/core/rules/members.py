"""Stream members with their roles and acknowledgements, and the cursors of named consumers.

A stream with members has at least one owner. Owners add and remove members and set roles. The first member is an owner.
When the last owner leaves or is removed, the oldest member is promoted to owner. In a stream created before roles
existed, `Roster.owners` is `None` and every member acts as an owner until one is appointed.
"""

from msgspec import Struct
from msgspec.structs import replace

from oncelog.core.batch_state import BatchState
from oncelog.core.canonical import canonical
from oncelog.core.rules.audit import (
    APPLICATION_ACTOR,
    MEMBER_ADDED,
    MEMBER_REMOVED,
    MEMBER_ROLE_CHANGED,
    append_act,
    check_act_quota,
)
from oncelog.core.rules.quotas import can_be_known_only, count_in_stream, count_member, is_charged, take_tokens
from oncelog.core.values import (
    NOT_KNOWN,
    Acknowledge,
    Applied,
    Member,
    OpenStream,
    Reason,
    RecordAct,
    Refused,
    Role,
    Roster,
    SetCursor,
    SetMember,
)


class _RosterChange(Struct, frozen=True):
    """A membership change and its audit record."""

    member: Member | None
    """None removes the member."""
    roster: Roster
    act: RecordAct


def check_member(scope: str, actor: str, state: BatchState) -> Refused | None:
    """Refuse an actor that is not a member. The answer does not reveal whether the stream exists."""
    if state.members.get((scope, actor)):
        return None
    return Refused(Reason.NOT_A_MEMBER, "only members of the stream may do this")


def get_effective_role(member: Member, roster: Roster) -> Role:
    """Return the effective role of a member."""
    return Role.OWNER if member.is_owner or roster.owners is None else Role.MEMBER


def open_stream(item: OpenStream, state: BatchState) -> Applied | Refused:
    """Create a stream with its first member. If two clients create it at the same time, the second does not become a
    member."""
    if state.streams.get(item.scope) is not None:
        return check_member(item.scope, item.member, state) or Applied(changed=False)
    # The creator is the actor, although it is not yet a member.
    creator = SetMember(item.scope, item.member, actor=item.member)
    change = _build_addition(creator, state.rosters.get(item.scope) or Roster())
    return _admit(item, change, state)


def set_member(item: SetMember, state: BatchState) -> Applied | Refused:
    """Add or remove a member, or set its role. A repeated request changes nothing."""
    if (refused := _check_actor(item, state)) is not None:
        return refused
    member = state.members.get((item.scope, item.member))
    roster = state.rosters.get(item.scope) or Roster()
    if member is not None and item.present:
        return _set_role(item, member, roster, state)
    if item.present and item.only_if_member:
        return Refused(Reason.NOT_A_MEMBER, "the user is not a member of the stream; add it first", field="member")
    if item.present:
        return _admit(item, _build_addition(item, roster), state)
    if member is not None:
        # No limit refuses a removal, because every member may leave. Its audit record still counts towards usage.
        _remove(item, member, roster, state)
    return Applied(changed=member is not None)


def _check_actor(item: SetMember, state: BatchState) -> Refused | None:
    """Refuse a caller that may not make the change. Owners may change members, and every member may leave.

    A request without an actor comes from the application. A retry is accepted even if the actor gave up its right in
    the first request, by leaving or giving up its role. A user that leaves without being a member gets the same answer
    whether or not the stream exists.
    """
    is_leaving = item.actor == item.member and not item.present
    if not item.actor or (is_leaving and not state.members.get((item.scope, item.actor))):
        return None
    if (refused := check_member(item.scope, item.actor, state)) is not None:
        return refused
    is_own = item.actor == item.member and item.role is not Role.OWNER
    actor = state.members.get((item.scope, item.actor))
    roster = state.rosters.get(item.scope) or Roster()
    if is_own or (actor is not None and get_effective_role(actor, roster) is Role.OWNER):
        return None
    return Refused(Reason.NOT_AN_OWNER, "only owners of the stream may change its members", field="actor")


def _build_addition(item: SetMember, roster: Roster) -> _RosterChange:
    is_owner = item.role is Role.OWNER or roster.members == 0
    roster = replace(roster, members=roster.members + 1, joined=roster.joined + 1)
    roster = _add_owners(roster, 1) if is_owner else roster
    return _build_change(MEMBER_ADDED, item, Member(roster.joined, is_owner), roster)


def _remove(item: SetMember, member: Member, roster: Roster, state: BatchState) -> None:
    roster = replace(roster, members=roster.members - 1)
    roster = _add_owners(roster, -1) if member.is_owner else roster
    _put_change(_build_change(MEMBER_REMOVED, item, None, roster), state)
    if roster.owners == 0 and roster.members:
        name, heir = _find_oldest_member(item.scope, state)
        promotion = SetMember(item.scope, name, actor=item.actor, role=Role.OWNER)
        heir = replace(heir, is_owner=True)
        _put_change(_build_change(MEMBER_ROLE_CHANGED, promotion, heir, _add_owners(roster, 1)), state)


def _set_role(item: SetMember, member: Member, roster: Roster, state: BatchState) -> Applied | Refused:
    if item.role is None:
        return Applied(changed=False)
    is_owner = item.role is Role.OWNER
    if not is_owner and (roster.owners is None or (member.is_owner and roster.owners == 1)):
        return Refused(
            Reason.LAST_OWNER, "the stream would have no owner; make another member an owner first", field="role"
        )
    if member.is_owner is is_owner:
        return Applied(changed=False)
    roster = _add_owners(roster, 1 if is_owner else -1)
    change = _build_change(MEMBER_ROLE_CHANGED, item, replace(member, is_owner=is_owner), roster)
    return _admit(item, change, state)


def _add_owners(roster: Roster, change: int) -> Roster:
    return replace(roster, owners=(roster.owners or 0) + change)


def _find_oldest_member(scope: str, state: BatchState) -> tuple[str, Member]:
    """Return the member that joined first. The read set loads enough of the oldest members (`ReadSet.oldest`)."""
    known = [(name, member) for (stream, name), member in state.members.items() if stream == scope and member]
    return min(known, key=lambda one: one[1].joined)


def _build_change(act: str, item: SetMember, member: Member | None, roster: Roster) -> _RosterChange:
    recorded = RecordAct(
        act=act,
        actor=item.actor or APPLICATION_ACTOR,
        scope=item.scope,
        target=item.member,
        details=canonical({} if member is None else {"role": get_effective_role(member, roster).value}),
    )
    return _RosterChange(member, roster, recorded)


def _admit(item: OpenStream | SetMember, change: _RosterChange, state: BatchState) -> Applied | Refused:
    """Apply an added member or a new role, unless a limit on new writes refuses it.

    The caller has checked that the item changes something.
    """
    if item.known_only and can_be_known_only(item):
        return NOT_KNOWN
    added = (item.scope, item.member) if change.act.act == MEMBER_ADDED else None
    refused = check_act_quota(change.act, state, added)
    if refused is None and isinstance(item, OpenStream):
        refused = take_tokens(item, state)  # last, because it takes a token
    if refused is not None:
        return refused
    if added is not None:
        count_member(added, state)
    if is_charged(change.act.actor):
        count_in_stream(change.act.scope, state, takes_token=True)
    return _put_change(change, state)


def _put_change(change: _RosterChange, state: BatchState) -> Applied:
    """Store a membership change and its audit record (CO-43). Additions, removals and role changes all use this
    function."""
    scope = change.act.scope
    identity = (scope, change.act.target)
    state.members.put(identity, change.member)
    state.rosters.put(scope, change.roster)
    acknowledged = None if change.member is None else state.acknowledged.get(identity)
    if acknowledged:
        # A returning member keeps its acknowledgement. Store it again, so that listeners for membership changes receive
        # it.
        state.acknowledged.put(identity, acknowledged)
    if state.streams.get(scope) is None:
        # The entry is kept after the last member leaves, so that no other user can open the stream and read its
        # records.
        state.streams.put(scope, 0)
    append_act(change.act, state.get_stream_lane(scope), state)
    return Applied(changed=True)


def acknowledge(item: Acknowledge, state: BatchState) -> Applied | Refused:
    """Move a member's acknowledgement forward, at most to the end of the stream."""
    if (refused := check_member(item.scope, item.member, state)) is not None:
        return refused
    last = state.streams.get(item.scope) or 0
    if not 0 <= item.sequence <= last:
        return Refused(
            Reason.INVALID_ACKNOWLEDGEMENT,
            f"sequence {item.sequence} is out of range: the stream ends at {last}",
            field="sequence",
            current=last,
        )
    identity = (item.scope, item.member)
    if item.sequence <= (state.acknowledged.get(identity) or 0):
        return Applied(changed=False)
    state.acknowledged.put(identity, item.sequence)
    state.get_stream_lane(item.scope).is_touched = True
    return Applied(changed=True)


def set_cursor(item: SetCursor, state: BatchState) -> Applied | Refused:
    """Store a named consumer's cursor. It cannot exceed the newest number and moves back only with `rewind`."""
    identity = (item.scope, item.consumer)
    lane = state.get_stream_lane(item.scope)
    newest = (state.streams.get(item.scope) or 0) if item.scope else lane.position
    if item.cursor is not None and not 0 <= item.cursor <= newest:
        return Refused(
            Reason.INVALID_CURSOR,
            f"cursor must be from 0 to {newest} (the newest), not {item.cursor}",
            "cursor",
            newest,
        )
    stored = state.consumers.get(identity)
    is_behind = item.cursor is not None and stored is not None and item.cursor < stored
    if item.cursor == stored or (is_behind and not item.rewind):
        return Applied(changed=False)
    state.consumers.put(identity, item.cursor)
    lane.is_touched = True
    return Applied(changed=True)
