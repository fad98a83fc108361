"""Identity and content of writes: framing, fingerprints, delta ids, run keys, request hashes, lanes."""

import random
from hashlib import sha256
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from core import vectors
from oncelog.core.canonical import canonical, canonical_args, parse
from oncelog.core.identity import (
    compute_lane,
    delta_id,
    delta_id_from_json,
    fingerprint,
    fingerprint_from_json,
    frame,
    normal_partitions,
    request_hash,
    run_key,
    run_key_from_json,
    run_key_v1,
    scope_of,
)
from oncelog.core.operations import Condition, DeleteEntity, Must, Operation, Relate, SetEntity, Unrelate
from oncelog.errors import CanonicalError

RUN = {
    "plan_id": "plan-123",
    "campaign_id": 456,
    "event_type": "tool.execute",
    "tool_name": "dice_roll",
    "ruleset_version": "dnd5e-v1.0",
    "args_json": {"sides": 20, "count": 1},
}
DELTA = {
    "clientId": "client-1",
    "hlc": "65536000000",
    "table": "todos",
    "rowId": "row-1",
    "columns": [{"column": "a", "value": 1}, {"column": "b", "value": {"x": 1, "y": 2}}],
}


def named(items: list[dict[str, Any]]) -> Any:
    return [pytest.param(item, id=item["name"]) for item in items]


# --- framing -----------------------------------------------------------------------------------------


@pytest.mark.rule("RU-1")
def test_frame_is_label_length_value() -> None:
    assert frame(b"plan_id", "é".encode()) == b"plan_id\x00\x00\x00\x02\xc3\xa9"
    assert frame(b"x", b"") == b"x\x00\x00\x00\x00"
    assert frame(b"x", bytes(70_000))[:5] == b"x\x00\x01\x11\x70"


@pytest.mark.rule("RU-1", "RU-10", "LG-14")
@given(st.lists(st.binary(max_size=12), max_size=4), st.lists(st.binary(max_size=12), max_size=4))
def test_shifted_frame_boundaries_do_not_collide(left: list[bytes], right: list[bytes]) -> None:
    def frame_all(values: list[bytes]) -> bytes:
        return b"".join(frame(b"v", value) for value in values)

    assert (frame_all(left) == frame_all(right)) == (left == right)


# --- events ------------------------------------------------------------------------------------------


@pytest.mark.rule("EV-6")
def test_partitions_are_normalised_deduplicated_and_sorted_by_utf_16() -> None:
    assert normal_partitions(["b", "a", "b"]) == ("a", "b")
    assert normal_partitions(["cafe\u0301", "café"]) == ("café",)
    assert normal_partitions(["\ufffd", "\U0001f600", "z"]) == ("z", "\U0001f600", "\ufffd")
    assert normal_partitions(["e\u0301"]) == ("é",)
    assert normal_partitions([]) == ()


@pytest.mark.rule("EV-6")
@given(st.lists(st.text(max_size=3), max_size=5), st.randoms(use_true_random=False))
def test_normal_form_of_partitions_does_not_depend_on_order(names: list[str], chance: random.Random) -> None:
    normal = normal_partitions(names)
    assert normal_partitions(normal) == normal
    shuffled = [*names, *names]
    chance.shuffle(shuffled)
    assert normal_partitions(shuffled) == normal


@pytest.mark.rule("EV-6")
@given(
    st.lists(st.text(max_size=5), min_size=1, max_size=3),
    st.dictionaries(st.text(max_size=5), st.integers(-9, 9) | st.text(), max_size=4),
)
def test_fingerprint_is_the_hash_of_the_canonical_form(names: list[str], event: dict[str, Any]) -> None:
    partitions = normal_partitions(names)
    assert fingerprint(names, canonical(event)) == fingerprint(partitions, canonical(event))
    whole = sha256(canonical({"partitions": list(partitions), "event": event})).digest()
    assert fingerprint(partitions, canonical(event)) == whole
    assert fingerprint_from_json({"event": event, "partitions": names, "id": "no part of it"}) == whole


