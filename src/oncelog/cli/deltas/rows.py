"""`oncelog deltas rows` and `oncelog deltas snapshot`: print a table's merged rows, or all rows with their clocks."""

import asyncio
import csv
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from contextlib import aclosing
from itertools import chain
from tempfile import SpooledTemporaryFile
from typing import Annotated, Any, Final, Literal, TypeVar
from urllib.parse import quote

import msgspec
import typer
from msgspec import Raw, Struct

from oncelog.cli.deltas.gateway import Gateway, Name, Timeout
from oncelog.cli.output import encode_json_line, format_cell, format_row, style, write_lines
from oncelog.cli.remote import check_text, encode_raw_line, translate_decode_errors
from oncelog.cli.server_options import Remote, uses_server
from oncelog.cli.terminal import EXIT_FOUND_NOTHING, AlwaysJson, print_message
from oncelog.client.deltas.codec import GatewayRefusedError
from oncelog.client.runtime.pages import iterate_pages
from oncelog.errors import OncelogError

PAGE_ROWS: Final = 500
SPOOL_BYTES: Final = 8 * 1024 * 1024
"""Rows up to this total size are kept in memory. More rows go to a temporary file."""
CELL_CHARACTERS_MAX: Final = 40
ROW_ID: Final = "rowId"

Table = Annotated[str, typer.Argument(metavar="TABLE", help="Name of the table.", show_default=False)]


Format = Literal["table", "json", "csv"]
"""Output formats of rows."""


@uses_server
def rows(
    gateway: Name,
    table: Table,
    *,
    row: Annotated[str | None, typer.Option(metavar="ID", help="Only the row with this id.")] = None,
    format: Annotated[  # noqa: A002 - the usual name of the option
        Format | None,
        typer.Option(
            help="Output format. Default: a table on a terminal, JSON (one object per line) elsewhere.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Like --format json.")] = False,
    timeout: Timeout = 30.0,
    remote: Remote,
) -> None:
    """Print the merged rows of a table, ordered by id.

    The exit status is 1 if the row given with --row does not exist.

    Examples:

      oncelog deltas rows shop products --row p1

      oncelog deltas rows shop products --format csv > products.csv
    """
    gateway_client = Gateway(gateway, timeout, remote)
    if as_json and format not in {None, "json"}:
        raise OncelogError(f"--json cannot be combined with --format {format}")
    chosen: Format = "json" if as_json else format or ("table" if sys.stdout.isatty() else "json")
    row_id = None if row is None else check_text(row, "--row")
    count = asyncio.run(_run_rows(gateway_client, check_text(table, "TABLE"), row_id, chosen))
    if row is not None and not count:
        print_message("there is no row with this id")
        raise typer.Exit(EXIT_FOUND_NOTHING)


class _RowPage(Struct, frozen=True):
    rows: list[Raw]
    next: str


Page = TypeVar("Page", bound=_RowPage)


class _RowJson(Struct, frozen=True, rename="camel"):
    row_id: str
    columns: dict[str, Any]


_ROW_DECODER: Final = msgspec.json.Decoder(_RowJson)


async def _run_rows(gateway: Gateway, table: str, row_id: str | None, output_format: Format) -> int:
    count = 0
    parameters: dict[str, Any] = {"limit": PAGE_ROWS} if row_id is None else {"rowId": row_id}
    path = f"rows/{quote(table, safe='')}"
    async with gateway, aclosing(_iterate_pages(gateway, _RowPage, path, "after", **parameters)) as pages:
        if output_format != "json":
            return await _print_in_columns(gateway, pages, output_format)
        async for page in pages:
            write_lines(map(encode_raw_line, page.rows))
            count += len(page.rows)
    return count


def _iterate_pages(
    gateway: Gateway, kind: type[Page], path: str, next_name: str, **parameters: Any
) -> AsyncGenerator[Page, None]:
    """Yield all pages. `next_name` is the query parameter that requests the next one."""

    def fetch(token: str | None) -> Awaitable[Page]:
        following: dict[str, Any] = {} if token is None else {next_name: token}
        return gateway.request(kind, path, **parameters, **following)

    return iterate_pages(fetch, lambda page: page.next or None, path)


# --- in columns -------------------------------------------------------------------------------------------


async def _print_in_columns(gateway: Gateway, pages: AsyncIterator[_RowPage], output_format: Format) -> int:
    """Print rows as a table or CSV. All rows are spooled first, because later rows may have more columns."""
    widths: dict[str, int] = {}
    id_width = len(ROW_ID)
    count = 0
    with SpooledTemporaryFile(SPOOL_BYTES) as spool:
        async for page in pages:
            for raw in page.rows:
                with translate_decode_errors(gateway.remote):
                    row = _ROW_DECODER.decode(raw)
                spool.write(encode_raw_line(raw))
                id_width = max(id_width, len(_format_cell(row.row_id)))
                for name, value in row.columns.items():
                    widths[name] = max(widths.get(name, len(name)), len(_format_cell(_format_value(value))))
            count += len(page.rows)
        spool.seek(0)
        names = list(widths)
        stored = map(_ROW_DECODER.decode, spool)
        texts = ([row.row_id, *(_format_value(row.columns.get(name)) for name in names)] for row in stored)
        if output_format == "csv":
            writer = csv.writer(sys.stdout, lineterminator="\n")
            writer.writerow([ROW_ID, *names])
            writer.writerows(texts)
        else:
            header = [[ROW_ID, *names]] if count else []
            for row_texts in chain(header, texts):
                line = format_row(map(_format_cell, row_texts), [id_width, *widths.values()])
                sys.stdout.write((style(line, "heading") if row_texts in header else line) + "\n")
        sys.stdout.flush()
    return count


def _format_value(value: Any) -> str:
    """Format the value of a column. A missing or null value is empty."""
    if value is None:
        return ""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _format_cell(text: str) -> str:
    return format_cell(text, CELL_CHARACTERS_MAX)


# --- with clocks -------------------------------------------------------------------------------------------


@uses_server
def snapshot(
    gateway: Name,
    *,
    timeout: Timeout = 30.0,
    as_json: AlwaysJson = False,
    remote: Remote,
) -> None:
    """Print all rows of a gateway with their clocks, including deleted rows, as JSON: one object per line.

    The output lacks deleted rows that a compaction has dropped, so replace all of your rows with it.

    The last line is {"cursor", "epoch"}: continue from there with `oncelog deltas pull GATEWAY --since CURSOR`. The
    output is complete only with this line.

    Example:  oncelog deltas snapshot shop > shop.jsonl
    """
    del as_json
    asyncio.run(_run_snapshot(Gateway(gateway, timeout, remote)))


class _SnapshotPage(_RowPage, frozen=True):
    cursor: int
    epoch: str


async def _run_snapshot(gateway: Gateway) -> None:
    epoch = ""
    async with gateway, aclosing(_iterate_pages(gateway, _SnapshotPage, "snapshot", "page", limit=PAGE_ROWS)) as pages:
        try:
            async for page in pages:
                if epoch and page.epoch != epoch:
                    raise OncelogError("the log's history changed during the snapshot: run the same command again")
                write_lines(map(encode_raw_line, page.rows))
                epoch = page.epoch
        except GatewayRefusedError as error:
            if not error.is_compacted:
                raise
            message = "deleted rows were dropped during the snapshot: run the same command again"
            raise OncelogError(message) from error
    write_lines([encode_json_line({"cursor": page.cursor, "epoch": epoch})])
    print_message(f"continue with `oncelog deltas pull {gateway.name} --since {page.cursor} --epoch {epoch}`")
