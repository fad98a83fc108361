"""`oncelog deltas import` writes every line of a CSV file once, even after crashes, and refuses malformed files."""

import json
import os
import re
import signal
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from cli.gateway_reader import get_json, newest_sequence, rows_of, wait_for
from cli.processes import Command
from cli.runner import COMMAND, RUNNER
from cli.scripted_server import answer, scripted
from cli.server_process import ServerProcess, oncelog, serving, start_command, wait_for_exit
from databases import BOTH_STORES
from deadlines import WAIT_S
from oncelog.cli.deltas.column_types import TypeGuess, get_encoder
from oncelog.core.hlc import wall_ms
from oncelog.core.merge import extract

HELD = """
import asyncio, sys
from oncelog.cli import main
from oncelog.cli.deltas.gateway import Gateway
pushes, push = int(sys.argv.pop(1)), Gateway.push
async def push_held(gateway, *arguments, **options):
    global pushes
    pushes -= 1
    pushing = asyncio.ensure_future(push(gateway, *arguments, **options))
    if pushes == 0:
        await asyncio.to_thread(sys.stdin.readline)
    return await pushing
Gateway.push = push_held
main()
"""
"""Runs `oncelog` with an import that waits for a line of input after N pushes. N is the first argument."""
OPTIONS = ["--row-id", "id", "--client-id", "loader"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with serving(tmp_path_factory.mktemp("import")) as served:
        yield served


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "file.csv"


def run_import(url: str, gateway: str, file: Path, *options: str) -> tuple[int, list[str], list[str]]:
    done = oncelog("deltas", "import", gateway, "t", str(file), *OPTIONS, *options, "--url", url)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout.splitlines(), done.stderr.splitlines()


def write_many(file: Path, count: int) -> None:
    file.write_text("id,n,name\n" + "".join(f"r{number},{number},row {number}\n" for number in range(count)))


def leftover_files(file: Path) -> list[str]:
    """Return the names of the files that an import has left behind next to the CSV file."""
    return sorted(one.name for one in file.parent.iterdir() if one.name.startswith(f"{file.name}."))


# --- conversion of rows -------------------------------------------------------------------------------


def test_lines_become_rows_and_later_lines_win(server: ServerProcess, file: Path) -> None:
    file.write_bytes(
        b"\xef\xbb\xbfid;Price (EUR);n;ok;tags;note\r\n"
        b'a;2.50;7;TRUE;"[1, {""b"": -0}]";\r\n'
        b"\r\n"
        b'"x;y";1e3;-7;false;null;"two\nlines ""quoted"""\r\n'
        b"a;3;8;false;[];again"
    )
    types = ["--types", "price=number,n=integer,ok=boolean", "--types", "tags=json"]
    options = ["--rename", "Price (EUR)=price", "--delimiter", ";", *types]
    status, [line], errors = run_import(server.url, "rows", file, *options, "--json")
    assert (status, errors) == (0, [])
    report = json.loads(line)
    assert (report["rows"], report["committed"], report["duplicates"]) == (3, 3, 0)
    assert rows_of(server.url, "rows", "t") == {
        "a": {"price": 3, "n": 8, "ok": False, "tags": [], "note": "again"},
        "x;y": {"price": 1000, "n": -7, "ok": False, "tags": None, "note": 'two\nlines "quoted"'},
    }
    assert leftover_files(file) == []
    pulled = get_json(server.url, "rows/pull")["deltas"]
    start = int(pulled[0]["hlc"])
    assert [int(one["hlc"]) - start for one in pulled] == [0, 1, 2]
    row = {"price": 2.5, "n": 7, "ok": True, "tags": [1, {"b": 0}], "note": ""}
    expected = extract(None, row, client_id="loader", hlc=start, table="t", row_id="a")
    assert expected is not None
    assert (pulled[0]["deltaId"], pulled[0]["op"]) == (expected.delta_id.hex(), "INSERT")


def test_empty_cells_and_types_follow_the_options(server: ServerProcess, file: Path) -> None:
    file.write_text("id,a,b,c,d\n1,,1,1.5,true\n2,x,,2,\n")
    assert run_import(server.url, "plain", file)[0] == 0
    assert rows_of(server.url, "plain", "t")["2"] == {"a": "x", "b": "", "c": "2", "d": ""}
    assert run_import(server.url, "null", file, "--empty-null", "--types", "b=integer")[0] == 0
    assert rows_of(server.url, "null", "t")["2"] == {"a": "x", "b": None, "c": "2", "d": None}
    assert run_import(server.url, "one", file, "--types", "b=integer?")[0] == 0
    assert rows_of(server.url, "one", "t") == {
        "1": {"a": "", "b": 1, "c": "1.5", "d": "true"},
        "2": {"a": "x", "b": None, "c": "2", "d": ""},
    }
    assert run_import(server.url, "found", file, "--infer", "--types", "d=text")[0] == 0
    assert rows_of(server.url, "found", "t") == {
        "1": {"a": "", "b": 1, "c": 1.5, "d": "true"},
        "2": {"a": "x", "b": None, "c": 2, "d": ""},
    }


@pytest.mark.parametrize(
    ("texts", "name"),
    [
        (["1", "-2", "0"], "integer"),
        (["1", ""], "integer?"),
        (["1", "2.5", "1e3"], "number"),
        (["007"], "text"),
        (["+5"], "text"),
        (["1", "-0"], "text"),
        (["true", "FALSE"], "boolean"),
        (["true", "1"], "text"),
        (["", ""], "text"),
        ([], "text"),
        (["9007199254740993"], "text"),
        (["10000000000000000"], "text"),
        (["9007199254740992", "1.5"], "text"),
        (["1e16"], "number"),
        (["0.12345678901234567890"], "text"),
        (["000000000000000000.1"], "text"),
        (["0.000000000000000000000012"], "number"),
        (["1e999"], "text"),
        (["NaN"], "text"),
        (["٣"], "text"),
    ],
)
def test_inferred_type_changes_no_value(texts: list[str], name: str) -> None:
    guess = TypeGuess()
    for text in texts:
        guess.observe(text)
    assert guess.choose_type() == name


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("integer", "-0", b"0"),
        ("number", "1e21", b"1e+21"),
        ("number", "-0.0", b"0"),
        ("number", "0.1e1", b"1"),
        ("boolean", "False", b"false"),
        ("json", ' {"b":1.0,"a":2} ', b'{"a":2,"b":1}'),
        ("text", "ä\0", '"ä\\u0000"'.encode()),
        ("text?", "", b"null"),
        ("integer", "1.0", None),
        ("integer", " 1", None),
        ("integer", "9007199254740992", b"9007199254740992"),
        ("integer", "1000000000000000000000", b"1e+21"),
        ("number", "10000000000000000", b"10000000000000000"),
        ("number", "1e16", b"10000000000000000"),
        ("json", "[1000000000000000000000]", b"[1e+21]"),
        ("integer", "9007199254740993", None),
        ("integer", "1" + "0" * 400, None),
        ("number", "9007199254740993", None),
        ("number", "100000000000000000000000000001", None),
        ("number", "1e999", None),
        ("number", "Infinity", None),
        ("number", "", None),
        ("number", "1_000", None),
        ("boolean", "1", None),
        ("json", '{"a":1,"a":2}', None),
        ("json", "9007199254740993", None),
        ("date", "x", None),
    ],
)
def test_cell_is_converted_to_its_type(kind: str, text: str, expected: bytes | None) -> None:
    if expected is not None:
        assert get_encoder(kind)(text) == expected
        return
    with pytest.raises(ValueError):
        get_encoder(kind)(text)


