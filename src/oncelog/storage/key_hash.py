"""Keyed hashes of identities for indexes, 63 bits long.

A store compares every hit with the record itself, so a collision costs one read and never a wrong answer. Constructing
collisions requires the log's secret.
"""

from collections.abc import Iterable
from functools import lru_cache
from hashlib import blake2b
from typing import Final

from oncelog.core.values import KeyIdentity, SequenceIdentity

HASH_MAX: Final = 2**63 - 1
SECRET_BYTES: Final = 32


def hash_identity(secret: bytes, identity: KeyIdentity | SequenceIdentity) -> int:
    """Return the hash of a key identity, or of a client sequence, which has a number instead of a key."""
    return hash_identities(secret, (identity,))[identity]


def hash_identities(
    secret: bytes, identities: Iterable[KeyIdentity | SequenceIdentity]
) -> dict[KeyIdentity | SequenceIdentity, int]:
    """Return the hash of each identity. Consecutive identities usually differ only in the key."""
    hashes = {}
    before: tuple[str | None, str, str] = None, "", ""
    for identity in identities:
        policy, scope, client, key = identity
        if (policy, scope, client) != before:
            before = policy, scope, client
            copy = _hash_prefix(secret, policy, scope, client).copy
        hasher = copy()
        hasher.update(b"k" + key if isinstance(key, bytes) else b"s%d" % key)
        hashes[identity] = int.from_bytes(hasher.digest(), "big") >> 1
    return hashes


@lru_cache(maxsize=8192)  # streams and clients repeat
def _hash_prefix(secret: bytes, policy: str, scope: str, client: str) -> blake2b:
    """Return a hasher that has consumed everything before the key.

    Names cannot contain U+0000, so the encoding is unambiguous.
    """
    # Prefixing the secret makes BLAKE2 a keyed hash without the extra block that the `key` parameter adds.
    return blake2b(secret + f"{policy}\0{scope}\0{client}\0".encode(), digest_size=8)
