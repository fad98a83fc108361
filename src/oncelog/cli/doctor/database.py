"""Checks of a log in a PostgreSQL database. They use one session, which changes nothing."""

from typing import TYPE_CHECKING, Any, Final

from oncelog.cli.clock import check_clock
from oncelog.cli.doctor.findings import Check, Finding, format_bytes, ok, problem, warning
from oncelog.cli.output import format_duration
from oncelog.errors import NotALogError, OncelogError, StoreUnavailableError
from oncelog.storage.address import import_with_driver, redact_address
from oncelog.storage.clock import SystemClock

if TYPE_CHECKING:
    from oncelog.storage.inspect.postgres import DatabaseView

TIMEOUT_MS: Final = 10_000
"""Longest wait for a session with each host, and for all checks that use it."""
STANDBY_WAIT_S: Final = 5
"""A session that waits longer than this for a standby is reported."""
VERSION_MIN: Final = 14
SESSIONS_PER_SERVER: Final = 6
"""One for writing, one for listening, and up to four for reading."""
CLOCK_DIFFERENCE_MS_MAX: Final = 10_000
_NAMES: Final = (
    "server_version_num",
    "fsync",
    "full_page_writes",
    "synchronous_commit",
    "synchronous_standby_names",
    "autovacuum",
    "archive_mode",
    "max_connections",
    "superuser_reserved_connections",
)
_SYNCHRONOUS_STATES: Final = ("sync", "quorum")
_MONITOR_REMEDY: Final = "To see more, grant the user the role pg_monitor."


def check_database(address: str, is_created_later: bool, jump_ms_max: int, size_max: int) -> Check:
    """Check the database server, its settings, and the log. With `is_created_later`, the log need not exist."""
    import_with_driver("oncelog.storage.inspect.postgres")
    from oncelog.storage.inspect.postgres import open_status_view  # noqa: PLC0415 - needs the driver

    name = redact_address(address)
    try:
        with open_status_view(address, TIMEOUT_MS) as view:
            yield from _check_server(view)
            yield from _check_log(view, name, is_created_later=is_created_later, jump_ms_max=jump_ms_max)
            yield from _check_size(view, size_max)
    except StoreUnavailableError as error:
        remedy = "Check the address, the network and the database server."
        yield problem("store", str(error), remedy)


def _check_server(view: "DatabaseView") -> Check:
    settings: dict[str, str] = dict(view.iterate_rows("server_settings", list(_NAMES)))
    major = int(settings["server_version_num"]) // 10_000
    if major < VERSION_MIN:
        message = f"PostgreSQL {major} is too old: Oncelog needs {VERSION_MIN} or newer"
        yield problem("versions", message, "Upgrade the database server.")
    else:
        yield ok("versions", f"PostgreSQL {major}")
    standbys = [row for row in view.iterate_rows("standbys") if row[1] in ("", "streaming")]
    yield from judge_durability(settings, standbys)
    [(is_waiting,)] = view.iterate_rows("waits_for_long", STANDBY_WAIT_S)
    if is_waiting:
        yield problem(
            "durability",
            "sessions have been waiting for a standby, so writes are not answered",
            "Start the standby, or correct synchronous_standby_names. Do not terminate the waiting sessions.",
        )
    if settings["autovacuum"] == "off":
        yield warning("database", "autovacuum is off, so Oncelog's tables grow", "Set autovacuum = on.")
    yield from _check_sessions(view, settings)
    yield judge_archive(settings, view.fetch_first("archiver"))


def judge_durability(settings: dict[str, str], standbys: list[Any]) -> Check:
    """Yield the findings for the settings that decide whether an acknowledged write can be lost."""
    from oncelog.storage.postgres.connection import WEAK_COMMIT_MODES  # noqa: PLC0415 - needs the driver

    for name in ("fsync", "full_page_writes"):
        if settings[name] == "off":
            message = f"{name} is off: a crash of the database's machine can lose or damage the log"
            yield problem("durability", message, f"Set {name} = on, and restart the database server.")
    if settings["synchronous_commit"] in WEAK_COMMIT_MODES:
        yield warning(
            "durability",
            f"synchronous_commit is {settings['synchronous_commit']}. Oncelog raises it for its own sessions only",
            "Set synchronous_commit = on for applications that use oncelog.share.",
        )
    wanted = settings["synchronous_standby_names"]
    names = ", ".join(row[0] for row in standbys if row[0])
    if standbys and not any(row[2] for row in standbys):
        message = f"the database has standbys ({len(standbys)}), but this user may not see whether they are synchronous"
        yield warning("durability", message, _MONITOR_REMEDY)
    elif wanted and not any(row[2] in _SYNCHRONOUS_STATES for row in standbys):
        yield problem(
            "durability",
            f"commits wait for standbys ({wanted}), but none of them is connected",
            "Start a standby, or correct synchronous_standby_names.",
        )
    elif wanted:
        yield ok("durability", f"commits wait for standbys ({wanted}); connected: {names}")
    elif standbys:
        yield warning(
            "durability",
            f"commits do not wait for the standbys ({names}), so a fail-over can lose acknowledged writes",
            "Set synchronous_standby_names.",
        )
    else:
        yield ok("durability", "no standby: without a backup, a lost disk loses the log")