def test_rows_printed_as_csv_can_be_imported(server: ServerProcess, file: Path, tmp_path: Path) -> None:
    file.write_text('id,a,n\nx,"1,\n""2""",5\ny,é,\n')
    assert run_import(server.url, "out", file, "--infer")[0] == 0
    copy = tmp_path / "copy.csv"
    copy.write_text(oncelog("deltas", "rows", "out", "t", "--format", "csv", "--url", server.url).stdout)
    options = ["--row-id", "rowId", "--client-id", "loader", "--infer", "--url", server.url]
    assert oncelog("deltas", "import", "back", "t", str(copy), *options).returncode == 0
    assert rows_of(server.url, "back", "t") == rows_of(server.url, "out", "t")


# --- crashes and retries ------------------------------------------------------------------------------


@BOTH_STORES
def test_import_killed_and_repeated_writes_every_row_once(tmp_path: Path, file: Path) -> None:
    count = 3000
    write_many(file, count)
    with serving(tmp_path) as served:
        command = ["deltas", "import", "g", "t", str(file), *OPTIONS, "--batch", "50", "--url", served.url, "--infer"]
        for pushes in (10, 30):
            with start_command(str(pushes), *command, program=HELD) as process:
                wait_for(served.url, "g", 50 * pushes)
                process.send_signal(signal.SIGKILL)
                assert process.wait(WAIT_S) == -signal.SIGKILL
            assert leftover_files(file) == [f"{file.name}.oncelog-import"]
        assert newest_sequence(served.url, "g") == 1500
        status, [line], [error] = run_import(served.url, "g", file, "--infer", "--json")
        assert (status, leftover_files(file)) == (0, [])
        assert error.startswith("oncelog: continuing the import that was started at ")
        report = json.loads(line)
        assert report["committed"] + report["duplicates"] == report["rows"] == count
        assert report["duplicates"] == 1500
        assert newest_sequence(served.url, "g") == count
        rows = rows_of(served.url, "g", "t")
        assert len(rows) == count
        assert rows["r2999"] == {"n": 2999, "name": "row 2999"}


