"""Record hashes, Merkle trees over them, and the chain of blocks. docs/reference/proofs.md specifies all bytes.

    leaf  = H(0x00 ‖ record header ‖ H(salt ‖ body))
    node  = H(0x01 ‖ left ‖ right)                        the tree of RFC 9162, section 2.1
    block = H(0x02 ‖ block header, which includes the hash of the previous block)

The first byte distinguishes the three kinds of hashes. The leaf depends on the body only through its salted hash, so
leaf, tree and block still verify after body and salt are erased. The unsalted fingerprint in the header is kept,
because the log recognises retries by it.
"""

import struct
from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from hashlib import sha256
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from oncelog.core.identity import frame
from oncelog.core.values import Changes, LaneHead, Record

FORMAT_VERSION: Final = 1
HASH_BYTES: Final = 32
SALT_BYTES: Final = 16
NO_HASH: Final = bytes(HASH_BYTES)
"""Previous hash of the first block of a lane."""

_RECORD_NUMBERS: Final = struct.Struct(">BIQQQQQ")
_BLOCK_NUMBERS: Final = struct.Struct(">BIQQIQ")
_LENGTH: Final = struct.Struct(">I")


class Block(Struct, frozen=True):
    """Header of a block: the records of one group commit in a lane."""

    lane: int
    height: int
    first_position: int
    count: int
    log_time_ms: int
    previous: bytes
    root: bytes

    @property
    def hash(self) -> bytes:
        """Hash of all fields. They include the hash of the previous block, so this hash covers all previous blocks."""
        return sha256(
            b"\x02"
            + _BLOCK_NUMBERS.pack(
                FORMAT_VERSION, self.lane, self.height, self.first_position, self.count, self.log_time_ms
            )
            + self.previous
            + self.root
        ).digest()

    @property
    def may_follow_gap(self) -> bool:
        """Whether the header allows a gap before this block (core/rules/leaps.py)."""
        return self.count == 1 and self.first_position == self.height


class Proof(Struct, frozen=True):
    """Inclusion proof of a record in a block: the leaf's index and the sibling hashes on the path to the root."""

    index: int
    count: int
    path: tuple[bytes, ...]


class Evidence(Struct, frozen=True):
    """A record with everything that its hash covers."""

    record: Record
    salt: bytes
    """Empty for an erased record. Use `verify_header` with the body hash instead."""
    body_hash: bytes


class Proven(Evidence, frozen=True):
    """Proof of a record in its block. `oncelog.verify(record, salt, proof, block)` checks it."""

    proof: Proof
    block: Block


class Attestation(Struct, frozen=True):
    """A record's block, inclusion proof, body salt and actor."""

    block: Block
    proof: Proof
    salt: bytes
    actor: str


def encode_record_header(record: Record) -> bytes:
    """Encode a record without its body."""
    key, fingerprint = record.key, record.fingerprint
    numbers = _RECORD_NUMBERS.pack(
        FORMAT_VERSION,
        record.lane,
        record.position,
        record.sequence,
        record.log_time_ms,
        record.height,
        record.client_sequence,
    )
    return b"".join(
        (
            numbers,
            _frame_names(record.policy, record.scope, len(key)),
            key,
            b"fingerprint",
            _LENGTH.pack(len(fingerprint)),
            fingerprint,
            _frame_sender(record.actor, record.client),
            _frame_partitions(record.partitions),
        )
    )


# Cache the parts that many records share. Whole headers differ too much to be cached.


@lru_cache(maxsize=4096)
def _frame_names(policy: str, scope: str, key_bytes: int) -> bytes:
    return _frame_text("policy", policy) + _frame_text("scope", scope) + b"key" + _LENGTH.pack(key_bytes)


@lru_cache(maxsize=4096)
def _frame_sender(actor: str, client: str) -> bytes:
    return _frame_text("actor", actor) + _frame_text("client", client)


@lru_cache(maxsize=4096)
def _frame_partitions(partitions: tuple[str, ...]) -> bytes:
    return b"".join(_frame_text("partition", partition) for partition in partitions)


def _frame_text(label: str, text: str) -> bytes:
    return frame(label.encode(), text.encode())


# Copying a hasher is faster than creating one, because OpenSSL looks up SHA-256 for each new hasher.
_BODY_HASHER: Final = sha256()
_LEAF_HASHER: Final = sha256(b"\x00")
_NODE_HASHER: Final = sha256(b"\x01")


def hash_body(salt: bytes, body: bytes) -> bytes:
    """Return the salted hash of a body, which outlives the body's erasure. The salt must have SALT_BYTES bytes."""
    hasher = _BODY_HASHER.copy()
    hasher.update(salt + body)
    return hasher.digest()


def hash_leaf(header: bytes, salted_body_hash: bytes) -> bytes:
    """Hash a record into its leaf in the block's tree."""
    hasher = _LEAF_HASHER.copy()
    hasher.update(header + salted_body_hash)
    return hasher.digest()


def hash_node(left: bytes, right: bytes) -> bytes:
    """Return the parent of two nodes."""
    hasher = _NODE_HASHER.copy()
    hasher.update(left + right)
    return hasher.digest()


