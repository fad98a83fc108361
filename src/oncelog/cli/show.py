"""`oncelog show`: what became of an identity, and why."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import typer

from oncelog.cli.record_id import (
    MESSAGE_PREFIX,
    AsText,
    ClientOption,
    PolicyOption,
    ReadAll,
    ScopeOption,
    ambiguity,
    bytes_in_hex,
    check_no_options,
    choosing_options,
    chosen_policies,
    named_place,
    possible_keys,
    transaction_at,
    transaction_place,
    why_passed_over,
)
from oncelog.cli.terminal import AMBIGUOUS, FOUND_NOTHING, AsJson, Log, Meter, ending_well, print_json, printable
from oncelog.cli.times import utc
from oncelog.core.audit import audit_entry
from oncelog.core.folds import FOLD_POLICY
from oncelog.core.gaps import RESTORE_POLICY, last_evicting
from oncelog.core.internal_records import is_internal
from oncelog.core.policy import CHAT, INTERNAL_POLICIES, Forget
from oncelog.core.values import KeyIdentity, Record
from oncelog.engine.outcome import NEVER_COMMITTED, Outcome, Status, outcome_of
from oncelog.errors import CorruptError
from oncelog.stores.clock import JUMP_MS_MAX
from oncelog.stores.inspecting import inspector_of
from oncelog.stores.key_search import Matches, Wanted, search
from oncelog.stores.leaps import NO_GAPS
from oncelog.stores.verifying.side_state import declared
from oncelog.stores.viewing import View

Id = Annotated[
    str,
    typer.Argument(
        help="A UUID, a key in hex or as text, a message's id (msg_…), a ledger transaction's id, or LANE:POSITION.",
        metavar="ID",
        show_default=False,
    ),
]


def show(  # noqa: PLR0913 - each is an option
    log: Log,
    id: Id,  # noqa: A002 - what it is called where it is shown
    *,
    policy: PolicyOption = None,
    scope: ScopeOption = None,
    client: ClientOption = None,
    as_text: AsText = None,
    read_all: ReadAll = False,
    as_json: AsJson = False,
) -> None:
    """Prints what a log knows about an identity: committed, forgotten, leased or unknown, and its record with its body.

    Finds events, messages, ledger writes, deltas, runs and others by their keys, in all scopes. The key of a call of
    `once` and that of an Idempotency-Key header are found by the text that was given. The exit status is 0
    for one record, 1 for no record, and 3 if several writes have the key: then they are listed with the options that
    choose one.

    Example:  oncelog show orders.db 0198f3c2-7d55-7c1e-9a61-2f6f0c1b5a10

    Example:  oncelog show chat.db msg_00000000000003000000000007

    Example:  oncelog show app.db order-17

    Example:  oncelog show postgresql://oncelog@db.example.org/orders 0:17
    """
    with ending_well():
        place = named_place(id) if as_text is None else None
        keys = possible_keys(id, as_text) if place is None else ()
        options = {"--policy": policy, "--scope": scope, "--client": client, "--all": read_all or None}
        if place is not None:
            check_no_options(id, options)
        is_key = as_text is not None or any(value is not None for value in options.values())
        with inspector_of(log).looking() as found, Meter() as meter:
            view = _Found(found)
            if place is not None:
                told = [view.message_at(*place) if id.startswith(MESSAGE_PREFIX) else view.at(*place)]
                if told[0].outcome.record is None:
                    told = [_with_hint(told[0])]
            elif not is_key and (transaction := transaction_at(found, transaction_place(id))) is not None:
                told = [view.at(transaction.lane, transaction.position)]
            else:
                wanted = Wanted(keys, chosen_policies(view.policies, policy), scope, client)
                matches = search(found, wanted, meter, read_all=read_all)
                told = [one for one in map(view.under, matches.identities) if one.outcome.status is not Status.UNKNOWN]
                told = told or [_unknown(id, wanted, matches) if view.policies else _undeclared()]
        _print(told, keys, as_json)
        if len(told) > 1:
            raise typer.Exit(AMBIGUOUS)
        if told[0].outcome.record is None:
            raise typer.Exit(FOUND_NOTHING)


def _print(told: "list[_Shown]", keys: Sequence[bytes], as_json: bool) -> None:
    if as_json:
        print_json([_plain(one) for one in told])
    else:
        typer.echo("\n".join(_lines(told[0]) if len(told) == 1 else _choices(told, keys)))


def _unknown(text: str, wanted: Wanted, matches: Matches) -> "_Shown":
    names = [policy.name for policy in wanted.policies]
    searched = f"under {', '.join(names)}"
    if wanted.scope is not None:
        searched += f" in the scope {wanted.scope!r}"
    if wanted.client is not None:
        searched += f" for the client {wanted.client!r}"
    read = "the key index" if matches.records_read is None else f"all {matches.records_read} records, and all leases,"
    in_hex = bytes_in_hex(text)
    if in_hex is None:
        forms = "the key with this text (it is neither a UUID nor hex)"
    else:
        named = {in_hex: "the key in hex"}
        forms = " and ".join(named.get(key, "the key with this text") for key in wanted.keys)
    why = f"{NEVER_COMMITTED}. Searched: {read} {searched}, for {forms}"
    return _Shown(Outcome(Status.UNKNOWN, why), names[0] if len(names) == 1 else "")


def _with_hint(shown: "_Shown") -> "_Shown":
    """Add the option for a key whose text has the form of a place."""
    outcome = shown.outcome
    why = f"{outcome.why}. If the ID is the text of a key, add --text"
    return msgspec.structs.replace(shown, outcome=msgspec.structs.replace(outcome, why=why))


def _undeclared() -> "_Shown":
    why = "no record: the log knows no policy yet, so nothing was ever committed"
    return _Shown(Outcome(Status.UNKNOWN, why))


class _Eviction(msgspec.Struct, frozen=True):
    """The place and log time of an eviction."""

    lane: int
    position: int
    log_time_ms: int


class _Shown(msgspec.Struct, frozen=True):
    """An outcome, and where it was found."""

    outcome: Outcome
    policy: str = ""
    block_hash: bytes = b""
    scope: str = ""
    client: str = ""
    key: bytes = b""
    evicted: _Eviction | None = None
    """The eviction that removed the key."""


class _Found:
    """What a log has under keys and at places."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._heads = view.heads()
        self._lanes = view.about.settings.lanes
        self.policies = declared(view.policies())
        seen = view.time()
        self._time_ms = seen.mark.proposed(seen.clock, JUMP_MS_MAX)[0].time_ms

    def under(self, identity: KeyIdentity) -> _Shown:
        """What the log knows about an identity."""
        name, scope, client, key = identity
        standing = self._view.standing(identity)
        if name in INTERNAL_POLICIES and standing.record is not None:
            return self._internal(standing.record)
        outcome = outcome_of(self.policies[name], msgspec.structs.replace(standing, time_ms=self._time_ms))
        return _Shown(outcome, name, self._block_hash(outcome.record), scope, client, key, self._eviction(outcome))

    def at(self, lane: int, position: int) -> _Shown:
        """What stands at a place."""
        newest = self._heads[lane].position if lane in self._heads else 0
        if not 1 <= position <= newest:
            return _Shown(Outcome(Status.UNKNOWN, self._why_nothing_is_at(lane, newest)))
        record = self._view.record_at(lane, position)
        if record is None:
            passed_over = why_passed_over(self._view, lane, position)
            if passed_over is not None:
                return _Shown(Outcome(Status.UNKNOWN, passed_over))
            raise CorruptError(f"lane {lane}, position {position}: the record is missing; see `oncelog verify`")
        if is_internal(record):
            return self._internal(record)
        policy = self.policies.get(record.policy)
        if policy is None:
            raise CorruptError(f"lane {lane}, position {position}: the policy {record.policy!r} is not declared")
        if not record.key:
            why = "committed without a key: it is known by its client's sequence alone"
            return self._shown(Outcome(Status.COMMITTED, why, record), record)
        shown = self.under(record.identity)
        if shown.outcome.record == record:
            return shown
        why = "committed, but forgotten: a later write has committed under the same key"
        if shown.outcome.record is not None:
            why += f", at position {shown.outcome.record.position}"
        return self._shown(Outcome(Status.FORGOTTEN, why, record), record)

    def _internal(self, record: Record) -> _Shown:
        if record.policy == RESTORE_POLICY:
            why = f"the log was restored: its numbers continue above {record.position - 1}"
        elif record.policy == FOLD_POLICY:
            why = "a fold record: digests of the rows whose deltas compaction dropped"
        else:
            entry = audit_entry(record)
            why = f"an audit record: {entry.act or 'erased'}, by {entry.actor}"
        return _Shown(Outcome(Status.COMMITTED, why, record), record.policy, self._block_hash(record))

    def _shown(self, outcome: Outcome, record: Record) -> _Shown:
        return _Shown(
            outcome,
            record.policy,
            self._block_hash(record),
            record.scope,
            record.client,
            record.key,
            self._eviction(outcome),
        )

    def _eviction(self, outcome: Outcome) -> _Eviction | None:
        """Find the first evicting position at which the key of a record was too old. Log time never goes back."""
        record = outcome.record
        if record is None or outcome.status is not Status.FORGOTTEN:
            return None
        retention, interval = self.policies[record.policy].retention, self._view.about.settings.eviction_interval
        if retention.forget is not Forget.AT_EVICTION:
            return None
        gaps = self._view.gaps().get(record.lane, NO_GAPS).positions

        def evicting(number: int) -> Record | None:
            position = last_evicting(number * interval, interval, gaps)
            return self._view.record_at(record.lane, position) if position > record.position else None

        def is_evicted(number: int) -> bool:
            at = evicting(number)
            return at is not None and not retention.remembers(record.log_time_ms, at.log_time_ms, at.log_time_ms)

        numbers = range(record.position // interval, self._heads[record.lane].position // interval + 1)
        first = bisect_left(numbers, x=True, key=is_evicted)
        at = evicting(numbers[first]) if first < len(numbers) else None
        return None if at is None else _Eviction(at.lane, at.position, at.log_time_ms)

    def message_at(self, lane: int, position: int) -> _Shown:
        """The message at a place."""
        shown = self.at(lane, position)
        record = shown.outcome.record
        if record is None or record.policy == CHAT.name:
            return shown
        why = f"no message: the record there is of the policy {record.policy!r}; to see it, ask for {lane}:{position}"
        return _Shown(Outcome(Status.UNKNOWN, why))

    def _why_nothing_is_at(self, lane: int, newest: int) -> str:
        if lane > self._lanes:
            return f"no record: lane {lane} does not exist; the log has lanes 0 to {self._lanes}"
        return f"no record: lane {lane} " + (f"has positions 1 to {newest}" if newest else "is still empty")

    def _block_hash(self, record: Record | None) -> bytes:
        if record is None:
            return b""
        block = self._view.block_at(record.lane, record.height)
        return b"" if block is None else block.hash


# --- how it is printed


def _plain(shown: _Shown) -> dict[str, Any]:
    record, lease = shown.outcome.record, shown.outcome.lease
    plain: dict[str, Any] = {"state": shown.outcome.status.value, "reason": shown.outcome.why}
    if shown.policy:
        plain["policy"] = shown.policy
    if shown.outcome.status is not Status.UNKNOWN:
        plain |= {"scope": shown.scope, "client": shown.client}
    if record is not None:
        plain["record"] = {
            **msgspec.structs.asdict(record),
            "key": record.key.hex(),
            "fingerprint": record.fingerprint.hex(),
            "body": None if record.erased else _body(record)[1],
            "body_is_hex": _body(record)[0] == "body (hex)",
            "block_hash": shown.block_hash.hex(),
        }
    if shown.evicted is not None:
        plain["evicted"] = msgspec.structs.asdict(shown.evicted)
    if lease is not None:
        plain["lease"] = {"holder": lease.holder, "fence": lease.fence, "until_ms": lease.until_ms}
    return plain


def _choices(told: list[_Shown], keys: Sequence[bytes]) -> list[str]:
    """One line for each of several writes: the options that choose it, and what became of it."""
    identities = [(one.policy, one.scope, one.client, one.key) for one in told]
    lines = [ambiguity(identities)]
    for one, options in zip(told, choosing_options(identities, keys), strict=False):
        lines.append(f"  {options}\n      {one.outcome.status.value}: {printable(one.outcome.why)}")
    return lines


def _lines(shown: _Shown) -> list[str]:
    record, lease = shown.outcome.record, shown.outcome.lease
    lines = [f"{shown.outcome.status.value}: {shown.outcome.why}"]
    if shown.evicted is not None:
        at = shown.evicted
        lines.append(f"{'key evicted:':<16}lane {at.lane}, position {at.position}, {utc(at.log_time_ms)}")
    if record is not None:
        lines += [f"{name + ':':<16}{value}" for name, value in _fields(record, shown.block_hash) if value != ""]
    if lease is not None and lease.holder:
        lines.append(f"{'lease:':<16}{lease.holder}, fence {lease.fence}, until {utc(lease.until_ms)}")
    return lines


def _fields(record: Record, block_hash: bytes) -> list[tuple[str, str]]:
    return [
        ("place", f"lane {record.lane}, position {record.position}"),
        ("sequence", f"{record.sequence} of {record.scope}" if record.sequence else ""),
        ("time", utc(record.log_time_ms)),
        ("policy", record.policy),
        ("scope", record.scope),
        ("key", record.key.hex()),
        ("key as text", _text_of(record.key)),
        ("fingerprint", record.fingerprint.hex()),
        ("actor", record.actor),
        ("client", f"{record.client}, sequence {record.client_sequence}" if record.client_sequence else record.client),
        ("partitions", ", ".join(record.partitions)),
        ("block", f"height {record.height}, {block_hash.hex()}"),
        ("erased", "yes: the body is gone, its hash stays") if record.erased else _body(record),
    ]


def _text_of(key: bytes) -> str:
    try:
        text = key.decode()
    except UnicodeDecodeError:
        return ""
    return text if text.isprintable() else ""


def _body(record: Record) -> tuple[str, str]:
    """As text where it is text, and shows nothing that could write to the terminal by itself."""
    try:
        text = record.body.decode()
    except UnicodeDecodeError:
        return "body (hex)", record.body.hex()
    return ("body", text) if text.isprintable() or not text else ("body (hex)", record.body.hex())
