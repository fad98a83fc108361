"""Is a file the log it says it is? `verify_file` goes through all of it, in one read transaction, in bounded memory.

Whoever can write to the file can also compute hashes: a history that was rewritten from some record on, or cut off, is
consistent in itself. It is found only by a head that was exported before and kept elsewhere.
"""

import os
import struct
from collections.abc import Iterator
from contextlib import closing
from typing import Any, Final

import msgspec

from oncelog.core.values import Record
from oncelog.errors import CorruptError
from oncelog.stores.about import About
from oncelog.stores.key_hash import SECRET_BYTES
from oncelog.stores.sqlite.findings import ContradictionError, ExportedHead, Finding, LaneMark, Lie, Passed, Progress
from oncelog.stores.sqlite.looking import looking_at
from oncelog.stores.sqlite.reading import heads
from oncelog.stores.sqlite.verifying_chain import Books, Chains, Rules, check_newest
from oncelog.stores.sqlite.verifying_index import IndexBooks, check_partitions, check_streams
from oncelog.stores.sqlite.verifying_keys import KeyBooks, Segments, check_keys
from oncelog.stores.sqlite.verifying_state import (
    ClientBooks,
    check_schema,
    check_side_state,
    check_structure,
    declared,
)

_UNREADABLE: Final = (msgspec.MsgspecError, ValueError, TypeError, ArithmeticError, LookupError, struct.error)
"""What reading a value raises that no log has written. Each is expected somewhere; here they are all damage."""


def verify_file(path: str | os.PathLike[str], head: ExportedHead | None = None) -> Iterator[Finding]:
    """Goes through a log. The last finding is a Lie, the first one found, or Passed; before it comes Progress.

    Raises NotALogError, NewerSchemaError or StoreUnavailableError for what cannot be looked at. A log may be in use
    meanwhile; its write-ahead log cannot be emptied until the verification ends.
    """
    try:
        with looking_at(os.fspath(path)) as (connection, file):
            yield from verify(connection, file, head)
    except ContradictionError as error:
        yield Lie(_printable(error), error.lane, error.position)
    except CorruptError as error:
        yield Lie(_printable(error))


def verify(connection: Any, file: About, head: ExportedHead | None = None) -> Iterator[Finding]:
    """The same on a connection inside a transaction. Raises ContradictionError in place of a Lie."""
    connection.text_factory = _text
    try:
        yield from _verify(connection, file, head)
    except _UNREADABLE as error:
        raise ContradictionError(f"something is stored that no log has written: {error}") from error


def verify_quickly(connection: Any) -> None:
    """SQLite's own check, and the newest of every lane only. Raises ContradictionError."""
    try:
        check_structure(connection)
        check_schema(connection)
        check_newest(connection)
    except _UNREADABLE as error:
        raise ContradictionError(f"something is stored that no log has written: {error}") from error


def head_of(connection: Any, file: About) -> ExportedHead:
    """The newest hashes of all lanes, to be kept elsewhere."""
    found = heads(connection).items()
    return ExportedHead(
        file.epoch, [LaneMark(lane, head.position, head.height, head.block_hash.hex()) for lane, head in found]
    )


class _AllBooks:
    def __init__(self, *books: Books) -> None:
        self._books = books

    def take(self, record: Record) -> None:
        for books in self._books:
            books.take(record)


def _verify(connection: Any, file: About, head: ExportedHead | None) -> Iterator[Finding]:
    yield Progress("structure")
    check_structure(connection)
    check_schema(connection)
    if len(file.index_secret) != SECRET_BYTES:
        raise ContradictionError(f"the secret of the key index has not {SECRET_BYTES} bytes")
    rules = Rules(file.settings, declared(connection))
    segments = Segments(connection, file.index_secret)
    indexes, keys = IndexBooks(), KeyBooks(segments)
    exported = {} if head is None else {mark.lane: mark for mark in head.lanes}
    with closing(ClientBooks(rules)) as clients:
        chains = Chains(connection, rules, _AllBooks(indexes, keys, clients), exported)
        yield from chains.follow()
        yield from check_partitions(connection, indexes)
        yield from check_streams(connection, indexes, rules)
        yield from check_keys(connection, keys, segments, rules)
        clients.check(connection)
    yield from check_side_state(connection, rules)
    if head is not None and head.epoch != file.epoch:
        raise ContradictionError(
            f"the log has epoch {file.epoch}, the exported head {head.epoch}: the log was restored from a backup since "
            "then, or is another one. (Every block that was exported is there, and has its hash.)"
        )
    yield Passed(
        records=chains.figures.records,
        lanes=len(segments.lanes),
        blocks=chains.figures.blocks,
        erased=chains.figures.erased,
        sealed_keys=keys.keys.rows,
        segments=len(segments.segments),
        epoch=file.epoch,
    )


def _text(data: bytes) -> str:
    """Damaged text is still shown, and never equal to text that a log has written."""
    return data.decode("utf-8", "surrogateescape")


def _printable(error: CorruptError) -> str:
    return str(error).encode("utf-8", "backslashreplace").decode()
