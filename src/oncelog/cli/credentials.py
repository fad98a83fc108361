"""`oncelog token` and `oncelog apikey`: create and manage the credentials of a server's clients."""

from collections.abc import Iterable
from typing import Annotated, Any, Final, Literal

import msgspec
import typer

from oncelog.cli.files import get_secret_check
from oncelog.cli.output import format_table, format_utc, print_result
from oncelog.cli.terminal import EXIT_FOUND_NOTHING, AsJson, CommandGroup, print_message
from oncelog.cli.times import parse_duration_ms
from oncelog.errors import OncelogError
from oncelog.extras import explain_missing_package
from oncelog.server.auth.api_keys import ApiKey, ApiKeys, find_key_id
from oncelog.server.auth.principal import Grants, parse_grants
from oncelog.storage.clock import SystemClock

Read = Annotated[
    list[str] | None, typer.Option(metavar="PARTITION", help="Grant read access to a partition: a name, or `orders/*`.")
]
Audit = Annotated[
    list[str] | None,
    typer.Option(metavar="STREAM", help="Grant read access to a stream's audit records, or `*` for all."),
]
Write = Annotated[
    list[str] | None,
    typer.Option(metavar="PARTITION", help="Grant write access to a partition: a name, or `orders/*`."),
]


# --- tokens -----------------------------------------------------------------------------------------------


