"""Checks of a server's settings file, and of the files that it names."""

import os
import resource
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qs, urlsplit

from oncelog.cli.doctor.findings import Check, Finding, format_count, ok, problem, warning
from oncelog.cli.output import format_duration, format_utc
from oncelog.errors import SettingsError
from oncelog.storage.address import is_address
from oncelog.storage.clock import SystemClock

if TYPE_CHECKING:
    from oncelog.server.auth.secret_files import FileContents
    from oncelog.server.settings import ServerSettings

EXPIRY_WARNING_MS: Final = 14 * 86_400_000
"""Keys and certificates that expire within two weeks are reported. Renewal is usually due 30 days before expiry."""


def check_settings(path: str, environment: Mapping[str, str]) -> "Generator[Finding, None, ServerSettings | None]":
    """Check a settings file and the environment. Returns the settings if they are valid."""
    from oncelog.server.settings import find_problems, is_loopback, load  # noqa: PLC0415 - needs a server's packages

    problems = find_problems(path, environment)
    if problems:
        for found in problems:
            yield problem("settings", found, "The server would not start. Correct it.")
        return None
    settings = load(path, environment, {})
    yield ok("settings", f"{path} is valid")
    relative = [name for name, file in _list_paths(settings) if not Path(file).is_absolute()]
    if relative:
        yield warning(
            "settings",
            f"{' and '.join(relative)} in {path}: the path depends on the directory in which the server starts",
            "Use an absolute path.",
        )
    if settings.development:
        yield warning(
            "settings",
            "development = true gives every user of this machine full access",
            "Create API keys (oncelog apikey create), and remove the setting.",
        )
    if not is_loopback(settings.host) and settings.tls.certificate is None and not settings.trusted_proxies:
        yield warning(
            "settings",
            f"the server listens on {settings.host} without TLS, so clients send their credentials unencrypted",
            "Set tls.certificate and tls.private_key; or let a TLS proxy forward to the server, and set "
            "trusted_proxies to its address.",
        )
    return settings


def check_settings_file(path: str, settings: "ServerSettings") -> Check:
    """Check that other users cannot change the settings file, or read a password in it."""
    from oncelog.server.auth.secret_files import InsecureFileError, read_file  # noqa: PLC0415 - as above
    from oncelog.server.limits import SETTINGS_FILE_BYTES_MAX  # noqa: PLC0415

    contents = read_file(path, SETTINGS_FILE_BYTES_MAX)
    try:
        contents.check_write_protected("the settings")
        if _has_password(settings.store):
            contents.check_secret("a database password", _get_check())
    except InsecureFileError as error:
        yield problem("permissions", str(error))
    else:
        yield ok("permissions", f"{path} has mode {contents.mode:04o}")


def check_credentials(settings: "ServerSettings") -> Check:
    """Check the key files: permissions, content, and API keys that expire."""
    from oncelog.server.auth.api_keys import ApiKeys  # noqa: PLC0415 - as above
    from oncelog.server.auth.tokens import Tokens  # noqa: PLC0415

    now_ms = SystemClock().wall_ms
    file = settings.api_keys.file
    if file is not None:
        contents = yield from _load_keys(ApiKeys(file, now_ms, _get_check()), settings)
        for loaded in contents.values():
            yield from _check_api_keys(file, [stored.key for stored in loaded.values()])
    if settings.tokens is not None:
        tokens = Tokens(settings.tokens, now_ms, _get_check())
        contents = yield from _load_keys(tokens, settings)
        for source, loaded in contents.items():
            algorithms = ", ".join(sorted({key.algorithm for key in loaded}))
            yield ok("keys", f"{source.path} has {format_count(len(loaded), 'signing key')} ({algorithms})")


def check_ticket_key(settings: "ServerSettings") -> Check:
    """Check the key file of stream tickets."""
    from oncelog.server.auth.secret_files import InsecureFileError, SecretCheck  # noqa: PLC0415 - as above
    from oncelog.server.auth.stream_tickets import StreamTickets  # noqa: PLC0415

    path, lifetime_ms, now_ms = settings.tickets.key_file, settings.api_limits.ticket_lifetime_ms, SystemClock().wall_ms
    if path is None:
        return
    try:
        StreamTickets(now_ms, lifetime_ms, path, _get_check()).load()
    except InsecureFileError as error:
        if settings.check_secret_files:
            raise
        yield warning("keys", str(error))
        StreamTickets(now_ms, lifetime_ms, path, SecretCheck.WARN).load()
    yield ok("keys", f"{path} has a key for stream tickets")


def _load_keys(user: Any, settings: "ServerSettings") -> Generator[Finding, None, dict[Any, Any]]:
    """Read the key files of a component. Returns the keys of the files that it would use."""
    from oncelog.server.auth.secret_files import InsecureFileError, read_file  # noqa: PLC0415 - as above

    found = {}
    for file in user.list_files():
        try:
            contents = read_file(file.path, file.bytes_max)
            try:
                found[file.source] = file.parse(contents)
            except InsecureFileError as error:
                if settings.check_secret_files:
                    raise
                yield warning("keys", str(error))
                found[file.source] = file.parse(contents.to_private())
        except SettingsError as error:
            yield problem("keys", str(error))
    try:
        user.check(found)
    except SettingsError as error:
        yield problem("keys", str(error), "Remove one of the keys, or give it another id.")
    return {source: loaded.keys for source, loaded in found.items()}


