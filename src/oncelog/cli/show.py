"""`oncelog show`: what became of an identity, and why."""

import re
from typing import Annotated, Any, Final
from uuid import UUID

import msgspec
import typer

from oncelog.cli.terminal import FOUND_NOTHING, AsJson, File, ending_well, print_json
from oncelog.cli.times import utc
from oncelog.core.policy import Policy
from oncelog.core.values import Record
from oncelog.errors import OncelogError
from oncelog.stores.sqlite.looking import looking_at
from oncelog.stores.sqlite.showing import Shown, shown_at, shown_under
from oncelog.stores.sqlite.verifying_state import declared

_PLACE: Final = re.compile(r"(\d{1,9}):(\d{1,14})", re.ASCII)
_HEX: Final = re.compile(r"([0-9a-fA-F]{2})+")

Id = Annotated[str, typer.Argument(help="A UUID, a key in hex, or LANE:POSITION.", metavar="ID", show_default=False)]


def show(
    file: File,
    id: Id,  # noqa: A002 - what it is called where it is shown
    policy: Annotated[str | None, typer.Option(help="Look under this policy only.")] = None,
    scope: Annotated[str, typer.Option(help="Where the key is unique; the stream, where there is one.")] = "",
    client: Annotated[str, typer.Option(help="Whose key it is, where clients number their writes.")] = "",
    as_json: AsJson = False,
) -> None:
    """Prints what a log knows about an identity: committed, forgotten, leased or unknown, and its record with its body.

    The exit status is 0 if there is a record and 1 if there is none.

    Example:  oncelog show orders.db 0198f3c2-7d55-7c1e-9a61-2f6f0c1b5a10
    """
    with ending_well():
        place, key = _parsed(id)
        with looking_at(file) as (connection, found):
            policies = declared(connection)
            if place is not None:
                shown = [shown_at(connection, found, policies, *place)]
            else:
                chosen = _chosen(policies, policy)
                shown = [shown_under(connection, found, one, scope, client, key) for one in chosen]
        told = [one for one in shown if one.state != "unknown" or one.lease is not None] or shown[:1] or [_undeclared()]
        if as_json:
            print_json([_plain(one) for one in told])
        else:
            typer.echo("\n\n".join("\n".join(_lines(one)) for one in told))
        if all(one.record is None for one in told):
            raise typer.Exit(FOUND_NOTHING)


def _parsed(text: str) -> tuple[tuple[int, int] | None, bytes]:
    place = _PLACE.fullmatch(text)
    if place is not None:
        return (int(place[1]), int(place[2])), b""
    if _HEX.fullmatch(text):
        return None, bytes.fromhex(text)
    try:
        return None, UUID(text).bytes
    except ValueError:
        raise OncelogError(f"{text!r} is neither a UUID nor a key in hex nor LANE:POSITION.") from None


def _chosen(policies: dict[str, Policy], name: str | None) -> list[Policy]:
    if name is None:
        return list(policies.values())
    if name not in policies:
        raise OncelogError(f"the log knows no policy {name!r}; it has {', '.join(policies) or 'none'}.")
    return [policies[name]]


def _undeclared() -> Shown:
    return Shown("unknown", "no record: the log knows no policy yet, so nothing was ever committed")


# --- how it is printed


def _plain(shown: Shown) -> dict[str, Any]:
    record = shown.record
    plain: dict[str, Any] = {"state": shown.state, "reason": shown.reason}
    if shown.policy:
        plain["policy"] = shown.policy
    if record is not None:
        plain["record"] = {
            **msgspec.structs.asdict(record),
            "key": record.key.hex(),
            "fingerprint": record.fingerprint.hex(),
            "body": None if record.erased else _body(record)[1],
            "body_is_hex": _body(record)[0] == "body (hex)",
            "block_hash": shown.block_hash.hex(),
        }
    if shown.lease is not None:
        lease = shown.lease
        plain["lease"] = {"holder": lease.holder, "fence": lease.fence, "until_ms": lease.until_ms}
    return plain


def _lines(shown: Shown) -> list[str]:
    lines = [f"{shown.state}: {shown.reason}"]
    record = shown.record
    if record is not None:
        lines += [f"{name + ':':<16}{value}" for name, value in _fields(record, shown.block_hash) if value != ""]
    if shown.lease is not None and shown.lease.holder:
        lease = shown.lease
        lines.append(f"{'lease:':<16}{lease.holder}, fence {lease.fence}, until {utc(lease.until_ms)}")
    return lines


def _fields(record: Record, block_hash: bytes) -> list[tuple[str, str]]:
    return [
        ("place", f"lane {record.lane}, position {record.position}"),
        ("sequence", f"{record.sequence} of {record.scope}" if record.sequence else ""),
        ("time", utc(record.log_time_ms)),
        ("policy", record.policy),
        ("scope", record.scope),
        ("key", record.key.hex()),
        ("fingerprint", record.fingerprint.hex()),
        ("actor", record.actor),
        ("client", f"{record.client}, sequence {record.client_sequence}" if record.client_sequence else record.client),
        ("partitions", ", ".join(record.partitions)),
        ("block", f"height {record.height}, {block_hash.hex()}"),
        ("erased", "yes: the body is gone, its hash stays") if record.erased else _body(record),
    ]


def _body(record: Record) -> tuple[str, str]:
    """As text where it is text, and shows nothing that could write to the terminal by itself."""
    try:
        text = record.body.decode()
    except UnicodeDecodeError:
        return "body (hex)", record.body.hex()
    return ("body", text) if text.isprintable() or not text else ("body (hex)", record.body.hex())
