"""A proof verifier that follows only docs/reference/proofs.md and imports nothing from Oncelog.

Records and blocks are mappings with the field names that the document uses. If the verifier and the code disagree, one
of them or the document is wrong.
"""

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

Fields = Mapping[str, Any]
RECORD_NUMBERS = {"lane": 4, "position": 8, "sequence": 8, "log_time_ms": 8, "height": 8, "client_sequence": 8}
RECORD_FRAMES = ("policy", "scope", "key", "fingerprint", "actor", "client")
BLOCK_NUMBERS = {"lane": 4, "height": 8, "first_position": 8, "count": 4, "log_time_ms": 8}


def independent_hash(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def independent_frame(label: str, value: str | bytes) -> bytes:
    data = value.encode("utf-8") if isinstance(value, str) else value
    return label.encode("ascii") + len(data).to_bytes(4, "big") + data


def independent_header(record: Fields) -> bytes:
    header = b"\x01"
    for name, width in RECORD_NUMBERS.items():
        header += record[name].to_bytes(width, "big")
    for label in RECORD_FRAMES:
        header += independent_frame(label, record[label])
    for partition in record["partitions"]:
        header += independent_frame("partition", partition)
    return header


def independent_read_header(header: bytes) -> dict[str, Any]:
    """Decode a record header into its fields."""
    assert header[0] == 1
    place, record, partitions = 1, dict[str, Any](), list[str]()
    for name, width in RECORD_NUMBERS.items():
        record[name] = int.from_bytes(header[place : place + width], "big")
        place += width
    for label in RECORD_FRAMES:
        value, place = independent_read_frame(label, header, place)
        record[label] = value if label in {"key", "fingerprint"} else value.decode("utf-8")
    while place < len(header):
        value, place = independent_read_frame("partition", header, place)
        partitions.append(value.decode("utf-8"))
    return {**record, "partitions": tuple(partitions)}


def independent_read_frame(label: str, header: bytes, place: int) -> tuple[bytes, int]:
    start = place + len(label) + 4
    assert header[place : place + len(label)] == label.encode("ascii")
    end = start + int.from_bytes(header[start - 4 : start], "big")
    assert end <= len(header)
    return header[start:end], end


def independent_leaf(record: Fields, salted: bytes) -> bytes:
    return independent_hash(b"\x00" + independent_header(record) + salted)


def independent_root(leaves: Sequence[bytes]) -> bytes:
    """Compute the Merkle root top-down, as defined in the document and in RFC 9162, section 2.1.1."""
    if len(leaves) == 1:
        return leaves[0]
    split = largest_power_of_two_below(len(leaves))
    return independent_hash(b"\x01" + independent_root(leaves[:split]) + independent_root(leaves[split:]))


def largest_power_of_two_below(number: int) -> int:
    power = 1
    while power * 2 < number:
        power *= 2
    return power


def independent_block_header(block: Fields) -> bytes:
    header = b"\x01"
    for name, width in BLOCK_NUMBERS.items():
        header += block[name].to_bytes(width, "big")
    return header + bytes(block["previous"]) + bytes(block["root"])


def independent_block_hash(block: Fields) -> bytes:
    return independent_hash(b"\x02" + independent_block_header(block))


def independent_verify(record: Fields, salt: bytes, proof: Fields, block: Fields, trusted: bytes) -> bool:
    if len(salt) != 16:
        return False
    return independent_verify_erased(record, independent_hash(salt + record["body"]), proof, block, trusted)


def independent_verify_erased(record: Fields, salted: bytes, proof: Fields, block: Fields, trusted: bytes) -> bool:
    return (
        independent_block_hash(block) == trusted
        and len(salted) == 32
        and record["lane"] == block["lane"]
        and record["height"] == block["height"]
        and record["log_time_ms"] == block["log_time_ms"]
        and len(block["previous"]) == len(block["root"]) == 32
        and record["position"] == block["first_position"] + proof["index"]
        and proof["count"] == block["count"]
        and independent_reaches_root(independent_leaf(record, salted), proof, block["root"])
    )


def independent_reaches_root(leaf: bytes, proof: Fields, root: bytes) -> bool:
    """Follow steps 6 to 9 of the document."""
    index, count, path = proof["index"], proof["count"], proof["path"]
    if index < 0 or index >= count or [beside for beside in path if len(beside) != 32]:
        return False
    reached, place, last = leaf, index, count - 1
    for beside in path:
        if last == 0:
            return False
        if place % 2 == 1 or place == last:
            reached = independent_hash(b"\x01" + beside + reached)
            while place % 2 == 0 and place != 0:
                place, last = place // 2, last // 2
        else:
            reached = independent_hash(b"\x01" + reached + beside)
        place, last = place // 2, last // 2
    return last == 0 and reached == root


def independent_heads(records: Sequence[Fields], salts: Sequence[bytes]) -> dict[int, bytes]:
    """Recompute the newest block hash of each lane from the stored records."""
    blocks: dict[tuple[int, int], list[tuple[Fields, bytes]]] = defaultdict(list)
    for record, salt in zip(records, salts, strict=True):
        salted = independent_hash(salt + record["body"])
        blocks[record["lane"], record["height"]].append((record, independent_leaf(record, salted)))
    heads: dict[int, bytes] = {}
    for lane, height in sorted(blocks):
        inside = sorted(blocks[lane, height], key=lambda one: one[0]["position"])
        header = {
            "lane": lane,
            "height": height,
            "first_position": inside[0][0]["position"],
            "count": len(inside),
            "log_time_ms": inside[0][0]["log_time_ms"],
            "previous": heads.get(lane, bytes(32)),
            "root": independent_root([leaf for _, leaf in inside]),
        }
        heads[lane] = independent_block_hash(header)
    return heads
