"""Generate histories of batches for the model of `plan` (`plan_model`).

Pools of keys, scopes, clients and contents are small, clocks stop and jump in both directions, and evictions are a few
records apart, so that retries, conflicts, races inside a batch and entries close to expiry are common. Some numbers
depend on the state: the next sequence of a client, an expected position, the fence of a lease. The generator takes
them from a model that it updates as it draws.
"""

from collections.abc import Callable
from functools import cache
from hashlib import sha256
from itertools import product
from typing import Any, Final, NamedTuple

from hypothesis import strategies as st
from msgspec.structs import replace

from core.plan_model import PlanModel, Validate
from core.plan_model_events import LeaseChange
from core.plan_model_rules import entity_of
from oncelog.core.limits import LEASE_MEMORY_MS, LEASE_MS_MAX, SEQUENCE_MAX
from oncelog.core.merge import Op, RowDelta
from oncelog.core.operations import Condition, DeleteEntity, Must, Operation, Relate, SetEntity, Unrelate
from oncelog.core.policy import (
    DELTAS,
    FOREVER,
    Identity,
    OnReuse,
    Order,
    Policy,
    evicted_after,
    kept_for,
)
from oncelog.core.values import (
    Acknowledge,
    Claim,
    Item,
    Mode,
    OpenStream,
    Rate,
    Release,
    Renew,
    Request,
    Role,
    SetCursor,
    SetMember,
    Settings,
    Snapshot,
    Submission,
)
from oncelog.errors import PolicyError

START_MS: Final = 1_000_000_000_000
SCOPES: Final = ("a", "é", "c")
"""With 2 lanes, the second scope is alone in its lane; with 7 lanes, the first one is."""
CLIENTS: Final = ("x", "y")
MEMBERS: Final = ("m", "n", "l")
CONSUMERS: Final = ("q", "r")
RATES: Final = (Rate(100, 2), Rate(70, 1), Rate(300, 3), Rate(1, 2))
"""Some of these rates refill between two batches."""
FINGERPRINTS: Final = (b"f", b"f", b"f", b"g")
SNAPSHOT_TABLES: Final = tuple(
    name for name in Snapshot.__struct_fields__ if name not in ("settings", "tenants", "past_members")
)
WRITERS: Final = ("\uffff", "\U00010000")
"""The first sorts before the second by code point, and after it by UTF-16 code unit."""


class Step(NamedTuple):
    """One batch of a history."""

    batch: list[Request]
    now_ms: int
    validate: Validate | None


class History(NamedTuple):
    """The settings of a log and all its batches."""

    settings: Settings
    steps: list[Step]


# --- generating ------------------------------------------------------------------------------------------


def refuse_bad(submission: Submission) -> str | None:
    return "no" if submission.body == b"bad" else None


def refuse_all(submission: Submission) -> str | None:
    return "not today"


FLAGS: Final = ("zero_key", "client_sequence", "leased", "members_only", "entities", "rows")


def build_user_policies() -> list[Policy]:
    """Return a policy for each combination of flags that Policy accepts, with short keys and times to live."""
    retentions = (FOREVER, kept_for(ms=20), evicted_after(ms=20))
    accepted = []
    for order, on_reuse, retention, identity in product(Order, OnReuse, retentions, Identity):
        for values in product((False, True), repeat=len(FLAGS)):
            try:
                policy = Policy(
                    name="own",
                    key_bytes=(1, 2),
                    order=order,
                    on_reuse=on_reuse,
                    retention=retention,
                    identity=identity,
                    **dict(zip(FLAGS, values, strict=True)),
                )
            except PolicyError:
                continue
            accepted.append(policy)
    return accepted


USER_POLICIES: Final = build_user_policies()


