"""`oncelog deltas snapshot`: all rows of a gateway with all that a merge needs."""

import asyncio
import sys
from typing import Final

import orjson
from msgspec import Raw, Struct

from oncelog.cli.deltas.gateway import Gateway, Name, Timeout
from oncelog.cli.remote import DEFAULT_URL, Token, TokenFile, Url
from oncelog.cli.terminal import interrupt_on_sigterm, print_message, translate_errors
from oncelog.client.deltas.codec import GatewayRefusedError
from oncelog.errors import OncelogError

PAGE_ROWS: Final = 500


def snapshot(
    gateway: Name,
    timeout: Timeout = 30.0,
    url: Url = DEFAULT_URL,
    token: Token = None,
    token_file: TokenFile = None,
) -> None:
    """Prints all rows of a gateway with their clocks, deleted ones too, as JSON: an object a line.

    Deleted rows that a compaction has dropped are not there: replace the rows that you have by these.

    The last line is {"cursor", "epoch"}: from there go on with `oncelog deltas pull GATEWAY --since CURSOR`. Output
    without it is not whole.

    Example:  oncelog deltas snapshot shop > shop.jsonl
    """
    with translate_errors(), interrupt_on_sigterm():
        asyncio.run(_run_snapshot(Gateway(gateway, timeout, url, token, token_file)))


class _SnapshotPage(Struct, frozen=True):
    rows: list[Raw]
    cursor: int
    epoch: str
    next: str


async def _run_snapshot(gateway: Gateway) -> None:
    output = sys.stdout.buffer
    following, epoch = "", ""
    async with gateway:
        while True:
            try:
                page = await gateway.get(_SnapshotPage, "snapshot", limit=PAGE_ROWS, page=following or None)
            except GatewayRefusedError as error:
                if not error.is_compacted:
                    raise
                message = "deleted rows were dropped in the middle of the snapshot: run the same command again"
                raise OncelogError(message) from error
            if epoch and page.epoch != epoch:
                raise OncelogError("the log has another history now, in the middle of the snapshot: begin again")
            output.writelines(bytes(row) + b"\n" for row in page.rows)
            output.flush()
            following, epoch = page.next, page.epoch
            if not following:
                break
    output.write(orjson.dumps({"cursor": page.cursor, "epoch": epoch}) + b"\n")
    output.flush()
    print_message(f"go on with `oncelog deltas pull {gateway.name} --since {page.cursor} --epoch {epoch}`")
