"""Names of the maximum documented lengths, in four-byte characters that no database can compress, on every store."""

import asyncio
import re
from pathlib import Path
from random import Random
from typing import Any

import pytest

from databases import BOTH_STORES, POSTGRES, log_at, query
from oncelog.core.identity import normal_partitions
from oncelog.core.limits import (
    ENTITY_KEY_CHARACTERS_MAX,
    FINGERPRINT_BYTES_MAX,
    NAME_CHARACTERS_MAX,
    PARTITION_CHARACTERS_MAX,
    PARTITIONS_MAX,
)
from oncelog.core.merge import Op, RowDelta
from oncelog.core.operations import DeleteEntity, Relate, SetEntity, Unrelate
from oncelog.core.policy import (
    CHAT,
    DELTAS,
    EVENTS,
    KEY_BYTES_MAX,
    LEDGER,
    OnReuse,
    Order,
    Policy,
    kept_for,
)
from oncelog.core.policy import NAME_CHARACTERS_MAX as POLICY_NAME_CHARACTERS_MAX
from oncelog.core.tenants import Tenant
from oncelog.core.values import (
    Acknowledge,
    Applied,
    Claim,
    Committed,
    Granted,
    OpenStream,
    Rate,
    Replayed,
    SetCursor,
    SetMember,
    Submission,
)
from oncelog.engine.log import Log, open_log
from oncelog.storage.postgres.side_state_tables import DELETE, LOAD, compute_digest
from oncelog.storage.postgres.statements import SQL
from oncelog.storage.store import RelationshipQuery
from oncelog.storage.verify.findings import Finding, Inconsistency, VerificationSummary
from oncelog.storage.verify.verification import verify_log
from oncelog.testing.clock import ManualClock
from storage.older_schema import downgrade_to_schema_4

RATE = Rate(1000, 1000)


def text(chance: Random, characters: int = NAME_CHARACTERS_MAX, prefix: str = "") -> str:
    """Return random ideographs of the supplementary plane, which NFC does not change."""
    return prefix + "".join(chr(chance.randrange(0x20000, 0x2A6D0)) for _ in range(characters - len(prefix)))


def long_key(chance: Random, prefix: str = "") -> str:
    return text(chance, ENTITY_KEY_CHARACTERS_MAX, prefix)


def write(scope: str, client: str, sequence: int, *operations: Any) -> Submission:
    return Submission(
        policy=LEDGER,
        scope=scope,
        key=sequence.to_bytes(16, "big"),
        fingerprint=b"%d" % sequence * 4,
        actor=client,
        client=client,
        client_sequence=sequence,
        operations=operations,
        rate=RATE,
    )


def change(scope: str, number: int, table: str, row_id: str, client: str, column: str) -> Submission:
    delta = RowDelta(
        op=Op.INSERT,
        table=table,
        row_id=row_id,
        client_id=client,
        hlc=number,
        columns=((column, b"1"),),
        delta_id=number.to_bytes(32, "big"),
    )
    return Submission(policy=DELTAS, scope=scope, key=delta.delta_id, fingerprint=b"", actor=client[:512], delta=delta)


async def run_verify(place: str) -> Finding:
    """Return the last finding of `oncelog verify`, which starts an event loop."""
    return (await asyncio.to_thread(lambda: list(verify_log(place))))[-1]


async def check_verified(place: str) -> None:
    last = await run_verify(place)
    assert isinstance(last, VerificationSummary), last


