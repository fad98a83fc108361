"""The five built-in policies, and contradictory policies."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import asdict, replace

from oncelog.core.merge import Op, RowDelta
from oncelog.core.operations import SetEntity
from oncelog.core.policy import (
    BUILT_IN_POLICIES,
    CHAT,
    DELTAS,
    EVENTS,
    FOREVER,
    INTERNAL_POLICIES,
    KEY_BYTES_MAX,
    LEDGER,
    NAME_CHARACTERS_MAX,
    RUNS,
    TTL_MS_MAX,
    Forget,
    Identity,
    OnReuse,
    Order,
    Policy,
    Retention,
    evicted_after,
    kept_for,
)
from oncelog.core.values import (
    Applied,
    Claim,
    Committed,
    Granted,
    Item,
    Reason,
    Refused,
    Replayed,
    Request,
    SetMember,
    Settings,
    Submission,
    Verdict,
)
from oncelog.errors import OncelogError, PolicyError, SettingsError
from oncelog.testing.memory_log import MemoryLog

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
FLAGS = ("zero_key", "client_sequence", "leased", "members_only", "entities", "rows")


def build_policy(**fields: Any) -> Policy:
    """Return a valid policy with the given changes."""
    usual: dict[str, Any] = {
        "name": "payments",
        "key_bytes": (1, 64),
        "order": Order.STREAM,
        "on_reuse": OnReuse.REFUSE,
        "retention": FOREVER,
    }
    return Policy(**{**usual, **fields})


# --- built in ------------------------------------------------------------------------------------------

# Identity, key, order, retention, and the answer to different content under a known key.
TABLE: list[tuple[Policy, dict[str, Any]]] = [
    (
        EVENTS,
        {
            "name": "events",
            "identity": Identity.GIVEN,
            "key_bytes": (16, 16),
            "order": Order.LANE,
            "retention": Retention(Forget.NEVER),
            "on_reuse": OnReuse.REFUSE,
        },
    ),
    (
        LEDGER,
        {
            "name": "ledger",
            "identity": Identity.GIVEN,
            "key_bytes": (16, 16),
            "zero_key": False,
            "client_sequence": True,
            "order": Order.STREAM,
            "retention": Retention(Forget.AT_EVICTION, 24 * HOUR_MS),
            "on_reuse": OnReuse.REFUSE,
            "entities": True,
        },
    ),
    (
        DELTAS,
        {
            "name": "deltas",
            "identity": Identity.DERIVED,
            "key_bytes": (32, 32),
            "order": Order.STREAM,
            "retention": Retention(Forget.NEVER),
            "on_reuse": OnReuse.REPLAY,
            "rows": True,
        },
    ),
    (
        RUNS,
        {
            "name": "runs",
            "identity": Identity.DERIVED,
            "key_bytes": (16, 16),
            "order": Order.STREAM,
            "retention": Retention(Forget.NEVER),
            "on_reuse": OnReuse.REPLAY,
            "leased": True,
        },
    ),
    (
        CHAT,
        {
            "name": "chat",
            "identity": Identity.GIVEN,
            "key_bytes": (16, 16),
            "order": Order.STREAM,
            "retention": Retention(Forget.AT_AGE, 7 * DAY_MS),
            "on_reuse": OnReuse.REPLAY,
            "members_only": True,
        },
    ),
]


@pytest.mark.parametrize(("policy", "row"), TABLE, ids=[row["name"] for _, row in TABLE])
def test_built_in_policies_match_the_table(policy: Policy, row: dict[str, Any]) -> None:
    assert asdict(policy) == {**dict.fromkeys(FLAGS, False), "zero_key": True, **row}


def test_five_built_in_policies_have_distinct_names() -> None:
    assert [policy.name for policy in BUILT_IN_POLICIES] == ["events", "ledger", "deltas", "runs", "chat"]
    assert BUILT_IN_POLICIES == (EVENTS, LEDGER, DELTAS, RUNS, CHAT)


@pytest.mark.parametrize("policy", [*BUILT_IN_POLICIES, build_policy()], ids=lambda policy: policy.name)
def test_policy_is_immutable_and_hashable(policy: Policy) -> None:
    for field in Policy.__struct_fields__:
        with pytest.raises(AttributeError):
            setattr(policy, field, getattr(policy, field))
    with pytest.raises(AttributeError):
        policy.retention.ttl_ms = 1  # type: ignore[misc]
    assert replace(policy) == policy
    assert hash(replace(policy)) == hash(policy)


# --- contradictions ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"key_bytes": (0, 16)}, ["key_bytes", "(0, 16)"]),
        ({"key_bytes": (-1, 16)}, ["key_bytes", "(-1, 16)"]),
        ({"key_bytes": (17, 16)}, ["key_bytes", "(17, 16)"]),
        ({"key_bytes": (1, KEY_BYTES_MAX + 1)}, ["key_bytes", "(1, 256)", "255"]),
        ({"identity": Identity.DERIVED, "on_reuse": OnReuse.REFUSE}, ["derived key", "refuse"]),
        *(({"order": Order.LANE, flag: True}, [flag, "Order.STREAM"]) for flag in FLAGS if flag != "zero_key"),
        ({"leased": True, "members_only": True}, ["lease", "member"]),
        ({"entities": True, "rows": True}, ["entities", "row"]),
        ({"client_sequence": True, "retention": kept_for(hours=1)}, ["client's sequence", "evicted_after", "FOREVER"]),
        (
            {"client_sequence": True, "identity": Identity.DERIVED, "on_reuse": OnReuse.REPLAY},
            ["client sequence", "derived key"],
        ),
        ({"client_sequence": True, "on_reuse": OnReuse.REPLAY}, ["client sequence", "reuse"]),
        ({"client_sequence": True, "leased": True}, ["client sequence", "lease"]),
    ],
)
def test_contradictory_policy_is_refused_with_its_name_and_reason(fields: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(PolicyError) as refused:
        build_policy(name="my.policy-2", **fields)
    message = str(refused.value)
    assert message.startswith("my.policy-2: ")
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    "name", ["", "A", "Payments", "1st", "_a", "-a", "a b", "a/b", "é", "a\n", "a" * (NAME_CHARACTERS_MAX + 1), None, 7]
)
def test_invalid_policy_name_is_refused_and_quoted(name: Any) -> None:
    with pytest.raises(PolicyError) as refused:
        build_policy(name=name)
    assert "a policy's name" in str(refused.value)
    assert repr(name) in str(refused.value)


@pytest.mark.parametrize("name", ["a", "payments", "a1_.-z", "a" * NAME_CHARACTERS_MAX])
def test_valid_policy_names_are_accepted(name: str) -> None:
    assert build_policy(name=name).name == name


@pytest.mark.parametrize("key_bytes", [(1, 1), (1, KEY_BYTES_MAX), (KEY_BYTES_MAX, KEY_BYTES_MAX)])
def test_key_length_limits_are_accepted(key_bytes: tuple[int, int]) -> None:
    assert build_policy(key_bytes=key_bytes).key_bytes == key_bytes


def test_replaced_policy_is_validated() -> None:
    with pytest.raises(PolicyError, match=r"^runs: a lease .* member"):
        replace(RUNS, members_only=True)


def test_policy_error_is_a_value_error() -> None:
    assert issubclass(PolicyError, OncelogError)
    assert issubclass(PolicyError, ValueError)


@pytest.mark.parametrize("policy", BUILT_IN_POLICIES, ids=lambda policy: policy.name)
def test_name_of_a_built_in_policy_is_reserved(policy: Policy) -> None:
    with pytest.raises(PolicyError, match="built-in"):
        build_policy(name=policy.name, key_bytes=(1, 7))
    assert replace(policy) == policy


@pytest.mark.parametrize("forget", ["at_age", 1, None])
def test_invalid_kind_of_retention_is_refused(forget: Any) -> None:
    with pytest.raises(PolicyError):
        Retention(forget, 1000)


@pytest.mark.parametrize(
    "fields",
    [
        # A comparison by identity would treat this text as different from OnReuse.REFUSE and replay other content.
        {"on_reuse": "refuse"},
        {"order": "stream"},
        {"identity": "derived"},
        {"key_bytes": (1.0, 2.5)},
        {"key_bytes": (True, True)},
        {"key_bytes": (16,)},
        {"key_bytes": [1, 16]},
        {"key_bytes": 16},
        {"retention": 86_400_000},
        *({flag: "yes"} for flag in FLAGS),
    ],
    ids=str,
)
def test_policy_values_of_the_wrong_type_are_refused(fields: dict[str, Any]) -> None:
    (field,) = fields
    with pytest.raises(PolicyError, match=rf"^payments: {field} must be "):
        build_policy(**fields)


# --- time to live --------------------------------------------------------------------------------------


@pytest.mark.rule("LG-15")
@pytest.mark.parametrize("forget", [Forget.AT_AGE, Forget.AT_EVICTION])
@pytest.mark.parametrize("ttl_ms", [0, -1, -DAY_MS, TTL_MS_MAX + 1, 1.5, 1000.0, True, "1000", None])
def test_invalid_time_to_live_is_refused(forget: Forget, ttl_ms: Any) -> None:
    with pytest.raises(PolicyError) as refused:
        Retention(forget, ttl_ms)
    assert "time to live" in str(refused.value)
    assert repr(ttl_ms) in str(refused.value)


@pytest.mark.rule("LG-15")
@pytest.mark.parametrize("made", [kept_for, evicted_after])
@pytest.mark.parametrize("length", [{}, {"hours": 0}, {"seconds": -1}, {"hours": 1, "seconds": -3600}, {"days": 0.5}])
def test_retention_without_time_is_refused(made: Any, length: dict[str, Any]) -> None:
    with pytest.raises(PolicyError, match="time to live"):
        made(**length)


@pytest.mark.rule("LG-15")
@pytest.mark.parametrize("ttl_ms", [1, DAY_MS, TTL_MS_MAX])
def test_retention_limits_are_accepted(ttl_ms: int) -> None:
    assert kept_for(ms=ttl_ms) == Retention(Forget.AT_AGE, ttl_ms)
    assert evicted_after(ms=ttl_ms) == Retention(Forget.AT_EVICTION, ttl_ms)


def test_retention_units_add_up() -> None:
    length = {"days": 1, "hours": 2, "seconds": 3, "ms": 4}
    assert kept_for(**length) == Retention(Forget.AT_AGE, DAY_MS + 2 * HOUR_MS + 3004)
    assert evicted_after(**length) == Retention(Forget.AT_EVICTION, DAY_MS + 2 * HOUR_MS + 3004)
    assert kept_for(days=36_600).ttl_ms == TTL_MS_MAX


def test_forever_has_no_time_to_live() -> None:
    assert Retention(Forget.NEVER) == FOREVER
    with pytest.raises(PolicyError, match="time to live"):
        Retention(Forget.NEVER, 1)


@pytest.mark.rule("LG-15")
@pytest.mark.parametrize("setting", ["eviction_interval", "lanes"])
@pytest.mark.parametrize("value", [0, -1, 2**31, 1.0, True, "1000", None])
def test_setting_out_of_range_is_refused_with_its_name(setting: str, value: Any) -> None:
    with pytest.raises(SettingsError) as refused:
        Settings(**{setting: value})
    assert str(refused.value).startswith(f"{setting} ")
    assert repr(value) in str(refused.value)


@pytest.mark.rule("LG-15")
def test_settings_in_range_are_accepted() -> None:
    assert (Settings().lanes, Settings().eviction_interval) == (16, 1000)
    assert Settings(lanes=1, eviction_interval=1) == Settings(1, 1)
    assert Settings(lanes=2**15 - 1, eviction_interval=2**31 - 1).lanes == 2**15 - 1
    with pytest.raises(SettingsError):
        Settings(lanes=2**15)


# --- each combination of flags is refused or works -------------------------------------------------------

CHOICES: dict[str, Sequence[Any]] = {
    "order": tuple(Order),
    "on_reuse": tuple(OnReuse),
    "retention": (FOREVER, kept_for(hours=1), evicted_after(hours=1)),
    "identity": tuple(Identity),
    **dict.fromkeys(FLAGS, (False, True)),
}
COMBINATIONS = [dict(zip(CHOICES, chosen, strict=True)) for chosen in product(*CHOICES.values())]


def is_sound(fields: dict[str, Any]) -> bool:
    """The contradictions, restated from the docstrings of the fields."""
    of_streams = {flag for flag in FLAGS if flag != "zero_key" and fields[flag]}
    derived = fields["identity"] is Identity.DERIVED
    refuses = fields["on_reuse"] is OnReuse.REFUSE
    return (
        not (derived and refuses)
        and not (of_streams and fields["order"] is Order.LANE)
        and not of_streams >= {"leased", "members_only"}
        and not of_streams >= {"entities", "rows"}
        and not of_streams >= {"client_sequence", "leased"}
        and not ("client_sequence" in of_streams and (derived or not refuses))
        and not ("client_sequence" in of_streams and fields["retention"].forget is Forget.AT_AGE)
    )


def test_all_contradictory_combinations_are_refused() -> None:
    for fields in COMBINATIONS:
        if is_sound(fields):
            assert asdict(build_policy(**fields)) == {"name": "payments", "key_bytes": (1, 64), **fields}
        else:
            with pytest.raises(PolicyError, match=r"^payments: "):
                build_policy(**fields)


@given(st.integers(-1, 300), st.integers(-1, 300), st.sampled_from(COMBINATIONS))
def test_contradictions_are_refused_for_every_key_length(shortest: int, longest: int, fields: dict[str, Any]) -> None:
    try:
        policy = build_policy(key_bytes=(shortest, longest), **fields)
    except PolicyError:
        assert not (is_sound(fields) and 1 <= shortest <= longest <= 255)
    else:
        assert is_sound(fields)
        assert 1 <= policy.key_bytes[0] <= policy.key_bytes[1] <= 255


def test_every_other_combination_accepts_writes() -> None:
    for fields in filter(is_sound, COMBINATIONS):
        commits_once(build_policy(**fields))


@pytest.mark.parametrize("policy", BUILT_IN_POLICIES, ids=lambda policy: policy.name)
def test_built_in_policies_accept_writes(policy: Policy) -> None:
    commits_once(policy)


def commits_once(policy: Policy) -> None:
    """Submit a write, its retry, and a different write under the same key."""
    log, fence = MemoryLog(draw=bytes), 0
    if policy.members_only:
        assert submit_alone(log, SetMember("stream", "user:1")) == Applied(changed=True)
    if policy.leased:
        granted = submit_alone(
            log, Claim(policy=policy, scope="stream", key=build_key(policy), fingerprint=b"1", holder="me")
        )
        assert isinstance(granted, Granted)
        fence = granted.fence
    first = submit_alone(log, build_write(policy, b"1", fence))
    assert isinstance(first, Committed)
    assert submit_alone(log, build_write(policy, b"1", fence)) == Replayed(first.receipt)
    other = submit_alone(log, build_write(policy, b"2", fence))
    if policy.on_reuse is OnReuse.REPLAY:
        assert other == Replayed(first.receipt, mismatch=True)
    else:
        assert isinstance(other, Refused)
        assert other.reason is Reason.IDENTITY_REUSED
    assert len([record for record in log.records if record.policy == policy.name]) == 1


def submit_alone(log: MemoryLog, item: Item) -> Verdict:
    ((verdict,),) = log.submit([Request((item,))], 1000)
    return verdict


def build_key(policy: Policy) -> bytes:
    return b"k" * policy.key_bytes[1]


def build_write(policy: Policy, fingerprint: bytes, fence: int) -> Submission:
    """Build a write with every field that the policy requires."""
    return Submission(
        policy=policy,
        scope="stream",
        key=build_key(policy),
        fingerprint=fingerprint,
        actor="user:1",
        client="client-1" if policy.client_sequence else "",
        client_sequence=1 if policy.client_sequence else 0,
        operations=(SetEntity("entity", b"value"),) if policy.entities else (),
        delta=RowDelta(Op.INSERT, "t", "r", "c", 0, (), build_key(policy)) if policy.rows else None,
        holder="me",
        fence=fence,
    )


@pytest.mark.parametrize("name", sorted(INTERNAL_POLICIES))
def test_names_of_internal_records_are_reserved(name: str) -> None:
    with pytest.raises(PolicyError, match="is reserved for internal records"):
        Policy(name=name, key_bytes=(1, 64), order=Order.LANE, on_reuse=OnReuse.REFUSE, retention=FOREVER)
