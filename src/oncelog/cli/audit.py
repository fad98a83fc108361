"""`oncelog audit`: print the administrative acts in a log."""

import asyncio
import time
from collections.abc import Awaitable, Iterator, Sequence
from typing import Annotated, Any, Final

import msgspec
import orjson
import typer
from msgspec import Struct

from oncelog.cli.output import Style, encode_json_line, format_columns, format_utc, write_lines
from oncelog.cli.remote import Retrier, open_client, translate_decode_errors
from oncelog.cli.server_options import Remote, reads_log_or_server
from oncelog.cli.terminal import print_message
from oncelog.cli.times import parse_time_ms
from oncelog.client.runtime.pages import iterate_pages
from oncelog.engine.audit import AuditFilter, AuditScan, entry_to_json
from oncelog.storage.inspect.factory import create_inspector
from oncelog.storage.queries.records import list_internal_records

_PATH: Final = "/v1/audit"
POLL_S: Final = 1.0
PAGE_ACTS: Final = 200
LINE_STYLES: Final[Sequence[Style]] = ("dim", "", "heading")
Act = dict[str, Any]


class _ActPage(Struct, frozen=True):
    acts: list[Act]
    cursor: str
    has_more: bool


@reads_log_or_server
def audit(  # noqa: PLR0913 - each one is an option
    source: str | Remote,
    *,
    actor: Annotated[str, typer.Option(help="Only acts of this actor, such as user:ada.")] = "",
    act: Annotated[str, typer.Option(help="Only this act, such as erase or member_removed.")] = "",
    stream: Annotated[str, typer.Option(help="Only acts that concern this stream.")] = "",
    target: Annotated[str, typer.Option(help="Only acts on this target: a partition, member or key id.")] = "",
    since: Annotated[
        str, typer.Option(metavar="TIME", help="Start time: 2026-11-18T12:00, or 24h for 24 hours ago.")
    ] = "",
    until: Annotated[str, typer.Option(metavar="TIME", help="End time, exclusive.")] = "",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait for further acts, until interrupted.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
) -> None:
    """Print the administrative acts of a log: erasures, members, quotas, keys, restores, read-only mode. Oldest first.

    All lanes are merged by log time. Without LOG, the command reads from a server, and the token needs the `audit`
    grant. The exit status is 2 if the log or the server cannot be read.

    Examples:

      oncelog audit app.db --since 7d

      oncelog audit app.db --act erase --actor user:ada --json

      oncelog audit --url https://log.example.org --token-file token.txt --follow
    """
    wanted = AuditFilter(
        act=act,
        actor=actor,
        stream=stream,
        target=target,
        since_ms=parse_time_ms(since, "--since") or 0,
        until_ms=parse_time_ms(until, "--until"),
    )
    show = encode_json_line if as_json else _format_line
    printed = 0
    if isinstance(source, Remote):
        printed = asyncio.run(_print_remote(source, wanted, follow, show))
    else:
        for found in _iterate_local(source, wanted, follow):
            write_lines([show(found)])
            printed += 1
    if not printed and not as_json:
        is_whole_log = (
            isinstance(source, str) and wanted == AuditFilter()
        )  # a server shows only what the caller may read
        print_message("the log has no audit records" if is_whole_log else "no act was found")


def _iterate_local(log: str, wanted: AuditFilter, follow: bool) -> Iterator[Act]:
    inspector = create_inspector(log)
    after: dict[int, int] = {}
    while True:
        has_more = True
        with inspector.open_view() as view:
            while has_more:
                scan = AuditScan(after, PAGE_ACTS, wanted)
                page = None
                while page is None:
                    page = scan.add(view.run_query(list_internal_records, scan.after, scan.next_read_count))
                yield from map(entry_to_json, page.entries)
                after, has_more = dict(page.after), page.has_more
        if not follow:
            return
        time.sleep(POLL_S)


async def _print_remote(remote: Remote, wanted: AuditFilter, follow: bool, show: Any) -> int:
    """Print the acts that a server has recorded, and return their number."""
    parameters = {
        "act": wanted.act,
        "actor": wanted.actor,
        "stream": wanted.stream,
        "target": wanted.target,
        "since": str(wanted.since_ms or ""),
        "until": "" if wanted.until_ms is None else str(wanted.until_ms),
        "limit": str(PAGE_ACTS),
    }
    query = {name: value for name, value in parameters.items() if value}
    retrier, printed = Retrier(remote, waits_for_server=True), 0
    async with open_client(remote) as client:

        async def fetch_page() -> _ActPage:
            answer = await client.send("GET", _PATH, query)
            with translate_decode_errors(remote):
                return msgspec.json.decode(answer, type=_ActPage)

        def fetch(cursor: str | None) -> Awaitable[_ActPage]:
            if cursor is not None:
                query["after"] = cursor
            return retrier.run(fetch_page) if follow else fetch_page()

        while True:
            async for page in iterate_pages(fetch, lambda page: page.cursor if page.has_more else None, _PATH):
                retrier.mark_connected("reconnected")
                write_lines(map(show, page.acts))
                printed += len(page.acts)
            if not follow:
                return printed
            query["after"] = page.cursor
            await asyncio.sleep(POLL_S)


def _format_line(act: Act) -> bytes:
    """Format an act as `2026-11-18 12:03:11.250 UTC  user:ada  erase  orders  -  {"records":2}`."""
    columns = [
        format_utc(act["time_ms"]),
        f"{act['actor']:<24}",
        f"{act['act'] or '(erased)':<16}",
        f"{act['stream'] or '-':<16}",
        act["target"] or "-",
        orjson.dumps(act["details"]).decode() if act["details"] else "",
    ]
    return format_columns(columns, LINE_STYLES)
