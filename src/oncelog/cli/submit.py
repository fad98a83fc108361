"""`oncelog submit`: submit events to a server; each event is committed once."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Annotated, Final
from uuid import uuid4

import msgspec
import orjson
import typer
from msgspec import Raw

from oncelog.cli.files import STANDARD_INPUT, open_input
from oncelog.cli.line_input import InputItem, read_batches
from oncelog.cli.remote import (
    ClientId,
    GaveUpError,
    Partitions,
    Retrier,
    check_client_id,
    check_text,
    decode_results,
    open_client,
    report_early_end,
)
from oncelog.cli.server_options import Remote, uses_server_as_client
from oncelog.cli.terminal import EXIT_FOUND_NOTHING, AsJson, ProgressMeter, print_message
from oncelog.client.events.codec import SubmitResult
from oncelog.client.runtime.http import EVENTS_PATH
from oncelog.core.builders import parse_uuid
from oncelog.core.canonical import INTEGER_MAX
from oncelog.errors import CanonicalError, OncelogError, ServerRefusedError
from oncelog.storage.verify.findings import StepProgress

PROGRESS_EVENTS_MIN: Final = 1000
"""Smallest number of events with a progress display. Fewer events are submitted faster than a user can read."""


@uses_server_as_client
def submit(  # noqa: PLR0913 - each one is an option
    event: Annotated[
        str,
        typer.Argument(
            metavar="EVENT-JSON", help="An event, or `-` for one event per line on standard input.", show_default=False
        ),
    ] = STANDARD_INPUT,
    *,
    partition: Partitions = None,
    id: Annotated[str | None, typer.Option(metavar="UUID", help="Id of the event; a new one by default.")] = None,  # noqa: A002
    expected_committed_id: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="Commit only if this is the newest committed_id.")
    ] = None,
    remote: Remote,
    client_id: ClientId = None,
    batch: Annotated[int, typer.Option(min=1, max=1000, help="Events per request, from standard input.")] = 100,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", min=0, help="How long to retry each request.")] = 30.0,
    as_json: AsJson = False,
) -> None:
    """Submit events to a server, and retry them under the same ids until they are answered.

    A line is an event ({"type": …}), or {"id", "partitions", "event"} as `tail` prints it. The exit status is 1 if
    events were rejected, 2 if the server cannot be reached or a line is malformed; events before that line are
    committed.

    Examples:

      oncelog submit --partition orders '{"type":"order.placed","order":17}'

      oncelog submit --partition orders - < events.jsonl
    """
    reader = _EventParser([check_text(name, "--partition") for name in partition or []])
    if event == STANDARD_INPUT:
        if id is not None or expected_committed_id is not None:
            raise OncelogError(
                "--id and --expected-committed-id are for a single event; put them in the input lines instead"
            )
        with open_input(STANDARD_INPUT, "event") as source:
            batches = read_batches(source.fileno(), reader.parse, batch, content="event")
    else:
        batches = _yield_batch(reader.parse(os.fsencode(event), 0, id, expected_committed_id))
    if not asyncio.run(_submit_all(batches, remote, check_client_id(client_id), timeout, as_json)):
        raise typer.Exit(EXIT_FOUND_NOTHING)


# --- input ------------------------------------------------------------------------------------------------


class _EventItem(InputItem, frozen=True, kw_only=True):
    id: str


class _EventParser:
    """Parses lines. An event is sent exactly as written, without being decoded and re-encoded."""

    def __init__(self, partitions: Sequence[str]) -> None:
        self._partitions = orjson.dumps(partitions) if partitions else b""

    def parse(
        self, text: bytes, line: int = 0, id_text: str | None = None, expected: int | None = None
    ) -> list[_EventItem]:
        """Return the event in a line. Raises OncelogError with the line number."""
        where = f"line {line}" if line else "the event"
        if not text.strip():  # an empty line of the input does not get here
            raise OncelogError(
                f'{where} is empty: pass a JSON object with a "type", or - to read events from standard input'
            )
        try:
            orjson.loads(text)
            members = msgspec.json.decode(text, type=dict[str, Raw])
        except orjson.JSONDecodeError as error:
            # Text that does not begin as an object does is probably the name of a file.
            hint = "" if line or text.lstrip().startswith(b"{") else "; to read a file: oncelog submit - < FILE"
            raise OncelogError(f"{where}: is not JSON: {error.msg}, at character {error.pos + 1}{hint}") from error
        except msgspec.MsgspecError:
            raise OncelogError(f"{where}: must be an object") from None
        if "type" in members:
            members = {"event": Raw(text)}
        elif "event" not in members:
            raise OncelogError(f'{where}: must be an event with a "type", or have the members id, partitions and event')
        try:
            return [self._build_item(members, line, id_text, expected)]
        except CanonicalError as error:
            raise OncelogError(f"{where}: {error}") from error

    def _build_item(self, members: dict[str, Raw], line: int, id_text: str | None, expected: int | None) -> _EventItem:
        own_id = members.get("id")
        if own_id is not None:
            if id_text is not None:
                raise CanonicalError("--id", "the event already has an id")
            id_text = msgspec.json.decode(own_id)
        elif id_text is None:
            id_text = str(uuid4())
        key = parse_uuid(id_text)
        partitions = bytes(members.get("partitions", self._partitions)).strip()
        if not partitions:
            raise CanonicalError("$.partitions", "is missing; --partition sets it for all events")
        if not partitions.startswith(b"["):
            raise CanonicalError("$.partitions", "must be an array")
        own_expected = members.get("expected_committed_id")
        if own_expected is not None:
            expected = msgspec.json.decode(own_expected)
        if expected is not None and (type(expected) is not int or not 0 <= expected <= INTEGER_MAX):
            raise CanonicalError("$.expected_committed_id", "must be a whole number from 0 to 2^53−1")
        end = b"" if expected is None else b',"expected_committed_id":%d' % expected
        text = b'{"id":"%b","partitions":%b,"event":%b%b}'
        body = text % (id_text.encode(), partitions, bytes(members["event"]), end)
        return _EventItem(body, f"line {line}" if line else "", key, id=id_text)


async def _yield_batch(items: list[_EventItem]) -> AsyncIterator[list[_EventItem]]:
    yield items


# --- requests ---------------------------------------------------------------------------------------------


async def _submit_all(
    batches: AsyncIterator[list[_EventItem]], remote: Remote, client_id: str | None, timeout_s: float, as_json: bool
) -> bool:
    """Send requests, retrying each until it is answered. Return whether all events were committed."""
    retrier = Retrier(remote, timeout_s)
    printed = rejected = 0
    prefix = b"" if client_id is None else b'"client_id":%b,' % orjson.dumps(client_id)
    with ProgressMeter() as meter:
        async with open_client(remote, timeout_s) as client, aclosing(batches):  # type: ignore[type-var]
            async for items in batches:
                body = b'{%b"events":[%b]}' % (prefix, b",".join(item.body for item in items))
                try:
                    with report_early_end(partial(_report_unknown, items)):
                        answer = await retrier.run(partial(client.send, "POST", EVENTS_PATH, body=body))
                except ServerRefusedError as error:
                    place = f" (the request began with {items[0].location})" if items[0].location else ""
                    raise OncelogError(f"{error}{place}") from error
                results = decode_results(remote, answer, SubmitResult, len(items), "events")
                rejected += _print_results(items, results, as_json)
                printed += len(items)
                if printed >= PROGRESS_EVENTS_MIN and not sys.stdout.isatty():
                    meter(StepProgress("events", printed))
    return not rejected


def _report_unknown(items: Sequence[_EventItem], error: GaveUpError | None) -> None:
    """Print the ids of unanswered events. A later retry needs them, and this command may have generated them."""
    if error is not None:
        print_message(str(error))
        if not error.was_sent:
            print_message("nothing was sent" + (f" from {items[0].location} onwards" if items[0].location else ""))
            return
    for item in items:
        _print_about(item, f"the outcome is unknown; send it again under the same id: {item.id}")


def _print_about(item: _EventItem, sentence: str) -> None:
    print_message(f"{item.location}: {sentence}" if item.location else sentence)


def _print_results(items: Sequence[_EventItem], results: Sequence[tuple[Raw, SubmitResult]], as_json: bool) -> int:
    """Print a line for each result, and why events were rejected. Return how many were rejected."""
    lines, rejected = [], 0
    for item, (raw, result) in zip(items, results, strict=True):
        is_committed = result.status == "committed"
        if as_json:
            lines.append(bytes(raw).decode())
        else:
            lines.append(f"{result.status} {result.committed_id if is_committed else result.reason} {item.id}")
        if not is_committed:
            rejected += 1
            why = "; ".join(f"{error.field}: {error.message}" for error in result.errors)
            _print_about(item, f"{item.id} was {result.status}: {result.reason}: {why}")
    typer.echo("\n".join(lines))
    return rejected
