"""`oncelog tail`: the stored and the new events of a server."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Annotated, Final

import msgspec
import orjson
import typer
from msgspec import Raw, Struct

from oncelog.cli.remote import (
    AsJsonLines,
    ClientId,
    CursorPrinter,
    EventsConnection,
    Partitions,
    Remote,
    Retrier,
    check_partitions,
    choose_client_id,
    connect,
    open_client,
    run_while_output_open,
    translate_decode_errors,
    uses_server,
)
from oncelog.cli.terminal import format_columns
from oncelog.client.events.codec import Connected, encode_sync
from oncelog.client.runtime.http import HttpClient
from oncelog.errors import OncelogError, ServerRefusedError

PAGE_EVENTS: Final = 500
NOW: Final = "now"
_SYNC_ID: Final = "sync"


@uses_server
def tail(
    *,
    partition: Partitions = None,
    since: Annotated[
        str, typer.Option(metavar="N|now", help="Only events after this committed_id, or from now on.")
    ] = "0",
    limit: Annotated[int | None, typer.Option(metavar="N", min=1, help="Stop after this number of events.")] = None,
    epoch: Annotated[str | None, typer.Option(help="Epoch of N; the command fails if the log has another one.")] = None,
    as_json: AsJsonLines = None,
    remote: Remote,
    client_id: ClientId = None,
) -> None:
    """Print the stored events of partitions, then new ones, until interrupted.

    After a lost connection the command reconnects with its cursor: no event is lost, and none is shown twice. The exit
    status is 2 if the server cannot be reached at first, or has another history (epoch).

    Examples:

      oncelog tail --partition orders

      oncelog tail --partition orders --since now --json | jq .event
    """
    printer = CursorPrinter(
        remote, _parse_since(since), limit, number_name="committed_id", as_json=as_json, format_line=_format_line
    )
    tailing = _TailFollower(remote, check_partitions(partition), epoch, printer)
    asyncio.run(tailing.run(choose_client_id(client_id, "tail")))


def _parse_since(text: str) -> int | None:
    """Return the number of the option --since; None for `now`."""
    if text == NOW:
        return None
    if not text.isascii() or not text.isdecimal() or len(text) > 16 or int(text) >= 2**53:
        raise OncelogError(f"--since must be a committed_id or {NOW!r}, not {text!r}")
    return int(text)


class _EventPage(Struct, frozen=True):
    events: list[Raw]
    next_since_committed_id: int
    has_more: bool


_PAGE_DECODER: Final = msgspec.json.Decoder(_EventPage)


class _TailFollower:
    """Follows partitions, and reconnects."""

    def __init__(self, remote: Remote, partitions: Sequence[str], epoch: str | None, printer: CursorPrinter) -> None:
        self._remote = remote
        self._partitions = partitions
        self._epoch = epoch
        self._printer = printer
        self._retrier = Retrier(remote)

    async def run(self, client_id: str) -> None:
        """Follow until the limit. Raises OncelogError if a reconnection would not help."""
        async with open_client(self._remote) as client:
            try:
                await run_while_output_open(self._retrier.run(lambda: self._run_connection(client, client_id)))
            except ServerRefusedError as error:
                raise self._printer.explain(error) from error

    async def _run_connection(self, client: HttpClient, client_id: str) -> None:
        async with connect(client, self._remote, client_id) as connection:
            self._check_history(connection.hello)
            self._retrier.mark_connected(f"connected again; continuing after {self._printer.cursor}")
            await self._follow(connection)

    def _check_history(self, hello: Connected) -> None:
        if self._epoch is not None and hello.epoch != self._epoch:
            raise OncelogError(
                f"the log has another history now: its epoch is {hello.epoch}, and was {self._epoch}. Drop events "
                "that it does not have, or read again from 0"
            )
        self._epoch = hello.epoch
        if self._printer.cursor is None:
            self._printer.cursor = hello.server_last_committed_id

    async def _follow(self, connection: EventsConnection) -> None:
        """Print the stored pages, then the broadcasts."""
        printer, has_more = self._printer, True
        while has_more and printer.remaining != 0:
            limit = printer.compute_page_size(PAGE_EVENTS)
            await connection.send(
                encode_sync(self._partitions, printer.cursor or 0, limit, self._epoch or "", _SYNC_ID)
            )
            message = await connection.receive(_SYNC_ID)
            with translate_decode_errors(self._remote):
                page = _PAGE_DECODER.decode(message.payload)
            printer.print(page.events)
            printer.advance(page.next_since_committed_id)
            has_more = page.has_more
        while printer.remaining != 0:
            message = await connection.receive()
            if message.type == "event_broadcast":
                printer.print([message.payload])


# --- lines ------------------------------------------------------------------------------------------------


class _Event(Struct, frozen=True):
    committed_id: int
    partitions: list[str]
    event: dict[str, Raw] | None
    status_updated_at: int
    actor: str = "-"


_EVENT_DECODER: Final = msgspec.json.Decoder(_Event)


def _format_line(raw: Raw) -> bytes:
    """Return `17  12:03:11  user:ada  orders  order.placed  {"order":17}`, with the time in UTC.

    Control characters are escaped. The actor is `-` if the server does not show it.
    """
    event = _EVENT_DECODER.decode(raw)
    time = "--:--:--"
    with suppress(OverflowError, OSError, ValueError):
        time = datetime.fromtimestamp(event.status_updated_at / 1000, UTC).strftime("%H:%M:%S")
    kind, rest = "(erased)", ""
    if event.event is not None:
        kind = str(msgspec.json.decode(event.event.pop("type", Raw(b'""'))))
        rest = (
            "{"
            + ",".join(f"{orjson.dumps(name).decode()}:{bytes(value).decode()}" for name, value in event.event.items())
            + "}"
        )
    columns = [str(event.committed_id), time, event.actor, ",".join(event.partitions), kind, rest]
    return format_columns(columns)
