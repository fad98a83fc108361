"""Reading a ledger over both wires: entities, relationships, transactions, blocks, proofs; and following blocks."""

import asyncio
import shutil
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import pytest

from cli.served import oncelog
from databases import BOTH_STORES, is_postgres, log_at, query
from doors.ledger.ledger_doors import Door, House, key, opened, prepare
from doors.ledger.test_ledger_sequences import written
from doors.ledger.wires import GRPC, HTTP, Json, Ledger, Watching, blocks, code, put, refused, relate, remove, success
from doors.ledger.wires import unrelate as unrelate_one
from doors.serving import run, soon, until
from oncelog import proof as documents
from oncelog.core.identity import request_hash
from oncelog.core.operations import Operation, SetEntity
from oncelog.core.policy import LEDGER
from oncelog.core.proof import NO_HASH, Block, Proof, verify
from oncelog.core.transactions import ledger_scope, transaction_body
from oncelog.core.values import Record
from oncelog.testing.clock import ManualClock

pytestmark = BOTH_STORES

SET: Final = put("a", b"1")
SIZES: Final = (1, 2, 3, 7, 8, 9, 64)


# --- entities and relationships ------------------------------------------------------------------------------------


async def paged(ledger: Ledger, name: str, page_size: int, **members: Any) -> list[list[Json]]:
    """All pages."""
    call = {"entities": ledger.list_entities, "relationships": ledger.list_relationships}[name]
    pages, page_token = [], ""
    while True:
        page = await call(page_size=page_size, page_token=page_token, **members)
        assert page.keys() == {name, "next_page_token"}
        pages.append(page[name])
        page_token = page["next_page_token"]
        if not page_token:
            return pages


def all_of(pages: Iterable[list[Json]]) -> list[Json]:
    return [one for page in pages for one in page]


def test_entities_are_paged_in_the_order_of_their_keys(house: House) -> None:
    async def main() -> None:
        ledger = house.ledger()
        assert await ledger.list_entities() == {"entities": [], "next_page_token": ""}
        keys = [
            "A",
            "a",
            "a b",
            "a/1",
            "a/10",
            "a/2",
            "b",
            "z",
            "é",
            "ｚ",
            "𝄞",
            "\ud7ff1",
            "\ue000",
            "\U0010ffff1",
            '"',
            "\x7f",
            "%",
            "a%",
        ]
        await ledger.write(1, *[put(one, one.encode()) for one in reversed(keys)], put("z1", expires_at_ms=1))
        await ledger.write(2, remove("b"), put("é", b"2", expires_at_ms=2**50))
        expected: list[Json] = [
            {"key": one, "value": one.encode(), "version": 1} for one in sorted(keys) if one not in ("b", "é")
        ]
        changed = {"key": "é", "value": b"2", "version": 2, "expires_at_ms": 2**50}
        expected = sorted([*expected, changed], key=lambda one: one["key"])
        for size in (1, 2, 3, 100):
            pages = await paged(ledger, "entities", size)
            assert all_of(pages) == expected
            assert all(len(page) == size for page in pages[:-1])
        for prefix in ("a", "a/1", "a/", "é", "𝄞", "%", "none", '"', "\ud7ff", "\U0010ffff"):
            found = all_of(await paged(ledger, "entities", 2, prefix=prefix))
            assert found == [one for one in expected if one["key"].startswith(prefix)]

    house.run(main())


def test_expired_entities_are_on_no_page(tmp_path: Path, wire: str) -> None:
    async def main() -> None:
        clock = ManualClock()
        async with opened(tmp_path, wire, clock=clock) as door:
            ledger = door.ledger(client_id="app")
            end_ms = clock.wall_ms() + 1000
            chosen = [put(f"{number:02}", expires_at_ms=end_ms if number % 3 else None) for number in range(30)]
            await ledger.write(1, *chosen)
            assert len(all_of(await paged(ledger, "entities", 7))) == 30
            page = await ledger.list_entities(page_size=7)
            clock.advance(1000)
            left = [f"{number:02}" for number in range(0, 30, 3)]
            pages = await paged(ledger, "entities", 4)
            assert [[one["key"] for one in page] for page in pages] == [left[:4], left[4:8], left[8:]]
            # A token of a page before: its key has expired too, and it goes on there.
            rest = await ledger.list_entities(page_token=page["next_page_token"])
            assert [one["key"] for one in rest["entities"]] == left[3:]

    run(main())