@BOTH_STORES
@pytest.mark.rule("CO-34")
async def test_event_with_names_of_the_documented_lengths_commits(tmp_path: Path) -> None:
    chance = Random(1)
    partitions = normal_partitions(tuple(text(chance, PARTITION_CHARACTERS_MAX) for _ in range(PARTITIONS_MAX)))
    event = Submission(
        policy=EVENTS,
        scope=text(chance),
        key=bytes(16),
        fingerprint=chance.randbytes(FINGERPRINT_BYTES_MAX),
        actor=text(chance),
        client=text(chance),
        partitions=partitions,
        rate=RATE,
    )
    place = log_at(tmp_path / "log.db")
    async with open_log(place, tenants=[Tenant(text(chance, prefix="t"), records_max=10)]) as log:
        assert isinstance(await log.submit(event), Committed)
        assert isinstance(await log.submit(event), Replayed)
        for partition in partitions[:3]:
            (record,) = (await log.read(partition=partition)).records
            assert (record.scope, record.actor, record.client) == (event.scope, event.actor, event.client)
        consumer = text(chance)
        assert isinstance(await log.submit(SetCursor(consumer, 1)), Applied)
        assert consumer in [one.name for one in await log.consumers()]
    await check_verified(place)


@BOTH_STORES
@pytest.mark.rule("CO-34", "LG-2")
async def test_ledger_names_of_the_documented_lengths_are_stored_and_listed_in_order(tmp_path: Path) -> None:
    chance = Random(2)
    scope, client = text(chance), text(chance)
    common = long_key(chance)[:1000]
    keys = sorted(
        ["a", "b" * 1024, long_key(chance), *(long_key(chance, common) for _ in range(5)), common, common[:64]]
    )
    parts = [long_key(chance) for _ in range(3)]
    related = sorted(
        [
            (parts[0], parts[1], parts[2]),
            *((parts[0], parts[1], long_key(chance)) for _ in range(3)),
            *((parts[0], long_key(chance), parts[2]) for _ in range(3)),
            (long_key(chance), "r", parts[2]),
            ("document:1", "viewer", "user:ann"),
            ("document:1", "viewer", parts[2]),
        ]
    )
    place = log_at(tmp_path / "log.db")
    async with open_log(place) as log:
        operations = [*(SetEntity(key, b"1") for key in keys), *(Relate(*one) for one in related)]
        assert isinstance(await log.submit(write(scope, client, 1, *operations)), Committed)
        assert isinstance(await log.submit(write(scope, client, 1, *operations)), Replayed)
        assert isinstance(await log.submit(write(scope, client, 2, SetEntity(keys[-1], b"2"))), Committed)
        entry = await log.state.client(scope, client)
        assert entry is not None
        assert entry.sequence == 2
        for key in keys:
            entity = await log.state.entity(scope, key)
            assert entity is not None
            assert (entity.value, entity.version) == ((b"2", 2) if key == keys[-1] else (b"1", 1))
        assert await list_entities(log, scope) == keys
        assert await list_entities(log, scope, prefix=common) == [one for one in keys if one.startswith(common)]
        assert await list_relationships(log, scope) == related
        for resource in (parts[0], "document:1"):
            wanted = [one for one in related if one[0] == resource]
            assert await list_relationships(log, scope, resource=resource) == wanted
        assert await list_relationships(log, scope, resource=parts[0], relation=parts[1]) == [
            one for one in related if one[:2] == (parts[0], parts[1])
        ]
        assert await list_relationships(log, scope, subject=parts[2]) == [one for one in related if one[2] == parts[2]]
        gone = [DeleteEntity(keys[-1]), Unrelate(parts[0], parts[1], parts[2])]
        assert isinstance(await log.submit(write(scope, client, 3, *gone)), Committed)
        assert await list_entities(log, scope) == keys[:-1]
        assert await log.state.relationship(scope, parts[0], parts[1], parts[2]) is None
        assert len(await list_relationships(log, scope)) == len(related) - 1
    await check_verified(place)


async def list_entities(log: Log, scope: str, prefix: str = "") -> list[str]:
    """Read all pages, two entries at a time."""
    found: list[str] = []
    while True:
        page = await log.state.entities(scope, prefix=prefix, after=found[-1] if found else "", limit=2)
        found += [key for key, _ in page.entities]
        if not page.has_more:
            return found


