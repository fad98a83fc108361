"""Parse record IDs for `show` and `proof`, and find the records."""

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from shlex import quote
from typing import Annotated, Final
from uuid import UUID

import msgspec
import typer
from msgspec import Struct

from oncelog.cli.output import escape_unprintable, format_label, format_utc
from oncelog.cli.terminal import ProgressMeter
from oncelog.core.chat import parse_message_id
from oncelog.core.internal_records import Gap, find_gap, find_last_eviction, is_internal
from oncelog.core.policy import CHAT, FOLD_POLICY, INTERNAL_POLICIES, LEDGER, RESTORE_POLICY, Forget, Policy
from oncelog.core.rules.audit import decode_audit_entry
from oncelog.core.transactions import parse_tx_id
from oncelog.core.values import KeyIdentity, Record
from oncelog.engine.outcome import NEVER_COMMITTED, Outcome, Status, describe_outcome, describe_stored
from oncelog.errors import CorruptError, OncelogError
from oncelog.idempotency.call_key import encode_key
from oncelog.proof import RecordHeader
from oncelog.storage.clock import JUMP_MS_MAX
from oncelog.storage.inspect.inspector import LogView
from oncelog.storage.key_search import MATCHES_MAX, KeyMatches, KeyQuery, search_keys
from oncelog.storage.metadata import DAMAGE_HINT, NO_GAPS
from oncelog.storage.queries.records import find_block, find_record, load_gaps, load_heads
from oncelog.storage.verify.side_state import decode_policies

MESSAGE_PREFIX: Final = "msg_"
LABEL_WIDTH: Final = 16
"""Width of the labels in front of the fields of a record."""
_PLACE: Final = re.compile(r"(\d{1,9}):(\d{1,15})", re.ASCII)
_HEX: Final = re.compile(r"([0-9a-fA-F]{2})+")

Place = tuple[int, int]
"""Lane and position."""

PolicyOption = Annotated[str | None, typer.Option("--policy", help="Search under this policy only.")]
ScopeOption = Annotated[
    str | None, typer.Option("--scope", help="Search in this scope (or stream) only. Most events have the scope ''.")
]
ClientOption = Annotated[
    str | None,
    typer.Option("--client", help="Search for a key of this client, under policies whose clients number their writes."),
]
AsText = Annotated[
    bool | None,
    typer.Option(
        "--text/--hex",
        help="Interpret ID only as the text of a key, or only as a UUID or hex. Default: both.",
        show_default=False,
    ),
]
ReadAll = Annotated[bool, typer.Option("--all", help="Read all records, even if the key index has found the key.")]


class KeyOptions(Struct, frozen=True):
    """The options of `show` and `proof` that apply to a key."""

    policy: str | None
    scope: str | None
    client: str | None
    as_text: bool | None
    read_all: bool

    def to_flags(self) -> dict[str, object]:
        """Return the options by name, with None for an option that was not given."""
        options = {"--policy": self.policy, "--scope": self.scope, "--client": self.client}
        form = "--hex" if self.as_text is False else "--text"
        return {**options, form: self.as_text, "--all": self.read_all or None}

    def find_first(self) -> str | None:
        """Return the name of the first option that was given."""
        return next((name for name, value in self.to_flags().items() if value is not None), None)


class RecordId(Struct, frozen=True):
    """An ID with its options: a place, or the keys that the text may represent."""

    text: str
    options: KeyOptions
    place: Place | None
    keys: tuple[bytes, ...] = ()


def parse_record_id(text: str, options: KeyOptions) -> RecordId:
    """Parse an ID. Raises OncelogError."""
    place = parse_place(text) if options.as_text is None else None
    if place is None:
        return RecordId(text, options, None, parse_keys(text, options.as_text))
    conflicting = options.find_first()
    if conflicting is not None:
        raise OncelogError(
            f"{text} is the place of a record: {conflicting} needs a key. If it is the text of a key, add --text."
        )
    return RecordId(text, options, place)


def parse_place(text: str) -> Place | None:
    """Parse a place: LANE:POSITION or a message's id. Return None if the text is neither."""
    place = parse_lane_position(text)
    if place is not None:
        return place
    if not text.startswith(MESSAGE_PREFIX):
        return None
    found = parse_message_id(text)
    if found is None:
        raise OncelogError(
            f"{text!r} is not the id of a message: it must be msg_ followed by 26 lower-case hexadecimal digits. "
            "If it is the text of a key, add --text."
        )
    return found


def parse_lane_position(text: str) -> Place | None:
    """Parse LANE:POSITION. Return None if the text has another form."""
    place = _PLACE.fullmatch(text)
    return None if place is None else (int(place[1]), int(place[2]))


def parse_keys(text: str, as_text: bool | None) -> tuple[bytes, ...]:
    """Return the keys that an ID may represent: the bytes of a UUID or hex, and the key with this text."""
    key_bytes = parse_hex(text)
    if as_text is False:
        if key_bytes is None:
            raise OncelogError(f"{text!r} is neither a UUID nor a key in hex, as --hex requires.")
        return (key_bytes,)
    try:
        key = encode_key(text)
    except ValueError as error:
        if key_bytes is None or as_text:
            raise OncelogError(f"the ID cannot be a key: {error}.") from None
        return (key_bytes,)
    return (key,) if key_bytes is None or as_text else (key_bytes, key)


