"""Events of a history, as the model of `plan` keeps them."""

from typing import NamedTuple

from core.plan_model_rules import Leased
from oncelog.core.values import Acknowledge, Lease, Receipt, Role, SetCursor, SetMember, Submission


class Write(NamedTuple):
    """A submission was committed, in the batch of that number."""

    submission: Submission
    receipt: Receipt
    batch: int


class LeaseChange(NamedTuple):
    """A lease was granted (`is_new`: under a new number), granted again, renewed or released."""

    item: Leased
    lane: int
    at_ms: int
    lease: Lease
    is_new: bool
    batch: int


class Touch(NamedTuple):
    """Side state in the lane was changed."""

    lane: int
    at_ms: int
    batch: int


class Act(NamedTuple):
    """An audit record of a change of members."""

    lane: int
    position: int
    at_ms: int
    batch: int
    item: SetMember
    act: str
    target: str
    role: Role | None


Event = Write | LeaseChange | SetMember | Acknowledge | SetCursor | Touch | Act
"""Members, acknowledgements and cursors are kept as the items that were applied."""