async def list_relationships(log: Log, scope: str, **named: str) -> list[tuple[str, str, str]]:
    """Read all pages, two entries at a time."""
    found: list[tuple[str, str, str]] = []
    while True:
        after = found[-1] if found else ("", "", "")
        page = await log.state.relationships(RelationshipQuery(scope=scope, after=after, limit=2, **named))
        found += [one[:3] for one in page.relationships]
        if not page.has_more:
            return found


@BOTH_STORES
@pytest.mark.rule("CO-34", "CH-1")
async def test_chat_names_of_the_documented_lengths_are_stored_and_listed_in_order(tmp_path: Path) -> None:
    chance = Random(3)
    first, common = text(chance, prefix="chat/"), text(chance)[:400]
    members = sorted([*(text(chance, prefix=common) for _ in range(5)), "user:ann", text(chance)])
    scopes = sorted([first, *(text(chance, prefix=first[:300]) for _ in range(3)), "chat/short"])
    place = log_at(tmp_path / "log.db")
    async with open_log(place) as log:
        for scope in scopes:
            assert isinstance(await log.submit(OpenStream(scope, members[0])), Applied)
        for member in members[1:]:
            assert isinstance(await log.submit(SetMember(first, member, actor=members[0])), Applied)
        message = Submission(
            policy=CHAT,
            scope=first,
            key=bytes(15) + b"1",
            fingerprint=b"f",
            actor=members[-1],
            rate=RATE,
            stream_rate=RATE,
        )
        assert isinstance(await log.submit(message), Committed)
        assert isinstance(await log.submit(Acknowledge(first, members[2], 1)), Applied)
        assert isinstance(await log.submit(SetMember(first, members[3], present=False)), Applied)
        assert isinstance(await log.submit(SetCursor(text(chance), 1, first)), Applied)
        found: list[tuple[str, int]] = []
        while True:
            page = await log.state.members(first, after=found[-1][0] if found else "", limit=2)
            found += [(one.name, one.acknowledged) for one in page.members]
            if not page.has_more:
                break
        assert found == [(one, int(one == members[2])) for one in members if one != members[3]]
        streams: list[str] = []
        while True:
            after = streams[-1] if streams else ""
            memberships = await log.state.memberships(members[0], prefix="chat/", after=after, limit=2)
            streams += [one.scope for one in memberships.memberships]
            if not memberships.has_more:
                break
        assert streams == scopes
        standing = await log.state.find_membership(first, members[2])
        assert standing is not None
        assert (standing.newest, standing.acknowledged) == (1, 1)
    await check_verified(place)


@BOTH_STORES
@pytest.mark.rule("CO-34", "DE-1")
async def test_delta_names_of_the_documented_lengths_are_stored_and_listed_in_order(tmp_path: Path) -> None:
    chance = Random(4)
    scope, table, common = text(chance), long_key(chance), long_key(chance)[:700]
    rows = sorted(
        [*((table, long_key(chance, common)) for _ in range(4)), (table, "1"), ("t", "1"), ("t", long_key(chance))]
    )
    place = log_at(tmp_path / "log.db")
    async with open_log(place) as log:
        for number, (name, row_id) in enumerate(rows, 1):
            delta = change(scope, number, name, row_id, long_key(chance), long_key(chance))
            assert isinstance(await log.submit(delta), Committed)
            assert await log.state.row(scope, name, row_id) is not None
        for of_table in ("", table, "t"):
            found: list[tuple[str, str]] = []
            while True:
                page = await log.state.rows(scope, table=of_table, after=found[-1] if found else ("", ""), limit=2)
                found += [one[:2] for one in page.rows]
                if not page.has_more:
                    break
            assert found == [one for one in rows if of_table in ("", one[0])]
    await check_verified(place)


