"""`oncelog proof`: export the proof of a record as a document, and check such a document."""

from pathlib import Path
from typing import Annotated

import typer

from oncelog.cli.files import STANDARD_INPUT, open_input, write_new_file
from oncelog.cli.output import print_result
from oncelog.cli.record_lookup import (
    AsText,
    ClientOption,
    KeyOptions,
    PolicyOption,
    ReadAll,
    RecordId,
    ScopeOption,
    describe_ambiguity,
    find_records,
    format_choices,
    format_fields,
    parse_hex,
    parse_record_id,
)
from oncelog.cli.terminal import EXIT_AMBIGUOUS, EXIT_FOUND_NOTHING, ProgressMeter, print_message
from oncelog.core.policy import LEDGER
from oncelog.core.proof import HASH_BYTES, verify_header
from oncelog.core.values import Record
from oncelog.engine.read_results import prove_position
from oncelog.errors import CorruptError, OncelogError, ProofError
from oncelog.proof import DOCUMENT_BYTES_MAX, ProofDocument, Verification, decode, encode, proof_document, verify
from oncelog.storage.inspect.factory import create_inspector
from oncelog.storage.inspect.inspector import LogView
from oncelog.storage.metadata import DAMAGE_HINT
from oncelog.storage.queries.records import load_block
from oncelog.storage.verify.findings import ExportedHead, decode_exported_head, translate_damage


def proof(  # noqa: PLR0913 - each is an option
    log: Annotated[
        str | None, typer.Argument(help="The log: a file, or postgresql://…", metavar="LOG", show_default=False)
    ] = None,
    id: Annotated[  # noqa: A002 - its name in the help
        str | None,
        typer.Argument(
            help="As for `oncelog show`: a UUID, a key in hex or as text, msg_…, a transaction's id, or LANE:POSITION.",
            metavar="ID",
            show_default=False,
        ),
    ] = None,
    *,
    lane: Annotated[int | None, typer.Option(help="Lane of the record, with --position.", min=0)] = None,
    position: Annotated[int | None, typer.Option(help="Position of the record in the lane.", min=1)] = None,
    policy: PolicyOption = None,
    scope: ScopeOption = None,
    client: ClientOption = None,
    as_text: AsText = None,
    read_all: ReadAll = False,
    output: Annotated[
        Path | None, typer.Option(help="Write the document to this new file.", show_default=False)
    ] = None,
    check: Annotated[
        str | None,
        typer.Option(help="Check the document in this file ('-': standard input); needs no log.", metavar="FILE"),
    ] = None,
    block_hash: Annotated[str | None, typer.Option(help="With --check: the expected hash of the block.")] = None,
    head: Annotated[
        Path | None,
        typer.Option("--head", help="With --check: a head that `oncelog head` printed.", dir_okay=False, exists=True),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="With --check: print JSON. A proof is always JSON.")] = False,
) -> None:
    """Print the proof that a record is in a log, as a JSON document, or check such a document.

    The check needs only the document and a hash that you trust: --block-hash, or --head with the newest block of each
    lane. The exit status is 0 if everything is proven, and 1 if not or if the record does not exist.

    Example:  oncelog proof ledger.db 0003000000000011 > proof.json

    Example:  oncelog proof postgresql://oncelog@db.example.org/orders --lane 0 --position 17 --output proof.json

    Example:  oncelog proof orders.db 0198f3c2-7d55-7c1e-9a61-2f6f0c1b5a10 | oncelog proof --check -

    Example:  oncelog proof --check proof.json --head orders-head.json
    """
    options = KeyOptions(policy, scope, client, as_text, read_all)
    if check is not None:
        proof_options = {"LOG": log, "--lane": lane, "--position": position, "--output": output}
        _check_not_given({**proof_options, **options.to_flags()}, "--check")
        _check_document(check, block_hash, head, as_json)
        return
    _check_not_given({"--block-hash": block_hash, "--head": head}, "a log: it needs --check")
    if log is None:
        raise OncelogError("give a log and a record in it, or a document with --check; see `oncelog proof --help`.")
    record_id = _parse_record_id(id, lane, position, options)
    with create_inspector(log).open_view() as view:
        with ProgressMeter() as meter:
            findings = find_records(view, record_id, meter)
        records = [finding.outcome.record for finding in findings if finding.outcome.record is not None]
        with translate_damage():
            document = _encode_proof(records[0], view) if len(records) == 1 else b""
    if len(records) > 1:
        identities = [finding.identity for finding in findings if finding.outcome.record is not None]
        choices = [f"  {line}" for line in format_choices(identities, record_id.keys)]
        print_message("\n".join([describe_ambiguity(identities), *choices]))
        raise typer.Exit(EXIT_AMBIGUOUS)
    if not records:
        print_message(findings[0].outcome.why)
        raise typer.Exit(EXIT_FOUND_NOTHING)
    if output is None:
        typer.echo(document.decode())
    elif not write_new_file(output, [document, b"\n"]):  # never overwrites, because the file might be the log
        raise OncelogError(f"{output} already exists.")


