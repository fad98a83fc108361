"""`oncelog token`: a signed token, for development and tests."""

from enum import StrEnum
from typing import Annotated

import typer

from oncelog.cli.files import get_secret_check
from oncelog.cli.terminal import parse_duration_ms
from oncelog.server.auth.grants import parse_grants
from oncelog.storage.clock import SystemClock


class Algorithm(StrEnum):
    """Those that tokens may be signed with."""

    HS256 = "HS256"
    RS256 = "RS256"
    ES256 = "ES256"
    EDDSA = "EdDSA"


Read = Annotated[list[str] | None, typer.Option(metavar="PARTITION", help="May be read: a name, or `orders/*`.")]
Audit = Annotated[
    list[str] | None,
    typer.Option(metavar="STREAM", help="Administrative acts that may be read: of a stream, or `*` for all."),
]
Write = Annotated[list[str] | None, typer.Option(metavar="PARTITION", help="May be written: a name, or `orders/*`.")]


def token(  # noqa: PLR0913, PLR0917 - each one is an option
    key: Annotated[
        str, typer.Option(metavar="FILE", help="A secret for HS256, a PEM private key for others, or JWKS.")
    ],
    alg: Annotated[Algorithm, typer.Option(help="The algorithm; the server must have it configured.")],
    sub: Annotated[str, typer.Option(help="Who it is of: `user:SUB` is the actor of their writes.")],
    read: Read = None,
    write: Write = None,
    audit: Audit = None,
    expires: Annotated[str, typer.Option(metavar="DURATION", help="For how long: 90s, 15m, 1h, 30d.")] = "1h",
    client_id: Annotated[str | None, typer.Option(help="The only client they may connect as.")] = None,
    issuer: Annotated[str | None, typer.Option(help="The claim `iss`.")] = None,
    audience: Annotated[str | None, typer.Option(help="The claim `aud`.")] = None,
    kid: Annotated[str | None, typer.Option(help="The token's `kid`; in a key set (JWKS), the key that signs.")] = None,
) -> None:
    """Prints a signed token for development and tests. Grants may be given several times.

    Example:  oncelog token --key secret.txt --alg HS256 --sub ada --read 'orders/*' --write orders/1 --expires 1h
    """
    # It takes a tenth of a second, which every other command would pay for too.
    from oncelog.server.auth.signing_keys import load_signing_key  # noqa: PLC0415
    from oncelog.server.auth.tokens import issue_token  # noqa: PLC0415

    now_ms = SystemClock().wall_ms()
    token = issue_token(
        load_signing_key(key, alg.value, kid, get_secret_check()),
        subject=sub,
        grants=parse_grants(read or [], write or [], audit or []),
        issued_ms=now_ms,
        expires_ms=now_ms + parse_duration_ms(expires),
        client_id=client_id,
        iss=issuer,
        aud=audience,
    )
    typer.echo(token)
