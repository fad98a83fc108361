"""`oncelog proof`: a record's proof as a document, and the check of one that somebody has handed over."""

import os
import re
import sys
from pathlib import Path
from typing import Annotated, Final

import typer
from msgspec import Struct

from oncelog.cli.record_id import (
    MESSAGE_PREFIX,
    AsText,
    ClientOption,
    Place,
    PolicyOption,
    ReadAll,
    ScopeOption,
    check_no_options,
    describe_ambiguity,
    describe_gap,
    find_transaction,
    format_choices,
    parse_keys,
    parse_place,
    parse_transaction_place,
    select_policies,
)
from oncelog.cli.terminal import EXIT_AMBIGUOUS, EXIT_FOUND_NOTHING, ProgressMeter, translate_errors
from oncelog.cli.times import format_utc
from oncelog.core.policy import CHAT, LEDGER
from oncelog.core.proof import HASH_BYTES, encode_record_header, hash_leaf, prove, verify_header
from oncelog.core.values import Record
from oncelog.engine.read_results import Proven
from oncelog.errors import CorruptError, OncelogError, ProofError
from oncelog.file_modes import open_new
from oncelog.proof import DOCUMENT_BYTES_MAX, ProofDocument, Verification, decode, encode, proof_document, verify
from oncelog.storage.inspect.factory import create_inspector
from oncelog.storage.inspect.inspector import LogView
from oncelog.storage.key_search import KeyQuery, search_keys
from oncelog.storage.queries.records import find_record, load_block, load_heads
from oncelog.storage.verify.findings import ExportedHead, decode_exported_head, translate_damage
from oncelog.storage.verify.side_state import decode_policies

STANDARD_INPUT: Final = "-"
_HEX: Final = re.compile(r"([0-9a-fA-F]{2})+")

OptionalLog = Annotated[
    str | None, typer.Argument(help="The log: a file, or postgresql://…", metavar="LOG", show_default=False)
]
Id = Annotated[
    str | None,
    typer.Argument(
        help="As for `oncelog show`: a UUID, a key in hex or as text, msg_…, a transaction's id, or LANE:POSITION.",
        metavar="ID",
        show_default=False,
    ),
]
Head = Annotated[
    Path | None,
    typer.Option("--head", help="With --check: a head that `oncelog head` printed.", dir_okay=False, exists=True),
]


def proof(  # noqa: PLR0913 - each is an option
    log: OptionalLog = None,
    id: Id = None,  # noqa: A002 - what it is called where it is shown
    *,
    lane: Annotated[int | None, typer.Option(help="The record's lane, with --position.", min=0)] = None,
    position: Annotated[int | None, typer.Option(help="The record's place in the lane.", min=1)] = None,
    policy: PolicyOption = None,
    scope: ScopeOption = None,
    client: ClientOption = None,
    as_text: AsText = None,
    read_all: ReadAll = False,
    output: Annotated[
        Path | None, typer.Option(help="Write the document to this file, which must not be there.", show_default=False)
    ] = None,
    check: Annotated[
        str | None,
        typer.Option(help="Check the document in this file ('-': standard input); needs no log.", metavar="FILE"),
    ] = None,
    block_hash: Annotated[str | None, typer.Option(help="With --check: the hash that its block must have.")] = None,
    head: Head = None,
) -> None:
    """Prints the proof that a record stands in a log, as a document of JSON; or checks such a document.

    The check needs the document alone, and a hash that you trust: --block-hash, or --head, which knows the newest block
    of each lane. The exit status is 0 if all that was asked is proven, and 1 if not, or if there is no record.

    Example:  oncelog proof ledger.db 0003000000000011 > proof.json

    Example:  oncelog proof postgresql://oncelog@db.example.org/orders --lane 0 --position 17 --output proof.json

    Example:  oncelog proof orders.db 0198f3c2-7d55-7c1e-9a61-2f6f0c1b5a10 | oncelog proof --check -

    Example:  oncelog proof --check proof.json --head orders-head.json
    """
    with translate_errors():
        options = _Options(policy, scope, client, as_text, read_all)
        if check is not None:
            proof_options = {"LOG": log, "--lane": lane, "--position": position, "--output": output}
            _check_not_given({**proof_options, **options.to_flags()}, "--check")
            _check_document(check, block_hash, head)
            return
        _check_not_given({"--block-hash": block_hash, "--head": head}, "a log: it goes with --check")
        if log is None:
            raise OncelogError("name a log and a record in it, or a document with --check; see `oncelog proof --help`.")
        place = _resolve_place(id, lane, position, options)
        text = id or ""
        keys = parse_keys(text, as_text) if place is None else ()
        with create_inspector(log).open_view() as view:
            if place is None:
                found = _find_record(view, text, keys, options)
            else:
                found = (_find_message_at if text.startswith(MESSAGE_PREFIX) else _find_record_at)(view, place)
            document = b"" if isinstance(found, _Missing) else _encode_proof(found, view)
        if isinstance(found, _Missing):
            typer.echo(f"oncelog: {found.reason}", err=True)
            raise typer.Exit(found.status)
        _write_document(document, output)


