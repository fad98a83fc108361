"""Verifies uniqueness: one record for each identity while it is remembered."""

from collections.abc import Callable, Iterable, Iterator

from oncelog.core.gaps import find_last_eviction
from oncelog.core.policy import FOREVER, find_retention
from oncelog.core.values import KeyIdentity, Record, SequenceIdentity
from oncelog.storage.leaps import NO_GAPS
from oncelog.storage.verify.findings import InconsistencyError
from oncelog.storage.verify.source import LogRules

GetLogTime = Callable[[int, int], int]
"""The log time of the record at a lane and a position; 0 if there is none."""


def list_identities(record: Record) -> Iterator[KeyIdentity | SequenceIdentity]:
    """By what a record can be found: its key, and the number that its client gave it."""
    if record.key:
        yield record.identity
    if record.client_sequence:
        yield (record.policy, record.scope, record.client, record.client_sequence)


def check_uniqueness(records: Iterable[Record], rules: LogRules, get_log_time: GetLogTime) -> None:
    """Records that share a hash, in order: of one identity several may be only where the older was forgotten."""
    last: dict[KeyIdentity | SequenceIdentity, Record] = {}
    for after in records:
        for identity in list_identities(after):
            before = last.get(identity)
            last[identity] = after
            if before is not None and not _was_forgotten(before, after, rules, get_log_time):
                raise InconsistencyError(
                    f"stores an identity of {after.policy} {after.scope!r} again that position {before.position} had "
                    "stored, though it was still remembered",
                    after.lane,
                    after.position,
                )


def _was_forgotten(before: Record, after: Record, rules: LogRules, get_log_time: GetLogTime) -> bool:
    """Whether what `before` left to remember was gone when `after` was decided, as `core.invariants` has it."""
    gaps = rules.gaps.get(after.lane, NO_GAPS).positions
    evicting = find_last_eviction(after.position - 1, rules.settings.eviction_interval, gaps)
    retention = find_retention(after.policy, rules.policies) or FOREVER
    return not retention.remembers(before.log_time_ms, after.log_time_ms, get_log_time(after.lane, evicting))
