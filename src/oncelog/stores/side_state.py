"""Side state as rows: how each mapping of a snapshot lies in a table of its own, the same in every database."""

import sys
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import Any, Final, NamedTuple

import msgspec

from oncelog.core.identity import lane_of
from oncelog.core.merge import Row
from oncelog.core.operations import Entity
from oncelog.core.row_codec import encode_row, row_of
from oncelog.core.tenants import Usage
from oncelog.core.values import Bucket, Changes, ClientEntry, Lease, Member, Roster, Snapshot

_FIRST_SURROGATE: Final = 0xD800
_FIRST_AFTER_SURROGATES: Final = 0xE000
USAGE: Final = "usage"
"""The one table whose rows may be of a lane that has not been written to, and are looked for by several lanes."""


MEMBERSHIP: Final = 1
ACKNOWLEDGEMENT: Final = 2
"""Kinds of changes of a member."""


class Table(NamedTuple):
    """How a mapping of a snapshot lies in its table."""

    name: str
    keys: tuple[str, ...]
    """The columns of the key after the lane."""
    values: tuple[str, ...]
    scope: Callable[[Any], str]
    """Where in the key the scope is, which says the lane."""
    columns_of_key: Callable[[Any], tuple[Any, ...]]
    key_of: Callable[[tuple[Any, ...]], Any]
    columns_of_value: Callable[[Any], tuple[Any, ...]]
    value_of: Callable[[tuple[Any, ...]], Any]


def _one(value: Any) -> tuple[Any, ...]:
    return (value,)


def _nowhere(_: Any) -> str:
    """Of no stream: in lane 0."""
    return ""


def _lease_key(identity: Any) -> tuple[Any, ...]:
    policy, scope, client, key = identity
    return (policy, scope, client, key.hex())


def _lease_identity(columns: tuple[Any, ...]) -> Any:
    policy, scope, client, key_hex = columns
    return (policy, scope, client, bytes.fromhex(key_hex))


def _encoded_row(row: Row) -> tuple[bytes]:
    return (encode_row(row),)


def entity_of(columns: Sequence[Any]) -> Entity:
    """An entity, from its columns."""
    value, version, expires_at_ms, erased = columns
    return Entity(value, version, expires_at_ms, bool(erased))


_FIRST: Final[Callable[[Any], Any]] = itemgetter(0)
_SECOND: Final[Callable[[Any], Any]] = itemgetter(1)
_ENTRY: Final = ("sequence", "last_seen_ms", "last_key", "last_fingerprint")
_LEASE: Final = ("fence", "holder", "until_ms", "fingerprint", "failed_fence", "failure")

