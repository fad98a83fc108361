"""`oncelog deltas push`: push deltas to a gateway; each delta is committed once."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Annotated, Final

import msgspec
import orjson
import typer
from msgspec import Raw

from oncelog.cli.deltas.gateway import Gateway, Name, PushItem, Timeout, find_refused_item
from oncelog.cli.files import STANDARD_INPUT, open_input, write_new_file
from oncelog.cli.line_input import LINE_BYTES_MAX, read_batches, split_batches
from oncelog.cli.remote import GaveUpError, check_text, report_early_end
from oncelog.cli.server_options import Remote, uses_server
from oncelog.cli.terminal import EXIT_FOUND_NOTHING, AsJson, print_message
from oncelog.client.deltas.codec import GatewayRefusedError, PushResult
from oncelog.core import hlc
from oncelog.core.canonical import canonical_text, parse
from oncelog.core.deltas import PUSH_DELTAS_MAX, decode_delta, encode_delta
from oncelog.core.hlc import ClockExhausted
from oncelog.core.identity import delta_id_from_json
from oncelog.errors import CanonicalError, OncelogError
from oncelog.storage.clock import SystemClock

_MEMBERS_DECODER: Final = msgspec.json.Decoder(dict[str, Raw])

Source = Annotated[
    str,
    typer.Argument(
        metavar="FILE", help="A file with one delta per line, or `-` for standard input.", show_default=False
    ),
]


@uses_server
def push(  # noqa: PLR0913 - each one is an option
    gateway: Name,
    file: Source = STANDARD_INPUT,
    *,
    client_id: Annotated[str | None, typer.Option(metavar="ID", help="Client id of deltas without one.")] = None,
    stamped: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write all deltas to this new file before the first request.",
            dir_okay=False,
            writable=True,
        ),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, max=PUSH_DELTAS_MAX, help="Deltas per request.")] = 500,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
    remote: Remote,
) -> None:
    """Push deltas to a gateway, and retry them under the same ids until they are answered.

    A line is a delta as `pull` prints it, or {"deltas": […]}. The command adds deltaId, hlc (from this machine's
    clock) and clientId (from --client-id) if they are missing. The server accepts or refuses a request as a whole.
    The exit status is 1 if the server refused a delta, 2 if it cannot be reached or a line is malformed; earlier deltas
    are committed.

    Examples:

      oncelog deltas push shop deltas.jsonl

      echo '{"op":"UPDATE","table":"products","rowId":"p1","columns":[{"column":"price","value":3.5}]}' |
      oncelog deltas push shop --client-id till-1
    """
    gateway_client = Gateway(gateway, timeout, remote)
    parser = _DeltaParser(None if client_id is None else check_text(client_id, "--client-id"))
    with open_input(file, "delta") as source:
        batches = read_batches(source.fileno(), parser.parse, batch, parser.finish, content="delta")
        if stamped is not None:
            batches = _save_batches(batches, stamped, batch)
        asyncio.run(_push_all(gateway_client, batches, as_json))


# --- input ------------------------------------------------------------------------------------------------


class _IncompleteJsonError(OncelogError):
    """A JSON text that may continue on the next line."""


class _DeltaParser:
    """Parses lines into deltas, and adds missing members."""

    def __init__(self, client_id: str | None) -> None:
        self._client_id = client_id
        self._clock = SystemClock()
        self._last = 0
        self._text: list[bytes] = []
        """Lines of a JSON text that spans the whole input."""
        self._size = 0

    def parse(self, text: bytes, line: int) -> list[PushItem]:
        """Return the deltas in a line, or none if its text may continue. Raises OncelogError with the line number."""
        self._size = len(text) + (self._size if self._text else 0)
        if self._size > LINE_BYTES_MAX:
            raise OncelogError(f"line {line}: is longer than {LINE_BYTES_MAX} bytes; write one delta per line")
        if self._text:
            self._text.append(text)
            return []
        try:
            return self._parse_items(text, f"line {line}")
        except _IncompleteJsonError:
            if line != 1:
                raise
            self._text = [text]
            return []

    def finish(self) -> list[PushItem]:
        """Return the deltas of JSON text that spans several lines."""
        return self._parse_items(b"\n".join(self._text), "the text") if self._text else []

    def _parse_items(self, text: bytes, place: str) -> list[PushItem]:
        try:
            orjson.loads(text)
            members = _MEMBERS_DECODER.decode(text)
            parts = msgspec.json.decode(members["deltas"], type=list[Raw]) if set(members) == {"deltas"} else None
        except orjson.JSONDecodeError as error:
            kind = _IncompleteJsonError if error.msg.startswith("unexpected end of data") else OncelogError
            raise kind(f"{place}: is not JSON: {error.msg}") from error
        except msgspec.MsgspecError:
            raise OncelogError(f'{place}: must be a delta or {{"deltas": […]}}') from None
        if parts is None:
            return [self._parse_item(text, place)]
        return [self._parse_item(bytes(part), f"{place}, deltas[{index}]") for index, part in enumerate(parts)]

    def _parse_item(self, text: bytes, place: str) -> PushItem:
        try:
            return self._build_item(canonical_text(text), place)
        except msgspec.MsgspecError:
            raise OncelogError(f"{place}: must be an object") from None
        except CanonicalError as error:
            raise OncelogError(f"{place}: {error}") from error

    def _build_item(self, text: bytes, place: str) -> PushItem:
        members = _MEMBERS_DECODER.decode(text)
        is_stamped = "deltaId" not in members
        if is_stamped:
            if "clientId" not in members:
                if self._client_id is None:
                    raise CanonicalError("$.clientId", "is missing; --client-id sets it for all deltas")
                members["clientId"] = Raw(orjson.dumps(self._client_id))
            if "hlc" not in members:
                members["hlc"] = Raw(orjson.dumps(self._next_hlc()))
            delta_id = delta_id_from_json(parse(msgspec.json.encode(members)))
            members["deltaId"] = Raw(b'"%b"' % delta_id.hex().encode())
            text = msgspec.json.encode(members)
        return PushItem(encode_delta(decode_delta(text)), place, is_stamped=is_stamped)

    def _next_hlc(self) -> str:
        """Return a clock reading above the previous one, so that the later of two changes to a column wins."""
        reading = hlc.tick(self._last, self._clock.wall_ms())
        if isinstance(reading, ClockExhausted):
            raise OncelogError("this machine's clock is past the latest time that a delta can have")
        self._last = reading
        return str(reading)


async def _save_batches(
    batches: AsyncIterator[list[PushItem]], stamped: Path, items_max: int
) -> AsyncIterator[list[PushItem]]:
    """Save all deltas to a new file before the first request, so that they can be pushed again."""
    items: list[PushItem] = []
    async for batch in batches:
        items += batch
    if not write_new_file(stamped, (item.body + b"\n" for item in items)):
        raise OncelogError(f"{stamped} already exists: push that file, or choose another name")
    for batch in split_batches(items, items_max):
        yield batch


# --- requests ---------------------------------------------------------------------------------------------


async def _push_all(gateway: Gateway, batches: AsyncIterator[list[PushItem]], as_json: bool) -> None:
    """Push all batches in order, until one is refused."""
    async with gateway, aclosing(batches):  # type: ignore[type-var]
        async for items in batches:
            try:
                with report_early_end(partial(_report_unknown, items)):
                    results = await gateway.push(items)
            except GatewayRefusedError as error:
                raise _report_refusal(error, items) from error
            typer.echo("\n".join(_format_result(raw, result, as_json) for raw, result in results))


def _format_result(raw: Raw, result: PushResult, as_json: bool) -> str:
    if as_json:
        return bytes(raw).decode()
    return f"{'duplicate' if result.duplicate else 'committed'} {result.sequence} {result.delta_id}"


def _report_refusal(error: GatewayRefusedError, items: Sequence[PushItem]) -> Exception:
    """Print the refused delta. Return the error that ends the command."""
    item = find_refused_item(items, error)
    if item is None:
        return OncelogError(f"{error} (the request began with {items[0].location})")
    print_message(f"{item.location}: {error}")
    print_message(f"no delta from {items[0].location} onwards was written")
    return typer.Exit(EXIT_FOUND_NOTHING)


def _report_unknown(items: Sequence[PushItem], error: GaveUpError | None) -> None:
    """Print the unanswered deltas. If they were sent, a later retry needs their ids, which this command may have
    generated.
    """
    if error is not None:
        print_message(str(error))
        if not error.was_sent:
            print_message(f"nothing was sent from {items[0].location} to {items[-1].location}")
            return
    print_message(
        f"the outcome is unknown from {items[0].location} to {items[-1].location}; push these deltas again unchanged"
    )
    for item in items:
        if item.is_stamped:
            print_message(f"{item.location}: {item.body.decode()}")
