"""A load test: its connections, its pacer and its progress on standard error."""

import asyncio
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import Final

import typer

from oncelog.cli.load.pacer import Pacer
from oncelog.cli.load.plan import LoadPlan
from oncelog.cli.load.sender import Sender, Turn
from oncelog.cli.load.tally import Tally
from oncelog.cli.server_options import Remote
from oncelog.client.runtime.backoff import run_until_first_ends

GRACE_S: Final = 10.0
"""How long the command waits for outstanding answers after the test. Events that are still unanswered count as lost."""
REPORT_INTERVAL_S: Final = 1.0
LIVE_REPORT_INTERVAL_S: Final = 0.25


class LoadRunner:
    """Runs a plan against a server."""

    def __init__(self, remote: Remote, client_id: str | None, plan: LoadPlan) -> None:
        self._remote = remote
        self._client_id = client_id
        self._plan = plan
        self._tally = Tally(plan, perf_counter)
        self._senders: list[Sender] = []
        self._pacer: Pacer

    async def run(self) -> Tally:
        """Run the test. Raises OncelogError if a connection cannot be opened."""
        for number in range(self._plan.connections):
            finish = partial(self._finish, number)
            self._senders.append(Sender(self._remote, self._client_id, self._plan, self._tally, perf_counter, finish))
        connections = asyncio.gather(*(sender.run() for sender in self._senders))
        await run_until_first_ends([connections, self._run_plan()])
        return self._tally

    async def _run_plan(self) -> None:
        """Start when all connections are open, so that the latencies do not include opening them."""
        await asyncio.gather(*(sender.wait_connected() for sender in self._senders))
        self._tally.start()
        self._pacer = self._plan.create_pacer(self._send, self._tally.start_s, perf_counter)
        with _open_display() as (interval_s, show):
            await run_until_first_ends([self._pacer.run(), self._report_progress(interval_s, show)])
        self._tally.end(self._pacer)

    def _send(self, connection: int, start_s: float) -> None:
        self._senders[connection].send(Turn(start_s, self._pacer.last_send_s + GRACE_S))

    def _finish(self, connection: int) -> None:
        self._pacer.finish(connection)

    async def _report_progress(self, interval_s: float, show: Callable[[str], None]) -> None:
        tally, pacer = self._tally, self._pacer
        before, before_s = 0, tally.start_s
        while True:
            await asyncio.sleep(interval_s)
            now_s, committed = perf_counter(), tally.committed
            rate = (committed - before) / (now_s - before_s)
            recent = tally.take_recent_latencies()
            unsent = f"  unsent {self._plan.batch * pacer.unsent}" if self._plan.rate is not None else ""
            show(
                f"{now_s - tally.start_s:5.1f} of {self._plan.seconds:g} s  {committed:>9} events  {rate:>7.0f}/s  "
                f"p50 {_format_ms(recent.compute_percentile_s(0.5))}  "
                f"p99 {_format_ms(recent.compute_percentile_s(0.99))}  "
                f"errors {sum(tally.errors.values())}{unsent}"
            )
            before, before_s = committed, now_s


def _format_ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.1f} ms"


@contextmanager
def _open_display() -> Iterator[tuple[float, Callable[[str], None]]]:
    """Yield the interval between reports, and a function that shows one in a live display or as a line."""
    if not sys.stderr.isatty():
        yield REPORT_INTERVAL_S, partial(typer.echo, err=True)
        return
    from rich.console import Console  # noqa: PLC0415 - slow to import; typer depends on it
    from rich.live import Live  # noqa: PLC0415

    with Live(console=Console(stderr=True), auto_refresh=False, transient=True) as live:
        yield LIVE_REPORT_INTERVAL_S, lambda line: live.update(line, refresh=True)
