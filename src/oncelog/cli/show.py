"""`oncelog show`: what became of an identity, and why."""

import re
from typing import Annotated, Any, Final
from uuid import UUID

import msgspec
import typer

from oncelog.cli.terminal import FOUND_NOTHING, AsJson, Log, ending_well, print_json
from oncelog.cli.times import utc
from oncelog.core.gaps import RESTORE_POLICY, gap_at
from oncelog.core.policy import LEDGER, Policy
from oncelog.core.values import KeyIdentity, Record
from oncelog.engine.outcome import Outcome, Status, outcome_of
from oncelog.errors import CorruptError, OncelogError
from oncelog.stores.clock import JUMP_MS_MAX
from oncelog.stores.inspecting import inspector_of
from oncelog.stores.leaps import NO_GAPS
from oncelog.stores.verifying.side_state import declared
from oncelog.stores.viewing import View

_PLACE: Final = re.compile(r"(\d{1,9}):(\d{1,15})", re.ASCII)
_HEX: Final = re.compile(r"([0-9a-fA-F]{2})+")

Id = Annotated[str, typer.Argument(help="A UUID, a key in hex, or LANE:POSITION.", metavar="ID", show_default=False)]


def show(
    log: Log,
    id: Id,  # noqa: A002 - what it is called where it is shown
    policy: Annotated[str | None, typer.Option(help="Look under this policy only.")] = None,
    scope: Annotated[str, typer.Option(help="Where the key is unique; the stream, where there is one.")] = "",
    client: Annotated[str, typer.Option(help="Whose key it is, where clients number their writes.")] = "",
    as_json: AsJson = False,
) -> None:
    """Prints what a log knows about an identity: committed, forgotten, leased or unknown, and its record with its body.

    The exit status is 0 if there is a record and 1 if there is none.

    Example:  oncelog show orders.db 0198f3c2-7d55-7c1e-9a61-2f6f0c1b5a10

    Example:  oncelog show postgresql://oncelog@db.example.org/orders 0:17
    """
    with ending_well():
        place, key = _parsed(id)
        if place is not None:
            _demand_no_options(id, {"--policy": policy, "--scope": scope, "--client": client})
        with inspector_of(log).looking() as found:
            view = _Found(found)
            if place is not None:
                shown = [view.at(*place)]
            else:
                chosen = _chosen(view.policies, policy)
                shown = [view.under(one, scope, client, key) for one in chosen]
        told = [one for one in shown if one.outcome.status is not Status.UNKNOWN]
        if not told:
            hint = "" if place is not None else whose_hint(view.policies, scope, client)
            told = [_hinted(one, hint) for one in shown[:1]] or [_undeclared()]
        if as_json:
            print_json([_plain(one) for one in told])
        else:
            typer.echo("\n\n".join("\n".join(_lines(one)) for one in told))
        if all(one.outcome.record is None for one in told):
            raise typer.Exit(FOUND_NOTHING)


def _parsed(text: str) -> tuple[tuple[int, int] | None, bytes]:
    place = _PLACE.fullmatch(text)
    if place is not None:
        return (int(place[1]), int(place[2])), b""
    if _HEX.fullmatch(text):
        return None, bytes.fromhex(text)
    try:
        return None, UUID(text).bytes
    except ValueError:
        raise OncelogError(f"{text!r} is neither a UUID nor a key in hex nor LANE:POSITION.") from None


def _demand_no_options(place: str, options: dict[str, str | None]) -> None:
    given = [name for name, value in options.items() if value]
    if given:
        raise OncelogError(f"{place} names a record by its place: {given[0]} goes with a key.")


def _chosen(policies: dict[str, Policy], name: str | None) -> list[Policy]:
    if name is None:
        return list(policies.values())
    if name not in policies:
        raise OncelogError(f"the log knows no policy {name!r}; it has {', '.join(policies) or 'none'}.")
    return [policies[name]]


def whose_hint(policies: dict[str, Policy], scope: str, client: str) -> str:
    """For who looks for a client's key without saying whose it is."""
    names = [policy.name for policy in policies.values() if policy.client_sequence]
    if not names or (scope and client):
        return ""
    whose = "--scope ledger/ORGANIZATION --client CLIENT" if LEDGER.name in names else "--scope and --client"
    return f". A key of {' or '.join(names)} belongs to a scope and a client: say which with {whose}"


