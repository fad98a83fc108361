"""Members of a stream, and how far each has received it."""

from oncelog.core.desk import Desk
from oncelog.core.values import Acknowledge, Applied, Reason, Refused, SetMember


def not_a_member(scope: str, actor: str, desk: Desk) -> Refused | None:
    """The same answer whether the stream exists or not: a stranger learns nothing."""
    if desk.members.get((scope, actor)):
        return None
    return Refused(Reason.NOT_A_MEMBER, "only members of the stream may do this")


def set_member(item: SetMember, desk: Desk) -> Applied:
    """Adds or removes a member; doing it twice changes nothing."""
    identity = (item.scope, item.member)
    if bool(desk.members.get(identity)) == item.present:
        return Applied(changed=False)
    desk.members.put(identity, True if item.present else None)
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
