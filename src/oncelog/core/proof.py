"""Hashes over records, Merkle trees over hashes, a chain over trees. docs/reference/proofs.md has it byte by byte.

    leaf  = H(0x00 ‖ record header ‖ H(salt ‖ body))
    node  = H(0x01 ‖ left ‖ right)                        the tree of RFC 9162, section 2.1
    block = H(0x02 ‖ block header, which holds the hash of the block before)

The three first bytes keep one kind of hash from being passed off as another. The body enters only through its salted
hash, so that body and salt can be dropped and everything above still verifies. (The fingerprint in the header stays and
is not salted: it is how a retry is recognised.)
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
"""What stands for the previous hash in a lane's first block."""

_RECORD_NUMBERS: Final = struct.Struct(">BIQQQQQ")
_BLOCK_NUMBERS: Final = struct.Struct(">BIQQIQ")
_LENGTH: Final = struct.Struct(">I")


class Block(Struct, frozen=True):
    """The records of one group commit in a lane."""

    lane: int
    height: int
    first_position: int
    count: int
    log_time_ms: int
    previous: bytes
    root: bytes

    @property
    def hash(self) -> bytes:
        """Covers every field, and by `previous` every block before."""
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
        """Whether heights and positions may leap to this block, as far as its header says (core/rules/leaps.py)."""
        return self.count == 1 and self.first_position == self.height


class Proof(Struct, frozen=True):
    """That a record stands in a block: its place among the block's leaves, and the hashes beside its way up."""

    index: int
    count: int
    path: tuple[bytes, ...]


def encode_record_header(record: Record) -> bytes:
    """All of a record but its body, in one spelling."""
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


# Names and lengths come again and again; but all of them together may come in more ways than anybody wants to keep.


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


# A copy of a hash that has been begun is cheaper than a new one, for which OpenSSL looks up its SHA-256 again.
_BODY_HASHER: Final = sha256()
_LEAF_HASHER: Final = sha256(b"\x00")
_NODE_HASHER: Final = sha256(b"\x01")


def hash_body(salt: bytes, body: bytes) -> bytes:
    """What stays of a body when it is erased. A salt has SALT_BYTES bytes, no more and no less."""
    hasher = _BODY_HASHER.copy()
    hasher.update(salt + body)
    return hasher.digest()


def hash_leaf(header: bytes, salted_body_hash: bytes) -> bytes:
    """The leaf of a record in its block's tree."""
    hasher = _LEAF_HASHER.copy()
    hasher.update(header + salted_body_hash)
    return hasher.digest()


def hash_node(left: bytes, right: bytes) -> bytes:
    """The node over two others."""
    hasher = _NODE_HASHER.copy()
    hasher.update(left + right)
    return hasher.digest()


MerkleTree = Sequence[Sequence[bytes]]
"""All levels of a Merkle tree, leaves first, the root alone in the last."""


def compute_root(leaves: Sequence[bytes]) -> bytes:
    """The Merkle root over one leaf or more."""
    return build_tree(leaves)[-1][0]


def prove(leaves: Sequence[bytes], index: int) -> Proof:
    """The inclusion proof of one leaf."""
    return prove_from_tree(build_tree(leaves), index)


def prove_from_tree(levels: MerkleTree, index: int) -> Proof:
    """The inclusion proof of one leaf of a tree: nothing is hashed for it."""
    if not 0 <= index < len(levels[0]):
        raise IndexError(f"no leaf {index} among {len(levels[0])}")
    path = []
    place = index
    for level in levels[:-1]:
        sibling = place ^ 1
        if sibling < len(level):
            path.append(level[sibling])
        place >>= 1
    return Proof(index, len(levels[0]), tuple(path))


def verify_inclusion(leaf: bytes, proof: Proof, root: bytes) -> bool:
    """True if the proof leads from the leaf to the root: RFC 9162, section 2.1.3.2."""
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
    """True if the record, body and all, stands in the block where its own header says.

    Of an erased record the body is not there, so this is False: `verify_header` is for it.
    """
    if record.erased:
        return False
    # The salt's length is fixed: otherwise a byte could move between salt and body without changing their hash.
    return len(salt) == SALT_BYTES and verify_header(record, hash_body(salt, record.body), proof, block)


def verify_header(record: Record, salted_body_hash: bytes, proof: Proof, block: Block) -> bool:
    """The same for a record whose body has been erased: its hash is all that is left of it."""
    if not len(salted_body_hash) == len(block.previous) == len(block.root) == HASH_BYTES:
        return False
    if (record.lane, record.height, record.log_time_ms) != (block.lane, block.height, block.log_time_ms):
        return False
    if record.position != block.first_position + proof.index or proof.count != block.count:
        return False
    try:
        header = encode_record_header(record)
    except (struct.error, UnicodeEncodeError):
        return False  # no log could hold such a record
    return verify_inclusion(hash_leaf(header, salted_body_hash), proof, block.root)


class SealedBatch(Struct, frozen=True):
    """The blocks that close a batch, one a lane, and the lanes' heads with their hashes."""

    blocks: list[Block]
    trees: dict[int, MerkleTree]
    """That of each lane's block: what its proofs are made from."""
    heads: dict[int, LaneHead]


def seal(changes: Changes, salts: Sequence[bytes]) -> SealedBatch:
    """Closes a block in every lane that `changes` writes records to.

    `salts` are random, SALT_BYTES long, one a record in the order of `changes.records`. They come from outside
    because nothing in the core draws a random number.
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
    """The tree over one leaf or more. A node without a sibling moves up as it is.

    This is the tree that RFC 9162 defines from the top down by powers of two, built from the bottom up.
    """
    levels = [leaves]
    while len(levels[-1]) > 1:
        below = levels[-1]
        level = [hash_node(left, right) for left, right in zip(below[::2], below[1::2], strict=False)]
        if len(below) % 2:
            level.append(below[-1])
        levels.append(level)
    return levels
