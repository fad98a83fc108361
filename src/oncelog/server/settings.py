"""All settings of a server, and the code that loads them.

Every struct checks its values, so an instance is always valid. `load` reads the sources in order, and later ones
override earlier ones: the defaults, a TOML file, the environment, the command line.
"""

import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from ipaddress import ip_address
from itertools import combinations
from typing import Any, Final, get_type_hints

from msgspec import Struct
from msgspec.structs import replace

from oncelog.core.limits import EVICTION_INTERVAL_MAX, SETTING_NUMBER_MAX, check_whole_numbers
from oncelog.core.policy import TTL_MS_MAX
from oncelog.core.tenants import Tenant, check_tenants
from oncelog.engine.limits import Limits
from oncelog.engine.write_gate import DISK_DEFAULTS, DiskLimits
from oncelog.errors import SettingsError
from oncelog.file_modes import parse_file_mode
from oncelog.server import settings_sources as sources
from oncelog.server.auth.api_keys import ApiKeys
from oncelog.server.auth.authenticator import Authenticator, DevelopmentAuthenticator
from oncelog.server.auth.secret_files import SecretCheck
from oncelog.server.auth.signing_keys import KeyFile, KeyKind
from oncelog.server.auth.tokens import Tokens, TokenSettings
from oncelog.server.errors import raise_first
from oncelog.server.event_validator import VALIDATORS_GROUP
from oncelog.server.limits import ApiLimits
from oncelog.server.listen_address import ListenAddress
from oncelog.server.log_format import Format, Level
from oncelog.server.origins import normalize_origin, parse_networks
from oncelog.storage.address import is_address
from oncelog.storage.sqlite.partial_copy import SIDE_FILE_SUFFIXES

GRPC_PORT_OFFSET: Final = 100
_ALL_ADDRESSES: Final = frozenset({"0.0.0.0", "::"})  # noqa: S104 - compared, not listened on
_HOST: Final = re.compile(r"[A-Za-z0-9_.:%-]+", re.ASCII)
_COLLECTOR: Final = re.compile(r"https?://[A-Za-z0-9_.:\[\]-]+(/[^\s?#]*)?", re.ASCII)
_VALIDATE: Final = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*|[A-Za-z0-9_.-]+", re.ASCII)


