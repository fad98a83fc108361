"""`oncelog deltas pull`: a gateway's deltas in its order, and those that come."""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Iterable
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import orjson
import typer
from msgspec import Raw, Struct

from oncelog.cli.deltas.gateway import DeltasRefusedError, Gateway, Name, Timeout, decode_error
from oncelog.cli.remote import (
    CONNECT_TIMEOUT_S,
    DEFAULT_URL,
    Token,
    TokenFile,
    Url,
    build_remote,
    run_while_output_open,
    translate_connection_errors,
    translate_decode_errors,
)
from oncelog.cli.retries import Retrier
from oncelog.cli.terminal import (
    EXIT_FOUND_NOTHING,
    escape_unprintable,
    interrupt_on_sigterm,
    print_message,
    translate_errors,
)
from oncelog.error_codes import HISTORY_CHANGED
from oncelog.errors import LostError, OncelogError, ServerRefusedError

if TYPE_CHECKING:
    import aiohttp

PAGE_DELTAS: Final = 500


def pull(  # noqa: PLR0913, PLR0917 - each one is an option
    gateway: Name,
    since: Annotated[int, typer.Option(metavar="N", min=0, max=2**53 - 1, help="Only what has a higher sequence.")] = 0,
    limit: Annotated[int | None, typer.Option(metavar="N", min=1, help="Stop after that many deltas.")] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Go on with those that come, until interrupted.")] = False,
    epoch: Annotated[str | None, typer.Option(help="The epoch that N is of; another one is an error.")] = None,
    as_json: Annotated[
        bool | None,
        typer.Option("--json/--pretty", help="An object a line, or a line for people, as is usual on a terminal."),
    ] = None,
    timeout: Timeout = 30.0,
    url: Url = DEFAULT_URL,
    token: Token = None,
    token_file: TokenFile = None,
) -> None:
    """Prints the deltas of a gateway in its order, a line each.

    With --follow it comes back with its cursor if the server goes away: no delta is lost, and none is shown twice.
    The exit status is 1 if the deltas have been compacted and their rows are in a snapshot only, 2 if the server
    cannot be reached or has another history (epoch) now.

    Examples:

      oncelog deltas pull shop --since 41

      oncelog deltas pull shop --follow --json | jq .rowId
    """
    with translate_errors(), interrupt_on_sigterm():
        remote = build_remote(url, token, token_file)
        show = _encode_json_line if (not sys.stdout.isatty() if as_json is None else as_json) else _format_line
        pulling = _PullCommand(Gateway(remote, gateway, timeout), gateway, since, epoch or "", limit, show)
        asyncio.run(_run_pull(pulling, follow))


async def _run_pull(puller: "_PullCommand", follow: bool) -> None:
    async with puller.gateway:
        await run_while_output_open(puller.follow() if follow else puller.print_pages())


class _DeltaPage(Struct, frozen=True, rename="camel"):
    deltas: list[Raw]
    cursor: int
    has_more: bool
    epoch: str
    snapshot: bool = False


class _NumberedDelta(Struct, frozen=True):
    sequence: int


class _Connected(Struct, frozen=True):
    epoch: str


_NUMBERED_DECODER: Final = msgspec.json.Decoder(_NumberedDelta)
_CONNECTED_DECODER: Final = msgspec.json.Decoder(_Connected)