@BOTH_STORES
@pytest.mark.rule("CO-34", "RU-5")
async def test_leases_with_names_of_the_documented_lengths_are_granted_and_expire(tmp_path: Path) -> None:
    chance = Random(5)
    policy = Policy(
        name="p" * POLICY_NAME_CHARACTERS_MAX,
        key_bytes=(1, KEY_BYTES_MAX),
        order=Order.STREAM,
        on_reuse=OnReuse.REPLAY,
        retention=kept_for(days=1),
        leased=True,
    )
    place, clock = log_at(tmp_path / "log.db"), ManualClock()
    scope, holder, key = text(chance), text(chance), chance.randbytes(KEY_BYTES_MAX)
    claim = Claim(policy=policy, scope=scope, key=key, fingerprint=b"f", holder=holder)
    async with open_log(place, policies=[policy], clock=clock) as log:
        granted = await log.submit(claim)
        assert isinstance(granted, Granted)
        work = Submission(
            policy=policy, scope=scope, key=key, fingerprint=b"f", holder=holder, fence=granted.fence, actor=holder
        )
        assert isinstance(await log.submit(work), Committed)
        assert isinstance(await log.submit(claim), Replayed)
    await check_verified(place)


@pytest.mark.stores(POSTGRES)
@pytest.mark.rule("CO-34", "LG-15")
async def test_rows_with_long_keys_expire_like_the_others(tmp_path: Path) -> None:
    chance, clock = Random(6), ManualClock()
    place, scope = log_at(tmp_path / "log.db"), "org"
    keys = [long_key(chance) for _ in range(5)]
    async with open_log(place, clock=clock) as log:
        expiry = clock.wall_ms() + 1000
        operations = [SetEntity(key, b"1", expires_at_ms=expiry) for key in (*keys, "short")]
        assert isinstance(await log.submit(write(scope, "c", 1, *operations, SetEntity("kept", b"1"))), Committed)
        assert query(place, "SELECT count(*) FROM oncelog_entities WHERE digest IS NOT NULL") == [(5,)]
        clock.advance(2000)
        for sequence in range(2, 60):
            assert isinstance(await log.submit(write(scope, "c", sequence, SetEntity("kept", b"1"))), Committed)
        assert query(place, "SELECT key FROM oncelog_entities") == [("kept",)]


@pytest.mark.stores(POSTGRES)
@pytest.mark.rule("CO-34")
async def test_database_of_the_previous_schema_is_migrated(tmp_path: Path) -> None:
    """The long keys are repeated characters, because the previous schema could only index them compressed."""
    place, scope, client = log_at(tmp_path / "log.db"), "ö" * 512, "client:" + "é" * 500
    members = ["m" * 512, "ü" * 512]
    async with open_log(place) as log:
        operations = [SetEntity("a" * 1024, b"1"), SetEntity("b", b"1"), Relate("r" * 1024, "s" * 1024, "t" * 1024)]
        assert isinstance(await log.submit(write(scope, client, 1, *operations)), Committed)
        assert isinstance(await log.submit(OpenStream("ch" * 256, members[0])), Applied)
        assert isinstance(await log.submit(SetMember("ch" * 256, members[1])), Applied)
    downgrade_to_schema_4(place)
    async with open_log(place) as log:
        assert await list_entities(log, scope) == ["a" * 1024, "b"]
        entry = await log.state.client(scope, client)
        assert entry is not None
        assert entry.sequence == 1
        again = [SetEntity("a" * 1024, b"2"), Relate("r" * 1024, "s" * 1024, "t" * 1024)]
        assert isinstance(await log.submit(write(scope, client, 2, *again)), Committed)
        assert await list_relationships(log, scope) == [("r" * 1024, "s" * 1024, "t" * 1024)]
        assert [one.name for one in (await log.state.members("ch" * 256)).members] == members
    assert query(place, "SELECT count(*) FROM oncelog_entities") == [(2,)]
    await check_verified(place)


