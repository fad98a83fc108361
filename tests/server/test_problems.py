"""Problem documents: all APIs use the same error shape over HTTP."""

from pathlib import Path
from typing import Any, Final

import pytest

from oncelog import error_codes
from oncelog.server.deltas.codec import PROBLEM_DIALECT as DELTAS_PROBLEMS
from oncelog.server.errors import ApiError
from oncelog.server.problems import PROBLEMS, TYPE_PREFIX, to_problem
from server.running_server import Answer, Serving, serving

MEMBERS: Final = ("type", "title", "status", "detail", "code")
WRITE: Final = "/v1/ledger/write"
SET: Final = {"set_entity": {"key": "a", "value": "MQ=="}}


def problem(answer: Answer) -> dict[str, Any]:
    """Check the members that every problem document has, and return the document."""
    assert answer.content_type == "application/problem+json"
    found: dict[str, Any] = answer.json
    assert set(MEMBERS) <= found.keys()
    assert found["status"] == answer.status
    assert found["type"] == TYPE_PREFIX + found["code"].lower()
    return found


async def write(served: Serving, sequence: int, *operations: Any, **members: Any) -> Answer:
    body = {"organization": "acme", "sequence": sequence, "operations": operations or [SET], **members}
    return await served.request("POST", WRITE, json=body)


def key(number: int) -> str:
    return f"{number:032x}"


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("/v2", "unknown_path"),
        ("/v1/events/", "unknown_path"),
        ("/v1/ledger/nothing", "unknown_path"),
        ("/v1/sync/shop/nothing", "UNKNOWN_PATH"),
        ("/v1/chats/tea/nothing", "UNKNOWN_PATH"),
    ],
)
async def test_unknown_path_has_a_specific_code(tmp_path: Path, path: str, code: str) -> None:
    async with serving(tmp_path) as served:
        found = problem(await served.get(path))
    assert (found["status"], found["code"]) == (404, code)
    assert path not in found["detail"]


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/v1/events", {"GET", "HEAD", "POST"}),
        ("/v1/audit", {"GET", "HEAD"}),
        (WRITE, {"POST"}),
        ("/v1/chats/tea/members/user:ann", {"DELETE", "PUT"}),
    ],
)
async def test_unknown_method_lists_the_allowed_methods(tmp_path: Path, path: str, allowed: set[str]) -> None:
    async with serving(tmp_path) as served:
        answer = await served.request("PATCH", path)
    found = problem(answer)
    assert (found["status"], found["code"].lower()) == (405, "method_not_allowed")
    assert set(answer.headers["Allow"].split(",")) == allowed
    assert all(method in found["detail"] for method in allowed)


