"""The verification of a log, from one end to the other, in one read transaction and in bounded memory.

Whoever can write to a log can also compute hashes: a history that was rewritten from some record on, or cut off, is
consistent in itself. It is found only by a head that was exported before and kept elsewhere.
"""

import struct
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Final

import msgspec

from oncelog.core.values import LaneHead, Record
from oncelog.errors import CorruptError
from oncelog.stores.about import About
from oncelog.stores.key_hash import SECRET_BYTES
from oncelog.stores.verifying.chains import Chains
from oncelog.stores.verifying.clients import ClientBooks
from oncelog.stores.verifying.findings import (
    ContradictionError,
    ExportedHead,
    Finding,
    LaneMark,
    Lie,
    Passed,
    Progress,
)
from oncelog.stores.verifying.indexes import IndexBooks, check_partitions, check_streams
from oncelog.stores.verifying.side_state import check_side_state, declared
from oncelog.stores.verifying.source import Books, Rules, Source

_UNREADABLE: Final = (msgspec.MsgspecError, ValueError, TypeError, ArithmeticError, LookupError, struct.error)
"""What reading a value raises that no log has written. Each is expected somewhere; here they are all damage."""


def verify(source: Source, head: ExportedHead | None = None) -> Iterator[Finding]:
    """Goes through a log. The last finding is Passed; raises ContradictionError at the first lie."""
    with what_is_unreadable():
        yield from _verify(source, head)


@contextmanager
def what_is_unreadable() -> Iterator[None]:
    """Raises ContradictionError for what no log has written."""
    try:
        yield
    except _UNREADABLE as error:
        raise ContradictionError(f"something is stored that no log has written: {error}") from error


def told(findings: Iterator[Finding]) -> Iterator[Finding]:
    """The same with a Lie at the end in place of the error."""
    try:
        yield from findings
    except ContradictionError as error:
        yield Lie(_printable(error), error.lane, error.position)
    except CorruptError as error:
        yield Lie(_printable(error))


def exported(about: About, heads: Mapping[int, LaneHead]) -> ExportedHead:
    """The newest hashes of all lanes, to be kept elsewhere."""
    lanes = [LaneMark(lane, head.position, head.height, head.block_hash.hex()) for lane, head in heads.items()]
    return ExportedHead(about.epoch, lanes)


class _AllBooks:
    def __init__(self, *books: Books) -> None:
        self._books = books

    def take(self, record: Record) -> None:
        for books in self._books:
            books.take(record)


def _verify(source: Source, head: ExportedHead | None) -> Iterator[Finding]:
    yield Progress("structure")
    source.check_structure()
    about = source.about
    if len(about.index_secret) != SECRET_BYTES:
        raise ContradictionError(f"the secret of the key index has not {SECRET_BYTES} bytes")
    policies = declared((name, declaration) for name, declaration in source.rows("policies"))
    leaps = source.leaps()
    if list(leaps) != sorted(set(leaps)):
        raise ContradictionError(f"the log's leaps are not in ascending order: {list(leaps)}")
    rules = Rules(about.settings, policies, leaps, source.gaps())
    indexes = IndexBooks()
    marks = {} if head is None else {mark.lane: mark for mark in head.lanes}
    with closing(ClientBooks(rules)) as clients:
        chains = Chains(source, rules, _AllBooks(indexes, source.keys, clients), marks)
        yield from chains.follow()
        yield from check_partitions(source, indexes)
        yield from check_streams(source, indexes, rules)
        yield from source.keys.check(rules)
        clients.check(source)
    yield from check_side_state(source, rules)
    if head is not None and head.epoch != about.epoch:
        raise ContradictionError(
            f"the log has epoch {about.epoch}, the exported head {head.epoch}: the log was restored from a backup "
            "since then, or is another one. (Every block that was exported is there, and has its hash.)"
        )
    yield Passed(
        records=chains.figures.records,
        restore_records=chains.figures.restore_records,
        lanes=chains.figures.lanes,
        blocks=chains.figures.blocks,
        erased=chains.figures.erased,
        epoch=about.epoch,
        **source.keys.figures(),
    )


def _printable(error: CorruptError) -> str:
    return str(error).encode("utf-8", "backslashreplace").decode()
