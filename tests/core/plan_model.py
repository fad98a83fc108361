"""An independent model of `oncelog.core.plan`: slow and naive.

It shares only the value types with `plan`, and no code. It keeps one list of all events and answers every question by
scanning the list: a sequence is a count of writes, a row is the merge of its deltas as defined in DE-7, and a key is
forgotten if it was too old at an eviction. A rollback truncates the list. The model has no derived state that an
update could corrupt.

The rules come from the rule catalogue and from the docstrings of the value types. Messages are empty, and `field` is
set only where a rule defines it (the key of an entity), so comparisons must omit both.
"""

from collections.abc import Callable, Sequence
from fractions import Fraction
from hashlib import sha256
from math import ceil
from typing import assert_never

from msgspec.structs import replace

from core.plan_model_events import Act, Event, LeaseChange, Touch, Write
from core.plan_model_rules import Leased, entity_of, failure_of, identity_of, key_is_malformed, newest
from oncelog.core.limits import CLOCK_DRIFT_MS_MAX, LEASE_MEMORY_MS, LEASE_MS_MAX, SEQUENCE_MAX
from oncelog.core.merge import RowDelta
from oncelog.core.operations import Operation, SetEntity
from oncelog.core.policy import Forget, Identity, OnReuse, Order, Policy
from oncelog.core.values import (
    Acknowledge,
    Applied,
    Claim,
    Committed,
    DropTombstones,
    FoldRows,
    Granted,
    Item,
    Leap,
    Lease,
    Mode,
    OpenStream,
    Rate,
    Reason,
    Receipt,
    RecordAct,
    Refused,
    Release,
    Renew,
    Replayed,
    Request,
    Role,
    SetCursor,
    SetMember,
    Settings,
    Submission,
    Verdict,
)

Validate = Callable[[Submission], str | None]

# --- verdicts --------------------------------------------------------------------------------------------


def refused(reason: Reason, *, current: int = 0, value: bytes | None = None, retry_after_ms: int = 0) -> Refused:
    return Refused(reason, "", current=current, value=value, retry_after_ms=retry_after_ms)


# --- the model -------------------------------------------------------------------------------------------


