"""Assertions about verdicts, for the contract tests."""

# ruff: noqa: S101 - tests consist of assertions

from oncelog.core.values import Committed, Reason, Receipt, Refused, Replayed, Verdict


def assert_committed(verdict: Verdict) -> Receipt:
    """Assert that a submission was committed and return its receipt."""
    assert isinstance(verdict, Committed), verdict
    return verdict.receipt


def assert_replayed(verdict: Verdict) -> Replayed:
    """Assert that a submission was replayed."""
    assert isinstance(verdict, Replayed), verdict
    return verdict


def assert_refused(verdict: Verdict, reason: Reason) -> Refused:
    """Assert that an item was refused for a reason."""
    assert isinstance(verdict, Refused), verdict
    assert verdict.reason is reason, verdict
    return verdict