def test_a_page_that_is_asked_for_with_too_many_has_the_most(tmp_path: Path, wire: str) -> None:
    async def main() -> None:
        async with opened(tmp_path, wire, page_events_max=5, page_events_default=3) as door:
            ledger = door.ledger(client_id="app")
            await ledger.write(1, *[put(f"{n}") for n in range(9)], *[relate(f"{n}") for n in range(9)])
            for size, count in ((0, 3), (1, 1), (5, 5), (6, 5), (2**32 - 1, 5)):
                assert len((await ledger.list_entities(page_size=size))["entities"]) == count
                assert len((await ledger.list_relationships(page_size=size))["relationships"]) == count
            assert len((await ledger.list_entities())["entities"]) == 3

    run(main())


def test_a_page_of_long_values_ends_early_and_the_next_goes_on(tmp_path: Path, wire: str) -> None:
    async def main() -> None:
        async with opened(tmp_path, wire, page_bytes_max=1000) as door:
            ledger = door.ledger(client_id="app")
            await ledger.write(1, *[put(f"{n}", bytes(400)) for n in range(5)], put("9", bytes(5000)))
            pages = await paged(ledger, "entities", 100)
            assert [[one["key"] for one in page] for page in pages] == [["0", "1"], ["2", "3"], ["4"], ["9"]]

    run(main())


def test_relationships_are_found_by_what_they_have_and_paged(house: House) -> None:
    async def main() -> None:
        ledger = house.ledger()
        names = [
            (resource, relation, subject)
            for resource in ("doc:1", "doc:2", "é")
            for relation in ("owner", "viewer")
            for subject in ("user:1", "user:2", "𝄞")
        ]
        await ledger.write(1, *[relate(*one) for one in reversed(names)])
        await ledger.write(2, unrelate_one(*names[4]), relate(*names[5]))
        left = [one for one in sorted(names) if one != names[4]]
        for asked in (
            {},
            {"resource": "doc:1"},
            {"resource": "doc:1", "relation": "viewer"},
            {"subject": "user:2"},
            {"subject": "𝄞", "relation": "owner"},
            {"resource": "é", "subject": "user:1"},
            {"resource": "doc:2", "relation": "owner", "subject": "user:1"},
            {"resource": "doc"},
            {"subject": "user"},
        ):
            fields = ("resource", "relation", "subject")
            expected = [
                one
                for one in left
                if all(asked.get(field, name) == name for field, name in zip(fields, one, strict=True))
            ]
            for size in (1, 2, 100):
                pages = await paged(ledger, "relationships", size, **asked)
                found = all_of(pages)
                assert [(one["resource"], one["relation"], one["subject"]) for one in found] == expected
                assert {one["version"] for one in found} <= {1}
                assert all(len(page) == size for page in pages[:-1])

    house.run(main())


# --- transactions ---------------------------------------------------------------------------------------------------


@pytest.mark.rule("LG-1", "LG-2")
def test_a_transaction_gives_its_operations_back_as_they_were_sent(house: House) -> None:
    async def main() -> None:
        ledger = house.ledger()
        operations = [
            put("empty"),
            put('é𝄞 "\\\n', bytes(range(256)), expires_at_ms=0),
            put("x", b"1", condition={"must_not_exist": True}, expires_at_ms=2**53 - 1),
            put("x", b"2", condition={"must_exist": True}),
            put("x", b"3", condition={"version_is": 1}),
            put("x", b"", condition={"value_equals": b"3"}),
            put("x", b"", condition={"value_equals": b""}),
            remove("y"),
            relate("r", "é", "𝄞"),
            unrelate_one("r", "é", "𝄞"),
        ]
        answer = success(await ledger.write(1, *operations, key=key(1)))
        assert (await ledger.get_transaction(answer["committed_tx_id"]))["operations"] == operations

    house.run(main())


