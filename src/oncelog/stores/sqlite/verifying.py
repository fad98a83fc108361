"""Is a file the log it says it is? `verify_file` goes through all of it, in one read transaction, in bounded memory."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from oncelog.stores.about import About
from oncelog.stores.sqlite.looking import looking_at
from oncelog.stores.sqlite.verifying_source import FileSource
from oncelog.stores.sqlite.verifying_structure import check_newest, check_schema, check_structure
from oncelog.stores.verifying import whole
from oncelog.stores.verifying.findings import DEFAULT_OPTIONS, ExportedHead, Finding, Options


def verify_file(
    path: str | os.PathLike[str], head: ExportedHead | None = None, options: Options = DEFAULT_OPTIONS
) -> Iterator[Finding]:
    """Goes through a log. The last finding is a Lie, the first one found, or Passed; before it comes Progress.

    Raises NotALogError, NewerSchemaError or StoreUnavailableError for what cannot be looked at. A log may be in use
    meanwhile; its write-ahead log cannot be emptied until the verification ends.
    """
    yield from whole.told(_verify_file(os.fspath(path), head, options))


def _verify_file(path: str, head: ExportedHead | None, options: Options) -> Iterator[Finding]:
    with looking_at(path) as (connection, file):
        yield from verify(connection, file, head, options, str(Path(path).absolute().parent))


def verify(
    connection: Any,
    file: About,
    head: ExportedHead | None = None,
    options: Options = DEFAULT_OPTIONS,
    beside: str | None = None,
) -> Iterator[Finding]:
    """The same on a connection inside a transaction. Raises ContradictionError in place of a Lie."""
    with whole.what_is_unreadable():
        source = FileSource(connection, file)
    yield from whole.verify(source, head, options, beside)


def verify_quickly(connection: Any) -> None:
    """SQLite's own check, and the newest of every lane only. Raises ContradictionError."""
    with whole.what_is_unreadable():
        check_structure(connection)
        check_schema(connection)
        check_newest(connection)
