"""Progress, findings and summary of a verification, and the exported head to compare a log with."""

import struct
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Final

import msgspec
from msgspec import Struct

from oncelog.core.proof import HASH_BYTES
from oncelog.error_translation import translate_raised
from oncelog.errors import CorruptError, OncelogError

HASH_DIGITS: Final = 2 * HASH_BYTES
_DAMAGE_ERRORS: Final = (msgspec.MsgspecError, ValueError, TypeError, ArithmeticError, LookupError, struct.error)
"""Errors raised if a stored value cannot be decoded. During a verification, all of them mean damage."""


class StepProgress(Struct, frozen=True):
    """Progress of a step."""

    step: str
    done: int = 0
    total: int = 0
    """0 if the total is unknown."""


ReportProgress = Callable[[StepProgress], None]


class Inconsistency(Struct, frozen=True):
    """The first inconsistency in a log, at which the verification stops."""

    message: str
    lane: int | None = None
    position: int | None = None
    findings: tuple[str, ...] = ()
    """Entries of side state that differ from the records, at most `comparison.FINDINGS_MAX`."""
    findings_total: int = 0
    """Total number of entries that differ."""


class VerificationSummary(Struct):
    """Counts from a verification that found no inconsistency. The verification steps fill them in."""

    records: int = 0
    """Records, including restore records."""
    lanes: int = 0
    """Lanes that have been written to."""
    blocks: int = 0
    erased: int = 0
    epoch: str = ""
    keys: int = 0
    """Keys and client sequences, which are used to look up records."""
    sealed_keys: int = 0
    """Keys in the segments of a file. The newest keys are not sealed yet, and a database has no segments."""
    segments: int = 0
    restore_records: int = 0
    audit_records: int = 0
    same: dict[str, int] = {}
    """Entries of side state that match the records, by table."""
    not_checkable: dict[str, int] = {}
    """Entries that come from records with unknown content, which was erased or compacted."""


Finding = StepProgress | Inconsistency | VerificationSummary


class InconsistencyError(CorruptError):
    """Stops the verification at the first inconsistency."""

    def __init__(
        self,
        message: str,
        lane: int | None = None,
        position: int | None = None,
        findings: tuple[str, ...] = (),
        findings_total: int = 0,
    ) -> None:
        """Pass `findings` for side-state entries that differ. Each includes its lane, so the message does not."""
        place = f"lane {lane}: " if position is None else f"lane {lane}, position {position}: "
        super().__init__(message if lane is None or findings else place + message)
        self.lane = lane
        self.position = position
        self.findings = findings
        self.findings_total = findings_total


def require(is_consistent: bool, finding: str, lane: int | None = None, position: int | None = None) -> None:
    """Raise InconsistencyError with the finding unless a condition holds."""
    if not is_consistent:
        raise InconsistencyError(finding, lane, position)


def translate_damage() -> AbstractContextManager[None]:
    """Raise InconsistencyError for a stored value that cannot be decoded."""
    return translate_raised(
        _DAMAGE_ERRORS, lambda error: InconsistencyError(f"a stored value cannot be decoded: {error}")
    )


class ExportedLane(Struct, frozen=True):
    """The head of a lane at the time of the export."""

    lane: int
    position: int
    height: int
    block_hash: str
    """Hexadecimal."""

    def __post_init__(self) -> None:
        if len(self.block_hash) != HASH_DIGITS or len(bytes.fromhex(self.block_hash)) != HASH_BYTES:
            raise ValueError(f"block_hash must have {HASH_DIGITS} hexadecimal digits")


class ExportedHead(Struct, frozen=True):
    """The newest hashes of all lanes. Keep them where the operator of the log cannot change them."""

    epoch: str
    lanes: list[ExportedLane]


def decode_exported_head(text: bytes, name: str = "the document") -> ExportedHead:
    """Decode the output of `oncelog head`, in a file of this name. Raises OncelogError for other input."""
    try:
        return msgspec.json.decode(text, type=ExportedHead)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise OncelogError(f"{name} is not an exported head: {error}; `oncelog head` prints one") from error


class VerifyOptions(Struct, frozen=True):
    """Options of a verification."""

    side_state: bool = True
    """Rebuild entities, relationships and rows from the records, and compare them."""
    temp_dir: str | None = None
    """Directory for the temporary file. None selects `TMPDIR` or the log's directory."""


DEFAULT_OPTIONS: Final = VerifyOptions()
