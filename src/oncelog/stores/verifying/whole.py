"""The verification of a log, from one end to the other, in one read transaction and in bounded memory.

Whoever can write to a log can also compute hashes: a history that was rewritten from some record on, or cut off, is
consistent in itself. It is found only by a head that was exported before and kept elsewhere.
"""

import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Final

import msgspec

from oncelog.core.values import LaneHead, Record
from oncelog.errors import CorruptError
from oncelog.stores.about import About
from oncelog.stores.key_hash import SECRET_BYTES
from oncelog.stores.verifying.chains import Chains
from oncelog.stores.verifying.comparison import Comparison
from oncelog.stores.verifying.findings import (
    DEFAULT_OPTIONS,
    ContradictionError,
    ExportedHead,
    Finding,
    LaneMark,
    Lie,
    Options,
    Passed,
    Progress,
    SideStateError,
)
from oncelog.stores.verifying.indexes import IndexBooks, check_partitions, check_streams
from oncelog.stores.verifying.replay import SideStateReplay
from oncelog.stores.verifying.scratch import Scratch, directories_of
from oncelog.stores.verifying.side_state import check_side_state, declared
from oncelog.stores.verifying.source import Books, Rules, Source

_UNREADABLE: Final = (msgspec.MsgspecError, ValueError, TypeError, ArithmeticError, LookupError, struct.error)
"""What reading a value raises that no log has written. Each is expected somewhere; here they are all damage."""


def verify(
    source: Source, head: ExportedHead | None = None, options: Options = DEFAULT_OPTIONS, beside: str | None = None
) -> Iterator[Finding]:
    """Goes through a log. The last finding is Passed; raises ContradictionError at the first lie.

    `beside` is the directory of a log in a file: the temporary file is made there unless the options or `TMPDIR` name
    another one.
    """
    with what_is_unreadable():
        yield from _verify(source, head, options, directories_of(options.temp_dir, beside))


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
    except SideStateError as error:
        named = tuple(_printable(one) for one in error.findings)
        yield Lie(_printable(error), error.lane, findings=named, findings_total=error.total)
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


def _verify(
    source: Source, head: ExportedHead | None, options: Options, directories: Sequence[str]
) -> Iterator[Finding]:
    yield Progress("structure")
    yield from source.check_structure()
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
    with closing(Scratch(about.settings, directories)) as scratch:
        replay = SideStateReplay(rules, scratch, with_effects=options.side_state)
        chains = Chains(source, rules, _AllBooks(indexes, source.keys, replay), marks)
        yield from chains.follow()
        replay.flush()
        yield from check_partitions(source, indexes)
        yield from check_streams(source, indexes, rules)
        yield from source.keys.check(rules)
        yield from check_side_state(source, rules)
        comparison = Comparison(source, scratch, with_effects=options.side_state)
        yield from comparison.run()
    if head is not None and head.epoch != about.epoch:
        raise ContradictionError(
            f"the log has epoch {about.epoch}, the exported head {head.epoch}: the log was restored from a backup "
            "since then, or is another one. (Every block that was exported is there, and has its hash.)"
        )
    yield Passed(
        records=chains.figures.records,
        restore_records=chains.figures.restore_records,
        audit_records=chains.figures.audit_records,
        lanes=chains.figures.lanes,
        blocks=chains.figures.blocks,
        erased=chains.figures.erased,
        epoch=about.epoch,
        same=comparison.same,
        not_checkable=comparison.unknown,
        **source.keys.figures(),
    )


def _printable(error: CorruptError | str) -> str:
    return str(error).encode("utf-8", "backslashreplace").decode()