def parse_hex(text: str) -> bytes | None:
    """Return the bytes of hex digits or a UUID, or None if the text is neither."""
    if _HEX.fullmatch(text):
        return bytes.fromhex(text)
    try:
        return UUID(text).bytes
    except ValueError:
        return None


class Finding(msgspec.Struct, frozen=True):
    """An outcome, and the identity or place under which it was found."""

    outcome: Outcome
    identity: KeyIdentity = ("", "", "", b"")
    block_hash: bytes = b""
    evicted: Record | None = None
    """The record at whose position the key was evicted."""


def find_records(view: LogView, record_id: RecordId, meter: ProgressMeter) -> list[Finding]:
    """Find the records that an ID may refer to. If no record is found, the only finding explains why.

    An ID that looks like that of a ledger transaction may also be a key. The transaction is looked up first.
    """
    lookup, options = _RecordLookup(view), record_id.options
    if record_id.place is not None:
        if record_id.text.startswith(MESSAGE_PREFIX):
            return [lookup.find_of_policy(record_id.place, CHAT, "message")]
        return [lookup.find_at(*record_id.place)]
    place = parse_tx_id(record_id.text.lower()) if options.find_first() is None else None
    transaction = None if place is None else lookup.find_of_policy(place, LEDGER, "transaction")
    if transaction is not None and transaction.outcome.record is not None:
        return [transaction]
    query = KeyQuery(record_id.keys, _select_policies(lookup.policies, options.policy), options.scope, options.client)
    matches = search_keys(view, query, meter, read_all=options.read_all)
    findings = [lookup.find_by_identity(identity) for identity in matches.identities]
    found = [finding for finding in findings if finding.outcome.status is not Status.UNKNOWN]
    if found:
        return found
    if not lookup.policies:
        why = "no record: the log has no policy yet, so nothing was ever committed"
        return [Finding(Outcome(Status.UNKNOWN, why))]
    return [_build_unknown(record_id.text, query, matches, transaction)]


def _build_unknown(text: str, query: KeyQuery, matches: KeyMatches, transaction: Finding | None) -> Finding:
    names = [policy.name for policy in query.policies]
    searched = f"under {', '.join(names)}"
    if query.scope is not None:
        searched += f" in the scope {query.scope!r}"
    if query.client is not None:
        searched += f" for the client {query.client!r}"
    read = "the key index" if matches.records_read is None else f"all {matches.records_read} records, and all leases,"
    in_hex = parse_hex(text)
    if in_hex is None:
        forms = "the key with this text (it is neither a UUID nor hex)"
    else:
        named = {in_hex: "the key in hex"}
        forms = " and ".join(named.get(key, "the key with this text") for key in query.keys)
    why = f"{NEVER_COMMITTED}. Searched: {read} {searched}, for {forms}"
    if transaction is not None:
        why += f". As the id of a transaction: {transaction.outcome.why}"
    return Finding(Outcome(Status.UNKNOWN, why), (names[0] if len(names) == 1 else "", "", "", b""))


