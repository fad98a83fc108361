"""`oncelog key`: print canonical forms and identities of the JSON values on standard input."""

from collections.abc import Callable, Iterator
from hashlib import sha256
from typing import BinaryIO

from oncelog.cli.files import STANDARD_INPUT, open_input
from oncelog.cli.line_input import LINE_BYTES_MAX
from oncelog.cli.output import encode_json_line, write_lines
from oncelog.cli.terminal import AlwaysJson, CommandGroup
from oncelog.core.canonical import JsonValue, canonical_args, canonical_text, parse
from oncelog.core.identity import delta_id_from_json, fingerprint_from_json, run_key_from_json
from oncelog.errors import CanonicalError, OncelogError

app = CommandGroup(
    help=(
        "Canonical forms and identities: one JSON value per line on standard input, one JSON object per line on "
        'standard output. For an invalid line the answer is {"error", "path"}, and the command continues.'
    ),
)

LineResult = dict[str, str]


@app.command()
def jcs(as_json: AlwaysJson = False) -> None:
    """Print the canonical form (RFC 8785) of each value and its SHA-256: {"canonical", "sha256"}.

    Refused: integers that JSON cannot represent exactly, lone surrogates, repeated keys.

    Example:  echo '{"b":1.0,"a":[]}' | oncelog key jcs
    """
    del as_json
    _answer_lines(lambda line: _build_form(canonical_text(line)))


@app.command()
def args(as_json: AlwaysJson = False) -> None:
    """Print the strict form of run arguments and its SHA-256: {"canonical", "sha256"}.

    Strings are in NFC, null members are left out, and integers have at most 64 bits.

    Example:  echo '{"sides":20,"note":null}' | oncelog key args
    """
    del as_json
    _answer_lines(lambda line: _build_form(canonical_args(parse(line))))


@app.command()
def fingerprint(as_json: AlwaysJson = False) -> None:
    """Print the fingerprint of an event: {"fingerprint"} for {partitions, event}.

    Example:  echo '{"partitions":["a"],"event":{"type":"x"}}' | oncelog key fingerprint
    """
    del as_json
    _answer_lines(_make_identity("fingerprint", fingerprint_from_json))


@app.command()
def delta(as_json: AlwaysJson = False) -> None:
    """Print the id of a row delta: {"deltaId"} for {clientId, hlc, table, rowId, columns}.

    Example:  echo '{"clientId":"c","hlc":"1","table":"t","rowId":"r","columns":[]}' | oncelog key delta
    """
    del as_json
    _answer_lines(_make_identity("deltaId", delta_id_from_json))


@app.command()
def run(as_json: AlwaysJson = False) -> None:
    """Print the key (v2) of a tool run, in hex: {"key"}.

    Each line is {plan_id, campaign_id, event_type, tool_name, ruleset_version, args_json}.

    Example:  echo '{"campaign_id":1,"event_type":"tool.execute","args_json":{}}' | oncelog key run
    """
    del as_json
    _answer_lines(_make_identity("key", run_key_from_json))


def _build_form(canonical: bytes) -> LineResult:
    return {"canonical": canonical.decode(), "sha256": sha256(canonical).hexdigest()}


def _make_identity(name: str, compute: Callable[[JsonValue], bytes]) -> Callable[[bytes], LineResult]:
    return lambda line: {name: compute(parse(line)).hex()}


def _answer_lines(answer: Callable[[bytes], LineResult]) -> None:
    """Answer each line as soon as it arrives, so that a program can wait for the answer before it sends the next."""
    with open_input(STANDARD_INPUT, "JSON value") as source:
        is_empty = True
        for line in _iterate_lines(source):
            is_empty = False
            write_lines([encode_json_line(_answer_line(line, answer))])
    if is_empty:
        raise OncelogError("standard input contains no JSON value")


def _answer_line(line: bytes | None, answer: Callable[[bytes], LineResult]) -> LineResult:
    try:
        if line is None:
            raise CanonicalError("$", f"line longer than {LINE_BYTES_MAX} bytes")  # noqa: TRY301
        return answer(line)
    except CanonicalError as error:
        return {"error": error.reason, "path": error.path}


def _iterate_lines(source: BinaryIO) -> Iterator[bytes | None]:
    """Yield the lines without line endings. A line that is too long is skipped and yields None."""
    while line := source.readline(LINE_BYTES_MAX + 1):
        if line.endswith(b"\n") or len(line) <= LINE_BYTES_MAX:
            yield line.rstrip(b"\r\n")
            continue
        while rest := source.readline(LINE_BYTES_MAX):
            if rest.endswith(b"\n"):
                break
        yield None
