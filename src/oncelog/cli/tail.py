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
    EventsConnection,
    Partitions,
    Remote,
    Token,
    TokenFile,
    Url,
    build_remote,
    check_partitions,
    choose_client_id,
    connect,
    decode_refusal,
    run_while_output_open,
    translate_decode_errors,
)
from oncelog.cli.retries import Retrier
from oncelog.cli.terminal import escape_unprintable, translate_errors
from oncelog.error_codes import HISTORY_CHANGED
from oncelog.errors import OncelogError, ServerRefusedError

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
    with translate_errors():
        remote = build_remote(url, token, token_file)
        show = _encode_json_line if (not sys.stdout.isatty() if as_json is None else as_json) else _format_line
        tailing = _TailFollower(remote, check_partitions(partition), _parse_since(since), epoch, limit, show)
        asyncio.run(_run_tail(tailing, choose_client_id(client_id, "tail")))


def _parse_since(text: str) -> int | None:
    """None is now."""
    if text == NOW:
        return None
    if not text.isascii() or not text.isdecimal() or len(text) > 16 or int(text) >= 2**53:
        raise OncelogError(f"--since must be a committed_id or {NOW!r}, not {text!r}")
    return int(text)


async def _run_tail(follower: "_TailFollower", client_id: str) -> None:
    import aiohttp  # noqa: PLC0415 - what the library alone does not need

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
        await run_while_output_open(follower.run(session, client_id))


class _EventPage(Struct, frozen=True):
    events: list[Raw]
    next_since_committed_id: int
    has_more: bool


class _NumberedEvent(Struct, frozen=True):
    committed_id: int


_PAGE_DECODER: Final = msgspec.json.Decoder(_EventPage)
_NUMBERED_DECODER: Final = msgspec.json.Decoder(_NumberedEvent)


class _TailFollower:
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
        self._remaining = limit
        self._show = show
        self._retrier = Retrier(remote)

    async def run(self, session: "aiohttp.ClientSession", client_id: str) -> None:
        """Raises OncelogError where another connection would not help."""
        try:
            await self._retrier.run(lambda: self._run_connection(session, client_id))
        except ServerRefusedError as error:
            raise self._explain(error) from error

    async def _run_connection(self, session: "aiohttp.ClientSession", client_id: str) -> None:
        async with await connect(session, self._remote, client_id) as connection:
            self._check_history(connection)
            self._retrier.mark_connected(f"connected again, and going on after {self._cursor}")
            await self._follow(connection)

    def _check_history(self, connection: EventsConnection) -> None:
        if self._epoch is not None and connection.epoch != self._epoch:
            raise OncelogError(
                f"the log has another history now: its epoch is {connection.epoch}, and was {self._epoch}. Drop what "
                "was read of events that it does not have, or read again from 0"
            )
        self._epoch = connection.epoch
        if self._cursor is None:
            self._cursor = connection.last_committed_id

    def _explain(self, error: ServerRefusedError) -> OncelogError:
        if error.code == HISTORY_CHANGED:
            return OncelogError(f"the log has another history than that of {self._cursor}: {error}")
        return error

    async def _follow(self, connection: EventsConnection) -> None:
        """The pages that are there, then what is broadcast."""
        has_more = True
        while has_more and self._remaining != 0:
            await connection.send("sync", self._encode_sync(), 1)
            message = await connection.receive()
            with translate_decode_errors(self._remote):
                if message.type == "error":
                    raise decode_refusal(message.payload)
                page = _PAGE_DECODER.decode(message.payload)
            self._print_events(page.events)
            # Those that are left out by --limit are not skipped for anybody: the command ends.
            self._cursor = max(self._cursor or 0, page.next_since_committed_id)
            has_more = page.has_more
        while self._remaining != 0:
            message = await connection.receive()
            if message.type == "event_broadcast":
                self._print_events([message.payload])

    def _encode_sync(self) -> bytes:
        payload = {"partitions": self._partitions, "since_committed_id": self._cursor, "epoch": self._epoch}
        return orjson.dumps(
            {**payload, "limit": PAGE_EVENTS if self._remaining is None else min(self._remaining, PAGE_EVENTS)}
        )

    def _print_events(self, events: Sequence[Raw]) -> None:
        """Prints what is new. The cursor moves when it has been written, and never back."""
        output = sys.stdout.buffer
        for event in events:
            with translate_decode_errors(self._remote):
                number = _NUMBERED_DECODER.decode(event).committed_id
                line = self._show(event)
            if number <= (self._cursor or 0) or self._remaining == 0:
                continue
            output.write(line)
            self._cursor = number
            if self._remaining is not None:
                self._remaining -= 1
        output.flush()


# --- lines ------------------------------------------------------------------------------------------------


class _Event(Struct, frozen=True):
    committed_id: int
    partitions: list[str]
    event: dict[str, Raw] | None
    status_updated_at: int
    actor: str = "-"


_EVENT_DECODER: Final = msgspec.json.Decoder(_Event)


def _encode_json_line(event: Raw) -> bytes:
    return bytes(event) + b"\n"


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
            + ",".join(
                f"{orjson.dumps(name).decode()}:{_decode_raw(raw_value)}" for name, raw_value in event.event.items()
            )
            + "}"
        )
    columns = [str(event.committed_id), time, event.actor, ",".join(event.partitions), kind, rest]
    return (escape_unprintable("  ".join(columns)).rstrip() + "\n").encode()


def _decode_raw(raw: Raw) -> str:
    return bytes(raw).decode()
