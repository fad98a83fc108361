"""The command: chooses the checks for a settings file, a log or a server."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from msgspec import Struct

from oncelog.cli.backup import Endpoint, is_backup_url, parse_backup_target
from oncelog.cli.doctor.backup_age import check_backup_file, check_backup_target, check_configured_backup
from oncelog.cli.doctor.configuration import (
    check_certificate,
    check_credentials,
    check_open_files,
    check_schemas,
    check_settings,
    check_settings_file,
    check_ticket_key,
)
from oncelog.cli.doctor.database import check_database
from oncelog.cli.doctor.findings import Check, Finding, format_findings, is_ok, problem, run_checks
from oncelog.cli.doctor.log_file import FileExpectations, check_log_file
from oncelog.cli.doctor.server import check_ports, check_remote
from oncelog.cli.doctor.versions import check_packages, check_sqlite
from oncelog.cli.output import print_result
from oncelog.cli.serve import get_settings_environment
from oncelog.cli.server_options import (
    DEFAULT_SOURCE,
    ProfileName,
    Remote,
    ServerOptions,
    Token,
    TokenFile,
    build_remote,
    choose_server,
)
from oncelog.cli.terminal import EXIT_FOUND_NOTHING, AsJson
from oncelog.cli.times import parse_duration_ms
from oncelog.engine.write_gate import DISK_DEFAULTS
from oncelog.errors import OncelogError, StoreError
from oncelog.file_modes import parse_file_mode
from oncelog.storage.address import check_scheme, is_address
from oncelog.storage.clock import JUMP_MS_MAX
from oncelog.storage.litestream.target import BackupTarget
from oncelog.storage.sqlite.read_transaction import open_read_transaction

if TYPE_CHECKING:
    from oncelog.server.settings import ServerSettings

_NO_DATABASE_BACKUP: Final = "--backup is for a log in a file; a database is backed up with its own tools"


class _BackupOptions(Struct, frozen=True):
    source: str | None
    target: BackupTarget | None
    """The target that `source` names, unless it names a file."""
    age_ms_max: int | None

    def check(self, log: str) -> Check:
        """Check the backup of a log in a file, if the log exists."""
        if not Path(log).exists():
            return
        if self.target is not None:
            yield from check_backup_target(self.target, log, self.age_ms_max)
        elif self.source is not None:
            yield from check_backup_file(self.source, log, self.age_ms_max)
        else:
            yield from check_configured_backup(log, self.age_ms_max)


def doctor(  # noqa: PLR0913, PLR0917 - the options of a command
    log: Annotated[
        str | None,
        typer.Argument(help="A log without a server: a file, or postgresql://…", metavar="LOG", show_default=False),
    ] = None,
    config: Annotated[
        str | None, typer.Option(metavar="FILE", help="Settings of a server: checks them, their files and the log.")
    ] = None,
    url: Annotated[str | None, typer.Option(metavar="URL", help="Address of a running server.")] = None,
    token: Token = None,
    token_file: TokenFile = None,
    profile: ProfileName = None,
    backup: Annotated[
        str | None,
        typer.Option(
            metavar="BACKUP",
            help="A backup of the log: a file, file://DIR or s3://BUCKET/PREFIX. Default: the continuous backup of "
            "this machine.",
            show_default=False,
        ),
    ] = None,
    max_age: Annotated[
        str,
        typer.Option(
            "--max-age",
            help="Allowed age of a backup that lacks commits. Default: 26h, or 1h for a URL.",
            metavar="DURATION",
            show_default=False,
        ),
    ] = "",
    endpoint: Endpoint = None,
    as_json: AsJson = False,
) -> None:
    """Check a deployment, and say for each finding what to do. The checks change nothing.

    Name a settings file, a log or the URL of a server; a settings file and a URL can be combined. Each line is one
    check: ok, warning or problem. The exit status is 1 if there is a problem. A server or
    database that does not answer is a problem after ten seconds.

    Example:  oncelog doctor --config /etc/oncelog/oncelog.toml --backup s3://backups/orders

    Example:  oncelog doctor --url https://events.example.org --token-file admin.key

    Example:  oncelog doctor orders.db --json
    """
    server = ServerOptions(url, token, token_file, profile)
    # With a log or a settings file, the environment does not name a server.
    is_remote = url is not None or profile is not None
    if log is None and config is None:
        is_remote = choose_server(server).source != DEFAULT_SOURCE
    _check_arguments(log, config, backup, is_remote=is_remote, has_token=bool(token or token_file))
    target = parse_backup_target(backup, endpoint) if backup is not None and is_backup_url(backup) else None
    options = _BackupOptions(backup, target, parse_duration_ms(max_age) if max_age else None)
    remote = build_remote(server) if is_remote else None
    findings: list[Finding] = []

    def run() -> Check:
        yield from _list_findings(log, config, options, remote)
        if remote is not None:
            yield from run_checks("server", check_remote, remote)

    if as_json:
        findings += run()
        print_result({"ok": is_ok(findings), "findings": findings}, (), as_json=True)
    else:
        for line in format_findings(run(), findings):  # one by one, because network checks take seconds
            typer.echo(line)
    if not is_ok(findings):
        raise typer.Exit(EXIT_FOUND_NOTHING)


def _check_arguments(
    log: str | None, config: str | None, backup: str | None, *, is_remote: bool, has_token: bool
) -> None:
    """Raise OncelogError for arguments that do not say what to check."""
    if log is not None:
        check_scheme(log)
    refusals = (
        (
            log is None and config is None and not is_remote,
            "name what to check: a log, --config FILE, --url URL or --profile NAME",
        ),
        (log is not None and config is not None, "--config names the log; leave out LOG"),
        (not is_remote and has_token, "--token and --token-file are checked at a server: add --url"),
        (
            backup is not None and log is None and config is None,
            "--backup is compared with a log: name the log, or --config FILE",
        ),
        (backup is not None and log is not None and is_address(log), _NO_DATABASE_BACKUP),
    )
    for is_wrong, message in refusals:
        if is_wrong:
            raise OncelogError(message)


def _list_findings(log: str | None, config: str | None, backup: _BackupOptions, remote: Remote | None) -> Check:
    if config is not None:
        yield from _check_configuration(config, backup, remote)
    elif log is not None and is_address(log):
        yield from check_packages(["postgres"])
        yield from _check_database(log, None)
    elif log is not None:
        yield from check_packages([])
        yield from _check_file(log, FileExpectations(DISK_DEFAULTS, JUMP_MS_MAX), backup)
    else:
        yield from check_packages([])


def _check_configuration(config: str, backup: _BackupOptions, remote: Remote | None) -> Check:
    """Check a settings file, the files that it names, its log, and the server if it runs on this machine."""
    environment = get_settings_environment()
    yield from check_packages(["server"])
    try:
        settings = yield from check_settings(config, environment)
    except ModuleNotFoundError:  # `check_packages` has reported it
        return
    if settings is None:
        return
    yield from run_checks("permissions", check_settings_file, config, settings)
    for check, function in (
        ("keys", check_credentials),
        ("keys", check_ticket_key),
        ("tls", check_certificate),
        ("settings", check_schemas),
        ("open_files", check_open_files),
    ):
        yield from run_checks(check, function, settings)
    if is_address(settings.store):
        yield from check_packages(["postgres"])
        yield from _check_database(settings.store, settings)
        if backup.source is not None:
            yield problem("backup", _NO_DATABASE_BACKUP)
        epoch = None
    else:
        disk, jump_ms_max = settings.disk, settings.engine_limits.clock_jump_ms_max
        mode = parse_file_mode(settings.file_mode)
        yield from _check_file(settings.store, FileExpectations(disk, jump_ms_max, mode, is_server=True), backup)
        epoch = _read_epoch(settings.store)
    yield from run_checks("server", check_ports, settings, epoch, remote)


def _check_file(path: str, expected: FileExpectations, backup: _BackupOptions) -> Check:
    yield from check_sqlite()
    yield from run_checks("store", check_log_file, path, expected)
    yield from run_checks("backup", backup.check, path)


def _check_database(address: str, settings: "ServerSettings | None") -> Check:
    jump_ms_max = JUMP_MS_MAX if settings is None else settings.engine_limits.clock_jump_ms_max
    size_max = 0 if settings is None else settings.disk.store_bytes_max
    yield from run_checks("store", check_database, address, settings is not None, jump_ms_max, size_max)


def _read_epoch(path: str) -> str | None:
    """Return the epoch of a log file, or None if another check reports why it cannot be read."""
    try:
        with open_read_transaction(path, allow_older=True) as (_, metadata):
            return metadata.epoch
    except (StoreError, OSError):
        return None
