"""Record behaviour that users, operators and other programs rely on, apart from the protocols."""

import json
import re
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from hashlib import sha256
from pathlib import Path
from typing import Any, Final
from urllib.request import urlopen

from cli.server_process import DEVELOPMENT, serving
from databases import address_of, query
from deadlines import WAIT_S
from golden.commands import fixed_server, run_command, run_script
from scripts import start_script
from tools.site.reference import generate_page

ROOT: Final = Path(__file__).parents[2]
HERE: Final = Path(__file__).parent
_TABLE_ROW: Final = re.compile(r"^\| `([a-z_.]+)` \| `([^`]+)` \|", re.MULTILINE)


def record_openapi(directory: Path) -> dict[str, str]:
    """Record `/openapi.json` with one member per line, and the hash of its bytes."""
    with fixed_server(str(directory / "log.db"), *DEVELOPMENT) as server:
        body = _get(server.url + "/openapi.json")
    text = json.dumps(json.loads(body), indent=1, ensure_ascii=False)
    return {"openapi.json": text + "\n", "openapi.sha256": sha256(body).hexdigest() + "\n"}


def record_metrics(directory: Path) -> dict[str, str]:
    """Record the names, types, help texts and labels of the metrics, without values."""
    with fixed_server(str(directory / "log.db"), *DEVELOPMENT) as server:
        urlopen(server.url + "/v1/events?partition=a").read()  # noqa: S310 - counted below
        lines = _get(server.url + "/metrics").decode().splitlines()
    shown = [line if line.startswith("#") else line.rpartition(" ")[0] for line in lines]
    return {"metrics.txt": _lines([line for line in shown if "python_" not in line])}


def record_settings(directory: Path) -> dict[str, str]:
    """Record the names and defaults of the settings, from the generated page, which a test compares with the server."""
    page = generate_page("settings")
    return {"settings.txt": _lines(f"{name} = {default}" for name, default in _TABLE_ROW.findall(page))}


def record_python_names(directory: Path) -> dict[str, str]:
    """Record the public names of the packages with their signatures, and the logger names."""
    names = run_script(HERE / "python_names.py")
    loggers = run_script(HERE / "logger_names.py")
    return {"python-names.txt": names, "loggers.txt": loggers}


# --- schemas -----------------------------------------------------------------------------------------------


def record_sqlite_schemas(directory: Path) -> dict[str, str]:
    """Record the schemas of a new log file and of the clients' files."""
    # Use real clocks: the deltas client compares its clock with the server's, and gRPC computes deadlines from it.
    with serving(directory, grpc=True) as server:
        clients = (server.url, server.rpc_address, directory, "first")
        with start_script(ROOT / "tests/previous/use_clients.py", *clients) as process:
            said, _ = process.communicate(timeout=WAIT_S)
        assert process.returncode == 0, said
        assert server.stop() == 0
    found = {"schema-sqlite.sql": _sqlite_schema(directory / "log.db")}
    for name in ("events", "chat", "ledger", "deltas"):
        found[f"schema-client-{name}.sql"] = _sqlite_schema(directory / f"first-{name}")
    return found


def _sqlite_schema(path: Path) -> str:
    with closing(sqlite3.connect(path)) as connection:
        rows = connection.execute("SELECT type, name, tbl_name, sql FROM sqlite_master ORDER BY type, name").fetchall()
        pragmas = [
            f"-- {name}: {connection.execute(f'PRAGMA {name}').fetchone()[0]}"
            for name in ("application_id", "user_version", "encoding", "page_size", "journal_mode", "auto_vacuum")
        ]
    found = [f"-- {kind} {name} on {table}\n{sql or '-- automatic'}\n" for kind, name, table, sql in rows]
    return _lines([*pragmas, "", *found])


