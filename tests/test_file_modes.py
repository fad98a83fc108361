"""Created files have mode 0600 or `file_mode`, regardless of the umask (CO-26)."""

import logging
import os
import re
import stat
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

import oncelog
from cli import sample_log
from cli.runner import COMMAND, RUNNER
from idempotency.asgi_application import START, WHOLE, Scripted, body_part, exchange
from oncelog.cli.files import write_new_file
from oncelog.client.chat.store import ChatStore
from oncelog.client.deltas.store import DeltasStore
from oncelog.client.deltas.values import DeltasLimits
from oncelog.client.events.store import ClientStore
from oncelog.client.ledger.store import LedgerStore
from oncelog.errors import SettingsError
from oncelog.file_modes import check_file_mode, create_file, open_or_create, parse_file_mode
from oncelog.idempotency.asgi import IdempotencyMiddleware
from oncelog.server.app import Server
from oncelog.server.auth.api_keys import ApiKeys
from oncelog.server.auth.principal import parse_grants
from oncelog.server.settings import load

pytestmark = pytest.mark.rule("CO-26")

SOURCE = Path(oncelog.__file__).parent
EVENT_ID = "00000000-0000-4000-8000-000000000001"


@pytest.fixture(params=[0o000, 0o022, 0o077, 0o277], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


@pytest.fixture
def no_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def modes(directory: Path) -> dict[str, str]:
    return {one.name: f"{stat.S_IMODE(one.stat().st_mode):04o}" for one in directory.iterdir()}


async def write_one(path: Path, file_mode: int = 0o600) -> dict[str, str]:
    """Commit an event, and return the file modes while the log is open."""
    async with oncelog.open(path, file_mode=file_mode) as log:
        await log.submit(oncelog.event(EVENT_ID, {"type": "a"}, ["a"]))
        return modes(path.parent)


# --- logs -------------------------------------------------------------------------------------------------


async def test_only_the_owner_can_access_the_log_and_its_write_ahead_log(tmp_path: Path, umask: None) -> None:
    found = await write_one(tmp_path / "log.db")
    assert found == {"log.db": "0600", "log.db-wal": "0600", "log.db-shm": "0600"}


async def test_file_mode_applies_to_the_log_and_its_write_ahead_log(tmp_path: Path, umask: None) -> None:
    found = await write_one(tmp_path / "log.db", file_mode=0o660)
    assert found == {"log.db": "0660", "log.db-wal": "0660", "log.db-shm": "0660"}


def test_blocking_log_accepts_a_file_mode(tmp_path: Path, umask: None) -> None:
    with oncelog.open_blocking(tmp_path / "log.db", file_mode=0o640):
        assert modes(tmp_path)["log.db-wal"] == "0640"


async def test_dangling_symlink_creates_its_target(tmp_path: Path, no_umask: None) -> None:
    (tmp_path / "link.db").symlink_to(tmp_path / "real.db")
    async with oncelog.open(tmp_path / "link.db"):
        pass
    assert modes(tmp_path)["real.db"] == "0600"


async def test_log_removed_while_open_is_not_recreated_with_loose_permissions(tmp_path: Path, no_umask: None) -> None:
    path = tmp_path / "log.db"
    async with oncelog.open(path) as log:
        for one in tmp_path.iterdir():
            one.unlink()
        with pytest.raises(oncelog.StoreError):
            await log.submit(oncelog.event(EVENT_ID, {"type": "a"}, ["a"]))
        with suppress(oncelog.StoreError):
            await log.read()
    assert set(modes(tmp_path).values()) <= {"0600"}


async def test_existing_log_keeps_its_mode_and_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "log.db"
    await write_one(path)
    path.chmod(0o644)
    with caplog.at_level(logging.WARNING, "oncelog.files"):
        for _ in range(3):
            await write_one(path)
    assert modes(tmp_path)["log.db"] == "0644"
    (line,) = [one.getMessage() for one in caplog.records if one.name == "oncelog.files"]
    assert line.startswith(f"{path} has mode 0644, ")
    assert line.endswith(f"chmod 600 {path}")


async def test_shared_log_is_reported_only_if_its_mode_exceeds_file_mode(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "log.db"
    await write_one(path, file_mode=0o660)
    await write_one(path, file_mode=0o660)
    assert not caplog.records
    path.chmod(0o666)
    await write_one(path, file_mode=0o660)
    assert caplog.records[0].getMessage().endswith(f"chmod 660 {path}")


@pytest.mark.parametrize("mode", [0, 0o400, 0o200, 0o606, 0o604, 0o644, 0o664, 0o666, 0o700, 0o620, 0o2660, -1, 660])
def test_unsupported_file_mode_is_refused(mode: int) -> None:
    with pytest.raises(SettingsError, match="file_mode must be 0600, 0640 or 0660, not "):
        oncelog.open("never.db", file_mode=mode)


@pytest.mark.parametrize("mode", ["0600", True, None, 384.0])
def test_file_mode_of_a_wrong_type_is_refused(mode: object) -> None:
    with pytest.raises(SettingsError, match="file_mode must be 0600, 0640 or 0660, not "):
        check_file_mode(mode)  # type: ignore[arg-type]


def test_file_mode_given_as_text_is_octal() -> None:
    assert [parse_file_mode(text) for text in ("0600", "640", "0o660")] == [0o600, 0o640, 0o660]
    for text in ("", "432", "rw-------", "-600", "0x180", "0600 ", "6" * 50, "٦٠٠"):
        with pytest.raises(SettingsError, match="file_mode must be"):
            parse_file_mode(text)


# --- server, commands -------------------------------------------------------------------------------------


async def test_server_creates_its_log_with_the_configured_mode(tmp_path: Path, umask: None) -> None:
    given = {"development": "true", "port": "0", "grpc": "false", "store": str(tmp_path / "log.db")}
    async with Server(load(None, {}, given)):
        assert set(modes(tmp_path).values()) == {"0600"}
    (tmp_path / "log.db").unlink()
    async with Server(load(None, {"ONCELOG_FILE_MODE": "0660"}, given)):
        assert modes(tmp_path)["log.db"] == modes(tmp_path)["log.db-wal"] == "0660"


def test_backup_and_restored_log_do_not_inherit_loose_permissions(tmp_path: Path, no_umask: None) -> None:
    log = tmp_path / "log.db"
    sample_log.make_log(log, rounds=2)
    log.chmod(0o666)
    for arguments in (["backup", log, tmp_path / "copy.db"], ["restore", tmp_path / "copy.db", tmp_path / "new.db"]):
        done = RUNNER.invoke(COMMAND, [str(one) for one in arguments])
        assert done.exit_code == 0, done.stderr
    assert modes(tmp_path) == {"log.db": "0666", "copy.db": "0600", "new.db": "0600"}


def test_backup_and_restore_accept_a_file_mode(tmp_path: Path, umask: None) -> None:
    log, copy, new = (str(tmp_path / name) for name in ("log.db", "copy.db", "new.db"))
    sample_log.make_log(Path(log), rounds=2)
    assert RUNNER.invoke(COMMAND, ["backup", log, copy, "--file-mode", "0640"]).exit_code == 0
    assert RUNNER.invoke(COMMAND, ["restore", copy, new, "--file-mode", "660"]).exit_code == 0
    assert modes(tmp_path) == {"log.db": "0600", "copy.db": "0640", "new.db": "0660"}
    refused = RUNNER.invoke(COMMAND, ["backup", log, copy, "--force", "--file-mode", "0644"])
    assert refused.exit_code == 2
    assert "file_mode must be 0600, 0640 or 0660, not 0644" in refused.stderr


def test_verify_leaves_no_files(tmp_path: Path, no_umask: None) -> None:
    sample_log.make_log(tmp_path / "log.db", rounds=2)
    assert RUNNER.invoke(COMMAND, ["verify", str(tmp_path / "log.db")]).exit_code == 0
    assert modes(tmp_path) == {"log.db": "0600"}


def test_only_the_owner_can_access_written_documents(tmp_path: Path, umask: None) -> None:
    log = tmp_path / "log.db"
    sample_log.make_log(log, rounds=2)
    document = tmp_path / "proof.json"
    done = RUNNER.invoke(COMMAND, ["proof", str(log), "--lane", "0", "--position", "1", "--output", str(document)])
    assert done.exit_code == 0, done.stderr
    write_new_file(tmp_path / "pushed.jsonl", [b"{}"])
    assert modes(tmp_path) == {"log.db": "0600", "proof.json": "0600", "pushed.jsonl": "0600"}


def test_only_the_owner_can_access_api_keys_and_their_lock(tmp_path: Path, umask: None) -> None:
    ApiKeys(tmp_path / "keys.json", lambda: 1).create("billing", "bills", parse_grants())
    assert modes(tmp_path) == {"keys.json": "0600", "keys.json.lock": "0600"}


# --- clients ----------------------------------------------------------------------------------------------


def test_only_the_owner_can_access_client_files(tmp_path: Path, umask: None) -> None:
    events, ledger = ClientStore(tmp_path / "events.db"), LedgerStore(str(tmp_path / "ledger.db"))
    deltas, chat = DeltasStore(str(tmp_path / "deltas.db"), DeltasLimits()), ChatStore(str(tmp_path / "chat.db"))
    with closing(events), closing(ledger), closing(deltas), closing(chat):
        events.open("laptop", ["a"], None)
        ledger.open("laptop")
        deltas.open("till-1", "shop")
        chat.open("phone")
        found = modes(tmp_path)
    assert set(found.values()) == {"0600"}
    assert {"events.db-wal", "ledger.db-wal", "deltas.db-wal", "chat.db-wal", "chat.db-lock"} <= found.keys()


def test_existing_client_file_keeps_its_mode_and_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "chat.db"
    for _ in range(2):
        store = ChatStore(str(path))
        store.open("phone")
        store.close()
        path.chmod(0o664)
    assert modes(tmp_path)["chat.db"] == "0664"
    assert caplog.records[0].getMessage().endswith(f"chmod 600 {path}")


async def test_only_the_owner_can_access_the_log_of_the_idempotency_middleware(tmp_path: Path, umask: None) -> None:
    app = IdempotencyMiddleware(Scripted(START, body_part(b"done")), log=tmp_path / "keys.db", scope=lambda _: "ann")
    await exchange(app, WHOLE)
    log = await app._get_log()
    assert set(modes(tmp_path).values()) == {"0600"}
    await log.close()


# --- creating files ---------------------------------------------------------------------------------------


def test_no_other_module_creates_files() -> None:
    """SQLite also creates files. These modules create a file before they connect, or connect only to existing files."""
    creates = re.compile(r"O_CREAT|\.touch\(mode|\.write_(text|bytes)\(|(?<!fd)open\([^()]*[\"'][wxa]b?\+?[\"']")
    connects = re.compile(r"sqlite3\.connect\((?!\":memory:\"|\"\")")
    found: dict[str, set[str]] = {"creates": set(), "connects": set()}
    for path in SOURCE.rglob("*.py"):
        name, text = str(path.relative_to(SOURCE)), path.read_text(encoding="utf-8")
        if not name.startswith("testing/"):
            found["creates"] |= {name} if creates.search(text) else set()
            found["connects"] |= {name} if connects.search(text) else set()
    assert found == {
        "creates": {"file_modes.py"},
        "connects": {
            "client/runtime/store_file.py",
            "storage/backups.py",
            "storage/sqlite/database_file.py",
            "storage/sqlite/read_transaction.py",
            "storage/verify/replay.py",
        },
    }


def test_only_one_of_many_threads_creates_a_file(tmp_path: Path, no_umask: None) -> None:
    made: list[bool] = []
    threads = [threading.Thread(target=lambda: made.append(create_file(str(tmp_path / "a")))) for _ in range(8)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert sorted(made) == [False] * 7 + [True]


def test_new_file_is_never_accessible_to_other_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before: list[int] = []
    real = os.fchmod

    def record(descriptor: int, mode: int) -> None:
        before.append(stat.S_IMODE(os.fstat(descriptor).st_mode))
        real(descriptor, mode)

    monkeypatch.setattr(os, "fchmod", record)
    create_file(str(tmp_path / "a"), 0o660)
    assert [mode & 0o077 for mode in before] == [0]


def test_existing_lock_file_is_opened_and_a_dangling_link_is_refused(tmp_path: Path) -> None:
    for _ in range(2):
        os.close(open_or_create(tmp_path / "lock", os.O_RDWR))
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(OSError, match="symbolic link"):
        open_or_create(tmp_path / "link", os.O_RDWR)
