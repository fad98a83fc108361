"""`oncelog doctor --config`: settings, permissions, keys, certificates, open files and versions."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cli.doctor.checks import create_key, doctor, refused, write_certificate, write_settings
from cli.processes import ENVIRONMENT
from cli.runner import COMMAND, RUNNER
from oncelog.cli.doctor.versions import check_sqlite, is_safe_sqlite
from oncelog.server.auth.api_keys import ApiKeys

# --- settings


def test_good_configuration_has_no_problems(tmp_path: Path) -> None:
    found = doctor("--config", write_settings(tmp_path))
    assert found.status == 0
    assert "is valid" in found.get("ok", "settings")
    assert "1 valid API key" in found.get("ok", "keys")
    assert "the server creates it" in found.get("ok", "store")
    assert "Python" in found.get("ok", "versions")
    assert not any(one["level"] == "warning" and one["check"] != "sqlite" for one in found.all)


def test_all_invalid_settings_are_listed(tmp_path: Path) -> None:
    config = write_settings(tmp_path, "prot = 80", 'host = "no host"', "[limits]\nconections_max = 1")
    found = doctor("--config", config)
    said = found.get("problem", "settings")
    assert "unknown setting 'prot'; did you mean port?" in said
    assert "unknown setting 'limits.conections_max'; did you mean limits.connections_max?" in said
    assert "host must be an IP address" in said
    assert found.problems == ["settings"] * 3


def test_settings_that_contradict_each_other_are_reported(tmp_path: Path) -> None:
    found = doctor("--config", write_settings(tmp_path, "development = true", 'host = "0.0.0.0"'))
    assert "host must be a loopback address" in found.get("problem", "settings")


@pytest.mark.parametrize(("text", "message"), [("port =", "is not valid TOML"), (None, "cannot be read")])
def test_unreadable_settings_are_a_problem(text: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "oncelog.toml"
    if text is not None:
        path.write_text(text)
    assert message in doctor("--config", path).get("problem", "settings")


def test_environment_is_checked_like_the_file(tmp_path: Path) -> None:
    config = write_settings(tmp_path)
    found = doctor("--config", config, env={"ONCELOG_PROT": "1", "ONCELOG_TOKEN": "x"})
    assert "unknown setting 'ONCELOG_PROT'; did you mean ONCELOG_PORT?" in found.get("problem", "settings")
    assert len(found.problems) == 1


def test_paths_that_depend_on_the_directory_are_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = write_settings(tmp_path, 'store = "log.db"', "api_keys.file = 'keys.json'")
    said = doctor("--config", config).get("warning", "settings")
    assert said.startswith("store and api_keys.file in ")
    assert "Use an absolute path" in said


def test_development_mode_is_a_warning(tmp_path: Path) -> None:
    said = doctor("--config", write_settings(tmp_path, "development = true")).get("warning", "settings")
    assert "gives every user of this machine full access" in said


def test_server_for_other_machines_without_tls_is_a_warning(tmp_path: Path) -> None:
    said = doctor("--config", write_settings(tmp_path, 'host = "0.0.0.0"')).get("warning", "settings")
    assert "send their credentials unencrypted" in said
    config = write_settings(tmp_path, 'host = "0.0.0.0"', 'trusted_proxies = ["127.0.0.1"]')
    assert doctor("--config", config).status == 0


def test_invalid_schemas_are_a_problem(tmp_path: Path) -> None:
    (tmp_path / "schemas.json").write_text("[]")
    found = doctor("--config", write_settings(tmp_path, f'deltas_schemas = "{tmp_path}/schemas.json"'))
    assert "schemas.json" in found.get("problem", "settings")


# --- permissions


def test_settings_file_that_others_may_change_is_a_problem(tmp_path: Path) -> None:
    config = write_settings(tmp_path)
    config.chmod(0o646)
    said = doctor("--config", config).get("problem", "permissions")
    assert f"chmod 600 {config}" in said


def test_readable_password_is_a_problem_and_is_not_printed(tmp_path: Path) -> None:
    config = write_settings(tmp_path, 'store = "postgresql://ann:secret-word@127.0.0.1:1/orders"')
    config.chmod(0o644)
    found = doctor("--config", config)
    assert "contains a database password, and other users may read" in found.get("problem", "permissions")
    assert "cannot be reached" in found.get("problem", "store")
    assert "secret-word" not in found.text


@pytest.mark.parametrize("may_be_loose", [False, True])
def test_key_file_that_others_may_read_is_reported(may_be_loose: bool, tmp_path: Path) -> None:
    config = write_settings(tmp_path, f"check_secret_files = {str(not may_be_loose).lower()}")
    (tmp_path / "keys.json").chmod(0o644)
    found = doctor("--config", config)
    assert f"chmod 600 {tmp_path}/keys.json" in found.get("warning" if may_be_loose else "problem", "keys")
    assert found.status == int(not may_be_loose)


# --- keys


def test_missing_or_malformed_key_file_is_a_problem(tmp_path: Path) -> None:
    config = write_settings(tmp_path, keys=False)
    assert "keys.json cannot be read" in doctor("--config", config).get("problem", "keys")
    (tmp_path / "keys.json").write_text("{}")
    (tmp_path / "keys.json").chmod(0o600)
    assert "is not an API key file" in doctor("--config", config).get("problem", "keys")


def test_key_file_without_valid_keys_is_a_warning(tmp_path: Path) -> None:
    config, keys = write_settings(tmp_path), ApiKeys(tmp_path / "keys.json", lambda: 0)
    keys.revoke(keys.list()[0].id)
    assert "has no valid API key" in doctor("--config", config).get("warning", "keys")


def test_key_that_expires_soon_is_a_warning(tmp_path: Path) -> None:
    config = write_settings(tmp_path)
    key = create_key(tmp_path / "keys.json", "--expires", "10d")
    create_key(tmp_path / "keys.json", "--expires", "90d")
    found = doctor("--config", config)
    said = found.get("warning", "keys")
    assert "of 'till' expires in 9 d" in said
    assert said.count("expires in") == 1
    assert key.split("_", 2)[2] not in found.text


def test_signing_keys_are_checked(tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("x" * 40)
    (tmp_path / "secret.txt").chmod(0o600)
    files = f'"secret#1:{tmp_path}/secret.txt", "secret#1:{tmp_path}/secret.txt", "pem:{tmp_path}/missing.pem"'
    config = write_settings(tmp_path, f'[tokens]\nalgorithms = ["HS256"]\nkey_files = [{files}]')
    said = doctor("--config", config).get("problem", "keys")
    assert "missing.pem cannot be read" in said
    config.write_text(config.read_text().replace(f', "pem:{tmp_path}/missing.pem"', "").replace("#1:", "#2:", 1))
    found = doctor("--config", config)
    assert "has 1 signing key (HS256)" in found.get("ok", "keys")
    assert "x" * 40 not in found.text


def test_key_of_stream_tickets_is_checked(tmp_path: Path) -> None:
    key = tmp_path / "tickets.key"
    config = write_settings(tmp_path, f'tickets.key_file = "{key}"')
    assert "tickets.key cannot be read" in doctor("--config", config).get("problem", "keys")
    key.write_text("x" * 40)
    key.chmod(0o644)
    assert f"chmod 600 {key}" in doctor("--config", config).get("problem", "keys")
    config = write_settings(tmp_path, f'tickets.key_file = "{key}"', "check_secret_files = false")
    assert f"chmod 600 {key}" in doctor("--config", config).get("warning", "keys")
    key.chmod(0o600)
    found = doctor("--config", config)
    assert "has a key for stream tickets" in found.get("ok", "keys")
    assert "x" * 40 not in found.text


# --- TLS


@pytest.mark.parametrize(
    ("start_days", "end_days", "level", "message"),
    [
        (-2, -1, "problem", "the certificate expired "),
        (1, 90, "problem", "is not valid before"),
        (-1, 3.5, "warning", "expires in 3 d "),
        (-1, 60.5, "ok", "expires in 60 d "),
    ],
)
def test_expiry_of_the_certificate(
    start_days: float, end_days: float, level: str, message: str, tmp_path: Path
) -> None:
    chain, key = write_certificate(tmp_path, start_days, end_days)
    config = write_settings(tmp_path, f'[tls]\ncertificate = "{chain}"\nprivate_key = "{key}"')
    said = doctor("--config", config).get(level, "tls")
    assert message in said
    assert str(chain) in said


def test_key_of_another_certificate_is_a_problem(tmp_path: Path) -> None:
    _, key = write_certificate(tmp_path, -1, 60)
    other = key.rename(tmp_path / "other.pem")
    chain, _ = write_certificate(tmp_path, -1, 60)
    config = write_settings(tmp_path, f'[tls]\ncertificate = "{chain}"\nprivate_key = "{other}"')
    assert "does not match the certificate" in doctor("--config", config).get("problem", "tls")


def test_readable_tls_key_is_a_problem(tmp_path: Path) -> None:
    chain, key = write_certificate(tmp_path, -1, 60)
    key.chmod(0o644)
    config = write_settings(tmp_path, f'[tls]\ncertificate = "{chain}"\nprivate_key = "{key}"')
    assert f"chmod 600 {key}" in doctor("--config", config).get("problem", "tls")
    config = write_settings(
        tmp_path, "check_secret_files = false", f'[tls]\ncertificate = "{chain}"\nprivate_key = "{key}"'
    )
    found = doctor("--config", config)
    assert found.status == 0
    assert "contains a private key" in found.get("warning", "tls")


# --- limits and versions


def run_process(config: Path, prefix: str = "", **environment: str) -> str:
    command = f"{prefix} exec {sys.executable} -m oncelog doctor --config {config}"
    done = subprocess.run(  # noqa: S603
        ["/bin/bash", "-c", command], capture_output=True, text=True, check=False, env={**ENVIRONMENT, **environment}
    )
    assert done.stderr == ""
    return done.stdout


def test_low_limit_of_open_files_is_a_warning(tmp_path: Path) -> None:
    said = run_process(write_settings(tmp_path), "ulimit -Sn 900; ulimit -Hn 1000;")
    assert "warning  open_files   up to 1000 open files are allowed here" in said
    assert "need 10200" in said
    assert "LimitNOFILE=10200" in said


def test_low_soft_limit_of_open_files_is_not_reported(tmp_path: Path) -> None:
    config = write_settings(tmp_path, "[limits]\nconnections_max = 500")
    said = run_process(config, "ulimit -Sn 300; ulimit -Hn 1000;")
    assert "ok       open_files   up to 1000 open files are allowed here, and 700 are needed" in said


def test_old_package_is_a_problem(tmp_path: Path) -> None:
    metadata = tmp_path / "site" / "aiohttp-3.9.1.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: aiohttp\nVersion: 3.9.1\n")
    said = run_process(write_settings(tmp_path), PYTHONPATH=str(tmp_path / "site"))
    assert "problem  versions     aiohttp is 3.9.1, and Oncelog needs 3.14.4 or newer. Update it: pip install" in said


@pytest.mark.parametrize(
    ("version", "is_safe"),
    [
        ((3, 40, 1), False),
        ((3, 44, 5), False),
        ((3, 44, 6), True),
        ((3, 45, 0), False),
        ((3, 50, 6), False),
        ((3, 50, 7), True),
        ((3, 51, 2), False),
        ((3, 51, 3), True),
        ((3, 52, 0), True),
        ((4, 0, 0), True),
    ],
)
def test_safe_versions_of_sqlite(version: tuple[int, ...], is_safe: bool) -> None:
    assert is_safe_sqlite(version) is is_safe


def test_warning_about_sqlite_names_safe_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sqlite3.sqlite_version", "3.40.1")
    (found,) = check_sqlite()
    assert (found.level, found.check) == ("warning", "sqlite")
    assert "`oncelog backup FILE COPY` and `oncelog verify`, are safe" in found.remedy


# --- arguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "name what to check: a log, --config FILE, --url URL or --profile NAME"),
        (("log.db", "--config", "oncelog.toml"), "leave out LOG"),
        (("log.db", "--token", "x"), "add --url"),
        (("--url", "http://127.0.0.1:1", "--backup", "copy.db"), "name the log"),
        (("mysql://db",), "begins with mysql://"),
        (("--url", "127.0.0.1"), "--url must be http://HOST:PORT"),
        (("log.db", "--max-age", "soon"), "'soon' is not a duration"),
        (("log.db", "--backup", "ftp://x"), "begins with ftp://"),
        (("postgresql://127.0.0.1:1/x", "--backup", "copy.db"), "a database is backed up with its own tools"),
    ],
)
def test_wrong_arguments_are_refused(arguments: tuple[str, ...], message: str) -> None:
    assert message in refused(*arguments)


def test_lines_have_level_check_message_and_remedy(tmp_path: Path) -> None:
    done = RUNNER.invoke(COMMAND, ["doctor", str(tmp_path / "missing.db")])
    assert done.exit_code == 1
    lines = done.stdout.splitlines()
    assert f"problem  store        {tmp_path}/missing.db does not exist. Check the path." in lines
    assert lines[-1].startswith("1 problem, ")
    assert os.linesep not in done.stderr