class _RecordLookup:
    """Looks up the records of a log by key and by place."""

    def __init__(self, view: LogView) -> None:
        self._view = view
        self._heads = view.run_query(load_heads)
        self._lanes = view.metadata.settings.lanes
        self.policies = decode_policies(view.iterate_rows("policies"))
        status = view.get_clock_status()
        self._time_ms = status.mark.propose(status.now, JUMP_MS_MAX)[0].time_ms

    def find_by_identity(self, identity: KeyIdentity) -> Finding:
        """Look up an identity."""
        name = identity[0]
        key_status = self._view.get_key_status(identity)
        if name in INTERNAL_POLICIES and key_status.record is not None:
            return self._describe_internal(key_status.record)
        key_status = msgspec.structs.replace(key_status, time_ms=self._time_ms)
        return self._build_finding(describe_outcome(self.policies[name], key_status), identity)

    def find_at(self, lane: int, position: int) -> Finding:
        """Look up a place."""
        newest = self._heads[lane].position if lane in self._heads else 0
        if not 1 <= position <= newest:
            return Finding(Outcome(Status.UNKNOWN, self._describe_missing(lane, newest)))
        record = self._view.run_query(find_record, lane, position)
        if record is None:
            gap = find_gap(self._load_gaps(lane), position)
            if gap is not None:
                passed_over = f"lane {lane}, positions {gap[0] + 1} to {gap[1] - 1}"
                return Finding(Outcome(Status.UNKNOWN, f"no record: a restore skipped {passed_over}"))
            raise CorruptError(f"lane {lane}, position {position}: the record is missing; {DAMAGE_HINT}")
        if is_internal(record):
            return self._describe_internal(record)
        policy = self.policies.get(record.policy)
        if policy is None:
            raise CorruptError(f"lane {lane}, position {position}: the policy {record.policy!r} is not declared")
        finding = self.find_by_identity(record.identity) if record.key else None
        if finding is not None and finding.outcome.record == record:
            return finding
        outcome = describe_stored(record, None if finding is None else finding.outcome)
        return self._build_finding(outcome, (record.policy, record.scope, record.client, record.key))

    def _describe_internal(self, record: Record) -> Finding:
        if record.policy == RESTORE_POLICY:
            why = f"the log was restored: its numbers continue above {record.position - 1}"
        elif record.policy == FOLD_POLICY:
            why = "a fold record: digests of the rows whose deltas compaction dropped"
        else:
            entry = decode_audit_entry(record)
            why = f"an audit record: {entry.act or 'erased'}, by {entry.actor}"
        return self._build_finding(Outcome(Status.COMMITTED, why, record), (record.policy, "", "", b""))

    def _build_finding(self, outcome: Outcome, identity: KeyIdentity) -> Finding:
        """Build a finding, with the block hash of the record and the record that evicted its key."""
        record = outcome.record
        if record is None:
            return Finding(outcome, identity)
        block = self._view.run_query(find_block, record.lane, record.height)
        evicted = self._find_eviction(record) if outcome.status is Status.FORGOTTEN else None
        return Finding(outcome, identity, b"" if block is None else block.hash, evicted)

    def _find_eviction(self, record: Record) -> Record | None:
        """Find the first eviction position at which a record's key was too old. Log time never decreases."""
        retention, interval = self.policies[record.policy].retention, self._view.metadata.settings.eviction_interval
        if retention.forget is not Forget.AT_EVICTION:
            return None
        gaps = self._load_gaps(record.lane)

        def find_eviction_record(number: int) -> Record | None:
            position = find_last_eviction(number * interval, interval, gaps)
            return self._view.run_query(find_record, record.lane, position) if position > record.position else None

        def is_evicted(number: int) -> bool:
            at = find_eviction_record(number)
            return at is not None and not retention.remembers(record.log_time_ms, at.log_time_ms, at.log_time_ms)

        numbers = range(record.position // interval, self._heads[record.lane].position // interval + 1)
        first = bisect_left(numbers, x=True, key=is_evicted)
        return find_eviction_record(numbers[first]) if first < len(numbers) else None

    def find_of_policy(self, place: Place, policy: Policy, kind: str) -> Finding:
        """Return the record at a place if it has the policy. `kind` is what users call such a record."""
        finding = self.find_at(*place)
        record = finding.outcome.record
        if record is None or record.policy == policy.name:
            return finding
        why = (
            f"no {kind}: the record there has the policy {record.policy!r}; to see it, use the ID {place[0]}:{place[1]}"
        )
        return Finding(Outcome(Status.UNKNOWN, why))

    def _describe_missing(self, lane: int, newest: int) -> str:
        if lane > self._lanes:
            return f"no record: lane {lane} does not exist; the log has lanes 0 to {self._lanes}"
        return f"no record: lane {lane} " + (f"has positions 1 to {newest}" if newest else "is still empty")

    def _load_gaps(self, lane: int) -> Sequence[Gap]:
        return self._view.run_query(load_gaps).get(lane, NO_GAPS).positions


def _select_policies(policies: Mapping[str, Policy], name: str | None) -> tuple[Policy, ...]:
    """Return the policy with this name, or all policies for None. Raises OncelogError for an unknown name."""
    if name is None:
        return tuple(policies.values())
    if name not in policies:
        raise OncelogError(f"the log has no policy {name!r}; it has {', '.join(policies) or 'none'}.")
    return (policies[name],)


def describe_ambiguity(identities: Sequence[KeyIdentity]) -> str:
    """Return the heading for a list of writes that share a key."""
    count = f"more than {MATCHES_MAX}" if len(identities) > MATCHES_MAX else str(len(identities))
    return f"ambiguous: {count} writes have this key. Choose one with these options:"


def format_choices(identities: Sequence[KeyIdentity], keys: Sequence[bytes]) -> list[str]:
    """Return the options that select each of several writes. `keys[-1]` is the ID encoded as text."""
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


def format_fields(
    record: Record | RecordHeader, key: str, fingerprint: str, more: Sequence[tuple[str, str]], key_text: str = ""
) -> list[str]:
    """Format a record, with one line for each field that has a value. `more` follows the common fields."""
    client = f"{record.client}, sequence {record.client_sequence}" if record.client_sequence else record.client
    fields = [
        ("place", f"lane {record.lane}, position {record.position}"),
        ("sequence", f"{record.sequence} of {record.scope}" if record.sequence else ""),
        ("time", format_utc(record.log_time_ms)),
        ("policy", record.policy),
        ("scope", record.scope),
        ("key", key),
        ("key as text", key_text),
        ("fingerprint", fingerprint),
        ("actor", record.actor),
        ("client", client),
        ("partitions", ", ".join(record.partitions)),
        *more,
    ]
    return [format_label(name, LABEL_WIDTH) + escape_unprintable(value) for name, value in fields if value]
