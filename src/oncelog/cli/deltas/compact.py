"""`oncelog deltas compact`: remove the bodies of old deltas."""

import asyncio
from typing import Annotated

import orjson
import typer
from msgspec import Struct

from oncelog.cli.deltas.gateway import Gateway, Name, Timeout
from oncelog.cli.output import escape_unprintable, print_result
from oncelog.cli.remote import describe_progress
from oncelog.cli.server_options import Remote, uses_server
from oncelog.cli.terminal import AsJson, ProgressMeter
from oncelog.client.runtime.pages import check_next_page
from oncelog.errors import OncelogError
from oncelog.storage.verify.findings import StepProgress

_DAY_MS = 86_400_000
_RESUME_HINT = "Run the same command again to continue."


@uses_server
def compact(
    gateway: Name,
    *,
    upto: Annotated[
        int | None, typer.Option(metavar="N", min=0, max=2**53 - 1, help="Compact deltas up to this sequence.")
    ] = None,
    keep: Annotated[
        int | None, typer.Option(metavar="N", min=0, max=2**53 - 1, help="Compact all but the newest N deltas.")
    ] = None,
    tombstone_age_days: Annotated[
        float | None,
        typer.Option(
            metavar="DAYS",
            min=0,
            max=36_500,
            help="Drop rows that were deleted at least this many days ago. Default: the server's tombstone_age_ms.",
        ),
    ] = None,
    timeout: Timeout = 60.0,
    as_json: AsJson = False,
    remote: Remote,
) -> None:
    """Drop the bodies of old deltas, and rows that were deleted long ago. This cannot be undone.

    Existing rows, ids, sequences and hashes are kept. After an interruption, run the same command again to continue.
    Readers with an older cursor get a snapshot. A deleted row is kept until all named consumers have read its DELETE. A
    client that was offline for longer than the tombstone age loses its earlier edits to dropped rows.

    Examples:

      oncelog deltas compact shop --keep 100000

      oncelog deltas compact shop --keep 100000 --tombstone-age-days 90
    """
    if (upto is None) == (keep is None):
        raise OncelogError("exactly one of --upto and --keep must be given")
    request: dict[str, int | str] = {"keep": keep or 0} if upto is None else {"upto": upto}
    if tombstone_age_days is not None:
        request["tombstoneAgeMs"] = round(tombstone_age_days * _DAY_MS)
    result = asyncio.run(_run_compaction(Gateway(gateway, timeout, remote), request, upto or 0))
    lines = [f"{result.compacted} deltas compacted; deltas up to {result.upto} no longer have bodies"]
    if result.dropped_rows:
        lines.append(f"{result.dropped_rows} deleted rows dropped")
    if result.held_by is not None:
        lines.append(
            f"other deleted rows are kept until the consumer {escape_unprintable(result.held_by.consumer)}, which "
            f"is {result.held_by.lag} deltas behind, has read them"
        )
    fields = ("compacted", "upto", "dropped_rows", "held_by")
    print_result({name: getattr(result, name) for name in fields}, lines, as_json)


class _HeldBy(Struct, frozen=True):
    consumer: str
    cursor: int
    lag: int


class _CompactResult(Struct, frozen=True, rename="camel"):
    compacted: int
    upto: int
    has_more: bool = False
    dropped_rows: int = 0
    next: str = ""
    held_by: _HeldBy | None = None


async def _run_compaction(gateway: Gateway, request: dict[str, int | str], upto: int) -> _CompactResult:
    """Send requests until everything is compacted, because the server limits the deltas per request."""
    compacted = dropped = 0
    held_by: _HeldBy | None = None
    token: str | None = None
    with describe_progress(lambda: f"{compacted} deltas compacted so far. {_RESUME_HINT}"), ProgressMeter() as meter:
        async with gateway:
            while True:
                result = await gateway.request(_CompactResult, "compact", orjson.dumps(request))
                compacted += result.compacted
                dropped += result.dropped_rows
                held_by = result.held_by or held_by
                meter(StepProgress("compacting", result.upto, upto))
                if result.next:
                    check_next_page(token, result.next, "compact")
                    request["page"] = token = result.next
                elif not result.has_more:
                    return _CompactResult(compacted, result.upto, dropped_rows=dropped, held_by=held_by)