class GeneralSettings(Struct, frozen=True, kw_only=True):
    """Top-level settings, outside of any table."""

    store: str = "oncelog.db"
    """The log: a file, which the server creates if it is missing, or a database (`postgresql://user@host/database`)."""
    file_mode: str = "0600"
    """Permissions of a new log file: `0600`, or `0640` or `0660` for a group. Existing files keep their mode."""
    check_secret_files: bool = True
    """Whether the server refuses secret files that other users may read. Set it to false for secrets that a container
    runtime provides: the server then logs a warning."""
    host: str = "127.0.0.1"
    """The address or name to listen on. `0.0.0.0` and `::` stand for all addresses of the machine."""
    port: int = 7171
    """The port to listen on. 0 selects any free one."""
    grpc: bool = True
    """Whether the server also offers the ledger over gRPC, on a separate port."""
    grpc_port: int | None = None
    """Port for gRPC. 0 selects any free one. Default: 100 above `port`, or any free one if `port` is 0."""
    development: bool = False
    """Whether every caller may do everything without a credential. `host` must be a loopback address."""
    validate: str | None = None
    """The application's check of new events: `package.module:callable`, or the name of an entry point."""
    deltas_schemas: str | None = None
    """JSON file that defines the tables of each gateway: `{gateway: {table: {column: type}}}`."""
    origins: tuple[str, ...] = ()
    """Additional web origins whose pages may connect: `https://app.example.org`."""
    trusted_proxies: tuple[str, ...] = ()
    """Addresses or networks of proxies whose `X-Forwarded-For` and `X-Forwarded-Proto` the server trusts."""
    read_only: bool = False
    """Whether the log refuses new writes. It still answers known writes and reads. SIGHUP reloads it."""
    tenants: tuple[Tenant, ...] = ()
    """Quotas: the prefix and limits of each tenant, as tables or strings. The log stores them. SIGHUP reloads them."""
    shutdown_ms: int = 10_000
    """How long a stopping server waits for requests in flight. With 0 it does not wait."""
    show_actors: bool = True
    """Whether readers of events see the actor, `user:{sub}` or `client:{id}`. With false they see only the client
    id."""
    metrics: bool = True
    """Whether the server offers `/metrics`."""
    metrics_public: bool = False
    """Whether `/metrics` on `port` needs no credential. Callers without one see no names of tenants and consumers.
    Otherwise it needs the grant to read `oncelog/metrics`."""
    metrics_host: str = "127.0.0.1"
    """The address or name to listen on for `metrics_port`."""
    metrics_port: int | None = None
    """Separate port for `/metrics`, `/healthz` and `/readyz`, without credentials. If it is set, `port` has no
    metrics."""
    openapi: bool = True
    """Whether the server offers the OpenAPI document."""
    latency_report: str | None = None
    """JSON file that shows where the slowest 1 % of the writes spend their time. The server replaces it every minute
    and when it stops, but never a file that is not such a report. Without it, the server measures no latencies."""

    def __post_init__(self) -> None:
        is_validator = self.validate is None or _VALIDATE.fullmatch(self.validate) is not None
        raise_first(
            SettingsError,
            (not self.store, "store must name a file or a database"),
            (self.latency_report == "", "latency_report must name a file"),
            (
                self.latency_report is not None and _is_log_file(self.latency_report, self.store),
                f"latency_report must not name a file of the log, {self.latency_report}; name another file",
            ),
            (not _is_host(self.host), "host must be an IP address or a host name"),
            (not _is_host(self.metrics_host), "metrics_host must be an IP address or a host name"),
            (
                not is_validator,
                f"validate must be package.module:callable, or the name of an entry point in {VALIDATORS_GROUP}",
            ),
        )
        parse_file_mode(self.file_mode)
        set_ports = [name for name in sources.PORTS if getattr(self, name) is not None]
        check_whole_numbers(self, set_ports, highest=sources.PORT_MAX, may_be_zero=sources.PORTS)
        check_whole_numbers(self, ["shutdown_ms"], highest=SETTING_NUMBER_MAX, may_be_zero=["shutdown_ms"])
        check_tenants(self.tenants)
        for origin in self.origins:
            if normalize_origin(origin) is None:
                raise SettingsError(
                    f"origins must have the form scheme://host[:port], without a path and without *, not {origin!r}"
                )
        try:
            parse_networks(self.trusted_proxies)
        except ValueError as error:
            raise SettingsError(f"trusted_proxies must be IP addresses or networks: {error}") from error

    @property
    def ledger_port(self) -> int:
        """The port that serves the ledger over gRPC."""
        if self.grpc_port is not None:
            return self.grpc_port
        return self.port + GRPC_PORT_OFFSET if 0 < self.port <= sources.PORT_MAX - GRPC_PORT_OFFSET else 0

    @property
    def secret_check(self) -> SecretCheck:
        """How strictly the server checks secret files."""
        return SecretCheck.SERVER if self.check_secret_files else SecretCheck.WARN


class LogSettings(Struct, frozen=True, kw_only=True):
    """Settings of the server's log output."""

    level: Level = "info"
    """Lowest level that the server writes."""
    format: Format = "text"
    """Plain text, or one JSON object per line."""


class LedgerSettings(Struct, frozen=True, kw_only=True):
    """Permanent settings of a new log. The server refuses to start on an existing log with different values."""

    ttl_ms: int | None = None
    """How long keys and clients are remembered after their last use, by log time. Default of a new log: 24 hours, on
    which `LedgerClient` relies."""
    eviction_interval: int | None = None
    """The log forgets keys at lane positions that are multiples of this number. Default of a new log: 1,000."""

    def __post_init__(self) -> None:
        for name, highest in (("ttl_ms", TTL_MS_MAX), ("eviction_interval", EVICTION_INTERVAL_MAX)):
            if getattr(self, name) is not None:
                check_whole_numbers(self, [name], highest=highest)


