"""Keyed hashes of identities, of 63 bits, for indexes.

A hit is checked against the record itself. So a collision costs a look, never an answer, and nobody who does not know
the log's secret can make one.
"""

from collections.abc import Iterable
from functools import lru_cache
from hashlib import blake2b
from typing import Final

from oncelog.core.values import KeyIdentity, SequenceIdentity

HASH_MAX: Final = 2**63 - 1
SECRET_BYTES: Final = 32


def hash_identity(secret: bytes, identity: KeyIdentity | SequenceIdentity) -> int:
    """The hash of an identity. A number in place of the key makes it that of a client's sequence."""
    return hash_identities(secret, (identity,))[identity]


def hash_identities(
    secret: bytes, identities: Iterable[KeyIdentity | SequenceIdentity]
) -> dict[KeyIdentity | SequenceIdentity, int]:
    """The same of many, of which most have all but the key in common with the one before."""
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


@lru_cache(maxsize=8192)  # the same streams and clients come again and again
def _hash_prefix(secret: bytes, policy: str, scope: str, client: str) -> blake2b:
    """The hash of all that stands before the key. No name has a U+0000 in it, so it can be read in one way only."""
    # The secret comes first: BLAKE2 is a keyed hash that way too, and in one block less than by its own parameter.
    return blake2b(secret + f"{policy}\0{scope}\0{client}\0".encode(), digest_size=8)