def token(  # noqa: PLR0913, PLR0917 - each one is an option
    key: Annotated[str, typer.Option(metavar="FILE", help="File with a secret (HS256), a PEM private key, or a JWKS.")],
    alg: Annotated[
        Literal["HS256", "RS256", "ES256", "EdDSA"],
        typer.Option(help="Signature algorithm. The server must be configured for it."),
    ],
    sub: Annotated[str, typer.Option(help="Subject of the token. Its writes have the actor `user:SUB`.")],
    read: Read = None,
    write: Write = None,
    audit: Audit = None,
    expires: Annotated[str, typer.Option(metavar="DURATION", help="Lifetime: 90s, 15m, 1h, 30d.")] = "1h",
    client_id: Annotated[str | None, typer.Option(help="Restrict the token to this client id.")] = None,
    issuer: Annotated[str | None, typer.Option(help="The `iss` claim.")] = None,
    audience: Annotated[str | None, typer.Option(help="The `aud` claim.")] = None,
    kid: Annotated[
        str | None, typer.Option(help="The token's `kid`; it also selects the key in a key set (JWKS).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print a signed token for development and tests. Grant options may be repeated.

    Example:  oncelog token --key secret.txt --alg HS256 --sub ada --read 'orders/*' --write orders/1 --expires 1h
    """
    with explain_missing_package("this command", "server"):
        # Imported here because it takes 0.1 s, which would slow down the other commands.
        from oncelog.server.auth.signing_keys import load_signing_key  # noqa: PLC0415
        from oncelog.server.auth.tokens import issue_token  # noqa: PLC0415

    now_ms = SystemClock().wall_ms()
    expires_ms = now_ms + parse_duration_ms(expires)
    grants = parse_grants(read or [], write or [], audit or [])
    token = issue_token(
        load_signing_key(key, alg, kid, get_secret_check()),
        subject=sub,
        grants=grants,
        issued_ms=now_ms,
        expires_ms=expires_ms,
        client_id=client_id,
        iss=issuer,
        aud=audience,
    )
    _warn_without_grants(grants, "token")
    print_result({"token": token, "expires_ms": expires_ms}, [token], as_json)


def _warn_without_grants(grants: Grants, credential: str) -> None:
    if grants == Grants():
        print_message(f"note: this {credential} grants no access; create another one with --read, --write or --audit")


# --- API keys ---------------------------------------------------------------------------------------------

apikey_app = CommandGroup(
    help=(
        "API keys, in a file that servers read at startup and poll every second. The file contains only hashes. "
        "Concurrent commands do not lose each other's changes."
    ),
)

OTHER_KEYS_SHOWN_MAX: Final = 3
"""Ids that `create` prints of other keys of the same client."""
HEADINGS: Final = ("id", "client", "name", "created", "state", "grants")
KeysFile = Annotated[str, typer.Argument(help="File with the keys.", metavar="KEYS-FILE", show_default=False)]


@apikey_app.command()
def create(  # noqa: PLR0913, PLR0917 - each one is an option
    file: KeysFile,
    client_id: Annotated[
        str,
        typer.Option(
            help="Client id of the key, without user:, client: or system:. Its writes have the actor `client:ID`."
        ),
    ],
    name: Annotated[str, typer.Option(help="Name of the key, for people.")],
    read: Read = None,
    write: Write = None,
    audit: Audit = None,
    expires: Annotated[
        str | None, typer.Option(metavar="DURATION", help="Lifetime: 12h, 90d. Default: until revoked.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Create a key and print it. It cannot be shown again.

    The file is created if it is missing, with permissions for its owner only. Servers accept the key about a second
    later. Other keys of the client remain valid; the command prints their ids on standard error.

    Example:  oncelog apikey create keys.json --client-id billing --name 'nightly bills' --read 'orders/*' --expires 90d
    """
    expires_ms = None if expires is None else SystemClock().wall_ms() + parse_duration_ms(expires)
    grants = parse_grants(read or [], write or [], audit or [])
    keys = _open_keys(file)
    created = keys.create(client_id, name, grants, expires_ms)
    try:
        _warn_without_grants(grants, "key")
        _warn_of_other_keys(file, created.key, keys.list())
        print_result({"key": created.text, **_to_json(created.key)}, [created.text], as_json)
    except (OSError, OncelogError):
        _revoke_unprinted(keys, file, created.key.id)
        raise


def _revoke_unprinted(keys: ApiKeys, file: str, key_id: str) -> None:
    try:
        keys.revoke(key_id)
    except OncelogError:
        print_message(f"the key {key_id} was not printed; revoke it with `oncelog apikey revoke {file} {key_id}`")
    else:
        print_message(f"the key {key_id} could not be printed, so it is revoked; create another one")


def _warn_of_other_keys(file: str, created: ApiKey, keys: Iterable[ApiKey]) -> None:
    """Print the ids of the client's other valid keys, which the new key does not replace."""
    now_ms = SystemClock().wall_ms()
    others = [
        key.id
        for key in keys
        if key.client_id == created.client_id and key.id != created.id and key.find_end(now_ms) is None
    ]
    if others:
        shown = ", ".join(others[:OTHER_KEYS_SHOWN_MAX]) + (", …" if len(others) > OTHER_KEYS_SHOWN_MAX else "")
        print_message(
            f"note: {created.client_id!r} also has other valid keys: {shown}; "
            f"to revoke one, run `oncelog apikey revoke {file} ID`"
        )


@apikey_app.command("list")
def list_(file: KeysFile, as_json: AsJson = False) -> None:
    """Print all keys, including revoked ones. Their secrets are not stored.

    Example:  oncelog apikey list keys.json
    """
    keys = _open_keys(file).list()
    print_result([_to_json(key) for key in keys], format_table(HEADINGS, map(_list_cells, keys)), as_json)


@apikey_app.command()
def revoke(
    file: KeysFile,
    id: Annotated[  # noqa: A002
        str,
        typer.Argument(help="The key's id, as printed by `list`, or the whole key.", metavar="ID", show_default=False),
    ],
    as_json: AsJson = False,
) -> None:
    """Revoke a key permanently and keep its entry. The exit status is 1 if the file does not have the key.

    Servers that use the file refuse the key about a second later, and close its open connections.

    Example:  oncelog apikey revoke keys.json 5f1c0a9be2d34c77
    """
    keys, key_id = _open_keys(file), find_key_id(id)
    if key_id is None:  # the text is not printed, because it may be part of a key
        raise OncelogError(
            "ID must be an id of 16 hexadecimal digits, or a whole key; `oncelog apikey list` prints the ids"
        )
    key = keys.revoke(key_id)
    if key is None:
        print_message(f"{file} has no key {key_id!r}; `oncelog apikey list` prints the ids")
        raise typer.Exit(EXIT_FOUND_NOTHING)
    print_result(_to_json(key), format_table(HEADINGS, [_list_cells(key)]), as_json)
    print_message(
        "servers that use this file refuse the key and close its connections within about a second; "
        "servers with a copy of the file do so once the copy is replaced"
    )


def _open_keys(file: str) -> ApiKeys:
    return ApiKeys(file, SystemClock().wall_ms, get_secret_check())


def _to_json(key: ApiKey) -> dict[str, Any]:
    return {**msgspec.structs.asdict(key), "grants": key.grants.to_claim()}


def _list_cells(key: ApiKey) -> tuple[str, ...]:
    grants = key.grants.to_claim()
    if key.revoked_ms is not None:
        state = f"revoked {format_utc(key.revoked_ms)}"
    elif key.expires_ms is not None:
        verb = "expired" if key.find_end(SystemClock().wall_ms()) else "expires"
        state = f"{verb} {format_utc(key.expires_ms)}"
    else:
        state = "active"
    rights = "; ".join(f"{right} {', '.join(map(repr, texts)) or 'nothing'}" for right, texts in grants.items())
    return key.id, key.client_id, key.name, format_utc(key.created_ms), state, rights