@pytest.mark.rule("EV-6", "CO-5")
def test_fingerprints_are_equal_if_and_only_if_the_content_is_equal() -> None:
    base = fingerprint_from_json({"partitions": ["a", "b"], "event": {"type": "x", "n": 1}})
    assert fingerprint_from_json(parse('{"event":{"n":1.0,"type":"x"},"partitions":["b","a","a"]}')) == base
    for other in (
        {"partitions": ["a"], "event": {"type": "x", "n": 1}},
        {"partitions": ["a", "b"], "event": {"type": "x", "n": "1"}},
        {"partitions": ["a", "b"], "event": {"type": "x", "n": 1, "m": None}},
    ):
        assert fingerprint_from_json(other) != base
    composed = fingerprint_from_json({"partitions": ["a"], "event": {"type": "é"}})
    assert fingerprint_from_json({"partitions": ["a"], "event": {"type": "e\u0301"}}) != composed


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ([], "$"),
        ({}, "$.partitions"),
        ({"partitions": []}, "$.event"),
        ({"partitions": "a", "event": {}}, "$.partitions"),
        ({"partitions": {"a": 1}, "event": {}}, "$.partitions"),
        ({"partitions": ["a", 1], "event": {}}, "$.partitions[1]"),
        ({"partitions": ["\ud800"], "event": {}}, "$.partitions[0]"),
        ({"partitions": ["a"], "event": {"x": [2**53 + 1]}}, "$.event.x[0]"),
    ],
)
def test_invalid_fingerprint_input_is_refused_with_its_path(value: Any, path: str) -> None:
    with pytest.raises(CanonicalError) as refused:
        fingerprint_from_json(value)
    assert refused.value.path == path


# --- deltas ------------------------------------------------------------------------------------------


@pytest.mark.rule("DE-2")
@pytest.mark.parametrize("vector", named(vectors.load("delta_ids")))
def test_delta_ids_agree_with_independent_implementations(vector: dict[str, Any]) -> None:
    assert canonical(vector["input"]).decode() == vector["canonical"]
    assert delta_id_from_json(vector["input"]).hex() == vector["deltaId"]


@pytest.mark.rule("DE-2")
def test_delta_id_depends_on_exactly_five_fields() -> None:
    base = delta_id_from_json(DELTA)
    assert delta_id_from_json({**DELTA, "op": "DELETE", "deltaId": "00", "received": 5}) == base
    assert delta_id_from_json(dict(reversed(DELTA.items()))) == base
    assert delta_id("client-1", "65536000000", "todos", "row-1", DELTA["columns"]) == base
    changes = {
        "clientId": "client-2",
        "hlc": "65536000001",
        "table": "todo",
        "rowId": "row-2",
        "columns": list(reversed(DELTA["columns"])),
    }
    assert len({base, *(delta_id_from_json({**DELTA, name: value}) for name, value in changes.items())}) == 6


@pytest.mark.rule("EV-6")
def test_string_is_not_accepted_as_a_list_of_names() -> None:
    for call in (normal_partitions, lambda name: fingerprint(name, b"{}")):
        with pytest.raises(CanonicalError) as refused:
            call("orders")
        assert refused.value.path == "$.partitions"


@pytest.mark.rule("DE-2")
def test_delta_id_function_accepts_the_same_values_as_the_protocol() -> None:
    columns = tuple(DELTA["columns"])
    assert delta_id("client-1", "65536000000", "todos", "row-1", columns) == delta_id_from_json(DELTA)
    with pytest.raises(CanonicalError) as refused:
        delta_id("client-1", 65536000000, "todos", "row-1", columns)  # type: ignore[arg-type]
    assert refused.value.path == "$.hlc"


