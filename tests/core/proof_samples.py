"""A log with records of every policy, evidence for its records, and modified copies of that evidence."""

from collections.abc import Callable, Iterator
from hashlib import sha256
from typing import Any

from msgspec.structs import asdict, replace

from core.independent_verifier import independent_verify
from oncelog.core.merge import Op, RowDelta
from oncelog.core.operations import SetEntity
from oncelog.core.policy import CHAT, DELTAS, EVENTS, LEDGER, RUNS
from oncelog.core.proof import (
    Block,
    Proof,
    compute_root,
    encode_record_header,
    hash_body,
    hash_leaf,
    prove,
)
from oncelog.core.values import Claim, Item, Record, Request, SetMember, Settings, Submission
from oncelog.engine.read_results import Proven
from oncelog.testing.memory_log import MemoryLog

NOON_MS = 1_800_000_000_000
SETTINGS = Settings(lanes=3)
SALT = bytes(range(16))


def prove_alone(record: Record, index: int = 2, count: int = 5, salt: bytes = SALT) -> Proven:
    """Return the proof of a record at an index of a block whose other records are invented."""
    salted = hash_body(salt, record.body)
    leaves = [hash_leaf(b"another record %d" % number, bytes(32)) for number in range(count)]
    leaves[index] = hash_leaf(encode_record_header(record), salted)
    block = Block(
        lane=record.lane,
        height=record.height,
        first_position=record.position - index,
        count=count,
        log_time_ms=record.log_time_ms,
        previous=bytes(range(32)),
        root=compute_root(leaves),
    )
    return Proven(record, salt, salted, prove(leaves, index), block)


def make_salt_source() -> Callable[[int], bytes]:
    """Return a source of salts that differ between records but are the same in every run."""
    number = 0

    def draw(size: int) -> bytes:
        nonlocal number
        number += 1
        return sha256(b"salt %d" % number).digest()[:size]

    return draw


def key_of(number: int, size: int = 16) -> bytes:
    return sha256(b"key %d" % number).digest()[:size]


def build_event(number: int) -> Submission:
    return Submission(
        policy=EVENTS,
        scope="",
        key=key_of(number),
        fingerprint=key_of(number, 32),
        body=b'{"n":%d}' % number,
        actor="user:zoë",
        partitions=("a", "b/ü")[: number % 3],
    )


def build_transaction(number: int, organization: str) -> Submission:
    return Submission(
        policy=LEDGER,
        scope=organization,
        key=key_of(number),
        fingerprint=key_of(number, 32),
        body=b"t" * (number % 5),
        actor="client:till",
        client="till",
        client_sequence=number,
        operations=(SetEntity("e", b"v"),),
    )


def build_push(number: int) -> Submission:
    key = key_of(number, 32)
    delta = RowDelta(Op.INSERT, "t", "r", "c", number, (), key)
    return Submission(policy=DELTAS, scope="gateway", key=key, fingerprint=key, body=b"delta", delta=delta)


def build_message(number: int) -> Submission:
    return Submission(policy=CHAT, scope="chat", key=key_of(number), fingerprint=b"", body=b"hi", actor="user:1")


def build_claim(number: int) -> Claim:
    return Claim(policy=RUNS, scope="campaign-1", key=key_of(number), fingerprint=b"", holder="me")


def fill_log(batches: int = 5) -> MemoryLog:
    log = MemoryLog(SETTINGS, make_salt_source())
    log.submit([Request((SetMember("chat", "user:1"),))], NOON_MS)
    for batch in range(1, batches + 1):
        items: list[Item] = [build_event(10 * batch + one) for one in range(batch)]
        items += [
            build_transaction(batch, "org-1"),
            build_push(batch),
            build_message(batch),
            build_transaction(batch, "org-2"),
        ]
        log.submit([Request(tuple(items))], NOON_MS + 7 * batch)
        # A lease changes the lane head but writes no record, so the chain remains the same.
        log.submit([Request((build_claim(batch),))], NOON_MS + 7 * batch + 1)
    return log


def hash_leaves(log: MemoryLog, block: Block) -> list[bytes]:
    return [
        hash_leaf(encode_record_header(record), hash_body(salt, record.body))
        for record, salt in zip(log.records, log.salts, strict=True)
        if (record.lane, record.height) == (block.lane, block.height)
    ]


Evidence = tuple[Record, bytes, Proof, Block]


def collect_evidence(log: MemoryLog) -> Iterator[Evidence]:
    """Yield each record of the log with its salt, proof and block."""
    blocks = {(block.lane, block.height): block for block in log.blocks}
    for record, salt in zip(log.records, log.salts, strict=True):
        block = blocks[record.lane, record.height]
        yield record, salt, prove(hash_leaves(log, block), record.position - block.first_position), block


LOG = fill_log()
EVIDENCE = list(collect_evidence(LOG))
# One record with partitions, from the largest block; one with a client and no body.
SAMPLES = [
    next(one for one in EVIDENCE if one[0].policy == "events" and one[3].count == 5 and len(one[0].partitions) == 2),
    next(one for one in EVIDENCE if one[0].policy == "ledger" and not one[0].body and one[3].count > 1),
]


def independent_accepts(record: Record, salt: bytes, proof: Proof, block: Block, trusted: bytes) -> bool:
    return independent_verify(asdict(record), salt, asdict(proof), asdict(block), trusted)


# --- modified copies -------------------------------------------------------------------------------------


def flip_bit(data: bytes, number: int) -> bytes:
    """Flip one bit, chosen by the number."""
    place = number % len(data)
    return data[:place] + bytes([data[place] ^ (1 << number % 8)]) + data[place + 1 :]


def changed_bytes(data: bytes) -> Iterator[bytes]:
    """Yield copies with each byte changed, and with a byte added or removed at either end."""
    for place in range(len(data)):
        yield flip_bit(data, place)
    yield from (data + b"\x00", b"\x00" + data)
    if data:
        yield from (data[1:], data[:-1])


def changed_values(value: Any) -> Iterator[Any]:
    match value:
        case bool():
            yield not value
        case int():
            yield from (one for one in {value + 1, value - 1, value ^ 256, value + 2**31, 0} if 0 <= one != value)
        case bytes():
            yield from (one for one in changed_bytes(value) if one != value)
        case str():
            for place in range(len(value)):
                yield value[:place] + ("x" if value[place] != "x" else "y") + value[place + 1 :]
            yield from (value + "x", value + "\x00", "x" + value, value[:-1] if value else "y")
        case tuple():
            yield from ((*value, ""), ("", *value), (*value, "x"))
            for place, one in enumerate(value):
                yield value[:place] + value[place + 1 :]
                yield from ((*value[:place], other, *value[place + 1 :]) for other in changed_values(one))
            if len(value) > 1:
                yield from (value[::-1], ("".join(value),))


def changed_structs(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield copies with each field changed in every way. New fields are included automatically.

    The trace contexts of a record are left out: they are not part of its hash.
    """
    for field in value.__struct_fields__:
        if isinstance(value, Record) and field == "trace":
            continue
        changed = list(changed_values(getattr(value, field)))
        assert changed, field
        for one in changed:
            yield field, replace(value, **{field: one})


NOT_IN_THE_HEADER = frozenset({"body", "erased", "trace"})
"""Fields that no hash covers directly: the leaf contains the body's hash, and only the store has the `erased` mark and
the trace contexts."""
