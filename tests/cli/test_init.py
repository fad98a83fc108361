"""`oncelog init`: the files that it writes, the commands that it prints, and interruptions."""

import fcntl
import json
import os
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cli.doctor.checks import write_certificate
from cli.processes import ENVIRONMENT, Command
from cli.runner import COMMAND, RUNNER, Result
from cli.server_process import oncelog, reserve_port
from deadlines import WAIT_S
from oncelog.cli.file_set import create_file_set
from oncelog.errors import OncelogError
from oncelog.server.auth.api_keys import ApiKeys
from oncelog.server.auth.principal import EVERYTHING, parse_grants
from oncelog.server.settings import ServerSettings, list_tables, load
from oncelog.server.settings_template import format_value, render_settings

FILES = {"keys.json", "oncelog.toml"}
KEY = re.compile(r"export ONCELOG_TOKEN=(olk_\S+)")


def run(*arguments: object) -> Result:
    return RUNNER.invoke(COMMAND, ["init", *map(str, arguments)])


def run_successfully(*arguments: object) -> str:
    done = run(*arguments)
    assert done.exit_code == 0, (done.stdout, done.stderr, done.exception)
    return done.stdout


def names_in(directory: Path) -> set[str]:
    return {entry.name for entry in directory.iterdir()}


@contextmanager
def serving(config: Path, *options: str) -> Iterator[None]:
    """Run a server with a settings file."""
    process = Command("serve", "--config", str(config), "--set=grpc_port=0", *options)
    try:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if "listening" in line:
                break
        assert "listening" in lines[-1], lines
        yield
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=WAIT_S)
    finally:
        process.kill()
        process.communicate()


# --- the files


def test_server_starts_with_the_configuration_and_accepts_the_key(tmp_path: Path) -> None:
    directory = tmp_path / "a directory"
    with reserve_port() as port:
        said = run_successfully(directory, "--port", port)
        commands = [line for line in said.splitlines() if line.startswith("  ")]
        assert " serve --config " in commands.pop(0)
        with serving(directory / "oncelog.toml"):
            program = re.escape(commands[1].split()[0])
            script = "\n".join(re.sub(rf"^  {program} ", "  oncelog ", command) for command in commands)
            path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
            done = subprocess.run(  # noqa: S603
                ["/bin/bash", "-e", "-c", script],
                capture_output=True,
                text=True,
                check=False,
                cwd=tmp_path,
                env={**ENVIRONMENT, "PATH": path},
            )
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert "accepts the token" in done.stdout
    assert "is ready: epoch" in done.stdout
    assert '"order":17' in done.stdout
    assert (directory / "oncelog.db").exists()


def test_only_the_owner_can_read_the_files(tmp_path: Path) -> None:
    run_successfully(tmp_path / "new", "--tokens")
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "new").iterdir()}
    assert modes == {"oncelog.toml": 0o600, "keys.json": 0o600, "token-private.pem": 0o600, "token-public.pem": 0o644}
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700


def test_key_is_printed_once_and_stored_only_as_a_hash(tmp_path: Path) -> None:
    said = run_successfully(tmp_path)
    (key,) = KEY.findall(said)
    assert said.count(key) == 1
    assert not any(key in path.read_text() for path in tmp_path.iterdir())
    keys = ApiKeys(tmp_path / "keys.json", lambda: 0)
    (stored,) = keys.list()
    assert (stored.client_id, stored.grants) == ("admin", EVERYTHING)


def test_key_gets_the_client_id_and_the_grants_of_the_options(tmp_path: Path) -> None:
    run_successfully(tmp_path, "--client-id", "till", "--read", "orders", "--write", "orders/*")
    (stored,) = ApiKeys(tmp_path / "keys.json", lambda: 0).list()
    assert (stored.client_id, stored.grants) == ("till", parse_grants(["orders"], ["orders/*"]))


def test_settings_have_absolute_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_successfully("conf", "--store", "logs/app.db", "--tls-certificate", "chain.pem", "--tls-private-key", "key.pem")
    settings = load("conf/oncelog.toml", {}, {})
    assert settings.store == f"{tmp_path}/logs/app.db"
    assert settings.api_keys.file == f"{tmp_path}/conf/keys.json"
    assert (settings.tls.certificate, settings.tls.private_key) == (f"{tmp_path}/chain.pem", f"{tmp_path}/key.pem")