async def test_errors_of_every_api_name_the_faulty_field(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        answers = {
            "since": await served.get("/v1/events?partition=a&since=x"),
            "limit": await served.get("/v1/audit?limit=0"),
            "height": await served.get("/v1/ledger/block?organization=acme&height=x"),
            "after": await served.get("/v1/chats?after=."),
            "table": await served.get("/v1/sync/shop/rows/1"),
        }
    for path, answer in answers.items():
        found = problem(answer)
        (fault,) = found["errors"]
        assert fault["path"] == path
        assert found["detail"] == f"{path}: {fault['detail']}"


def test_error_details_are_members_of_the_problem_document() -> None:
    error = ApiError(error_codes.RATE_LIMITED, "too many requests", retry_after_ms=1500, tenant="t", quota="writes")
    found = to_problem(error)
    assert (found["retry_after_ms"], found["tenant"], found["quota"]) == (1500, "t", "writes")
    assert "errors" not in found


def test_every_error_code_has_a_status_and_a_title() -> None:
    codes = {value for name, value in vars(error_codes).items() if name.isupper() and isinstance(value, str)}
    # These codes occur only on WebSockets or as the reason for one rejected event.
    others = {"1.0", "validation_failed", "protocol_version_unsupported", "slow_consumer"}
    assert codes - others == PROBLEMS.keys()
    assert all(400 <= status < 600 and title for status, title in PROBLEMS.values())


# --- the ledger -------------------------------------------------------------------------------------------


@pytest.mark.rule("LG-24")
async def test_sequence_gap_and_key_reuse_are_conflicts(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        assert (await write(served, 1, idempotency_key=key(1))).status == 200
        other = {"set_entity": {"key": "b", "value": "MQ=="}}
        gap = problem(await write(served, 3))
        reused_key = problem(await write(served, 2, other, idempotency_key=key(1)))
        reused_sequence = problem(await write(served, 1, other))
    assert (gap["status"], gap["code"], gap["last_committed_sequence"]) == (409, "SEQUENCE_GAP", 1)
    assert (reused_key["status"], reused_key["code"]) == (409, "IDEMPOTENCY_KEY_REUSED")
    assert (reused_sequence["status"], reused_sequence["code"]) == (409, "SEQUENCE_REUSED")


@pytest.mark.rule("LG-24")
@pytest.mark.parametrize(
    ("condition", "code"),
    [
        ({"must_not_exist": True}, "KEY_EXISTS"),
        ({"version_is": 7}, "VERSION_MISMATCH"),
        ({"value_equals": "Mg=="}, "VALUE_MISMATCH"),
        ({"must_exist": True}, "KEY_NOT_FOUND"),
    ],
)
async def test_failed_condition_is_a_failed_precondition(tmp_path: Path, condition: Any, code: str) -> None:
    name = "missing" if code == "KEY_NOT_FOUND" else "a"
    conditional = {"set_entity": {"key": name, "value": "MQ==", "condition": condition}}
    async with serving(tmp_path) as served:
        assert (await write(served, 1)).status == 200
        found = problem(await write(served, 2, conditional))
        assert (await write(served, 2)).status == 200  # no sequence is consumed
    assert (found["status"], found["code"], found["key"]) == (412, code, name)
    if name == "a":
        assert (found["current_version"], found["current_value"]) == (1, "MQ==")
    assert found["error"] == {
        "code": code,
        "message": found["detail"],
        **{member: found[member] for member in found.keys() - {*MEMBERS, "error"}},
    }


@pytest.mark.rule("LG-24")
@pytest.mark.parametrize("fault", [{"sequence": 0}, {"operations": []}, {"vualt": "main"}, {"idempotency_key": "x"}])
async def test_invalid_write_is_a_bad_request(tmp_path: Path, fault: dict[str, Any]) -> None:
    body = {"organization": "acme", "sequence": 1, "operations": [SET], **fault}
    async with serving(tmp_path) as served:
        found = problem(await served.request("POST", WRITE, json=body))
    assert (found["status"], found["code"]) == (400, "bad_request")
    assert found["errors"][0]["path"].startswith(next(iter(fault)))


@pytest.mark.rule("LG-24", "LG-11")
async def test_retry_of_a_write_from_before_a_restart_gets_its_receipt(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        first = (await write(served, 1, idempotency_key=key(1))).json
    async with serving(tmp_path) as served:
        again = await write(served, 1, idempotency_key=key(1))
    assert (again.status, again.content_type) == (200, "application/json")
    assert again.json == {
        "committed_tx_id": first["committed_tx_id"],
        "block_height": first["block_height"],
        "assigned_sequence": 1,
        "already_committed": True,
    }


def test_problem_type_has_the_same_title_in_every_dialect() -> None:
    errors = (
        ApiError(error_codes.TOO_LARGE, "deltas: must have at most 1 entries, not 2"),
        ApiError(error_codes.BAD_REQUEST, "body: must have at most 70000 bytes", field="body", status=413),
    )
    found = [to_problem(error, DELTAS_PROBLEMS) for error in errors]
    assert [(one["type"], one["title"], one["status"]) for one in found] == [
        (TYPE_PREFIX + "too_large", "Request too large", 413)
    ] * 2