POSTGRES_QUERIES: Final = {
    "columns": """
        SELECT table_name, ordinal_position, column_name, data_type, collation_name, is_nullable, column_default,
               is_identity, character_maximum_length, is_generated, generation_expression
        FROM information_schema.columns WHERE table_schema = $1 ORDER BY table_name, ordinal_position""",
    "constraints": """
        SELECT conrelid::regclass::text, conname, pg_get_constraintdef(oid)
        FROM pg_constraint WHERE connamespace = $1::regnamespace AND conrelid <> 0 ORDER BY 1, 2""",
    "indexes": "SELECT tablename, indexname, indexdef FROM pg_indexes WHERE schemaname = $1 ORDER BY 1, 2",
    "relations": """
        SELECT relkind::text, relname, relpersistence::text, array_to_string(reloptions, ',')
        FROM pg_class WHERE relnamespace = $1::regnamespace ORDER BY 1, 2""",
    "functions": """
        SELECT proname, pg_get_functiondef(oid) FROM pg_proc WHERE pronamespace = $1::regnamespace ORDER BY 1""",
    "triggers": """
        SELECT tgrelid::regclass::text, tgname, pg_get_triggerdef(pg_trigger.oid)
        FROM pg_trigger JOIN pg_class ON pg_class.oid = tgrelid
        WHERE relnamespace = $1::regnamespace AND NOT tgisinternal ORDER BY 1, 2""",
}


def record_postgres_schema(directory: Path) -> dict[str, str]:
    """Record the schema of a new log from PostgreSQL's catalogs."""
    address = address_of(directory / "log.db")
    with fixed_server(address, *DEVELOPMENT) as server:
        _get(server.url + "/readyz")
    ((schema,),) = query(address, "SELECT current_schema()")
    found = []
    for title, statement in POSTGRES_QUERIES.items():
        found.append(f"# {title}")
        found += [" | ".join(_cell(value, schema) for value in row) for row in query(address, statement, schema)]
        found.append("")
    return {"schema-postgres.txt": _lines(found[:-1])}


def _cell(value: object, schema: str) -> str:
    return "-" if value is None else str(value).replace(f"{schema}.", "").replace(schema, "<schema>")


# --- histories ---------------------------------------------------------------------------------------------


def record_history(directory: Path) -> dict[str, str]:
    """Record verdicts, hashes and proofs of the fixed history in memory and in a file."""
    return _record_histories({"memory": ":memory:", "sqlite": str(directory / "log.db")})


def record_postgres_history(directory: Path) -> dict[str, str]:
    """Record verdicts, hashes and proofs of the fixed history in PostgreSQL."""
    return _record_histories({"postgres": address_of(directory / "history")})


def _record_histories(places: dict[str, str]) -> dict[str, str]:
    return {f"history-{kind}.txt": run_script(HERE / "fixed_history.py", place) for kind, place in places.items()}


# --- the command line --------------------------------------------------------------------------------------


def record_help(directory: Path) -> dict[str, str]:
    """Record `--help` of all commands. The help of each group lists its commands."""
    found: list[str] = []
    waiting: list[tuple[str, ...]] = [()]
    while waiting:
        words = waiting.pop(0)
        said = run_command(*words, "--help", cwd=directory).stdout
        found += [f"$ oncelog {' '.join((*words, '--help'))}", *(line.rstrip() for line in said.splitlines()), ""]
        waiting[:0] = [(*words, name) for name in _command_names(said)]
    return {"cli-help.txt": _lines(found[:-1])}


def _command_names(said: str) -> list[str]:
    _, _, commands = said.partition("─ Commands ")
    return re.findall(r"^│ ([a-z]+) ", commands, re.MULTILINE)


def _get(url: str) -> bytes:
    with urlopen(url) as response:  # noqa: S310 - a server of the test
        body: Any = response.read()
    assert isinstance(body, bytes)
    return body


def _lines(lines: "Sequence[str] | Any") -> str:
    return "".join(f"{line}\n" for line in lines)
