"""Proof documents, which can be stored, passed on and verified without the log.

docs/reference/proofs.md specifies the bytes.

    document = proof_document(await log.prove(verdict.receipt))
    data = encode(document)                                      # JSON, for a file or a message

    result = verify(decode(data), block_hash=trusted_hash)
    result.is_valid, result.is_erased, result.findings

Without a trusted block hash, a valid result only means that the proof is consistent: anyone can invent a block.
"""

import json
import re
from base64 import b64encode
from typing import Any, Final

import msgspec
from msgspec import Struct, structs

from oncelog.core import policy
from oncelog.core.canonical import is_unicode
from oncelog.core.identity import request_hash
from oncelog.core.limits import (
    FINGERPRINT_BYTES_MAX,
    NAME_CHARACTERS_MAX,
    PARTITION_CHARACTERS_MAX,
    PARTITIONS_MAX,
)
from oncelog.core.proof import HASH_BYTES, SALT_BYTES, Block, Proof, Proven, hash_body, verify_header
from oncelog.core.transactions import decode_operations
from oncelog.core.values import Record
from oncelog.errors import CanonicalError, ProofError

__all__ = [
    "BlockHeader",
    "ProofDocument",
    "ProofError",
    "Proven",
    "RecordHeader",
    "Verification",
    "decode",
    "encode",
    "proof_document",
    "verify",
]

DOCUMENT_BYTES_MAX: Final = 64 * 2**20
"""Large enough for a body of 47 MiB in base64."""
PATH_HASHES_MAX: Final = 64
"""More levels than any Merkle tree has."""

_UINT32_MAX: Final = 2**32 - 1
_UINT64_MAX: Final = 2**64 - 1
_HEXADECIMAL: Final = re.compile(r"(?:[0-9a-f]{2})*")
_MSGSPEC_MESSAGE: Final = re.compile(r"(.*?)(?: - at `(\$.*)`)?", re.DOTALL)
_REASON_CHARACTERS_MAX: Final = 300


# --- document ----------------------------------------------------------------------------------------


