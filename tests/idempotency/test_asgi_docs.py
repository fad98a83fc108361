"""The page about the `Idempotency-Key` header matches the middleware."""

import inspect
import re
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from idempotency.asgi_application import (
    is_replay,
    lifespan,
)
from oncelog import STORED_STATUSES, kept_for
from oncelog.idempotency import asgi
from oncelog.idempotency.asgi import IdempotencyMiddleware

# --- documentation ---------------------------------------------------------------------------------------

PAGE: Final = (Path(__file__).parents[2] / "docs/guides/idempotency-key.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("number", [0, 1], ids=["starlette", "fastapi"])
async def test_applications_on_the_page_run(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = [one for one in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "app = " in one]
    assert len(programs) == 2
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "page"}
    exec(programs[number], namespace)  # noqa: S102 - it is our own page
    app = namespace["app"]

    async def send(user: str, amount: int) -> httpx.Response:
        headers = {"Idempotency-Key": "k"} | ({"Authorization": user} if user else {})
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://shop") as client:
            return await client.post("/pay", headers=headers, json={"amount": amount})

    asked = [("ann", 5), ("ann", 5), ("bob", 6), ("ann", 6), ("", 7), ("", 8)]
    async with lifespan(app):
        answers = [await send(*one) for one in asked]
    assert [one.status_code for one in answers] == [201, 201, 201, 422, 201, 201]
    assert [is_replay(one) for one in answers] == [False, True, False, False, False, False]
    assert [one.json().get("paid") for one in answers[:3]] == [{"amount": 5}, {"amount": 5}, {"amount": 6}]


NAMES: Final = {"kept_for": kept_for, "STORED_STATUSES": STORED_STATUSES}


def test_page_lists_every_option_with_its_default() -> None:
    rows = re.findall(r"^\| `([a-z_]+)` \| (?:`(.*?)`)? ?\|", PAGE, re.MULTILINE)
    defaults = {name: eval(text, NAMES) if text else inspect.Parameter.empty for name, text in rows}  # noqa: S307
    parameters = inspect.signature(IdempotencyMiddleware).parameters.values()
    assert defaults == {one.name: one.default for one in parameters if one.name != "app"}


def test_page_lists_every_problem_with_its_status() -> None:
    rows = re.findall(r"^\| `([a-z-]+)` \| (\d+) \|", PAGE, re.MULTILINE)
    raised = re.findall(r'_Problem\((\d+), "([a-z-]+)"', Path(asgi.__file__).read_text(encoding="utf-8"))
    tables = (*asgi._BUSY_RESPONSES.values(), *asgi._REFUSALS.values())
    listed = {(kind, str(status)) for status, kind, *_ in tables}
    assert sorted(rows) == sorted({(kind, status) for status, kind in raised} | listed)
