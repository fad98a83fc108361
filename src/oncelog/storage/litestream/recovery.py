"""Reading a backup target: restore its newest state, or the state at an earlier time.

Litestream's own point-in-time restore uses the time at which it copied a change, not the time of the commit, and
requests the metadata of every file. This module therefore lists the files, restores to a transaction, and compares the
log times of the restored commits with the requested time.
"""

from collections.abc import Callable
from datetime import UTC, datetime
from operator import attrgetter
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from oncelog.core.rules.leaps import choose_leap_number, find_highest_number, find_last_commit_ms
from oncelog.errors import CorruptError, NotALogError, StoreError
from oncelog.file_modes import OWNER_ONLY
from oncelog.storage.backups import RestoreResult, check_destination_free, restore
from oncelog.storage.clock import SystemClock
from oncelog.storage.litestream.history import compare_histories
from oncelog.storage.litestream.program import NoBackupError, run, write_config
from oncelog.storage.litestream.target import BackupTarget
from oncelog.storage.metadata import Operator, ReplacedLog
from oncelog.storage.queries.records import load_heads
from oncelog.storage.sqlite.partial_copy import RECOVERED_NAMES, open_partial_copy
from oncelog.storage.sqlite.query_driver import run_query
from oncelog.storage.sqlite.read_transaction import open_read_transaction
from oncelog.storage.verify.findings import ReportProgress, StepProgress

_NEWEST_NAME, _EARLIER_NAME, _PROBE_NAME, _CONFIG_NAME = RECOVERED_NAMES


_CHOOSE_TARGET: Final = "Choose another directory or prefix"
_REMEDIES: Final = {
    "ended": ". If a restore or `oncelog epoch --renew` has started the history of this log, and no log with the "
    "earlier one is backed up any more, add --take-over once",
    "diverged": ", or restore the log from this backup",
}
"""What else a user can do about a target that contains a different history, by `HistoryMatch.relation`."""


class RestorePoint(Struct, frozen=True):
    """A Litestream transaction to which the target can be restored, and its approximate time."""

    txid: int
    time_ms: int
    size: int
    """Size of the lowest-level file that ends with the transaction."""


class Recovered(Struct, frozen=True):
    """A log restored from the target into a temporary file, and the newest history in the target."""

    path: Path
    newest: ReplacedLog
    newest_ms: int
    """Time of the newest commit in the file, or of the log's creation."""


class _Change(Struct):
    """An entry in the output of `litestream ltx`."""

    level: int
    min_txid: str
    max_txid: str
    size: int
    timestamp: datetime


class _History(Struct):
    epoch: str
    highest_number: int
    lowest_above: int
    newest_ms: int


class TargetReader:
    """Restores states of a target into a directory."""

    def __init__(self, target: BackupTarget, directory: Path, timeout_s: float | None = None) -> None:
        """`timeout_s` limits the time of each call of Litestream."""
        self._target = target
        self._timeout_s = timeout_s
        self._directory = directory
        self._config = directory / _CONFIG_NAME
        self._log = directory / "log"
        """Path of the log in the configuration, which identifies the target. No such file exists."""
        write_config(self._config, {"dbs": [{"path": str(self._log), "replica": target.replica}]})

    def list_points(self) -> list[RestorePoint]:
        """Return the points in ascending order. Raises BackupError."""
        arguments = ("ltx", "-config", self._config, "-no-expand-env", "-level", "all", "-json", self._log)
        changes = msgspec.json.decode(run(self._target, *arguments, timeout_s=self._timeout_s), type=list[_Change])
        # Several levels contain the same transactions; the lowest level has the most precise time.
        changes.sort(key=attrgetter("level"), reverse=True)
        ends = {int(change.max_txid, 16): change for change in changes}
        return [
            RestorePoint(txid, int(change.timestamp.timestamp() * 1000), change.size)
            for txid, change in sorted(ends.items())
        ]

    def restore(self, path: Path, txid: int | None = None) -> None:
        """Restore the newest state, or the state after a transaction. Raises NoBackupError and BackupError."""
        wanted = () if txid is None else ("-txid", f"{txid:016x}")
        arguments = ("restore", "-config", self._config, "-no-expand-env", *wanted, "-o", path, self._log)
        run(self._target, *arguments, timeout_s=self._timeout_s)

    def recover(self, at_ms: int | None, report: ReportProgress) -> Recovered:
        """Restore the newest state or, with `at_ms`, the newest state without later commits."""
        report(StepProgress("reading the backup"))
        path = self._directory / _NEWEST_NAME
        self.restore(path)
        newest = self._read_history(path)
        replaced = ReplacedLog(newest.epoch, newest.highest_number, newest.lowest_above)
        if at_ms is None or newest.newest_ms <= at_ms:
            return Recovered(path, replaced, newest.newest_ms)
        path.unlink()  # each state of a large log takes up a lot of space
        found = self._directory / _EARLIER_NAME
        found_ms = self._search(at_ms, newest.newest_ms, found, report)
        return Recovered(found, replaced, found_ms)

    def _search(self, at_ms: int, newest_ms: int, found: Path, report: ReportProgress) -> int:
        """Restore the newest state without commits after `at_ms`. Returns the time of its newest commit."""
        probe = self._directory / _PROBE_NAME
        found_ms, oldest_ms = -1, newest_ms

        def is_early_enough(point: RestorePoint) -> bool:
            nonlocal found_ms, oldest_ms
            report(StepProgress("reading the backup"))
            probe.unlink(missing_ok=True)
            try:
                self.restore(probe, point.txid)
            except NoBackupError:
                return True  # older than the oldest snapshot
            probe_ms = self._read_history(probe).newest_ms
            if probe_ms > at_ms:
                oldest_ms = min(oldest_ms, probe_ms)
                return False
            probe.replace(found)
            found_ms = probe_ms
            return True

        # The newest point is left out: it has already been restored and is too new.
        find_last(self.list_points()[:-1], at_ms, is_early_enough)
        probe.unlink(missing_ok=True)
        if found_ms < 0:
            reached = datetime.fromtimestamp(oldest_ms // 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            raise NoBackupError(
                f"{self._target.name} contains no state that is old enough: the oldest one ends at {reached}"
            )
        return found_ms

    def _read_history(self, path: Path) -> _History:
        try:
            with open_read_transaction(str(path), allow_older=True) as (connection, metadata):
                heads = run_query(connection, load_heads).values()
                return _History(
                    metadata.epoch,
                    find_highest_number(heads),
                    choose_leap_number(heads, metadata.created_ms, SystemClock().wall_ms()),
                    find_last_commit_ms(heads, metadata.created_ms),
                )
        except NotALogError:
            raise NotALogError(f"{self._target.name} contains an SQLite database that is not a log") from None
        except CorruptError as error:
            raise CorruptError(f"{self._target.name} is damaged: {error}") from error