def _check_not_given(options: dict[str, object], other_option: str) -> None:
    conflicting = [name for name, value in options.items() if value is not None]
    if conflicting:
        raise OncelogError(f"{conflicting[0]} does not go with {other_option}.")


def _write_document(document: bytes, output: Path | None) -> None:
    if output is None:
        typer.echo(document.decode())
        return
    try:
        file = os.fdopen(open_new(output, os.O_WRONLY), "wb")  # never over a file: it might be the log
    except FileExistsError as error:
        raise OncelogError(f"{output} is there already.") from error
    except OSError as error:
        raise OncelogError(f"{output} cannot be written: {error.strerror}") from error
    try:
        with file:
            file.write(document + b"\n")
    except OSError as error:
        output.unlink(missing_ok=True)
        raise OncelogError(f"{output} cannot be written: {error.strerror}") from error


# --- finding the record ------------------------------------------------------------------------------


class _Options(Struct, frozen=True):
    """The options that go with a key."""

    policy: str | None
    scope: str | None
    client: str | None
    as_text: bool | None
    read_all: bool

    def to_flags(self) -> dict[str, object]:
        """Return the options by name, with None for an option that was not given."""
        options = {"--policy": self.policy, "--scope": self.scope, "--client": self.client}
        form = "--hex" if self.as_text is False else "--text"
        return {**options, form: self.as_text, "--all": self.read_all or None}


class _Missing(Struct, frozen=True):
    """Why there is not one record, and the exit status."""

    reason: str
    status: int = EXIT_FOUND_NOTHING


def _resolve_place(id: str | None, lane: int | None, position: int | None, options: _Options) -> Place | None:  # noqa: A002
    """Return the place that the arguments name. Raises OncelogError if they name nothing, or two things."""
    if (lane is None) is not (position is None):
        raise OncelogError("--lane and --position go together.")
    if lane is not None and position is not None:
        if id is not None or any(value is not None for value in options.to_flags().values()):
            raise OncelogError("--lane and --position name a record by its place: nothing else is needed.")
        return lane, position
    if id is None:
        raise OncelogError("which record? Give a transaction's id, a key, or --lane and --position.")
    place = parse_place(id) if options.as_text is None else None
    if place is not None:
        check_no_options(id, options.to_flags())
    return place


def _find_record_at(view: LogView, place: Place) -> Record | _Missing:
    lane, position = place
    heads = view.run_query(load_heads)
    newest = heads[lane].position if lane in heads else 0
    if not 1 <= position <= newest:
        has = f"has positions 1 to {newest}" if newest else "is empty, or none of this log's"
        return _Missing(f"no record: lane {lane} {has}")
    record = view.run_query(find_record, lane, position)
    if record is None:
        passed_over = describe_gap(view, lane, position)
        if passed_over is not None:
            return _Missing(passed_over)
        raise CorruptError(f"lane {lane}, position {position}: the record is missing; see `oncelog verify`")
    return record