def test_log_can_be_in_a_database(tmp_path: Path) -> None:
    said = run_successfully(tmp_path, "--store", "postgresql://ann:secret-word@db.example.org/orders")
    assert load(str(tmp_path / "oncelog.toml"), {}, {}).store == "postgresql://ann:secret-word@db.example.org/orders"
    assert "secret-word" not in said
    assert "postgresql://ann@db.example.org/orders" in said


def test_tokens_of_the_created_key_pair_are_accepted(tmp_path: Path) -> None:
    with reserve_port() as port:
        said = run_successfully(tmp_path, "--port", port, "--tokens")
        assert "token --key" in said
        arguments = ("--alg", "EdDSA", "--sub", "ada", "--read", "orders")
        made = oncelog("token", "--key", str(tmp_path / "token-private.pem"), *arguments)
        assert made.returncode == 0, made.stderr
        (tmp_path / "token-private.pem").unlink()  # the server does not need it
        with serving(tmp_path / "oncelog.toml"):
            url = f"http://127.0.0.1:{port}"
            checked = oncelog("doctor", "--url", url, ONCELOG_TOKEN=made.stdout.strip())
    assert "accepts the token" in checked.stdout, checked.stderr


@pytest.mark.parametrize("name", ["localhost", "HOST1.example"])
def test_commands_use_the_name_in_the_certificate(name: str, tmp_path: Path) -> None:
    chain, private = write_certificate(tmp_path, -1, 100, name=name)
    said = run_successfully(tmp_path, "--tls-certificate", chain, "--tls-private-key", private)
    assert said.count(f"--url https://{name}:7171") == 3
    assert "127.0.0.1" not in said
    assert "replace HOST" not in said


def test_name_in_the_certificate_is_quoted_for_the_shell(tmp_path: Path) -> None:
    name = "a;touch${IFS}pwned"
    chain, private = write_certificate(tmp_path, -1, 100, name=name)
    said = run_successfully(tmp_path, "--tls-certificate", chain, "--tls-private-key", private)
    assert said.count(f"--url 'https://{name}:7171'") == said.count(name) == 3


@pytest.mark.parametrize("content", [None, b"", b"no certificate"])
def test_commands_have_a_placeholder_if_the_certificate_has_no_name(content: bytes | None, tmp_path: Path) -> None:
    chain = tmp_path / "chain.pem"
    if content is not None:
        chain.write_bytes(content)
    said = run_successfully(tmp_path, "--tls-certificate", chain, "--tls-private-key", "key.pem")
    assert said.count("--url https://HOST:7171") == 3
    hint = "In the following commands, replace HOST with a name that is in the server's certificate."
    assert said.count(hint) == 1
    assert re.search(r"It is not shown again:\n\n  export", said)


def test_json_contains_the_key_and_the_files(tmp_path: Path) -> None:
    fields = json.loads(run_successfully(tmp_path, "--json"))
    assert fields["files"] == [f"{tmp_path}/keys.json", f"{tmp_path}/oncelog.toml"]
    assert fields["key"].startswith("olk_")


# --- the settings file


def test_every_setting_is_a_comment_with_its_default(tmp_path: Path) -> None:
    file = tmp_path / "oncelog.toml"
    file.write_text(render_settings("A title.", {"api_keys.file": "keys.json"}), encoding="utf-8")
    required = {"algorithms": '["EdDSA"]', "key_files": '["pem:key.pem"]'}
    lines = []
    for line in file.read_text(encoding="utf-8").splitlines():
        setting = re.fullmatch(r"#(\w+) =(.*)", line)
        if setting is None:
            lines.append(line)
        elif value := setting[2].strip() or required.get(setting[1], ""):
            lines.append(f"{setting[1]} = {value}")
        else:
            lines.append("")  # no default
    assert all(len(line) <= 100 for line in lines)
    file.write_text("\n".join(lines), encoding="utf-8")
    given = {"tokens.algorithms": "EdDSA", "tokens.key_files": "pem:key.pem", "api_keys.file": "keys.json"}
    assert load(str(file), {}, {}) == load(None, {}, given)


