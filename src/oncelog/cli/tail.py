"""`oncelog tail`: print a server's stored events, then new ones."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Annotated, Final

import msgspec
import typer
from msgspec import Raw, Struct

from oncelog.cli.output import Style, format_columns
from oncelog.cli.remote import (
    AsJsonLines,
    ClientId,
    CursorPrinter,
    EventsConnection,
    Partitions,
    Retrier,
    check_client_id,
    check_text,
    connect,
    open_client,
    run_while_output_open,
    translate_decode_errors,
)
from oncelog.cli.server_options import Remote, uses_server_as_client
from oncelog.client.events.codec import encode_sync
from oncelog.errors import OncelogError, ServerRefusedError

PAGE_EVENTS: Final = 500
NOW: Final = "now"
LINE_STYLES: Final[Sequence[Style]] = ("dim", "dim", "", "", "heading")
_SYNC_ID: Final = "sync"


@uses_server_as_client
def tail(
    *,
    partition: Partitions = None,
    since: Annotated[
        str, typer.Option(metavar="N|now", help="Only events after this committed_id, or from now on.")
    ] = "0",
    limit: Annotated[int | None, typer.Option(metavar="N", min=1, help="Stop after N events.")] = None,
    epoch: Annotated[
        str | None, typer.Option(help="Epoch of the --since value; the command fails if the log has a different one.")
    ] = None,
    as_json: AsJsonLines = None,
    remote: Remote,
    client_id: ClientId = None,
) -> None:
    """Print the stored events of partitions, then new ones, until interrupted.

    The command waits for a server that has not started yet. After a lost connection it reconnects with its cursor: no
    event is lost, and none is shown twice. The exit status is 2 if the server refuses the request, is at an unknown
    host, or has a different history (epoch).

    Examples:

      oncelog tail --partition orders

      oncelog tail --partition orders --since now --json | jq .event
    """
    printer = CursorPrinter(
        remote, _parse_since(since), limit, number_name="committed_id", as_json=as_json, format_line=_format_line
    )
    if not partition:
        raise OncelogError("--partition must be given at least once")
    partitions = [check_text(name, "--partition") for name in partition]
    asyncio.run(_run_tail(remote, check_client_id(client_id), partitions, epoch, printer))


def _parse_since(text: str) -> int | None:
    """Parse the --since option. Return None for `now`."""
    if text == NOW:
        return None
    if not text.isascii() or not text.isdecimal() or len(text) > 16 or int(text) >= 2**53:
        raise OncelogError(f"--since must be a committed_id or {NOW!r}, not {text!r}")
    return int(text)


class _EventPage(Struct, frozen=True):
    events: list[Raw]
    next_since_committed_id: int
    has_more: bool


async def _run_tail(
    remote: Remote, client_id: str | None, partitions: Sequence[str], epoch: str | None, printer: CursorPrinter
) -> None:
    """Follow partitions up to the limit and reconnect as needed. Raises OncelogError if reconnecting would not help."""
    retrier = Retrier(remote, waits_for_server=True)

    async def run_connection() -> None:
        nonlocal epoch
        async with connect(client, remote, client_id) as connection:
            hello = connection.hello
            if epoch is not None and hello.epoch != epoch:
                raise OncelogError(
                    f"the log's history has changed: its epoch is {hello.epoch}, but was {epoch}. Drop events "
                    "that it does not have, or read again from 0"
                )
            epoch = hello.epoch
            if printer.cursor is None:
                printer.cursor = hello.server_last_committed_id
            retrier.mark_connected(f"reconnected; continuing after {printer.cursor}")
            await _print_events(connection, remote, partitions, epoch, printer)

    async with open_client(remote) as client:
        try:
            await run_while_output_open(retrier.run(run_connection))
        except ServerRefusedError as error:
            raise printer.explain(error) from error


async def _print_events(
    connection: EventsConnection, remote: Remote, partitions: Sequence[str], epoch: str, printer: CursorPrinter
) -> None:
    """Print the stored pages, then the broadcasts."""
    has_more = True
    while has_more and printer.remaining != 0:
        limit = printer.compute_page_size(PAGE_EVENTS)
        await connection.socket.send(encode_sync(partitions, printer.cursor or 0, limit, epoch, _SYNC_ID))
        message = await connection.receive(_SYNC_ID)
        with translate_decode_errors(remote):
            page = msgspec.json.decode(message.payload, type=_EventPage)
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


def _format_line(raw: Raw) -> bytes:
    """Format an event as `17  12:03:11  user:ada  orders  order.placed  {"order":17}`, with the time in UTC.

    Control characters are escaped. The actor is `-` if the server does not reveal it.
    """
    event = msgspec.json.decode(raw, type=_Event)
    time = "--:--:--"
    with suppress(OverflowError, OSError, ValueError):
        time = datetime.fromtimestamp(event.status_updated_at / 1000, UTC).strftime("%H:%M:%S")
    kind, rest = "(erased)", ""
    if event.event is not None:
        kind = str(msgspec.json.decode(event.event.pop("type", Raw(b'""'))))
        rest = msgspec.json.encode(event.event).decode()
    return format_columns(
        [str(event.committed_id), time, event.actor, ",".join(event.partitions), kind, rest], LINE_STYLES
    )