@BOTH_STORES
def test_import_survives_a_restart_of_the_server(tmp_path: Path, file: Path) -> None:
    count = 2000
    write_many(file, count)
    with serving(tmp_path) as served:
        command = ["deltas", "import", "g", "t", str(file), *OPTIONS, "--batch", "50", "--url", served.url]
        with start_command("10", *command, program=HELD) as process:
            assert process.stdin is not None
            assert process.stderr is not None
            wait_for(served.url, "g", 500)
            served.kill()
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stderr.readline().endswith("; retrying\n")
            served.start()
            status, output, errors = wait_for_exit(process)
        assert (status, errors, leftover_files(file)) == (0, "", [])
        assert output.startswith(f"{count} rows of {file} are in t: ")
        assert newest_sequence(served.url, "g") == count
        assert len(rows_of(served.url, "g", "t")) == count


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_import_prints_how_to_resume(ending: signal.Signals, file: Path) -> None:
    write_many(file, 25)
    later: dict[str, int] = {}

    def handle(handler: BaseHTTPRequestHandler, attempt: int) -> None:
        if attempt == 1:
            results = [{"deltaId": "0" * 64, "sequence": number, "duplicate": False} for number in range(10)]
            answer(handler, 200, {"results": results})
        else:
            answer(handler, 503, {"error": "busy", "code": "SERVER_BUSY", **later})

    with scripted(handle) as (url, received):
        command = ["deltas", "import", "g", "t", str(file), *OPTIONS, "--batch", "10", "--url", url]
        with start_command(*command) as process:
            assert process.stderr is not None
            assert process.stderr.readline() == "oncelog: server_busy: busy; retrying\n"
            process.send_signal(ending)
            status, output, errors = wait_for_exit(process)
        assert (status, output) == (130, "")
        assert errors == (
            "oncelog: interrupted; 10 of 25 rows are in the table. "
            "Run the same command again to continue; no row is written twice.\n"
        )
        assert leftover_files(file) == [f"{file.name}.oncelog-import"]
        first = received[0]["deltas"]
        received.clear()
        later["retryAfterMs"] = 60_000
        status, _, errors_again = run_import(url, "g", file, "--batch", "10")
        assert status == 2
        assert received[0]["deltas"] == first  # from the start, with the same ids
        assert "Run the same command again to continue" in errors_again[-1]