def test_settings_file_contains_every_setting_with_its_docstring() -> None:
    text = render_settings("A title.", {})
    names = [name for parts in list_tables().values() for part in parts for name in part.__struct_fields__]
    assert re.findall(r"^#?(\w+) =", text, re.MULTILINE) == names
    for name in names:
        assert re.search(rf"^# .+\n#{name} =", text, re.MULTILINE), name


@pytest.mark.parametrize("text", ['quote " and \\', "tab\tnewline\n", "é ☃", "\x7f\x01", "plain"])
def test_strings_are_escaped(text: str, tmp_path: Path) -> None:
    file = tmp_path / "oncelog.toml"
    file.write_text(f"store = {format_value(text)}\ndevelopment = true\n", encoding="utf-8")
    assert load(str(file), {}, {}).store == text


# --- refusals


@pytest.mark.parametrize("name", sorted(FILES))
def test_existing_file_is_named_and_not_overwritten(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("mine")
    done = run(tmp_path)
    assert done.exit_code == 2
    assert f"{tmp_path}/{name} already exists. `oncelog init` does not overwrite files" in done.stderr
    assert done.stdout == ""
    assert names_in(tmp_path) == {name}
    assert (tmp_path / name).read_text() == "mine"


def test_second_run_changes_nothing(tmp_path: Path) -> None:
    run_successfully(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert before.keys() == FILES
    assert run(tmp_path).exit_code == 2
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--port", "99999"), "port must be a whole number from 0 to 65535"),
        (("--port", "0"), "--port must be a number from 1 to 65535"),
        (("--host", "no host"), "host must be an IP address or a host name"),
        (("--tls-certificate", "chain.pem"), "must be set together"),
        (("--store", "mysql://db/orders"), "begins with mysql://"),
        (("--client-id", "user:ann"), "client_id"),
        (("--read", ""), "$.read[0]"),
    ],
)
def test_invalid_option_creates_nothing(options: tuple[str, ...], message: str, tmp_path: Path) -> None:
    done = run(tmp_path / "new", *options)
    assert done.exit_code == 2
    assert message in done.stderr
    assert not (tmp_path / "new").exists()


def test_directory_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = run(tmp_path / "file")
    assert done.exit_code == 2
    assert f"{tmp_path}/file is a file, not a directory" in done.stderr


# --- interruptions


KILLED = """
import os
from pathlib import Path
from oncelog.cli import main

link = Path.hardlink_to
def link_and_die(self, target):
    link(self, target)
    os._exit(9)
Path.hardlink_to = link_and_die
main()
"""
"""The process dies after the first file has appeared."""


def test_killed_command_leaves_nothing_that_the_next_one_uses(tmp_path: Path) -> None:
    killed = oncelog("init", str(tmp_path), program=KILLED)
    assert killed.returncode == 9
    assert names_in(tmp_path) == {"keys.json", ".oncelog-init.unfinished"}
    said = run_successfully(tmp_path)
    assert names_in(tmp_path) == FILES
    key = ApiKeys(tmp_path / "keys.json", lambda: 0)
    assert KEY.findall(said)[0].split("_")[1] == key.list()[0].id


def test_directory_of_a_command_that_was_killed_at_the_end_is_removed(tmp_path: Path) -> None:
    finished = tmp_path / ".oncelog-init.finished"
    finished.mkdir(mode=0o700)
    (finished / "keys.json").touch()
    run_successfully(tmp_path)
    assert names_in(tmp_path) == FILES


@pytest.mark.parametrize("name", [".oncelog-init.finished", ".oncelog-init.unfinished"])
@pytest.mark.parametrize("kind", ["directory", "file", "missing"])
def test_symbolic_link_is_refused_and_not_followed(name: str, kind: str, tmp_path: Path) -> None:
    other, directory = tmp_path / "other", tmp_path / "new"
    directory.mkdir()
    if kind == "directory":
        other.mkdir(mode=0o700)
        (other / "precious").write_text("data")
    elif kind == "file":
        other.write_text("data")
    (directory / name).symlink_to(other)
    done = run(directory)
    assert done.exit_code == 2
    assert f"{directory}/{name} must be a directory that this user owns, with mode 0700" in done.stderr
    assert names_in(directory) == {name}
    if kind != "missing":
        assert (other / "precious" if kind == "directory" else other).read_text() == "data"


