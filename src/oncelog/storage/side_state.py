"""Side state as rows: one table for each mapping of a snapshot, the same in every database."""

import sys
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import Any, Final, NamedTuple

import msgspec

from oncelog.core.identity import compute_lane
from oncelog.core.merge import Row
from oncelog.core.operations import Entity
from oncelog.core.row_codec import decode_row, encode_row
from oncelog.core.tenants import Usage
from oncelog.core.values import Bucket, Changes, ClientEntry, Lease, Member, Roster, Snapshot

_FIRST_SURROGATE: Final = 0xD800
_FIRST_AFTER_SURROGATES: Final = 0xE000
USAGE_TABLE: Final = "usage"
"""The one table whose rows may be of a lane that has not been written to, and are looked for by several lanes."""


MEMBERSHIP: Final = 1
ACKNOWLEDGEMENT: Final = 2
"""Kinds of changes of a member."""


class SideStateTable(NamedTuple):
    """How a mapping of a snapshot lies in its table."""

    name: str
    keys: tuple[str, ...]
    """The columns of the key after the lane."""
    values: tuple[str, ...]
    get_scope: Callable[[Any], str]
    """Where in the key the scope is, which says the lane."""
    encode_key: Callable[[Any], tuple[Any, ...]]
    decode_key: Callable[[tuple[Any, ...]], Any]
    encode_value: Callable[[Any], tuple[Any, ...]]
    decode_value: Callable[[tuple[Any, ...]], Any]


def _wrap(value: Any) -> tuple[Any, ...]:
    return (value,)


def _get_no_scope(_: Any) -> str:
    """Of no stream: in lane 0."""
    return ""


def _encode_lease_key(identity: Any) -> tuple[Any, ...]:
    policy, scope, client, key = identity
    return (policy, scope, client, key.hex())


def _decode_lease_key(columns: tuple[Any, ...]) -> Any:
    policy, scope, client, key_hex = columns
    return (policy, scope, client, bytes.fromhex(key_hex))


def _encode_row_column(row: Row) -> tuple[bytes]:
    return (encode_row(row),)


def decode_entity(columns: Sequence[Any]) -> Entity:
    """An entity, from its columns."""
    value, version, expires_at_ms, erased = columns
    return Entity(value, version, expires_at_ms, bool(erased))


_FIRST: Final[Callable[[Any], Any]] = itemgetter(0)
_SECOND: Final[Callable[[Any], Any]] = itemgetter(1)
_CLIENT_COLUMNS: Final = ("sequence", "last_seen_ms", "last_key", "last_fingerprint")
_LEASE_COLUMNS: Final = ("fence", "holder", "until_ms", "fingerprint", "failed_fence", "failure")

