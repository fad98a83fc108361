"""Renders the landing page at `/`: what the server is, which APIs it offers, and links to its pages.

Every caller may read the page, so it shows nothing that `GET /` and `/openapi.json` do not show.
"""

from collections.abc import Mapping, Sequence
from html import escape
from string import Template
from typing import Final

from msgspec import Struct

from oncelog.server.pages import STATIC_DIRECTORY

_TEMPLATE: Final = Template((STATIC_DIRECTORY.parent / "home.html").read_text(encoding="utf-8"))


class ApiSummary(Struct, frozen=True, kw_only=True):
    """One API of the server."""

    name: str
    path: str
    description: str


def render_home(version: str, apis: Sequence[ApiSummary], links: Mapping[str, str], *, is_development: bool) -> str:
    """Return the landing page as HTML. `links` are the names of links and their addresses."""
    docs = links.get("API documentation")
    rows = []
    for api in apis:
        name = escape(api.name)
        title = name if docs is None else f'<a href="{escape(docs)}#api-{name}">{name}</a>'
        rows.append(
            f'<tr><th scope="row">{title}</th><td>{escape(api.description)}</td>'
            f"<td><code>{escape(api.path)}</code></td></tr>"
        )
    return _TEMPLATE.substitute(
        version=escape(version),
        notice=_DEVELOPMENT_NOTICE if is_development else "",
        apis="\n".join(rows),
        links="\n".join(f'<li><a href="{escape(address)}">{escape(name)}</a></li>' for name, address in links.items()),
    )


_DEVELOPMENT_NOTICE: Final = (
    '<p class="notice">Development mode: every caller on this machine has all rights, without a credential.</p>'
)