MerkleTree = Sequence[Sequence[bytes]]
"""Levels of a Merkle tree, from the leaves to the root."""


def compute_root(leaves: Sequence[bytes]) -> bytes:
    """Return the Merkle root of one or more leaves."""
    return build_tree(leaves)[-1][0]


def prove(leaves: Sequence[bytes], index: int) -> Proof:
    """Return the inclusion proof of a leaf."""
    return prove_from_tree(build_tree(leaves), index)


def prove_from_tree(levels: MerkleTree, index: int) -> Proof:
    """Return the inclusion proof of a leaf of an existing tree, without computing hashes."""
    if not 0 <= index < len(levels[0]):
        raise IndexError(f"leaf {index} is out of range: the tree has {len(levels[0])}")
    path = []
    place = index
    for level in levels[:-1]:
        sibling = place ^ 1
        if sibling < len(level):
            path.append(level[sibling])
        place >>= 1
    return Proof(index, len(levels[0]), tuple(path))


def verify_inclusion(leaf: bytes, proof: Proof, root: bytes) -> bool:
    """Return whether the proof leads from the leaf to the root (RFC 9162, section 2.1.3.2)."""
    if not 0 <= proof.index < proof.count or any(len(sibling_hash) != HASH_BYTES for sibling_hash in proof.path):
        return False
    place, last, reached = proof.index, proof.count - 1, leaf
    for sibling in proof.path:
        if last == 0:
            return False
        if place & 1 or place == last:
            reached = hash_node(sibling, reached)
            while not place & 1 and place:
                place >>= 1
                last >>= 1
        else:
            reached = hash_node(reached, sibling)
        place >>= 1
        last >>= 1
    return last == 0 and reached == root


def verify(record: Record, salt: bytes, proof: Proof, block: Block) -> bool:
    """Return whether the block contains the record, including its body.

    The result is False for an erased record, whose body is missing. Use `verify_header` for it.
    """
    if record.erased:
        return False
    # If the length could vary, a byte could move between salt and body without changing the hash.
    return len(salt) == SALT_BYTES and verify_header(record, hash_body(salt, record.body), proof, block)


def verify_header(record: Record, salted_body_hash: bytes, proof: Proof, block: Block) -> bool:
    """Return whether the block contains the record, given the salted hash of its body. Works for erased records."""
    if not len(salted_body_hash) == len(block.previous) == len(block.root) == HASH_BYTES:
        return False
    if (record.lane, record.height, record.log_time_ms) != (block.lane, block.height, block.log_time_ms):
        return False
    if record.position != block.first_position + proof.index or proof.count != block.count:
        return False
    try:
        header = encode_record_header(record)
    except (struct.error, UnicodeEncodeError):
        return False  # no log can contain such a record
    return verify_inclusion(hash_leaf(header, salted_body_hash), proof, block.root)


class SealedBatch(Struct, frozen=True):
    """A batch's blocks, one per lane with records, and the lane heads that include the new block hashes."""

    blocks: list[Block]
    trees: dict[int, MerkleTree]
    """Merkle tree of each lane's block, for inclusion proofs."""
    heads: dict[int, LaneHead]


def seal(changes: Changes, salts: Sequence[bytes]) -> SealedBatch:
    """Close a block in every lane with new records.

    `salts` has one random salt of SALT_BYTES for each record of `changes.records`. The caller generates them, because
    the core draws no random numbers.
    """
    if salts and set(map(len, salts)) != {SALT_BYTES}:
        raise ValueError(f"a salt must have {SALT_BYTES} bytes")
    leaves: defaultdict[int, list[bytes]] = defaultdict(list)
    for record, salt in zip(changes.records, salts, strict=True):
        leaves[record.lane].append(hash_leaf(encode_record_header(record), hash_body(salt, record.body)))
    trees = {lane: build_tree(lane_leaves) for lane, lane_leaves in leaves.items()}
    blocks = [_build_block(lane, changes.heads[lane], tree) for lane, tree in trees.items()]
    hashes = {block.lane: block.hash for block in blocks}
    heads = {
        lane: replace(head, block_hash=hashes[lane]) if lane in hashes else head for lane, head in changes.heads.items()
    }
    return SealedBatch(blocks, trees, heads)


def _build_block(lane: int, head: LaneHead, tree: MerkleTree) -> Block:
    count = len(tree[0])
    return Block(
        lane=lane,
        height=head.height,
        first_position=head.position - count + 1,
        count=count,
        log_time_ms=head.log_time_ms,
        previous=head.block_hash,
        root=tree[-1][0],
    )


def build_tree(leaves: Sequence[bytes]) -> MerkleTree:
    """Build the tree over one or more leaves. A node without a sibling moves up a level unchanged.

    RFC 9162 defines the same tree from the top down, by powers of two.
    """
    levels = [leaves]
    while len(levels[-1]) > 1:
        below = levels[-1]
        level = [hash_node(left, right) for left, right in zip(below[::2], below[1::2], strict=False)]
        if len(below) % 2:
            level.append(below[-1])
        levels.append(level)
    return levels
