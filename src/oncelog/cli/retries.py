"""Repeated attempts of the commands that use a server: one loop with growing pauses for all of them."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from typing import Final, TypeVar

from oncelog.cli.remote import Remote, translate_connection_errors
from oncelog.cli.terminal import print_message
from oncelog.client.runtime import backoff
from oncelog.errors import LostError, OncelogError, ServerRefusedError

PAUSE_MS_MIN: Final = 100
PAUSE_MS_MAX: Final = 5000
T = TypeVar("T")


class GaveUpError(OncelogError):
    """No attempt was answered in time. The outcome of the request is unknown."""


class Retrier:
    """Repeats attempts that fail because of the connection or because the server asks for a later retry.

    With `timeout_s` each call of `run` ends after this time. Without it, `run` repeats attempts without end, but only
    once the server has been reached: call `mark_connected` as soon as it has. A wrong URL thus ends a command at once.
    Attempts without a time limit raise LostError themselves, because they may also write to standard output, whose
    errors are not those of the connection.
    """

    def __init__(
        self, remote: Remote, timeout_s: float | None = None, on_problem: Callable[[OncelogError], None] | None = None
    ) -> None:
        """Pass `on_problem` to be called for each failed attempt; the default reports the first one to the user."""
        self._remote = remote
        self._timeout_s = timeout_s
        self._on_problem = on_problem or self._report_problem
        self._pauses_s = _iterate_pauses_s()
        self._was_connected = False
        self._has_reported = False
        self.has_retried = False
        """Whether a request was sent again, so that an earlier attempt may have succeeded."""

    def mark_connected(self, message: str = "") -> None:
        """Restart the pauses. Print the message if an interruption was reported before."""
        if self._has_reported and message:
            print_message(message)
        self._was_connected, self._has_reported = True, False
        self._pauses_s = _iterate_pauses_s()

    async def run(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Return the result of the first attempt that succeeds.

        Raises:
            GaveUpError: no attempt succeeded in time.
            LostError: the server was never reached, and there is no time limit.
            ServerRefusedError: the server refused the request for good.
        """
        loop = asyncio.get_running_loop()
        deadline_s = None if self._timeout_s is None else loop.time() + self._timeout_s
        if deadline_s is not None:
            self._pauses_s = _iterate_pauses_s()
        problem: OncelogError | None = None
        while True:
            retry_after_s = 0.0
            try:
                if deadline_s is None:
                    return await attempt()
                with translate_connection_errors(self._remote):
                    async with asyncio.timeout_at(deadline_s):
                        return await attempt()
            except LostError as error:
                if deadline_s is None and not self._was_connected:
                    raise
                # The deadline says nothing about the server: an earlier problem is more useful to the user.
                if problem is None or not isinstance(error.__cause__, TimeoutError):
                    problem = error
            except ServerRefusedError as error:
                if not error.is_transient:
                    raise
                problem, retry_after_s = error, error.retry_after_ms / 1000
            pause_s = max(next(self._pauses_s), retry_after_s)
            if deadline_s is not None and loop.time() + pause_s >= deadline_s:
                raise GaveUpError(f"gave up after {self._timeout_s:g} s: {problem}")
            self.has_retried = True
            self._on_problem(problem)
            await asyncio.sleep(pause_s)

    def _report_problem(self, problem: OncelogError) -> None:
        if not self._has_reported:
            self._has_reported = True
            print_message(f"{problem}; trying again")


def _iterate_pauses_s() -> Iterator[float]:
    return backoff.iterate_pauses_s(PAUSE_MS_MIN, PAUSE_MS_MAX, random.Random())  # noqa: S311 - spreads retries
