"""Side state as rows: one table for each mapping of a snapshot, the same in every database.

`TABLES` describes each table: key columns, value columns, and the codecs of both. Loading, saving, expiry, verification
and migration of side state are derived from it.
"""

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import Any, Final, NamedTuple

import msgspec

from oncelog.core.identity import compute_lane
from oncelog.core.merge import decode_row, encode_row
from oncelog.core.operations import Entity
from oncelog.core.tenants import Usage
from oncelog.core.values import Bucket, Changes, ClientEntry, Lease, Member, Roster, Snapshot

_FIRST_SURROGATE: Final = 0xD800
_FIRST_AFTER_SURROGATES: Final = 0xE000
USAGE_TABLE: Final = "usage"
"""The only table that has rows in lanes without records, and the only one whose rows several lanes share."""
MEMBERSHIP: Final = 1
ACKNOWLEDGEMENT: Final = 2
"""`MEMBERSHIP` and `ACKNOWLEDGEMENT` are the two kinds of member changes."""

Columns = Mapping[str, str]
"""Column names in order, with their PostgreSQL types. SQLite ignores the types."""
TEXT: Final = "text"
BIGINT: Final = "bigint"
BYTEA: Final = "bytea"
_INTEGER: Final = "integer"
_FIRST: Final[Callable[[Any], Any]] = itemgetter(0)
_SECOND: Final[Callable[[Any], Any]] = itemgetter(1)


def _wrap(value: Any) -> tuple[Any, ...]:
    return (value,)


class SideStateTable(NamedTuple):
    """Table for one mapping. The fields of snapshot, changes and read set have the same name as the table.

    The defaults suit keys of several text columns that begin with the scope, and values that are one number.
    """

    name: str
    keys: Columns
    """Columns of the key after the lane."""
    values: Columns
    get_scope: Callable[[Any], str] = _FIRST
    """Returns the scope in a key, which determines the lane."""
    encode_key: Callable[[Any], tuple[Any, ...]] = tuple
    decode_key: Callable[[tuple[Any, ...]], Any] = tuple
    encode_value: Callable[[Any], tuple[Any, ...]] = _wrap
    decode_value: Callable[[tuple[Any, ...]], Any] = _FIRST
    expires: bool = False
    """Whether rows expire by log time. Expired rows are deleted later (`queries.expiry`)."""
    is_rebuilt: bool = False
    """Whether the records determine the rows, so that `oncelog verify` can rebuild them."""

    @property
    def has_long_keys(self) -> bool:
        """Return whether keys have several text columns.

        A PostgreSQL index can hold any single name, but not every combination.
        """
        return len(self.keys) > 1

    @property
    def columns(self) -> tuple[str, ...]:
        """Return all columns: lane, key and values."""
        return ("lane", *self.keys, *self.values)


def _of_scope(name: str, values: Columns, **codec: Any) -> SideStateTable:
    """Describe a table whose key is a scope."""
    return SideStateTable(name, {"scope": TEXT}, values, str, _wrap, _FIRST, **codec)


def _texts(*names: str) -> Columns:
    return dict.fromkeys(names, TEXT)


