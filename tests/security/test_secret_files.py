"""Permissions of secret files follow PostgreSQL's rule and are checked on the opened file (CO-26)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cli.runner import COMMAND, RUNNER, Result
from oncelog.errors import SettingsError
from oncelog.server.auth import secret_files
from oncelog.server.auth.api_keys import ApiKeys
from oncelog.server.auth.principal import parse_grants
from oncelog.server.auth.secret_files import SecretCheck, check_secret_file
from oncelog.server.auth.signing_keys import ALGORITHMS, KeyFile, KeyKind
from server.auth import auth_material
from server.auth.auth_material import SetClock, load_keys, write_file
from server.running_server import serving
from server.test_server_app import certificate_subject, make_certificate

pytestmark = pytest.mark.rule("CO-26")

SERVER, OTHER, ROOT = 1000, 1001, 0


@pytest.mark.parametrize(
    ("owner", "mode", "is_good"),
    [
        *((SERVER, mode, True) for mode in (0o600, 0o400, 0o700)),
        *((SERVER, mode, False) for mode in (0o640, 0o620, 0o610, 0o604, 0o602, 0o601, 0o644, 0o660, 0o666, 0o777)),
        *((ROOT, mode, True) for mode in (0o600, 0o400, 0o640, 0o440)),
        *((ROOT, mode, False) for mode in (0o644, 0o660, 0o650, 0o604, 0o642, 0o641, 0o666)),
        *((OTHER, mode, False) for mode in (0o600, 0o400, 0o640)),
    ],
)
def test_own_file_may_have_mode_0600_and_file_of_root_0640(
    owner: int, mode: int, is_good: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: SERVER)
    if is_good:
        check_secret_file("key.pem", owner, mode, "a private key", SecretCheck.SERVER)
        return
    with pytest.raises(
        SettingsError, match=r"key\.pem contains a private key, and .*(chmod 6[04]0|chown 1000) key\.pem"
    ):
        check_secret_file("key.pem", owner, mode, "a private key", SecretCheck.SERVER)


def test_root_server_refuses_files_of_other_users_but_root_commands_use_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: ROOT)
    with pytest.raises(SettingsError, match="belongs to user id 1000"):
        check_secret_file("keys.json", SERVER, 0o600, "API keys", SecretCheck.SERVER)
    check_secret_file("keys.json", SERVER, 0o600, "API keys", SecretCheck.COMMAND)
    with pytest.raises(SettingsError, match="its mode is 0640"):
        check_secret_file("keys.json", SERVER, 0o640, "API keys", SecretCheck.COMMAND)


@pytest.mark.parametrize(("owner", "mode"), [(ROOT, 0o444), (OTHER, 0o644), (SERVER, 0o660)])
def test_loose_secret_files_are_used_with_one_warning_if_the_setting_allows_them(
    owner: int, mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: SERVER)
    for _ in range(3):
        check_secret_file(str(tmp_path / "key"), owner, mode, "a secret", SecretCheck.WARN)
    assert len(caplog.records) == 1
    assert caplog.records[0].getMessage().startswith(f"{tmp_path}/key contains a secret, and ")


def test_world_writable_secret_is_refused_even_if_loose_files_are_allowed() -> None:
    with pytest.raises(SettingsError, match="its mode is 0666"):
        check_secret_file("key", os.geteuid(), 0o666, "a secret", SecretCheck.WARN)


def test_owner_of_the_opened_file_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that later replaces the opened file under its name is neither checked nor used."""
    path = write_file(tmp_path / "secret", b"a" * 40)
    fake = write_file(tmp_path / "fake", b"b" * 40, 0o666)
    real = secret_files.check_secret_file

    def replace_and_check(*arguments: object) -> None:
        fake.replace(path)
        real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(secret_files, "check_secret_file", replace_and_check)
    (key,) = load_keys([KeyFile(str(path), KeyKind.SECRET)], ALGORITHMS)
    assert key.key.raw_value == b"a" * 40


def test_public_keys_may_be_read_by_all_users(tmp_path: Path) -> None:
    path = auth_material.key_set(tmp_path / "set.json", auth_material.public_jwk("ES256", "a"))
    Path(path.path).chmod(0o644)
    assert load_keys([path], ALGORITHMS)


# --- the server -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o644, 0o660, 0o666])
async def test_server_does_not_start_with_a_tls_key_that_others_may_read(tmp_path: Path, mode: int) -> None:
    tls = make_certificate(tmp_path, "first")
    (tmp_path / "key.pem").chmod(mode)
    with pytest.raises(SettingsError, match=rf"key\.pem contains a private key.*{mode:04o}.*chmod 600"):
        async with serving(tmp_path, tls=tls):
            pytest.fail("the server started")


async def test_setting_allows_a_tls_key_mounted_by_a_container_runtime(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tls = make_certificate(tmp_path, "first")
    (tmp_path / "key.pem").chmod(0o444)
    async with serving(tmp_path, tls=tls, check_secret_files=False) as served:
        assert await certificate_subject(served) == "first"
    assert caplog.text.count("key.pem contains a private key, and other users may read or change it") == 1


async def test_tls_key_that_becomes_readable_is_not_reloaded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(tmp_path, tls=make_certificate(tmp_path, "first")) as served:
        make_certificate(tmp_path, "second")
        (tmp_path / "key.pem").chmod(0o644)
        served.server.reload()
        assert "chmod 600" in caplog.text
        assert await certificate_subject(served) == "first"


# --- commands ---------------------------------------------------------------------------------------------


def invoke_command(*arguments: object, check: str | None = None) -> Result:
    return RUNNER.invoke(COMMAND, [str(one) for one in arguments], env={"ONCELOG_CHECK_SECRET_FILES": check})


def test_commands_refuse_loose_secret_files_unless_the_environment_allows_them(tmp_path: Path) -> None:
    secret = write_file(tmp_path / "secret", b"x" * 40, 0o644)
    token = write_file(tmp_path / "token", b"abc", 0o644)
    keys = tmp_path / "keys.json"
    ApiKeys(keys, SetClock()).create("a", "a", parse_grants())
    keys.chmod(0o644)
    sign = ["token", "--key", secret, "--alg", "HS256", "--sub", "ada"]
    submit = ["submit", "--url", "http://127.0.0.1:9", "--partition", "a", "--token-file", token, "--tries", "1", "{}"]
    for command, path in ((sign, secret), (["apikey", "list", keys], keys), (submit[:7] + submit[9:], token)):
        done = invoke_command(*command)
        assert done.exit_code == 2
        assert f"chmod 600 {path}" in done.stderr
        assert "chmod 600" in done.stderr
    for command in (sign, ["apikey", "list", keys]):
        assert invoke_command(*command, check="false").exit_code == 0
    assert "must be true or false" in invoke_command(*sign, check="maybe").stderr


def test_token_can_be_read_from_a_pipe() -> None:
    program = "import os; from oncelog.cli.files import read_token_file; print(read_token_file('/dev/stdin', 100))"
    done = subprocess.run([sys.executable, "-c", program], input="abc", capture_output=True, text=True, check=True)  # noqa: S603
    assert done.stdout == "abc\n"
