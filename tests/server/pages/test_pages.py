"""The landing page and the files of `/docs`: what they show to whom, and that they contain no inline code."""

from html.parser import HTMLParser
from pathlib import Path
from typing import Final

import pytest

from oncelog.server.pages import STATIC_DIRECTORY
from oncelog.version import __version__
from server.auth.auth_material import token
from server.running_server import Serving, serving

BROWSER: Final = {"Accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}


class Page(HTMLParser):
    """Collects the links of a page and its inline scripts, styles and event handlers."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.files: list[str] = []
        self.inline: list[str] = []
        self._element = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attributes}
        self.inline += [name for name in found if name.startswith("on") or name == "style"]
        self._element = tag
        if tag == "a":
            self.links.append(found["href"])
        elif "src" in found or tag == "link":
            self.files.append(found.get("src") or found["href"])

    def handle_endtag(self, tag: str) -> None:  # noqa: ARG002 - any end tag ends the text
        self._element = ""

    def handle_data(self, data: str) -> None:
        if self._element in ("script", "style") and data.strip():
            self.inline.append(data)


async def load_home(served: Serving) -> tuple[str, Page]:
    answer = await served.get("/", headers=BROWSER)
    assert (answer.status, answer.content_type) == (200, "text/html")
    return answer.body.decode(), Page(answer.body.decode())


@pytest.mark.parametrize(
    "accept",
    [None, "*/*", "application/json", "application/json, text/html", "text/plain"],
)
async def test_programs_get_the_paths_as_json(tmp_path: Path, accept: str | None) -> None:
    async with serving(tmp_path, tokens=True) as served:
        answer = await served.get("/", headers={} if accept is None else {"Accept": accept})
        assert answer.headers["Vary"] == "Accept"
        assert answer.json == {
            "oncelog": "1.0",
            "events": "/v1/events",
            "ledger": "/v1/ledger",
            "deltas": "/v1/sync",
            "chat": "/v1/chat",
            "audit": "/v1/audit",
            "health": "/readyz",
            "openapi": "/openapi.json",
            "docs": "/docs",
        }


@pytest.mark.parametrize("options", [{}, {"tokens": True}, {"tokens": True, "openapi": False}], ids=str)
async def test_links_of_the_landing_page_work(tmp_path: Path, options: dict[str, bool]) -> None:
    async with serving(tmp_path, **options) as served:  # type: ignore[arg-type]  # names of settings
        text, page = await load_home(served)
        assert not page.inline
        for link in (*page.links, *page.files):
            path = "/" + link.partition("#")[0]
            answer = await served.get(path)
            assert answer.status == 200, path
        has_docs = options.get("openapi", True)
        assert ("docs" in page.links) == has_docs
        assert ("chat" in page.links) == ("tokens" not in options)
        assert (await served.get("/docs")).status == (200 if has_docs else 404)
        for name in ("events", "ledger", "deltas", "chat", "audit"):
            assert f"/v1/{ {'deltas': 'sync'}.get(name, name) }" in text


async def test_anonymous_callers_learn_nothing_that_only_operators_know(tmp_path: Path) -> None:
    async with serving(tmp_path, tokens=True) as served:
        for headers in (BROWSER, {}):
            anonymous = await served.get("/", headers=headers)
            known = await served.get("/", headers=headers, credential=token())
            assert anonymous.body == known.body
            text = anonymous.body.decode()
            for secret in (__version__, str(tmp_path), "sqlite", "postgres", served.server.log.epoch, "development"):
                assert secret not in text, secret


async def test_development_mode_is_announced_with_the_version(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        text, _ = await load_home(served)
        assert f"Oncelog {__version__}" in text
        assert "Development mode" in text
        assert (await served.get("/")).json["version"] == __version__


async def test_docs_page_and_its_files_contain_no_inline_code_and_no_other_address(tmp_path: Path) -> None:
    async with serving(tmp_path, tokens=True) as served:
        answer = await served.get("/docs")
        page = Page(answer.body.decode())
        assert not page.inline
        names = {path.name for path in STATIC_DIRECTORY.iterdir()} - {"docs.html"}
        for name in (*names, *(file.removeprefix("assets/") for file in page.files)):
            file = await served.get(f"/assets/{name}")
            assert file.status == 200
            text = file.body.decode()
            for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
                assert word not in text, (name, word)
            assert "https://" not in text, name
            assert "http://" not in text.replace("http://www.w3.org/2000/svg", ""), name
        for name in ("endpoints.py", "..%2fhome.html", "home.html", "docs.html", "none.mjs", "worker.js"):
            assert (await served.get(f"/assets/{name}")).status == 404


async def test_document_lists_every_error_code(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        document = (await served.get("/openapi.json")).json
        codes = document["components"]["schemas"]["Problem"]["properties"]["code"]["x-codes"]
        found = {one["code"]: one["status"] for one in codes}
        for path in ("/none", "/v1/events?since=x", "/v1/events/stream?ticket=x"):
            answer = await served.get(path)
            assert found[answer.json["code"]] == answer.status, answer.body
