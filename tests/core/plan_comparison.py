"""Run a history through `plan` and through its model (`plan_model`), and compare verdicts and state."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from core.plan_generator import (
    CONSUMERS,
    MEMBERS,
    SCOPES,
    SNAPSHOT_TABLES,
    History,
)
from core.plan_model import PlanModel, Validate
from core.plan_model_events import LeaseChange, Write
from core.plan_model_rules import entity_of, identity_of, newest, row_of
from oncelog.core.operations import Operation, Relate, Unrelate
from oncelog.core.plan import plan
from oncelog.core.policy import (
    AUDIT_POLICY,
    LEDGER,
    Order,
)
from oncelog.core.read_set import ReadSet, build_read_set
from oncelog.core.rules.audit import APPLICATION_ACTOR, decode_audit_entry
from oncelog.core.values import (
    Applied,
    ClientEntry,
    Committed,
    Granted,
    LaneHead,
    Reason,
    Record,
    Refused,
    Remembered,
    Replayed,
    Role,
    Snapshot,
    Submission,
    Verdict,
)
from oncelog.testing.memory_log import MemoryLog

# --- comparing -------------------------------------------------------------------------------------------


def compare(history: History) -> Counter[str]:
    """Run the history through both, and compare verdicts and state. Return the number of verdicts of each kind."""
    log, model = MemoryLog(history.settings, draw=bytes), PlanModel(history.settings)
    verdicts_by_kind: Counter[str] = Counter()
    for number, (batch, now_ms, validate) in enumerate(history.steps):
        asked: list[Submission] = []
        asked_by_model: list[Submission] = []
        expected = model.submit(batch, now_ms, record_calls(validate, asked_by_model))
        actual = log.submit(batch, now_ms, record_calls(validate, asked))
        assert [[remove_messages(it) for it in verdicts] for verdicts in actual] == expected, f"batch {number}"
        assert asked == asked_by_model, f"batch {number}: validate was called for different submissions"
        verdicts_by_kind.update(name_verdict(verdict) for verdicts in expected for verdict in verdicts)
    compare_order(log, model)
    compare_memory(log, model)
    compare_side_state(log, model)
    compare_rates(log, model)
    return verdicts_by_kind


def remove_messages(verdict: Verdict) -> Verdict:
    """Remove the messages and field names, because the model does not produce them."""
    if not isinstance(verdict, Refused):
        return verdict
    names_an_entity = verdict.reason in (
        Reason.KEY_EXISTS,
        Reason.KEY_NOT_FOUND,
        Reason.VERSION_MISMATCH,
        Reason.VALUE_MISMATCH,
    )
    return replace(verdict, message="", field=verdict.field if names_an_entity else "")


def record_calls(validate: Validate | None, asked: list[Submission]) -> Validate | None:
    """Wrap `validate` to record its submissions, which must be new writes (CO-18)."""

    def record(submission: Submission) -> str | None:
        asked.append(submission)
        return validate(submission) if validate else None

    return record if validate else None


def name_verdict(verdict: Verdict) -> str:
    match verdict:
        case Refused():
            return verdict.reason.name
        case Replayed(receipt=None):
            return "Replayed without a receipt"
        case Replayed(mismatch=True):
            return "Replayed with a mismatch"
        case Applied():
            return f"Applied {verdict.changed}"
        case _:
            return type(verdict).__name__


def compare_order(log: MemoryLog, model: PlanModel) -> None:
    lanes = range(model.settings.lanes + 1)
    heads = [replace(log.snapshot.heads.get(lane, LaneHead()), block_hash=b"") for lane in lanes]
    assert heads == [
        LaneHead(
            position=model.position(lane),
            log_time_ms=model.saved_log_time_ms(lane),
            eviction_time_ms=max(model.evictions(lane), default=0),
            fence=model.fence(lane),
            revision=model.revision(lane),
            height=len(model.blocks(lane)),
            block_hash=b"",
        )
        for lane in lanes
    ]
    by_lane = [[record for record in log.records if record.lane == lane] for lane in lanes]
    for lane, records in zip(lanes, by_lane, strict=True):
        written = [build_record(write) for write in model.writes() if write.receipt.lane == lane]
        assert [record for record in records if record.policy != AUDIT_POLICY] == written
        assert [decode_act(record) for record in records if record.policy == AUDIT_POLICY] == [
            (
                act.position,
                act.at_ms,
                act.act,
                act.item.actor or APPLICATION_ACTOR,
                act.item.scope,
                act.target,
                {} if act.role is None else {"role": act.role.value},
            )
            for act in model.acts(lane)
        ]
    scopes = {getattr(it, "scope", "") for it in model.history}
    streams = {write.submission.scope for write in model.writes() if write.receipt.sequence}
    streams |= {scope for scope in scopes if model.is_open(scope) and scope}
    assert log.snapshot.streams == {scope: model.sequence(scope) for scope in streams}


def decode_act(record: Record) -> tuple[object, ...]:
    """Decode an audit record into the fields that the model knows."""
    entry = decode_audit_entry(record)
    return entry.position, entry.log_time_ms, entry.act, entry.actor, entry.scope, entry.target, entry.details


def build_record(write: Write) -> Record:
    submission, receipt = write.submission, write.receipt
    return Record(
        lane=receipt.lane,
        position=receipt.position,
        sequence=receipt.sequence,
        log_time_ms=receipt.log_time_ms,
        height=receipt.height,
        policy=submission.policy.name,
        scope=submission.scope,
        key=submission.key,
        fingerprint=submission.fingerprint,
        actor=submission.actor,
        client=submission.client,
        client_sequence=submission.client_sequence,
        partitions=submission.partitions,
        body=submission.body,
    )


def compare_memory(log: MemoryLog, model: PlanModel) -> None:
    """Compare keys, client sequences, clients and leases. A store may still have expired entries, but no additional
    ones.
    """
    keys, numbers, clients = set(), set(), set()
    for write in model.writes():
        submission, receipt = write.submission, write.receipt
        name, scope, client, key = identity_of(submission)
        remembered = Remembered(receipt, submission.fingerprint)
        if key:
            keys.add((name, scope, client, key))
            if model.known(submission) == write:
                assert log.snapshot.keys[name, scope, client, key] == remembered
        if not submission.policy.client_sequence:
            continue
        numbers.add((name, scope, client, submission.client_sequence))
        clients.add((name, scope, client))
        number = submission.client_sequence
        if newest(it for it in model.client_writes(submission) if it.submission.client_sequence == number) == write:
            assert log.snapshot.sequences[name, scope, client, submission.client_sequence] == remembered
        if newest(model.client_writes(submission)) == write and model.last_client_sequence(submission):
            entry = ClientEntry(submission.client_sequence, receipt.log_time_ms, key, submission.fingerprint)
            assert log.snapshot.clients[name, scope, client] == entry
    assert log.snapshot.keys.keys() <= keys
    assert log.snapshot.sequences.keys() <= numbers
    assert log.snapshot.clients.keys() <= clients
    compare_leases(log, model)


def compare_leases(log: MemoryLog, model: PlanModel) -> None:
    changes = [event for event in model.history if isinstance(event, LeaseChange)]
    for change in changes:
        lease = model.lease(change.item)
        assert lease is None or log.snapshot.leases[identity_of(change.item)] == lease
    assert log.snapshot.leases.keys() <= {identity_of(change.item) for change in changes}


def compare_side_state(log: MemoryLog, model: PlanModel) -> None:
    """Compare the other tables as a reader sees them at the log time of the lane."""
    snapshot = log.snapshot
    cursors = {(scope, name): model.cursor(scope, name) for scope in ("", *SCOPES) for name in CONSUMERS}
    assert snapshot.consumers == {name: cursor for name, cursor in cursors.items() if cursor is not None}
    for scope in SCOPES:
        operations = model.operations(scope)
        log_time_ms = model.saved_log_time_ms(model.lane_of(LEDGER, scope))
        stored = {key: it for (its_scope, key), it in snapshot.entities.items() if its_scope == scope}
        entities = {key: entity_of(operations, key, log_time_ms) for key in ("k", "l")}
        live = {key: it for key, it in stored.items() if it.expires_at_ms is None or it.expires_at_ms > log_time_ms}
        assert live == {key: it for key, it in entities.items() if it}
        relationships = {it[1:]: version for it, version in snapshot.relationships.items() if it[0] == scope}
        assert relationships == collect_relationships(operations)
        for row_id in ("r", "s"):
            row, expected = snapshot.rows.get((scope, "t", row_id)), row_of(model.deltas(scope, "t", row_id))
            assert (row is not None and row.exists, row.values if row else {}) == (
                expected is not None,
                expected or {},
            )
        members = {name: it for (its_scope, name), it in snapshot.members.items() if its_scope == scope}
        joined = sorted(members, key=lambda name: members[name].joined)
        roles = {name: Role.OWNER if members[name].is_owner else Role.MEMBER for name in joined}
        assert list(roles.items()) == list(model.roles(scope).items())
        for member in MEMBERS:
            assert snapshot.acknowledged.get((scope, member), 0) == model.acknowledged(scope, member)


def compare_rates(log: MemoryLog, model: PlanModel) -> None:
    """Compare the tokens of each actor that wrote under a rate, at the log time of the lane."""
    names = set()
    for write in model.writes():
        submission = write.submission
        if submission.rate is None or submission.fence:
            continue
        name = (submission.scope if submission.policy.order is Order.STREAM else "", submission.actor)
        names.add(name)
        at_ms = model.saved_log_time_ms(write.receipt.lane)
        left_us, price_us = model.tokens_us(submission, submission.rate, at_ms)
        full_at_us = at_ms * 1000 + submission.rate.burst * price_us - left_us
        assert max(log.snapshot.rates[name].full_at_us, at_ms * 1000) == full_at_us
    assert log.snapshot.rates.keys() == names


def collect_relationships(operations: Sequence[tuple[int, Operation]]) -> dict[tuple[str, str, str], int]:
    """Return the relationships of a scope after the operations, each with the version that created it."""
    made: dict[tuple[str, str, str], int] = {}
    for version, operation in operations:
        if isinstance(operation, Relate):
            made.setdefault((operation.resource, operation.relation, operation.subject), version)
        elif isinstance(operation, Unrelate):
            made.pop((operation.resource, operation.relation, operation.subject), None)
    return made


def check_read_sets(history: History) -> None:
    """Assert that `plan` reads and writes only keys in its read set, and does not modify the snapshot."""
    log = MemoryLog(history.settings, draw=bytes)
    for batch, now_ms, validate in history.steps:
        needs = build_read_set(batch, history.settings)
        whole, part = restrict(log.snapshot, None), restrict(log.snapshot, needs)
        decided = plan(batch, log.snapshot, now_ms, validate)
        assert log.snapshot == whole
        assert plan(batch, part, now_ms, validate) == decided
        for table in SNAPSHOT_TABLES:
            assert getattr(decided.changes, table).keys() <= select_keys(needs, table, whole)
        log.save(decided.changes)


def restrict(snapshot: Snapshot, needs: ReadSet | None) -> Snapshot:
    """Copy the snapshot, or the part of it that is in the read set."""
    tables: dict[str, Any] = {table: dict(getattr(snapshot, table)) for table in SNAPSHOT_TABLES}
    if needs is not None:
        for table, rows in tables.items():
            tables[table] = {name: value for name, value in rows.items() if name in select_keys(needs, table, snapshot)}
    return Snapshot(settings=snapshot.settings, past_members=dict(snapshot.past_members), **tables)


def select_keys(needs: ReadSet, table: str, snapshot: Snapshot) -> set[Any]:
    """Return the keys that a store loads from a table, including the oldest members that the read set asks for."""
    names: set[Any] = getattr(needs, "lanes" if table == "heads" else table)
    if table not in ("members", "acknowledged"):
        return names
    by_age = sorted(snapshot.members, key=lambda name: snapshot.members[name].joined)
    oldest = [[name for name in by_age if name[0] == scope][:count] for scope, count in needs.oldest.items()]
    return names.union(*oldest)


def check_retries(history: History) -> None:
    """Assert that a batch without new writes changes nothing (CO-15)."""
    log = MemoryLog(history.settings, draw=bytes)
    for batch, now_ms, validate in history.steps:
        decided = plan(batch, log.snapshot, now_ms, validate)
        is_anything_new = any(is_new(verdict) for verdicts in decided.verdicts for verdict in verdicts)
        assert decided.changes.is_empty is not is_anything_new
        if not is_anything_new:
            assert not decided.changes.records
            assert not any(getattr(decided.changes, table) for table in SNAPSHOT_TABLES)
        log.save(decided.changes)


def is_new(verdict: Verdict) -> bool:
    return isinstance(verdict, Committed | Granted) or verdict == Applied(changed=True)
