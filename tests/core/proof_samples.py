"""A log with records of every policy, the evidence of its records, and changed copies of it."""

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
from oncelog.storage.memory import MemoryLog

NOON_MS = 1_800_000_000_000
SETTINGS = Settings(lanes=3)
SALT = bytes(range(16))


def prove_alone(record: Record, index: int = 2, count: int = 5, salt: bytes = SALT) -> Proven:
    """Return the proof of a record at that index of a block whose other records are made up."""
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


def drawn() -> Callable[[int], bytes]:
    """Salts that differ, and are the same in every run."""
    number = 0

    def draw(size: int) -> bytes:
        nonlocal number
        number += 1
        return sha256(b"salt %d" % number).digest()[:size]

    return draw


def key_of(number: int, size: int = 16) -> bytes:
    return sha256(b"key %d" % number).digest()[:size]


def an_event(number: int) -> Submission:
    return Submission(
        policy=EVENTS,
        scope="",
        key=key_of(number),
        fingerprint=key_of(number, 32),
        body=b'{"n":%d}' % number,
        actor="user:zoë",
        partitions=("a", "b/ü")[: number % 3],
    )


def a_transaction(number: int, organization: str) -> Submission:
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


def a_push(number: int) -> Submission:
    key = key_of(number, 32)
    delta = RowDelta(Op.INSERT, "t", "r", "c", number, (), key)
    return Submission(policy=DELTAS, scope="gateway", key=key, fingerprint=key, body=b"delta", delta=delta)


def a_message(number: int) -> Submission:
    return Submission(policy=CHAT, scope="chat", key=key_of(number), fingerprint=b"", body=b"hi", actor="user:1")


def a_claim(number: int) -> Claim:
    return Claim(policy=RUNS, scope="campaign-1", key=key_of(number), fingerprint=b"", holder="me")


def filled_log(batches: int = 5) -> MemoryLog:
    log = MemoryLog(SETTINGS, drawn())
    log.submit([Request((SetMember("chat", "user:1"),))], NOON_MS)
    for batch in range(1, batches + 1):
        items: list[Item] = [an_event(10 * batch + one) for one in range(batch)]
        items += [a_transaction(batch, "org-1"), a_push(batch), a_message(batch), a_transaction(batch, "org-2")]
        log.submit([Request(tuple(items))], NOON_MS + 7 * batch)
        # A lease changes the lane's head and writes no record: the chain must not notice.
        log.submit([Request((a_claim(batch),))], NOON_MS + 7 * batch + 1)
    return log


def leaves_of(log: MemoryLog, block: Block) -> list[bytes]:
    return [
        hash_leaf(encode_record_header(record), hash_body(salt, record.body))
        for record, salt in zip(log.records, log.salts, strict=True)
        if (record.lane, record.height) == (block.lane, block.height)
    ]


Evidence = tuple[Record, bytes, Proof, Block]


def evidence_of(log: MemoryLog) -> Iterator[Evidence]:
    """Every record of the log with its salt, its proof and its block."""
    blocks = {(block.lane, block.height): block for block in log.blocks}
    for record, salt in zip(log.records, log.salts, strict=True):
        block = blocks[record.lane, record.height]
        yield record, salt, prove(leaves_of(log, block), record.position - block.first_position), block


LOG = filled_log()
EVIDENCE = list(evidence_of(LOG))
# One with partitions, from the largest block; one with a client and without a body.
SAMPLES = [
    next(one for one in EVIDENCE if one[0].policy == "events" and one[3].count == 5 and len(one[0].partitions) == 2),
    next(one for one in EVIDENCE if one[0].policy == "ledger" and not one[0].body and one[3].count > 1),
]


def independent_accepts(record: Record, salt: bytes, proof: Proof, block: Block, trusted: bytes) -> bool:
    return independent_verify(asdict(record), salt, asdict(proof), asdict(block), trusted)


# --- what it means to change something -------------------------------------------------------------------


def flipped(data: bytes, number: int) -> bytes:
    """One bit changed, another one for each number."""
    place = number % len(data)
    return data[:place] + bytes([data[place] ^ (1 << number % 8)]) + data[place + 1 :]


def changed_bytes(data: bytes) -> Iterator[bytes]:
    """Every byte changed, one more at either end, one less at either end."""
    for place in range(len(data)):
        yield flipped(data, place)
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
    """The value with each of its fields changed in every way. A field that is added one day is in it by itself."""
    for field in value.__struct_fields__:
        changed = list(changed_values(getattr(value, field)))
        assert changed, field
        for one in changed:
            yield field, replace(value, **{field: one})


NOT_IN_THE_HEADER = frozenset({"body", "erased"})
"""The body enters the leaf by its hash, and that it was erased is a mark of the store's: no hash has it."""
