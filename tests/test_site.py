"""The documentation site builds without warnings and loads nothing from other hosts."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


def build(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tools.site", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)  # noqa: S603


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("site")
    done = build(str(directory))
    assert done.returncode == 0, done.stderr
    return directory


def test_every_page_is_on_the_site(site: Path) -> None:
    sources = {page.relative_to(DOCS).with_suffix(".html") for page in DOCS.rglob("*.md")}
    assert sources <= {page.relative_to(site) for page in site.rglob("*.html")}


def test_site_loads_nothing_from_other_hosts(site: Path) -> None:
    loaded = re.compile(
        r"""<(?:script|img|iframe|source)[^>]+src=["']?(?:https?:)?//|<link[^>]+href=["']?(?:https?:)?//"""
    )
    assert [page.name for page in site.rglob("*.html") if loaded.search(page.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("python", "open_blocking"),
        ("commands", "oncelog serve"),
        ("http-operations", "/v1/events"),
        ("settings", "tokens.algorithms"),
        ("limits", "PARTITIONS_MAX"),
        ("metrics", "oncelog_queue_items"),
        ("errors", "StoreUnavailableError"),
    ],
)
def test_reference_is_generated_from_the_code(site: Path, name: str, expected: str) -> None:
    assert expected in (site / f"reference/generated/{name}.html").read_text(encoding="utf-8")


def test_link_to_a_missing_heading_fails_the_build(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "index.md").write_text("# Start\n\n[A page](page.md)\n")
    (docs / "page.md").write_text("# A page\n\n[Nothing](#nothing)\n")
    done = build("--docs", str(docs), str(tmp_path / "site"))
    assert done.returncode == 1
    assert "'nothing'" in done.stderr


def test_command_examples_can_be_copied(site: Path) -> None:
    page = (site / "reference/generated/commands.html").read_text(encoding="utf-8")
    text = re.sub(r"<[^>]+>", "", page)
    assert "\noncelog serve --development --store app.db\n" in text
    assert "–development" not in text
