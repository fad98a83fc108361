"""`oncelog apikey`: the API keys of a server, in a file that only it can read."""

from typing import Annotated, Any

import msgspec
import typer

from oncelog.cli.secret_files import secret_check
from oncelog.cli.terminal import FOUND_NOTHING, AsJson, ending_well, print_json
from oncelog.cli.times import utc
from oncelog.cli.token import Read, Write
from oncelog.doors.apikeys import ApiKey, ApiKeys
from oncelog.doors.grants import granted
from oncelog.stores.clock import SystemClock

app = typer.Typer(
    no_args_is_help=True,
    help=(
        "API keys, in a file that a server reads at its start and at SIGHUP. The file has their hashes only. Commands "
        "at the same time do not lose each other's changes."
    ),
)

KeysFile = Annotated[str, typer.Argument(help="The file of keys.", metavar="KEYS-FILE", show_default=False)]


@app.command()
def create(
    file: KeysFile,
    client_id: Annotated[
        str,
        typer.Option(
            help="Whose it is: `client:ID` is the actor of its writes. Not with user:, client: or system: in front."
        ),
    ],
    name: Annotated[str, typer.Option(help="What people call it.")],
    read: Read = None,
    write: Write = None,
    as_json: AsJson = False,
) -> None:
    """Makes a key and prints it. This is the only time that it is shown.

    The file is made if it is not there, for its owner alone.

    Example:  oncelog apikey create keys.json --client-id billing --name 'nightly bills' --read 'orders/*'
    """
    with ending_well():
        created = _keys(file).create(client_id, name, granted(read or [], write or []))
        if as_json:
            print_json({"key": created.text, **_plain(created.key)})
        else:
            typer.echo(created.text)


@app.command("list")
def list_(file: KeysFile, as_json: AsJson = False) -> None:
    """Prints the keys, revoked ones too, without their secrets: nobody has those.

    Example:  oncelog apikey list keys.json
    """
    with ending_well():
        keys = _keys(file).list()
        if as_json:
            print_json([_plain(key) for key in keys])
        else:
            for key in keys:
                typer.echo(_line(key))


@app.command()
def revoke(
    file: KeysFile,
    id: Annotated[str, typer.Argument(help="The id, as `list` shows it.", metavar="ID", show_default=False)],  # noqa: A002
) -> None:
    """Revokes a key for ever; its entry stays. The exit status is 1 if there is no such key.

    A server that runs takes note at SIGHUP.

    Example:  oncelog apikey revoke keys.json 5f1c0a9be2d34c77
    """
    with ending_well():
        key = _keys(file).revoke(id)
        if key is None:
            typer.echo("there is no key of that id", err=True)
            raise typer.Exit(FOUND_NOTHING)
        typer.echo(_line(key))


def _keys(file: str) -> ApiKeys:
    return ApiKeys(file, SystemClock().wall_ms, secret_check())


def _plain(key: ApiKey) -> dict[str, Any]:
    return {**msgspec.structs.asdict(key), "grants": key.grants.as_claim()}


def _line(key: ApiKey) -> str:
    grants = key.grants.as_claim()
    state = "active" if key.revoked_ms is None else f"revoked {utc(key.revoked_ms)}"
    allowed = "; ".join(f"{right} {', '.join(map(repr, texts)) or 'nothing'}" for right, texts in grants.items())
    return f"{key.id}  client {key.client_id!r}, {key.name!r}, created {utc(key.created_ms)}, {state}; {allowed}"
