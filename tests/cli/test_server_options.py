"""Commands find their server and token in options, the environment and profiles, in this order."""

import json
from collections.abc import Coroutine
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cli.runner import COMMAND, Result
from cli.scripted_server import answer, scripted
from cli.server_process import oncelog, serving
from oncelog.cli.server_options import DEFAULT_URL, ServerOptions, build_remote, choose_server
from oncelog.errors import OncelogError

SECRET = "a-secret-token"  # noqa: S105
PROFILES = f"""
default = "local"

[profiles.local]
url = "http://127.0.0.1:8181/"

[profiles.production]
url = "https://log.example.org"
token = "{SECRET}"
client_id = "billing"

[profiles.file]
url = "https://file.example.org"
token_file = "file.token"
"""
VARIABLES = ("ONCELOG_URL", "ONCELOG_TOKEN", "ONCELOG_PROFILE", "ONCELOG_PROFILES_FILE", "XDG_CONFIG_HOME")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home directory, without variables for commands."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def file(home: Path) -> Path:
    path = home / ".config/oncelog/profiles.toml"
    path.parent.mkdir(parents=True)
    write(path, PROFILES)
    write(path.with_name("file.token"), "token-of-the-file\n")
    return path


def write(path: Path, text: str, mode: int = 0o600) -> None:
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(COMMAND, [*arguments])


def refusal(*arguments: str) -> str:
    done = run(*arguments)
    assert done.exit_code == 2, done.output
    return done.stderr


