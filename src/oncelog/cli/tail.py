"""`oncelog tail`: what a server's log has, and what comes to it."""

import asyncio
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import orjson
import typer
from msgspec import Raw, Struct

from oncelog.cli.remote import (
    DEFAULT_URL,
    ClientId,
    Connection,
    Partitions,
    Remote,
    Token,
    TokenFile,
    Url,
    as_foreign,
    client_of,
    connect,
    demand_partitions,
    pauses_s,
    refused_by,
    remote_of,
    say,
    while_somebody_reads,
)
from oncelog.cli.terminal import ending_well, printable
from oncelog.codes import HISTORY_CHANGED
from oncelog.errors import LostError, OncelogError, ServerRefusedError

if TYPE_CHECKING:
    import aiohttp

PAGE_EVENTS: Final = 500
NOW: Final = "now"


def tail(  # noqa: PLR0913, PLR0917 - each one is an option
    partition: Partitions = None,
    since: Annotated[
        str, typer.Option(metavar="N|now", help="Only what comes after this committed_id, or from now on.")
    ] = "0",
    limit: Annotated[int | None, typer.Option(metavar="N", min=1, help="Stop after that many events.")] = None,
    epoch: Annotated[str | None, typer.Option(help="The epoch that N is of; another one is an error.")] = None,
    as_json: Annotated[
        bool | None,
        typer.Option("--json/--pretty", help="An object a line, or a line for people, as is usual on a terminal."),
    ] = None,
    url: Url = DEFAULT_URL,
    token: Token = None,
    token_file: TokenFile = None,
    client_id: ClientId = None,
) -> None:
    """Prints the events of partitions: those that are there, then those that come, until it is interrupted.

    If the server goes away it comes back with its cursor: no event is lost, and none is shown twice. The exit status
    is 2 if the server cannot be reached at first, or has another history (epoch) now.

    Examples:

      oncelog tail --partition orders

      oncelog tail --partition orders --since now --json | jq .event
    """
    with ending_well():
        remote = remote_of(url, token, token_file)
        show = _json_line if (not sys.stdout.isatty() if as_json is None else as_json) else _pretty_line
        tailing = _Tail(remote, demand_partitions(partition), _since(since), epoch, limit, show)
        asyncio.run(_run(tailing, client_of(client_id, "tail")))


def _since(text: str) -> int | None:
    """None is now."""
    if text == NOW:
        return None
    if not text.isascii() or not text.isdecimal() or len(text) > 16 or int(text) >= 2**53:
        raise OncelogError(f"--since must be a committed_id or {NOW!r}, not {text!r}")
    return int(text)


async def _run(tailing: "_Tail", client_id: str) -> None:
    import aiohttp  # noqa: PLC0415 - what the library alone does not need

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
        await while_somebody_reads(tailing.run(session, client_id))


class _Page(Struct, frozen=True):
    events: list[Raw]
    next_since_committed_id: int
    has_more: bool


class _Numbered(Struct, frozen=True):
    committed_id: int


_PAGE: Final = msgspec.json.Decoder(_Page)
_NUMBERED: Final = msgspec.json.Decoder(_Numbered)


