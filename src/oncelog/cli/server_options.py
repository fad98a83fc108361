"""Options of the commands that use a server, and the choice of the server and its credential.

The address comes from the first of these sources that has one:

1. the options --url or --profile
2. the environment variable ONCELOG_URL
3. the profile in ONCELOG_PROFILE, or the default profile of the profile file
4. `DEFAULT_URL`

The token comes from --token, --token-file or --profile, then from ONCELOG_TOKEN, then from the other profiles. The
token of a profile is only used with the address of this profile, so that no other server receives it.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from inspect import Parameter, signature
from typing import Annotated, Any, Final

import typer
from msgspec import Struct

from oncelog.cli.files import read_token_file
from oncelog.cli.profiles import FILE_VARIABLE, TOKEN_FILE_BYTES_MAX, Profile, ProfileFile, load_profiles
from oncelog.client.runtime.http import normalize_url
from oncelog.error_codes import AUTH_FAILED
from oncelog.errors import AUTHENTICATION_FAILED, OncelogError, ServerRefusedError
from oncelog.extras import explain_missing_package

DEFAULT_URL: Final = "http://127.0.0.1:7171"
DEFAULT_SOURCE: Final = "default"
_OPTION_SOURCES: Final = frozenset({"--url", "--profile"})
URL_VARIABLE: Final = "ONCELOG_URL"
TOKEN_VARIABLE: Final = "ONCELOG_TOKEN"  # noqa: S105 - its name
PROFILE_VARIABLE: Final = "ONCELOG_PROFILE"
CLIENT_VARIABLES: Final = frozenset({URL_VARIABLE, TOKEN_VARIABLE, PROFILE_VARIABLE, FILE_VARIABLE})
"""Environment variables that are not settings of a server."""


def _complete_profile(incomplete: str) -> list[str]:
    try:
        return [name for name in load_profiles().profiles if name.startswith(incomplete)]
    except OncelogError:
        return []


Url = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help=f"Address of the server. Default: ONCELOG_URL, a profile, or {DEFAULT_URL}.",
        show_default=False,
    ),
]
Token = Annotated[
    str | None,
    typer.Option(
        metavar="TOKEN", help="A token or API key. Other users can see it while the command runs: prefer a file."
    ),
]
TokenFile = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="A file with the token. Default: ONCELOG_TOKEN, or the token of the profile."),
]
ProfileName = Annotated[
    str | None,
    typer.Option(
        "--profile",
        metavar="NAME",
        help="The profile with the server's address and token. Default: ONCELOG_PROFILE.",
        autocompletion=_complete_profile,
    ),
]
Log = Annotated[
    str | None,
    typer.Argument(
        help="The log: a file, or postgresql://…. Without it, the command uses the server in --url, --profile, "
        "ONCELOG_URL or ONCELOG_PROFILE.",
        metavar="LOG",
        show_default=False,
    ),
]


InsteadOfLog = Annotated[
    str | None,
    typer.Option(metavar="URL", help="Address of a server, instead of LOG. Default: ONCELOG_URL, or a profile."),
]


ExplicitUrl = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help=f"Address of the server. Default: {DEFAULT_URL}. This command requires --url or --profile if "
        "ONCELOG_URL or a profile selects a server.",
        show_default=False,
    ),
]
ExplicitProfile = Annotated[
    str | None,
    typer.Option(
        "--profile",
        metavar="NAME",
        help="The profile with the server's address and token.",
        autocompletion=_complete_profile,
    ),
]


def _keyword(name: str, annotation: Any) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


_SERVER_PARAMETERS: Final = (
    _keyword("url", Url),
    _keyword("token", Token),
    _keyword("token_file", TokenFile),
    _keyword("profile", ProfileName),
)


# --- choice of the server ---------------------------------------------------------------------------------


class ServerOptions(Struct, frozen=True):
    """The values of the options for a server."""

    url: str | None = None
    token: str | None = None
    token_file: str | None = None
    profile: str | None = None

    def __repr__(self) -> str:
        return f"ServerOptions({self.url!r}, profile={self.profile!r})"

    def find_first(self) -> str | None:
        """Return the name of the first option that was given."""
        return next(
            (f"--{name.replace('_', '-')}" for name in self.__struct_fields__ if getattr(self, name) is not None), None
        )


class Remote(Struct, frozen=True):
    """A server and the token for it."""

    url: str
    token: str | None = None
    client_id: str | None = None
    """Client id of the profile."""

    def __repr__(self) -> str:
        return f"Remote({self.url!r})"


class ServerChoice(Struct, frozen=True):
    """The server that a command uses, without its token."""

    url: str
    source: str
    """Where the address comes from, such as `ONCELOG_URL`."""
    profile_name: str = ""
    """Name of the profile that the command uses, or ""."""
    profile: Profile | None = None
    file: ProfileFile | None = None
    """The file of the profile."""

    @property
    def client_id(self) -> str | None:
        """Client id of the profile, if any."""
        return None if self.profile is None else self.profile.client_id

    def load_token(self) -> str | None:
        """Return the token of the profile, if any. Raises OncelogError."""
        return None if self.profile is None or self.file is None else self.file.load_token(self.profile)


def choose_server(options: ServerOptions) -> ServerChoice:
    """Return the server that the options, the environment and the profiles select. Raises OncelogError."""
    if options.url is not None and options.profile is not None:
        raise OncelogError("--url cannot be combined with --profile: a profile has its own address")
    if options.url is not None:
        return ServerChoice(normalize_url(options.url, "--url"), "--url")
    from_environment = os.environ.get(URL_VARIABLE)
    if options.profile is None and from_environment:
        return ServerChoice(normalize_url(from_environment, URL_VARIABLE), URL_VARIABLE)
    file = load_profiles()
    if options.profile is not None:
        name, source = options.profile, "--profile"
    elif os.environ.get(PROFILE_VARIABLE):
        name, source = os.environ[PROFILE_VARIABLE], PROFILE_VARIABLE
    elif file.default:
        name, source = file.default, "the default profile"
    else:
        return ServerChoice(DEFAULT_URL, DEFAULT_SOURCE)
    profile = file.get(name, source)
    url = normalize_url(profile.url, f"{file.path}: profiles.{name}.url")
    return ServerChoice(url, source, name, profile, file)


def build_remote(options: ServerOptions, *, is_named: bool = False) -> Remote:
    """Build the `Remote` that a command uses. Raises OncelogError.

    With `is_named`, an option, the environment or a profile must name the server.
    """
    choice = choose_server(options)
    if is_named and choice.source == DEFAULT_SOURCE:
        raise OncelogError("give a LOG, or a server: --url, --profile, ONCELOG_URL or ONCELOG_PROFILE")
    with explain_missing_package("this command", "server"):
        import aiohttp  # noqa: F401, PLC0415 - checks that it is installed
    return Remote(choice.url, _load_credential(options, choice), choice.client_id)


def _load_credential(options: ServerOptions, choice: ServerChoice) -> str | None:
    if options.token is not None and options.token_file is not None:
        raise OncelogError("--token cannot be combined with --token-file: pass one of them")
    from_environment = os.environ.get(TOKEN_VARIABLE)
    if options.token is not None:
        token: str | None = options.token
    elif options.token_file is not None:
        token = read_token_file(options.token_file, TOKEN_FILE_BYTES_MAX)
    elif from_environment is not None and options.profile is None:
        token = from_environment
    else:
        token = choice.load_token() or from_environment
    token = None if token is None else token.strip()
    if token and not (token.isascii() and token.isprintable()):
        raise OncelogError("the token has invalid characters: it must be printable ASCII, without line breaks")
    return token or None


# --- commands ---------------------------------------------------------------------------------------------


@contextmanager
def _explain_failed_authentication(
    remote: Remote, client_id: str | None = None, *, is_client: bool = False
) -> Iterator[None]:
    """If the server refuses the token without a reason, explain the likely reasons.

    A server sends every caller the same text for an invalid token. Other texts, for example about a token that expires
    while the command runs, remain. `is_client` tells whether the command authenticates with a client id.
    """
    try:
        yield
    except OncelogError as error:
        refusal = error if isinstance(error, ServerRefusedError) else error.__cause__
        if not isinstance(refusal, ServerRefusedError) or str(refusal) != f"{refusal.code}: {AUTHENTICATION_FAILED}":
            raise
        if remote.token is None:
            reason = f"no token was sent: use --token-file, {TOKEN_VARIABLE} or a profile"
        elif is_client and client_id is not None:
            reason = f"the token is invalid, or belongs to a client other than {client_id!r} (--client-id)"
        else:
            reason = "the token is invalid: check it; the server's log says why"
        raise OncelogError(str(error).replace(str(refusal), f"{AUTH_FAILED}: {reason}")) from error


def uses_server(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the `remote` parameter of a command with the options for a server and its token.

    If the command has a --client-id option, its default is the client id of the profile.
    """
    return _replace_remote(command, build_remote, _SERVER_PARAMETERS)