def _check_sessions(view: "DatabaseView", settings: dict[str, str]) -> Check:
    [(used,)] = view.iterate_rows("session_count")
    highest = int(settings["max_connections"]) - int(settings["superuser_reserved_connections"])
    text = f"{used} of {highest} connections are in use"
    if highest - used < SESSIONS_PER_SERVER:
        yield warning(
            "database",
            f"{text}, and each Oncelog server needs up to {SESSIONS_PER_SERVER}",
            "Raise max_connections, or close other connections.",
        )
    else:
        yield ok("database", text)


def judge_archive(settings: dict[str, str], times: Any) -> Finding:
    """Return the finding for the archive of the write-ahead log, the only backup that the database reports."""
    archived_ms, failed_ms = times or (None, None)
    if settings["archive_mode"] == "off":
        return warning(
            "backup",
            "the database archives no write-ahead log (archive_mode is off)",
            "Ignore this if the database is backed up in another way, such as pg_dump or your provider's backups. "
            "Otherwise set up pg_basebackup and an archive.",
        )
    if failed_ms is not None and failed_ms > (archived_ms or 0):
        return problem("backup", "the last attempt to archive the write-ahead log failed", "Check archive_command.")
    if archived_ms is None:
        return warning("backup", "the database has not archived any write-ahead log yet", "Check archive_command.")
    age_ms = max(0, SystemClock().wall_ms() - archived_ms)
    return ok("backup", f"the write-ahead log was last archived {format_duration(age_ms)} ago")


def _check_log(view: "DatabaseView", name: str, *, is_created_later: bool, jump_ms_max: int) -> Check:
    from oncelog.storage.postgres.database import check_database as check_encoding  # noqa: PLC0415 - needs the driver
    from oncelog.storage.postgres.database import load_metadata  # noqa: PLC0415
    from oncelog.storage.postgres.statements import SCHEMA_VERSION  # noqa: PLC0415

    try:
        view.call(check_encoding, name)
        view.metadata = view.call(load_metadata, name)
    except NotALogError as error:
        if is_created_later:
            yield ok("store", f"{name} can be reached and has no log yet: the server creates it")
        else:
            yield problem("store", str(error), "Correct the address, or its search_path.")
        return
    except OncelogError as error:
        yield problem("store", str(error))
        return
    metadata = view.metadata
    if metadata.schema_version < SCHEMA_VERSION:
        yield judge_older_schema(name, metadata.schema_version, SCHEMA_VERSION)
        return
    yield ok("store", f"{name} has a log: epoch {metadata.epoch}, schema {metadata.schema_version}")
    status = view.get_clock_status()
    has_jumped, sentence = check_clock(status, jump_ms_max)
    yield judge_clock(has_jumped=has_jumped, is_behind=status.newest_ms > status.now.time_ms, sentence=sentence)
    difference = judge_clock_difference(status.now.time_ms, SystemClock().wall_ms())
    if difference is not None:
        yield difference


def judge_clock_difference(database_ms: int, machine_ms: int) -> Finding | None:
    """Return the finding for two clocks that differ, or None if they agree."""
    difference_ms = database_ms - machine_ms
    if abs(difference_ms) <= CLOCK_DIFFERENCE_MS_MAX:
        return None
    side = "ahead of" if difference_ms > 0 else "behind"
    return warning(
        "clock",
        f"the database's clock is {format_duration(abs(difference_ms))} {side} the clock of this machine",
        "Synchronise both with NTP. Credentials expire by the server's clock, and keys by the database's clock.",
    )


def judge_older_schema(name: str, found: int, newest: int) -> Finding:
    """Return the finding for a log that the next program migrates."""
    return warning(
        "store",
        f"{name} has schema {found}, and this version writes schema {newest}",
        "The next program of this version that opens the log migrates it. Upgrade all programs that use it first.",
    )


def judge_clock(*, has_jumped: bool, is_behind: bool, sentence: str) -> Finding:
    """Return the finding for a log's clock. `sentence` is the output of `oncelog clock`."""
    if has_jumped:
        return problem("clock", sentence.replace("with --confirm", "with `oncelog clock LOG --confirm`"))
    return warning("clock", sentence, "Correct the clock.") if is_behind else ok("clock", sentence)


def _check_size(view: "DatabaseView", size_max: int) -> Check:
    if size_max:
        yield judge_size(sum(size for _, size in view.iterate_rows("sizes")), size_max)


def judge_size(size: int, size_max: int) -> Finding:
    """Return the finding for the size of a log with `disk.store_bytes_max`."""
    text = f"the log has {format_bytes(size)} of {format_bytes(size_max)} (disk.store_bytes_max)"
    if size > size_max:
        return problem("disk", f"{text}, so the server refuses new writes", "Raise the limit if the disk has space.")
    return warning("disk", text, "Plan for more space.") if size > 0.9 * size_max else ok("disk", text)
