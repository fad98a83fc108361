"""Contract tests for audit records: administrative acts in the hash chain of their lane."""

# ruff: noqa: S101, D102 - tests consist of assertions, and their names describe them

from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson

from oncelog.core.identity import compute_lane
from oncelog.core.limits import ACT_DETAILS_BYTES_MAX
from oncelog.core.policy import AUDIT_POLICY, RUNS
from oncelog.core.rules.audit import ERASE, LEASE_RELEASED, QUOTA_CHANGE, READ_ONLY_ON, act_key, decode_audit_entry
from oncelog.core.stored_bytes import record_bytes, submission_bytes
from oncelog.core.tenants import Tenant
from oncelog.core.values import (
    Applied,
    Granted,
    Mode,
    Reason,
    Record,
    RecordAct,
    Release,
    Request,
    SetMember,
    Settings,
)
from oncelog.errors import ClockJumpedError, SettingsError
from oncelog.testing.contract.assertions import assert_committed, assert_refused, assert_replayed
from oncelog.testing.contract.driver import Contract, StoreDriver, list_positions
from oncelog.testing.contract.writes import (
    CAMPAIGN,
    CHANNEL,
    DAY_MS,
    ORGANISATION,
    claim,
    event,
    key,
    message,
    transaction,
)

TWO_LANES = Settings(lanes=2)
ROOT = "user:root"


def act(name: str = READ_ONLY_ON, actor: str = ROOT, **more: Any) -> RecordAct:
    """Build the audit record of an administrative act."""
    return RecordAct(act=name, actor=actor, **more)