class PlanModel:
    """Decides batches by scanning all earlier events."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.history: list[Event] = []
        self.batch = 0
        self.now_ms = 0
        self.validate: Validate | None = None
        self.admission: dict[tuple[str, str], list[tuple[int, int, int]]] | None = None
        """Tokens left, price and burst per actor and item, while a whole request is being admitted; otherwise None."""

    def submit(self, batch: Sequence[Request], now_ms: int, validate: Validate | None = None) -> list[list[Verdict]]:
        self.batch += 1
        self.now_ms = now_ms
        self.validate = validate
        return [self._request(request) for request in batch]

    def _request(self, request: Request) -> list[Verdict]:
        before = len(self.history)
        if not request.is_admitted_whole:
            return self._items(request)
        self.admission = {}
        verdicts = self._items(request)
        missing_us = [
            min(len(taken) * price_us - left_us, most_us - left_us)
            for taken in self.admission.values()
            for left_us, price_us, most_us in taken[:1]
        ]
        self.admission = None
        limited = [
            number
            for number, one in enumerate(verdicts)
            if isinstance(one, Refused) and one.reason in (Reason.RATE_LIMITED, Reason.QUOTA_EXCEEDED, Reason.NOT_KNOWN)
        ]
        new = [number for number, one in enumerate(verdicts) if isinstance(one, Committed)]
        if not limited and max(missing_us, default=0) > 0 and new:
            verdicts[new[-1]] = refused(Reason.RATE_LIMITED, retry_after_ms=ceil(Fraction(max(missing_us), 1000)))
            limited = new[-1:]
        if not limited:
            return verdicts
        del self.history[before:]
        not_processed = Refused(Reason.NOT_PROCESSED, "", index=limited[0])
        return [one if number == limited[0] else not_processed for number, one in enumerate(verdicts)]

    def _items(self, request: Request) -> list[Verdict]:
        before = len(self.history)
        verdicts: list[Verdict] = []
        for index, item in enumerate(request.items):
            verdicts.append(self._decide(item))
            if request.mode is Mode.EACH or not isinstance(verdicts[-1], Refused):
                continue
            not_processed = Refused(Reason.NOT_PROCESSED, "", index=index)
            behind: list[Verdict] = [not_processed] * (len(request.items) - index - 1)
            if request.mode is Mode.UNTIL_REFUSED:
                return verdicts + behind
            del self.history[before:]
            return [not_processed] * index + verdicts[-1:] + behind
        return verdicts

    def _decide(self, item: Item) -> Verdict:  # noqa: C901 - one case for each kind of item
        match item:
            case Submission():
                return self._submission(item)
            case OpenStream() | SetMember() | Acknowledge() if not item.scope or not item.member:
                return refused(Reason.MALFORMED)
            case OpenStream() | SetMember():
                return self._set_member(item) if isinstance(item, SetMember) else self._open_stream(item)
            case Acknowledge():
                return self._acknowledge(item)
            case SetCursor():
                return self._set_cursor(item)
            case DropTombstones() | FoldRows():
                raise NotImplementedError("see test_tombstones and the contract suite")
            case Claim() | Renew() | Release() if self._lease_item_is_malformed(item):
                return refused(Reason.MALFORMED)
            case Claim():
                return self._claim(item)
            case Renew():
                return self._renew(item)
            case Release():
                return self._release(item)
            case Leap() | RecordAct():
                raise NotImplementedError("the contract suite checks leaps and audit records")
            case _:
                assert_never(item)

    # --- queries: lanes ---------------------------------------------------------------------------------

    def writes(self) -> list[Write]:
        return [event for event in self.history if isinstance(event, Write)]

    def lane_of(self, policy: Policy, scope: str) -> int:
        return 0 if policy.order is Order.LANE else self.lane_of_stream(scope)

    def lane_of_stream(self, scope: str) -> int:
        return 1 + int.from_bytes(sha256(scope.encode()).digest()[:8], "big") % self.settings.lanes

    def position(self, lane: int) -> int:
        return sum(write.receipt.lane == lane for write in self.writes()) + len(self.acts(lane))

    def acts(self, lane: int) -> list[Act]:
        return [event for event in self.history if isinstance(event, Act) and event.lane == lane]

    def sequence(self, scope: str) -> int:
        in_streams = [write.submission for write in self.writes() if write.submission.policy.order is Order.STREAM]
        return sum(submission.scope == scope for submission in in_streams)

    def fence(self, lane: int) -> int:
        return sum(isinstance(event, LeaseChange) and event.is_new and event.lane == lane for event in self.history)

    def blocks(self, lane: int) -> set[int]:
        """Return the batches that wrote records to the lane; each makes one block."""
        writes = {write.batch for write in self.writes() if write.receipt.lane == lane}
        return writes | {act.batch for act in self.acts(lane)}

    def revision(self, lane: int) -> int:
        """Count the batches that changed anything in the lane."""
        changes = [event for event in self.history if isinstance(event, LeaseChange | Touch) and event.lane == lane]
        return len(self.blocks(lane) | {event.batch for event in changes})

    def saved_log_time_ms(self, lane: int) -> int:
        times = [write.receipt.log_time_ms for write in self.writes() if write.receipt.lane == lane]
        changes = [event for event in self.history if isinstance(event, LeaseChange | Touch | Act)]
        return max(times + [event.at_ms for event in changes if event.lane == lane], default=0)

    def log_time_ms(self, item: Submission | Leased) -> int:
        return max(self.now_ms, self.saved_log_time_ms(self.lane_of(item.policy, item.scope)))

    def evictions(self, lane: int) -> list[int]:
        """Return the log times of all evictions in the lane."""
        in_lane = [write.receipt for write in self.writes() if write.receipt.lane == lane]
        numbered = [(it.position, it.log_time_ms) for it in in_lane]
        numbered += [(it.position, it.at_ms) for it in self.acts(lane)]
        return [at_ms for position, at_ms in sorted(numbered) if position % self.settings.eviction_interval == 0]

    def forgotten(self, item: Submission | Leased, seen_ms: int) -> bool:
        retention = item.policy.retention
        match retention.forget:
            case Forget.NEVER:
                return False
            case Forget.AT_AGE:
                return self.log_time_ms(item) - seen_ms >= retention.ttl_ms
            case Forget.AT_EVICTION:
                evictions = self.evictions(self.lane_of(item.policy, item.scope))
                return any(at_ms - seen_ms > retention.ttl_ms for at_ms in evictions)

    # --- queries: keys, clients, leases -----------------------------------------------------------------

    def known(self, item: Submission | Claim) -> Write | None:
        """Return the write that is remembered under the item's key."""
        if not item.key:
            return None
        write = newest(write for write in self.writes() if identity_of(write.submission) == identity_of(item))
        return None if write is None or self.forgotten(item, write.receipt.log_time_ms) else write

    def client_writes(self, submission: Submission) -> list[Write]:
        name, scope, client, _ = identity_of(submission)
        return [write for write in self.writes() if identity_of(write.submission)[:3] == (name, scope, client)]

    def last_client_sequence(self, submission: Submission) -> int:
        last = newest(self.client_writes(submission))
        if last is None or self.forgotten(submission, last.receipt.log_time_ms):
            return 0
        return last.submission.client_sequence

    def lease(self, item: Submission | Leased) -> Lease | None:
        """Return the newest lease of the key, unless a later write used the key or the lease has been forgotten."""
        lease: Lease | None = None
        for event in self.history:
            if isinstance(event, LeaseChange) and identity_of(event.item) == identity_of(item):
                lease = event.lease
            elif isinstance(event, Write) and identity_of(event.submission) == identity_of(item):
                lease = None
        if lease is None or self.log_time_ms(item) > lease.until_ms + LEASE_MEMORY_MS:
            return None
        return lease

    def held_lease(self, item: Submission | Renew | Release) -> Lease | None:
        """Return the lease with the item's fence, if the item's holder still has it."""
        lease = self.lease(item)
        if lease is None or not lease.holder or lease.holder != item.holder or lease.fence != item.fence:
            return None
        return lease

    # --- queries: side state ----------------------------------------------------------------------------

    def operations(self, scope: str) -> list[tuple[int, Operation]]:
        """Return all operations committed in the scope, each with its version."""
        in_scope = [write for write in self.writes() if write.submission.scope == scope]
        return [(write.receipt.sequence, it) for write in in_scope for it in write.submission.operations]

    def deltas(self, scope: str, table: str, row_id: str) -> list[RowDelta]:
        submissions = [write.submission for write in self.writes() if write.submission.scope == scope]
        deltas = [submission.delta for submission in submissions if submission.delta is not None]
        return [delta for delta in deltas if (delta.table, delta.row_id) == (table, row_id)]

    def is_member(self, scope: str, member: str) -> bool:
        changes = [event for event in self.history if isinstance(event, SetMember)]
        last = newest(change for change in changes if (change.scope, change.member) == (scope, member))
        return last is not None and last.present

    def roles(self, scope: str) -> dict[str, Role]:
        """Return the members and their roles, in the order in which they joined."""
        found: dict[str, Role] = {}
        for event in self.history:
            if not isinstance(event, SetMember) or event.scope != scope:
                continue
            if not event.present:
                found.pop(event.member, None)
            elif event.member not in found:
                found[event.member] = event.role or Role.MEMBER
            elif event.role is not None:
                found[event.member] = event.role
            if found and Role.OWNER not in found.values():
                found[next(iter(found))] = Role.OWNER
        return found

    def acknowledged(self, scope: str, member: str) -> int:
        applied = [event for event in self.history if isinstance(event, Acknowledge)]
        return max((it.sequence for it in applied if (it.scope, it.member) == (scope, member)), default=0)

    def cursor(self, scope: str, consumer: str) -> int | None:
        """Return the highest cursor since the last rewind or removal, or None if the consumer does not exist."""
        applied = [event for event in self.history if isinstance(event, SetCursor)]
        own = [it for it in applied if (it.scope, it.consumer) == (scope, consumer)]
        starts = [place for place, it in enumerate(own) if it.rewind or it.cursor is None]
        since = own[starts[-1] :] if starts else own
        return max((it.cursor for it in since if it.cursor is not None), default=None)

    def tokens_us(self, submission: Submission, rate: Rate, at_ms: int) -> tuple[int, int]:
        """Return the tokens that the actor has left for new writes, and the price of one write.

        The tokens grow with every microsecond up to `burst` writes. An actor must always use the same rate.
        """
        price_us = ceil(Fraction(1_000_000, rate.per_second))
        left_us, since_ms = rate.burst * price_us, 0
        for write in self.writes():
            if (
                write.submission.rate is None
                or write.submission.fence
                or not self._are_counted_together(write, submission)
            ):
                continue
            left_us = min(rate.burst * price_us, left_us + (write.receipt.log_time_ms - since_ms) * 1000) - price_us
            since_ms = write.receipt.log_time_ms
        return min(rate.burst * price_us, left_us + (at_ms - since_ms) * 1000), price_us

    def _are_counted_together(self, write: Write, submission: Submission) -> bool:
        """Whether both writes are by the same actor, and both to the global log or to the same stream."""
        other = write.submission
        if other.actor != submission.actor or other.policy.order is not submission.policy.order:
            return False
        return submission.policy.order is Order.LANE or other.scope == submission.scope

    def newest_for_cursor(self, scope: str) -> int:
        return self.sequence(scope) if scope else self.position(0)

    # --- checks of a submission, in order (CO-18) -------------------------------------------------------

    def _submission(self, submission: Submission) -> Verdict:
        checks: list[Callable[[Submission], Verdict | None]] = [
            self._check_shape,
            self._check_member,
            self._check_identity,
            self._check_client_sequence,
            self._check_lease,
            self._check_expectation,
            self._check_conditions,
            self._check_clock,
            self._check_application,
            self._check_limits,
        ]
        for check in checks:
            verdict = check(submission)
            if verdict is not None:
                return verdict
        return self._commit(submission)

    def _check_shape(self, submission: Submission) -> Verdict | None:
        policy = submission.policy
        is_stream = policy.order is Order.STREAM
        is_derived = policy.identity is Identity.DERIVED
        numbered = bool(submission.client) and 1 <= submission.client_sequence <= SEQUENCE_MAX
        demands = [
            not key_is_malformed(policy, submission.key),
            numbered if policy.client_sequence else submission.client_sequence == 0,
            bool(submission.scope) or not is_stream,
            is_stream or submission.expected_sequence is None,
            bool(submission.operations) == policy.entities,
            (submission.delta is not None) == policy.rows,
            policy.leased or submission.fence == 0,
            submission.delta is None or not is_derived or submission.delta.delta_id == submission.key,
            submission.rate is None or (submission.rate.per_second >= 1 and submission.rate.burst >= 1),
        ]
        return None if all(demands) else refused(Reason.MALFORMED)

    def _check_member(self, submission: Submission) -> Verdict | None:
        if submission.policy.members_only and not self.is_member(submission.scope, submission.actor):
            return refused(Reason.NOT_A_MEMBER)
        return None

    def _check_identity(self, item: Submission | Claim) -> Verdict | None:
        write = self.known(item)
        if write is None:
            return None
        mismatch = write.submission.fingerprint != item.fingerprint
        if mismatch and item.policy.on_reuse is OnReuse.REFUSE:
            return refused(Reason.IDENTITY_REUSED)
        return Replayed(write.receipt, mismatch=mismatch)

    def _check_client_sequence(self, submission: Submission) -> Verdict | None:
        last = self.last_client_sequence(submission)
        number = submission.client_sequence
        if not submission.policy.client_sequence or number == last + 1:
            return None
        if number > last + 1:
            return refused(Reason.SEQUENCE_GAP, current=last)
        write = newest(it for it in self.client_writes(submission) if it.submission.client_sequence == number)
        assert write is not None
        if write.submission.fingerprint == submission.fingerprint:
            return Replayed(write.receipt)
        return refused(Reason.SEQUENCE_REUSED, current=last)

    def _check_lease(self, submission: Submission) -> Verdict | None:
        if not submission.policy.leased:
            return None
        if not submission.fence:
            return self._in_flight(submission, holder=None)
        lease = self.held_lease(submission)
        if lease is None:
            return self._lease_lost(submission)
        return refused(Reason.IDENTITY_REUSED) if self._is_for_another(lease, submission) else None

    def _is_for_another(self, lease: Lease, item: Submission | Claim) -> bool:
        return lease.fingerprint != item.fingerprint and item.policy.on_reuse is OnReuse.REFUSE

    def _lease_lost(self, item: Submission | Renew) -> Refused:
        lease = self.lease(item)
        return refused(Reason.LEASE_LOST, current=lease.fence if lease else 0)

    def _in_flight(self, item: Submission | Claim, holder: str | None) -> Refused | None:
        """Return the refusal of an item that has another holder or different content while a lease is held."""
        lease = self.lease(item)
        log_time_ms = self.log_time_ms(item)
        if lease is None or not lease.holder or log_time_ms >= lease.until_ms:
            return None
        if self._is_for_another(lease, item):
            return refused(Reason.IDENTITY_REUSED)
        if lease.holder != holder:
            return refused(Reason.IN_FLIGHT, current=lease.fence, retry_after_ms=lease.until_ms - log_time_ms)
        return None

    def _check_expectation(self, submission: Submission) -> Verdict | None:
        position = self.position(self.lane_of(submission.policy, submission.scope))
        if submission.expected_position not in (None, position):
            return refused(Reason.UNEXPECTED_POSITION, current=position)
        sequence = self.sequence(submission.scope)
        if submission.expected_sequence not in (None, sequence):
            return refused(Reason.UNEXPECTED_POSITION, current=sequence)
        return None

    def _check_conditions(self, submission: Submission) -> Verdict | None:
        log_time_ms = self.log_time_ms(submission)
        done = self.operations(submission.scope)
        version = self.sequence(submission.scope) + 1
        for index, operation in enumerate(submission.operations):
            if isinstance(operation, SetEntity) and operation.condition is not None:
                entity = entity_of(done, operation.key, log_time_ms)
                reason = failure_of(operation.condition, entity)
                if reason is not None:
                    current, value = (entity.version, entity.value) if entity else (0, None)
                    return Refused(reason, "", field=operation.key, current=current, value=value, index=index)
            done.append((version, operation))
        return None

    def _check_clock(self, submission: Submission) -> Verdict | None:
        if submission.delta is None:
            return None
        log_time_ms = self.log_time_ms(submission)
        if (submission.delta.hlc >> 16) - log_time_ms > CLOCK_DRIFT_MS_MAX:
            return refused(Reason.CLOCK_DRIFT, current=log_time_ms)
        return None

    def _check_application(self, submission: Submission) -> Verdict | None:
        message = self.validate(submission) if self.validate is not None else None
        return None if message is None else refused(Reason.INVALID)

    def _check_limits(self, submission: Submission) -> Verdict | None:
        if submission.fence:
            return None
        if submission.known_only:
            return refused(Reason.NOT_KNOWN)
        if submission.rate is None:
            return None
        left_us, price_us = self.tokens_us(submission, submission.rate, self.log_time_ms(submission))
        if self.admission is not None:
            scope = submission.scope if submission.policy.order is Order.STREAM else ""
            taken = self.admission.setdefault((scope, submission.actor), [])
            taken.append((left_us, price_us, submission.rate.burst * price_us))
            return None
        if left_us >= price_us:
            return None
        return refused(Reason.RATE_LIMITED, retry_after_ms=ceil(Fraction(price_us - left_us, 1000)))

    def _commit(self, submission: Submission) -> Verdict:
        lane = self.lane_of(submission.policy, submission.scope)
        receipt = Receipt(
            lane=lane,
            position=self.position(lane) + 1,
            sequence=self.sequence(submission.scope) + 1 if submission.policy.order is Order.STREAM else 0,
            log_time_ms=self.log_time_ms(submission),
            height=len(self.blocks(lane) - {self.batch}) + 1,
            client_sequence=submission.client_sequence,
        )
        self.history.append(Write(submission, receipt, self.batch))
        return Committed(receipt)

    # --- leases, members, acknowledgements, consumers -------------------------------------------------------------

    def _lease_item_is_malformed(self, item: Leased) -> bool:
        named = item.policy.leased and bool(item.scope) and not key_is_malformed(item.policy, item.key)
        timed = isinstance(item, Release) or 1 <= item.lease_ms <= LEASE_MS_MAX
        return not (named and timed and item.holder)

    def _claim(self, claim: Claim) -> Verdict:
        last = self.lease(claim)
        verdict = self._check_identity(claim)
        if verdict is None and last is not None and 0 < claim.waited_for <= last.failed_fence:
            verdict = refused(Reason.RUN_FAILED, current=last.failed_fence, value=last.failure)
        verdict = verdict or self._in_flight(claim, claim.holder)
        if verdict is not None:
            return verdict
        again = last is not None and last.holder == claim.holder and not self._is_for_another(last, claim)
        if not again and claim.known_only:
            return refused(Reason.NOT_KNOWN)
        fence = last.fence if last is not None and again else self.fence(self.lane_of(claim.policy, claim.scope)) + 1
        failed = (last.failed_fence, last.failure) if last is not None else (0, b"")
        until_ms = self.log_time_ms(claim) + claim.lease_ms
        if last is not None and again:
            until_ms = max(until_ms, last.until_ms)
        self._keep_lease(claim, Lease(fence, claim.holder, until_ms, claim.fingerprint, *failed), is_new=not again)
        return Granted(fence, until_ms)

    def _renew(self, renew: Renew) -> Verdict:
        lease = self.held_lease(renew)
        if lease is None:
            return self._lease_lost(renew)
        until_ms = max(lease.until_ms, self.log_time_ms(renew) + renew.lease_ms)
        self._keep_lease(renew, replace(lease, until_ms=until_ms), is_new=False)
        return Granted(lease.fence, until_ms)

    def _release(self, release: Release) -> Verdict:
        lease = self.held_lease(release)
        if lease is None:
            return Applied(changed=False)
        ended = replace(lease, holder="", until_ms=self.log_time_ms(release))
        if release.failure is not None:
            ended = replace(ended, failed_fence=lease.fence, failure=release.failure)
        self._keep_lease(release, ended, is_new=False)
        return Applied(changed=True)

    def _keep_lease(self, item: Leased, lease: Lease, *, is_new: bool) -> None:
        lane = self.lane_of(item.policy, item.scope)
        self.history.append(LeaseChange(item, lane, self.log_time_ms(item), lease, is_new, self.batch))

    def is_open(self, scope: str) -> bool:
        """Whether the stream has ever had a member or a write."""
        members = any(isinstance(it, SetMember) and it.present and it.scope == scope for it in self.history)
        return members or self.sequence(scope) > 0

    def _open_stream(self, item: OpenStream) -> Verdict:
        if self.is_open(item.scope) and not self.is_member(item.scope, item.member):
            return refused(Reason.NOT_A_MEMBER)
        is_open = self.is_open(item.scope)
        added = SetMember(item.scope, item.member, actor="" if is_open else item.member)
        return self._set_member(added, is_creation=not is_open)

    def _set_member(self, item: SetMember, *, is_creation: bool = False) -> Verdict:
        if item.actor and not is_creation and not self.is_member(item.scope, item.actor):
            if item.actor == item.member and not item.present:
                return Applied(changed=False)
            return refused(Reason.NOT_A_MEMBER)
        before = self.roles(item.scope)
        is_own = item.actor == item.member and item.role is not Role.OWNER
        if item.actor and not is_creation and not is_own and before[item.actor] is not Role.OWNER:
            return refused(Reason.NOT_AN_OWNER)
        if item.only_if_member and item.present and item.member not in before:
            return refused(Reason.NOT_A_MEMBER)
        others = [role for name, role in before.items() if name != item.member]
        is_demoted = item.role is Role.MEMBER and before.get(item.member) is Role.OWNER
        if is_demoted and Role.OWNER not in others:
            return refused(Reason.LAST_OWNER)
        self.history.append(item)
        after = self.roles(item.scope)
        changed = after != before
        for name in sorted(before.keys() | after.keys(), key=lambda name: name != item.member):
            if before.get(name) is not after.get(name):
                kind = "member_added" if name not in before else "member_role_changed"
                self._record_act(item, kind if name in after else "member_removed", name, after.get(name))
        return self._applied(self.lane_of_stream(item.scope), changed=changed)

    def _acknowledge(self, item: Acknowledge) -> Verdict:
        if not self.is_member(item.scope, item.member):
            return refused(Reason.NOT_A_MEMBER)
        last = self.sequence(item.scope)
        if not 0 <= item.sequence <= last:
            return refused(Reason.INVALID_ACKNOWLEDGEMENT, current=last)
        changed = item.sequence > self.acknowledged(item.scope, item.member)
        self.history.append(item)
        return self._applied(self.lane_of_stream(item.scope), changed=changed)

    def _set_cursor(self, item: SetCursor) -> Verdict:
        if not item.consumer or type(item.cursor) not in (int, type(None)):
            return refused(Reason.MALFORMED)
        newest_one = self.newest_for_cursor(item.scope)
        if item.cursor is not None and item.cursor not in range(newest_one + 1):
            return refused(Reason.INVALID_CURSOR, current=newest_one)
        before = self.cursor(item.scope, item.consumer)
        self.history.append(item)
        after = self.cursor(item.scope, item.consumer)
        return self._applied(self.lane_of_stream(item.scope) if item.scope else 0, changed=after != before)

    def _record_act(self, item: SetMember, act: str, target: str, role: Role | None) -> None:
        lane = self.lane_of_stream(item.scope)
        at_ms = max(self.now_ms, self.saved_log_time_ms(lane))
        self.history.append(Act(lane, self.position(lane) + 1, at_ms, self.batch, item, act, target, role))

    def _applied(self, lane: int, *, changed: bool) -> Verdict:
        if changed:
            self.history.append(Touch(lane, max(self.now_ms, self.saved_log_time_ms(lane)), self.batch))
        return Applied(changed)