TABLES: Final = (
    Table("streams", ("scope",), ("sequence",), str, _one, _FIRST, _one, _FIRST),
    Table("floors", ("scope",), ("floor",), str, _one, _FIRST, _one, _FIRST),
    Table(
        "clients",
        ("policy", "scope", "client"),
        _ENTRY,
        _SECOND,
        tuple,
        tuple,
        msgspec.structs.astuple,
        lambda columns: ClientEntry(*columns),
    ),
    Table(
        "entities",
        ("scope", "key"),
        ("value", "version", "expires_at_ms", "erased"),
        _FIRST,
        tuple,
        tuple,
        msgspec.structs.astuple,
        entity_of,
    ),
    Table(
        "relationships", ("scope", "resource", "relation", "subject"), ("version",), _FIRST, tuple, tuple, _one, _FIRST
    ),
    Table(
        "rows",
        ("scope", "table_name", "row_id"),
        ("state",),
        _FIRST,
        tuple,
        tuple,
        _encoded_row,
        lambda columns: row_of(columns[0]),
    ),
    Table(
        "leases",
        ("policy", "scope", "client", "key_hex"),
        _LEASE,
        _SECOND,
        _lease_key,
        _lease_identity,
        msgspec.structs.astuple,
        lambda columns: Lease(*columns),
    ),
    Table(
        "members",
        ("scope", "member"),
        ("joined", "is_owner"),
        _FIRST,
        tuple,
        tuple,
        lambda member: (member.joined, int(member.is_owner)),
        lambda columns: Member(columns[0], bool(columns[1])),
    ),
    Table(
        "rosters",
        ("scope",),
        ("members", "owners", "joined"),
        str,
        _one,
        _FIRST,
        msgspec.structs.astuple,
        lambda columns: Roster(*columns),
    ),
    Table("acknowledged", ("scope", "member"), ("sequence",), _FIRST, tuple, tuple, _one, _FIRST),
    Table("consumers", ("scope", "consumer"), ("cursor",), _FIRST, tuple, tuple, _one, _FIRST),
    Table(
        "horizons", ("scope",), ("hlc",), str, _one, _FIRST, lambda hlc: (str(hlc),), lambda columns: int(columns[0])
    ),
    Table(
        "rates",
        ("scope", "actor"),
        ("full_at_us",),
        _FIRST,
        tuple,
        tuple,
        msgspec.structs.astuple,
        lambda columns: Bucket(*columns),
    ),
    Table(
        USAGE,
        ("tenant",),
        ("bytes", "records", "full_at_us"),
        _nowhere,
        _one,
        _FIRST,
        msgspec.structs.astuple,
        lambda columns: Usage(*columns),
    ),
)


MEMBER_CHANGES: Final = Table(
    "member_changes", ("scope", "member", "kind"), ("revision",), _FIRST, tuple, tuple, _one, _FIRST
)
"""No mapping of a snapshot: when members have changed (`changed_members`), for those who follow them."""
PAST_MEMBERS: Final = Table(
    "member_changes",
    ("scope", "member", "kind"),
    (),
    _FIRST,
    lambda identity: (*identity, MEMBERSHIP),
    lambda columns: columns[:2],
    _one,
    lambda _: True,
)
"""`Snapshot.past_members`, which is only loaded: it is saved as `MEMBER_CHANGES`."""
KEPT: Final = (*TABLES, MEMBER_CHANGES)
"""All that a log keeps besides records."""


def lane_of_scope(scope: str, lanes: int) -> int:
    """The lane of a stream, or lane 0 where none is named (consumers of the whole log, rates of its writers)."""
    return lane_of(scope, lanes) if scope else 0


def changed_members(changes: Changes, lanes: int) -> list[tuple[int, str, str, int, int]]:
    """Lane, scope and member of all of whom something has changed, which kind of thing, and the revision it gets."""
    changed = [(identity, MEMBERSHIP) for identity in changes.members]
    changed += [(identity, ACKNOWLEDGEMENT) for identity in changes.acknowledged]
    places = sorted((lane_of_scope(scope, lanes), scope, member, kind) for (scope, member), kind in changed)
    return [(*place, changes.heads[place[0]].revision) for place in places]


def add_oldest(snapshot: Snapshot, rows: Iterable[Sequence[Any]]) -> None:
    """Add the oldest members to a snapshot. A row has scope, member, `joined`, `is_owner`, acknowledged or None."""
    members, acknowledged = dict(snapshot.members), dict(snapshot.acknowledged)
    for scope, member, joined, is_owner, sequence in rows:
        members[scope, member] = Member(joined, bool(is_owner))
        if sequence is not None:
            acknowledged[scope, member] = sequence
    snapshot.members, snapshot.acknowledged = members, acknowledged


def behind_prefix(prefix: str) -> str:
    """The first text, in the order of code points, behind all that begin with the prefix; "" if there is none."""
    while prefix:
        last = ord(prefix[-1]) + 1
        if last <= sys.maxunicode:
            return prefix[:-1] + chr(_FIRST_AFTER_SURROGATES if last == _FIRST_SURROGATE else last)
        prefix = prefix[:-1]
    return ""
