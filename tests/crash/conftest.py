"""Fixtures of the crash tests."""

import pytest

from crash.scripted_workload import RUN_KEYS
from oncelog.storage.sqlite.key_index import index, key_run, segments

pytest.register_assert_rewrite("crash.applications")


@pytest.fixture
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spread sealing and merging over several transactions, even with few keys."""
    monkeypatch.setattr(key_run, "RUN_KEYS", RUN_KEYS)
    monkeypatch.setattr(segments, "CLEAR_RUNS", 1)
    monkeypatch.setattr(index, "WORK_FACTOR", 0.8)
    monkeypatch.setattr(index, "FAN_OUT", 2)


@pytest.fixture
def early_merges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin merging after a few transactions."""
    monkeypatch.setattr(key_run, "RUN_KEYS", RUN_KEYS)
    monkeypatch.setattr(segments, "CLEAR_RUNS", 1)
    monkeypatch.setattr(index, "WORK_FACTOR", 1.0)
    monkeypatch.setattr(index, "FAN_OUT", 2)