class _PullCommand:
    """A cursor, and all that is done to move it on."""

    def __init__(
        self,
        gateway: Gateway,
        name: str,
        since: int,
        epoch: str,
        limit: int | None,
        show: Callable[[Raw], bytes],
    ) -> None:
        self.gateway = gateway
        self._name = name
        self._cursor = since
        self._epoch = epoch
        self._remaining = limit
        self._show = show
        self._retrier = Retrier(gateway.remote)

    async def print_pages(self) -> None:
        """All that is there."""
        has_more = True
        while has_more and self._remaining != 0:
            size = PAGE_DELTAS if self._remaining is None else min(self._remaining, PAGE_DELTAS)
            try:
                page = await self.gateway.get(
                    _DeltaPage, "pull", since=self._cursor, limit=size, epoch=self._epoch or None
                )
            except ServerRefusedError as error:
                raise self._explain(error) from error
            if page.snapshot:
                raise self._report_compacted()
            self._print_deltas(page.deltas)
            self._cursor, self._epoch, has_more = max(self._cursor, page.cursor), page.epoch, page.has_more

    async def follow(self) -> None:
        """All that is there, then what comes. Raises OncelogError where another connection would not help."""
        try:
            await self._retrier.run(self._follow_connection)
        except ServerRefusedError as error:
            raise self._explain(error) from error

    async def _follow_connection(self) -> None:
        with translate_connection_errors(self.gateway.remote):
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                response = await self.gateway.open_live_stream(self._cursor, self._epoch)
            async with response:
                self._retrier.mark_connected(f"connected again, and going on after {self._cursor}")
                await self._read_stream(response)

    async def _read_stream(self, response: "aiohttp.ClientResponse") -> None:
        """Until it has all it wants. Raises LostError at the end of the stream."""
        async for events in _iterate_events(response):
            deltas = []
            for kind, data in events:
                with translate_decode_errors(self.gateway.remote):
                    match kind:
                        case b"":
                            deltas.append(Raw(data))
                        case b"connected":
                            self._epoch = _CONNECTED_DECODER.decode(data).epoch
                        case b"snapshot":
                            self._print_deltas(deltas)
                            raise self._report_compacted()
                        case b"error":
                            self._print_deltas(deltas)
                            raise decode_error(data)
            self._print_deltas(deltas)
            if self._remaining == 0:
                return
        raise LostError(f"the connection to {self.gateway.remote.url} was closed")

    def _print_deltas(self, deltas: Iterable[Raw]) -> None:
        """Prints what is new. The cursor moves when it has been written, and never back."""
        output = sys.stdout.buffer
        for delta in deltas:
            with translate_decode_errors(self.gateway.remote):
                number = _NUMBERED_DECODER.decode(delta).sequence
                line = self._show(delta)
            if number <= self._cursor or self._remaining == 0:
                continue
            output.write(line)
            self._cursor = number
            if self._remaining is not None:
                self._remaining -= 1
        output.flush()

    def _report_compacted(self) -> Exception:
        print_message(
            f"the deltas after {self._cursor} have been compacted, and are in the rows only: read them with "
            f"`oncelog deltas snapshot {self._name}`, which says from which sequence to pull on"
        )
        return typer.Exit(EXIT_FOUND_NOTHING)

    def _explain(self, error: ServerRefusedError) -> Exception:
        if isinstance(error, DeltasRefusedError) and error.is_compacted:
            return self._report_compacted()
        if error.code == HISTORY_CHANGED:
            return OncelogError(f"the log has another history than that of {self._cursor}: {error}")
        return error


async def _iterate_events(response: "aiohttp.ClientResponse") -> AsyncIterator[list[tuple[bytes, bytes]]]:
    """Server-sent events, name and data, as many as have come. A line may be longer than aiohttp's own would be."""
    rest: list[bytes] = []
    async for chunk in response.content.iter_any():
        if b"\n\n" not in (rest[-1][-1:] if rest else b"") + chunk:
            rest.append(chunk)  # in pieces: a large delta is not copied at every chunk of it
            continue
        *whole, last = b"".join([*rest, chunk]).split(b"\n\n")
        rest = [last] if last else []
        yield [_parse_event(text) for text in whole]


def _parse_event(text: bytes) -> tuple[bytes, bytes]:
    fields: dict[bytes, bytes] = {}
    for line in text.split(b"\n"):
        name, _, value = line.partition(b":")
        fields[name] = value.removeprefix(b" ")
    return (fields.get(b"event", b"" if b"data" in fields else b"comment"), fields.get(b"data", b""))


# --- lines ------------------------------------------------------------------------------------------------


class _Column(Struct, frozen=True):
    column: str
    value: Raw


class _Delta(Struct, frozen=True, rename="camel"):
    sequence: int
    op: str
    table: str
    row_id: str
    client_id: str
    columns: list[_Column]


_DELTA_DECODER: Final = msgspec.json.Decoder(_Delta)


def _encode_json_line(delta: Raw) -> bytes:
    return bytes(delta) + b"\n"


def _format_line(raw: Raw) -> bytes:
    """`17  INSERT  products  p1  till-1  {"name":"Tea"}`, and nothing that could write by itself."""
    delta = _DELTA_DECODER.decode(raw)
    columns = ",".join(
        f"{orjson.dumps(column.column).decode()}:{bytes(column.value).decode()}" for column in delta.columns
    )
    shown = [str(delta.sequence), delta.op, delta.table, delta.row_id, delta.client_id, f"{{{columns}}}"]
    return (escape_unprintable("  ".join(shown)) + "\n").encode()