@pytest.mark.rule("DE-2")
def test_delta_id_function_does_not_check_names() -> None:
    odd = {**DELTA, "table": "no identifier; at all", "columns": [{"column": "", "value": None}, {"column": ""}]}
    assert len(delta_id_from_json(odd)) == 32


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"hlc": 65536000000}, "$.hlc"),
        ({"hlc": "007"}, "$.hlc"),
        ({"hlc": "-1"}, "$.hlc"),
        ({"hlc": "18446744073709551616"}, "$.hlc"),
        ({"clientId": None}, "$.clientId"),
        ({"rowId": "\ud800"}, "$.rowId"),
        ({"columns": {}}, "$.columns"),
        ({"columns": [{"column": "a", "value": 2**60}]}, "$.columns[0].value"),
    ],
)
def test_invalid_delta_id_input_is_refused_with_its_path(change: dict[str, Any], path: str) -> None:
    with pytest.raises(CanonicalError) as refused:
        delta_id_from_json({**DELTA, **change})
    assert refused.value.path == path


@pytest.mark.parametrize("name", DELTA)
def test_error_identifies_the_missing_delta_field(name: str) -> None:
    with pytest.raises(CanonicalError) as refused:
        delta_id_from_json({key: value for key, value in DELTA.items() if key != name})
    assert refused.value.path == f"$.{name}"


# --- runs --------------------------------------------------------------------------------------------


@pytest.mark.rule("RU-1", "RU-2")
@pytest.mark.parametrize("vector", named(vectors.load("run_keys_v2")))
def test_run_keys_agree_with_independent_implementations(vector: dict[str, Any]) -> None:
    assert run_key_from_json(vector["input"]).hex() == vector["key_hex"]


@pytest.mark.rule("RU-3", "RU-4")
@pytest.mark.parametrize("vector", named(vectors.load("run_args_canonical")))
def test_run_arguments_agree_with_independent_implementations(vector: dict[str, Any]) -> None:
    if vector.get("refused"):
        with pytest.raises(CanonicalError):
            canonical_args(parse(vector["input_json"]))
    else:
        assert canonical_args(parse(vector["input_json"])).decode() == vector["canonical"]


@pytest.mark.rule("RU-1", "RU-2")
def test_run_key_is_the_first_half_of_a_hash_over_six_frames() -> None:
    framed = b"".join(
        label + len(value).to_bytes(4, "big") + value
        for label, value in [
            (b"plan_id", b""),
            (b"campaign_id", b"-7"),
            (b"event_type", "é".encode()),
            (b"tool_name", b""),
            (b"ruleset_version", b""),
            (b"args_json", b"{}"),
        ]
    )
    assert run_key(None, -7, "é", None, None, None) == sha256(framed).digest()[:16]


@pytest.mark.rule("RU-5")
def test_run_key_depends_on_exactly_six_fields() -> None:
    base = run_key_from_json(RUN)
    changes = {
        "plan_id": "plan-124",
        "campaign_id": 457,
        "event_type": "tool.validate",
        "tool_name": "dice",
        "ruleset_version": "dnd5e-v1.1",
        "args_json": {"sides": 20, "count": 2},
    }
    assert len({base, *(run_key_from_json({**RUN, name: value}) for name, value in changes.items())}) == 7
    assert run_key_from_json({**RUN, "execution_request_id": "e-1", "replay_ordinal": 4, "payload": {"sum": 3}}) == base


@pytest.mark.rule("RU-3", "RU-5")
def test_only_run_arguments_are_normalised() -> None:
    assert run_key_from_json({**RUN, "args_json": {"e\u0301": 1}}) == run_key_from_json({**RUN, "args_json": {"é": 1}})
    for name in ("plan_id", "event_type", "tool_name", "ruleset_version"):
        assert run_key_from_json({**RUN, name: "e\u0301"}) != run_key_from_json({**RUN, name: "é"})