@pytest.mark.stores(POSTGRES)
@pytest.mark.rule("CO-34")
async def test_verify_finds_a_wrong_digest(tmp_path: Path) -> None:
    place, key = log_at(tmp_path / "log.db"), long_key(Random(7))
    async with open_log(place) as log:
        assert isinstance(await log.submit(write("org", "c", 1, SetEntity(key, b"1"))), Committed)
    query(place, "UPDATE oncelog_entities SET digest = sha256('other')")
    last = await run_verify(place)
    assert isinstance(last, Inconsistency)
    assert "under its digest" in str(last)


@pytest.mark.stores(POSTGRES)
@pytest.mark.rule("CO-34")
async def test_listings_of_short_and_long_keys_use_their_indexes(tmp_path: Path) -> None:
    """If a listing sorted the entities of its scope, it would take longer with every entity."""
    place, chance = log_at(tmp_path / "log.db"), Random(8)
    async with open_log(place) as log:
        operations = [SetEntity(long_key(chance) if number % 4 == 0 else f"k{number}", b"1") for number in range(400)]
        assert isinstance(await log.submit(write("org", "c", 1, *operations)), Committed)
        page = await log.state.entities("org", limit=2)
        assert len(page.entities) == 2
        store: Any = log._store
        async with store._pool.acquire() as connection:
            await connection.execute("ANALYZE oncelog_entities")
            lane = log.state.lane("org")
            plan = await connection.fetch(
                f"EXPLAIN EXECUTE {await prepare_statement(connection)}({lane}, 'org', 'k2', '', '', 0, 3, 1000000)"
            )
    lines = "\n".join(row[0] for row in plan)
    assert "oncelog_entities_short" in lines
    assert "oncelog_entities_long_order" in lines
    assert "Incremental Sort" in lines
    assert "Seq Scan" not in lines


@pytest.mark.stores(POSTGRES)
@pytest.mark.rule("CO-34")
async def test_plans_made_for_empty_tables_look_up_each_key(tmp_path: Path) -> None:
    """Sessions keep their plans while tables grow, so a plan that reads a whole index would become ever slower."""
    place = log_at(tmp_path / "log.db")
    async with open_log(place) as log:
        await log.state.entities("org")
        store: Any = log._store
        async with store._pool.acquire() as connection:
            for statements in (LOAD, DELETE):
                for table, statement in ((table, one) for table, both in statements.items() for one in both):
                    await connection.execute(f"PREPARE looking AS {statement}")
                    arrays = ", ".join(f"'{{}}'::{kind}[]" for kind in re.findall(r"::(\w+)\[\]", statement))
                    plan = await connection.fetch(f"EXPLAIN EXECUTE looking ({arrays})")
                    await connection.execute("DEALLOCATE looking")
                    lines = "\n".join(row[0] for row in plan)
                    if table in ("streams", "usage"):
                        continue  # The primary keys of these tables contain the complete names.
                    assert re.search(r"Index Cond: .*(scope = n\.|digest = n\.|\"left\"\(scope, 64\) = )", lines), (
                        statement,
                        lines,
                    )
                    assert "Materialize" not in lines, (statement, lines)


async def prepare_statement(connection: Any) -> str:
    types = "integer, text, text, text, text, bigint, bigint, bigint"
    await connection.execute(f"PREPARE listing ({types}) AS {SQL['entity_page']}")
    return "listing"


def test_digest_is_stored_for_keys_that_together_exceed_the_limit() -> None:
    assert compute_digest(("a" * 1000, "b" * 1000)) is None
    assert compute_digest(("a" * 1000, "b" * 1001)) == compute_digest(["a" * 1000, "b" * 1001])
    assert compute_digest(("ä" * 500, "b" * 1000)) is None
    assert compute_digest(("ä" * 500, "b" * 1001)) is not None
    assert compute_digest(("a" * 1000, "ba" * 1000)) != compute_digest(("a" * 1000 + "b", "a" + "ba" * 999))