class HistoryGenerator:
    """Draws a history item by item, and keeps a model of the state so far.

    Each history draws its pools and options first, so that some histories go deep and others wide. `below(n)` returns
    a number from 0 to n − 1; it is the only source of randomness.
    """

    def __init__(self, below: Callable[[int], int], policies: tuple[Policy, ...]) -> None:
        self.below = below
        self.policies = policies
        self.settings = Settings(lanes=self.pick(1, 2, 7), eviction_interval=self.pick(3, 2, 1, 4, 5, 7))
        self.model = PlanModel(self.settings)
        self.now_ms = START_MS
        self.sent: list[Submission] = []
        self.scopes = SCOPES[: self.pick(1, 2, 3)]
        self.clients = CLIENTS[: self.pick(1, 2)]
        self.key_count = self.pick(2, 4, 8)
        self.validates = (None, refuse_bad, refuse_all)[: self.pick(1, 2, 2, 3)]
        self.is_careless = self.pick(False, True)
        self.is_limited = self.pick(False, False, True)
        self.rate = self.pick(None, None, *RATES)
        self.is_expecting = self.pick(False, False, True)
        self.is_consumed = self.pick(False, False, True)
        self.jumps_ms = self.jumps()

    def jumps(self) -> list[int]:
        """Choose how far the clock can move between batches: around lease times (10 and 20 ms) and times to live."""
        jumps_ms = [0, 1, 10, 10, 20, -10]
        for ttl_ms in sorted({policy.retention.ttl_ms for policy in self.policies} - {0}):
            jumps_ms += [ttl_ms // 2 + 1, ttl_ms - 1, ttl_ms, ttl_ms, ttl_ms, ttl_ms + 1, ttl_ms + 1, -ttl_ms - 5]
        if any(policy.leased for policy in self.policies):
            jumps_ms += [LEASE_MEMORY_MS + 10, LEASE_MEMORY_MS + 11]
        return [0, *(self.pick(*jumps_ms) for _ in range(3))]

    def pick(self, *options: Any) -> Any:
        return options[self.below(len(options))] if len(options) > 1 else options[0]

    def rarely(self, one_in: int) -> bool:
        return self.below(one_in) == one_in - 1

    def history(self) -> History:
        steps = []
        for number in range(4 + self.below(9)):
            self.now_ms = max(START_MS - 100, self.now_ms + self.pick(*self.jumps_ms))
            validate = self.pick(*self.validates)
            batch = []
            if number == 0 and any(policy.members_only for policy in self.policies):
                everyone = tuple(SetMember(scope, member) for scope in self.scopes for member in MEMBERS)
                batch.append(Request(everyone[self.pick(0, 0, 0, 1) :]))
                self.model.submit(batch, self.now_ms)
            batch += [self.request(validate) for _ in range(self.pick(1, 1, 1, 1, 2, 2, 3, 0))]
            steps.append(Step(batch, self.now_ms, validate))
        return History(self.settings, steps)

    def request(self, validate: Validate | None) -> Request:
        """Draw a request. Most items are drawn with knowledge of the outcome of earlier items."""
        items: list[Item] = []
        before = len(self.model.history)
        for _ in range(self.pick(1, 1, 1, 2, 2, 3, 3, 4, 5, 0)):
            self.model.submit([], self.now_ms, validate)
            items.append(self.item())
            if not self.rarely(4):
                self.model.submit([Request((items[-1],))], self.now_ms, validate)
        del self.model.history[before:]
        mode = self.pick(Mode.EACH, Mode.ALL, Mode.UNTIL_REFUSED)
        # Without a draw, because a draw would make other cases rarer.
        is_admitted_whole = self.rate is not None and len(items) > 2
        request = Request(tuple(items), mode, is_admitted_whole)
        self.model.submit([request], self.now_ms, validate)
        return request

    def item(self) -> Item:
        policy: Policy = self.pick(*self.policies)
        kinds: list[Callable[[Policy], Item]] = [self.submission] * 6
        if policy.leased or (self.is_careless and self.rarely(20)):
            kinds += [self.claim] * 5 + [self.renew, self.renew, self.release, self.release, self.release]
        if policy.members_only or (self.is_careless and self.rarely(20)):
            kinds += [self.set_member, self.open_stream, self.acknowledge, self.acknowledge]
        if self.is_consumed:
            kinds += [self.set_cursor] * 3
        kind: Callable[[Policy], Item] = self.pick(*kinds)
        return kind(policy)

    # --- submissions ---

    def submission(self, policy: Policy) -> Submission:
        if self.sent and self.rarely(4):
            return self.retry()
        scope, key = self.scope_and_key(policy)
        submission = Submission(
            policy=policy,
            scope=scope,
            key=key,
            fingerprint=self.pick(*FINGERPRINTS),
            body=self.pick(b"good", b"good", b"good", b"bad") if len(self.validates) > 1 else b"good",
            actor=self.pick(*MEMBERS) if policy.members_only or self.rate else "",
            partitions=("p",),
            operations=self.operations(scope) if policy.entities else (),
            known_only=self.is_limited and self.rarely(6),
            rate=None if self.rate is None or self.rarely(6) else self.rate,
        )
        if policy.client_sequence:
            submission = self.add_client_sequence(submission)
        if policy.rows:
            delta = self.delta(submission)
            submission = replace(
                submission, delta=delta, key=delta.delta_id if policy.identity is Identity.DERIVED else key
            )
        if policy.leased:
            submission = replace(submission, **self.fence(replace(submission, holder="h", fence=1)))
        if self.is_expecting and self.rarely(3):
            submission = self.add_expectation(submission)
        self.sent.append(submission)
        return self.corrupt(submission) if self.is_careless and self.rarely(6) else submission

    def retry(self) -> Submission:
        """Repeat a submission unchanged or with one change, mostly one that is not checked for a known write."""
        again: Submission = self.pick(*self.sent)
        changes: list[dict[str, Any]] = [{}, {}, {}, {"fingerprint": b"g"}, {"body": b"bad"}, {"known_only": True}]
        changes += [{"expected_position": 0}, {"actor": self.pick(*MEMBERS)}, {"rate": self.rate}]
        if again.policy.client_sequence:
            changes += [{"client_sequence": self.model.last_client_sequence(again) + 1}, {"key": b""}]
        if again.delta is not None and again.policy == DELTAS:
            changes += [{"delta": replace(again.delta, op=Op.DELETE)}]  # the op is not part of the id
        return replace(again, **self.pick(*changes))

    def scope_and_key(self, policy: Policy) -> tuple[str, bytes]:
        shortest, longest = policy.key_bytes
        length = self.pick(*{shortest, longest})
        return self.pick(*self.scopes), bytes([1 + self.below(self.key_count)]) * length

    def add_client_sequence(self, submission: Submission) -> Submission:
        submission = replace(submission, client=self.pick(*self.clients))
        last = self.model.last_client_sequence(submission)
        number = max(1, last + self.pick(1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 3, 0, 0, -1))
        return replace(submission, client_sequence=number, key=b"" if self.rarely(5) else submission.key)

    def add_expectation(self, submission: Submission) -> Submission:
        kind = self.pick("position", "sequence", "both") if submission.policy.order is Order.STREAM else "position"
        if kind != "position":
            sequence = self.model.sequence(submission.scope) + self.pick(0, 0, 1, -1)
            submission = replace(submission, expected_sequence=sequence)
        if kind != "sequence":
            lane = self.model.lane_of(submission.policy, submission.scope)
            submission = replace(submission, expected_position=self.model.position(lane) + self.pick(0, 0, 1, -1))
        return submission

    def corrupt(self, submission: Submission) -> Submission:
        shortest, longest = submission.policy.key_bytes
        faults: tuple[dict[str, Any], ...] = (
            {"key": b""},
            {"key": bytes(longest)},
            {"key": b"k" * (longest + 1)},
            {"key": b"k" * (shortest - 1)},
            {"client": ""},
            {"client_sequence": 0},
            {"client_sequence": 1},
            {"client_sequence": SEQUENCE_MAX},
            {"client_sequence": SEQUENCE_MAX + 1},
            {"scope": ""},
            {"expected_sequence": 0},
            {"operations": ()},
            {"operations": (DeleteEntity("k"),)},
            {"delta": None},
            {"delta": RowDelta(Op.DELETE, "t", "r", "w", 0, (), b"d")},
            {"fence": 1},
            {"rate": Rate(0, 1)},
            {"rate": Rate(1, 0)},
        )
        corrupt = replace(submission, **self.pick(*faults))
        if corrupt.policy == DELTAS and corrupt.delta is not None:
            # If the key is still valid, the id must change with it, because equal ids mean equal deltas.
            corrupt = replace(corrupt, delta=replace(corrupt.delta, delta_id=corrupt.key))
        return corrupt

    def operations(self, scope: str) -> tuple[Operation, ...]:
        return tuple(self.operation(scope) for _ in range(self.pick(1, 1, 2, 3)))

    def operation(self, scope: str) -> Operation:
        key = self.pick("k", "l")
        kind = self.pick(*[SetEntity] * 4, DeleteEntity, Relate, Relate, Unrelate)
        if kind is DeleteEntity:
            return DeleteEntity(key)
        if kind is not SetEntity:
            relationship: Operation = kind("r", "of", self.pick("s", "s", "t"))
            return relationship
        expires_at_ms = self.pick(*[None] * 6, self.now_ms, self.now_ms + 1, self.now_ms + 20)
        return SetEntity(key, self.pick(b"1", b"2"), expires_at_ms, self.condition(scope, key))

    def condition(self, scope: str, key: str) -> Condition | None:
        """Draw a condition that the entity usually meets."""
        last = self.model.sequence(scope)
        entity = entity_of(self.model.operations(scope), key, self.now_ms)
        if self.pick(None, None, True, entity) is None:
            return None
        if entity is None:
            must = self.pick(*[Must.NOT_EXIST] * 5, Must.EXIST, Must.HAVE_VERSION, Must.HAVE_VALUE)
            return Condition(must, version=self.pick(0, last, last + 1), value=b"1")
        must = self.pick(Must.EXIST, Must.NOT_EXIST, *[Must.HAVE_VERSION, Must.HAVE_VALUE] * 3)
        version = self.pick(entity.version, entity.version, last, last + 1)
        return Condition(must, version, self.pick(entity.value, b"1", b"2"))

    def delta(self, submission: Submission) -> RowDelta:
        """Draw a delta. Its id is a hash of its content, without `op` under the built-in policy (DE-2)."""
        op = self.pick(Op.INSERT, Op.UPDATE, Op.UPDATE, Op.DELETE)
        ahead_ms = self.pick(0, 0, 0, 0, 0, 1, -1, 5000, 5001)
        hlc = self.model.log_time_ms(submission) + ahead_ms << 16 | self.pick(0, 0, 0, 0, 1, 65535)
        columns = tuple((name, self.pick(b"1", b"2")) for name in self.pick(("c",), ("c",), ("c", "d"), ()))
        row_id, client_id = self.pick("r", "r", "r", "s"), self.pick(*WRITERS)
        content = repr((client_id, hlc, row_id, columns, "" if submission.policy == DELTAS else op))
        return RowDelta(op, "t", row_id, client_id, hlc, columns, sha256(content.encode()).digest())

    # --- everything else ---

    def fence(self, item: Submission | Renew | Release) -> dict[str, Any]:
        """Draw a fence and a holder, mostly those of the newest lease."""
        lease = self.model.lease(item)
        options = (lease.fence, lease.fence, lease.fence, 0, max(0, lease.fence - 1)) if lease else (0, 0, 0, 1)
        holder = lease.holder if lease and lease.holder and not self.rarely(8) else self.pick("h", "i")
        if self.is_careless and self.rarely(20):
            holder = ""
        return {"fence": int(self.pick(*options)), "holder": holder}

    def leased_key(self, policy: Policy) -> tuple[str, bytes]:
        """Draw a key, often one that is already leased."""
        if self.is_careless and self.rarely(15):
            return self.pick(("", b"k" * policy.key_bytes[0]), ("a", b""), ("a", b"k" * (policy.key_bytes[1] + 1)))  # type: ignore[no-any-return]
        leases = [it.item for it in self.model.history if isinstance(it, LeaseChange) and it.item.policy == policy]
        if leases and not self.rarely(3):
            item: Claim | Renew | Release = self.pick(*leases)
            return item.scope, item.key
        return self.scope_and_key(policy)

    def lease_ms(self) -> int:
        is_odd = self.is_careless and self.rarely(10)
        return int(self.pick(0, LEASE_MS_MAX, LEASE_MS_MAX + 1) if is_odd else self.pick(10, 1, 20))

    def claim(self, policy: Policy) -> Claim:
        scope, key = self.leased_key(policy)
        holder = "" if self.is_careless and self.rarely(20) else self.pick("h", "i")
        fingerprint, lease_ms = self.pick(*FINGERPRINTS), self.lease_ms()
        claim = Claim(policy=policy, scope=scope, key=key, fingerprint=fingerprint, holder=holder, lease_ms=lease_ms)
        lease = self.model.lease(claim)
        fences: tuple[int, ...] = (0, 0, 0, 1)
        if lease is not None:
            before = max(0, lease.failed_fence - 1)
            fences = (0, lease.fence, lease.fence, lease.failed_fence, before, lease.fence + 1)
        waited_for = self.pick(*fences)
        return replace(claim, waited_for=waited_for, known_only=self.is_limited and self.rarely(6))

    def renew(self, policy: Policy) -> Renew:
        scope, key = self.leased_key(policy)
        renew = Renew(policy=policy, scope=scope, key=key, holder="", fence=0, lease_ms=self.lease_ms())
        return replace(renew, **self.fence(renew))

    def release(self, policy: Policy) -> Release:
        scope, key = self.leased_key(policy)
        failure = self.pick(None, b"", b"boom", b"bang")
        release = Release(policy=policy, scope=scope, key=key, holder="", fence=0, failure=failure)
        return replace(release, **self.fence(release))

    def scope_and_member(self) -> tuple[str, str]:
        scope, member = self.pick(*self.scopes), self.pick(*MEMBERS)
        if self.is_careless and self.rarely(10):
            return self.pick(("", member), (scope, ""))  # type: ignore[no-any-return]
        return scope, member

    def set_member(self, _: Policy) -> SetMember:
        actor = self.pick("", "", *MEMBERS)
        present = self.pick(True, True, False)
        role = self.pick(None, None, Role.OWNER, Role.MEMBER) if present else None
        only_if_member = role is not None and actor == MEMBERS[0]  # Without a draw, as in `request`.
        return SetMember(*self.scope_and_member(), present, actor, role, only_if_member)

    def open_stream(self, _: Policy) -> OpenStream:
        return OpenStream(*self.scope_and_member())

    def acknowledge(self, _: Policy) -> Acknowledge:
        scope, member = self.scope_and_member()
        last = self.model.sequence(scope)
        return Acknowledge(scope, member, self.pick(last, last, last - 1, last + 1, 0, -1))

    def set_cursor(self, _: Policy) -> SetCursor:
        """Draw a cursor, often near the stored cursor or near the end."""
        scope, consumer = self.pick("", *self.scopes), self.pick(*CONSUMERS)
        kept, last = self.model.cursor(scope, consumer) or 0, self.model.newest_for_cursor(scope)
        cursor = self.pick(last, last, last, last - 1, last + 1, kept, kept - 1, kept + 1, 0, -1, None)
        if self.is_careless and self.rarely(8):
            consumer, cursor = self.pick(("", last), (consumer, True), (consumer, "0"), (consumer, 0.0))
        return SetCursor(consumer, cursor, scope, self.pick(False, False, True))


@cache
def numbers_below(end: int) -> st.SearchStrategy[int]:
    return st.integers(0, end - 1)


@st.composite
def histories(draw: st.DrawFn, *policies: Policy) -> History:
    """Draw a history of writes under these policies, or under two valid user policies."""

    def below(end: int) -> int:
        return draw(numbers_below(end))

    return HistoryGenerator(below, policies or draw_user_policies(below)).history()


def draw_user_policies(below: Callable[[int], int]) -> tuple[Policy, ...]:
    """Draw a policy with a chosen flag, so that rare flags occur, and any other valid policy."""
    flag = FLAGS[below(len(FLAGS))]
    having = [policy for policy in USER_POLICIES if getattr(policy, flag)]
    return having[below(len(having))], replace(USER_POLICIES[below(len(USER_POLICIES))], name="other")
