"""Limits of identities, each with a name and its unit."""

from typing import Final

GRANTS_MAX: Final = 1000
"""Names and prefixes that one identity may read; as many that it may write."""

TOKEN_CHARACTERS_MAX: Final = 16_384
"""A longer token is refused before anything in it is looked at."""
TOKEN_HEADER_CHARACTERS_MAX: Final = 4096
TOKEN_SIGNATURE_CHARACTERS_MAX: Final = 1400
"""In base64url: of an RSA key of 8192 bits, the largest that signs anything."""
TOKEN_KEYS_MAX: Final = 32
"""Keys that tokens are verified with, over all files: one that names no key is tried with each that has no name."""
TOKEN_KEY_FILE_BYTES_MAX: Final = 256 * 1024
SECRET_BYTES_MIN: Final = 32
"""Of a secret for HS256: as long as its hash (RFC 7518, 3.2)."""
RSA_BITS_MIN: Final = 2048
LEEWAY_MS_DEFAULT: Final = 30_000
"""How far the issuer's clock may be from ours."""
LEEWAY_MS_MAX: Final = 300_000
TOKEN_TIME_S_MAX: Final = 253_402_300_799
"""The end of the year 9999. A time beyond it was given in milliseconds."""

API_KEYS_MAX: Final = 10_000
"""In one file, revoked ones too."""
API_KEYS_FILE_BYTES_MAX: Final = 64 * 1024 * 1024
API_KEY_SECRET_BYTES: Final = 32
API_KEY_ID_BYTES: Final = 8
