"""Outcome of comparing one entry of side state with its rebuilt value."""

from enum import Enum


class ComparisonState(Enum):
    """Outcome without damage."""

    SAME = "same"
    ABSENT = "absent"
    """It expired, was forgotten or was dropped: its row may be there or not."""
    UNKNOWN = "unknown"
    """Records determine it whose content is not known."""


ComparisonOutcome = ComparisonState | str
"""A text says how the stored entry differs."""
