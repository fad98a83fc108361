"""Parts of write transactions that both engines share: read sets, policies, leaps and erasures."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from oncelog.core.policy import LEDGER, Policy
from oncelog.core.proof import hash_body
from oncelog.core.read_set import ReadSet
from oncelog.core.replay import list_set_keys
from oncelog.core.rules.duplicates import collect_event_identities
from oncelog.core.rules.quotas import collect_usage_keys
from oncelog.core.tenants import Tenants
from oncelog.core.values import Record, Request
from oncelog.storage.leaps import encode_leaps
from oncelog.storage.queries.statement import QuerySteps, Statement
from oncelog.storage.queries.tenants import release_usage
from oncelog.storage.store import select_new_policies
from oncelog.storage.tenants import ErasedRow, is_counted_for_stream

_POLICY_DECODER: Final = msgspec.json.Decoder(Policy)


def complete_read_set(
    read_set: ReadSet, batch: Sequence[Request], tenants: Tenants | None, leaps: Sequence[int]
) -> None:
    """Add to a read set what depends on tenants or leaps, which are known after the lanes are locked."""
    if tenants is not None:
        read_set.usage, read_set.past_members = collect_usage_keys(batch, tenants, read_set.faults)
        read_set.keys |= collect_event_identities(batch, tenants, read_set.faults)
    if leaps:
        read_set.floors = read_set.streams


def encode_policy(policy: Policy) -> str:
    """Return the declaration of a policy."""
    return msgspec.json.encode(policy).decode()


def declare_policies(policies: Sequence[Policy]) -> QuerySteps[Mapping[str, Policy]]:
    """Save new policies, and return all policies by name. Raises PolicyError for a name with a different policy."""
    rows = yield Statement("policies")
    known = {name: _POLICY_DECODER.decode(declaration) for name, declaration in rows}
    declared = select_new_policies(known, policies)
    for name, policy in declared.items():
        yield Statement("declare_policy", name, encode_policy(policy))
    return known | declared


def save_leap(leaps: Sequence[int], above: int) -> QuerySteps[None]:
    """Save the number of a leap, and the floors of all streams."""
    yield Statement("set_leaps", encode_leaps(leaps, above))
    yield Statement("set_floors", above)


class RecordContent(NamedTuple):
    """Fields of a record that determine the values that it set."""

    sequence: int
    scope: str
    fingerprint: bytes
    body: bytes


class ErasedValues(NamedTuple):
    """Entities whose values are erased: those of a scope that have one of the versions."""

    scope: str
    versions: list[int]
    keys: list[str] | None
    """None if the body does not determine the keys: then all entities of the scope are searched."""


class Erasure(NamedTuple):
    """A record that is about to be erased."""

    position: int
    body_hash: bytes
    """Hash that replaces the body."""
    size: ErasedRow
    """Size that the usage of tenants loses."""
    content: RecordContent
    """Determines the values that the record set."""


def load_erasures(lane: int, positions: Sequence[int]) -> QuerySteps[list[Erasure]]:
    """Return the erasures of the given records, without records that have no body."""
    rows = yield Statement("bodies", lane, sorted(set(positions)))
    return [_build_erasure(*row) for row in rows]


def _build_erasure(
    position: int, salt: bytes, body: bytes, sequence: int, policy: str, actor: str, scope: str, *others: Any
) -> Erasure:
    partitions, fingerprint = others
    size = (position, is_counted_for_stream(sequence, policy, actor), scope, partitions, len(body))
    return Erasure(position, hash_body(salt, body), size, RecordContent(sequence, scope, fingerprint, body))


def find_erased_values(contents: Iterable[RecordContent]) -> list[ErasedValues]:
    """Return the entities that lose their values when records are erased."""
    named, others = [], dict[str, list[int]]()
    for content in contents:
        if not content.sequence:
            continue
        keys = _find_entity_keys(content)
        if keys is None:
            others.setdefault(content.scope, []).append(content.sequence)
        elif keys:
            named.append(ErasedValues(content.scope, [content.sequence], keys))
    return named + [ErasedValues(scope, versions, None) for scope, versions in others.items()]


def _find_entity_keys(content: RecordContent) -> list[str] | None:
    """Return the keys that a record set; None if its body is not a ledger transaction."""
    record = Record(
        lane=0,
        position=0,
        sequence=content.sequence,
        log_time_ms=0,
        height=0,
        policy=LEDGER.name,
        scope=content.scope,
        key=b"",
        fingerprint=content.fingerprint,
        actor="",
        client="",
        client_sequence=0,
        partitions=(),
        body=content.body,
    )
    return list_set_keys(record, LEDGER)


def finish_erasure(lane: int, erasures: Sequence[Erasure], values: Sequence[ErasedRow]) -> QuerySteps[None]:
    """Update usage, revision and number of erasures after bodies, and the values that they set, have been erased."""
    yield from release_usage([*(erasure.size for erasure in erasures), *values])
    yield Statement("touch_lane", lane)
    yield Statement("count_erasure")