class AuditContract(Contract):
    """Content of audit records, how they are read, and the transactions that write them."""

    def test_audit_record_belongs_to_a_lane_but_to_no_stream_or_partition(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path, TWO_LANES) as log:
            log.commit_items(event(1, partitions=("p",)), transaction(1, 1))
            first = assert_committed(log(act(target="log", details=b'{"reason":"disk"}')))
            second = assert_committed(log(act("erase", scope=ORGANISATION)))
            log.commit_items(event(2, partitions=("p",)), transaction(2, 2))
            log.reopen()
            assert (first.lane, first.position, first.sequence) == (0, 2, 0)
            assert (second.lane, second.position) == (compute_lane(ORGANISATION, 2), 2)
            assert list_positions(log.read_all()) == [1, 2, 3]
            assert list_positions(log.read_all(partitions=("p",))) == [1, 3]
            assert [record.sequence for record in log.read_all(stream=ORGANISATION)] == [1, 2]
            record = log.read_all()[1]
            assert (record.policy, record.actor, record.scope) == (AUDIT_POLICY, ROOT, "")
            assert (record.client, record.client_sequence, record.partitions) == ("", 0, ())
            body = orjson.loads(record.body)
            assert body == {
                "act": READ_ONLY_ON,
                "actor": ROOT,
                "details": {"reason": "disk"},
                "target": "log",
                "time_ms": record.log_time_ms,
                "type": "audit",
            }

    def test_audit_record_is_part_of_the_hash_chain(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path, TWO_LANES) as log:
            log(event(1))
            receipt = assert_committed(log(act()))
            log(event(2))
            log.reopen()
            blocks = [one.block for one in log.run(log.store.blocks(0, 0, 100, ""))]
            assert [block.height for block in blocks] == [1, 2, 3]
            assert all(after.previous == before.hash for before, after in pairwise(blocks))
            assert log.heads()[0].block_hash == blocks[-1].hash
            _, evidence = log.run(log.store.block(0, receipt.height))
            assert [one.record.policy for one in evidence] == [AUDIT_POLICY]

    def test_block_positions_of_a_scope_exclude_its_audit_records(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path, TWO_LANES) as log:
            log.commit_items(transaction(1, 1), act("erase", scope=ORGANISATION))
            lane = compute_lane(ORGANISATION, 2)
            assert [one.positions for one in log.run(log.store.blocks(lane, 0, 9, ORGANISATION))] == [(1,)]

    def test_act_reported_by_several_processes_is_recorded_once(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path, TWO_LANES) as log:
            noticed = act("key_revoked", target="k1", key=act_key("key_revoked", "k1"))
            first = assert_committed(log(noticed))
            log.reopen()
            assert assert_replayed(log(act("key_revoked", "user:other", target="k1", key=noticed.key))).receipt == first
            log.clock.advance(400 * DAY_MS)
            log.commit_items(*[event(number) for number in range(1, 5)])
            assert assert_replayed(log(noticed)).receipt == first
            assert assert_committed(log(act("key_revoked", target="k2", key=act_key("key_revoked", "k2")))) != first
            # The same act in one batch, without a key.
            again = act("key_revoked", target="k3", key=act_key("key_revoked", "k3"))
            new, known = log.commit_items(again, again)
            assert assert_replayed(known).receipt == assert_committed(new)
            assert assert_committed(log(act())) != assert_committed(log(act()))

    def test_act_with_a_key_is_recorded_once_per_lane(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path, TWO_LANES) as log:
            acts = [act(ERASE, target="p", lane=lane, key=act_key(ERASE, "p")) for lane in (0, 1, 2)]
            receipts = [assert_committed(log(one)) for one in acts]
            assert [one.lane for one in receipts] == [0, 1, 2]
            log.reopen()
            assert [assert_replayed(log(one)).receipt for one in acts] == receipts
            assert len({one.key for one in _list_acts(log)}) == 3
            in_stream = act(ERASE, scope=ORGANISATION, key=acts[0].key)
            assert assert_committed(log(in_stream)).lane == compute_lane(ORGANISATION, 2)

    def test_audit_records_of_all_lanes_are_read_in_order_of_time(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path, TWO_LANES) as log:
            scopes = ["", ORGANISATION, CHANNEL, "", ORGANISATION]
            for number, scope in enumerate(scopes):
                log(event(number))
                log(act(f"act_{number}", scope=scope))
                log.clock.advance(10)
            log.reopen()
            found = _list_acts(log)
            assert [decode_audit_entry(one).act for one in found] == [f"act_{number}" for number in range(5)]
            assert [one.scope for one in found] == scopes
            after: dict[int, int] = {}
            paged: list[Record] = []
            while page := log.run(log.store.internal_records(after, 2)):
                assert len(page) <= 2
                paged += page
                after.update({one.lane: one.position for one in page})
            assert paged == found
            assert log.run(log.store.internal_records({0: 2**40}, 10)) == [one for one in found if one.lane]

    def test_restore_records_are_listed_with_audit_records(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path, TWO_LANES) as log:
            log.commit_items(event(1), act())
            log.run(log.store.renew_epoch(1000))
            log.reopen()
            entries = [decode_audit_entry(one) for one in _list_acts(log)]
            assert [one.act for one in entries] == [READ_ONLY_ON, "restore", "restore", "restore"]
            assert [one.lane for one in entries] == [0, 0, 1, 2]
            assert {one.actor for one in entries[1:]} == {"system:restore"}
            assert entries[1].details["above"] == 1000

    def test_delayed_act_keeps_its_time(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path, TWO_LANES) as log:
            happened_ms = log.clock.wall_ms()
            log.clock.advance(5000)
            log(act(time_ms=happened_ms))
            entry = decode_audit_entry(_list_acts(log)[0])
            assert (entry.time_ms, entry.log_time_ms) == (happened_ms, happened_ms + 5000)

    def test_erasure_and_its_audit_record_commit_together(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path, TWO_LANES) as log:
            log.commit_items(*[event(number) for number in (1, 2, 3)])
            erase = act(ERASE, target="partition", details=b'{"partition":"p"}')
            assert log.run(log.store.erase(0, [1, 2], erase)) == 2
            assert log.run(log.store.erase(0, [1, 2], erase)) == 0, "a second erasure finds nothing and is not recorded"
            log.reopen()
            (entry,) = [decode_audit_entry(item) for item in _list_acts(log)]
            assert (entry.act, entry.target, entry.position) == (ERASE, "partition", 4)
            assert entry.details == {"partition": "p", "records": 2}
            assert [record.erased for record in log.read_all()] == [True, True, False, False]
            assert assert_committed(log(event(4))).position == 5

    def test_erasure_fails_if_its_audit_record_is_refused(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path, TWO_LANES) as log:
            log.commit_items(event(1), transaction(1, 1))
            for wrong in (act("Not a name"), act(ERASE, lane=1), act(ERASE, ""), act(ERASE, scope=ORGANISATION)):
                assert isinstance(log.catch_error(log.store.erase(0, [1], wrong)), ValueError)
            log.clock.jump(8 * DAY_MS)
            assert isinstance(log.catch_error(log.store.erase(0, [1], act(ERASE))), ClockJumpedError)
            assert not log.read_all()[0].erased
            assert _list_acts(log) == []
            log.run(log.store.confirm_clock())
            assert log.run(log.store.erase(0, [1], act(ERASE))) == 1
            assert assert_committed(log(event(2))).position == 3
            assert assert_replayed(log(event(2))).receipt is not None

    def test_quota_change_and_its_audit_record_commit_together(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path, TWO_LANES) as log:
            change = act(QUOTA_CHANGE, details=b'{"tenants":1}')
            assert log.run(log.store.set_tenants([Tenant(prefix="acme")], change))
            assert not log.run(log.store.set_tenants([Tenant(prefix="acme")], change)), "the quotas are unchanged"
            log.reopen()
            assert [decode_audit_entry(entry).act for entry in _list_acts(log)] == [QUOTA_CHANGE]
            assert log.run(log.store.set_tenants([]))
            assert len(_list_acts(log)) == 1

    def test_refused_quota_change_is_not_recorded(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path, TWO_LANES) as log:
            log(transaction(1, 1))
            own_ids = Tenant(prefix="acme", own_ids=True)
            assert log.run(log.store.set_tenants([own_ids], act(QUOTA_CHANGE)))
            error = log.catch_error(log.store.set_tenants([Tenant(prefix="acme")], act(QUOTA_CHANGE)))
            assert isinstance(error, SettingsError)
            log.reopen()
            assert len(_list_acts(log)) == 1
            assert assert_committed(log(event(1, partitions=("acme/1",), scope="tenant/acme")))

    def test_audit_records_of_clients_count_against_quotas(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path, TWO_LANES) as log:
            log.run(log.store.set_tenants([Tenant(prefix=ORGANISATION, bytes_max=10_000)]))
            log(transaction(1, 1))
            log(act("erase", scope=ORGANISATION))
            log(act("erase", "system:server", scope=ORGANISATION))
            before = _get_usage(log)[ORGANISATION]
            assert before.records == 2
            audited = _list_acts(log)[0]
            names = len(audited.scope) + len(audited.actor) + len(audited.key)
            assert before.bytes == submission_bytes(transaction(1, 1)) + record_bytes(names, (), len(audited.body))
            # Counting for a new tenant gives the same result.
            log.run(log.store.set_tenants([Tenant(prefix=ORGANISATION), Tenant(prefix="org")]))
            assert _get_usage(log) == {ORGANISATION: before, "org": before}

    def test_operator_can_release_the_lease_of_any_holder(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path, TWO_LANES) as log:
            granted = log(claim(1, "h1"))
            assert isinstance(granted, Granted)
            release: dict[str, Any] = {"policy": RUNS, "scope": CAMPAIGN, "key": key(1), "holder": "", "actor": ROOT}
            assert log(Release(**release, fence=granted.fence + 1)) == Applied(changed=False)
            assert _list_acts(log) == []
            assert log(Release(**release, fence=granted.fence)) == Applied(changed=True)
            assert log(Release(**release, fence=granted.fence)) == Applied(changed=False)
            log.reopen()
            assert isinstance(log(claim(1, "h2")), Granted)
            (entry,) = [decode_audit_entry(item) for item in _list_acts(log)]
            assert (entry.act, entry.actor, entry.scope, entry.target) == (LEASE_RELEASED, ROOT, CAMPAIGN, key(1).hex())
            assert entry.details == {"fence": granted.fence, "policy": "runs"}

    def test_malformed_act_is_refused_with_its_field(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path, TWO_LANES) as log:
            long = b'{"a":"%s"}' % (b"x" * ACT_DETAILS_BYTES_MAX)
            for field, wrong in (
                ("act", act("")),
                ("act", act("Erase")),
                ("actor", act(actor="")),
                ("lane", act(lane=3)),
                ("lane", act(lane=-1)),
                ("time_ms", act(time_ms=-1)),
                ("key", act(key=b"short")),
                ("target", act(target="x" * 1025)),
                ("scope", act(scope="\0")),
                ("details", act(details=b"[]")),
                ("details", act(details=b'{"b":1,"a":2}')),
                ("details", act(details=b"{")),
                ("details", act(details=long)),
            ):
                assert assert_refused(log(wrong), Reason.MALFORMED).field == field, wrong
            assert log.heads() == {}

    def test_audit_record_at_an_eviction_position_evicts(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path, Settings(lanes=1, eviction_interval=2)) as log:
            assert_committed(log(transaction(1, 1)))
            log.clock.advance(2 * DAY_MS)
            log(act("erase", scope=ORGANISATION))
            log.reopen()
            assert assert_committed(log(transaction(9, 1))).client_sequence == 1

    def test_refused_request_writes_no_audit_records(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path, TWO_LANES) as log:
            log(SetMember(CHANNEL, "user:ann"))
            before = _list_acts(log)
            log.commit_batch(Request((act(), message(1, actor="user:eve")), Mode.ALL))
            assert _list_acts(log) == before
            assert assert_committed(log(event(1))).position == 1


def _list_acts(log: StoreDriver) -> list[Record]:
    return log.run(log.store.internal_records({}, 1000))


def _get_usage(log: StoreDriver) -> dict[str, Any]:
    return {tenant.prefix: usage for tenant, usage in log.run(log.store.usage())}
