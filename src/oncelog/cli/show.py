"""`oncelog show`: print the record under an identity, and its state."""

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import typer

from oncelog.cli.record_lookup import (
    AsText,
    ClientOption,
    Finding,
    KeyOptions,
    PolicyOption,
    ReadAll,
    ScopeOption,
    describe_ambiguity,
    find_records,
    format_choices,
    format_fields,
    parse_record_id,
)
from oncelog.cli.terminal import (
    EXIT_AMBIGUOUS,
    EXIT_FOUND_NOTHING,
    AsJson,
    LogArgument,
    ProgressMeter,
    escape_unprintable,
    format_utc,
    print_result,
)
from oncelog.core.values import Record
from oncelog.engine.outcome import Status
from oncelog.storage.inspect.factory import create_inspector


def show(  # noqa: PLR0913 - each is an option
    log: LogArgument,
    id: Annotated[  # noqa: A002 - its name in the help
        str,
        typer.Argument(
            help=(
                "A UUID, a key in hex or as text, a message's id (msg_…), a ledger transaction's id, or LANE:POSITION."
            ),
            metavar="ID",
            show_default=False,
        ),
    ],
    *,
    policy: PolicyOption = None,
    scope: ScopeOption = None,
    client: ClientOption = None,
    as_text: AsText = None,
    read_all: ReadAll = False,
    as_json: AsJson = False,
) -> None:
    """Print what a log knows about an identity: committed, forgotten, leased or unknown, and its record with its body.

    The command finds events, messages, ledger writes, deltas, runs and others by their keys, in all scopes. Pass the
    text that was given to `once`, or in an Idempotency-Key header, to find its key. The exit status is 0 for one
    record, 1 for no record, and 3 if several writes have the key. The command then lists them with the options that
    select one.

    Example:  oncelog show orders.db 0198f3c2-7d55-7c1e-9a61-2f6f0c1b5a10

    Example:  oncelog show chat.db msg_00000000000003000000000007

    Example:  oncelog show app.db order-17

    Example:  oncelog show postgresql://oncelog@db.example.org/orders 0:17
    """
    record_id = parse_record_id(id, KeyOptions(policy, scope, client, as_text, read_all))
    with create_inspector(log).open_view() as view, ProgressMeter() as meter:
        findings = find_records(view, record_id, meter)
    if record_id.place is not None and findings[0].outcome.record is None:
        findings = [_add_hint(findings[0])]
    is_one = len(findings) == 1
    lines = _format_finding(findings[0]) if is_one else _format_choices(findings, record_id.keys)
    print_result([_to_json(finding) for finding in findings], lines, as_json)
    if not is_one:
        raise typer.Exit(EXIT_AMBIGUOUS)
    if findings[0].outcome.record is None:
        raise typer.Exit(EXIT_FOUND_NOTHING)


def _add_hint(finding: Finding) -> Finding:
    """Add the hint to use --text if the ID is a key that looks like a place."""
    outcome = finding.outcome
    why = f"{outcome.why}. If the ID is the text of a key, add --text"
    return msgspec.structs.replace(finding, outcome=msgspec.structs.replace(outcome, why=why))


def _to_json(finding: Finding) -> dict[str, Any]:
    record, lease = finding.outcome.record, finding.outcome.lease
    plain: dict[str, Any] = {"state": finding.outcome.status.value, "reason": finding.outcome.why}
    policy, scope, client, _ = finding.identity
    if policy:
        plain["policy"] = policy
    if finding.outcome.status is not Status.UNKNOWN:
        plain |= {"scope": scope, "client": client}
    if record is not None:
        fields = msgspec.structs.asdict(record)
        del fields["trace"]  # a read-only command does not load it
        plain["record"] = {
            **fields,
            "key": record.key.hex(),
            "fingerprint": record.fingerprint.hex(),
            "body": None if record.erased else _format_body(record)[1],
            "body_is_hex": _format_body(record)[0] == "body (hex)",
            "block_hash": finding.block_hash.hex(),
        }
    if finding.evicted is not None:
        at = finding.evicted
        plain["evicted"] = {"lane": at.lane, "position": at.position, "log_time_ms": at.log_time_ms}
    if lease is not None:
        plain["lease"] = {"holder": lease.holder, "fence": lease.fence, "until_ms": lease.until_ms}
    return plain


def _format_choices(findings: list[Finding], keys: Sequence[bytes]) -> list[str]:
    """List several writes, each with its outcome and the options that select it."""
    identities = [finding.identity for finding in findings]
    lines = [describe_ambiguity(identities)]
    for finding, options in zip(findings, format_choices(identities, keys), strict=False):
        lines.append(f"  {options}\n      {finding.outcome.status.value}: {escape_unprintable(finding.outcome.why)}")
    return lines


def _format_finding(finding: Finding) -> list[str]:
    record, lease = finding.outcome.record, finding.outcome.lease
    lines = [f"{finding.outcome.status.value}: {finding.outcome.why}"]
    if finding.evicted is not None:
        at = finding.evicted
        lines.append(f"{'key evicted:':<16}lane {at.lane}, position {at.position}, {format_utc(at.log_time_ms)}")
    if record is not None:
        body = ("erased", "yes: the body is removed, its hash remains") if record.erased else _format_body(record)
        more = [("block", f"height {record.height}, {finding.block_hash.hex()}"), body]
        key_text = _decode_printable(record.key) or ""
        lines += format_fields(record, record.key.hex(), record.fingerprint.hex(), more, key_text)
    if lease is not None and lease.holder:
        lines.append(f"{'lease:':<16}{lease.holder}, fence {lease.fence}, until {format_utc(lease.until_ms)}")
    return lines


def _format_body(record: Record) -> tuple[str, str]:
    """Return the label and the text of a body, which is hex if the body is not printable text."""
    text = _decode_printable(record.body)
    return ("body (hex)", record.body.hex()) if text is None else ("body", text)


def _decode_printable(data: bytes) -> str | None:
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return None
    return text if text.isprintable() else None