def check_same_log(target: BackupTarget, log: str, state: Path, report: ReportProgress, *, take_over: bool) -> str:
    """Raise StoreError if the target contains commits that the log does not have. Returns the log's epoch.

    With `take_over`, the target may contain an epoch that the log has ended.

    Restores the target's newest state into a temporary file, unless Litestream wrote that state in an earlier run for
    this log and still has it in its `state` directory.
    """
    with open_read_transaction(log) as (_, metadata):
        epoch = metadata.epoch
    with open_partial_copy(Path(log)) as place:
        reader = TargetReader(target, place.parent)
        points = reader.list_points()
        if points and not is_last_written(points, state, epoch):
            match = compare_histories(str(reader.recover(None, report).path), log)
            difference = match.describe_difference(target.name, log)
            if difference is not None and not (match.relation == "ended" and take_over):
                raise StoreError(f"{difference}. {_CHOOSE_TARGET}{_REMEDIES.get(match.relation, '')}.")
    return epoch


def get_marker(state: Path) -> Path:
    """Return the path of the file with the epoch that Litestream last wrote with this state directory."""
    return state.with_name(f"{state.name}.epoch")


def is_last_written(points: list[RestorePoint], state: Path, epoch: str) -> bool:
    """Return whether the target ends with the last change that Litestream wrote with this state directory, and in this
    epoch."""
    found = [state / "ltx" / "0" / f"{point.txid:016x}-{point.txid:016x}.ltx" for point in points[-1:]]
    try:
        return get_marker(state).read_text() == epoch and found[0].stat().st_size == points[-1].size
    except (OSError, IndexError):
        return False


def find_last(
    points: list[RestorePoint], at_ms: int, is_early_enough: Callable[[RestorePoint], bool]
) -> RestorePoint | None:
    """Return the last point for which the function returns true, or None.

    The points are sorted: if one of them is too late, so are all points after it. Each call restores a state, so the
    search starts at the point whose time is nearest, and doubles its steps.
    """
    low, high = -1, len(points)
    probe, step = sum(point.time_ms <= at_ms for point in points) - 1, 1
    while high - low > 1:
        probe = min(max(probe, low + 1), high - 1)
        if is_early_enough(points[probe]):
            low = probe
            probe = low + step if high == len(points) else (low + high) // 2
        else:
            high = probe
            probe = high - step if low < 0 else (low + high) // 2
        step *= 2
    return points[low] if low >= 0 else None


def restore_from_target(  # noqa: PLR0913 - the options of the command
    target: BackupTarget,
    destination: str,
    report: ReportProgress,
    *,
    at_ms: int | None = None,
    force: bool = False,
    full: bool = False,
    above: int | None = None,
    file_mode: int = OWNER_ONLY,
    operator: Operator = Operator(),
) -> tuple[RestoreResult, int]:
    """Restore a log from a target as `backups.restore` does. Also returns the time of the newest restored commit.

    New numbers start above the highest number in the target's newest state, and above any number that may have been
    assigned since.
    """
    path = Path(destination)
    check_destination_free(path, "", force=force)
    with open_partial_copy(path) as place:
        recovered = TargetReader(target, place.parent).recover(at_ms, report)
        result = restore(
            str(recovered.path),
            destination,
            report,
            name=target.name,
            lost=recovered.newest,
            force=force,
            full=full,
            above=above,
            file_mode=file_mode,
            operator=operator,
        )
    return result, recovered.newest_ms