def test_import_with_a_given_time_can_be_repeated(server: ServerProcess, file: Path) -> None:
    write_many(file, 10)
    for committed in (10, 0, 0):
        status, [line], _ = run_import(server.url, "at", file, "--at", "2026-01-31T12:00:00.5+01:00", "--json")
        report = json.loads(line)
        assert (status, report["committed"], report["at"]) == (0, committed, "2026-01-31T11:00:00.500Z")
    assert newest_sequence(server.url, "at") == 10
    first = get_json(server.url, "at/pull")["deltas"][0]
    assert wall_ms(int(first["hlc"])) == 1_769_857_200_500
    assert leftover_files(file) == []


def test_unfinished_import_is_not_resumed_with_other_options(server: ServerProcess, file: Path) -> None:
    write_many(file, 10)

    def handle(handler: BaseHTTPRequestHandler, _: int) -> None:
        answer(handler, 503, {"error": "busy", "code": "SERVER_BUSY"})

    with scripted(handle) as (url, _):
        assert run_import(url, "g", file, "--timeout", "0.1")[0] == 2
        kept = file.with_name(f"{file.name}.oncelog-import")
        begun = kept.read_bytes()
        for arguments, names in (
            (("h",), "gateway"),
            (("g", "--infer"), "infers"),
            (("g", "--types", "n=integer"), "types"),
        ):
            status, _, [error] = run_import(url, arguments[0], file, *arguments[1:], "--timeout", "0.1")
            assert status == 2
            assert f"differs from this one in: {names}. " in error
        assert f"{kept} is the state of an interrupted import" in run_import(server.url, "g", file)[2][0]
        write_many(file, 11)
        status, _, [error] = run_import(url, "g", file)
        assert "differs from this one in: content of the CSV file. " in error
        write_many(file, 10)
        assert kept.read_bytes() == begun
        kept.write_bytes(begun[:20])
        status, _, [error] = run_import(url, "g", file)
        assert (status, error[:40]) == (2, f"oncelog: {kept}"[:40])
        assert "is not an import state file of this version" in error


def test_refused_row_is_reported_with_its_line(tmp_path: Path, file: Path) -> None:
    schemas = tmp_path / "schemas.json"
    schemas.write_text('{"shop": {"t": {"n": "integer", "name": "text"}}}')
    file.write_text('id,n,name\na,1,x\nb,2,"y\nz"\nc,null,y\nd,4,z\n')
    options = ["--types", "n=json", "--batch"]
    with serving(tmp_path, "--development", "--quiet", "--set", f"deltas_schemas={schemas}") as served:
        status, lines, errors = run_import(served.url, "shop", file, *options, "10")
        assert (status, lines, leftover_files(file)) == (1, [], [])  # Nothing was written, so no state is kept.
        assert errors[0].startswith(f"oncelog: {file}: line 5: invalid: deltas[2].")
        assert errors[1:] == ["oncelog: 0 of 4 rows are in the table"]
        assert newest_sequence(served.url, "shop") == 0
        status, lines, errors = run_import(served.url, "shop", file, *options, "2")
        assert (status, lines, leftover_files(file)) == (1, [], [f"{file.name}.oncelog-import"])
        assert errors[0].startswith(f"oncelog: {file}: line 5: invalid: deltas[0].")
        assert errors[1].startswith("oncelog: 2 of 4 rows are in the table; to change the file, remove ")
        assert newest_sequence(served.url, "shop") == 2


def test_unauthorized_import_leaves_no_file(tmp_path: Path, file: Path) -> None:
    write_many(file, 3)
    keys = tmp_path / "keys.json"
    create = ["apikey", "create", str(keys), "--client-id", "loader", "--name", "n"]
    key = oncelog(*create, "--write", "deltas/mine", "--read", "deltas/mine").stdout.strip()
    with serving(tmp_path, "--set", f"api_keys.file={keys}") as served:
        status, _, errors = run_import(served.url, "other", file, "--token", key)
        assert (status, leftover_files(file)) == (2, [])
        hint = "the credential has no write access to this gateway; its grants must include it"
        assert errors[-1] == f"oncelog: forbidden: gateway: {hint}"
        assert run_import(served.url, "mine", file, "--token", key)[0] == 0


def rate_limited(retry_after_ms: int) -> dict[str, Any]:
    return {"error": "used up", "code": "RATE_LIMITED", "retryAfterMs": retry_after_ms}


