"""Parts of write transactions that both engines share: read sets, policies, leaps and erasures."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import orjson

from oncelog.core.policy import LEDGER, Policy
from oncelog.core.read_set import ReadSet
from oncelog.core.replay import list_set_keys
from oncelog.core.rules.duplicates import collect_event_identities
from oncelog.core.rules.quotas import collect_usage_keys
from oncelog.core.tenants import Tenants
from oncelog.core.values import Record, RecordAct, Request
from oncelog.storage.queries.expiry import decode_policy
from oncelog.storage.queries.statement import CommitBatch, QuerySteps, RowsStatement, Statement
from oncelog.storage.queries.tenants import release_usage
from oncelog.storage.record_rows import decode_evidence
from oncelog.storage.store import build_act_request, select_new_policies
from oncelog.storage.tenants import measure_body


def complete_read_set(
    read_set: ReadSet, batch: Sequence[Request], tenants: Tenants | None, leaps: Sequence[int]
) -> None:
    """Add the keys that depend on tenants or leaps, which are known only once the lanes are locked."""
    if tenants is not None:
        read_set.usage, read_set.past_members = collect_usage_keys(batch, tenants, read_set.faults)
        read_set.keys |= collect_event_identities(batch, tenants, read_set.faults)
    if leaps:
        read_set.floors = read_set.streams


def encode_policy(policy: Policy) -> str:
    """Return the declaration of a policy."""
    return msgspec.json.encode(policy).decode()


def declare_policies(policies: Sequence[Policy]) -> QuerySteps[Mapping[str, Policy]]:
    """Save new policies, and return all policies by name.

    Raises PolicyError if a name already has a different policy.
    """
    rows = yield Statement("policies")
    known = {name: decode_policy(declaration) for name, declaration in rows}
    declared = select_new_policies(known, policies)
    for name, policy in declared.items():
        yield Statement("declare_policy", name, encode_policy(policy))
    return known | declared


def save_leap(leaps: Sequence[int], above: int) -> QuerySteps[None]:
    """Record a leap: after a restore, all lanes and streams continue above the number `above`."""
    yield Statement("set_leaps", orjson.dumps([*leaps, above]).decode())
    yield Statement("set_floors", above)


class ErasedValues(NamedTuple):
    """Entities whose values are erased: those in a scope that have one of the given versions."""

    scope: str
    versions: list[int]
    keys: list[str] | None
    """None if the body does not determine the keys; all entities of the scope are then searched."""


EraseValues = Callable[[int, ErasedValues], QuerySteps[int]]
"""Erases values in a lane. Returns how many bytes tenants were charged for them."""


def erase_bodies(
    lane: int, positions: Sequence[int], act: RecordAct | None, lanes: int, erase_values: EraseValues
) -> QuerySteps[int]:
    """Erase the bodies of records, and the values that the records set. Returns how many bodies were erased.

    The record of the act is committed first, so that the erasures see its log time.
    """
    rows = yield Statement("bodies", lane, sorted(set(positions)))
    evidence = [decode_evidence(row) for row in rows]
    if not evidence:
        return 0
    if act is not None:
        yield CommitBatch([build_act_request(act, lane, lanes, len(evidence))])
    yield RowsStatement("erase", [(lane, found.record.position, found.body_hash) for found in evidence])
    erased = [measure_body(found.record) for found in evidence]
    for values in _find_erased_values(found.record for found in evidence):
        size = yield from erase_values(lane, values)
        erased.append((values.scope, (), size))
    yield from release_usage(erased)
    yield Statement("touch_lane", lane)
    yield Statement("count_erasure")
    return len(evidence)


def _find_erased_values(records: Iterable[Record]) -> list[ErasedValues]:
    """Return the entities that lose their values when records are erased."""
    named, others = [], dict[str, list[int]]()
    for record in records:
        if not record.sequence:
            continue
        keys = list_set_keys(record, LEDGER)
        if keys is None:
            others.setdefault(record.scope, []).append(record.sequence)
        elif keys:
            named.append(ErasedValues(record.scope, [record.sequence], keys))
    return named + [ErasedValues(scope, versions, None) for scope, versions in others.items()]
