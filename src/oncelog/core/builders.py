"""Build submissions from JSON values. Invalid values raise CanonicalError with the path of the fault."""

from collections.abc import Sequence
from hashlib import sha256
from typing import overload
from uuid import UUID

from oncelog.core.canonical import JsonValue, canonical_at
from oncelog.core.identity import check_object, check_text, fingerprint, get_required, normal_partitions
from oncelog.core.limits import PARTITION_CHARACTERS_MAX, PARTITIONS_MAX
from oncelog.core.policy import EVENTS, Policy
from oncelog.core.values import Receipt, Submission
from oncelog.errors import CanonicalError


def event(
    id: UUID | str,  # noqa: A002 - name in the JSON message
    event: JsonValue,
    partitions: Sequence[str],
    *,
    actor: str = "",
    client: str = "",
    scope: str = "",
    expected_position: int | None = None,
) -> Submission[Receipt]:
    """Build an event under the policy EVENTS, for `Log.submit`.

        order = oncelog.event(uuid.uuid4(), {"type": "order.placed", "order": 17}, ["orders"])

    `id` is a UUID, in upper or lower case. It identifies the event: the log commits the id once, and answers every
    retry with the first receipt. Use a new id for each event, and the same id for its retries. `event` is a JSON object
    with a `type`. `partitions` are the 1 to 64 names under which readers find the event.

    `actor` is the authenticated author, and `client` the client that wrote the event. `scope` separates the ids of
    tenants (`oncelog.event_scope`). With `expected_position`, the event is committed only if this is the newest
    position of the log.

    Raises CanonicalError with the path of a malformed argument.
    """
    key = id.bytes if isinstance(id, UUID) else parse_uuid(id)
    normal = _normalize_partitions(partitions)
    body = _encode_event(event)
    _check_expected(expected_position, "$.expected_position")
    return Submission(
        policy=EVENTS,
        scope=scope,
        key=key,
        fingerprint=fingerprint(normal, body),
        body=body,
        actor=actor,
        client=client,
        partitions=normal,
        expected_position=expected_position,
    )


@overload
def write(
    policy: Policy,
    scope: str,
    key: bytes | str | UUID,
    body: JsonValue,
    *,
    actor: str = "",
    client: str = "",
    expected_sequence: int | None = None,
    expected_position: int | None = None,
) -> Submission[Receipt]: ...


@overload
def write(
    policy: Policy,
    scope: str,
    key: bytes | str | UUID,
    body: JsonValue,
    *,
    actor: str = "",
    client: str = "",
    client_sequence: int = 0,
    expected_sequence: int | None = None,
    expected_position: int | None = None,
) -> Submission: ...


def write(  # noqa: PLR0913 - the fields of a submission, all named
    policy: Policy,
    scope: str,
    key: bytes | str | UUID,
    body: JsonValue,
    *,
    actor: str = "",
    client: str = "",
    client_sequence: int = 0,
    expected_sequence: int | None = None,
    expected_position: int | None = None,
) -> Submission:
    """Build a write under a policy of the application. Writes are equal if their bodies have the same canonical form.

    A text key is encoded in UTF-8, a UUID as its 16 bytes. Operations, row deltas and leases are fields of Submission.
    """
    canonical_body = canonical_at(body, "$.body")
    _check_expected(expected_sequence, "$.expected_sequence")
    _check_expected(expected_position, "$.expected_position")
    return Submission(
        policy=policy,
        scope=scope,
        key=_encode_key(key),
        fingerprint=sha256(canonical_body).digest(),
        body=canonical_body,
        actor=actor,
        client=client,
        client_sequence=client_sequence,
        expected_sequence=expected_sequence,
        expected_position=expected_position,
    )


def format_uuid(key: bytes) -> str:
    """Return the text form of a UUID in lower case. Three times as fast as `uuid.UUID`."""
    digits = key.hex()
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


def parse_uuid(value: JsonValue, path: str = "$.id") -> bytes:
    """Parse a UUID in upper or lower case and return its 16 bytes. Raises CanonicalError with the path."""
    # uuid.UUID is slow, and accepts braces, prefixes, digits of other scripts and misplaced hyphens. `fromhex` also
    # accepts white space, but then the key is too short.
    if type(value) is str and len(value) == 36 and value[8:24:5] == "----":
        try:
            key = bytes.fromhex(value.replace("-", ""))
        except ValueError:
            key = b""
        if len(key) == 16:
            return key
    if type(value) is not str:
        raise CanonicalError(path, f"must be a UUID as a string, not {type(value).__name__}")
    check_text(value, path)
    raise CanonicalError(path, "must be a UUID of 32 hexadecimal digits in five groups")


def _normalize_partitions(partitions: Sequence[str]) -> tuple[str, ...]:
    """Return partitions in normal form. Limits apply to the normal form, so that all spellings of a name are treated
    alike."""
    if type(partitions) is list and len(partitions) == 1:
        only = partitions[0]
        if type(only) is str and only.isascii() and 1 <= len(only) <= PARTITION_CHARACTERS_MAX:
            return (only,)  # the common case: already in normal form
    if isinstance(partitions, str) or not isinstance(partitions, Sequence):
        kind = type(partitions).__name__
        raise CanonicalError("$.partitions", f'must be a list (array) of strings, not {kind}; for example ["orders"]')
    normal = normal_partitions(partitions)
    if not 1 <= len(normal) <= PARTITIONS_MAX:
        raise CanonicalError("$.partitions", f"must have 1 to {PARTITIONS_MAX} different entries, not {len(normal)}")
    if not all(1 <= len(partition) <= PARTITION_CHARACTERS_MAX for partition in normal):
        raise CanonicalError("$.partitions", f"must each have 1 to {PARTITION_CHARACTERS_MAX} characters")
    return normal


def _encode_event(value: JsonValue) -> bytes:
    kind = value.get("type") if type(value) is dict else None
    if type(kind) is not str or not kind:
        members = check_object(value, "$.event")
        check_text(get_required(members, "type", "$.event"), "$.event.type")
        raise CanonicalError("$.event.type", "must not be empty")
    return canonical_at(value, "$.event")


def _check_expected(number: int | None, path: str) -> None:
    if number is not None and type(number) is not int:
        raise CanonicalError(path, f"must be a whole number or None, not {type(number).__name__}")
    if number is not None and number < 0:
        raise CanonicalError(path, f"must be 0 or more, not {number}")


def _encode_key(key: bytes | str | UUID) -> bytes:
    if isinstance(key, UUID):
        return key.bytes
    return key if isinstance(key, bytes) else check_text(key, "$.key").encode()