def accept_all(received: list[dict[str, Any]]) -> dict[str, Any]:
    """Return an answer that commits all deltas of the last push."""
    results = [{"deltaId": "0" * 64, "sequence": 1, "duplicate": False} for _ in received[-1]["deltas"]]
    return {"results": results}


def test_rate_limited_batches_are_divided_after_a_long_delay(file: Path) -> None:
    write_many(file, 100)

    def handle(handler: BaseHTTPRequestHandler, _: int) -> None:
        if len(received[-1]["deltas"]) > 25:
            answer(handler, 429, rate_limited(40_000))
        else:
            answer(handler, 200, accept_all(received))

    with scripted(handle) as (url, received):
        status, [line], errors = run_import(url, "g", file, "--json")
    assert (status, json.loads(line)["committed"], errors) == (0, 100, [])
    assert [len(one["deltas"]) for one in received] == [100, 50, 25, 25, 25, 25]
    assert len({one["deltaId"] for push in received for one in push["deltas"]}) == 100


def test_rate_limited_batches_are_retried(file: Path) -> None:
    write_many(file, 30)

    def handle(handler: BaseHTTPRequestHandler, attempt: int) -> None:
        if attempt % 2:
            answer(handler, 429, rate_limited(10))
        else:
            answer(handler, 200, accept_all(received))

    with scripted(handle) as (url, received):
        status, _, errors = run_import(url, "g", file, "--batch", "10")
    assert (status, errors) == (0, ["oncelog: rate_limited: used up; retrying"])
    assert [len(one["deltas"]) for one in received] == [10] * 6


def test_too_large_batches_are_divided(tmp_path: Path, file: Path) -> None:
    write_many(file, 100)
    with serving(tmp_path, "--development", "--quiet", "--set", "limits.frame_bytes_max=3000") as served:
        assert run_import(served.url, "g", file)[0] == 0
        assert newest_sequence(served.url, "g") == 100


def test_file_changed_during_the_import_is_reported(file: Path) -> None:
    write_many(file, 20)

    def handle(handler: BaseHTTPRequestHandler, attempt: int) -> None:
        found = file.stat()
        os.utime(file, ns=(found.st_atime_ns, found.st_mtime_ns + 1_000_000))
        results = [{"deltaId": "0" * 64, "sequence": number, "duplicate": False} for number in range(10)]
        answer(handler, 200, {"results": results})

    with scripted(handle) as (url, received):
        status, _, [error] = run_import(url, "g", file, "--batch", "10")
    assert (status, len(received)) == (2, 1)
    assert error == f"oncelog: {file} changed while it was being read"


# --- large files --------------------------------------------------------------------------------------


def peak_kib(url: str, gateway: str, file: Path) -> int:
    """Run an import and return its peak memory."""
    program = (
        "import re\nfrom pathlib import Path\nfrom oncelog.cli import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
        # Not `ru_maxrss`, which includes the memory of the parent process.
        "print(re.search(r'VmHWM:\\s*(\\d+) kB', Path('/proc/self/status').read_text())[1])"
    )
    options = ["--infer", "--batch", "200", "--url", url]
    command = ["deltas", "import", gateway, "t", str(file), *OPTIONS, *options]
    done = oncelog(*command, program=program)
    return int(done.stdout.splitlines()[-1])


def test_import_memory_does_not_grow_with_the_file(server: ServerProcess, file: Path) -> None:
    def write(count: int) -> None:
        text = "x" * 1000
        file.write_text("id,n,text\n" + "".join(f"r{number},{number},{text}\n" for number in range(count)))

    write(1000)
    small = peak_kib(server.url, "small", file)
    write(20_000)
    assert file.stat().st_size > 20_000_000
    large = peak_kib(server.url, "large", file)
    assert newest_sequence(server.url, "large") == 20_000
    assert large - small < 8 * 1024, (small, large)


