"""Mistakes with disks, files and databases."""

from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

import oncelog
from cli.password_server import PasswordServer
from databases import address_of, server_address
from mistakes.log_mistakes import event
from mistakes.mistake import SECRET, MistakeTable
from mistakes.workplace import Workplace, raised
from oncelog import DiskLimits
from oncelog.engine.log import Log
from oncelog.storage.sqlite import SqliteStore
from oncelog.testing.disk import Disk, DiskDriver, Fault

MISTAKES = MistakeTable()
DATABASE_MISTAKES = MistakeTable()
"""Mistakes with the PostgreSQL server of the tests."""


@MISTAKES.add("app.db", "full", remedy="free space")
async def full_disk(_: Workplace) -> str:
    with Disk() as disk:
        async with Log(SqliteStore("app.db", driver=DiskDriver(disk))) as log:
            disk.fail_at(1, Fault.FULL, sticky=True)
            message = await raised(log.submit(event()))
            disk.repair()
    return message


@MISTAKES.add("read_only", "1000000 bytes are free", remedy="try again later")
async def nearly_full_disk(_: Workplace) -> str:
    with Disk() as disk:
        driver = DiskDriver(disk)
        driver.free = 1000
        store = SqliteStore("app.db", driver=driver)
        async with Log(store, room=DiskLimits(free_bytes_min=1_000_000)) as log:
            verdict: Any = await log.submit(event())
    return f"{verdict.reason.value}: {verdict.message}"


@MISTAKES.add("app.db", "disk I/O error", remedy="check the disk")
async def failing_disk(_: Workplace) -> str:
    with Disk() as disk:
        async with Log(SqliteStore("app.db", driver=DiskDriver(disk))) as log:
            disk.fail_at(1, Fault.IO_ERROR, sticky=True)
            message = await raised(log.submit(event()))
            disk.repair()
    return message


@MISTAKES.add("app.db has been removed or replaced", remedy="open the log again")
async def log_removed_while_open(workplace: Workplace) -> str:
    path = workplace.path("app.db")
    async with oncelog.open(path) as log:
        for name in path.parent.glob("app.db*"):
            name.unlink()
        return await raised(log.submit(event()))


@MISTAKES.add("/proc/self/app.db cannot be created", remedy="check the directory /proc/self")
async def directory_without_write_permission(_: Workplace) -> str:
    # No user may create files here, not even root.
    return await raised(oncelog.open("/proc/self/app.db").__aenter__())


# --- PostgreSQL


async def open_database(address: str) -> str:
    return await raised(lambda: oncelog.open(address).__aenter__())


@MISTAKES.add("postgresql://oncelog@127.0.0.1:", "Connection refused", remedy="is the server running at this address")
async def database_that_does_not_run(workplace: Workplace) -> str:
    return await open_database(f"postgresql://oncelog:{SECRET}@127.0.0.1:{workplace.closed_port}/app")


@MISTAKES.add("postgresql://oncelog@shop.invalid/app", remedy="check the host name")
async def database_on_a_misspelt_host(_: Workplace) -> str:
    return await open_database(f"postgresql://oncelog:{SECRET}@shop.invalid/app")


@MISTAKES.add("the address cannot be parsed", remedy="percent-encode")
async def password_with_special_characters(_: Workplace) -> str:
    return await open_database(f"postgresql://oncelog:{SECRET}[/@127.0.0.1/app")


@MISTAKES.add("127.0.0.1", "password authentication failed", remedy="check the user and the password")
async def wrong_database_password(workplace: Workplace) -> str:
    with closing(PasswordServer()) as server:
        workplace.secrets.append("secret")
        return await open_database(server.address)


@DATABASE_MISTAKES.add('database "nowhere" does not exist', remedy="create it with CREATE DATABASE")
async def missing_database(_: Workplace) -> str:
    return await open_database(urlsplit(server_address())._replace(path="/nowhere").geturl())


@DATABASE_MISTAKES.add('role "nobody_here" does not exist', remedy="check the user")
async def unknown_database_user(_: Workplace) -> str:
    address = urlsplit(server_address())
    return await open_database(address._replace(netloc=f"nobody_here@{address.netloc.rpartition('@')[2]}").geturl())


@DATABASE_MISTAKES.add("eviction_interval=1000", "eviction_interval=7", remedy="Leave out the settings")
async def database_log_with_other_settings(workplace: Workplace) -> str:
    address = address_of(workplace.directory)
    async with oncelog.open(address):
        pass
    return await raised(oncelog.open(address, settings=oncelog.Settings(eviction_interval=7)).__aenter__())