def uses_server_as_client(command: Callable[..., None]) -> Callable[..., None]:
    """Like `uses_server`, for a command that authenticates as the client in --client-id."""
    return _replace_remote(command, build_remote, _SERVER_PARAMETERS, is_client=True)


def uses_explicit_server_as_client(command: Callable[..., None]) -> Callable[..., None]:
    """Like `uses_server_as_client`, but only an option can select a server other than the one at `DEFAULT_URL`.

    For a command that writes test data: the server in the environment or in the default profile may be in production.
    """
    parameters = (_keyword("url", ExplicitUrl), *_SERVER_PARAMETERS[1:3], _keyword("profile", ExplicitProfile))
    return _replace_remote(command, _build_explicit_remote, parameters, is_client=True)


def _build_explicit_remote(options: ServerOptions) -> Remote:
    choice = choose_server(options)
    if choice.source not in {*_OPTION_SOURCES, DEFAULT_SOURCE}:
        described = f"{choice.source} ({choice.profile_name})" if choice.profile_name else choice.source
        raise OncelogError(
            f"this command writes test data, so only an option selects its server: {described} selects {choice.url}. "
            f"Pass --url {choice.url}, or --profile"
        )
    return build_remote(options)


def _replace_remote(
    command: Callable[..., None],
    build: Callable[[ServerOptions], Remote],
    parameters: Sequence[Parameter],
    *,
    is_client: bool = False,
) -> Callable[..., None]:
    def run(options: ServerOptions, arguments: dict[str, Any]) -> None:
        remote = build(options)
        if arguments.get("client_id", "") is None:
            arguments["client_id"] = remote.client_id
        with _explain_failed_authentication(remote, arguments.get("client_id"), is_client=is_client):
            command(remote=remote, **arguments)

    return _replace_parameter(command, "remote", parameters, run)