TABLES: Final = (
    SideStateTable("streams", ("scope",), ("sequence",), str, _wrap, _FIRST, _wrap, _FIRST),
    SideStateTable("floors", ("scope",), ("floor",), str, _wrap, _FIRST, _wrap, _FIRST),
    SideStateTable(
        "clients",
        ("policy", "scope", "client"),
        _CLIENT_COLUMNS,
        _SECOND,
        tuple,
        tuple,
        msgspec.structs.astuple,
        lambda columns: ClientEntry(*columns),
    ),
    SideStateTable(
        "entities",
        ("scope", "key"),
        ("value", "version", "expires_at_ms", "erased"),
        _FIRST,
        tuple,
        tuple,
        msgspec.structs.astuple,
        decode_entity,
    ),
    SideStateTable(
        "relationships", ("scope", "resource", "relation", "subject"), ("version",), _FIRST, tuple, tuple, _wrap, _FIRST
    ),
    SideStateTable(
        "rows",
        ("scope", "table_name", "row_id"),
        ("state",),
        _FIRST,
        tuple,
        tuple,
        _encode_row_column,
        lambda columns: decode_row(columns[0]),
    ),
    SideStateTable(
        "leases",
        ("policy", "scope", "client", "key_hex"),
        _LEASE_COLUMNS,
        _SECOND,
        _encode_lease_key,
        _decode_lease_key,
        msgspec.structs.astuple,
        lambda columns: Lease(*columns),
    ),
    SideStateTable(
        "members",
        ("scope", "member"),
        ("joined", "is_owner"),
        _FIRST,
        tuple,
        tuple,
        lambda member: (member.joined, int(member.is_owner)),
        lambda columns: Member(columns[0], bool(columns[1])),
    ),
    SideStateTable(
        "rosters",
        ("scope",),
        ("members", "owners", "joined"),
        str,
        _wrap,
        _FIRST,
        msgspec.structs.astuple,
        lambda columns: Roster(*columns),
    ),
    SideStateTable("acknowledged", ("scope", "member"), ("sequence",), _FIRST, tuple, tuple, _wrap, _FIRST),
    SideStateTable("consumers", ("scope", "consumer"), ("cursor",), _FIRST, tuple, tuple, _wrap, _FIRST),
    SideStateTable(
        "horizons", ("scope",), ("hlc",), str, _wrap, _FIRST, lambda hlc: (str(hlc),), lambda columns: int(columns[0])
    ),
    SideStateTable(
        "rates",
        ("scope", "actor"),
        ("full_at_us",),
        _FIRST,
        tuple,
        tuple,
        msgspec.structs.astuple,
        lambda columns: Bucket(*columns),
    ),
    SideStateTable(
        USAGE_TABLE,
        ("tenant",),
        ("bytes", "records", "full_at_us"),
        _get_no_scope,
        _wrap,
        _FIRST,
        msgspec.structs.astuple,
        lambda columns: Usage(*columns),
    ),
)


MEMBER_CHANGES: Final = SideStateTable(
    "member_changes", ("scope", "member", "kind"), ("revision",), _FIRST, tuple, tuple, _wrap, _FIRST
)
"""No mapping of a snapshot: when members have changed (`build_member_change_rows`), for those who follow them."""
PAST_MEMBERS: Final = SideStateTable(
    "member_changes",
    ("scope", "member", "kind"),
    (),
    _FIRST,
    lambda identity: (*identity, MEMBERSHIP),
    lambda columns: columns[:2],
    _wrap,
    lambda _: True,
)
"""`Snapshot.past_members`, which is only loaded: it is saved as `MEMBER_CHANGES`."""
STORED_TABLES: Final = (*TABLES, MEMBER_CHANGES)
"""All that a log keeps besides records."""


def lane_of_scope(scope: str, lanes: int) -> int:
    """The lane of a stream, or lane 0 where none is named (consumers of the whole log, rates of its writers)."""
    return compute_lane(scope, lanes) if scope else 0


def build_member_change_rows(changes: Changes, lanes: int) -> list[tuple[int, str, str, int, int]]:
    """Lane, scope and member of all of whom something has changed, which kind of thing, and the revision it gets."""
    changed = [(identity, MEMBERSHIP) for identity in changes.members]
    changed += [(identity, ACKNOWLEDGEMENT) for identity in changes.acknowledged]
    places = sorted((lane_of_scope(scope, lanes), scope, member, kind) for (scope, member), kind in changed)
    return [(*place, changes.heads[place[0]].revision) for place in places]


def add_oldest_members(snapshot: Snapshot, rows: Iterable[Sequence[Any]]) -> None:
    """Add the oldest members to a snapshot. A row has scope, member, `joined`, `is_owner`, acknowledged or None."""
    members, acknowledged = dict(snapshot.members), dict(snapshot.acknowledged)
    for scope, member, joined, is_owner, sequence in rows:
        members[scope, member] = Member(joined, bool(is_owner))
        if sequence is not None:
            acknowledged[scope, member] = sequence
    snapshot.members, snapshot.acknowledged = members, acknowledged


def compute_prefix_end(prefix: str) -> str:
    """The first text, in the order of code points, behind all that begin with the prefix; "" if there is none."""
    while prefix:
        last = ord(prefix[-1]) + 1
        if last <= sys.maxunicode:
            return prefix[:-1] + chr(_FIRST_AFTER_SURROGATES if last == _FIRST_SURROGATE else last)
        prefix = prefix[:-1]
    return ""
