"""Make the package's description and links.

The package index shows README.md outside the repository, where relative links do not work. The repository does not know
the address at which it is published, so the address is a variable of the build:

    PROJECT_URL=https://… make dist

With it, the package links to the repository, its documentation, changelog and security policy, and relative links of
the README become absolute. Without it, relative links are replaced with their text.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from hatchling.metadata.plugin.interface import MetadataHookInterface

VARIABLE: Final = "PROJECT_URL"
BRANCH: Final = "main"
PAGES: Final = {
    "Documentation": "docs/index.md",
    "Changelog": "CHANGELOG.md",
    "Security": "SECURITY.md",
}
"""Pages that the package links to, with the labels that package indexes recognise."""
_LINK: Final = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")


def make_description(readme: str, project_url: str | None) -> str:
    """Return the README with links that work outside the repository."""

    def replace(link: re.Match[str]) -> str:
        text, target = link[1], link[2]
        if "://" in target or target.startswith("#"):
            return link[0]
        return f"[{text}]({page_url(project_url, target)})" if project_url else text

    return _LINK.sub(replace, readme)


def make_urls(project_url: str | None) -> dict[str, str]:
    """Return the package's links by label."""
    if not project_url:
        return {}
    return {"Repository": project_url} | {label: page_url(project_url, page) for label, page in PAGES.items()}


def page_url(project_url: str, page: str) -> str:
    """Return the address of a page in the repository, in the form that the common hosts share."""
    return f"{project_url}/blob/{BRANCH}/{page}"


def read_project_url(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the repository's address from the environment. Raises ValueError for an address without https."""
    url = environment.get(VARIABLE, "").rstrip("/")
    if url and not url.startswith("https://"):
        raise ValueError(f"{VARIABLE} must begin with https://, not {url!r}")
    return url or None


class LinkHook(MetadataHookInterface):
    """Hatch runs this hook when it reads the metadata of the package."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the description and links."""
        project_url = read_project_url()
        readme = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        text = make_description(readme, project_url)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["urls"] = make_urls(project_url)
