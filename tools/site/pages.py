"""Copy the pages of `docs/` for Sphinx."""

import re
import shutil
from functools import partial
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
DOCS: Final = ROOT / "docs"
INDEX_NAMES: Final = frozenset({"index.md", "README.md"})
_LINK: Final = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")


def stage_pages(docs: Path, target: Path) -> None:
    """Copy all pages and images of `docs` into `target`.

    The site contains only these pages. A link to any other file of the repository becomes plain text. Unless the text
    is the path, the path follows it in brackets.
    """
    shutil.copytree(docs, target, dirs_exist_ok=True)
    for page in target.rglob("*.md"):
        directory = docs / page.relative_to(target).parent
        text = _LINK.sub(partial(_link, docs, directory), page.read_text(encoding="utf-8"))
        if page.name in INDEX_NAMES:
            text += _menu(text)
        page.write_text(text, encoding="utf-8")


def _menu(text: str) -> str:
    """Return a hidden table of contents of the pages that an index page links to."""
    links = [link.partition("#")[0] for _, link in _LINK.findall(text) if "://" not in link]
    pages = [link for link in dict.fromkeys(links) if link.endswith(".md") and not link.startswith("../decisions")]
    return "\n```{toctree}\n:hidden:\n\n" + "\n".join(pages) + "\n```\n"


def _link(docs: Path, directory: Path, match: re.Match[str]) -> str:
    text, link = match[1], match[2]
    path = link.partition("#")[0]
    if not path or "://" in link:
        return match[0]
    file = (directory / path).resolve()
    if file.is_relative_to(docs):
        return match[0]
    if not file.is_relative_to(ROOT):
        return match[0]
    name = file.relative_to(ROOT).as_posix()
    bare = text.strip("`")
    return f"`{name}`" if bare in {name, file.name, path} else f"{text} (`{name}`)"