class TracingSettings(Struct, frozen=True, kw_only=True):
    """OpenTelemetry tracing (`pip install 'oncelog[opentelemetry]'`). The standard `OTEL_` environment variables set
    the exporter, the sampler and the resource."""

    enabled: bool = False
    """Whether the server creates spans for requests, commits and deliveries, and stores trace contexts with events."""
    endpoint: str | None = None
    """Base URL of an OpenTelemetry collector, which receives OTLP over HTTP: `http://collector.example.org:4318`.
    Default: the exporter that `OTEL_TRACES_EXPORTER` and `OTEL_EXPORTER_OTLP_ENDPOINT` select."""

    def __post_init__(self) -> None:
        if self.endpoint is not None and _COLLECTOR.fullmatch(self.endpoint) is None:
            raise SettingsError(
                "endpoint must have the form http://host[:port][/path] or https://…, without credentials; pass them in "
                "OTEL_EXPORTER_OTLP_HEADERS"
            )


class TlsSettings(Struct, frozen=True, kw_only=True):
    """TLS files. Set both or neither."""

    certificate: str | None = None
    """PEM file with the certificate and its chain."""
    private_key: str | None = None
    """PEM file with the certificate's private key, unencrypted."""


class ApiKeySettings(Struct, frozen=True, kw_only=True):
    """API keys, which `oncelog apikey` creates."""

    file: str | None = None
    """The key file. If this is not set, the server accepts no API keys."""


class TicketSettings(Struct, frozen=True, kw_only=True):
    """Tickets for streams, which replace the credentials of browsers."""

    key_file: str | None = None
    """File with a secret of at least 32 bytes. Servers with the same file accept each other's tickets, and tickets from
    before a restart. If this is not set, each process has a random key. SIGHUP reloads it."""


