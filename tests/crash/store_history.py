"""Build a history that the invariants can check from the content of a store."""

from collections.abc import Iterable, Mapping, Sequence

from core.invariants import Answer, History, ObservedRead, find_violations
from oncelog.core.internal_records import is_internal
from oncelog.core.values import Committed, KeyIdentity, Receipt, Record, Replayed, Submission, Verdict, key_identity
from oncelog.storage.store import Query, Store

Order = list[tuple[int, int, KeyIdentity]]
"""Lane, position and identity of each record, in the order in which the records were read."""


async def read_all_records(store: Store) -> list[Record]:
    """Return all records, lane by lane, in order."""
    found: list[Record] = []
    for lane in await store.heads():
        query = Query(lane=lane, limit=5000)
        page = await store.read(query)
        found += page.records
        while page.has_more:
            page = await store.read(Query(lane=lane, limit=5000, after=page.next))
            found += page.records
    return found


async def read_history(
    store: Store, answers: Sequence[Answer] = (), readings: Sequence[ObservedRead] = (), *, with_keys: bool = True
) -> History:
    """Return the complete content of a store with the given answers and readings."""
    records = await read_all_records(store)
    heads = await store.heads()
    identities = list(dict.fromkeys(identity_of(record) for record in records if record.key))
    remembered = await store.find_keys(identities) if with_keys else []
    scopes = {record.scope for record in records if record.sequence}
    return History(
        records=records,
        settings=store.settings,
        answers=answers,
        readings=readings,
        keys={one: known for one, known in zip(identities, remembered, strict=True) if known} if with_keys else None,
        streams={scope: (await store.read(Query(stream=scope, limit=1))).newest for scope in scopes},
        positions={lane: head.position for lane, head in heads.items()},
    )


def list_submissions(history: History) -> list[Record]:
    """Return the records that are not internal."""
    return [record for record in history.records if not is_internal(record)]


def check_sound(history: History) -> None:
    """Assert that the history violates no invariant."""
    assert find_violations(history) == []


def identity_of(record: Record) -> KeyIdentity:
    """Return the identity under which a record is remembered. Only ledger writes have a client sequence."""
    return (record.policy, record.scope, record.client if record.client_sequence else "", record.key)


def list_order(history: History) -> Order:
    """Return the order in which a reader receives the records."""
    return [(record.lane, record.position, identity_of(record)) for record in history.records]


def check_kept(before: Iterable[tuple[int, int, KeyIdentity]], history: History) -> None:
    """Assert that records read before are still at the same positions."""
    now = {(lane, position): identity for lane, position, identity in list_order(history)}
    for lane, position, identity in before:
        assert now.get((lane, position)) == identity, (
            f"lane {lane}, position {position}: the record differs from an earlier read"
        )


def check_stored(answers: Iterable[Answer], history: History) -> None:
    """Assert that every acknowledged write is stored once, with the acknowledged content and position."""
    stored: dict[KeyIdentity, list[Record]] = {}
    for record in history.records:
        stored.setdefault(identity_of(record), []).append(record)
    for answer in answers:
        receipt = get_receipt(answer.verdict)
        assert receipt is not None, answer
        (record,) = stored[answer.identity]
        assert record.fingerprint == answer.fingerprint
        assert (record.lane, record.position, record.sequence) == (receipt.lane, receipt.position, receipt.sequence)
        assert (record.log_time_ms, record.height) == (receipt.log_time_ms, receipt.height)


def check_same_receipts(answers: Iterable[Answer]) -> dict[KeyIdentity, Receipt]:
    """Assert that all answers to an identity have the same receipt, and return the receipts by identity."""
    receipts: dict[KeyIdentity, Receipt] = {}
    for answer in answers:
        receipt = get_receipt(answer.verdict)
        assert receipt is not None, answer
        assert receipts.setdefault(answer.identity, receipt) == receipt
    return receipts


def build_answer(submission: Submission, verdict: Verdict) -> Answer:
    """Build the answer that a caller received for a submission."""
    return Answer(key_identity(submission), submission.fingerprint, verdict, submission.client_sequence)


def get_receipt(verdict: Verdict) -> Receipt | None:
    """Return the receipt of a successful verdict, or None."""
    return verdict.receipt if isinstance(verdict, Committed | Replayed) else None


def say(text: str) -> None:
    """Print a line, which pytest shows with `-s` and for failed tests."""
    print(text)  # noqa: T201


def build_reading(seen: Mapping[int, KeyIdentity], reader: str, upto: int | None = None) -> ObservedRead:
    """Build a reading of lane 0 from its beginning."""
    last = max(seen, default=0) if upto is None else upto
    return ObservedRead(reader, 0, 0, last, list(seen.items()))
