"""`oncelog token` and `oncelog apikey`, and the examples of docs/guides/identity.md."""

import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

from cli.processes import Command
from cli.runner import COMMAND, RUNNER
from oncelog.errors import AuthError
from oncelog.server import limits
from oncelog.server.auth.api_keys import ApiKeys
from oncelog.server.auth.principal import parse_grants
from oncelog.server.auth.signing_keys import KeyFile, KeyKind
from oncelog.server.auth.tokens import Tokens, TokenSettings
from oncelog.storage.clock import SystemClock
from server.auth import auth_material
from server.auth.auth_material import ALGORITHMS, SetClock, make_key

ROOT: Final = Path(__file__).parent.parent.parent
PAGE: Final = (ROOT / "docs/guides/identity.md").read_text(encoding="utf-8")
GRANTED: Final = ("--read", "orders/*", "--read", "a", "--write", "orders/1")


def run(*arguments: str | Path) -> str:
    done = RUNNER.invoke(COMMAND, [str(one) for one in arguments])
    assert done.exit_code == 0
    assert not done.stderr or done.stderr.startswith("oncelog: note: ")
    return done.stdout.removesuffix("\n")


def refusal(*arguments: str | Path, status: int = 2) -> str:
    done = RUNNER.invoke(COMMAND, [str(one) for one in arguments])
    assert (done.exit_code, done.stdout) == (status, "")
    return done.stderr


def private_key(directory: Path, algorithm: str) -> Path:
    key = make_key(algorithm)
    data = auth_material.SECRET + b"0\n" if algorithm == "HS256" else key.as_pem(private=True)  # type: ignore[union-attr]
    return auth_material.write_file(directory / "private", data)


def verifier_of(source: KeyFile, algorithm: str, now_ms: int | None = None, **settings: Any) -> Tokens:
    """Return a server's verifier for the key (default time: now)."""
    clock = SystemClock().wall_ms if now_ms is None else lambda: now_ms
    tokens = Tokens(TokenSettings(algorithms=(algorithm,), key_files=(source,), **settings), clock)
    auth_material.reload(tokens)
    return tokens


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_token_is_accepted_by_a_server_with_the_key(tmp_path: Path, algorithm: str) -> None:
    key = private_key(tmp_path, algorithm)
    before_ms = SystemClock().wall_ms()
    printed = run(
        *("token", "--key", key, "--alg", algorithm, "--sub", "ada", *GRANTED, "--expires", "15m"),
        *("--client-id", "laptop", "--issuer", "me", "--audience", "logs"),
    )
    tokens = verifier_of(
        auth_material.key_file(tmp_path, algorithm), algorithm, issuer="me", audiences=("logs",), leeway_ms=0
    )
    found = tokens.authenticate(printed)
    assert (found.actor, found.client_id, found.grants) == (
        "user:ada",
        "laptop",
        parse_grants(["orders/*", "a"], ["orders/1"]),
    )
    assert found.expires_ms is not None
    assert before_ms - 1000 < found.expires_ms - 900_000 <= SystemClock().wall_ms()


@pytest.mark.parametrize(
    ("text", "seconds"), [(None, 3600), ("90s", 90), ("2m", 120), ("3h", 10_800), ("30d", 2_592_000)]
)
def test_token_expires_after_the_given_duration(tmp_path: Path, text: str | None, seconds: int) -> None:
    key = private_key(tmp_path, "HS256")
    before_ms = SystemClock().wall_ms()
    printed = run("token", "--key", key, "--alg", "HS256", "--sub", "a", *(() if text is None else ("--expires", text)))
    after_ms = SystemClock().wall_ms()
    tokens = verifier_of(KeyFile(str(key), KeyKind.SECRET), "HS256", leeway_ms=0, now_ms=before_ms)
    expires_ms = tokens.authenticate(printed).expires_ms
    assert expires_ms is not None
    assert before_ms - 1000 < expires_ms - seconds * 1000 <= after_ms  # in whole seconds


