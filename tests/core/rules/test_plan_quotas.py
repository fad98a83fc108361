"""Quotas: storage limits and write rates of tenants. The store contract has more quota tests."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.item_builders import Log, assert_committed, assert_refused, assert_replayed, event, message
from oncelog.core.limits import (
    NAME_CHARACTERS_MAX,
    QUOTA_RETRY_AFTER_MS,
    RATE_MAX,
    TENANTS_MAX,
    WHOLE_REQUEST_ITEMS_MAX,
)
from oncelog.core.rules.quotas import collect_usage_keys
from oncelog.core.stored_bytes import submission_bytes
from oncelog.core.tenants import Tenant, Tenants, Usage, check_tenants
from oncelog.core.values import Acknowledge, Committed, Rate, Reason, Request, SetCursor, SetMember
from oncelog.errors import SettingsError

NAMES = ("a", "a/b", "a/b/c", "ab", "a/bc", "", "/", "a//b", "é/ü")


def log_with(*tenants: Tenant) -> Log:
    log = Log()
    log.snapshot.tenants = Tenants(tenants)
    return log


def prefixes(tenants: Sequence[Tenant]) -> list[str]:
    return [tenant.prefix for tenant in tenants]


# --- tenants of a write ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stream", "partitions", "found"),
    [
        ("ledger/acme", (), ["ledger", "ledger/acme"]),
        ("ledger/acme/main", (), ["ledger", "ledger/acme"]),
        ("ledger/acme2", (), ["ledger"]),
        ("", ("ledger/acme", "orders/1"), ["ledger", "ledger/acme", "orders/1"]),
        ("ledger/acme", ("ledger/acme/x",), ["ledger", "ledger/acme"]),
        ("other", ("others/1",), []),
        ("", (), []),
    ],
)
def test_tenant_covers_its_name_and_all_names_below(stream: str, partitions: tuple[str, ...], found: list[str]) -> None:
    tenants = Tenants([Tenant(name) for name in ("ledger", "ledger/acme", "orders/1", "orders/1/2")])
    assert prefixes(tenants.list_for(stream, partitions)) == found
    assert prefixes(tenants.list_for(stream, partitions)) == found, "the cached answer is the same"


@given(st.lists(st.sampled_from(NAMES[:5] + NAMES[6:]), unique=True), st.lists(st.sampled_from(NAMES)))
def test_tenant_lookup_equals_a_linear_search(tenants: list[str], names: list[str]) -> None:
    found = prefixes(Tenants(map(Tenant, tenants)).list_for("", tuple(names)))
    expected = {one for one in tenants for name in names if name == one or name.startswith(f"{one}/")}
    assert found == sorted(expected)


def test_streams_count_by_name_and_events_by_partitions() -> None:
    log = log_with(Tenant("chat", records_max=2), Tenant("p", records_max=1))
    log(SetMember("chat/1", "user:ann"))
    assert_committed(log(message(1)))
    assert_refused(log(message(2)), Reason.QUOTA_EXCEEDED)
    assert_committed(log(event(2, partitions=("p/1",))))
    assert_refused(log(event(3, partitions=("p/2",))), Reason.QUOTA_EXCEEDED)


# --- refusals ------------------------------------------------------------------------------------------


@pytest.mark.rule("CO-18", "CO-30")
def test_quota_refusal_reports_tenant_limit_and_usage() -> None:
    first = event(1, body=b"12", partitions=("acme",))
    size = submission_bytes(first)
    log = log_with(Tenant("acme", bytes_max=2 * size - 1))
    assert_committed(log(first))
    late = assert_refused(log(event(2, body=b"12", partitions=("acme",))), Reason.QUOTA_EXCEEDED)
    assert (late.tenant, late.field, late.limit, late.current) == ("acme", "bytes_max", 2 * size - 1, size)
    assert late.retry_after_ms == QUOTA_RETRY_AFTER_MS
    assert (
        late.message
        == f"bytes_max of the tenant 'acme' is {2 * size - 1}; it uses {size}, and this request adds {size}"
    )
    assert_committed(log(event(2, body=b"1", partitions=("acme",))))
    assert log.snapshot.usage == {"acme": Usage(2 * size - 1, 2)}


@pytest.mark.rule("CO-15", "CO-18")
def test_quota_is_checked_after_replay_and_other_checks() -> None:
    log = log_with(Tenant("acme", records_max=1))
    receipt = assert_committed(log(event(1, partitions=("acme",))))
    assert assert_replayed(log(event(1, partitions=("acme",)))).receipt == receipt
    assert_refused(log(event(1, "other", partitions=("acme",))), Reason.IDENTITY_REUSED)
    assert_refused(log(event(2, partitions=("acme",), expected_position=7)), Reason.UNEXPECTED_POSITION)
    assert_refused(log(event(2, partitions=("acme",)), lambda _: "no"), Reason.INVALID)
    assert_refused(log(event(2, partitions=("acme",))), Reason.QUOTA_EXCEEDED)
    assert log.snapshot.usage["acme"].records == 1


def test_quota_and_rate_refusals_do_not_consume_each_other() -> None:
    log = log_with(Tenant("acme", records_max=2))
    rate = Rate(1, burst=2)
    assert_committed(log(event(1, partitions=("acme",), actor="a", rate=rate)))
    log.snapshot.tenants = Tenants([Tenant("acme", records_max=1)])
    before = dict(log.snapshot.rates)
    assert_refused(log(event(2, partitions=("acme",), actor="a", rate=rate)), Reason.QUOTA_EXCEEDED)
    assert log.snapshot.rates == before
    log.snapshot.tenants = Tenants([Tenant("acme")])
    assert_committed(log(event(2, partitions=("acme",), actor="a", rate=rate)))
    assert_refused(log(event(3, partitions=("acme",), actor="a", rate=rate)), Reason.RATE_LIMITED)
    assert log.snapshot.usage["acme"].records == 2


def test_write_must_fit_the_quotas_of_all_its_tenants() -> None:
    log = log_with(Tenant("a", records_max=9), Tenant("a/b", records_max=1), Tenant("c", records_max=9))
    assert_committed(log(event(1, partitions=("a/b", "c"))))
    assert assert_refused(log(event(2, partitions=("a/b", "c"))), Reason.QUOTA_EXCEEDED).tenant == "a/b"
    assert {prefix: usage.records for prefix, usage in log.snapshot.usage.items()} == {"a": 1, "a/b": 1, "c": 1}


# --- rates -------------------------------------------------------------------------------------------


def test_tenant_rate_refills_evenly() -> None:
    log = log_with(Tenant("t", new_writes_per_second_max=2, new_writes_at_once_max=3))
    assert [type(log(event(number, partitions=("t",)))) for number in (1, 2, 3)] == [Committed] * 3
    late = assert_refused(log(event(4, partitions=("t",))), Reason.RATE_LIMITED)
    assert (late.retry_after_ms, late.tenant, late.limit) == (500, "t", 2)
    assert late.message == "the tenant 't' exceeds its new_writes_per_second_max of 2; try again in 500 ms"
    log.now_ms += 499
    assert assert_refused(log(event(4, partitions=("t",))), Reason.RATE_LIMITED).retry_after_ms == 1
    log.now_ms += 1
    assert_committed(log(event(4, partitions=("t",))))


@pytest.mark.rule("EV-8")
@pytest.mark.parametrize("items", [1001, 1061, 1500, WHOLE_REQUEST_ITEMS_MAX])
def test_request_larger_than_the_burst_is_paid_back_in_full(items: int) -> None:
    log = log_with(Tenant("p", new_writes_per_second_max=1))
    many = [event(number, partitions=("p",)) for number in range(items)]
    assert_committed(log.submit_request(*many, is_admitted_whole=True)[-1])
    late = event(items, partitions=("p",))
    assert assert_refused(log(late), Reason.RATE_LIMITED).retry_after_ms == items * 1000
    log.now_ms += items * 1000 - 1
    assert assert_refused(log(late), Reason.RATE_LIMITED).retry_after_ms == 1
    log.now_ms += 1
    assert_committed(log(late))


@pytest.mark.rule("EV-8", "CO-30")
def test_request_above_the_item_limit_is_refused() -> None:
    log = log_with(Tenant("p", new_writes_per_second_max=1))
    many = [event(number, partitions=("p",)) for number in range(WHOLE_REQUEST_ITEMS_MAX + 1)]
    verdicts = log.submit_request(*many, is_admitted_whole=True)
    assert {assert_refused(one, Reason.MALFORMED).message for one in verdicts} == {
        "items must have at most 10000 entries in a request that is admitted as a whole, not 10001"
    }
    assert log.snapshot.usage == {}
    without = [event(number) for number in range(WHOLE_REQUEST_ITEMS_MAX + 1)]
    assert_committed(log.submit_request(*without)[-1])


def test_setting_the_clock_back_does_not_block_a_tenant() -> None:
    log = log_with(Tenant("t", new_writes_per_second_max=1))
    assert_committed(log(event(1, partitions=("t",))))
    assert_refused(log(event(2, partitions=("t",))), Reason.RATE_LIMITED)
    log.now_ms -= 24 * 3_600_000
    assert_committed(log(event(2, partitions=("t",))))
    assert_refused(log(event(3, partitions=("t",))), Reason.RATE_LIMITED)
    log.now_ms += 1000
    assert_committed(log(event(3, partitions=("t",))))


@given(st.lists(st.integers(-8, 9), max_size=200))
def test_clock_skew_between_processes_does_not_raise_the_rate(steps: list[int]) -> None:
    log = log_with(Tenant("t", new_writes_per_second_max=5))
    start_ms = newest_ms = log.now_ms
    taken = 0
    for number, step_ms in enumerate(steps, 1):
        log.now_ms += step_ms
        newest_ms = max(newest_ms, log.now_ms)
        taken += isinstance(log(event(number, partitions=("t",))), Committed)
        assert taken <= 5 + (newest_ms - start_ms) * 5 / 1000


@given(st.integers(1, 40), st.integers(1, 10), st.lists(st.integers(0, 700), max_size=60))
def test_tenant_rate_is_never_exceeded(per_second: int, at_once: int, pauses: list[int]) -> None:
    log = log_with(Tenant("t", new_writes_per_second_max=per_second, new_writes_at_once_max=at_once))
    start_ms, taken = log.now_ms, 0
    for number, pause_ms in enumerate(pauses, 1):
        log.now_ms += pause_ms
        taken += isinstance(log(event(number, partitions=("t",))), Committed)
        assert taken <= at_once + (log.now_ms - start_ms) * per_second / 1000


# --- read set and validation -----------------------------------------------------------------------------


def test_read_set_contains_only_relevant_tenants() -> None:
    tenants = Tenants(map(Tenant, "abcdfg"))
    held = event(1, partitions=("a",), known_only=True)
    asked, bad = event(2, partitions=("b",)), event(3, partitions=("c",))
    fault = assert_refused(Log()(event(4, partitions=("b", "a"))), Reason.MALFORMED)
    items = (
        held,
        asked,
        bad,
        SetMember("d/1", "x"),
        SetMember("e", "x"),
        Acknowledge("f", "x", 1),
        SetCursor("x", 1, "g"),
    )
    assert collect_usage_keys([Request(items)], tenants, {items.index(bad): fault}) == ({"b", "d"}, {("d/1", "x")})


@pytest.mark.parametrize(
    "tenant",
    [
        Tenant(""),
        Tenant("a/"),
        Tenant("/a"),
        Tenant("a/*"),
        Tenant("*"),
        Tenant("a\0"),
        Tenant("x" * (NAME_CHARACTERS_MAX + 1)),
        Tenant("e\u0301"),
        Tenant("a", bytes_max=-1),
        Tenant("a", records_max=2**63),
        Tenant("a", new_writes_per_second_max=RATE_MAX + 1),
        Tenant("a", new_writes_at_once_max=5),
        Tenant("a", bytes_max=True),
    ],
)
def test_invalid_quota_is_refused(tenant: Tenant) -> None:
    with pytest.raises(SettingsError, match="tenants"):
        check_tenants([tenant])


def test_repeated_prefixes_and_too_many_tenants_are_refused() -> None:
    check_tenants([Tenant("a"), Tenant("a/b", 1, 2, 3, 4)])
    with pytest.raises(SettingsError, match="twice"):
        check_tenants([Tenant("a"), Tenant("a", 1)])
    with pytest.raises(SettingsError, match="at most"):
        check_tenants([Tenant(str(number)) for number in range(TENANTS_MAX + 1)])
