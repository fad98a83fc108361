"""Fixtures of the crash tests."""

import pytest

from crash.scripted import RUN_KEYS
from oncelog.stores.sqlite import index, jobs, runs

pytest.register_assert_rewrite("crash.applications")


@pytest.fixture
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sealing and merging take several transactions although there are few keys."""
    monkeypatch.setattr(runs, "RUN_KEYS", RUN_KEYS)
    monkeypatch.setattr(jobs, "CLEARED_RUNS", 1)
    monkeypatch.setattr(index, "PACE", 0.8)
    monkeypatch.setattr(index, "FAN_OUT", 2)


@pytest.fixture
def early_merges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Merging begins after a few transactions."""
    monkeypatch.setattr(runs, "RUN_KEYS", RUN_KEYS)
    monkeypatch.setattr(jobs, "CLEARED_RUNS", 1)
    monkeypatch.setattr(index, "PACE", 1.0)
    monkeypatch.setattr(index, "FAN_OUT", 2)