# --- precedence -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variables", "source", "url"),
    [
        ({"ONCELOG_URL": "http://127.0.0.1:1/"}, "ONCELOG_URL", "http://127.0.0.1:1"),
        ({"ONCELOG_PROFILE": "production"}, "ONCELOG_PROFILE (production)", "https://log.example.org"),
        ({}, "the default profile (local)", "http://127.0.0.1:8181"),
    ],
)
@pytest.mark.usefixtures("file")
def test_load_test_requires_an_option_for_a_server_that_the_environment_selects(
    variables: dict[str, str], source: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert refusal("load", "--seconds", "0") == (
        f"oncelog: this command writes test data, so only an option selects its server: {source} selects {url}. "
        f"Pass --url {url}, or --profile\n"
    )


def test_load_test_uses_the_named_or_the_default_server(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(file, '[profiles.here]\nurl = "http://127.0.0.1:1"\n')
    for options, url in [
        (["--profile", "here"], "http://127.0.0.1:1"),
        (["--url", "http://127.0.0.1:2"], "http://127.0.0.1:2"),
        ([], "http://127.0.0.1:7171"),
    ]:
        monkeypatch.setattr("oncelog.cli.load.command.asyncio.run", _refuse_to_run)
        assert f"Writing real events to {url}, " in run("load", *options).stderr


def _refuse_to_run(work: Coroutine[Any, Any, None]) -> None:
    work.close()
    raise OncelogError("not run")


def test_default_address_needs_no_file() -> None:
    assert choose_server(ServerOptions()).url == DEFAULT_URL
    assert build_remote(ServerOptions()).token is None


@pytest.mark.usefixtures("file")
def test_options_come_before_the_environment_and_the_environment_before_profiles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert choose_server(ServerOptions()).url == "http://127.0.0.1:8181"
    monkeypatch.setenv("ONCELOG_PROFILE", "production")
    assert build_remote(ServerOptions()).url == "https://log.example.org"
    monkeypatch.setenv("ONCELOG_URL", "http://environment:1")
    assert choose_server(ServerOptions()).url == "http://environment:1"
    assert choose_server(ServerOptions(profile="file")).url == "https://file.example.org"
    assert choose_server(ServerOptions(url="http://option:1")).url == "http://option:1"
    with pytest.raises(OncelogError, match="--url cannot be combined with --profile"):
        choose_server(ServerOptions(url="http://option:1", profile="file"))


@pytest.mark.usefixtures("file")
def test_token_has_the_same_order_as_the_address(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONCELOG_PROFILE", "production")
    assert build_remote(ServerOptions()).token == SECRET
    assert build_remote(ServerOptions(profile="file")).token == "token-of-the-file"  # noqa: S105
    monkeypatch.setenv("ONCELOG_TOKEN", "environment")
    assert build_remote(ServerOptions()).token == "environment"  # noqa: S105
    assert build_remote(ServerOptions(profile="production")).token == SECRET
    assert build_remote(ServerOptions(profile="local")).token == "environment"  # noqa: S105
    assert build_remote(ServerOptions(token="option", profile="production")).token == "option"  # noqa: S105, S106
    write(home / "option.token", "option-file")
    chosen = ServerOptions(token_file=str(home / "option.token"), profile="production")
    assert build_remote(chosen).token == "option-file"  # noqa: S105


@pytest.mark.usefixtures("file")
def test_token_of_a_profile_is_not_sent_to_another_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONCELOG_PROFILE", "production")
    assert build_remote(ServerOptions(url="http://other:1")).token is None
    monkeypatch.setenv("ONCELOG_URL", "http://other:1")
    assert build_remote(ServerOptions()).token is None


@pytest.mark.usefixtures("file")
def test_profile_names_the_client_of_commands_without_client_id() -> None:
    received: list[str] = []

    def refuse(handler: BaseHTTPRequestHandler, _: int) -> None:
        received.append(handler.headers["Authorization"])
        answer(handler, 403, {"error": {"code": "forbidden", "message": "no", "details": {}}})

    with scripted(refuse) as (url, bodies):
        path = Path.home() / ".config/oncelog/profiles.toml"
        write(path, PROFILES.replace("https://log.example.org", url))
        done = run("submit", "--profile", "production", "--partition", "a", '{"type":"x"}')
    assert "forbidden" in done.stderr
    assert bodies[0]["client_id"] == "billing"
    assert received == [f"Bearer {SECRET}"]


def test_variables_select_the_server_of_every_command(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        done = oncelog("submit", "--partition", "a", '{"type":"x"}', ONCELOG_URL=server.url)
        assert done.returncode == 0, done.stderr
        done = oncelog("tail", "--partition", "a", "--limit", "1", "--json", ONCELOG_URL=server.url)
        assert json.loads(done.stdout)["committed_id"] == 1
        done = oncelog("deltas", "pull", "shop", ONCELOG_URL=server.url)
        assert (done.returncode, done.stdout) == (0, "")


# --- the file ---------------------------------------------------------------------------------------------


@pytest.mark.rule("CO-26")
def test_file_with_a_token_that_others_may_read_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.chmod(0o644)
    message = refusal("tail", "--partition", "a")
    assert f"{file} contains a token, and other users may read or change it" in message
    assert message.endswith(f": chmod 600 {file}\n")
    assert SECRET not in message
    monkeypatch.setenv("ONCELOG_CHECK_SECRET_FILES", "false")
    assert run("profiles").exit_code == 0


def test_file_without_a_token_may_be_read_but_not_changed_by_others(file: Path) -> None:
    write(file, '[profiles.a]\nurl = "http://127.0.0.1:1"\n', 0o644)
    assert run("profiles").exit_code == 0
    file.chmod(0o666)
    assert "other users may change it" in refusal("profiles")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("url = 'http://a'", "unknown name 'url'"),
        ("profiles = 1", "`profiles` a table"),
        ("default = 'none'", "has no profile 'none'; it has no profiles"),
        ("[profiles.a]\ntoken = 'x'", "profiles.a: Object missing required field `url`"),
        ("[profiles.a]\nurl = 1", "profiles.a: Expected `str`, got `int` - at `$.url`"),
        ("[profiles.a]\nurl = 'http://a'\ntokn = 'x'", "profiles.a: Object contains unknown field `tokn`"),
        ("[profiles.a]\nurl = 'http://a'\ntoken = 'x'\ntoken_file = 'y'", "both token and token_file"),
        ("default = 'a'\n[profiles.a]\nurl = 'ftp://a'", "profiles.a.url must be http://HOST:PORT"),
        ("[profiles.a", "is not valid TOML"),
    ],
)
def test_malformed_file_is_explained(file: Path, text: str, problem: str) -> None:
    write(file, text)
    message = refusal("profiles")
    assert str(file) in message
    assert problem in message


def test_unknown_profile_is_reported_with_the_known_ones(file: Path) -> None:
    message = refusal("tail", "--profile", "none", "--partition", "a")
    known = "it has local, production, file. Add a table [profiles.none] with url"
    assert message == f"oncelog: --profile: {file} has no profile 'none'; {known}\n"


def test_missing_file_is_an_error_only_if_a_variable_names_it(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("profiles").exit_code == 0
    monkeypatch.setenv("ONCELOG_PROFILES_FILE", str(home / "none.toml"))
    assert f"{home}/none.toml cannot be read" in refusal("profiles")


# --- the list ---------------------------------------------------------------------------------------------


def test_list_shows_no_token(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONCELOG_PROFILE", "production")
    printed = run("profiles").stdout
    assert "commands use https://log.example.org (ONCELOG_PROFILE)" in printed
    assert "*  production  https://log.example.org   in the profile  billing" in printed
    listed = json.loads(run("profiles", "--json").stdout)
    assert (listed["file"], listed["url"]) == (str(file), "https://log.example.org")
    assert [one["name"] for one in listed["profiles"] if one["is_used"]] == ["production"]
    assert listed["profiles"][2] == {
        "name": "file",
        "url": "https://file.example.org",
        "token": "file.token",
        "client_id": None,
        "is_used": False,
    }
    assert SECRET not in printed + json.dumps(listed)


@pytest.mark.usefixtures("file")
def test_errors_and_reprs_contain_no_token() -> None:
    options = ServerOptions(token=SECRET, profile="production")
    remote = build_remote(options)
    assert SECRET not in f"{options!r} {remote!r} {choose_server(options)!r}"
