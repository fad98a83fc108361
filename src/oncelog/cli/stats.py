"""`oncelog stats`: print figures of a log, without counting its records."""

import asyncio
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from oncelog.cli.output import (
    escape_unprintable,
    format_label,
    format_record_counts,
    format_table,
    format_utc,
    print_result,
)
from oncelog.cli.remote import open_client, translate_decode_errors
from oncelog.cli.server_options import Remote, reads_log_or_server
from oncelog.cli.terminal import AsJson
from oncelog.storage.figures import LogFigures, read_figures

LABEL_WIDTH: Final = 11


@reads_log_or_server
def stats(source: str | Remote, *, as_json: AsJson = False) -> None:
    """Print the settings, lane heads, policies, consumers, tenants and sizes of a log.

    Without LOG, the command reads from a server, and the token needs the grant to read oncelog/metrics. The exit status
    is 2 if the log or the server cannot be read.

    Examples:

      oncelog stats orders.db --json

      oncelog stats postgresql://oncelog@db.example.org/orders

      oncelog stats --profile production
    """
    figures = asyncio.run(_fetch_figures(source)) if isinstance(source, Remote) else read_figures(source)
    print_result(figures, _format_figures(figures), as_json)


async def _fetch_figures(remote: Remote) -> LogFigures:
    async with open_client(remote) as client:
        answer = await client.send("GET", "/v1/stats")
    with translate_decode_errors(remote):
        return msgspec.json.decode(answer, type=LogFigures)


def _format_figures(figures: LogFigures) -> list[str]:
    settings = figures.settings
    records = format_record_counts(figures.records, figures.restore_records, figures.audit_records)
    fields = [
        ("epoch", f"{figures.epoch}, schema {figures.schema}, created {format_utc(figures.created_ms)}"),
        ("records", f"{records} in {figures.blocks} blocks, {figures.erasures} erasures"),
        ("streams", f"{settings.get('lanes')} lanes, evictions every {settings.get('eviction_interval')} positions"),
        ("ledger", f"clients and keys are forgotten after {settings.get('ledger_ttl_ms')} ms"),
        ("policies", ", ".join(figures.policies) or "none"),
        *_list_size_fields(figures),
        *_list_leap_fields(figures),
    ]
    lanes = [(lane.lane, lane.position, lane.height, format_utc(lane.log_time_ms)) for lane in figures.lanes]
    consumers = [(one.name, one.scope or "lane 0", one.cursor, one.lag) for one in figures.consumers]
    tenants = [
        (
            tenant.prefix,
            tenant.bytes,
            tenant.bytes_max or "-",
            tenant.records,
            tenant.records_max or "-",
            tenant.new_writes_per_second_max or "-",
        )
        for tenant in figures.tenants
    ]
    return [
        *(format_label(name, LABEL_WIDTH) + escape_unprintable(value) for name, value in fields),
        *_format_section(("lane", "position", "height", "log time"), lanes),
        *_format_section(("consumer", "stream", "cursor", "lag"), consumers),
        *_format_section(("tenant", "bytes", "bytes max", "records", "records max", "new writes/s max"), tenants),
        *_format_section(("table", "bytes"), list((figures.tables or {}).items())),
    ]


def _list_size_fields(figures: LogFigures) -> list[tuple[str, str]]:
    if figures.server is not None:
        return [("database", f"PostgreSQL {figures.server}: {figures.bytes} bytes, with indexes")]
    keys, fields = figures.keys, [("file", f"{figures.bytes} bytes, write-ahead log: {figures.wal_bytes} bytes")]
    if keys is None:
        return fields
    segments = ", ".join(f"{count} of level {level}" for level, count in keys.segments.items()) or "none"
    return [("keys", f"{keys.hot} hot, {keys.sealed} sealed; segments: {segments}"), *fields]


def _list_leap_fields(figures: LogFigures) -> list[tuple[str, str]]:
    if not figures.leaps:
        return []
    numbers = " and ".join(f"{number:,}" for number in figures.leaps)
    why = "a restore or a renewed epoch skips numbers, so that no number is used twice"
    return [("leaps", f"all numbers continue above {numbers}: {why}")]


def _format_section(headings: tuple[str, ...], rows: Sequence[Sequence[Any]]) -> list[str]:
    """Return a table after an empty line, or nothing if the table has no rows."""
    return ["", *format_table(headings, rows)] if rows else []