class ServerSettings(GeneralSettings, frozen=True, kw_only=True):
    """All settings, checked individually and together. The `limits` table has two structs: engine and APIs."""

    log: LogSettings = LogSettings()
    disk: DiskLimits = DISK_DEFAULTS
    ledger: LedgerSettings = LedgerSettings()
    tracing: TracingSettings = TracingSettings()
    tls: TlsSettings = TlsSettings()
    tokens: TokenSettings | None = None
    api_keys: ApiKeySettings = ApiKeySettings()
    tickets: TicketSettings = TicketSettings()
    engine_limits: Limits = Limits()
    api_limits: ApiLimits = ApiLimits()

    def __post_init__(self) -> None:
        super().__post_init__()
        can_authenticate = self.development or self.tokens is not None or self.api_keys.file is not None
        events_max, members_max = self.api_limits.request_events_max, self.api_limits.request_members_max
        items_max = self.engine_limits.request_items_max
        raise_first(
            SettingsError,
            (
                self.development and not is_loopback(self.host),
                (
                    "development accepts every caller, so host must be a loopback address (127.0.0.1, ::1, localhost), "
                    f"not {self.host}"
                ),
            ),
            (
                not can_authenticate,
                (
                    "no caller could authenticate: configure tokens (tokens.algorithms and tokens.key_files) or "
                    "API keys (api_keys.file), or, for a server that only its own machine can reach, set "
                    "development to true (--development)"
                ),
            ),
            (
                (self.tls.certificate is None) != (self.tls.private_key is None),
                "tls.certificate and tls.private_key must be set together",
            ),
            (
                events_max > items_max,
                f"limits.request_events_max ({events_max}) must not exceed limits.request_items_max ({items_max})",
            ),
            (
                members_max >= items_max,
                f"limits.request_members_max ({members_max}) must be below limits.request_items_max ({items_max})",
            ),
        )
        self._check_ports()

    @property
    def local_url(self) -> str:
        """The URL at which programs on this machine reach the server."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)  # noqa: S104 - compared, not listened on
        scheme = "http" if self.tls.certificate is None else "https"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.port}"

    @property
    def http_address(self) -> ListenAddress:
        """The address of the main port."""
        return ListenAddress(self.host, self.port)

    @property
    def metrics_address(self) -> ListenAddress | None:
        """The address of the separate port for metrics, or None if metrics have no port."""
        if not self.metrics or self.metrics_port is None:
            return None
        return ListenAddress(self.metrics_host, self.metrics_port, " for metrics", "metrics_port")

    def list_addresses(self) -> list[ListenAddress]:
        """Return the addresses of all ports."""
        addresses = [self.http_address]
        if self.grpc:
            addresses.append(ListenAddress(self.host, self.ledger_port, " for gRPC", "grpc_port"))
        if self.metrics_address is not None:
            addresses.append(self.metrics_address)
        return addresses

    def _check_ports(self) -> None:
        for one, other in combinations(self.list_addresses(), 2):
            is_default = "grpc_port" in (one.setting, other.setting) and self.grpc_port is None
            hint = f"; grpc_port is {GRPC_PORT_OFFSET} above port unless it is set" if is_default else ""
            if 0 < one.port == other.port and _may_share_address(one.host, other.host):
                raise SettingsError(
                    f"{one.setting} and {other.setting} must be different, but both are {one.port}{hint}"
                )


def _may_share_address(host: str, other: str) -> bool:
    """Return whether listeners on two hosts may need the same address. Names are not resolved."""
    hosts = {host.lower(), other.lower()}
    return len(hosts) == 1 or bool(hosts & _ALL_ADDRESSES) or ("localhost" in hosts and all(map(is_loopback, hosts)))


def _is_host(host: str) -> bool:
    """Return whether a text has the form of an IP address or a host name."""
    try:
        host.encode("idna")  # raises for an empty or overlong label
    except UnicodeError:
        return False
    return _HOST.fullmatch(host) is not None


def is_loopback(host: str) -> bool:
    """Return whether only this machine can connect to the host: 127.0.0.0/8, ::1 and `localhost`."""
    if host.lower() == "localhost":
        return True
    try:
        # Only the plain form of an address: the operating system would resolve `127.0.0.1%name` as a name.
        return ip_address(host).is_loopback
    except ValueError:
        return False


# --- loading -----------------------------------------------------------------------------------------


class _Field(Struct, frozen=True):
    """A setting: a field of one of the parts in `_PARTS`."""

    part: str
    name: str
    kind: Any


_PARTS: Final[Mapping[str, tuple[str, Any]]] = {
    "": ("", GeneralSettings()),
    "log": ("log.", LogSettings()),
    "disk": ("disk.", DISK_DEFAULTS),
    "ledger": ("ledger.", LedgerSettings()),
    "tracing": ("tracing.", TracingSettings()),
    "tls": ("tls.", TlsSettings()),
    # Algorithms and key files have no default. These values stand in for them while other settings are checked
    # individually.
    "tokens": ("tokens.", TokenSettings(algorithms=("EdDSA",), key_files=(KeyFile("keys", KeyKind.PEM),))),
    "api_keys": ("api_keys.", ApiKeySettings()),
    "tickets": ("tickets.", TicketSettings()),
    "api_limits": ("limits.", ApiLimits()),
    "engine_limits": ("limits.", Limits()),
}
"""The parts of the settings, by field of `ServerSettings`: the prefix of the setting names, and the defaults."""
_FIELDS: Final[Mapping[str, _Field]] = {
    f"{prefix}{name}": _Field(part, name, kind)
    for part, (prefix, defaults) in _PARTS.items()
    for name, kind in get_type_hints(type(defaults)).items()
}
"""Every setting, by name."""


def list_tables() -> Mapping[str, Sequence[Struct]]:
    """Return the structs with the default settings of each table, by the prefix of the table's names."""
    tables: dict[str, list[Struct]] = {}
    for prefix, defaults in _PARTS.values():
        tables.setdefault(prefix, []).append(defaults)
    return tables


