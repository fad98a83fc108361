"""`oncelog show`: print the record under an identity, and its state."""

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import typer

from oncelog.cli.output import Style, escape_unprintable, format_label, format_utc, print_result, style
from oncelog.cli.record_lookup import (
    LABEL_WIDTH,
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
from oncelog.cli.remote import check_text
from oncelog.cli.server_lookup import ServerQuery, find_on_server
from oncelog.cli.server_options import Remote, reads_log_or_server
from oncelog.cli.terminal import EXIT_AMBIGUOUS, EXIT_FOUND_NOTHING, AsJson, ProgressMeter
from oncelog.core.values import Record
from oncelog.engine.outcome import Status
from oncelog.errors import OncelogError
from oncelog.storage.inspect.factory import create_inspector


@reads_log_or_server
def show(  # noqa: PLR0913 - each is an option
    source: str | Remote,
    id: Annotated[  # noqa: A002 - its name in the help
        str | None,
        typer.Argument(
            help=(
                "A UUID, a key in hex or as text, a message's id (msg_…), a ledger transaction's id, or LANE:POSITION."
            ),
            metavar="ID",
            show_default=False,
        ),
    ] = None,
    *,
    partition: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="With a server: a partition of the event; may be repeated."),
    ] = None,
    policy: PolicyOption = None,
    scope: ScopeOption = None,
    client: ClientOption = None,
    as_text: AsText = None,
    read_all: ReadAll = False,
    as_json: AsJson = False,
) -> None:
    """Print what a log knows about an identity: committed, forgotten, leased or unknown, and its record with its body.

    The command finds events, messages, ledger writes, deltas, runs and others by their keys, in all scopes. The
    identity can also be the text that was passed to `once` or sent in an Idempotency-Key header. The exit status is 0
    for one record, 1 for no record, and 3 if several writes have the key. The command then lists them with the options
    that select one.

    Without LOG, the command asks a server, and the token needs read access. An event is looked up by its UUID or place
    in --partition, and other records in --scope: chat/CHAT, ledger/ORGANIZATION, ledger/ORGANIZATION/VAULT or
    deltas/GATEWAY. The command checks that the record matches its block.

    Example:  oncelog show orders.db 0198f3c2-7d55-7c1e-9a61-2f6f0c1b5a10

    Example:  oncelog show chat.db msg_00000000000003000000000007

    Example:  oncelog show app.db order-17

    Example:  oncelog show postgresql://oncelog@db.example.org/orders 0:17

    Example:  oncelog show --url https://log.example.org --partition orders 0198f3c2-7d55-7c1e-9a61-2f6f0c1b5a10

    Example:  oncelog show --profile production --scope chat/general msg_00000000000003000000000007
    """
    options = KeyOptions(policy, scope, client, as_text, read_all)
    keys: Sequence[bytes] = ()
    if isinstance(source, Remote):
        query = _build_server_query(id or "", options, partition or [])
        findings = [asyncio.run(find_on_server(source, query))]
    else:
        if partition:
            raise OncelogError("--partition is for a server and cannot be combined with LOG")
        record_id = parse_record_id(id or "", options)
        keys = record_id.keys
        with create_inspector(source).open_view() as view, ProgressMeter() as meter:
            findings = find_records(view, record_id, meter)
        if record_id.place is not None and findings[0].outcome.record is None:
            findings = [_add_hint(findings[0])]
    is_one = len(findings) == 1
    lines = _format_finding(findings[0]) if is_one else _format_choices(findings, keys)
    print_result([_to_json(finding) for finding in findings], lines, as_json)
    if not is_one:
        raise typer.Exit(EXIT_AMBIGUOUS)
    if findings[0].outcome.record is None:
        raise typer.Exit(EXIT_FOUND_NOTHING)


def _build_server_query(id: str, options: KeyOptions, partitions: Sequence[str]) -> ServerQuery:  # noqa: A002
    """Build the query for a server. Raises OncelogError for an option that needs the log itself."""
    for name, value in options.to_flags().items():
        if value is not None and name not in {"--scope", "--client"}:
            raise OncelogError(f"{name} needs a LOG: a server looks up a record only in its scope or partition")
    return ServerQuery(id, options.scope, [check_text(name, "--partition") for name in partitions], options.client)


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
    lines = [f"{_style_status(finding.outcome.status)}: {escape_unprintable(finding.outcome.why)}"]
    if finding.evicted is not None:
        at = finding.evicted
        place = f"lane {at.lane}, position {at.position}, {format_utc(at.log_time_ms)}"
        lines.append(format_label("key evicted", LABEL_WIDTH) + place)
    if record is not None:
        body = ("erased", "yes: the body is removed, its hash remains") if record.erased else _format_body(record)
        block = f"height {record.height}, {finding.block_hash.hex()}" if finding.block_hash else ""
        more = [("block", block), body]
        key_text = _decode_printable(record.key) or ""
        lines += format_fields(record, record.key.hex(), record.fingerprint.hex(), more, key_text)
    if lease is not None and lease.holder:
        held = f"{escape_unprintable(lease.holder)}, fence {lease.fence}, until {format_utc(lease.until_ms)}"
        lines.append(format_label("lease", LABEL_WIDTH) + held)
    return lines


def _style_status(status: Status) -> str:
    styles: dict[Status, Style] = {Status.COMMITTED: "good", Status.UNKNOWN: "bad"}
    return style(status.value, styles.get(status, "heading"))


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
