"""`oncelog deltas compact`: drops the bodies of old deltas."""

import asyncio
from typing import Annotated

import orjson
import typer
from msgspec import Struct

from oncelog.cli.deltas.gateway import Gateway, Name, Timeout
from oncelog.cli.remote import DEFAULT_URL, GaveUpError, Token, TokenFile, Url, remote_of, say
from oncelog.cli.terminal import AsJson, Meter, ending_well, print_json, terminated_as_interrupted
from oncelog.errors import OncelogError
from oncelog.stores.verifying.findings import Progress

_GOES_ON = "Run the same command again, and it goes on."


def compact(  # noqa: PLR0913, PLR0917 - each one is an option
    gateway: Name,
    upto: Annotated[
        int | None, typer.Option(metavar="N", min=0, max=2**53 - 1, help="Those up to this sequence.")
    ] = None,
    keep: Annotated[
        int | None, typer.Option(metavar="N", min=0, max=2**53 - 1, help="All but this many of the newest.")
    ] = None,
    timeout: Timeout = 60.0,
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
    token: Token = None,
    token_file: TokenFile = None,
) -> None:
    """Drops the bodies of old deltas; the rows stay, and so do ids, sequences and hashes. It cannot be undone.

    It may be interrupted: what is compacted stays so, and the same command goes on. Readers whose cursor is older
    get a snapshot.

    Example:  oncelog deltas compact shop --keep 100000
    """
    with ending_well(), terminated_as_interrupted():
        if (upto is None) == (keep is None):
            raise OncelogError("one of --upto and --keep must be given, and not both")
        remote = remote_of(url, token, token_file)
        body = orjson.dumps({"keep": keep} if upto is None else {"upto": upto})
        done = asyncio.run(_run(Gateway(remote, gateway, timeout), body, upto or 0))
        if as_json:
            print_json({"compacted": done.compacted, "upto": done.upto})
        else:
            typer.echo(f"{done.compacted} deltas compacted; nothing up to {done.upto} has a body any more")


class _Compacted(Struct, frozen=True, rename="camel"):
    compacted: int
    upto: int
    has_more: bool = False


async def _run(gateway: Gateway, body: bytes, wanted: int) -> _Compacted:
    """Request after request, as each compacts no more than a server does at once."""
    compacted = 0
    async with gateway:
        with Meter() as meter:
            try:
                while True:
                    done = await gateway.post(_Compacted, "compact", body)
                    compacted += done.compacted
                    meter(Progress("compacting", done.upto, wanted))
                    if not done.has_more:
                        return _Compacted(compacted, done.upto)
            except asyncio.CancelledError:
                say(f"interrupted; {compacted} deltas are compacted. {_GOES_ON}")
                raise
            except GaveUpError as error:
                raise OncelogError(f"{error}; {compacted} deltas are compacted. {_GOES_ON}") from error