@pytest.mark.rule("RU-10")
def test_many_run_inputs_have_distinct_keys() -> None:
    chance = random.Random(20261115)
    # Short values over few letters: under plain concatenation most of these would collide.
    inputs: set[tuple[Any, ...]] = set()
    while len(inputs) < 100_000:
        short = ["".join(chance.choices("ab1", k=chance.randrange(4))) for _ in range(4)]
        inputs.add((short[0], chance.randrange(30), short[1], short[2], short[3], chance.randrange(30)))
    keys = {run_key(plan, campaign, event, tool, rules, {"n": n}) for plan, campaign, event, tool, rules, n in inputs}
    assert len(keys) == 100_000


@pytest.mark.rule("RU-10")
def test_inputs_that_collide_under_concatenation_have_distinct_keys() -> None:
    shifted: list[tuple[str, int, str, str, str, dict[str, int]]] = [
        ("ab", 1, "c", "d", "e", {}),
        ("a", 1, "bc", "d", "e", {}),
        ("a", 11, "c", "d", "e", {}),
        ("a1", 1, "c", "d", "e", {}),
        ("a", 1, "c", "de", "", {}),
        ("a", 1, "c", "", "de", {}),
        ("a", 1, "c", "d", "eargs_json\x00\x00\x00\x02{}", {}),
    ]
    assert len({run_key(*one) for one in shifted}) == len(shifted)


@pytest.mark.rule("RU-9")
def test_v1_run_key_equals_the_key_of_the_original_system() -> None:
    key = run_key_v1("p", 1, "e", "request-9", 3, {"sum": 7, "note": None})
    framed = (
        frame(b"campaign_id", b"1")
        + frame(b"event_type", b"e")
        + frame(b"execution_request_id", b"request-9")
        + frame(b"plan_id", b"p")
        + frame(b"replay_ordinal", b"3")
        + frame(b"payload", b'{"sum":7}')
    )
    assert key == sha256(framed).digest()[:16]
    assert key.hex() == "3ac9305f393be22df9a1baf48709a84c"
    assert run_key_v1(None, 12, "tool.execute", None, 0, None).hex() == "983232221c14e650140852c757a4c8e0"
    assert run_key_v1("", 12, "tool.execute", "", 0, {}) == run_key_v1(None, 12, "tool.execute", None, 0, None)


@pytest.mark.rule("RU-9")
@pytest.mark.parametrize("field", range(6))
def test_each_field_changes_the_v1_run_key(field: int) -> None:
    values: list[Any] = ["p", 1, "e", "request-9", 3, {"sum": 7}]
    others: list[Any] = ["q", 2, "f", "request-8", 4, {"sum": 8}]
    key = run_key_v1(*values)
    values[field] = others[field]
    assert run_key_v1(*values) != key


@pytest.mark.rule("RU-2")
@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"campaign_id": "456"}, "$.campaign_id"),
        ({"campaign_id": 456.0}, "$.campaign_id"),
        ({"campaign_id": True}, "$.campaign_id"),
        ({"campaign_id": None}, "$.campaign_id"),
        ({"campaign_id": 10**5000}, "$.campaign_id"),
        ({"event_type": None}, "$.event_type"),
        ({"plan_id": 5}, "$.plan_id"),
        ({"tool_name": "\ud800"}, "$.tool_name"),
        ({"args_json": {"a": [1.5]}}, "$.args_json.a[0]"),
    ],
)
def test_invalid_run_key_input_is_refused_with_its_path(change: dict[str, Any], path: str) -> None:
    with pytest.raises(CanonicalError) as refused:
        run_key_from_json({**RUN, **change})
    assert refused.value.path == path


@pytest.mark.parametrize("name", ["campaign_id", "event_type"])
def test_error_identifies_the_missing_run_field(name: str) -> None:
    with pytest.raises(CanonicalError) as refused:
        run_key_from_json({key: value for key, value in RUN.items() if key != name})
    assert refused.value.path == f"$.{name}"


