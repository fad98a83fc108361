"""Members of a stream, and how far each has received it."""

from oncelog.core.desk import Desk
from oncelog.core.values import Acknowledge, Applied, OpenStream, Reason, Refused, SetMember


def not_a_member(scope: str, actor: str, desk: Desk) -> Refused | None:
    """The same answer whether the stream exists or not: a stranger learns nothing."""
    if desk.members.get((scope, actor)):
        return None
    return Refused(Reason.NOT_A_MEMBER, "only members of the stream may do this")


def open_stream(item: OpenStream, desk: Desk) -> Applied | Refused:
    """Makes a stream with its first member. Of two who make it at once one does, and the other is a stranger to it."""
    if desk.streams.get(item.scope) is None:
        return set_member(SetMember(item.scope, item.member), desk)
    return not_a_member(item.scope, item.member, desk) or Applied(changed=False)


def set_member(item: SetMember, desk: Desk) -> Applied | Refused:
    """Adds or removes a member; doing it twice changes nothing. A stream has been opened when it has a member."""
    if item.actor:
        refused = not_a_member(item.scope, item.actor, desk)
        if refused is not None:
            return refused
    identity = (item.scope, item.member)
    if bool(desk.members.get(identity)) == item.present:
        return Applied(changed=False)
    desk.members.put(identity, True if item.present else None)
    acknowledged = desk.acknowledged.get(identity) if item.present else None
    if acknowledged:
        # Whoever comes back has received what he had. It is put again so that those who follow members hear of it.
        desk.acknowledged.put(identity, acknowledged)
    if desk.streams.get(item.scope) is None:
        # It stays when the last member has gone: nobody else can make it anew and read what is in it.
        desk.streams.put(item.scope, 0)
    desk.stream_lane(item.scope).touch()
    return Applied(changed=True)


def acknowledge(item: Acknowledge, desk: Desk) -> Applied | Refused:
    """Moves a member's watermark forward, never back and never beyond the stream."""
    refused = not_a_member(item.scope, item.member, desk)
    if refused is not None:
        return refused
    last = desk.streams.get(item.scope) or 0
    if not 0 <= item.sequence <= last:
        return Refused(
            Reason.INVALID_ACKNOWLEDGEMENT,
            f"sequence {item.sequence} is not in the stream, which ends at {last}",
            field="sequence",
            current=last,
        )
    identity = (item.scope, item.member)
    if item.sequence <= (desk.acknowledged.get(identity) or 0):
        return Applied(changed=False)
    desk.acknowledged.put(identity, item.sequence)
    desk.stream_lane(item.scope).touch()
    return Applied(changed=True)