def test_token_is_signed_with_the_key_of_the_given_id(tmp_path: Path) -> None:
    members = [{**make_key("ES256", number).as_dict(private=True), "kid": f"k{number}"} for number in range(2)]
    source = auth_material.key_set(tmp_path / "set.json", *members)
    printed = run("token", "--key", source.path, "--alg", "ES256", "--sub", "a", "--kid", "k1")
    assert verifier_of(source, "ES256").authenticate(printed).actor == "user:a"
    only_first = auth_material.key_set(tmp_path / "first.json", members[0])
    with pytest.raises(AuthError):
        verifier_of(only_first, "ES256").authenticate(printed)
    assert "no key with the id 'k2'" in refusal(
        "token", "--key", source.path, "--alg", "ES256", "--sub", "a", "--kid", "k2"
    )


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_token_signed_with_a_key_file_gets_the_given_key_id(tmp_path: Path, algorithm: str) -> None:
    key = private_key(tmp_path, algorithm)
    printed = run("token", "--key", key, "--alg", algorithm, "--sub", "a", "--kid", "2026-11")
    current = auth_material.key_file(tmp_path, algorithm, key_id="2026-11")
    assert verifier_of(current, algorithm).authenticate(printed).actor == "user:a"
    with pytest.raises(AuthError):
        verifier_of(KeyFile(current.path, current.kind, "2026-12"), algorithm).authenticate(printed)


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        (("--expires", "soon"), "not a duration"),
        (("--expires", "1w"), "not a duration"),
        (("--expires", "-1h"), "not a duration"),
        (("--expires", "999999999d"), "$.exp"),
        (("--sub", ""), "$.sub"),
        (("--client-id", ""), "$.client_id"),
        (("--read", ""), "$.read[0]"),
        (("--write", "x" * 300), "$.write[0]"),
        (("--alg", "none"), "--alg"),
        (("--alg", "RS256"), "PEM key"),
    ],
)
def test_invalid_token_claims_are_refused(tmp_path: Path, wrong: tuple[str, str], complaint: str) -> None:
    key = private_key(tmp_path, "HS256")
    output = refusal("token", "--key", key, "--alg", "HS256", "--sub", "a", *wrong)
    assert complaint in output
    assert auth_material.SECRET.decode() not in output


def test_key_file_readable_by_other_users_is_refused(tmp_path: Path) -> None:
    key = private_key(tmp_path, "HS256")
    key.chmod(0o644)
    assert "chmod 600" in refusal("token", "--key", key, "--alg", "HS256", "--sub", "a")
    assert "No such file" in refusal("token", "--key", tmp_path / "none", "--alg", "HS256", "--sub", "a")


def test_command_line_does_not_import_cryptography() -> None:
    program = "import sys, oncelog.cli; sys.exit('joserfc' in sys.modules or 'cryptography' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)  # noqa: S603


# --- API keys -----------------------------------------------------------------------------------------


