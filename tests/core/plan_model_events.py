"""Events in the history of the `plan` model."""

from typing import NamedTuple

from core.plan_model_rules import Leased
from oncelog.core.values import Acknowledge, Lease, Receipt, Role, SetCursor, SetMember, Submission


class Write(NamedTuple):
    """A submission that the batch with that number committed."""

    submission: Submission
    receipt: Receipt
    batch: int


class LeaseChange(NamedTuple):
    """A lease was granted, granted again, renewed or released. `is_new` marks a new fence."""

    item: Leased
    lane: int
    at_ms: int
    lease: Lease
    is_new: bool
    batch: int


class Touch(NamedTuple):
    """Side state in the lane changed."""

    lane: int
    at_ms: int
    batch: int


class Act(NamedTuple):
    """An audit record of a membership change was written."""

    lane: int
    position: int
    at_ms: int
    batch: int
    item: SetMember
    act: str
    target: str
    role: Role | None


Event = Write | LeaseChange | SetMember | Acknowledge | SetCursor | Touch | Act
"""Membership changes, acknowledgements and cursors are stored as the items that were applied."""