def test_both_wires_say_the_same(house: House) -> None:
    async def main() -> None:
        here = house.ledger()
        there = here.through(house.door.wire(HTTP if house.door.kind == GRPC else GRPC))
        answer = success(await here.write(1, SET, put("b", b"\xff", expires_at_ms=2**50), relate("r"), key=key(1)))
        assert await there.write(1, SET, put("b", b"\xff", expires_at_ms=2**50), relate("r"), key=key(1)) == answer
        tx_id = answer["committed_tx_id"]
        calls: list[Callable[[Ledger], Any]] = [
            lambda one: one.write(9, SET, key=key(2)),
            lambda one: one.write(1, SET, key=key(1)),
            lambda one: one.write(1, put("x")),
            lambda one: one.write(2, put("a", condition={"must_not_exist": True}), key=key(2)),
            lambda one: one.write(2, put("none", condition={"must_exist": True}), key=key(2)),
            lambda one: one.get_client_state(),
            lambda one: one.get_entity("b"),
            lambda one: one.get_entity("none"),
            lambda one: one.list_entities(page_size=1),
            lambda one: one.list_relationships(),
            lambda one: one.check_relationship("r"),
            lambda one: one.get_transaction(tx_id),
            lambda one: one.get_proof(tx_id),
            lambda one: one.get_block(answer["block_height"]),
        ]
        for asked in calls:
            assert await asked(here) == await asked(there)

    house.run(main())


# --- proofs ---------------------------------------------------------------------------------------------------------


def block_of(header: Json) -> Block:
    """The block of a header, which must have its hash."""
    block = Block(
        header["lane"],
        header["height"],
        header["first_position"],
        header["count"],
        header["timestamp_ms"],
        header["previous_hash"],
        header["merkle_root"],
    )
    assert block.hash == header["hash"]
    return block


def record_of(answer: Json, scope: str, client: str, idempotency_key: bytes, operations: Sequence[Operation]) -> Record:
    """What whoever has sent a transaction knows of its record, with the answer that he got."""
    header, index = answer["block_header"], answer["transaction_proof"]["index"]
    return Record(
        header["lane"],
        header["first_position"] + index,
        answer["version"],
        answer["timestamp_ms"],
        answer["block_height"],
        LEDGER.name,
        scope,
        idempotency_key,
        request_hash(operations),
        answer["actor"],
        client,
        answer["assigned_sequence"],
        (),
        transaction_body(operations),
    )


def document_of(found: Json) -> documents.ProofDocument:
    """The document that the public verifier takes."""

    def text(value: Any) -> Any:
        if isinstance(value, bytes):
            return value.hex()
        if isinstance(value, list):
            return tuple(text(one) for one in value)
        return value

    body = found.get("body")
    members = {name: text(value) for name, value in found.items() if name not in ("record", "block", "body")}
    record = documents.RecordHeader(**{name: text(value) for name, value in found["record"].items()})
    block = documents.BlockHeader(**{name: text(value) for name, value in found["block"].items()})
    salt = members.pop("salt", None)
    return documents.ProofDocument(**{**members, "record": record, "block": block, "salt": salt, "body": body})


async def in_one_block(door: Door, patch: pytest.MonkeyPatch, sent: Sequence[Any]) -> list[Json]:
    """What becomes of writes that are committed together."""
    with patch.context() as context:
        gate = door.served.hold_commits(context)
        plug = asyncio.ensure_future(door.ledger("plug", client_id=f"plug-{len(sent)}").write(1, SET))
        await soon(gate.reached.wait())
        gathered = asyncio.gather(*sent)
        await until(lambda: door.log.queued == len(sent) + 1)
        gate.open()
        assert code(await plug) == "OK"
        return await gathered