def test_import_shows_its_progress_on_a_terminal(server: ServerProcess, file: Path) -> None:
    write_many(file, 3000)
    ours, theirs = os.openpty()
    command = ["deltas", "import", "shown", "t", str(file), *OPTIONS, "--batch", "1000", "--url", server.url]
    try:
        with Command(*command, stdin=None, stderr=theirs) as process:
            output, _ = process.communicate(timeout=WAIT_S)  # the output fits into the terminal's buffer
        shown = os.read(ours, 65_536).decode()
    finally:
        os.close(theirs)
        os.close(ours)
    assert (process.returncode, output.startswith("3000 rows of ")) == (0, True)
    assert "checking" in shown
    assert re.search(r"importing 3,000 \([0-9,]+/s\)", shown)


# --- malformed files and options ----------------------------------------------------------------------


def run_dry(file: Path, *options: str) -> tuple[int, str, list[str]]:
    """Run `import --dry-run` in this process."""
    done = RUNNER.invoke(COMMAND, ["deltas", "import", "g", "t", str(file), *OPTIONS, *options, "--dry-run"])
    assert done.exception is None or isinstance(done.exception, SystemExit)
    return done.exit_code, done.stdout, done.stderr.splitlines()


def test_dry_run_prints_the_number_of_rows_and_the_types(file: Path) -> None:
    file.write_text("id,a,b\n1,2,x\n2,,y\n")
    assert run_dry(file, "--infer") == (0, f"2 rows of {file} can be imported\n  a: integer?\n  b: text\n", [])
    status, output, _ = run_dry(file, "--infer", "--json")
    assert (status, json.loads(output)) == (0, {"rows": 2, "types": {"a": "integer?", "b": "text"}})
    assert leftover_files(file) == []
    file.write_text("id\n")
    assert run_dry(file) == (0, f"0 rows of {file} can be imported\n", [])


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (b"", "line 1: must contain the column names"),
        (b"\n\n", "line 1: must contain the column names"),
        (b"key,a\n1,2\n", "--row-id: no such column: 'id'; the file has 'key', 'a'"),
        (b"id,a,a\n1,2,3\n", "line 1: two columns are named 'a'"),
        (b"id,a b\n1,2\n", "line 1: 'a b' is not a valid column name: .* with --rename \"a b=NAME\""),
        (b"id,\n1,2\n", "line 1: '' is not a valid column name: "),
        (b"id,1a\n1,2\n", "line 1: '1a' is not a valid column name: "),
        ("id,größe\n1,2\n".encode(), "line 1: 'größe' is not a valid column name: "),
        (b"id,a\n1,2\n2\n3,4\n", "line 3: has 1 fields, but line 1 has 2"),
        (b'id,a\n1,"x\ny"\n2,3,4\n', "line 4: has 3 fields, but line 1 has 2"),
        (b"id,a\n1,2\n,3\n", "line 3: id: the row has no id"),
        (b"id,a\n1,2\n%b,3\n" % (b"x" * 513), "line 3: id: an id must have at most 512 characters"),
        (b"id,a\n1,2\n2,\xff\n", "line 3: is not UTF-8, at byte 3"),
        (b"id,a\n\xe9,2\n", "line 2: is not UTF-8, at byte 1"),
        (b'id,a\n1,2\n2,"x\n3,4\n', 'line 3: a quoted field has no closing "'),
        (b'id,a\n1,"x"y\n', "line 2: ',' expected after '\"'"),
        (b"id,a\r1,2\r", "line 1: a carriage return is not followed by a line feed"),
        (b"id,n\n1,2\n2,x\n", "line 3: n: 'x' is not an integer"),
        (b"id,n\n1,\n", "line 2: n: '' is not an integer"),
        (
            b"id,n\n1,9007199254740993\n",
            "line 2: n: '9007199254740993' is an integer that would become 9007199254740992 as",
        ),
        (b"id,n\n\xef\xbb\xbf1,x\n", "line 2: n: 'x' is not an integer"),
        (b"id,n\n1,\x1b[2J\n", r"line 2: n: '\\x1b\[2J' is not an integer"),
    ],
)
def test_malformed_file_is_refused(file: Path, text: bytes, sentence: str) -> None:
    file.write_bytes(text)
    status, output, errors = run_dry(file, *(["--types", "n=integer"] if b"id,n" in text else []))
    assert (status, output) == (2, "")
    assert re.match(re.escape(f"oncelog: {file}: ") + sentence, errors[0])
    assert errors[-1].endswith("; nothing was sent")


