"""Mistakes with `oncelog.open` and the log's methods."""

import asyncio
import os
import threading
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import oncelog
from mistakes.mistake import SECRET, MistakeTable
from mistakes.workplace import EVENT, EVENT_ID, Workplace, raised, refused
from oncelog import Limits, OnReuse, Order, Policy, Settings

MISTAKES = MistakeTable()


def event(content: Any = EVENT, **changed: Any) -> Any:
    """Build an event, with some arguments of `oncelog.event` replaced."""
    return oncelog.event(**{"id": EVENT_ID, "event": content, "partitions": ["orders"], **changed})


def policy(retention: Any) -> Policy:
    """Build a policy of the application."""
    return Policy(name="notes", key_bytes=(1, 64), order=Order.STREAM, on_reuse=OnReuse.REFUSE, retention=retention)


# --- building an event


@MISTAKES.add("$.id", remedy="must be a UUID")
async def event_id_that_is_no_uuid(_: Workplace) -> str:
    return await raised(lambda: event(id="order-17"))


@MISTAKES.add("$.id", "int", remedy="must be a UUID as a string")
async def event_id_that_is_a_number(_: Workplace) -> str:
    return await raised(lambda: event(id=17))


@MISTAKES.add("$.partitions", "str", remedy='for example ["orders"]')
async def one_partition_instead_of_a_list(_: Workplace) -> str:
    return await raised(lambda: event(partitions="orders"))


@MISTAKES.add("$.partitions", "NoneType", remedy="must be a list")
async def no_partitions(_: Workplace) -> str:
    return await raised(lambda: event(partitions=None))


@MISTAKES.add("$.partitions[0]", "integer", remedy="must be a string")
async def partition_that_is_a_number(_: Workplace) -> str:
    return await raised(lambda: event(partitions=[17]))


@MISTAKES.add("$.event", "array", remedy="must be an object")
async def event_that_is_a_list(_: Workplace) -> str:
    return await raised(lambda: event([1, 2]))


@MISTAKES.add("$.event.type", remedy="is missing")
async def event_without_a_type(_: Workplace) -> str:
    return await raised(lambda: event({"order": 17}))


@MISTAKES.add("$.event.price", "NaN", remedy="use null (None) or a string")
async def price_that_is_not_a_number(_: Workplace) -> str:
    return await raised(lambda: event({**EVENT, "price": float("nan")}))


@MISTAKES.add("$.event.at", "datetime", remedy="use its string form, isoformat()")
async def datetime_in_an_event(_: Workplace) -> str:
    return await raised(lambda: event({**EVENT, "at": datetime.now(UTC)}))


@MISTAKES.add("$.event.amount", "Decimal", remedy="use its string form, str()")
async def decimal_in_an_event(_: Workplace) -> str:
    return await raised(lambda: event({**EVENT, "amount": Decimal("4.50")}))


@MISTAKES.add("$.event.itself.itself", "…", "deeper than 512 levels", remedy="must not contain itself")
async def event_that_contains_itself(_: Workplace) -> str:
    content: dict[str, Any] = {**EVENT}
    content["itself"] = content
    return await raised(lambda: event(content))


@MISTAKES.add("$.event.tags", "set", remedy="use a list")
async def set_in_an_event(_: Workplace) -> str:
    return await raised(lambda: event({**EVENT, "tags": {"new"}}))


@MISTAKES.add("$.event.picture", "bytes", remedy="encode it as a string")
async def bytes_in_an_event(_: Workplace) -> str:
    return await raised(lambda: event({**EVENT, "picture": b"\x89PNG"}))


@MISTAKES.add("$.event.customer", "Workplace", remedy="use a dict")
async def object_in_an_event(workplace: Workplace) -> str:
    return await raised(lambda: event({**EVENT, "customer": workplace}))


@MISTAKES.add("$.event.number", "double", remedy="send it as a string")
async def integer_that_json_cannot_hold(_: Workplace) -> str:
    return await raised(lambda: event({**EVENT, "number": 2**60}))


