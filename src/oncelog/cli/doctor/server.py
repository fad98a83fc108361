"""Checks of a running server, at a URL or at the ports of its settings. Every step has a time limit."""

import errno
import http.client
import os
import socket
import ssl
from contextlib import closing
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from oncelog.cli.doctor.configuration import judge_expiry
from oncelog.cli.doctor.findings import Check, Finding, ok, problem, warning
from oncelog.cli.output import format_duration
from oncelog.cli.server_options import Remote
from oncelog.client.runtime.http import EVENTS_PATH
from oncelog.error_codes import PROTOCOL_VERSION
from oncelog.errors import OncelogError
from oncelog.storage.clock import SystemClock

if TYPE_CHECKING:
    from oncelog.server.listen_address import ListenAddress
    from oncelog.server.settings import ServerSettings

TIMEOUT_S: Final = 10.0
"""Longest wait for a connection, and for each part of an answer."""
ANSWER_BYTES_MAX: Final = 64 * 1024
CLOCK_DIFFERENCE_MS_MAX: Final = 30_000
"""As much as the leeway for tokens (`tokens.leeway_ms`)."""
READY_PATH: Final = "/readyz"
_LOCAL_HOSTS: Final = frozenset({"localhost", "127.0.0.1", "::1"})
_PROBE_PARTITION: Final = "oncelog/doctor"
"""Partition that the check of a token reads. If a valid token has no access to it, the server answers 403, not 401."""