def test_api_keys_are_created_listed_and_revoked(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    text = run("apikey", "create", path, "--client-id", "billing", "--name", "nightly bills", *GRANTED)
    keys = ApiKeys(path, SetClock())
    auth_material.reload(keys)
    found = keys.authenticate(text)
    assert (found.actor, found.grants) == ("client:billing", parse_grants(["orders/*", "a"], ["orders/1"]))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    headings, line = run("apikey", "list", path).splitlines()
    assert headings.split() == ["id", "client", "name", "created", "state", "grants"]
    assert re.fullmatch(
        rf"{found.key_id}  billing  nightly bills  .* UTC  active  "
        r"read 'a', 'orders/\*'; write 'orders/1'",
        line,
    )
    assert text[-43:] not in line
    done = RUNNER.invoke(COMMAND, ["apikey", "revoke", str(path), str(found.key_id)])
    revoked = done.stdout.removesuffix("\n")
    assert " revoked 2" in revoked
    assert "refuse the key and close its connections within about a second" in done.stderr
    assert RUNNER.invoke(COMMAND, ["apikey", "revoke", str(path), str(found.key_id)]).stdout == done.stdout
    assert run("apikey", "list", path) == revoked
    auth_material.reload(keys)
    with pytest.raises(AuthError):
        keys.authenticate(text)


def test_credential_without_grants_is_created_with_a_note(tmp_path: Path) -> None:
    for command in (
        ("apikey", "create", tmp_path / "keys.json", "--client-id", "billing", "--name", "n"),
        ("token", "--key", private_key(tmp_path, "HS256"), "--alg", "HS256", "--sub", "ada"),
    ):
        done = RUNNER.invoke(COMMAND, [str(one) for one in command])
        assert done.exit_code == 0
        assert done.stdout
        assert "grants no access; create another one with --read, --write or --audit" in done.stderr
        assert run(*command, "--read", "a")


def test_second_valid_key_of_a_client_is_created_with_a_note(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    create = [*("apikey", "create", str(path), "--name", "n", "--read", "a"), "--client-id"]
    keys = [json.loads(RUNNER.invoke(COMMAND, [*create, "till", "--json"]).stdout)["id"] for _ in range(2)]
    RUNNER.invoke(COMMAND, ["apikey", "revoke", str(path), keys[0]])
    done = RUNNER.invoke(COMMAND, [*create, "till"])
    assert done.stdout.startswith("olk_")
    assert f"note: 'till' also has other valid keys: {keys[1]}; to revoke one" in done.stderr
    assert RUNNER.invoke(COMMAND, [*create, "report"]).stderr == ""


def test_api_keys_are_printed_as_json(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    made = json.loads(run("apikey", "create", path, "--client-id", "é", "--name", "n", "--json"))
    text = made.pop("key")
    assert made == {
        "id": text[4:20],
        "client_id": "é",
        "name": "n",
        "grants": {"read": [], "write": []},
        "created_ms": made["created_ms"],
        "revoked_ms": None,
        "expires_ms": None,
    }
    listed = run("apikey", "list", path, "--json")
    assert json.loads(listed) == [made]
    assert "sha256" not in listed
    assert "read nothing; write nothing" in run("apikey", "list", path)


@pytest.mark.rule("CO-28")
def test_expiry_of_api_keys_is_listed_and_enforced(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    now_ms = SystemClock().wall_ms()
    create: list[str | Path] = ["apikey", "create", path, "--client-id", "a", "--name", "n"]
    made = json.loads(run(*create, "--json", "--expires", "90d"))
    assert 0 <= made["expires_ms"] - now_ms - 90 * 86_400_000 < 600_000
    assert re.search(r" UTC  expires 2\d{3}-.* UTC  ", run("apikey", "list", path))
    text = run(*create, "--expires", "0s")
    assert " UTC  expired 2" in run("apikey", "list", path)
    keys = ApiKeys(path, SystemClock().wall_ms)
    auth_material.reload(keys)
    with pytest.raises(AuthError):
        keys.authenticate(text)
    assert "is not a duration" in refusal(*create, "--expires", "soon")


def test_invalid_api_key_commands_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    assert "No such file" in refusal("apikey", "list", path)
    assert "No such file" in refusal("apikey", "revoke", path, "0" * 16)
    nowhere = tmp_path / "none" / "keys.json"
    assert f"the directory {tmp_path}/none does not exist" in refusal(
        "apikey", "create", nowhere, "--client-id", "a", "--name", "n"
    )
    assert "$.client_id" in refusal("apikey", "create", path, "--client-id", "", "--name", "n")
    assert "$.read[0]" in refusal("apikey", "create", path, "--client-id", "a", "--name", "n", "--read", "")
    run("apikey", "create", path, "--client-id", "a", "--name", "n")
    assert f"has no key {'0' * 16!r}" in refusal("apikey", "revoke", path, "0" * 16, status=1)
    for wrong in ("till", "olk_0123456789abcdef_secret", ""):
        assert refusal("apikey", "revoke", path, wrong).startswith("oncelog: ID must be an id of 16 hexadecimal digits")
    path.chmod(0o660)
    assert "chmod 600" in refusal("apikey", "list", path)
    assert "chmod 600" in refusal("apikey", "create", path, "--client-id", "a", "--name", "n")


def test_whole_key_names_the_key_to_revoke_and_is_not_printed(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    key, foreign = (
        run("apikey", "create", tmp_path / name, "--client-id", "a", "--name", "n", "--read", "a")
        for name in ("keys.json", "other.json")
    )
    assert f"{path} has no key {foreign[4:20]!r};" in refusal("apikey", "revoke", path, foreign, status=1)
    done = RUNNER.invoke(COMMAND, ["apikey", "revoke", str(path), key])
    assert done.exit_code == 0
    assert done.stdout.splitlines()[1].startswith(f"{key[4:20]} ")
    assert key[21:] not in done.output


def test_full_disk_leaves_no_api_key_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_disk_full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("oncelog.server.auth.secret_files.os.fsync", raise_disk_full)
    path = tmp_path / "keys.json"
    assert "No space left" in refusal("apikey", "create", path, "--client-id", "a", "--name", "n", status=74)
    assert not path.exists()


def test_key_that_cannot_be_printed_is_revoked(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    arguments = ("apikey", "create", str(path), "--client-id", "a", "--name", "n", "--read", "*")
    with open("/dev/full", "wb") as full, Command(*arguments, stdin=None, stdout=full) as process:  # noqa: PTH123
        _, errors = process.communicate()
    (key,) = ApiKeys(path, SystemClock().wall_ms).list()
    assert key.revoked_ms is not None
    assert process.returncode == 74
    assert f"the key {key.id} could not be printed, so it is revoked" in errors


def test_unprinted_key_that_cannot_be_revoked_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_to_print(*_: object) -> None:
        monkeypatch.setattr("oncelog.server.auth.secret_files.os.fsync", fail_to_sync)
        raise OSError(28, "No space left on device")

    def fail_to_sync(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("oncelog.cli.credentials.print_result", fail_to_print)
    path = tmp_path / "keys.json"
    errors = refusal("apikey", "create", path, "--client-id", "a", "--name", "n", "--read", "*", status=74)
    (key,) = ApiKeys(path, SystemClock().wall_ms).list()
    assert f"revoke it with `oncelog apikey revoke {path} {key.id}`" in errors


# --- docs/guides/identity.md ---------------------------------------------------------------------------------


def test_examples_of_the_identity_page_work(tmp_path: Path) -> None:
    commands = re.findall(r"^\$ (.*)$", PAGE, re.MULTILINE)
    assert len(commands) == 10
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "NO_COLOR": "1"}
    subprocess.run(  # noqa: S603
        ["/bin/bash", "-eu", "-c", "\n".join(commands)], check=True, cwd=tmp_path, env=environment, capture_output=True
    )
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (shown,) = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
    printed = subprocess.run([sys.executable, "-c", program], check=True, cwd=tmp_path, capture_output=True, text=True)  # noqa: S603
    assert printed.stdout == shown
    tokens = verifier_of(KeyFile(str(tmp_path / "public.pem"), KeyKind.PEM), "EdDSA", audiences=("logs",))
    assert tokens.authenticate((tmp_path / "token-eddsa.txt").read_text().strip()).actor == "user:ada"


def test_identity_page_states_the_limits() -> None:
    for number in (
        *(limits.GRANTS_MAX, limits.TOKEN_KEYS_MAX, limits.SECRET_BYTES_MIN, limits.RSA_BITS_MIN),
        *(limits.LEEWAY_MS_DEFAULT // 1000, limits.LEEWAY_MS_MAX // 60_000),
    ):
        assert re.search(rf"\b{number}\b", PAGE), number
    for number in (limits.TOKEN_CHARACTERS_MAX, limits.API_KEYS_MAX):
        assert f"{number:,}" in PAGE