def test_first_malformed_lines_are_reported(file: Path) -> None:
    file.write_text("id,n\n1,1\n2,x\n3\n,4\n5,5\n")
    status, _, errors = run_dry(file, "--types", "n=integer")
    assert status == 2
    assert [error.removeprefix(f"oncelog: {file}: ") for error in errors] == [
        "line 3: n: 'x' is not an integer",
        "line 4: has 1 fields, but line 1 has 2",
        "line 5: id: the row has no id",
        "3 of 5 lines with rows are invalid; nothing was sent",
    ]
    file.write_text("id,n\n" + "1,x\n" * 1000)
    assert len(run_dry(file, "--types", "n=integer")[2]) == 21


def test_malformed_last_line_prevents_the_whole_import(server: ServerProcess, file: Path) -> None:
    write_many(file, 3000)
    with file.open("a") as more:
        more.write("r3000,1\n")
    status, lines, errors = run_import(server.url, "wrong", file)
    assert (status, lines, newest_sequence(server.url, "wrong"), leftover_files(file)) == (2, [], 0, [])
    assert errors[0] == f"oncelog: {file}: line 3002: has 2 fields, but line 1 has 3"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--types", "a=date"], "--types: 'a=date' must be NAME=TYPE, and TYPE must be one of text, integer, number"),
        (["--types", "a"], "--types: 'a' must be NAME=TYPE"),
        (["--types", "a=text,a=json"], "--types: 'a' must not be repeated"),
        (["--rename", "a"], "--rename must be OLD=NEW"),
        (["--rename", "a=b c"], "--rename must be OLD=NEW"),
        (["--rename", "a=b", "--rename", "a=c"], "--rename: 'a' must not be repeated"),
        (["--delimiter", ",,"], "--delimiter must be one ASCII character"),
        (["--delimiter", '"'], "--delimiter must be one ASCII character"),
        (["--at", "yesterday"], "--at must be a time such as 2026-01-31T12:00:00Z, not 'yesterday'"),
        (["--at", "1969-01-01"], "--at must not be before 1970"),
        (["--client-id", ""], "--client-id must have 1 to 512 characters"),
    ],
)
def test_invalid_options_are_refused(file: Path, options: list[str], sentence: str) -> None:
    write_many(file, 1)
    status, output, [error] = run_dry(file, *options)
    assert (status, output) == (2, "")
    assert error.startswith(f"oncelog: {sentence}")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--types", "x=text"], "--types: no such column: 'x'; the file has 'n', 'name'"),
        (["--types", "id=text"], "--types: no such column: 'id'"),
        (["--rename", "x=y"], "--rename: no such column: 'x'; the file has 'id', 'n', 'name'"),
        (["--rename", "n=name"], "line 1: two columns are named 'name'"),
    ],
)
def test_options_that_do_not_fit_the_file_are_refused(file: Path, options: list[str], sentence: str) -> None:
    write_many(file, 1)
    status, output, [error] = run_dry(file, *options)
    assert (status, output) == (2, "")
    assert error.startswith(f"oncelog: {file}: {sentence}")


def test_unreadable_or_irregular_file_is_refused(tmp_path: Path) -> None:
    assert run_dry(tmp_path / "nowhere")[2] == [
        f"oncelog: {tmp_path / 'nowhere'} cannot be read: No such file or directory; check the path"
    ]
    assert run_dry(tmp_path)[2] == [f"oncelog: {tmp_path} cannot be read: Is a directory; name a file in it"]
    assert run_dry(Path("/dev/null"))[2] == ["oncelog: /dev/null must be a regular file, which can be read twice"]
    write_many(tmp_path / "a", 1)
    done: Any = RUNNER.invoke(COMMAND, ["deltas", "import", "g", "a b", str(tmp_path / "a"), *OPTIONS, "--dry-run"])
    assert (done.exit_code, done.stderr.startswith("oncelog: TABLE: must be an identifier")) == (2, True)