class _Answer(Struct, frozen=True):
    status: int
    date_ms: int | None
    body: bytes
    certificate: dict[str, Any] | None = None
    """The server's certificate, if it is valid for the host."""

    def decode(self) -> dict[str, Any]:
        """Return the JSON object, or an empty one."""
        try:
            value = msgspec.json.decode(self.body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return {}
        return value if isinstance(value, dict) else {}


class _UnreachableError(OncelogError):
    """A request that got no answer."""


def check_remote(remote: Remote) -> Check:
    """Check the server at a URL: connection, TLS, health, clock, protocol version, and the token."""
    parts = urlsplit(remote.url)
    if parts.scheme == "http" and parts.hostname not in _LOCAL_HOSTS:
        yield warning("tls", f"{remote.url} is not encrypted, so others can read credentials", "Use https://.")
    try:
        answer = _request(remote.url, READY_PATH)
    except _UnreachableError as error:
        yield problem("server", str(error), "Start the server, or correct the URL.")
        return
    if answer.certificate:
        name = f"the certificate of {remote.url}"
        times = [1000 * ssl.cert_time_to_seconds(answer.certificate[end]) for end in ("notBefore", "notAfter")]
        yield judge_expiry(name, times[0], times[1], SystemClock().wall_ms())
    finding = judge_readiness(remote.url, answer.status, answer.decode())
    yield finding
    if not is_oncelog(answer.status, answer.decode()):
        return
    if answer.date_ms is not None:
        yield _judge_date(remote.url, answer.date_ms)
    yield from _check_protocol(remote)
    if remote.token is not None:
        yield from _check_token(remote)


def check_ports(settings: "ServerSettings", epoch: str | None, remote: Remote | None) -> Check:
    """Check whether the ports of the settings are free, or used by a server of the log with this epoch.

    `remote` is a server that `check_remote` checks. If it is the server at the port, that check reports its readiness.
    """
    addresses = [address for address in settings.list_addresses() if address.port]  # 0 stands for any free port
    problems = {address.setting: _find_bind_error(address) for address in addresses}
    if problems.get("port") == errno.EADDRINUSE:
        finding, is_server = _check_local_server(settings, epoch)
        if finding.level == "problem" or remote is None or not _is_local_server(remote.url, settings):
            yield finding
        if is_server:
            return
    for address in addresses:
        name, number = address.setting, problems[address.setting]
        if number == errno.EADDRINUSE and name != "port":
            message = f"{name}: {address.port} on {address.host} is in use by another program"
            yield problem("server", message, f"Stop that program, or choose another {name}.")
        elif number == errno.EACCES:
            message = f"{name}: this user may not listen on {address.port}, because it is below 1024"
            yield warning("server", message, "Use a higher port, or give the service CAP_NET_BIND_SERVICE.")
        elif number is not None and number != errno.EADDRINUSE:
            message = f"{name}: this machine cannot listen on {address.host}:{address.port}: {_describe(number)}"
            yield problem("server", message, f"Correct {'metrics_host' if name == 'metrics_port' else 'host'}.")
    if addresses and not any(problems.values()):
        free = ", ".join(f"{address.setting} {address.port}" for address in addresses)
        yield ok("server", f"no server is running; its ports are free ({free})")


def _is_local_server(url: str, settings: "ServerSettings") -> bool:
    """Return whether a URL is that of the server with these settings on this machine."""
    parts, local = urlsplit(url), urlsplit(settings.local_url)
    return parts.port == local.port and parts.hostname in {local.hostname, settings.host, *_LOCAL_HOSTS}


def _check_local_server(settings: "ServerSettings", epoch: str | None) -> tuple[Finding, bool]:
    """Check which program uses the port. Returns whether it is an Oncelog server."""
    url = settings.local_url
    taken = problem(
        "server",
        f"port: {settings.port} on {settings.host} is in use by another program",
        "Stop that program, or choose another port.",
    )
    try:
        # Do not verify the certificate, because it is not for a local address. The request contains no credential.
        answer = _request(url, READY_PATH, is_verified=False)
    except _UnreachableError:
        return taken, False
    fields = answer.decode()
    if not is_oncelog(answer.status, fields):
        return taken, False
    served = fields.get("epoch")
    if epoch is not None and served is not None and served != epoch:
        message = f"the server at {url} serves another log, or another history of it (epoch {served}, not {epoch})"
        return problem("server", message, "Restart it with these settings."), True
    return judge_readiness(url, answer.status, fields), True


def is_oncelog(status: int, fields: dict[str, Any]) -> bool:
    """Return whether an answer to /readyz is from an Oncelog server."""
    return (status == 200 and "epoch" in fields) or (status == 503 and isinstance(fields.get("status"), str))


def judge_readiness(url: str, status: int, fields: dict[str, Any]) -> Finding:
    """Return the finding for an answer to /readyz."""
    if not is_oncelog(status, fields):
        message = f"{url} does not answer like an Oncelog server (HTTP status {status})"
        return problem("server", message, "Correct the URL, or the proxy in front of the server.")
    if status != 200:
        return problem("server", f"{url} is not ready: {fields['status']}", "Read the server's log output.")
    if fields.get("read_only"):
        return warning("server", f"{url} refuses new writes: {fields['read_only']}", "Remove the reason.")
    return ok("server", f"{url} is ready: epoch {fields['epoch']}, position {fields.get('last_committed_id')}")


def _judge_date(url: str, date_ms: int) -> Finding:
    difference_ms = date_ms - SystemClock().wall_ms()
    text = f"{format_duration(abs(difference_ms))} {'ahead of' if difference_ms > 0 else 'behind'} this machine"
    if abs(difference_ms) > CLOCK_DIFFERENCE_MS_MAX:
        return warning("clock", f"the clock of {url} is {text}", "Synchronise both with NTP. Tokens may be refused.")
    return ok("clock", f"the clocks of {url} and this machine agree")


def _check_protocol(remote: Remote) -> Check:
    version = _request(remote.url, "/").decode().get("oncelog")
    if version is not None and version != PROTOCOL_VERSION:
        message = f"{remote.url} uses protocol {version}, and this version of Oncelog uses {PROTOCOL_VERSION}"
        yield problem("versions", message, "Upgrade the older side.")


def _check_token(remote: Remote) -> Check:
    status = _request(remote.url, f"{EVENTS_PATH}?partition={_PROBE_PARTITION}&limit=1", remote.token).status
    if status == 401:
        yield problem(
            "token",
            f"{remote.url} refuses the token: it is malformed, expired, revoked, or for another server",
            "Create another one (oncelog apikey create, oncelog token). The server's log output has the reason.",
        )
    elif status in (200, 403):
        yield ok("token", f"{remote.url} accepts the token")
    else:
        yield warning("token", f"{remote.url} could not check the token (HTTP status {status})", "Try again later.")


def _request(url: str, path: str, token: str | None = None, *, is_verified: bool = True) -> _Answer:
    """Send a GET request without following redirects. Raises _UnreachableError."""
    headers = {"Accept": "application/json"} | ({} if token is None else {"Authorization": f"Bearer {token}"})
    try:
        with closing(_create_connection(url, is_verified=is_verified)) as connection:
            connection.connect()
            certificate = connection.sock.getpeercert() if isinstance(connection.sock, ssl.SSLSocket) else None
            connection.request("GET", f"{urlsplit(url).path}{path}", headers=headers)
            response = connection.getresponse()
            date = response.headers.get("Date")
            date_ms = None if date is None else round(parsedate_to_datetime(date).timestamp() * 1000)
            return _Answer(response.status, date_ms, response.read(ANSWER_BYTES_MAX), certificate)
    except ssl.SSLCertVerificationError as error:
        raise _UnreachableError(f"{url} cannot be trusted: {error.verify_message}") from error
    except ssl.SSLError as error:
        raise _UnreachableError(f"{url}: no TLS connection: {error.reason or error}") from error
    except TimeoutError as error:
        raise _UnreachableError(f"{url} did not respond within {TIMEOUT_S:g} s") from error
    except OSError as error:
        reason = _describe(error.errno) or error.strerror or error
        raise _UnreachableError(f"{url} cannot be reached: {reason}") from error
    except (http.client.HTTPException, ValueError, OverflowError) as error:
        raise _UnreachableError(f"{url} does not answer in HTTP") from error


def _create_connection(url: str, *, is_verified: bool) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    host = parts.hostname or ""
    if parts.scheme == "http":
        return http.client.HTTPConnection(host, parts.port, timeout=TIMEOUT_S)
    context = ssl.create_default_context()
    if not is_verified:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return http.client.HTTPSConnection(host, parts.port, timeout=TIMEOUT_S, context=context)


def _find_bind_error(address: "ListenAddress") -> int | None:
    """Return why no program can listen on a port, as an error number, or None."""
    try:
        address.probe()
    except socket.gaierror:
        return errno.EADDRNOTAVAIL
    except OSError as error:
        return error.errno
    return None


def _describe(number: int | None) -> str:
    return os.strerror(number) if number is not None and number > 0 else ""
