"""The server serves the web chat only locally, as a fixed set of files, with a strict content security policy."""

import sys
import zipfile
from pathlib import Path
from subprocess import run as run_command
from typing import Final

from oncelog.server.pages import STATIC_DIRECTORY as PAGES_DIRECTORY
from oncelog.server.web_chat.endpoints import STATIC_DIRECTORY
from server.running_server import serving

ROOT: Final = Path(__file__).parents[3]


async def test_page_and_files_have_a_strict_content_security_policy(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        page = await served.get("/chat?name=ann&chat=lobby")
        assert (page.status, page.content_type) == (200, "text/html")
        policy = dict(part.strip().split(" ", 1) for part in page.headers["Content-Security-Policy"].split(";"))
        assert policy["default-src"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert page.headers["X-Content-Type-Options"] == "nosniff"
        text = page.body.decode()
        assert "<script>" not in text
        assert "<style" not in text
        assert " style=" not in text
        assert "http://" not in text + "".join(one.read_text() for one in STATIC_DIRECTORY.glob("*.css"))
        names = (await served.get("/chat/files.json")).json
        assert set(names) == {f"/chat/{one.name}" for one in STATIC_DIRECTORY.iterdir()} - {"/chat/index.html"}
        for name in names:
            answer = await served.get(name)
            assert answer.status == 200
            assert answer.content_type in ("text/javascript", "text/css", "image/svg+xml")
            assert answer.headers["Content-Security-Policy"] == page.headers["Content-Security-Policy"]
        for name in ("http.py", "..%2fhttp.py", "%2e%2e/http.py", "nothing.mjs"):
            assert (await served.get(f"/chat/{name}")).status == 404
        for query in ("", "?name=ann&chat=tea%20time"):
            answer = await served.get(f"/chat/{query}")
            assert (answer.status, answer.headers["Location"]) == (308, f"/chat{query}")


async def test_page_is_served_only_in_development_mode(tmp_path: Path) -> None:
    async with serving(tmp_path, tokens=True) as served:
        assert (await served.get("/chat")).status == 404
        assert (await served.get("/chat/")).status == 404
        assert (await served.get("/chat/main.mjs")).status == 404


def test_page_never_parses_text_as_html() -> None:
    for file in STATIC_DIRECTORY.glob("*.*js"):
        text = file.read_text()
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
            assert word not in text, (file.name, word)


def test_wheel_contains_the_pages(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    run_command(command, check=True, capture_output=True, cwd=ROOT)  # noqa: S603
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {f"oncelog/server/web_chat/static/{one.name}" for one in STATIC_DIRECTORY.iterdir()} <= names
    assert {f"oncelog/server/pages/static/{one.name}" for one in PAGES_DIRECTORY.iterdir()} <= names
    assert "oncelog/server/pages/home.html" in names