class RecordHeader(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A record without its body. `key` and `fingerprint` are hexadecimal."""

    lane: int
    position: int
    sequence: int
    log_time_ms: int
    height: int
    client_sequence: int
    policy: str
    scope: str
    key: str
    fingerprint: str
    actor: str
    client: str
    partitions: tuple[str, ...]

    # A log has the same limits (`core.validation`). They also keep untrusted documents from filling the caches of
    # `core.proof`, which hold names from headers.

    def __post_init__(self) -> None:
        """Raise ProofError for values that cannot occur in a log."""
        _check_numbers(self, _UINT64_MAX, "position", "sequence", "log_time_ms", "height", "client_sequence")
        _check_numbers(self, _UINT32_MAX, "lane")
        _check_hex("key", self.key, 0, policy.KEY_BYTES_MAX)
        _check_hex("fingerprint", self.fingerprint, 0, FINGERPRINT_BYTES_MAX)
        _check_text("policy", self.policy, policy.NAME_CHARACTERS_MAX)
        for name in ("scope", "actor", "client"):
            _check_text(name, getattr(self, name), NAME_CHARACTERS_MAX)
        partitions = len(self.partitions)
        _check(
            partitions <= PARTITIONS_MAX, "partitions", f"must have at most {PARTITIONS_MAX} entries, not {partitions}"
        )
        for index, partition in enumerate(self.partitions):
            _check_text(f"partitions[{index}]", partition, PARTITION_CHARACTERS_MAX)


class BlockHeader(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A block's header fields and its hash. All hashes are hexadecimal."""

    lane: int
    height: int
    first_position: int
    count: int
    timestamp_ms: int
    previous_hash: str
    merkle_root: str
    hash: str

    def __post_init__(self) -> None:
        """Raise ProofError for values that cannot occur in a log."""
        _check_numbers(self, _UINT64_MAX, "height", "first_position", "timestamp_ms")
        _check_numbers(self, _UINT32_MAX, "lane", "count")
        for name in ("previous_hash", "merkle_root", "hash"):
            _check_hex(name, getattr(self, name), HASH_BYTES, HASH_BYTES)


class ProofDocument(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A record, its block, and the hash path between them.

    Salt, hash and path are hexadecimal; the body is base64 in JSON. Salt and body are None if the record is erased or
    the sender of the document keeps the body private.
    """

    record: RecordHeader
    salt: str | None
    body: bytes | None
    body_hash: str
    index: int
    count: int
    path: tuple[str, ...]
    block: BlockHeader

    def __post_init__(self) -> None:
        """Raise ProofError for values that cannot occur in a log."""
        is_consistent = (self.salt is None) is (self.body is None)
        _check(is_consistent, "salt", "must be null if, and only if, body is null")
        if self.salt is not None:
            _check_hex("salt", self.salt, SALT_BYTES, SALT_BYTES)
        _check_hex("body_hash", self.body_hash, HASH_BYTES, HASH_BYTES)
        _check_numbers(self, _UINT32_MAX, "index", "count")
        hashes = len(self.path)
        _check(hashes <= PATH_HASHES_MAX, "path", f"must have at most {PATH_HASHES_MAX} hashes, not {hashes}")
        for index, path_hash in enumerate(self.path):
            _check_hex(f"path[{index}]", path_hash, HASH_BYTES, HASH_BYTES)


def _check(condition: bool, path: str, reason: str) -> None:
    if not condition:
        raise ProofError(path, reason)


def _check_numbers(header: Struct, highest: int, *names: str) -> None:
    for name in names:
        _check(0 <= getattr(header, name) <= highest, name, f"must be from 0 to {highest}")


def _check_hex(name: str, text: str, shortest: int, longest: int) -> None:
    digits = f"{2 * longest}" if shortest == longest else f"at most {2 * longest}"
    is_length_valid = 2 * shortest <= len(text) <= 2 * longest
    _check(is_length_valid, name, f"must have {digits} hexadecimal digits, not {len(text)}")
    is_hexadecimal = _HEXADECIMAL.fullmatch(text) is not None
    _check(is_hexadecimal, name, "must be lower-case hexadecimal with two digits per byte")


def _check_text(name: str, text: str, characters_max: int) -> None:
    _check(len(text) <= characters_max, name, f"must have at most {characters_max} characters, not {len(text)}")
    _check(is_unicode(text), name, "lone surrogate in a string")


# --- encoding and decoding ---------------------------------------------------------------------------


def proof_document(proven: Proven) -> ProofDocument:
    """Build the document for a proven record."""
    record, block = proven.record, proven.block
    header = {name: getattr(record, name) for name in RecordHeader.__struct_fields__}
    hashes = {"key": record.key.hex(), "fingerprint": record.fingerprint.hex()}
    return ProofDocument(
        record=RecordHeader(**header | hashes),
        salt=None if record.erased else proven.salt.hex(),
        body=None if record.erased else record.body,
        body_hash=proven.body_hash.hex(),
        index=proven.proof.index,
        count=proven.proof.count,
        path=tuple(path_hash.hex() for path_hash in proven.proof.path),
        block=BlockHeader(
            lane=block.lane,
            height=block.height,
            first_position=block.first_position,
            count=block.count,
            timestamp_ms=block.log_time_ms,
            previous_hash=block.previous.hex(),
            merkle_root=block.root.hex(),
            hash=block.hash.hex(),
        ),
    )


def encode(document: ProofDocument) -> bytes:
    """Encode a document as one line of JSON."""
    return msgspec.json.encode(document)


_DOCUMENT_DECODER: Final = msgspec.json.Decoder(ProofDocument)


def decode(data: bytes, *, bytes_max: int = DOCUMENT_BYTES_MAX) -> ProofDocument:
    """Decode a document from JSON. Raises ProofError with the path of a fault."""
    if len(data) > bytes_max:
        raise ProofError("$", f"must have at most {bytes_max} bytes")
    try:
        document = _DOCUMENT_DECODER.decode(data)
        # Decoders differ in which of two members with the same name they use, so a repeated member could hide content.
        parsed = json.loads(data, object_pairs_hook=_check_unique)
    except msgspec.MsgspecError as error:
        raise _to_proof_error(error) from error
    except UnicodeError as error:
        raise ProofError("$", "is not UTF-8") from error
    # The unused bits at the end of base64 must be zero, so that a body has only one encoding.
    if document.body is not None and parsed["body"] != b64encode(document.body).decode():
        raise ProofError("$.body", "must be canonical base64: the unused bits at the end must be zero")
    return document


def _check_unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):  # the decoder has already refused unknown names
        names = [name for name, _ in pairs]
        raise ProofError(next(name for name in members if names.count(name) > 1), "is repeated")
    return members


def _to_proof_error(error: msgspec.MsgspecError) -> ProofError:
    match = _MSGSPEC_MESSAGE.fullmatch(str(error))
    reason, path = match.groups() if match is not None else (str(error), None)
    path = path or "$"
    if isinstance(error.__cause__, ProofError):
        return ProofError(f"{path}.{error.__cause__.path}", error.__cause__.reason)
    # The message may quote the document; remove control characters that it could send to a terminal.
    reason = "".join(character if character.isprintable() else "�" for character in reason[:_REASON_CHARACTERS_MAX])
    return ProofError(path, reason)


# --- verification ------------------------------------------------------------------------------------


class Verification(Struct, frozen=True):
    """Result of verifying a document."""

    findings: tuple[str, ...]
    """Descriptions of all faults. Empty for a valid document."""
    is_erased: bool
    """Whether the body is missing. The proof then covers only the header and the body's hash."""

    @property
    def is_valid(self) -> bool:
        """Whether the document has no faults."""
        return not self.findings


def verify(document: ProofDocument, *, block_hash: bytes | None = None) -> Verification:
    """Verify a document and, if `block_hash` is given, that its block has this hash. The result lists all faults.

    For a ledger transaction, the body must also match the fingerprint.
    """
    block = _build_block(document.block)
    record = build_record(document)
    findings = []
    if block.hash.hex() != document.block.hash:
        findings.append("the block's hash does not match its fields")
    if block_hash is not None and block.hash != block_hash:
        findings.append(f"the block has the hash {block.hash.hex()}, not {block_hash.hex()}")
    proof = Proof(document.index, document.count, tuple(map(bytes.fromhex, document.path)))
    if not verify_header(record, bytes.fromhex(document.body_hash), proof, block):
        findings += _find_inclusion_faults(record, proof, block)
    if document.salt is not None:
        if hash_body(bytes.fromhex(document.salt), record.body).hex() != document.body_hash:
            findings.append("the body hash does not match the salt and the body")
        if record.policy == policy.LEDGER.name:
            findings += _find_fingerprint_faults(record)
    return Verification(tuple(findings), record.erased)


def _find_inclusion_faults(record: Record, proof: Proof, block: Block) -> list[str]:
    """Describe the contradictions between record, proof and block."""
    position = block.first_position + proof.index
    comparisons = (
        (record.lane, block.lane, "the record has lane {} but its block has lane {}"),
        (record.height, block.height, "the record has height {} but its block has height {}"),
        (record.log_time_ms, block.log_time_ms, "the record has log_time_ms {} but its block has {}"),
        (record.position, position, "the record has position {} but its index in the block gives position {}"),
        (proof.count, block.count, "the proof is for a block with {} records but the block has {}"),
    )
    findings = [text.format(found, expected) for found, expected, text in comparisons if found != expected]
    if proof.index >= proof.count:
        findings.append(f"index {proof.index} is out of range for a proof with {proof.count} records")
    return findings or ["the path does not lead from the record to the block's Merkle root"]


def _find_fingerprint_faults(record: Record) -> list[str]:
    try:
        fingerprint = request_hash(decode_operations(record))
    except (CanonicalError, UnicodeError):
        return ["the body is not a ledger transaction"]
    return [] if fingerprint == record.fingerprint else ["the body does not match the fingerprint"]


def build_record(document: ProofDocument) -> Record:
    """Return the record in a document. Without its body, the record counts as erased."""
    header = document.record
    hashes = {"key": bytes.fromhex(header.key), "fingerprint": bytes.fromhex(header.fingerprint)}
    return Record(**structs.asdict(header) | hashes, body=document.body or b"", erased=document.body is None)


def _build_block(header: BlockHeader) -> Block:
    return Block(
        lane=header.lane,
        height=header.height,
        first_position=header.first_position,
        count=header.count,
        log_time_ms=header.timestamp_ms,
        previous=bytes.fromhex(header.previous_hash),
        root=bytes.fromhex(header.merkle_root),
    )