@MISTAKES.add("$.event", "int", remedy="must be a string")
async def member_name_that_is_a_number(_: Workplace) -> str:
    return await raised(lambda: event({**EVENT, 17: "order"}))


@MISTAKES.add("$.event.text", "surrogate", remedy="remove it")
async def half_of_an_emoji(_: Workplace) -> str:
    return await raised(lambda: event({**EVENT, "text": "\ud83d"}))


@MISTAKES.add("$.partitions", "65", remedy="must have 1 to 64")
async def too_many_partitions(_: Workplace) -> str:
    return await raised(lambda: event(partitions=[f"order/{number}" for number in range(65)]))


@MISTAKES.add("body", "2044", remedy="must have at most 1000 bytes")
async def event_that_is_too_large(workplace: Workplace) -> str:
    async with oncelog.open(workplace.path("new.db"), limits=Limits(body_bytes_max=1000)) as log:
        return await refused(log.submit(event({**EVENT, "text": "a" * 2000})))


# --- using a log


@MISTAKES.add("not open", remedy="use it inside `async with oncelog.open")
async def closed_log(workplace: Workplace) -> str:
    async with oncelog.open(workplace.path("new.db")) as log:
        pass
    return await raised(log.submit(event()))


@MISTAKES.add("not open", remedy="use it inside `async with oncelog.open")
async def log_that_was_never_opened(workplace: Workplace) -> str:
    return await raised(oncelog.open(workplace.path("new.db")).submit(event()))


@MISTAKES.add("opened only once", remedy="create another one")
async def log_that_is_opened_again(workplace: Workplace) -> str:
    log = oncelog.open(workplace.path("new.db"))
    async with log:
        pass
    return await raised(log.__aenter__())


@MISTAKES.add("another thread or event loop", remedy="open one in this event loop")
async def log_of_another_event_loop(workplace: Workplace) -> str:
    async with oncelog.open(workplace.path("new.db")) as log:
        await log.submit(event())
        return await asyncio.to_thread(lambda: asyncio.run(raised(log.submit(event(id=str(UUID(int=2)))))))


@MISTAKES.add("not open", "fork", remedy="open it in the process that uses it")
async def log_that_was_opened_before_a_fork(workplace: Workplace) -> str:
    return await asyncio.to_thread(_submit_in_a_fork, workplace)


def _submit_in_a_fork(workplace: Workplace) -> str:
    read_end, write_end = os.pipe()
    with oncelog.open_blocking(workplace.path("new.db")) as log:
        child = os.fork()
        if child == 0:
            try:
                log.submit(event())
            except oncelog.ClosedError as error:
                os.write(write_end, f"ClosedError: {error}".encode())
            finally:
                os._exit(0)
        os.close(write_end)
        os.waitpid(child, 0)
        with os.fdopen(read_end) as answer:
            return answer.read()


@MISTAKES.add("dict", remedy="build an event with oncelog.event")
async def dict_instead_of_an_event(workplace: Workplace) -> str:
    async with oncelog.open(workplace.path("new.db")) as log:
        item: Any = EVENT
        return await raised(log.submit(item))


@MISTAKES.add("list", remedy="pass several items to submit_many")
async def several_events_for_submit(workplace: Workplace) -> str:
    async with oncelog.open(workplace.path("new.db")) as log:
        items: Any = [event()]
        return await raised(log.submit(items))


@MISTAKES.add("coroutine", remedy="await it first")
async def forgotten_await(workplace: Workplace) -> str:
    async def build() -> Any:
        return event()

    async with oncelog.open(workplace.path("new.db")) as log:
        item: Any = build()
        try:
            return await raised(log.submit(item))
        finally:
            item.close()


@MISTAKES.add("items", "one item", remedy="use submit for a single item")
async def one_event_for_submit_many(workplace: Workplace) -> str:
    async with oncelog.open(workplace.path("new.db")) as log:
        return await raised(log.submit_many(event()))