@pytest.mark.rule("LG-18", "LG-10")
@pytest.mark.parametrize("size", SIZES)
def test_the_proofs_of_all_transactions_of_a_block_verify(
    tmp_path: Path, wire: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        clock = ManualClock()
        await prepare(tmp_path, clock)
        async with opened(tmp_path, wire, clock=clock) as door:
            ledgers = [door.ledger(vault="" if n % 3 else "v", client_id=f"client-{n}") for n in range(size)]
            sent = [one.write(1, put(one.client_id, b"x" * n), key=key(n)) for n, one in enumerate(ledgers)]
            answers = [success(answer) for answer in await in_one_block(door, monkeypatch, sent)]
            headers = [answer["block_header"] for answer in answers]
            assert headers == [headers[0]] * size
            assert headers[0]["count"] == size
            block = block_of(headers[0])
            assert sorted(answer["transaction_proof"]["index"] for answer in answers) == list(range(size))
            for number, (ledger, answer) in enumerate(zip(ledgers, answers, strict=True)):
                given = answer["transaction_proof"]
                operations = [SetEntity(ledger.client_id, b"x" * number)]
                scope = ledger_scope("acme", ledger.vault)
                record = record_of(answer, scope, ledger.client_id, key(number), operations)
                proof = Proof(given["index"], given["count"], tuple(given["path"]))
                assert verify(record, given["salt"], proof, block)
                other = record_of(answer, scope, ledger.client_id, key(number), [SetEntity("other", b"")])
                assert not verify(other, given["salt"], proof, block)
                document = document_of(await ledger.get_proof(answer["committed_tx_id"]))
                assert documents.verify(document, block_hash=block.hash).findings == ()
                assert documents.verify(document, block_hash=NO_HASH).findings
                assert (document.salt, document.index, document.count) == (given["salt"].hex(), given["index"], size)
            for vault in ("", "v"):
                found = await door.ledger(vault=vault).get_block(block.height)
                expected = [
                    answer["committed_tx_id"]
                    for ledger, answer in zip(ledgers, answers, strict=True)
                    if ledger.vault == vault
                ]
                assert found == {"header": headers[0], "tx_ids": sorted(expected), "epoch": found["epoch"]}

    run(main())


@pytest.mark.rule("LG-18")
def test_blocks_are_a_chain_and_hashes_have_their_prefixes(tmp_path: Path, wire: str) -> None:
    async def main() -> None:
        clock = ManualClock()
        await prepare(tmp_path, clock)
        async with opened(tmp_path, wire, clock=clock) as door:
            ledger = door.ledger(client_id="app")
            answers = await written(ledger, 4)
            previous = NO_HASH
            for height, answer in enumerate(answers, 1):
                block = await ledger.get_block(height)
                assert block == {
                    "header": answer["block_header"],
                    "tx_ids": [answer["committed_tx_id"]],
                    "epoch": block["epoch"],
                }
                header = block["header"]
                assert (header["height"], header["count"], header["first_position"]) == (height, 1, height)
                assert header["previous_hash"] == previous
                previous = block_of(header).hash
                found = await ledger.get_proof(answer["committed_tx_id"])
                assert found["body_hash"] == sha256(found["salt"] + found["body"]).digest()
                assert found["body"] == transaction_body([SetEntity("a", b"%d" % height)])
            missing = ("NOT_FOUND", "height: the scope's lane has no such block", "height")
            for height in (5, 2**53 - 1, *([2**64 - 1] if wire == GRPC else [])):
                assert (await refused(ledger.get_block(height))).told == missing

    run(main())


@pytest.mark.rule("LG-18", "CO-41")
def test_the_proof_of_an_erased_transaction_is_that_of_its_header(tmp_path: Path, wire: str) -> None:
    async def main() -> None:
        async with opened(tmp_path, wire) as door:
            ledger = door.ledger(client_id="app")
            answers = await written(ledger, 3)
            tx_id = answers[1]["committed_tx_id"]
            before = await ledger.get_proof(tx_id)
            assert await door.log.erase(key=key(2), policy=LEDGER, scope=ledger_scope("acme"), client="app") == 1
            found = await ledger.get_proof(tx_id)
            assert found == {name: value for name, value in before.items() if name not in ("salt", "body")}
            verification = documents.verify(document_of(found), block_hash=answers[1]["block_header"]["hash"])
            assert (verification.findings, verification.is_erased) == ((), True)
            fourth = success(await ledger.write(4, SET, key=key(4)))
            assert fourth["block_header"]["previous_hash"] == answers[2]["block_header"]["hash"]
        assert oncelog("verify", log_at(tmp_path / "events.db")).returncode == 0

    run(main())


@pytest.mark.rule("LG-18")
def test_a_changed_record_and_the_loss_of_the_newest_are_found(tmp_path: Path, wire: str) -> None:
    path = tmp_path / "events.db"

    async def write(numbers: range) -> None:
        async with opened(tmp_path, wire) as door:
            await written(door.ledger(client_id="app"), len(numbers), numbers.start)

    run(write(range(1, 4)))
    shutil.copy(path, tmp_path / "older.db") if not is_postgres() else None
    run(write(range(4, 6)))
    place = log_at(path)
    head = tmp_path / "head.json"
    head.write_text(oncelog("head", place).stdout)
    assert oncelog("verify", place, "--head", str(head)).returncode == 0
    if not is_postgres():
        assert oncelog("verify", str(tmp_path / "older.db")).returncode == 0
        assert oncelog("verify", str(tmp_path / "older.db"), "--head", str(head)).returncode == 1
        with closing(sqlite3.connect(path)) as connection, connection:
            (body,) = connection.execute("SELECT body FROM oncelog_records WHERE client_sequence = 2").fetchone()
            changed = bytes(body).replace(b'"a"', b'"b"')
            connection.execute("UPDATE oncelog_records SET body = ? WHERE client_sequence = 2", (changed,))
    else:
        ((body,),) = query(place, "SELECT body FROM oncelog_records WHERE client_sequence = 2")
        changed = bytes(body).replace(b'"a"', b'"b"')
        query(place, "UPDATE oncelog_records SET body = $1 WHERE client_sequence = 2", changed)
    assert changed != body
    assert oncelog("verify", place).returncode == 1


# --- following blocks -----------------------------------------------------------------------------------------------


async def followed(watching: Watching, upto: set[str]) -> list[Json]:
    """Blocks as they come, until all these transactions have been in one."""
    found = []
    left = set(upto)
    while left:
        block = await watching.next()
        assert block is not None
        found.append(block)
        left -= set(block["tx_ids"])
    await watching.close()
    return found


def demand_order(found: Sequence[Json], first: int) -> None:
    """Each height once and in order, from that one on, each with the hash of the one before."""
    assert [block["header"]["height"] for block in found] == list(range(first, first + len(found)))
    for one, next_one in pairwise(found):
        assert next_one["header"]["previous_hash"] == block_of(one["header"]).hash


@pytest.mark.rule("LG-18", "CO-13")
def test_blocks_are_followed_from_the_first_and_from_any_height(tmp_path: Path, wire: str) -> None:
    async def main() -> None:
        async with opened(tmp_path, wire) as door:
            ledger = door.ledger(client_id="app")
            empty = await ledger.watch_blocks()
            answers = await written(ledger, 3)
            heights = await blocks(empty, 3)
            assert [block["tx_ids"] for block in heights] == [[answer["committed_tx_id"]] for answer in answers]
            assert [block["header"] for block in heights] == [answer["block_header"] for answer in answers]
            for after in range(4):
                watching = await ledger.watch_blocks(after)
                assert await blocks(watching, 3 - after) == heights[after:]
                await watching.close()
            resumed = await ledger.watch_blocks(last_event_id="2")
            assert await blocks(resumed, 1) == heights[2:]
            fourth = success(await ledger.write(4, SET))
            for watching in (empty, resumed):
                (block,) = await blocks(watching, 1)
                assert block == {
                    "header": fourth["block_header"],
                    "tx_ids": [fourth["committed_tx_id"]],
                    "epoch": block["epoch"],
                }
                await watching.close()

    run(main())


@pytest.mark.rule("LG-18", "CO-13")
def test_blocks_of_other_scopes_of_the_lane_come_without_their_transactions(tmp_path: Path, wire: str) -> None:
    async def main() -> None:
        clock = ManualClock()
        await prepare(tmp_path, clock)
        async with opened(tmp_path, wire, clock=clock) as door:
            ledger, other = door.ledger(client_id="app"), door.ledger("other", client_id="app")
            watching = await ledger.watch_blocks()
            first = success(await ledger.write(1, SET))
            second = success(await other.write(1, SET))
            found = await blocks(watching, 2)
            assert [block["tx_ids"] for block in found] == [[first["committed_tx_id"]], []]
            assert found[1]["header"] == second["block_header"]
            await watching.close()

    run(main())


@pytest.mark.rule("LG-18", "CO-13")
def test_who_follows_gets_each_block_once_and_in_order_while_two_gateways_write(tmp_path: Path, wire: str) -> None:
    writers, each = 6, 5

    async def write(ledger: Ledger) -> list[str]:
        return [success(await ledger.write(n, SET, key=key(n)))["committed_tx_id"] for n in range(1, each + 1)]

    async def main() -> None:
        async with opened(tmp_path, wire) as one, opened(tmp_path, wire) as other:
            doors = (one, other)
            early = [await door.ledger().watch_blocks() for door in doors]
            writing = [
                asyncio.ensure_future(write(doors[number % 2].ledger(client_id=f"client-{number}")))
                for number in range(writers)
            ]
            begun = [await blocks(watching, 3) for watching in early]
            assert begun[0] == begun[1]
            late = [await door.ledger().watch_blocks(3) for door in doors]
            ids = {tx_id for several in await asyncio.gather(*writing) for tx_id in several}
            assert len(ids) == writers * each
            seen = {tx_id for block in begun[0] for tx_id in block["tx_ids"]}
            rest = await asyncio.gather(*[followed(watching, ids - seen) for watching in (*early, *late)])
            for found in rest:
                assert found == rest[0]
                demand_order([*begun[0], *found], 1)
            listed = [tx_id for block in (*begun[0], *rest[0]) for tx_id in block["tx_ids"]]
            assert listed == sorted(ids)

    run(main())


@pytest.mark.rule("LG-18")
def test_a_stream_ends_when_the_server_stops_and_goes_on_at_the_next(tmp_path: Path, wire: str) -> None:
    async def main() -> None:
        async with opened(tmp_path, wire) as door:
            ledger = door.ledger(client_id="app")
            await written(ledger, 2)
            watching = await ledger.watch_blocks()
            await blocks(watching, 2)
            stopping = asyncio.ensure_future(door.server.stop())
            if wire == GRPC:
                error = await refused(watching.next())
                assert (error.status, error.code, error.retry_after_ms) == ("UNAVAILABLE", "server_busy", 1000)
            else:
                assert await watching.next() is None
            await soon(stopping)
        async with opened(tmp_path, wire) as door:
            ledger = door.ledger(client_id="app")
            watching = await ledger.watch_blocks(last_event_id="2")
            third = success(await ledger.write(3, SET))
            (block,) = await blocks(watching, 1)
            assert block["tx_ids"] == [third["committed_tx_id"]]
            await watching.close()

    run(main())


@pytest.mark.rule("CO-40")
def test_a_height_of_another_history_is_told(tmp_path: Path, wire: str) -> None:
    async def main() -> None:
        async with opened(tmp_path, wire) as door:
            ledger = door.ledger(client_id="app")
            await ledger.write(1, SET)
            block = await ledger.get_block(1)
            assert block["epoch"] == door.server.log.epoch
            scoped = ledger._scoped(after_height=1)
            watching = await ledger.wire.watch({**scoped, "epoch": block["epoch"]}, None)
            await ledger.write(2, SET)
            assert [one["header"]["height"] for one in await blocks(watching, 1)] == [2]
            await watching.close()

            async def begun() -> None:
                other = await ledger.wire.watch({**scoped, "epoch": "0123456789abcdef"}, None)
                await other.next()

            error = await refused(begun())
            assert (error.status, error.field) == ("FAILED_PRECONDITION", "after_height")

    run(main())