class _Tail:
    """A cursor, and all that is done to move it on."""

    def __init__(
        self,
        remote: Remote,
        partitions: Sequence[str],
        since: int | None,
        epoch: str | None,
        limit: int | None,
        show: Callable[[Raw], bytes],
    ) -> None:
        self._remote = remote
        self._partitions = partitions
        self._cursor = since
        self._epoch = epoch
        self._left = limit
        self._show = show
        self._was_connected = False

    async def run(self, session: "aiohttp.ClientSession", client_id: str) -> None:
        """Raises OncelogError where another connection would not help."""
        pauses = pauses_s()
        has_told = False
        while True:
            retry_after_s = 0.0
            try:
                async with await connect(session, self._remote, client_id) as connection:
                    self._demand_same_history(connection)
                    if has_told:
                        say(f"connected again, and going on after {self._cursor}")
                    self._was_connected, has_told, pauses = True, False, pauses_s()
                    await self._follow(connection)
                    return
            except LostError as error:
                if not self._was_connected:
                    raise
                problem: OncelogError = error
            except ServerRefusedError as error:
                if not error.is_transient:
                    raise self._explained(error) from error
                problem, retry_after_s = error, error.retry_after_ms / 1000
            if not has_told:
                has_told = True
                say(f"{problem}; trying again")
            await asyncio.sleep(max(next(pauses), retry_after_s))

    def _demand_same_history(self, connection: Connection) -> None:
        if self._epoch is not None and connection.epoch != self._epoch:
            raise OncelogError(
                f"the log has another history now: its epoch is {connection.epoch}, and was {self._epoch}. Drop what "
                "was read of events that it does not have, or read again from 0"
            )
        self._epoch = connection.epoch
        if self._cursor is None:
            self._cursor = connection.last_committed_id

    def _explained(self, error: ServerRefusedError) -> OncelogError:
        if error.code == HISTORY_CHANGED:
            return OncelogError(f"the log has another history than that of {self._cursor}: {error}")
        return error

    async def _follow(self, connection: Connection) -> None:
        """The pages that are there, then what is broadcast."""
        has_more = True
        while has_more and self._left != 0:
            await connection.send("sync", self._sync(), 1)
            message = await connection.receive()
            with as_foreign(self._remote):
                if message.type == "error":
                    raise refused_by(message.payload)
                page = _PAGE.decode(message.payload)
            self._take(page.events)
            # Those that are left out by --limit are not skipped for anybody: the command ends.
            self._cursor = max(self._cursor or 0, page.next_since_committed_id)
            has_more = page.has_more
        while self._left != 0:
            message = await connection.receive()
            if message.type == "event_broadcast":
                self._take([message.payload])

    def _sync(self) -> bytes:
        asked = {"partitions": self._partitions, "since_committed_id": self._cursor, "epoch": self._epoch}
        return orjson.dumps({**asked, "limit": PAGE_EVENTS if self._left is None else min(self._left, PAGE_EVENTS)})

    def _take(self, events: Sequence[Raw]) -> None:
        """Prints what is new. The cursor moves when it has been written, and never back."""
        output = sys.stdout.buffer
        for event in events:
            with as_foreign(self._remote):
                number = _NUMBERED.decode(event).committed_id
                line = self._show(event)
            if number <= (self._cursor or 0) or self._left == 0:
                continue
            output.write(line)
            self._cursor = number
            if self._left is not None:
                self._left -= 1
        output.flush()


# --- lines ------------------------------------------------------------------------------------------------


class _Event(Struct, frozen=True):
    committed_id: int
    partitions: list[str]
    event: dict[str, Raw] | None
    status_updated_at: int
    actor: str = "-"


_EVENT: Final = msgspec.json.Decoder(_Event)


def _json_line(event: Raw) -> bytes:
    return bytes(event) + b"\n"


def _pretty_line(raw: Raw) -> bytes:
    """Return `17  12:03:11  user:ada  orders  order.placed  {"order":17}`, with the time in UTC.

    Control characters are escaped. The actor is `-` if the server does not show it.
    """
    event = _EVENT.decode(raw)
    time = "--:--:--"
    with suppress(OverflowError, OSError, ValueError):
        time = datetime.fromtimestamp(event.status_updated_at / 1000, UTC).strftime("%H:%M:%S")
    kind, rest = "(erased)", ""
    if event.event is not None:
        kind = str(msgspec.json.decode(event.event.pop("type", Raw(b'""'))))
        rest = "{" + ",".join(f"{orjson.dumps(name).decode()}:{_text(one)}" for name, one in event.event.items()) + "}"
    columns = [str(event.committed_id), time, event.actor, ",".join(event.partitions), kind, rest]
    return (printable("  ".join(columns)).rstrip() + "\n").encode()


def _text(raw: Raw) -> str:
    return bytes(raw).decode()
