"""`oncelog audit`: the administrative acts that a log has recorded."""

import asyncio
import re
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Final

import orjson
import typer

from oncelog.cli.remote import Remote, Token, TokenFile, build_remote, decode_refusal, translate_connection_errors
from oncelog.cli.retries import Retrier
from oncelog.cli.terminal import escape_unprintable, translate_errors
from oncelog.cli.times import format_utc
from oncelog.engine.audit import AuditFilter, AuditScan, entry_to_json
from oncelog.errors import OncelogError
from oncelog.storage.inspect.factory import create_inspector
from oncelog.storage.queries.records import list_internal_records

if TYPE_CHECKING:
    import aiohttp

POLL_S: Final = 1.0
PAGE_ACTS: Final = 200
_AGE: Final = re.compile(r"(\d{1,9})([smhd])")
_UNIT_MS: Final = {"s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
Act = dict[str, Any]


def audit(  # noqa: PLR0913, PLR0917 - each one is an option
    log: Annotated[
        str | None, typer.Argument(help="The log: a file, or postgresql://…", metavar="[LOG]", show_default=False)
    ] = None,
    actor: Annotated[str, typer.Option(help="Only acts of this actor, such as user:ada.")] = "",
    act: Annotated[str, typer.Option(help="Only this act, such as erase or member_removed.")] = "",
    stream: Annotated[str, typer.Option(help="Only acts that concern this stream.")] = "",
    target: Annotated[str, typer.Option(help="Only acts on this target: a partition, member or key id.")] = "",
    since: Annotated[str, typer.Option(metavar="TIME", help="From this time on: 2026-11-18T12:00, or 24h ago.")] = "",
    until: Annotated[str, typer.Option(metavar="TIME", help="Before this time.")] = "",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait for further acts, until interrupted.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
    url: Annotated[
        str | None, typer.Option(metavar="URL", help="Ask a server, which needs the grant audit, not a LOG.")
    ] = None,
    token: Token = None,
    token_file: TokenFile = None,
) -> None:
    """Prints who did what to the log: erasures, members, quotas, keys, restores, read-only mode. Oldest first.

    All lanes are merged by log time. The exit status is 2 if the log or the server cannot be read.

    Examples:

      oncelog audit app.db --since 7d

      oncelog audit app.db --act erase --actor user:ada --json

      oncelog audit --url https://log.example.org --token-file token.txt --follow
    """
    with translate_errors():
        wanted = AuditFilter(
            act=act,
            actor=actor,
            stream=stream,
            target=target,
            since_ms=_parse_time_ms(since, "--since") or 0,
            until_ms=_parse_time_ms(until, "--until"),
        )
        show = _encode_json_line if as_json else _format_line
        if (log is None) == (url is None):
            raise OncelogError("name a LOG or a server with --url, and only one of them")
        if url is not None:
            asyncio.run(_print_remote(build_remote(url, token, token_file), wanted, follow, show))
            return
        for found in _iterate_local(log or "", wanted, follow):
            _write(show(found))


def _parse_time_ms(text: str, option: str) -> int | None:
    """Read a time, or how long ago it was. None if nothing was given."""
    if not text:
        return None
    ago = _AGE.fullmatch(text)
    if ago is not None:
        return max(0, round(time.time() * 1000) - int(ago[1]) * _UNIT_MS[ago[2]])
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        message = f"{option} must be a time such as 2026-11-18T12:00 (UTC), or a duration such as 24h, not {text!r}"
        raise OncelogError(message) from None
    moment = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
    return max(0, round(moment.timestamp() * 1000))


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
                    requested = scan.next_read_count
                    page = scan.add(view.run_query(list_internal_records, scan.after, requested), requested)
                yield from map(entry_to_json, page.entries)
                after, has_more = dict(page.after), page.has_more
        if not follow:
            return
        time.sleep(POLL_S)


async def _print_remote(remote: Remote, wanted: AuditFilter, follow: bool, show: Any) -> None:
    import aiohttp  # noqa: PLC0415 - a dependency of `oncelog[server]`

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
    retrier = Retrier(remote)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
        while True:
            if follow:
                page = await retrier.run(lambda: _fetch_page(session, remote, query))
                retrier.mark_connected()
            else:
                page = await _fetch_page(session, remote, query)
            for found in page["acts"]:
                _write(show(found))
            query["after"] = page["cursor"]
            if page["has_more"]:
                continue
            if not follow:
                return
            await asyncio.sleep(POLL_S)


async def _fetch_page(session: "aiohttp.ClientSession", remote: Remote, parameters: dict[str, str]) -> dict[str, Any]:
    with translate_connection_errors(remote):
        async with session.get(f"{remote.url}/v1/audit", params=parameters, headers=remote.headers) as response:
            body = await response.read()
            is_ok = response.status == 200
    try:
        found: dict[str, Any] = orjson.loads(body)
        if is_ok:
            return {"acts": found["acts"], "cursor": found["cursor"], "has_more": found["has_more"]}
        raise decode_refusal(orjson.dumps(found["error"]))
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise OncelogError(f"{remote.url} does not answer as an Oncelog server does") from error


def _encode_json_line(act: Act) -> bytes:
    return orjson.dumps(act, option=orjson.OPT_APPEND_NEWLINE)


def _format_line(act: Act) -> bytes:
    """`2026-11-18 12:03:11.250 UTC  user:ada  erase  orders  {"records":2}`."""
    columns = [
        format_utc(act["time_ms"]),
        f"{act['actor']:<24}",
        f"{act['act'] or '(erased)':<16}",
        f"{act['stream'] or '-':<16}",
        act["target"] or "-",
        orjson.dumps(act["details"]).decode() if act["details"] else "",
    ]
    return (escape_unprintable("  ".join(columns)).rstrip() + "\n").encode()


def _write(line: bytes) -> None:
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()