def _find_message_at(view: LogView, place: Place) -> Record | _Missing:
    found = _find_record_at(view, place)
    if isinstance(found, _Missing) or found.policy == CHAT.name:
        return found
    return _Missing(_describe_other_policy("message", place, found))


def _describe_other_policy(wanted: str, place: Place, record: Record) -> str:
    return (
        f"no {wanted}: at lane {place[0]}, position {place[1]} stands a record of the policy {record.policy!r}. "
        f"If it is meant, say {place[0]}:{place[1]}"
    )


def _find_record(view: LogView, id: str, keys: tuple[bytes, ...], options: _Options) -> Record | _Missing:  # noqa: A002
    """Find a record by its key, as `oncelog show` does. The id of a ledger transaction comes first."""
    is_key = any(value is not None for value in options.to_flags().values())
    place = None if is_key else parse_transaction_place(id)
    transaction = find_transaction(view, place)
    if transaction is not None:
        return transaction
    query = KeyQuery(
        keys,
        select_policies(decode_policies(view.iterate_rows("policies")), options.policy),
        options.scope,
        options.client,
    )
    with ProgressMeter() as meter:
        matches = search_keys(view, query, meter, read_all=options.read_all)
    records = {identity: view.get_key_status(identity).record for identity in matches.identities}
    found = {identity: record for identity, record in records.items() if record is not None}
    if len(found) > 1:
        lines = [f"  {line}" for line in format_choices(list(found), keys)]
        return _Missing("\n".join([describe_ambiguity(list(found)), *lines]), EXIT_AMBIGUOUS)
    if found:
        return next(iter(found.values()))
    if place is not None:
        other = _find_record_at(view, place)
        return other if isinstance(other, _Missing) else _Missing(_describe_other_policy("transaction", place, other))
    where = "in that scope" if options.scope is not None else "in any scope"
    return _Missing(f"no record: nothing was committed here under that key {where}; `oncelog show` says more")


def _encode_proof(record: Record, view: LogView) -> bytes:
    with translate_damage():
        return encode(proof_document(_prove_record(record, view)))


def _prove_record(record: Record, view: LogView) -> Proven:
    """As `Log.prove`. Raises CorruptError where it would not hold: what is handed on must."""
    place = f"lane {record.lane}, position {record.position}"
    try:
        block, evidence = view.run_query(load_block, record.lane, record.height)
    except LookupError as error:
        raise CorruptError(f"{place}: its block is missing; see `oncelog verify`") from error
    index = record.position - block.first_position
    if not 0 <= index < len(evidence):
        raise CorruptError(f"{place}: it does not stand in its block; see `oncelog verify`")
    found = evidence[index]
    leaves = [
        hash_leaf(encode_record_header(evidence_entry.record), evidence_entry.body_hash) for evidence_entry in evidence
    ]
    proven = Proven(found.record, found.salt, found.body_hash, prove(leaves, index), block)
    if found.record != record or not verify_header(record, proven.body_hash, proven.proof, block):
        raise CorruptError(f"{place}: it is not what its block says; see `oncelog verify`")
    return proven


# --- checking a document -----------------------------------------------------------------------------