def why_passed_over(view: View, lane: int, position: int) -> str | None:
    """Return why a position below the newest has no record, if a restore passed over it."""
    gap = gap_at(view.gaps().get(lane, NO_GAPS).positions, position)
    if gap is None:
        return None
    return f"no record: a restore passed over lane {lane}, positions {gap[0] + 1} to {gap[1] - 1}"


def _hinted(shown: "_Shown", hint: str) -> "_Shown":
    outcome = shown.outcome
    return msgspec.structs.replace(shown, outcome=msgspec.structs.replace(outcome, why=outcome.why + hint))


def _undeclared() -> "_Shown":
    why = "no record: the log knows no policy yet, so nothing was ever committed"
    return _Shown(Outcome(Status.UNKNOWN, why))


class _Shown(msgspec.Struct, frozen=True):
    """An outcome, and where it was found."""

    outcome: Outcome
    policy: str = ""
    block_hash: bytes = b""


class _Found:
    """What a log has under keys and at places."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._heads = view.heads()
        self._lanes = view.about.settings.lanes
        self.policies = declared(view.policies())
        seen = view.time()
        self._time_ms = seen.mark.proposed(seen.clock, JUMP_MS_MAX)[0].time_ms

    def under(self, policy: Policy, scope: str, client: str, key: bytes) -> _Shown:
        """What a policy knows by a key in a scope."""
        identity: KeyIdentity = (policy.name, scope, client if policy.client_sequence else "", key)
        standing = self._view.standing(identity)
        outcome = outcome_of(policy, msgspec.structs.replace(standing, time_ms=self._time_ms))
        return _Shown(outcome, policy.name, self._block_hash(outcome.record))

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
        if record.policy == RESTORE_POLICY:
            why = f"the log was restored: its numbers continue above {record.position - 1}"
            return _Shown(Outcome(Status.COMMITTED, why, record), record.policy, self._block_hash(record))
        policy = self.policies.get(record.policy)
        if policy is None:
            raise CorruptError(f"lane {lane}, position {position}: the policy {record.policy!r} is not declared")
        if not record.key:
            why = "committed without a key: it is known by its client's sequence alone"
            return _Shown(Outcome(Status.COMMITTED, why, record), policy.name, self._block_hash(record))
        shown = self.under(policy, record.scope, record.client, record.key)
        if shown.outcome.record == record:
            return shown
        why = "committed, but forgotten: a later write has committed under the same key"
        return _Shown(Outcome(Status.FORGOTTEN, why, record), policy.name, self._block_hash(record))

    def _why_nothing_is_at(self, lane: int, newest: int) -> str:
        if lane > self._lanes:
            return f"no record: there is no lane {lane}; the log has lanes 0 to {self._lanes}"
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
    if record is not None:
        plain["record"] = {
            **msgspec.structs.asdict(record),
            "key": record.key.hex(),
            "fingerprint": record.fingerprint.hex(),
            "body": None if record.erased else _body(record)[1],
            "body_is_hex": _body(record)[0] == "body (hex)",
            "block_hash": shown.block_hash.hex(),
        }
    if lease is not None:
        plain["lease"] = {"holder": lease.holder, "fence": lease.fence, "until_ms": lease.until_ms}
    return plain


def _lines(shown: _Shown) -> list[str]:
    record, lease = shown.outcome.record, shown.outcome.lease
    lines = [f"{shown.outcome.status.value}: {shown.outcome.why}"]
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
        ("fingerprint", record.fingerprint.hex()),
        ("actor", record.actor),
        ("client", f"{record.client}, sequence {record.client_sequence}" if record.client_sequence else record.client),
        ("partitions", ", ".join(record.partitions)),
        ("block", f"height {record.height}, {block_hash.hex()}"),
        ("erased", "yes: the body is gone, its hash stays") if record.erased else _body(record),
    ]


def _body(record: Record) -> tuple[str, str]:
    """As text where it is text, and shows nothing that could write to the terminal by itself."""
    try:
        text = record.body.decode()
    except UnicodeDecodeError:
        return "body (hex)", record.body.hex()
    return ("body", text) if text.isprintable() or not text else ("body (hex)", record.body.hex())
