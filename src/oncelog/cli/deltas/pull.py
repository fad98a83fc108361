"""`oncelog deltas pull`: print a gateway's stored deltas and, with --follow, new ones."""

import asyncio
from collections.abc import Sequence
from typing import Annotated, Final

import msgspec
import typer
from msgspec import Raw

from oncelog.cli.deltas.gateway import Gateway, Name, Timeout
from oncelog.cli.output import Style, format_columns
from oncelog.cli.remote import AsJsonLines, CursorPrinter, Retrier, run_while_output_open
from oncelog.cli.server_options import Remote, uses_server
from oncelog.cli.terminal import EXIT_FOUND_NOTHING, print_message
from oncelog.client.deltas.codec import DeltaPage, GatewayRefusedError
from oncelog.core.deltas import ColumnJson, DeltaJson

PAGE_DELTAS: Final = 500
LINE_STYLES: Final[Sequence[Style]] = ("dim", "heading")


@uses_server
def pull(  # noqa: PLR0913 - each one is an option
    gateway: Name,
    *,
    since: Annotated[
        int, typer.Option(metavar="N", min=0, max=2**53 - 1, help="Only deltas with a higher sequence.")
    ] = 0,
    limit: Annotated[int | None, typer.Option(metavar="N", min=1, help="Stop after N deltas.")] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Continue with new deltas, until interrupted.")] = False,
    epoch: Annotated[
        str | None, typer.Option(help="Epoch of the --since value; the command fails if the log has a different one.")
    ] = None,
    as_json: AsJsonLines = None,
    timeout: Timeout = 30.0,
    remote: Remote,
) -> None:
    """Print the deltas of a gateway in sequence order, one per line.

    With --follow the command waits for a server that has not started yet, and reconnects with its cursor: no delta is
    lost, and none is shown twice. The exit status is 1 if the deltas were compacted, so that only a snapshot has their
    rows, and 2 if the server cannot be reached or has a different history (epoch).

    Examples:

      oncelog deltas pull shop --since 41

      oncelog deltas pull shop --follow --json | jq .rowId
    """
    source = Gateway(gateway, timeout, remote)
    printer = CursorPrinter(
        source.remote, since, limit, number_name="sequence", as_json=as_json, format_line=_format_line
    )
    asyncio.run(_PullCommand(source, epoch or "", printer).run(follow=follow))


class _PullCommand:
    """Pulls the deltas of a gateway, or follows them and reconnects."""

    def __init__(self, gateway: Gateway, epoch: str, printer: CursorPrinter) -> None:
        self._gateway = gateway
        self._epoch = epoch
        self._printer = printer
        self._retrier = Retrier(gateway.remote, waits_for_server=True)

    async def run(self, *, follow: bool) -> None:
        """Print the stored deltas and, with `follow`, new ones. Raises OncelogError if a retry would not help."""
        async with self._gateway:
            try:
                await run_while_output_open(
                    self._retrier.run(self._follow_connection) if follow else self._print_pages()
                )
            except GatewayRefusedError as error:
                raise (self._report_compacted() if error.is_compacted else self._printer.explain(error)) from error

    async def _print_pages(self) -> None:
        printer, has_more = self._printer, True
        while has_more and printer.remaining != 0:
            size, epoch = printer.compute_page_size(PAGE_DELTAS), self._epoch or None
            page = await self._gateway.request(DeltaPage[Raw], "pull", since=printer.cursor, limit=size, epoch=epoch)
            if page.is_compacted:
                raise self._report_compacted()
            printer.print(page.deltas)
            printer.advance(page.cursor)
            self._epoch, has_more = page.epoch, page.has_more

    async def _follow_connection(self) -> None:
        live = await self._gateway.transport.follow(self._printer.cursor or 0, self._epoch)
        try:
            self._retrier.mark_connected(f"reconnected; continuing after {self._printer.cursor}")
            self._epoch = live.epoch
            while self._printer.remaining != 0:
                page = await live.receive_encoded()
                if page.is_compacted:
                    raise self._report_compacted()
                self._printer.print(page.deltas)
        finally:
            await live.close()

    def _report_compacted(self) -> Exception:
        print_message(
            f"the deltas after {self._printer.cursor} have been compacted; only the merged rows contain them: "
            f"read these with `oncelog deltas snapshot {self._gateway.name}`, which prints the sequence to pull from"
        )
        return typer.Exit(EXIT_FOUND_NOTHING)


# --- lines ------------------------------------------------------------------------------------------------


class _StoredDelta(DeltaJson, frozen=True, kw_only=True):
    sequence: int


def _format_line(raw: Raw) -> bytes:
    """Format a delta as `17  INSERT  products  p1  till-1  {"name":"Tea"}`, with control characters escaped."""
    delta = msgspec.json.decode(raw, type=_StoredDelta)
    columns = msgspec.json.decode(delta.columns, type=list[ColumnJson])
    members = msgspec.json.encode({column.column: column.value for column in columns}).decode()
    return format_columns(
        [str(delta.sequence), delta.op.value, delta.table, delta.row_id, delta.client_id, members], LINE_STYLES
    )