@pytest.mark.parametrize("name", [".oncelog-init.finished", ".oncelog-init.unfinished"])
def test_directory_that_others_may_write_to_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "precious").write_text("data")
    (tmp_path / name).chmod(0o770)
    done = run(tmp_path)
    assert done.exit_code == 2
    assert f"{tmp_path}/{name} must be a directory" in done.stderr
    assert names_in(tmp_path / name) == {"precious"}


@pytest.mark.parametrize("name", [".oncelog-init.unfinished", ".oncelog-init.finished"])
def test_directory_with_a_subdirectory_is_refused_and_unchanged(name: str, tmp_path: Path) -> None:
    stage = tmp_path / name
    (stage / "sub").mkdir(parents=True)
    (stage / "file").touch()
    stage.chmod(0o700)
    done = run(tmp_path)
    assert done.exit_code == 2
    assert f"{stage} must be a directory that this user owns, with mode 0700 and without subdirectories" in done.stderr
    assert names_in(stage) == {"sub", "file"}


@pytest.mark.parametrize("umask", [0o177, 0o777])
def test_umask_that_restricts_the_owner_is_ignored(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        run_successfully(tmp_path / "parent/conf")
        assert os.umask(umask) == umask
    finally:
        os.umask(before)
    assert names_in(tmp_path / "parent/conf") == FILES
    for path, mode in ("parent", 0o777 & ~umask | 0o700), ("parent/conf", 0o700), ("parent/conf/keys.json", 0o600):
        assert stat.S_IMODE((tmp_path / path).stat().st_mode) == mode


@pytest.mark.parametrize("name", [".oncelog-init.finished", ".oncelog-init.unfinished"])
def test_nothing_is_removed_while_another_process_has_the_lock(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir(mode=0o700)
    (tmp_path / name / "keys.json").touch()
    descriptor = os.open(tmp_path / name, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        assert "another `oncelog init` is writing" in run(tmp_path).stderr
    finally:
        os.close(descriptor)
    assert names_in(tmp_path / name) == {"keys.json"}


def test_error_in_the_middle_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = Path.hardlink_to

    def fail(path: Path, target: Any) -> None:
        if path.name == "oncelog.toml":
            raise OSError(28, "No space left on device", str(path))
        link(path, target)

    monkeypatch.setattr(Path, "hardlink_to", fail)
    done = run(tmp_path / "new" / "inner" / "innermost")
    assert done.exit_code == 74
    assert "No space left on device" in done.stderr
    assert names_in(tmp_path) == set()


def test_files_whose_key_cannot_be_printed_are_removed(tmp_path: Path) -> None:
    with open("/dev/full", "wb") as full, Command("init", str(tmp_path), stdin=None, stdout=full) as process:  # noqa: PTH123
        _, errors = process.communicate()
    assert process.returncode == 74
    assert "the API key could not be printed, so the new files are removed" in errors
    assert names_in(tmp_path) == set()
    run_successfully(tmp_path)


def test_directory_that_cannot_be_created_leaves_none_above_it(tmp_path: Path) -> None:
    done = run(tmp_path / "new" / ("x" * 300))
    assert "File name too long" in done.stderr
    assert names_in(tmp_path) == set()


def test_file_that_appears_meanwhile_is_kept(tmp_path: Path) -> None:
    def write(stage: Path) -> None:
        for name in ("a", "b"):
            (stage / name).write_text("new")
        (tmp_path / "b").write_text("another program's")

    with pytest.raises(OncelogError, match="b already exists"), create_file_set(tmp_path, ["a", "b"]) as stage:
        write(stage)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"b": "another program's"}


def test_concurrent_command_is_refused(tmp_path: Path) -> None:
    with create_file_set(tmp_path, ["a"]) as stage:
        assert "another `oncelog init` is writing" in run(tmp_path).stderr
        (stage / "a").touch()
    assert names_in(tmp_path) == {"a"}


def test_settings_struct_is_what_the_file_describes() -> None:
    defaults = ServerSettings(development=True)
    for prefix, parts in list_tables().items():
        for part in parts:
            if prefix in ("log.", "disk.", "ledger.", "tls."):
                assert getattr(defaults, prefix.rstrip(".")) == part
