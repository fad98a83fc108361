"""IDs of records as `show` and `proof` accept them, and the options that choose among several writes of a key."""

import re
from collections.abc import Mapping, Sequence
from shlex import quote
from typing import Annotated, Final
from uuid import UUID

import typer

from oncelog.cli.terminal import escape_unprintable
from oncelog.core.chat import parse_message_id
from oncelog.core.internal_records import find_gap
from oncelog.core.policy import LEDGER, Policy
from oncelog.core.transactions import parse_tx_id
from oncelog.core.values import KeyIdentity, Record
from oncelog.errors import OncelogError
from oncelog.idempotency.call_key import encode_key
from oncelog.storage.inspect.inspector import LogView
from oncelog.storage.key_search import MATCHES_MAX
from oncelog.storage.leaps import NO_GAPS
from oncelog.storage.queries.records import find_record, load_gaps, load_heads

MESSAGE_PREFIX: Final = "msg_"
_PLACE: Final = re.compile(r"(\d{1,9}):(\d{1,15})", re.ASCII)
_HEX: Final = re.compile(r"([0-9a-fA-F]{2})+")

Place = tuple[int, int]
"""Lane and position."""

PolicyOption = Annotated[str | None, typer.Option("--policy", help="Look under this policy only.")]
ScopeOption = Annotated[
    str | None, typer.Option("--scope", help="Look in this scope (or stream) only; '' is that of most events.")
]
ClientOption = Annotated[
    str | None, typer.Option("--client", help="Look for a key of this client, where clients number their writes.")
]
AsText = Annotated[
    bool | None,
    typer.Option(
        "--text/--hex",
        help="Read ID only as the text of a key, or only as a UUID or hex. Without either, search for both.",
        show_default=False,
    ),
]
ReadAll = Annotated[bool, typer.Option("--all", help="Read all records, even if the key index has found the key.")]


def parse_place(text: str) -> Place | None:
    """Return lane and position if a text names a record by them: LANE:POSITION, or a message's id."""
    place = _PLACE.fullmatch(text)
    if place is not None:
        return int(place[1]), int(place[2])
    if not text.startswith(MESSAGE_PREFIX):
        return None
    found = parse_message_id(text)
    if found is None:
        raise OncelogError(
            f"{text!r} is not a message's id: that is msg_ and 26 hexadecimal digits, lower case. "
            "If it is the text of a key, add --text."
        )
    return found


def check_no_options(place: str, options: Mapping[str, object]) -> None:
    """Raise OncelogError if options of a key are given with a place."""
    conflicting = [name for name, value in options.items() if value is not None]
    if conflicting:
        raise OncelogError(
            f"{place} names a record by its place: {conflicting[0]} goes with a key. "
            "If it is the text of a key, add --text."
        )


def parse_transaction_place(text: str) -> Place | None:
    """Return lane and position if a text has the form of a ledger transaction's id. It can be a key as well."""
    return parse_tx_id(text.lower())


def find_transaction(view: LogView, place: Place | None) -> Record | None:
    """Return the record at a place if it is a transaction of a ledger."""
    if place is None:
        return None
    lane, position = place
    head = view.run_query(load_heads).get(lane)
    record = (
        view.run_query(find_record, lane, position) if head is not None and 1 <= position <= head.position else None
    )
    return None if record is None or record.policy != LEDGER.name else record


def parse_keys(text: str, as_text: bool | None) -> tuple[bytes, ...]:
    """Return the keys that a text can mean: those of a UUID or hex, and of the text itself."""
    key_bytes = parse_hex(text)
    if as_text is False:
        if key_bytes is None:
            raise OncelogError(f"{text!r} is not a UUID or a key in hex: --hex is for these.")
        return (key_bytes,)
    try:
        key = encode_key(text)
    except ValueError as error:
        if key_bytes is None or as_text:
            raise OncelogError(f"the ID cannot be a key: {error}.") from None
        return (key_bytes,)
    return (key,) if key_bytes is None or as_text else (key_bytes, key)


def parse_hex(text: str) -> bytes | None:
    """Return the bytes of a UUID or of hex digits."""
    if _HEX.fullmatch(text):
        return bytes.fromhex(text)
    try:
        return UUID(text).bytes
    except ValueError:
        return None


def select_policies(policies: Mapping[str, Policy], name: str | None) -> tuple[Policy, ...]:
    """Return the policy of this name, or all. Raises OncelogError for a name that the log does not know."""
    if name is None:
        return tuple(policies.values())
    if name not in policies:
        raise OncelogError(f"the log knows no policy {name!r}; it has {', '.join(policies) or 'none'}.")
    return (policies[name],)


def describe_ambiguity(identities: Sequence[KeyIdentity]) -> str:
    """Return the sentence above the list of several writes with one key."""
    count = f"more than {MATCHES_MAX}" if len(identities) > MATCHES_MAX else str(len(identities))
    return f"ambiguous: {count} writes have this key. Choose one with these options:"


def format_choices(identities: Sequence[KeyIdentity], keys: Sequence[bytes]) -> list[str]:
    """Return the options that choose each of several writes. The last of several keys is that of the text."""
    are_of_both = len({key for *_, key in identities}) > 1
    lines = []
    for policy, scope, client, key in identities[:MATCHES_MAX]:
        options = f"--policy {policy} --scope {quote(escape_unprintable(scope))}"
        if client:
            options += f" --client {quote(escape_unprintable(client))}"
        if are_of_both:
            options += " --text" if key == keys[-1] else " --hex"
        lines.append(options)
    return lines


def describe_gap(view: LogView, lane: int, position: int) -> str | None:
    """Return why a position below the newest has no record, if a restore passed over it."""
    gap = find_gap(view.run_query(load_gaps).get(lane, NO_GAPS).positions, position)
    if gap is None:
        return None
    return f"no record: a restore passed over lane {lane}, positions {gap[0] + 1} to {gap[1] - 1}"
