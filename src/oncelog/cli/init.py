"""`oncelog init`: write the configuration of a production server, with its first API key."""

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from msgspec import Struct

import oncelog
from oncelog.cli.credentials import Audit, Read, Write
from oncelog.cli.file_set import create_file_set, write_file
from oncelog.cli.output import print_result
from oncelog.cli.serve import find_program
from oncelog.cli.terminal import AsJson, print_message
from oncelog.errors import OncelogError
from oncelog.extras import explain_missing_package
from oncelog.storage.address import is_address, redact_address
from oncelog.storage.clock import SystemClock
from oncelog.storage.inspect.factory import create_inspector

SETTINGS_NAME: Final = "oncelog.toml"
KEYS_NAME: Final = "keys.json"
PRIVATE_KEY_NAME: Final = "token-private.pem"
PUBLIC_KEY_NAME: Final = "token-public.pem"
LOG_NAME: Final = "oncelog.db"
KEY_TITLE: Final = "First key, from oncelog init"
_PUBLIC_MODE: Final = 0o644
_TRY_PARTITION: Final = "orders"
_UNKNOWN_HOST: Final = "HOST"


class _Configuration(Struct, frozen=True):
    """What a call of the command has created."""

    directory: Path
    settings: Any
    client_id: str
    key: str
    has_tokens: bool


def init(  # noqa: PLR0913, PLR0917 - the options of a command
    directory: Annotated[
        Path, typer.Argument(help="Directory for the files; created if it is missing.", metavar="DIR")
    ] = Path(),
    store: Annotated[
        str | None,
        typer.Option(
            metavar="LOG", help="The log: a file, or postgresql://…. Default: oncelog.db in DIR.", show_default=False
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all addresses.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 7171,
    tls_certificate: Annotated[
        Path | None, typer.Option(metavar="FILE", help="PEM file with the TLS certificate and its chain.")
    ] = None,
    tls_private_key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="PEM file with the private key of the TLS certificate.")
    ] = None,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Also create a key pair (EdDSA), and accept tokens that it signs.")
    ] = False,
    client_id: Annotated[str, typer.Option(help="Client id of the API key.")] = "admin",
    read: Read = None,
    write: Write = None,
    audit: Audit = None,
    as_json: AsJson = False,
) -> None:
    """Write the configuration of a production server into a directory, and print the first API key.

    The directory gets oncelog.toml, with every setting and its default, and keys.json with the hash of the key. Only
    their owner can read them. Without --read, --write and --audit, the key grants everything. Existing files are never
    overwritten. If the command is killed, the next call with the same DIR removes its files.

    Example:  oncelog init /etc/oncelog --store /var/lib/oncelog/oncelog.db

    Example:  oncelog init --store postgresql://oncelog@db.example.org/orders --host 0.0.0.0 --tokens
    """
    with explain_missing_package("the server", "server"):
        from oncelog.server.settings_template import render_settings  # noqa: PLC0415 - needs a server's dependencies
    if not port:
        raise OncelogError("--port must be a number from 1 to 65535: clients need to know it")
    directory = directory.absolute()
    values = _build_values(directory, store, host, port, tls_certificate, tls_private_key, has_tokens=tokens)
    settings = _check_values(values)
    names = [KEYS_NAME, *([PRIVATE_KEY_NAME, PUBLIC_KEY_NAME] if tokens else []), SETTINGS_NAME]
    with create_file_set(directory, names) as stage:
        key = _create_key(stage / KEYS_NAME, client_id, read, write, audit)
        if tokens:
            _create_token_keys(stage)
        write_file(stage / SETTINGS_NAME, render_settings(_introduce(directory), values))
        for extra in {entry.name for entry in stage.iterdir()} - {*names}:
            (stage / extra).unlink()  # the lock of the key file
    created = _Configuration(directory, settings, client_id, key, tokens)
    fields = {"directory": str(directory), "files": [str(directory / name) for name in names], "key": key}
    try:
        print_result(fields, _format_steps(created, names), as_json)
    except OSError:
        for name in names:
            (directory / name).unlink(missing_ok=True)
        print_message("the API key could not be printed, so the new files are removed; run the command again")
        raise


def _build_values(
    directory: Path,
    store: str | None,
    host: str,
    port: int,
    certificate: Path | None,
    private_key: Path | None,
    *,
    has_tokens: bool,
) -> dict[str, object]:
    """Return the settings that are not comments. Paths are absolute, so the server may start in any directory."""
    if store is None:
        store = str(directory / LOG_NAME)
    else:
        create_inspector(store)  # raises an error for a malformed address, or if the database driver is missing
        store = store if is_address(store) else str(Path(store).absolute())
    values: dict[str, object] = {
        "store": store,
        "host": host,
        "port": port,
        "api_keys.file": str(directory / KEYS_NAME),
    }
    if certificate is not None:
        values["tls.certificate"] = str(certificate.absolute())
    if private_key is not None:
        values["tls.private_key"] = str(private_key.absolute())
    if has_tokens:
        values |= {"tokens.algorithms": ["EdDSA"], "tokens.key_files": [f"pem:{directory / PUBLIC_KEY_NAME}"]}
    return values


