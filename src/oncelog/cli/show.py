"""`oncelog show`: what became of an identity, and why."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import typer

from oncelog.cli.record_id import (
    MESSAGE_PREFIX,
    AsText,
    ClientOption,
    PolicyOption,
    ReadAll,
    ScopeOption,
    check_no_options,
    describe_ambiguity,
    describe_gap,
    find_transaction,
    format_choices,
    parse_hex,
    parse_keys,
    parse_place,
    parse_transaction_place,
    select_policies,
)
from oncelog.cli.terminal import (
    EXIT_AMBIGUOUS,
    EXIT_FOUND_NOTHING,
    AsJson,
    LogArgument,
    ProgressMeter,
    escape_unprintable,
    print_json,
    translate_errors,
)
from oncelog.cli.times import format_utc
from oncelog.core.internal_records import find_last_eviction, is_internal
from oncelog.core.policy import CHAT, FOLD_POLICY, INTERNAL_POLICIES, RESTORE_POLICY, Forget
from oncelog.core.rules.audit import decode_audit_entry
from oncelog.core.values import KeyIdentity, Record
from oncelog.engine.outcome import NEVER_COMMITTED, Outcome, Status, describe_outcome
from oncelog.errors import CorruptError
from oncelog.storage.clock import JUMP_MS_MAX
from oncelog.storage.inspect.factory import create_inspector
from oncelog.storage.inspect.inspector import LogView
from oncelog.storage.key_search import KeyMatches, KeyQuery, search_keys
from oncelog.storage.leaps import NO_GAPS
from oncelog.storage.queries.records import find_block, find_record, load_gaps, load_heads
from oncelog.storage.verify.side_state import decode_policies

Id = Annotated[
    str,
    typer.Argument(
        help="A UUID, a key in hex or as text, a message's id (msg_…), a ledger transaction's id, or LANE:POSITION.",
        metavar="ID",
        show_default=False,
    ),
]


def show(  # noqa: PLR0913 - each is an option
    log: LogArgument,
    id: Id,  # noqa: A002 - what it is called where it is shown
    *,
    policy: PolicyOption = None,
    scope: ScopeOption = None,
    client: ClientOption = None,
    as_text: AsText = None,
    read_all: ReadAll = False,
    as_json: AsJson = False,
) -> None:
    """Prints what a log knows about an identity: committed, forgotten, leased or unknown, and its record with its body.

    Finds events, messages, ledger writes, deltas, runs and others by their keys, in all scopes. The key of a call of
    `once` and that of an Idempotency-Key header are found by the text that was given. The exit status is 0
    for one record, 1 for no record, and 3 if several writes have the key: then they are listed with the options that
    choose one.

    Example:  oncelog show orders.db 0198f3c2-7d55-7c1e-9a61-2f6f0c1b5a10

    Example:  oncelog show chat.db msg_00000000000003000000000007

    Example:  oncelog show app.db order-17

    Example:  oncelog show postgresql://oncelog@db.example.org/orders 0:17
    """
    with translate_errors():
        place = parse_place(id) if as_text is None else None
        keys = parse_keys(id, as_text) if place is None else ()
        options = {"--policy": policy, "--scope": scope, "--client": client, "--all": read_all or None}
        if place is not None:
            check_no_options(id, options)
        is_key = as_text is not None or any(value is not None for value in options.values())
        with create_inspector(log).open_view() as found, ProgressMeter() as meter:
            view = _Lookup(found)
            if place is not None:
                outcomes = [view.find_message_at(*place) if id.startswith(MESSAGE_PREFIX) else view.find_at(*place)]
                if outcomes[0].outcome.record is None:
                    outcomes = [_add_hint(outcomes[0])]
            elif not is_key and (transaction := find_transaction(found, parse_transaction_place(id))) is not None:
                outcomes = [view.find_at(transaction.lane, transaction.position)]
            else:
                query = KeyQuery(keys, select_policies(view.policies, policy), scope, client)
                matches = search_keys(found, query, meter, read_all=read_all)
                outcomes = [
                    finding
                    for finding in map(view.find_by_identity, matches.identities)
                    if finding.outcome.status is not Status.UNKNOWN
                ]
                outcomes = outcomes or [_build_unknown(id, query, matches) if view.policies else _build_undeclared()]
        _print_findings(outcomes, keys, as_json)
        if len(outcomes) > 1:
            raise typer.Exit(EXIT_AMBIGUOUS)
        if outcomes[0].outcome.record is None:
            raise typer.Exit(EXIT_FOUND_NOTHING)


def _print_findings(findings: "list[_Finding]", keys: Sequence[bytes], as_json: bool) -> None:
    if as_json:
        print_json([_to_json(finding) for finding in findings])
    else:
        typer.echo("\n".join(_format_finding(findings[0]) if len(findings) == 1 else _format_choices(findings, keys)))


def _build_unknown(text: str, query: KeyQuery, matches: KeyMatches) -> "_Finding":
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
    return _Finding(Outcome(Status.UNKNOWN, why), names[0] if len(names) == 1 else "")


def _add_hint(finding: "_Finding") -> "_Finding":
    """Add the option for a key whose text has the form of a place."""
    outcome = finding.outcome
    why = f"{outcome.why}. If the ID is the text of a key, add --text"
    return msgspec.structs.replace(finding, outcome=msgspec.structs.replace(outcome, why=why))


def _build_undeclared() -> "_Finding":
    why = "no record: the log knows no policy yet, so nothing was ever committed"
    return _Finding(Outcome(Status.UNKNOWN, why))


class _Eviction(msgspec.Struct, frozen=True):
    """The place and log time of an eviction."""

    lane: int
    position: int
    log_time_ms: int


class _Finding(msgspec.Struct, frozen=True):
    """An outcome, and where it was found."""

    outcome: Outcome
    policy: str = ""
    block_hash: bytes = b""
    scope: str = ""
    client: str = ""
    key: bytes = b""
    evicted: _Eviction | None = None
    """The eviction that removed the key."""


class _Lookup:
    """What a log has under keys and at places."""

    def __init__(self, view: LogView) -> None:
        self._view = view
        self._heads = view.run_query(load_heads)
        self._lanes = view.metadata.settings.lanes
        self.policies = decode_policies(view.iterate_rows("policies"))
        status = view.get_clock_status()
        self._time_ms = status.mark.propose(status.clock, JUMP_MS_MAX)[0].time_ms

    def find_by_identity(self, identity: KeyIdentity) -> _Finding:
        """What the log knows about an identity."""
        name, scope, client, key = identity
        key_status = self._view.get_key_status(identity)
        if name in INTERNAL_POLICIES and key_status.record is not None:
            return self._describe_internal(key_status.record)
        outcome = describe_outcome(self.policies[name], msgspec.structs.replace(key_status, time_ms=self._time_ms))
        return _Finding(
            outcome, name, self._load_block_hash(outcome.record), scope, client, key, self._find_eviction(outcome)
        )

    def find_at(self, lane: int, position: int) -> _Finding:
        """What stands at a place."""
        newest = self._heads[lane].position if lane in self._heads else 0
        if not 1 <= position <= newest:
            return _Finding(Outcome(Status.UNKNOWN, self._describe_missing(lane, newest)))
        record = self._view.run_query(find_record, lane, position)
        if record is None:
            passed_over = describe_gap(self._view, lane, position)
            if passed_over is not None:
                return _Finding(Outcome(Status.UNKNOWN, passed_over))
            raise CorruptError(f"lane {lane}, position {position}: the record is missing; see `oncelog verify`")
        if is_internal(record):
            return self._describe_internal(record)
        policy = self.policies.get(record.policy)
        if policy is None:
            raise CorruptError(f"lane {lane}, position {position}: the policy {record.policy!r} is not declared")
        if not record.key:
            why = "committed without a key: it is known by its client's sequence alone"
            return self._build_finding(Outcome(Status.COMMITTED, why, record), record)
        finding = self.find_by_identity(record.identity)
        if finding.outcome.record == record:
            return finding
        why = "committed, but forgotten: a later write has committed under the same key"
        if finding.outcome.record is not None:
            why += f", at position {finding.outcome.record.position}"
        return self._build_finding(Outcome(Status.FORGOTTEN, why, record), record)

    def _describe_internal(self, record: Record) -> _Finding:
        if record.policy == RESTORE_POLICY:
            why = f"the log was restored: its numbers continue above {record.position - 1}"
        elif record.policy == FOLD_POLICY:
            why = "a fold record: digests of the rows whose deltas compaction dropped"
        else:
            entry = decode_audit_entry(record)
            why = f"an audit record: {entry.act or 'erased'}, by {entry.actor}"
        return _Finding(Outcome(Status.COMMITTED, why, record), record.policy, self._load_block_hash(record))

    def _build_finding(self, outcome: Outcome, record: Record) -> _Finding:
        return _Finding(
            outcome,
            record.policy,
            self._load_block_hash(record),
            record.scope,
            record.client,
            record.key,
            self._find_eviction(outcome),
        )

    def _find_eviction(self, outcome: Outcome) -> _Eviction | None:
        """Find the first evicting position at which the key of a record was too old. Log time never goes back."""
        record = outcome.record
        if record is None or outcome.status is not Status.FORGOTTEN:
            return None
        retention, interval = self.policies[record.policy].retention, self._view.metadata.settings.eviction_interval
        if retention.forget is not Forget.AT_EVICTION:
            return None
        gaps = self._view.run_query(load_gaps).get(record.lane, NO_GAPS).positions

        def find_eviction_record(number: int) -> Record | None:
            position = find_last_eviction(number * interval, interval, gaps)
            return self._view.run_query(find_record, record.lane, position) if position > record.position else None

        def is_evicted(number: int) -> bool:
            at = find_eviction_record(number)
            return at is not None and not retention.remembers(record.log_time_ms, at.log_time_ms, at.log_time_ms)

        numbers = range(record.position // interval, self._heads[record.lane].position // interval + 1)
        first = bisect_left(numbers, x=True, key=is_evicted)
        at = find_eviction_record(numbers[first]) if first < len(numbers) else None
        return None if at is None else _Eviction(at.lane, at.position, at.log_time_ms)

    def find_message_at(self, lane: int, position: int) -> _Finding:
        """The message at a place."""
        finding = self.find_at(lane, position)
        record = finding.outcome.record
        if record is None or record.policy == CHAT.name:
            return finding
        why = f"no message: the record there is of the policy {record.policy!r}; to see it, ask for {lane}:{position}"
        return _Finding(Outcome(Status.UNKNOWN, why))

    def _describe_missing(self, lane: int, newest: int) -> str:
        if lane > self._lanes:
            return f"no record: lane {lane} does not exist; the log has lanes 0 to {self._lanes}"
        return f"no record: lane {lane} " + (f"has positions 1 to {newest}" if newest else "is still empty")

    def _load_block_hash(self, record: Record | None) -> bytes:
        if record is None:
            return b""
        block = self._view.run_query(find_block, record.lane, record.height)
        return b"" if block is None else block.hash


# --- how it is printed


def _to_json(finding: _Finding) -> dict[str, Any]:
    record, lease = finding.outcome.record, finding.outcome.lease
    plain: dict[str, Any] = {"state": finding.outcome.status.value, "reason": finding.outcome.why}
    if finding.policy:
        plain["policy"] = finding.policy
    if finding.outcome.status is not Status.UNKNOWN:
        plain |= {"scope": finding.scope, "client": finding.client}
    if record is not None:
        plain["record"] = {
            **msgspec.structs.asdict(record),
            "key": record.key.hex(),
            "fingerprint": record.fingerprint.hex(),
            "body": None if record.erased else _format_body(record)[1],
            "body_is_hex": _format_body(record)[0] == "body (hex)",
            "block_hash": finding.block_hash.hex(),
        }
    if finding.evicted is not None:
        plain["evicted"] = msgspec.structs.asdict(finding.evicted)
    if lease is not None:
        plain["lease"] = {"holder": lease.holder, "fence": lease.fence, "until_ms": lease.until_ms}
    return plain


def _format_choices(findings: list[_Finding], keys: Sequence[bytes]) -> list[str]:
    """One line for each of several writes: the options that choose it, and what became of it."""
    identities = [(finding.policy, finding.scope, finding.client, finding.key) for finding in findings]
    lines = [describe_ambiguity(identities)]
    for finding, options in zip(findings, format_choices(identities, keys), strict=False):
        lines.append(f"  {options}\n      {finding.outcome.status.value}: {escape_unprintable(finding.outcome.why)}")
    return lines


def _format_finding(finding: _Finding) -> list[str]:
    record, lease = finding.outcome.record, finding.outcome.lease
    lines = [f"{finding.outcome.status.value}: {finding.outcome.why}"]
    if finding.evicted is not None:
        at = finding.evicted
        lines.append(f"{'key evicted:':<16}lane {at.lane}, position {at.position}, {format_utc(at.log_time_ms)}")
    if record is not None:
        lines += [f"{name + ':':<16}{value}" for name, value in _list_fields(record, finding.block_hash) if value != ""]
    if lease is not None and lease.holder:
        lines.append(f"{'lease:':<16}{lease.holder}, fence {lease.fence}, until {format_utc(lease.until_ms)}")
    return lines


def _list_fields(record: Record, block_hash: bytes) -> list[tuple[str, str]]:
    return [
        ("place", f"lane {record.lane}, position {record.position}"),
        ("sequence", f"{record.sequence} of {record.scope}" if record.sequence else ""),
        ("time", format_utc(record.log_time_ms)),
        ("policy", record.policy),
        ("scope", record.scope),
        ("key", record.key.hex()),
        ("key as text", _decode_key_text(record.key)),
        ("fingerprint", record.fingerprint.hex()),
        ("actor", record.actor),
        ("client", f"{record.client}, sequence {record.client_sequence}" if record.client_sequence else record.client),
        ("partitions", ", ".join(record.partitions)),
        ("block", f"height {record.height}, {block_hash.hex()}"),
        ("erased", "yes: the body is gone, its hash stays") if record.erased else _format_body(record),
    ]


def _decode_key_text(key: bytes) -> str:
    try:
        text = key.decode()
    except UnicodeDecodeError:
        return ""
    return text if text.isprintable() else ""


def _format_body(record: Record) -> tuple[str, str]:
    """As text where it is text, and shows nothing that could write to the terminal by itself."""
    try:
        text = record.body.decode()
    except UnicodeDecodeError:
        return "body (hex)", record.body.hex()
    return ("body", text) if text.isprintable() or not text else ("body (hex)", record.body.hex())