def load(config_path: str | None, environment: Mapping[str, str], overrides: Mapping[str, str]) -> ServerSettings:
    """Load the settings of a file. The environment overrides it, and the command line overrides both.

    Raises SettingsError with the name and the source of every invalid setting.
    """
    problems: list[str] = []
    settings = _load(config_path, environment, overrides, problems)
    if settings is None:
        lines = problems if len(problems) == 1 else [f"{len(problems)} settings are invalid:", *problems]
        raise SettingsError("\n  ".join(lines))
    return settings


def find_problems(config_path: str, environment: Mapping[str, str]) -> list[str]:
    """Return all problems with a file and the environment."""
    problems: list[str] = []
    _load(config_path, environment, {}, problems)
    return problems


def _load(
    config_path: str | None, environment: Mapping[str, str], overrides: Mapping[str, str], problems: list[str]
) -> ServerSettings | None:
    """Load the settings. If some are invalid, adds all problems to the list and returns None.

    The settings are checked together only if each of them is valid.
    """
    found: dict[str, sources.SourcedValue] = {}
    parts: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    with _collect(problems):
        found |= sources.read_file(config_path, _FIELDS) if config_path is not None else {}
    if problems:
        return None
    for name, sourced in list(found.items()):
        with _collect(problems):
            sources.check_known_in_file(name, _FIELDS, sourced.source)
    for load_source, texts in ((sources.load_environment, environment), (sources.load_command_line, overrides)):
        for name in sorted(texts):
            with _collect(problems):
                found |= load_source({name: texts[name]}, _FIELDS)
    for name, sourced in found.items():
        field = _FIELDS.get(name)
        if field is not None:
            with _collect(problems):
                parts[field.part][field.name] = _check_value(name, field, sourced)
    settings = None
    if not problems:
        with _collect(problems):
            settings = _combine(parts)
    return settings


def _combine(parts: dict[str, dict[str, Any]]) -> ServerSettings:
    """Return the settings with these values. Raises SettingsError if they contradict each other."""
    general = parts.pop("", {})
    for required in ("algorithms", "key_files"):
        if required not in parts.get("tokens", (required,)):
            raise SettingsError(f"tokens.{required} must be set if any other tokens setting is")
    return ServerSettings(**general, **{part: replace(_PARTS[part][1], **values) for part, values in parts.items()})


def _is_log_file(path: str, store: str) -> bool:
    """Return whether a path is a log's file, or an additional file of SQLite for it, such as the WAL."""
    if is_address(store):
        return False
    return os.path.realpath(path) in {f"{os.path.realpath(store)}{suffix}" for suffix in ("", *SIDE_FILE_SUFFIXES)}


@contextmanager
def _collect(problems: list[str]) -> Iterator[None]:
    try:
        yield
    except SettingsError as error:
        problems.append(str(error))


def _check_value(name: str, field: _Field, sourced: sources.SourcedValue) -> Any:
    """Decode a value and check it in its struct, with defaults for all other settings."""
    value = sources.decode_value(name, field.kind, sourced)
    try:
        replace(_PARTS[field.part][1], **{field.name: value})
    except SettingsError as error:
        table = name.removesuffix(field.name)
        raise SettingsError(f"{sourced.source}: {table}{error}") from error
    return value


def new_authenticator(settings: ServerSettings, now_ms: Callable[[], int]) -> Authenticator:
    """Create a server's authenticator, which has no keys until its first `reload`."""
    if settings.development:
        return DevelopmentAuthenticator()
    check = settings.secret_check
    tokens = None if settings.tokens is None else Tokens(settings.tokens, now_ms, check)
    file = settings.api_keys.file
    return Authenticator(tokens, None if file is None else ApiKeys(file, now_ms, check))
