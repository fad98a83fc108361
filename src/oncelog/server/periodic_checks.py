"""Periodic checks of a server: rights of connections, idle connections, and summaries in the log."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Final

logger: Final = logging.getLogger("oncelog.doors")

RENEW_S: Final = 1.0
"""How often the checks run."""


class PeriodicChecks:
    """Runs checks in a task. The failure of one of them does not affect the others."""

    def __init__(self, list_checks: Callable[[], Sequence[Callable[[], object]]]) -> None:
        self._list_checks = list_checks
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Run the checks about once a second from now on."""
        self._task = asyncio.get_running_loop().create_task(self._run_periodically())

    def stop(self) -> None:
        """Run no more checks."""
        if self._task is not None:
            self._task.cancel()

    async def _run_periodically(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            self.run()

    def run(self) -> None:
        """Run all checks now."""
        for check in self._list_checks():
            try:
                check()
            except Exception:
                logger.exception("a periodic check failed")
