"""The core without I/O: canonical forms, fingerprints, the decision, block hashes."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from hashlib import sha256
from typing import Any, Final

import rfc8785

from bench.measure import Effort, Measurement
from bench.sample_event import EVENT, META
from oncelog.core.canonical import canonical, canonical_fast, canonical_text
from oncelog.core.identity import fingerprint, normal_partitions, request_hash
from oncelog.core.merge import extract
from oncelog.core.operations import Relate, SetEntity
from oncelog.core.plan import Plan, plan
from oncelog.core.policy import CHAT, DELTAS, EVENTS, LEDGER, Policy
from oncelog.core.proof import SALT_BYTES, seal
from oncelog.core.values import Committed, Member, Replayed, Request, Snapshot, Submission

BATCH: Final = 256
CLIENTS: Final = 16
ROOMS: Final = 4
ROWS: Final = 64
NOW_MS: Final = 1_750_000_000_000
PARTITIONS: Final = ["building-4"]


def measurements(_effort: Effort) -> Iterator[Measurement]:
    """Yield all measurements in the order of the table."""
    yield from _canonical_forms()
    yield from _decisions()


# --- canonical forms ---------------------------------------------------------------------------------


def _canonical_forms() -> Iterator[Measurement]:
    size = len(canonical(EVENT))
    assert 280 <= size <= 320, size
    event_form = partial(rfc8785.dumps, EVENT)
    yield Measurement(
        f"canonical, event of {size} bytes", partial(canonical, EVENT), event_form, "rfc8785", target_ratio=8
    )
    whole_form = partial(rfc8785.dumps, {"partitions": PARTITIONS, "event": EVENT})
    yield Measurement(
        "fingerprint, baseline without a hash",
        _fingerprint,
        whole_form,
        "rfc8785",
        agree=lambda ours, theirs: ours == sha256(theirs).digest(),
        target_ratio=6,
    )
    yield Measurement("fingerprint", _fingerprint, lambda: sha256(whole_form()).digest(), "rfc8785 + sha256")
    text = json.dumps(EVENT)
    yield Measurement(
        "canonical_text, the same event",
        partial(canonical_text, text),
        lambda: rfc8785.dumps(json.loads(text)),
        "json + rfc8785",
    )
    for name, value, is_fast in _other_shapes():
        assert (canonical_fast(value) is not None) is is_fast, name
        name_and_way = f"canonical, {name}{'' if is_fast else ' (exact encoder)'}"
        yield Measurement(name_and_way, partial(canonical, value), partial(rfc8785.dumps, value), "rfc8785")


def _fingerprint() -> bytes:
    return fingerprint(normal_partitions(PARTITIONS), canonical(EVENT))


def _other_shapes() -> Iterator[tuple[str, Any, bool]]:
    """Yield values of different shapes, and whether the native encoder can write each of them."""
    yield "non-ASCII text", EVENT | {"note": "Größe prüfen – フィルターを交換する"}, True
    yield "emoji in values", EVENT | {"note": "done 🎉, thanks 🙏"}, True
    yield "emoji in keys", EVENT | {"reactions": {"🎉": 2, "🙏": 1}}, False
    yield "whole floats", EVENT | {"size": {"width": 120.0, "height": 80.0}}, True
    nested: Any = EVENT
    for level in range(30):
        nested = {"part": nested, "level": level}
    yield "nested 30 deep", nested, True


# --- the decision ------------------------------------------------------------------------------------


def _decisions() -> Iterator[Measurement]:
    nothing = Snapshot()
    events = [_event(index) for index in range(BATCH)]
    changes = plan(events, nothing, NOW_MS).changes
    known = Snapshot(heads=changes.heads, keys={key: one for key, one in changes.keys.items() if one is not None})
    members = {(f"room-{room}", f"client-{client}"): Member(1) for room in range(ROOMS) for client in range(CLIENTS)}
    for name, batch, snapshot, verdict, target_us in (
        ("new events", events, nothing, Committed, 6),
        ("retries of events", events, known, Replayed, None),
        (f"ledger writes by {CLIENTS} clients", [*map(_ledger_write, range(BATCH))], nothing, Committed, None),
        ("chat messages", [*map(_chat_message, range(BATCH))], Snapshot(members=members), Committed, None),
        ("deltas", [*map(_delta, range(BATCH))], nothing, Committed, None),
    ):
        decide = partial(plan, batch, snapshot, NOW_MS)
        yield _per_event(f"plan, {BATCH} {name}", decide, _all_are(verdict), target_us)
    salts = [_bytes(index)[:SALT_BYTES] for index in range(BATCH)]
    yield _per_event(
        f"seal, {BATCH} events",
        partial(seal, changes, salts),
        lambda sealed, _: sum(block.count for block in sealed.blocks) == BATCH,
    )


def _per_event(
    name: str, ours: Callable[[], Any], agree: Callable[[Any, Any], bool], target_us: float | None = None
) -> Measurement:
    """Compare with a calibration, a fixed amount of well-known work that makes machines comparable."""
    return Measurement(name, ours, _calibration, "json.dumps", agree=agree, count=BATCH, target_us=target_us)


def _calibration() -> None:
    for _ in range(BATCH):
        json.dumps(EVENT)


def _all_are(verdict: type) -> Callable[[Plan, object], bool]:
    return lambda planned, _: [type(one) for [one] in planned.verdicts] == [verdict] * BATCH


# --- the batches: each write is a separate request ---------------------------------------------------


def _event(index: int) -> Request:
    partitions = normal_partitions(PARTITIONS)
    body = canonical(EVENT | {"meta": META | {"schema": index}})
    return _request(EVENTS, "", index, body=body, fingerprint=fingerprint(partitions, body), partitions=partitions)


def _ledger_write(index: int) -> Request:
    number, client = divmod(index, CLIENTS)
    account = f"account:{index % ROWS}"
    operations = (SetEntity(account, canonical({"balance": index})), Relate(account, "owner", f"client-{client}"))
    sender = {"client": f"client-{client}", "client_sequence": number + 1}
    return _request(LEDGER, "accounts", index, fingerprint=request_hash(operations), operations=operations, **sender)


def _chat_message(index: int) -> Request:
    body = canonical({"text": f"Message {index}: the pump room is done, filters are ordered."})
    return _request(CHAT, f"room-{index % ROOMS}", index, body=body, fingerprint=sha256(body).digest())


def _delta(index: int) -> Request:
    after = {"title": f"Title {index}", "done": index % 2 == 0, "rank": index}
    client, row = f"client-{index % CLIENTS}", f"row-{index % ROWS}"
    delta = extract(None, after, client_id=client, hlc=(NOW_MS << 16) + index, table="tasks", row_id=row)
    assert delta is not None
    return _request(DELTAS, "project-1", index, key=delta.delta_id, fingerprint=delta.delta_id, delta=delta)


def _request(policy: Policy, scope: str, index: int, **fields: Any) -> Request:
    fields = {"key": _bytes(index)[:16], "actor": f"client-{index % CLIENTS}"} | fields
    return Request((Submission(policy=policy, scope=scope, **fields),))


def _bytes(index: int) -> bytes:
    return sha256(b"%d" % index).digest()