def _check_values(values: dict[str, object]) -> Any:
    """Return the settings, after the checks of the server. Raises SettingsError."""
    from oncelog.server.settings import load  # noqa: PLC0415 - as above

    texts = {name: ",".join(value) if isinstance(value, list) else str(value) for name, value in values.items()}
    return load(None, {}, texts)


def _create_key(
    path: Path, client_id: str, read: list[str] | None, write: list[str] | None, audit: list[str] | None
) -> str:
    from oncelog.server.auth.api_keys import ApiKeys  # noqa: PLC0415 - as above
    from oncelog.server.auth.principal import EVERYTHING, parse_grants  # noqa: PLC0415

    has_grants = bool(read or write or audit)
    grants = parse_grants(read or [], write or [], audit or []) if has_grants else EVERYTHING
    return ApiKeys(path, SystemClock().wall_ms).create(client_id, KEY_TITLE, grants).text


def _create_token_keys(stage: Path) -> None:
    from oncelog.server.auth.signing_keys import generate_key_pair  # noqa: PLC0415 - takes 0.1 s

    private_key, public_key = generate_key_pair()
    write_file(stage / PRIVATE_KEY_NAME, private_key)
    write_file(stage / PUBLIC_KEY_NAME, public_key, _PUBLIC_MODE)


def _introduce(directory: Path) -> str:
    path = shlex.quote(str(directory / SETTINGS_NAME))
    return (
        f"Settings of an Oncelog server, written by `oncelog init` of Oncelog {oncelog.__version__}.\n\n"
        f"Start the server:        oncelog serve --config {path}\n\n"
        f"Check this file:         oncelog doctor --config {path}\n\n"
        "A line that begins with `#name =` is a setting with its default: remove the # to change it. A setting without "
        "a value has no default. The environment overrides this file (ONCELOG_PORT, "
        "ONCELOG_LIMITS__QUEUE_ITEMS_MAX), and the command line overrides both."
    )


def _format_steps(created: _Configuration, names: list[str]) -> Iterator[str]:
    """Yield the names of the created files, the key, and commands to paste."""
    program, settings = find_program(), created.settings
    config = shlex.quote(str(created.directory / SETTINGS_NAME))
    found = _find_url(settings)
    url = shlex.quote(found or f"https://{_UNKNOWN_HOST}:{settings.port}")
    options = f"--url {url} --client-id {shlex.quote(created.client_id)} --partition {_TRY_PARTITION}"
    yield f"Created {', '.join(names)} in {created.directory}. The log is {redact_address(settings.store)}."
    yield ""
    yield "Start the server:"
    yield ""
    yield f"  {program} serve --config {config}"
    yield ""
    if found is None:
        yield f"In the following commands, replace {_UNKNOWN_HOST} with a name that is in the server's certificate."
        yield ""
    yield f"In another terminal, use the API key of the client {created.client_id!r}. It is not shown again:"
    yield ""
    yield f"  export ONCELOG_TOKEN={created.key}"
    yield f"  {program} doctor --config {config} --url {url}"
    yield f'  {program} submit {options} \'{{"type":"order.placed","order":17}}\''
    yield f"  {program} tail {options} --limit 1"
    if created.has_tokens:
        key = shlex.quote(str(created.directory / PRIVATE_KEY_NAME))
        yield ""
        yield f"{PRIVATE_KEY_NAME} signs tokens. The server does not need it: move it to the program that issues them."
        yield ""
        yield f"  {program} token --key {key} --alg EdDSA --sub ada --read {_TRY_PARTITION}"


def _find_url(settings: Any) -> str | None:
    """Return the URL for the commands, or None with TLS if the certificate contains no name for its host."""
    if settings.tls.certificate is None:
        url: str = settings.local_url
        return url
    host = _read_host_name(settings.tls.certificate)
    return None if host is None else f"https://{host}:{settings.port}"


def _read_host_name(certificate: str) -> str | None:
    """Return the first DNS name of a certificate, or None if it has only wildcards or cannot be read."""
    from cryptography import x509  # noqa: PLC0415 - joserfc, which a server needs, depends on it

    from oncelog.server.auth.secret_files import read_file  # noqa: PLC0415 - as above
    from oncelog.server.limits import TLS_FILE_BYTES_MAX  # noqa: PLC0415

    try:
        first = x509.load_pem_x509_certificates(read_file(certificate, TLS_FILE_BYTES_MAX).data)[0]
        extension = first.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except (OncelogError, OSError, ValueError, x509.ExtensionNotFound):
        return None
    names = extension.value.get_values_for_type(x509.DNSName)
    return next((name for name in names if "*" not in name), None)