def reads_log_or_server(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the first parameter of a command, `source`, with an optional LOG and the options for a server.

    `source` is the LOG or, without LOG, the `Remote`. The default address is not used: a command without LOG would
    read a log other than the intended one.
    """

    def run(options: ServerOptions, arguments: dict[str, Any]) -> None:
        log: str | None = arguments.pop("log")
        if "id" in arguments and arguments["id"] is None:  # a single argument is the ID
            log, arguments["id"] = None, log
            if arguments["id"] is None:
                raise OncelogError("ID is missing")
        if log is not None:
            given = options.find_first()
            if given is not None:
                raise OncelogError(f"{given} is for a server and cannot be combined with LOG ({log})")
            if log.startswith(("http://", "https://")):
                raise OncelogError(f"LOG is a file, or postgresql://…; for a server, write --url {log}")
            command(source=log, **arguments)
            return
        remote = build_remote(options, is_named=True)
        with _explain_failed_authentication(remote):
            command(source=remote, **arguments)

    log = Parameter("log", Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=Log)
    return _replace_parameter(command, "source", (log, _keyword("url", InsteadOfLog), *_SERVER_PARAMETERS[1:]), run)


def _replace_parameter(
    command: Callable[..., None],
    name: str,
    replacements: Sequence[Parameter],
    run: Callable[[ServerOptions, dict[str, Any]], None],
) -> Callable[..., None]:
    """Return a command in which `replacements` take the place of the `name` parameter.

    `run` is called with the options for a server and with the other arguments.
    """

    @wraps(command)
    def replaced(**arguments: Any) -> None:
        options = ServerOptions(**{field: arguments.pop(field) for field in ServerOptions.__struct_fields__})
        run(options, arguments)

    declared = signature(command, eval_str=True)
    parameters: list[Parameter] = []
    for parameter in declared.parameters.values():
        parameters += replacements if parameter.name == name else [parameter]
    parameters.sort(key=lambda parameter: parameter.kind)
    replaced.__signature__ = declared.replace(parameters=parameters)  # type: ignore[attr-defined] # Typer reads it
    return replaced