def _check_document(file: str, block_hash: str | None, head: Path | None) -> None:
    if block_hash is not None and head is not None:
        raise OncelogError("--block-hash does not go with --head: each says which block it must be.")
    expected_hash = None if block_hash is None else _parse_hash(block_hash)
    exported = None if head is None else decode_exported_head(head.read_bytes())
    try:
        document = decode(_read_document(file))
    except ProofError as error:
        raise OncelogError(f"not a proof: {error}") from error
    anchor = (
        _Anchor(expected_hash, _MATCHES_GIVEN if expected_hash else _NOT_COMPARED)
        if exported is None
        else _find_anchor(document, exported)
    )
    result = verify(document, block_hash=anchor.block_hash)
    lines = _format_proof(document, result, anchor) if result.is_valid else _format_findings(result)
    typer.echo("\n".join(lines))
    if not result.is_valid or (exported is not None and anchor.block_hash is None):
        raise typer.Exit(EXIT_FOUND_NOTHING)


_MATCHES_GIVEN: Final = "it is the one that was given"
_NOT_COMPARED: Final = "not compared: hold its hash against one from whom you trust (--block-hash, --head)"


class _Anchor(Struct, frozen=True):
    """What a document's block is held against."""

    block_hash: bytes | None
    """None if there is nothing."""
    message: str
    """What there is to say of it if the document is good."""


def _find_anchor(document: ProofDocument, head: ExportedHead) -> _Anchor:
    block = document.block
    mark = next((exported_lane for exported_lane in head.lanes if exported_lane.lane == block.lane), None)
    if mark is None:
        return _Anchor(None, f"not confirmed: the head has no lane {block.lane}")
    if block.height > mark.height:
        return _Anchor(None, f"not confirmed: it is newer than the head, which has height {mark.height}")
    if block.height < mark.height:
        message = "not confirmed: it is older than the head, and they cannot be compared without the chain between them"
        return _Anchor(None, f"{message} (heights {block.height} and {mark.height})")
    return _Anchor(bytes.fromhex(mark.block_hash), "it is the head's")


def _parse_hash(text: str) -> bytes:
    if len(text) != 2 * HASH_BYTES or _HEX.fullmatch(text) is None:
        raise OncelogError(f"--block-hash must have {2 * HASH_BYTES} hexadecimal digits.")
    return bytes.fromhex(text)


def _read_document(file: str) -> bytes:
    """No more than shows that it is too much."""
    if file == STANDARD_INPUT:
        return sys.stdin.buffer.read(DOCUMENT_BYTES_MAX + 1)
    try:
        with Path(file).open("rb") as opened:
            return opened.read(DOCUMENT_BYTES_MAX + 1)
    except OSError as error:
        raise OncelogError(f"{file} cannot be read: {error.strerror}") from error


def _format_findings(result: Verification) -> list[str]:
    return ["not proven:", *(f"- {finding}" for finding in result.findings)]


def _format_proof(document: ProofDocument, result: Verification, anchor: _Anchor) -> list[str]:
    record, block = document.record, document.block
    body = f"{len(document.body or b'')} bytes, as they were committed"
    if result.is_erased:
        body = "not there: only the header is proven, and that a body with the body hash stood there"
    elif record.policy == LEDGER.name:
        body += "; the operations are those of the fingerprint"
    fields = [
        ("place", f"lane {record.lane}, position {record.position}"),
        ("sequence", f"{record.sequence} of {record.scope}" if record.sequence else ""),
        ("time", format_utc(record.log_time_ms)),
        ("policy", record.policy),
        ("scope", record.scope),
        ("key", record.key),
        ("fingerprint", record.fingerprint),
        ("actor", record.actor),
        ("client", f"{record.client}, sequence {record.client_sequence}" if record.client_sequence else record.client),
        ("partitions", ", ".join(record.partitions)),
        ("body", body),
        ("block", f"height {block.height}, {block.hash}"),
        ("", anchor.message),
    ]
    first = (
        "proven: the record stands in the block" if anchor.block_hash else "the record stands in the document's block"
    )
    return [first, *(f"{name + ':' if name else '':<16}{_escape(value)}" for name, value in fields if value)]


def _escape(text: str) -> str:
    """A stranger's document must not write to the terminal by itself."""
    return text if text.isprintable() else ascii(text)