@MISTAKES.add("$.expected_position", "str", remedy="must be a whole number")
async def expected_position_that_is_text(_: Workplace) -> str:
    return await raised(lambda: event(expected_position="3"))


@MISTAKES.add("epoch", "history has changed", remedy="read again from a known position, or from 0")
async def cursor_of_another_log(workplace: Workplace) -> str:
    async with oncelog.open(workplace.path("new.db")) as log, oncelog.open(":memory:") as other:
        await other.submit(event())
        cursor = (await other.read()).cursor
        return await raised(log.read(after=cursor))


@MISTAKES.add("cursor", "17", remedy="must be EPOCH:POSITION")
async def position_instead_of_a_cursor(_: Workplace) -> str:
    return await raised(lambda: oncelog.Cursor.parse("17"))


@MISTAKES.add("partition", "stream", remedy="pass only one")
async def partition_and_stream(workplace: Workplace) -> str:
    async with oncelog.open(workplace.path("new.db")) as log:
        return await raised(log.read(partition="orders", stream="orders"))


@MISTAKES.add("partitions", remedy="use partition for a single name")
async def one_partition_to_read_instead_of_a_list(workplace: Workplace) -> str:
    async with oncelog.open(workplace.path("new.db")) as log:
        partitions: Any = "orders"
        return await raised(log.read(partitions=partitions))


@MISTAKES.add("oncelog.open_blocking()", "'limitz'", remedy="unexpected keyword argument")
async def misspelt_argument_of_a_blocking_log(workplace: Workplace) -> str:
    misspelt: Any = {"limitz": Limits()}
    return await raised(lambda: oncelog.open_blocking(workplace.path("new.db"), **misspelt))


@MISTAKES.add("key", "order-17", remedy="must be a UUID")
async def look_up_of_an_id_that_is_no_uuid(workplace: Workplace) -> str:
    async with oncelog.open(workplace.path("new.db")) as log:
        return await raised(log.lookup("order-17"))


@MISTAKES.add("key", "xxx…xxx", remedy="must be a UUID")
async def look_up_of_a_text_of_many_characters(workplace: Workplace) -> str:
    async with oncelog.open(workplace.path("new.db")) as log:
        return await raised(log.lookup("x" * 10_000))


@MISTAKES.add("key", "partition", "stream", remedy="needs exactly one")
async def erasure_of_nothing(workplace: Workplace) -> str:
    async with oncelog.open(workplace.path("new.db")) as log:
        return await raised(log.erase())


@MISTAKES.add("another thread or event loop", remedy="oncelog.open_blocking")
async def async_log_in_another_thread(workplace: Workplace) -> str:
    errors: list[str] = []

    def work(log: oncelog.Log) -> None:
        call = log.submit(event())
        try:
            call.send(None)
        except Exception as error:  # noqa: BLE001 - see `raised`
            errors.append(f"{type(error).__name__}: {error}")
        finally:
            call.close()

    async with oncelog.open(workplace.path("new.db")) as log:
        thread = threading.Thread(target=work, args=[log])
        thread.start()
        await asyncio.to_thread(thread.join)
    return "".join(errors)


@MISTAKES.add("oncelog.open(…) needs `async with`", remedy="write `async with oncelog.open(…)`")
async def with_instead_of_async_with(workplace: Workplace) -> str:
    def use() -> None:
        log: Any = oncelog.open(workplace.path("new.db"))
        with log:
            raise AssertionError

    return await raised(use)


@MISTAKES.add("oncelog.open_blocking(…) needs `with`", remedy="write `with oncelog.open_blocking(…)`")
async def async_with_instead_of_with(workplace: Workplace) -> str:
    async def use() -> None:
        log: Any = oncelog.open_blocking(workplace.path("new.db"))
        async with log:
            raise AssertionError

    return await raised(use())


@MISTAKES.add("identity_reused", "different content", remedy="use a new id for a new write")
async def unwrapped_refusal(workplace: Workplace) -> str:
    async with oncelog.open(workplace.path("new.db")) as log:
        await log.append(EVENT, id=EVENT_ID, partitions=["orders"])
        verdict = await log.append({**EVENT, "order": 18}, id=EVENT_ID, partitions=["orders"])
        return await raised(verdict.unwrap)


