"""Policies: the identity, order, retention and reuse rules for one kind of write.

A policy is a frozen value. Each API has a built-in policy, and an application declares its own in the same way:

    payments = Policy(
        name="payments",
        key_bytes=(1, 64),
        order=Order.STREAM,
        on_reuse=OnReuse.REFUSE,
        retention=kept_for(hours=24),
    )

The constructor raises PolicyError if fields contradict each other.
"""

import re
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Final

from msgspec import Struct, structs

from oncelog.errors import PolicyError

RESTORE_POLICY: Final = "oncelog.restore"
"""Policy name of restore records (core/rules/leaps.py)."""
AUDIT_POLICY: Final = "oncelog.audit"
"""Policy name of audit records (core/rules/audit.py)."""
FOLD_POLICY: Final = "oncelog.fold"
"""Policy name of fold records (core/rules/compaction.py)."""
INTERNAL_POLICIES: Final = frozenset({RESTORE_POLICY, AUDIT_POLICY, FOLD_POLICY})
"""Policy names of internal records (core/internal_records.py). Submissions cannot use them."""
NAME_CHARACTERS_MAX: Final = 64
KEY_BYTES_MAX: Final = 255
TTL_MS_MAX: Final = 100 * 366 * 86_400_000
"""One hundred years. Use FOREVER for longer retention."""

_BUILT_IN_BY_NAME: Final[dict[str, "Policy"]] = {}
_NAME: Final = re.compile(rf"[a-z][a-z0-9_.-]{{0,{NAME_CHARACTERS_MAX - 1}}}")


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise PolicyError(message)


class Identity(Enum):
    """Where the key comes from."""

    GIVEN = "given"
    """The caller chooses the key, so different writes can have the same key."""
    DERIVED = "derived"
    """The key is a hash of the content, so different writes have different keys."""


class Order(Enum):
    """How the records under a policy are ordered."""

    LANE = "lane"
    """By position in lane 0: one order for the whole log."""
    STREAM = "stream"
    """Also by sequence in a stream, from 1 without gaps. The scope is the name of the stream."""


STREAM: Final = Order.STREAM
"""A constant, because every decision compares with it and Python 3.11 is slow to look up an enum member."""


class OnReuse(Enum):
    """The answer to a write with a known key and different content."""

    REFUSE = "refuse"
    """Refuse the write."""
    REPLAY = "replay"
    """Return the first write's answer, marked as a mismatch."""


class Forget(Enum):
    """When the log forgets a key."""

    NEVER = "never"
    AT_AGE = "at_age"
    """When the key's age in log time reaches its time to live."""
    AT_EVICTION = "at_eviction"
    """At the first eviction after the key's time to live. Evictions happen at fixed positions."""


class Retention(Struct, frozen=True):
    """How long the log remembers a key. Use FOREVER, kept_for or evicted_after to create a value."""

    forget: Forget
    ttl_ms: int = 0

    def __post_init__(self) -> None:
        _check(type(self.forget) is Forget, f"forget must be of type Forget, not {self.forget!r}")
        if self.forget is Forget.NEVER:
            _check(self.ttl_ms == 0, "a key that is never forgotten must not have a time to live")
        else:
            _check(
                type(self.ttl_ms) is int and 0 < self.ttl_ms <= TTL_MS_MAX,
                f"a time to live must be a whole number of milliseconds from 1 to {TTL_MS_MAX}, not {self.ttl_ms!r}",
            )

    def remembers(self, since_ms: int, log_time_ms: int, eviction_time_ms: int) -> bool:
        """Return whether state from `since_ms` is still remembered, given the log time and the last eviction."""
        if self.forget is Forget.NEVER:
            return True
        if self.forget is Forget.AT_AGE:
            return log_time_ms - since_ms < self.ttl_ms
        return eviction_time_ms - since_ms <= self.ttl_ms


FOREVER: Final = Retention(Forget.NEVER)


def kept_for(*, days: int = 0, hours: int = 0, seconds: int = 0, ms: int = 0) -> Retention:
    """Keep each key for this long after its creation, in log time."""
    return Retention(Forget.AT_AGE, _to_ms(days, hours, seconds, ms))


def evicted_after(*, days: int = 0, hours: int = 0, seconds: int = 0, ms: int = 0) -> Retention:
    """Keep each key until an eviction finds it older than this."""
    return Retention(Forget.AT_EVICTION, _to_ms(days, hours, seconds, ms))