def _struct_codec(struct: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the codec of a value whose fields are the columns."""
    return {"encode_value": msgspec.structs.astuple, "decode_value": lambda columns: struct(*columns)}


def decode_entity(columns: Sequence[Any]) -> Entity:
    """Return an entity from its columns."""
    value, version, expires_at_ms, erased = columns
    return Entity(value, version, expires_at_ms, bool(erased))


STREAMS: Final = _of_scope("streams", {"sequence": BIGINT})
FLOORS: Final = _of_scope("floors", {"floor": BIGINT})
CLIENTS: Final = SideStateTable(
    "clients",
    _texts("policy", "scope", "client"),
    {"sequence": BIGINT, "last_seen_ms": BIGINT, "last_key": BYTEA, "last_fingerprint": BYTEA},
    _SECOND,
    **_struct_codec(ClientEntry),
    expires=True,
    is_rebuilt=True,
)
ENTITIES: Final = SideStateTable(
    "entities",
    _texts("scope", "key"),
    {"value": BYTEA, "version": BIGINT, "expires_at_ms": BIGINT, "erased": _INTEGER},
    encode_value=msgspec.structs.astuple,
    decode_value=decode_entity,
    expires=True,
    is_rebuilt=True,
)
ROWS: Final = SideStateTable(
    "rows",
    _texts("scope", "table_name", "row_id"),
    {"state": BYTEA},
    encode_value=lambda row: (encode_row(row),),
    decode_value=lambda columns: decode_row(columns[0]),
    is_rebuilt=True,
)
LEASES: Final = SideStateTable(
    "leases",
    _texts("policy", "scope", "client", "key_hex"),
    {
        "fence": BIGINT,
        "holder": TEXT,
        "until_ms": BIGINT,
        "fingerprint": BYTEA,
        "failed_fence": BIGINT,
        "failure": BYTEA,
    },
    _SECOND,
    lambda identity: (*identity[:3], identity[3].hex()),
    lambda columns: (*columns[:3], bytes.fromhex(columns[3])),
    **_struct_codec(Lease),
    expires=True,
)
HORIZONS: Final = _of_scope(
    "horizons", {"hlc": TEXT}, encode_value=lambda hlc: (str(hlc),), decode_value=lambda columns: int(columns[0])
)

TABLES: Final = (
    STREAMS,
    FLOORS,
    CLIENTS,
    ENTITIES,
    SideStateTable(
        "relationships", _texts("scope", "resource", "relation", "subject"), {"version": BIGINT}, is_rebuilt=True
    ),
    ROWS,
    LEASES,
    SideStateTable(
        "members",
        _texts("scope", "member"),
        {"joined": BIGINT, "is_owner": _INTEGER},
        encode_value=lambda member: (member.joined, int(member.is_owner)),
        decode_value=lambda columns: Member(columns[0], bool(columns[1])),
    ),
    _of_scope("rosters", {"members": BIGINT, "owners": BIGINT, "joined": BIGINT}, **_struct_codec(Roster)),
    SideStateTable("acknowledged", _texts("scope", "member"), {"sequence": BIGINT}),
    SideStateTable("consumers", _texts("scope", "consumer"), {"cursor": BIGINT}),
    HORIZONS,
    SideStateTable("rates", _texts("scope", "actor"), {"full_at_us": BIGINT}, **_struct_codec(Bucket), expires=True),
    SideStateTable(
        USAGE_TABLE,
        _texts("tenant"),
        {"bytes": BIGINT, "records": BIGINT, "full_at_us": BIGINT},
        lambda _: "",  # lane 0
        _wrap,
        _FIRST,
        **_struct_codec(Usage),
    ),
)
_MEMBER_CHANGE_KEYS: Final = {**_texts("scope", "member"), "kind": _INTEGER}
MEMBER_CHANGES: Final = SideStateTable("member_changes", _MEMBER_CHANGE_KEYS, {"revision": BIGINT})
"""Revisions of member changes for subscribers (`build_member_change_rows`). The table is only written: no mapping
corresponds to it."""
PAST_MEMBERS: Final = SideStateTable(
    "member_changes",
    _MEMBER_CHANGE_KEYS,
    {},
    encode_key=lambda identity: (*identity, MEMBERSHIP),
    decode_key=lambda columns: columns[:2],
    decode_value=lambda _: True,
)
"""`Snapshot.past_members`, which is only loaded. Its rows are saved through `MEMBER_CHANGES`."""
STORED_TABLES: Final = (*TABLES, MEMBER_CHANGES)
"""All tables of a log except records."""
get_mappings: Final[Callable[[Any], tuple[Any, ...]]] = attrgetter(*(table.name for table in TABLES))
"""Returns the fields of a read set, a snapshot or changes in the order of `TABLES`."""


class ChangedRows(NamedTuple):
    """Changes of one table in a batch. Rows have lane, key and values; deleted rows have lane and key."""

    inserted: list[tuple[Any, ...]]
    """Rows that may exist already, unless the caller knows the existing rows."""
    updated: list[tuple[Any, ...]]
    """Rows that exist already."""
    deleted: list[tuple[Any, ...]]


def iterate_changes(
    changes: Changes,
    lanes: int,
    encoders: Mapping[str, Callable[[Any], tuple[Any, ...]]],
    stored: Snapshot | None = None,
    updatable: Collection[str] = (),
) -> Iterator[tuple[SideStateTable, ChangedRows]]:
    """Yield each table that a batch changes, with the changed rows.

    `encoders` encode the values of each table. `stored` has the existing rows of the tables listed in `updatable`.
    """
    for table, changed in zip(TABLES, get_mappings(changes), strict=True):
        if not changed:
            continue
        known = getattr(stored, table.name) if stored is not None and table.name in updatable else ()
        encode_value = encoders[table.name]
        inserted: list[tuple[Any, ...]] = []
        updated: list[tuple[Any, ...]] = []
        deleted: list[tuple[Any, ...]] = []
        for key, value in changed.items():
            columns = (lane_of_scope(table.get_scope(key), lanes), *table.encode_key(key))
            if value is None:
                deleted.append(columns)
            else:
                (updated if key in known else inserted).append((*columns, *encode_value(value)))
        yield table, ChangedRows(inserted, updated, deleted)
    if changes.members or changes.acknowledged:
        yield MEMBER_CHANGES, ChangedRows(build_member_change_rows(changes, lanes), [], [])


def lane_of_scope(scope: str, lanes: int) -> int:
    """Return the lane of a stream.

    An empty scope has lane 0 (consumers of the whole log, and the rates of its writers).
    """
    return compute_lane(scope, lanes) if scope else 0


def build_member_change_rows(changes: Changes, lanes: int) -> list[tuple[Any, ...]]:
    """Return the lane, scope, member, kind and revision of each member change in a batch."""
    changed = [(identity, MEMBERSHIP) for identity in changes.members]
    changed += [(identity, ACKNOWLEDGEMENT) for identity in changes.acknowledged]
    places = sorted((lane_of_scope(scope, lanes), scope, member, kind) for (scope, member), kind in changed)
    return [(*place, changes.heads[place[0]].revision) for place in places]


def compute_prefix_end(prefix: str) -> str:
    """Return the first string, by code points, after all strings that begin with the prefix, or "" if none exists."""
    while prefix:
        last = ord(prefix[-1]) + 1
        if last <= sys.maxunicode:
            return prefix[:-1] + chr(_FIRST_AFTER_SURROGATES if last == _FIRST_SURROGATE else last)
        prefix = prefix[:-1]
    return ""
