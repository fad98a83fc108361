"""What a store holds, as a history that the invariants can judge."""

from collections.abc import Iterable, Mapping, Sequence

from oncelog.core.invariants import Answer, History, Reading, violations
from oncelog.core.values import Committed, KeyIdentity, Receipt, Record, Replayed, Submission, Verdict, key_identity
from oncelog.stores.protocol import Query, Store

Order = list[tuple[int, int, KeyIdentity]]
"""Lane, position and identity of every record, as it was read."""


async def records_of(store: Store) -> list[Record]:
    """All records, lane by lane, in order."""
    found: list[Record] = []
    for lane in await store.heads():
        query = Query(lane=lane, limit=5000)
        page = await store.read(query)
        found += page.records
        while page.has_more:
            page = await store.read(Query(lane=lane, limit=5000, after=page.next))
            found += page.records
    return found


async def history_of(
    store: Store, answers: Sequence[Answer] = (), readings: Sequence[Reading] = (), *, with_keys: bool = True
) -> History:
    """Everything that a store shows of itself, with what callers and readers were told."""
    records = await records_of(store)
    heads = await store.heads()
    identities = list(dict.fromkeys(identity_of(record) for record in records if record.key))
    remembered = await store.remembered(identities) if with_keys else []
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


def demand_sound(history: History) -> None:
    """No invariant is violated, whatever was told before."""
    assert violations(history) == []


def identity_of(record: Record) -> KeyIdentity:
    """Under what the record is remembered. Only ledger clients number their writes."""
    return (record.policy, record.scope, record.client if record.client_sequence else "", record.key)


def order_of(history: History) -> Order:
    """The order that a reader sees."""
    return [(record.lane, record.position, identity_of(record)) for record in history.records]


def demand_kept(before: Iterable[tuple[int, int, KeyIdentity]], history: History) -> None:
    """What was read before is where it was."""
    now = {(lane, position): identity for lane, position, identity in order_of(history)}
    for lane, position, identity in before:
        assert now.get((lane, position)) == identity, f"lane {lane}, position {position}: not what it was"


def demand_stored(answers: Iterable[Answer], history: History) -> None:
    """Every write that was answered is there, once, with the content and the place that were told."""
    stored: dict[KeyIdentity, list[Record]] = {}
    for record in history.records:
        stored.setdefault(identity_of(record), []).append(record)
    for answer in answers:
        receipt = receipt_in(answer.verdict)
        assert receipt is not None, answer
        (record,) = stored[answer.identity]
        assert record.fingerprint == answer.fingerprint
        assert (record.lane, record.position, record.sequence) == (receipt.lane, receipt.position, receipt.sequence)
        assert (record.log_time_ms, record.height) == (receipt.log_time_ms, receipt.height)


def demand_same_receipts(answers: Iterable[Answer]) -> dict[KeyIdentity, Receipt]:
    """All answers to one identity carry one receipt; gives it."""
    receipts: dict[KeyIdentity, Receipt] = {}
    for answer in answers:
        receipt = receipt_in(answer.verdict)
        assert receipt is not None, answer
        assert receipts.setdefault(answer.identity, receipt) == receipt
    return receipts


def answer_to(submission: Submission, verdict: Verdict) -> Answer:
    """What a caller was told about a submission."""
    return Answer(key_identity(submission), submission.fingerprint, verdict, submission.client_sequence)


def receipt_in(verdict: Verdict) -> Receipt | None:
    """The receipt of a success; None for anything else."""
    return verdict.receipt if isinstance(verdict, Committed | Replayed) else None


def say(text: str) -> None:
    """Shown with `-s`, and where a test fails."""
    print(text)  # noqa: T201


def by_position(seen: Mapping[int, KeyIdentity], reader: str, upto: int | None = None) -> Reading:
    """A reading of lane 0 from its beginning."""
    last = max(seen, default=0) if upto is None else upto
    return Reading(reader, 0, 0, last, list(seen.items()))