def _parse_record_id(id: str | None, lane: int | None, position: int | None, options: KeyOptions) -> RecordId:  # noqa: A002
    """Parse the arguments that identify a record. Raises OncelogError unless they identify one record."""
    if (lane is None) is not (position is None):
        raise OncelogError("--lane and --position must be given together.")
    if lane is not None and position is not None:
        if id is not None or options.find_first() is not None:
            raise OncelogError(
                "--lane and --position identify a record by its place and cannot be combined with other arguments."
            )
        return RecordId("", options, (lane, position))
    if id is None:
        raise OncelogError("which record? Give a transaction's id, a key, or --lane and --position.")
    return parse_record_id(id, options)


def _check_not_given(options: dict[str, object], other_option: str) -> None:
    conflicting = [name for name, value in options.items() if value is not None]
    if conflicting:
        raise OncelogError(f"{conflicting[0]} cannot be combined with {other_option}.")


def _encode_proof(record: Record, view: LogView) -> bytes:
    """Prove a record as `Log.prove` does. Raises CorruptError if the proof would not be valid."""
    place = f"lane {record.lane}, position {record.position}"
    try:
        block, evidence = view.run_query(load_block, record.lane, record.height)
    except LookupError as error:
        raise CorruptError(f"{place}: its block is missing; {DAMAGE_HINT}") from error
    proven = prove_position(block, evidence, record.position)
    if proven is None:
        raise CorruptError(f"{place}: the record is not in its block; {DAMAGE_HINT}")
    if proven.record != record or not verify_header(record, proven.body_hash, proven.proof, block):
        raise CorruptError(f"{place}: the record does not match its block; {DAMAGE_HINT}")
    return encode(proof_document(proven))


# --- checking a document -----------------------------------------------------------------------------


def _check_document(file: str, block_hash: str | None, head: Path | None, as_json: bool) -> None:
    if block_hash is not None and head is not None:
        raise OncelogError("--block-hash cannot be combined with --head: each identifies the expected block.")
    expected_hash = None if block_hash is None else _parse_hash(block_hash)
    exported = None if head is None else decode_exported_head(head.read_bytes(), str(head))
    try:
        with open_input(file) as opened:
            document = decode(opened.read(DOCUMENT_BYTES_MAX + 1))  # one byte more than `decode` accepts
    except ProofError as error:
        name = "standard input" if file == STANDARD_INPUT else file
        raise OncelogError(f"{name} is not a proof: {error}; `oncelog proof` prints one") from error
    trusted_hash, comparison = _find_anchor(document, expected_hash, exported)
    result = verify(document, block_hash=trusted_hash)
    lines = (
        _format_proof(document, result, trusted_hash, comparison)
        if result.is_valid
        else ["not proven:", *(f"- {finding}" for finding in result.findings)]
    )
    is_proven = result.is_valid and (exported is None or trusted_hash is not None)
    fields = {
        "ok": is_proven,
        "findings": result.findings,
        "erased": result.is_erased,
        "lane": document.record.lane,
        "position": document.record.position,
        "block_hash": document.block.hash,
        "comparison": comparison,
    }
    print_result(fields, lines, as_json)
    if not is_proven:
        raise typer.Exit(EXIT_FOUND_NOTHING)


def _find_anchor(
    document: ProofDocument, expected_hash: bytes | None, head: ExportedHead | None
) -> tuple[bytes | None, str]:
    """Return the trusted hash of the document's block, if any, and a phrase that says how a valid block compares."""
    block = document.block
    if expected_hash is not None:
        return expected_hash, "it has the given hash"
    if head is None:
        message = "not compared: compare its hash with one from a trusted source (--block-hash, --head)"
        return None, message
    mark = next((exported_lane for exported_lane in head.lanes if exported_lane.lane == block.lane), None)
    if mark is None:
        return None, f"not confirmed: the head has no lane {block.lane}"
    if block.height > mark.height:
        return None, f"not confirmed: it is newer than the head's block, which has height {mark.height}"
    if block.height < mark.height:
        message = (
            "not confirmed: it is older than the head's block, and only the chain between the two can connect them"
        )
        return None, f"{message} (heights {block.height} and {mark.height})"
    return bytes.fromhex(mark.block_hash), "it is the head's block"


def _parse_hash(text: str) -> bytes:
    found = parse_hex(text)
    if found is None or len(found) != HASH_BYTES:
        raise OncelogError(f"--block-hash must have {2 * HASH_BYTES} hexadecimal digits.")
    return found


def _format_proof(
    document: ProofDocument, result: Verification, trusted_hash: bytes | None, comparison: str
) -> list[str]:
    record, block = document.record, document.block
    body = f"{len(document.body or b'')} bytes, as committed"
    if result.is_erased:
        body = "erased: only the header and the body hash are proven"
    elif record.policy == LEDGER.name:
        body += "; the operations match the fingerprint"
    first = "proven: the record is in the block"
    if trusted_hash is None:
        first = "the record is in the document's block"
    more = [("body", body), ("block", f"height {block.height}, {block.hash}"), ("", comparison)]
    return [first, *format_fields(record, record.key, record.fingerprint, more)]