def _check_api_keys(path: str, keys: Sequence[Any]) -> Check:
    now_ms = SystemClock().wall_ms()
    valid = [key for key in keys if key.find_end(now_ms) is None]
    if not valid:
        yield warning("keys", f"{path} has no valid API key", f"Create one: oncelog apikey create {path} …")
        return
    yield ok("keys", f"{path} has {format_count(len(valid), 'valid API key')}")
    for key in valid:
        if key.expires_ms is not None and key.expires_ms - now_ms < EXPIRY_WARNING_MS:
            yield warning(
                "keys",
                f"the API key {key.id} of {key.client_id!r} expires in {format_duration(key.expires_ms - now_ms)}",
                f"Create another one: oncelog apikey create {path} …",
            )


def check_certificate(settings: "ServerSettings") -> Check:
    """Check the TLS files: permissions, whether they belong together, and when the certificates expire."""
    from oncelog.server.auth.secret_files import InsecureFileError, SecretCheck, read_file  # noqa: PLC0415 - as above
    from oncelog.server.limits import TLS_FILE_BYTES_MAX  # noqa: PLC0415
    from oncelog.server.tls import ServerCertificate  # noqa: PLC0415

    path, key_path = settings.tls.certificate, settings.tls.private_key
    if path is None or key_path is None:
        return
    try:
        read_file(key_path, TLS_FILE_BYTES_MAX).check_secret("a private key", _get_check())
        ServerCertificate(settings, _get_check()).load()
    except InsecureFileError as error:
        yield problem("tls", str(error)) if settings.check_secret_files else warning("tls", str(error))
        if settings.check_secret_files:
            return
        ServerCertificate(settings, SecretCheck.WARN).load()
    except SettingsError as error:
        yield problem("tls", str(error))
        return
    yield from _check_expiry(read_file(path, TLS_FILE_BYTES_MAX))


def _check_expiry(chain: "FileContents") -> Check:
    from cryptography import x509  # noqa: PLC0415 - joserfc, which a server needs, depends on it

    now_ms = SystemClock().wall_ms()
    for number, certificate in enumerate(x509.load_pem_x509_certificates(chain.data)):
        name = (
            f"{chain.path}: the certificate" if not number else f"{chain.path}: certificate {number + 1} of the chain"
        )
        starts_ms = round(certificate.not_valid_before_utc.timestamp() * 1000)
        yield judge_expiry(name, starts_ms, round(certificate.not_valid_after_utc.timestamp() * 1000), now_ms)


def judge_expiry(name: str, starts_ms: int, ends_ms: int, now_ms: int) -> Finding:
    """Return the finding for a certificate that is valid from `starts_ms` to `ends_ms`."""
    if now_ms >= ends_ms:
        return problem("tls", f"{name} expired {format_utc(ends_ms)}", "Renew it. SIGHUP loads the new certificate.")
    if now_ms < starts_ms:
        return problem(
            "tls", f"{name} is not valid before {format_utc(starts_ms)}", "Correct the clock, or replace it."
        )
    remaining = f"{name} expires in {format_duration(ends_ms - now_ms)}"
    if ends_ms - now_ms < EXPIRY_WARNING_MS:
        return warning("tls", remaining, "Renew it. SIGHUP loads the new certificate.")
    return ok("tls", remaining)


def check_schemas(settings: "ServerSettings") -> Check:
    """Check the file with the tables of the gateways."""
    from oncelog.server.deltas.schemas import TableSchemas  # noqa: PLC0415 - as above

    if settings.deltas_schemas is not None:
        TableSchemas(settings.deltas_schemas).reload()
        yield ok("settings", f"{settings.deltas_schemas} is valid")


def check_open_files(settings: "ServerSettings") -> Check:
    """Compare the limit of open files with the connection limits. The server raises the soft limit itself."""
    from oncelog.server.listener import RESERVED_FILES  # noqa: PLC0415 - as above

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limits = settings.api_limits
    grpc_max = min(limits.grpc_connections_max, limits.connections_max) if settings.grpc else 0
    needed = limits.connections_max + grpc_max + RESERVED_FILES
    if hard == resource.RLIM_INFINITY or hard >= needed:
        yield ok("open_files", f"up to {hard} open files are allowed here, and {needed} are needed")
        return
    yield warning(
        "open_files",
        f"up to {hard} open files are allowed here, and limits.connections_max and limits.grpc_connections_max need "
        f"{needed}; the server would accept fewer connections",
        f"Raise the hard limit (systemd: LimitNOFILE={needed}; shell: ulimit -Hn), or lower the two limits. A service "
        "manager may set another limit than this shell has.",
    )


def _list_paths(settings: "ServerSettings") -> Iterator[tuple[str, str]]:
    """Yield the settings that name files, with their values."""
    named = {
        "store": None if is_address(settings.store) else settings.store,
        "deltas_schemas": settings.deltas_schemas,
        "tls.certificate": settings.tls.certificate,
        "tls.private_key": settings.tls.private_key,
        "api_keys.file": settings.api_keys.file,
        "tickets.key_file": settings.tickets.key_file,
    }
    yield from ((name, path) for name, path in named.items() if path is not None)
    for file in () if settings.tokens is None else settings.tokens.key_files:
        yield "tokens.key_files", file.path


def _has_password(store: str) -> bool:
    if not is_address(store):
        return False
    parts = urlsplit(store)
    return parts.password is not None or "password" in parse_qs(parts.query)


def _get_check() -> Any:
    """Return how strictly secret files are checked. Root may check the files of a service."""
    from oncelog.server.auth.secret_files import SecretCheck  # noqa: PLC0415 - as above

    return SecretCheck.COMMAND if os.geteuid() == 0 else SecretCheck.SERVER
