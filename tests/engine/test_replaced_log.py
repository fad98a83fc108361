"""A log does not answer from memory after its file or its history was replaced."""

import asyncio
import shutil
from pathlib import Path

import pytest

from cli.server_process import oncelog
from databases import BOTH_STORES, is_postgres, log_at
from deadlines import until
from oncelog.core.values import Replayed
from oncelog.engine import answer_cache
from oncelog.engine.log import open_log
from oncelog.errors import LogReplacedError
from oncelog.testing.contract.writes import event


def replace_history(place: str) -> None:
    """Renew the epoch, as an operator does after a restore with other tools."""
    if is_postgres():
        assert oncelog("epoch", place, "--renew").returncode == 0
        return
    Path(shutil.copy(place, f"{place}.copy")).replace(place)


@BOTH_STORES
@pytest.mark.rule("CO-12", "CO-40")
async def test_retry_is_not_answered_from_memory_after_the_log_was_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer_cache, "ERASURES_POLL_MS", 10)
    place = log_at(tmp_path / "log.db")
    async with open_log(place) as log:
        await log.submit(event(1))
        assert isinstance(await log.submit(event(1)), Replayed)
        await asyncio.to_thread(replace_history, place)
        await until(lambda: log._cache.is_empty)
        with pytest.raises(LogReplacedError):
            await log.submit(event(1))
        with pytest.raises(LogReplacedError):
            await log.heads()


@BOTH_STORES
@pytest.mark.rule("CO-12", "CO-40")
async def test_failed_commit_drops_the_answers_of_the_replaced_history(tmp_path: Path) -> None:
    place = log_at(tmp_path / "log.db")
    async with open_log(place) as log:
        await log.submit(event(1))
        await asyncio.to_thread(replace_history, place)
        with pytest.raises(LogReplacedError):
            await log.submit(event(2))
        with pytest.raises(LogReplacedError):
            await log.submit(event(1))
