"""Every documented operation, message and error code occurs in a recorded exchange."""

import json
import re
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Final

import pytest

from golden.golden_files import FILES

DOCS: Final = Path(__file__).parents[2] / "docs"
CODE_PATTERNS: Final = {
    "events": r'"code":"([a-z_]+)"',
    "chat": r'(?:"error":\{|"type":"error",)"code":"([A-Z_]+)"',
    "deltas": r'(?:"error":"[^\n"]*","code":"|"code":"(?=[A-Z_]+"[^\n]*"error":"))([A-Z_]+)"',
}
"""Patterns that find the error codes in the exchanges of each API."""
NOT_RECORDED: Final[dict[str, set[str]]] = {
    "events": set(),
    "chat": {"BUSY", "UNAVAILABLE", "SERVER_STOPPING", "SLOW_CONSUMER"},
    "deltas": {"SERVER_BUSY", "SERVER_ERROR", "RATE_LIMITED"},
}
"""Codes for overload and store failures, which other tests provoke inside the server."""


def exchanges(*names: str) -> str:
    """Return the transcripts whose names begin with one of `names`."""
    paths = sorted(path for name in names for path in FILES.glob(f"exchange-{name}*.txt"))
    return "\n".join(path.read_text(encoding="utf-8") for path in paths)


def section(page: str, heading: str) -> str:
    """Return the text below a heading of a page, up to the next heading of the same level."""
    _, found, rest = (DOCS / page).read_text(encoding="utf-8").partition(f"\n## {heading}\n")
    assert found, f"docs/{page} has no section {heading!r}"
    return rest.partition("\n## ")[0]


def codes(page: str, column: int) -> set[str]:
    """Return the codes in one column of a page's error table."""
    rows = section(page, "Errors").splitlines()
    return {code for row in rows if row.startswith("|") for code in re.findall(r"`(\w+)`", row.split("|")[column])}


def missing_types(sent_and_received: str, names: Iterable[str]) -> set[str]:
    return {name for name in names if not re.search(rf'[<>] {{"type": ?"{name}"', sent_and_received)}


def test_every_http_operation_has_a_successful_exchange() -> None:
    lines = exchanges("").splitlines()
    answered = set()
    request = ""
    for line, following in pairwise(lines):
        if re.match(r"> [A-Z]+ /", line):
            request = line.removeprefix("> ").partition("?")[0]
        if re.match(r"< HTTP/1.1 (2|101)", following) and request:
            answered.add(request)
    document = json.loads((FILES / "openapi.json").read_text(encoding="utf-8"))
    missing = [
        f"{method.upper()} {path}"
        for path, operations in document["paths"].items()
        for method in operations
        if not any(
            re.fullmatch(f"{method.upper()} {re.sub(r'{[^}]+}', '[^/]+', path)}", request) for request in answered
        )
    ]
    assert missing == []


def test_every_grpc_method_has_a_successful_exchange() -> None:
    methods = re.findall(r'method {\s+name: "(\w+)"', (FILES / "grpc-service.txt").read_text(encoding="utf-8"))
    assert len(methods) > 10
    calls = exchanges("ledger-grpc").split("\n> rpc ")
    answered = {call.partition(" ")[0] for call in calls if "< status OK" in call or "client cancels" in call}
    assert set(methods) - answered == set()


@pytest.mark.parametrize(
    ("transcripts", "documented"),
    [
        ("events-native", section("reference/events.md", "Messages")),
        ("events-insieme", section("reference/events.md", "A second dialect")),
        ("chat", section("reference/chat.md", "Over a WebSocket")),
    ],
)
def test_every_message_type_is_in_an_exchange(transcripts: str, documented: str) -> None:
    names = set(re.findall(r"`(\w+)` \{", documented))
    assert len(names) > 5
    assert missing_types(exchanges(transcripts, "stopping"), names) == set()


def test_every_message_type_of_live_deltas_is_in_an_exchange() -> None:
    names = set(re.findall(r'{"type": "(\w+)"', section("reference/deltas.md", "Live")))
    assert names == {"connect", "connected", "deltas", "snapshot", "error"}
    assert missing_types(exchanges("deltas"), names) == set()


@pytest.mark.parametrize(("api", "column"), [("events", 1), ("chat", 1), ("deltas", 2)])
def test_every_error_code_is_in_an_exchange(api: str, column: int) -> None:
    wanted = codes(f"reference/{api}.md", column)
    assert len(wanted) > 8
    assert wanted - set(re.findall(CODE_PATTERNS[api], exchanges(""))) == NOT_RECORDED[api]


def test_every_status_of_the_ledger_is_in_an_exchange() -> None:
    names = set(re.findall(r"`([A-Z_]+)`", section("reference/ledger.md", "Answers")))
    assert len(names) > 15
    recorded = exchanges("")
    assert {name for name in names if name not in recorded} == set()


def test_every_command_has_an_exit_status() -> None:
    helped = re.findall(r"^\$ oncelog (.+) --help$", (FILES / "cli-help.txt").read_text(encoding="utf-8"), re.MULTILINE)
    groups = {name.partition(" ")[0] for name in helped if " " in name}
    ran = "".join(path.read_text(encoding="utf-8") for path in FILES.glob("cli-*commands.txt"))
    missing = [name for name in helped if name not in groups and f"$ oncelog {name}" not in ran]
    assert missing == []