@MISTAKES.add("$.partitions", "str", remedy="must be a list")
async def append_to_one_partition(workplace: Workplace) -> str:
    async with oncelog.open(workplace.path("new.db")) as log:
        partitions: Any = "orders"
        return await raised(log.append(EVENT, partitions=partitions))


# --- opening a log


@MISTAKES.add("missing/new.db", "does not exist", remedy="create it first")
async def missing_directory(workplace: Workplace) -> str:
    return await raised(oncelog.open(workplace.directory / "missing" / "new.db").__aenter__())


@MISTAKES.add("folder", "directory", remedy="name a file in it")
async def directory_instead_of_a_file(workplace: Workplace) -> str:
    return await raised(oncelog.open(workplace.path("folder")).__aenter__())


@MISTAKES.add("notes.txt", "not an SQLite database", remedy="Name another file")
async def text_file_instead_of_a_log(workplace: Workplace) -> str:
    return await raised(oncelog.open(workplace.path("notes.txt")).__aenter__())


@MISTAKES.add("foreign.db", "not a log", remedy="open a separate file")
async def database_of_another_program(workplace: Workplace) -> str:
    return await raised(oncelog.open(workplace.path("foreign.db")).__aenter__())


@MISTAKES.add("newer.db", "999", remedy="Upgrade Oncelog")
async def log_of_a_newer_version(workplace: Workplace) -> str:
    return await raised(oncelog.open(workplace.path("newer.db")).__aenter__())


@MISTAKES.add("damaged.db is damaged", remedy="restore a backup")
async def damaged_log(workplace: Workplace) -> str:
    async def use() -> None:
        async with oncelog.open(workplace.path("damaged.db")) as log:
            await log.read()

    return await raised(use())


@MISTAKES.add("address", "mysql://", remedy="must be a file or postgresql://")
async def address_of_another_database(_: Workplace) -> str:
    return await raised(lambda: oncelog.open(f"mysql://app:{SECRET}@db/app"))


@MISTAKES.add("path", "NoneType", remedy="must be the path of a file")
async def no_path(_: Workplace) -> str:
    path: Any = None
    return await raised(lambda: oncelog.open(path))


@MISTAKES.add("app.db", "lanes=16", "lanes=4", remedy="Leave out the settings")
async def other_lanes_than_the_log_has(workplace: Workplace) -> str:
    return await raised(oncelog.open(workplace.path("app.db"), settings=Settings(lanes=4)).__aenter__())


@MISTAKES.add("queue_items_max", "-1", remedy="must be a whole number from 1")
async def limit_out_of_range(_: Workplace) -> str:
    return await raised(lambda: Limits(queue_items_max=-1))


@MISTAKES.add("limits", "dict", remedy="must be oncelog.Limits")
async def limits_in_a_dict(workplace: Workplace) -> str:
    limits: Any = {"queue_items_max": 10}
    return await raised(lambda: oncelog.open(workplace.path("new.db"), limits=limits))


@MISTAKES.add("file_mode", "1130", remedy="must be 0600")
async def file_mode_without_octal(workplace: Workplace) -> str:
    return await raised(lambda: oncelog.open(workplace.path("new.db"), file_mode=600))


@MISTAKES.add("policy", "notes", remedy="name")
async def policy_that_contradicts_the_log(workplace: Workplace) -> str:
    async with oncelog.open(workplace.path("new.db"), policies=[policy(oncelog.kept_for(hours=1))]):
        pass
    changed = policy(oncelog.kept_for(hours=2))
    return await raised(oncelog.open(workplace.path("new.db"), policies=[changed]).__aenter__())


@MISTAKES.add("notes", "retention", "24", remedy="use kept_for")
async def retention_that_is_a_number(_: Workplace) -> str:
    return await raised(lambda: policy(24))