class Policy(Struct, frozen=True, kw_only=True):
    """The rules for one kind of write. The module docstring has an example."""

    name: str
    key_bytes: tuple[int, int]
    """Minimum and maximum length of a key."""
    order: Order
    on_reuse: OnReuse
    retention: Retention
    identity: Identity = Identity.GIVEN
    zero_key: bool = True
    """Whether a key may consist entirely of zero bytes."""
    client_sequence: bool = False
    """Whether clients number their writes in a scope 1, 2, 3…. Each client then has its own keys, and may omit them."""
    leased: bool = False
    """A caller can claim a key before submitting the write, so that only one caller at a time works on it."""
    members_only: bool = False
    """Only members of the stream may write."""
    entities: bool = False
    """Writes must carry at least one operation on an entity or relationship."""
    rows: bool = False
    """Writes must carry a row delta."""

    def __post_init__(self) -> None:
        _check(
            isinstance(self.name, str) and _NAME.fullmatch(self.name) is not None,
            f"a policy's name must have 1 to {NAME_CHARACTERS_MAX} characters from a-z, 0-9, '_', '.' and '-', "
            f"and start with a letter, not {self.name!r}",
        )
        _check(self.name not in INTERNAL_POLICIES, f"{self.name} is reserved for internal records; choose another name")
        self._check_types()
        for is_consistent, reason in self._list_rules():
            _check(is_consistent, f"{self.name}: {reason}")
        _check(
            _BUILT_IN_BY_NAME.get(self.name, self) == self or is_ledger(self),
            f"{self.name} is the name of a built-in policy, whose keys are stored under it; choose another name",
        )

    def _check_types(self) -> None:
        """Check the exact types, because `plan` compares enum members by identity: the text "refuse" is not
        OnReuse.REFUSE."""
        for field, kind in _FIELD_TYPES.items():
            value = getattr(self, field)
            hint = "; use kept_for(hours=24) or FOREVER" if kind is Retention else ""
            _check(type(value) is kind, f"{self.name}: {field} must be of type {kind.__name__}, not {value!r}{hint}")
        _check(
            [type(length) for length in self.key_bytes] == [int, int],
            f"{self.name}: key_bytes must be two whole numbers, not {self.key_bytes!r}",
        )

    def _list_rules(self) -> Sequence[tuple[bool, str]]:
        """Return the rules for field combinations: for each, whether the policy satisfies it, and the error message."""
        shortest, longest = self.key_bytes
        numbers_writes = self.client_sequence
        is_derived = self.identity is Identity.DERIVED
        refuses_reuse = self.on_reuse is OnReuse.REFUSE
        return (
            (
                1 <= shortest <= longest <= KEY_BYTES_MAX,
                f"key_bytes must satisfy 1 <= shortest <= longest <= {KEY_BYTES_MAX}, not {self.key_bytes!r}",
            ),
            (
                not (is_derived and refuses_reuse),
                "a derived key cannot be reused for another write, so there is nothing to refuse",
            ),
            *(
                (
                    self.order is Order.STREAM or not getattr(self, flag),
                    f"{flag} applies to streams, so the order must be Order.STREAM",
                )
                for flag in _STREAM_FLAGS
            ),
            (
                not (self.leased and self.members_only),
                "a lease cannot be combined with members_only: a claim has no author whose membership could be checked",
            ),
            (not (self.entities and self.rows), "a write has entities or a row, not both"),
            (
                not (numbers_writes and self.retention.forget is Forget.AT_AGE),
                "a client's sequence and its keys must be forgotten at the same position; use evicted_after or FOREVER",
            ),
            (
                not (numbers_writes and is_derived),
                "a derived key already identifies the write; a client sequence could contradict it",
            ),
            (
                not numbers_writes or refuses_reuse,
                "a client sequence refuses reuse (SEQUENCE_REUSED), so keys must refuse it too",
            ),
            (
                not (numbers_writes and self.leased),
                "a client sequence cannot be combined with a lease: it orders writes, while callers race for a lease",
            ),
        )


def _to_ms(days: int, hours: int, seconds: int, ms: int) -> int:
    return ((days * 24 + hours) * 3600 + seconds) * 1000 + ms


_STREAM_FLAGS: Final = ("client_sequence", "leased", "members_only", "entities", "rows")
_FIELD_TYPES: Final = {
    "key_bytes": tuple,
    "order": Order,
    "on_reuse": OnReuse,
    "retention": Retention,
    "identity": Identity,
    "zero_key": bool,
    **dict.fromkeys(_STREAM_FLAGS, bool),
}


EVENTS: Final = Policy(
    name="events",
    key_bytes=(16, 16),
    order=Order.LANE,
    on_reuse=OnReuse.REFUSE,
    retention=FOREVER,
)

LEDGER: Final = Policy(
    name="ledger",
    key_bytes=(16, 16),
    zero_key=False,
    order=Order.STREAM,
    on_reuse=OnReuse.REFUSE,
    retention=evicted_after(hours=24),
    client_sequence=True,
    entities=True,
)

DELTAS: Final = Policy(
    name="deltas",
    identity=Identity.DERIVED,
    key_bytes=(32, 32),
    order=Order.STREAM,
    on_reuse=OnReuse.REPLAY,
    retention=FOREVER,
    rows=True,
)

RUNS: Final = Policy(
    name="runs",
    identity=Identity.DERIVED,
    key_bytes=(16, 16),
    order=Order.STREAM,
    on_reuse=OnReuse.REPLAY,
    retention=FOREVER,
    leased=True,
)

CHAT: Final = Policy(
    name="chat",
    key_bytes=(16, 16),
    order=Order.STREAM,
    on_reuse=OnReuse.REPLAY,
    retention=kept_for(days=7),
    members_only=True,
)


def build_ledger_policy(ttl_ms: int) -> Policy:
    """Return LEDGER with a different time to live, for a new log. Raises PolicyError."""
    return structs.replace(LEDGER, retention=evicted_after(ms=ttl_ms))


def is_ledger(policy: Policy) -> bool:
    """Return whether a policy equals LEDGER, ignoring the time to live."""
    if policy.name != "ledger" or policy.retention.forget is not Forget.AT_EVICTION:
        return False
    built_in = _BUILT_IN_BY_NAME.get(policy.name, policy)
    return structs.asdict(policy) | {"retention": built_in.retention} == structs.asdict(built_in)


def find_retention(name: str, policies: Mapping[str, Policy]) -> Retention | None:
    """Return how long keys under a policy are retained, or None if the policy is neither known nor internal."""
    if name in INTERNAL_POLICIES:
        return FOREVER
    policy = policies.get(name)
    return None if policy is None else policy.retention


BUILT_IN_POLICIES: Final = (EVENTS, LEDGER, DELTAS, RUNS, CHAT)
_BUILT_IN_BY_NAME.update((policy.name, policy) for policy in BUILT_IN_POLICIES)