# --- the ledger --------------------------------------------------------------------------------------

names = st.text(alphabet="ab", max_size=3)
blobs = st.binary(max_size=3)
conditions = st.builds(Condition, must=st.sampled_from(Must), version=st.integers(0, 3), value=blobs)
operations = (
    st.builds(SetEntity, names, blobs, st.none() | st.integers(0, 3), st.none() | conditions)
    | st.builds(DeleteEntity, names)
    | st.builds(Relate, names, names, names)
    | st.builds(Unrelate, names, names, names)
)


@pytest.mark.rule("LG-14")
@given(st.lists(operations, max_size=4), st.lists(operations, max_size=4))
def test_request_hashes_are_equal_if_and_only_if_the_operations_are_equal(
    left: list[Operation], right: list[Operation]
) -> None:
    assert (request_hash(left) == request_hash(right)) == (left == right)


@pytest.mark.rule("LG-14")
def test_request_hash_depends_on_every_part_of_an_operation() -> None:
    written = SetEntity("k", b"v", 5, Condition(Must.HAVE_VERSION, 1))
    transactions: list[list[Operation]] = [
        [],
        [written],
        [written, written],
        [SetEntity("kv", b"", 5, Condition(Must.HAVE_VERSION, 1))],
        [SetEntity("k", b"v", 6, Condition(Must.HAVE_VERSION, 1))],
        [SetEntity("k", b"v", 0, None)],
        [SetEntity("k", b"v", None, None)],
        [SetEntity("k", b"v", 5, Condition(Must.HAVE_VERSION, 2))],
        [SetEntity("k", b"v", 5, Condition(Must.HAVE_VALUE, 1))],
        [SetEntity("k", b"v", 5, Condition(Must.HAVE_VALUE, 0, b"w"))],
        [DeleteEntity("k")],
        [Relate("a", "b", "c")],
        [Relate("ab", "", "c")],
        [Unrelate("a", "b", "c")],
        [DeleteEntity("k"), Relate("a", "b", "c")],
        [Relate("a", "b", "c"), DeleteEntity("k")],
    ]
    assert len({request_hash(one) for one in transactions}) == len(transactions)


@pytest.mark.rule("LG-14")
def test_invalid_request_hash_input_is_refused_with_its_path() -> None:
    for operation, path in (
        (SetEntity("\ud800", b""), "$.operations[1].key"),
        (Relate("a", "\ud800", "c"), "$.operations[1].relation"),
    ):
        with pytest.raises(CanonicalError) as refused:
            request_hash([DeleteEntity("fine"), operation])
        assert refused.value.path == path


# --- scopes and lanes -------------------------------------------------------------------------------------------


@pytest.mark.rule("LG-7")
@given(
    st.lists(st.text(alphabet="a/%2F5", max_size=4), max_size=3),
    st.lists(st.text(alphabet="a/%2F5", max_size=4), max_size=3),
)
def test_different_scope_parts_give_different_scopes(left: list[str], right: list[str]) -> None:
    assume(left and right)
    assert (scope_of(*left) == scope_of(*right)) == (left == right)


def test_scope_parts_are_joined_and_escaped() -> None:
    assert scope_of("org", 7, "vault", "a/b") == "org/7/vault/a%2Fb"


def test_lane_of_a_stream_never_changes() -> None:
    # These numbers are stored in every log. Another hash would split streams across lanes.
    assert [compute_lane(stream, 16) for stream in ("chat/1", "chat/2", "vault/acme", "é")] == [1, 8, 6, 4]
    assert {compute_lane(f"stream/{number}", 16) for number in range(1000)} == set(range(1, 17))
    assert compute_lane("anything", 1) == 1


def test_all_vectors_of_the_catalogue_are_present() -> None:
    assert [len(vectors.load(name)) for name in ("delta_ids", "run_args_canonical", "run_keys_v2")] == [24, 26, 46]
