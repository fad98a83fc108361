"""The API page in a real Chromium: it shows every operation, sends requests, and works on a phone and by keyboard."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from browser import Tab
from deadlines import soon
from server.auth.auth_material import token
from server.running_server import Serving, item, serving
from server.web_chat.chromium import Chromium
from server.web_chat.windows import Window

READY: Final = "document.body?.dataset.ready"
VIOLATIONS: Final = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (event) => violations.push(event.violatedDirective));
"""
PHONE: Final = (375, 740)


@asynccontextmanager
async def docs_page(
    chromium: Chromium, served: Serving, target: str = "", size: tuple[int, int] = (1280, 900)
) -> AsyncIterator[Window]:
    """Open the API page, optionally at an operation, and check at the end that its policy was not violated."""
    async with chromium.tab() as tab:
        await tab.call("Page.enable")
        await tab.call("Page.addScriptToEvaluateOnNewDocument", source=VIOLATIONS)
        window = Window(tab, served.url)
        await tab.open(f"{served.url}/docs{target}", *size)
        await window.until(READY, "yes")
        yield window
        assert await tab.run("violations") == []


async def answer_of(window: Window, operation: str) -> tuple[str, str]:
    """Send an operation's form, and return the state line and the body of the answer."""
    view = f"#operation-{operation}"
    await window.click(f"{view} [data-action=send]")
    await window.until(
        f"document.querySelector({json.dumps(view + ' .output [role=status]')})?.dataset.good !== undefined"
    )
    await window.until(f"document.querySelector({json.dumps(view + ' [data-action=stop]')}).hidden")
    body = await window.tab.run(f"document.querySelector({json.dumps(view + ' .output .body')})?.textContent ?? ''")
    return await window.text_of(f"{view} .output [role=status]"), str(body)


async def resources_of(tab: Tab) -> list[str]:
    found: list[str] = await tab.run("performance.getEntriesByType('resource').map((one) => one.name)")
    return found


async def test_page_lists_every_operation_and_loads_nothing_from_elsewhere(tmp_path: Path, chromium: Chromium) -> None:
    async with serving(tmp_path, tokens=True) as served:
        document = (await served.get("/openapi.json")).json
        names = [one["operationId"] for methods in document["paths"].values() for one in methods.values()]
        async with docs_page(chromium, served) as window:
            shown = await window.tab.run("[...document.querySelectorAll('details.operation')].map((one) => one.id)")
            assert sorted(shown) == sorted(f"operation-{name}" for name in names)
            assert await window.tab.run("document.querySelectorAll('#contents-list li').length") == len(names)
            for name in names:  # every view can be rendered, with all of its schemas
                await window.tab.run(f"document.getElementById('operation-{name}').open = true")
                await window.until(f"document.getElementById('operation-{name}').childElementCount", 2)
            await window.tab.run("document.querySelectorAll('details.schema').forEach((one) => { one.open = true; })")
            await window.until("document.querySelector('#operation-submit .members') !== null")
            resources = await resources_of(window.tab)
            assert len(resources) > 5
            assert all(one.startswith(f"{served.url}/") for one in resources), resources


async def test_page_sends_examples_and_shows_answers_and_errors(tmp_path: Path, chromium: Chromium) -> None:
    async with serving(tmp_path) as served, docs_page(chromium, served, "#operation-submit") as window:
        state, body = await answer_of(window, "submit")
        assert state.startswith("200 OK")
        assert json.loads(body)["results"][0]["status"] == "committed"
        field = "document.querySelector('#operation-submit [data-body]')"
        await window.tab.run(f"{field}.value = '{{'")
        state, body = await answer_of(window, "submit")
        assert state.startswith("400 ")
        assert json.loads(body)["code"] == "bad_request"
        await window.tab.run("location.hash = '#operation-getEvent'")
        await window.until("document.getElementById('operation-getEvent').open")
        state, body = await answer_of(window, "getEvent")
        assert state.startswith("200 OK")
        assert json.loads(body)["event"]["event"] == {"type": "order.placed", "total": 12}


async def test_stream_is_shown_as_it_arrives_until_it_is_stopped(tmp_path: Path, chromium: Chromium) -> None:
    async with serving(tmp_path) as served, docs_page(chromium, served, "#operation-follow") as window:
        await window.until("document.querySelector('#operation-follow [data-action=send]') !== null")
        await window.click("#operation-follow [data-action=send]")
        body = "document.querySelector('#operation-follow .output .body')?.textContent ?? ''"
        await window.until(f"({body}).includes('event: connected')")
        await served.commit(item(1, "orders/1"))
        await window.until(f"({body}).includes('id: 1')")
        await window.click("#operation-follow [data-action=stop]")
        await window.until("document.querySelector('#operation-follow [data-action=stop]').hidden")
        await window.until(
            "document.querySelector('#operation-follow .output [role=status]').textContent.includes('stopped')"
        )


async def test_token_is_kept_in_memory_only_and_not_copied(tmp_path: Path, chromium: Chromium) -> None:
    async with serving(tmp_path, tokens=True) as served, docs_page(chromium, served, "#operation-page") as window:
        await window.until("document.querySelector('#operation-page [data-action=send]') !== null")
        state, _ = await answer_of(window, "page")
        assert state.startswith("401 ")
        credential = token(grants={"read": ["orders/1"]})
        await window.tab.run("document.getElementById('token').focus()")
        await window.type(credential)
        state, body = await answer_of(window, "page")
        assert state.startswith("200 OK")
        assert json.loads(body)["events"] == []
        await window.click("#operation-page [data-action=curl]")
        await window.until("document.querySelector('#operation-page .command') !== null")
        command = await window.text_of("#operation-page .command")
        assert "$TOKEN" in command
        assert credential not in command
        assert await window.tab.run("[localStorage.length, sessionStorage.length, document.cookie]") == [0, 0, ""]
        assert credential not in await window.tab.run("location.href + document.documentElement.outerHTML")
        assert await window.tab.run("document.getElementById('token').type") == "password"
        await window.tab.call("Page.reload")
        await window.until(f"{READY} === 'yes' && document.getElementById('token').value === ''")


@pytest.mark.parametrize("operation", ["submit", "page", "createChat", "addMember"])
async def test_copied_command_does_what_the_form_does(tmp_path: Path, chromium: Chromium, operation: str) -> None:
    async with serving(tmp_path) as served, docs_page(chromium, served, f"#operation-{operation}") as window:
        await served.request("POST", "/v1/chats", json={"chat_id": "tea", "members": ["user:ben"]})
        await window.until(f"document.querySelector('#operation-{operation} [data-action=curl]') !== null")
        await window.click(f"#operation-{operation} [data-action=curl]")
        await window.until(f"document.querySelector('#operation-{operation} .command') !== null")
        command = await window.text_of(f"#operation-{operation} .command")
        process = await asyncio.create_subprocess_shell(
            f"{command} -w '\\n%{{http_code}}'", stdout=asyncio.subprocess.PIPE
        )
        output, _ = await soon(process.communicate())
        body, _, status = output.decode().rpartition("\n")
        assert status == "200", output
        state, shown = await answer_of(window, operation)
        assert state.startswith("200 OK")
        assert without_times(json.loads(shown)) == without_times(json.loads(body))


def without_times(value: Any) -> Any:
    """Return a JSON value without the members that differ between a first answer and a retry."""
    if isinstance(value, list):
        return [without_times(one) for one in value]
    if isinstance(value, dict):
        return {name: without_times(one) for name, one in value.items() if name != "status_updated_at"}
    return value


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_page_fits_a_phone_and_follows_the_colours_of_the_system(
    tmp_path: Path, chromium: Chromium, scheme: str
) -> None:
    async with serving(tmp_path) as served, docs_page(chromium, served, "#operation-submit", PHONE) as window:
        await window.tab.call(
            "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}]
        )
        background = await window.tab.run("getComputedStyle(document.body).backgroundColor")
        assert background == {"light": "rgb(243, 244, 248)", "dark": "rgb(15, 17, 24)"}[scheme]
        await window.tab.run("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
        await window.until("document.querySelectorAll('.form').length > 40")
        assert await window.tab.run("document.documentElement.scrollWidth") <= PHONE[0]
        sizes = await window.tab.run(
            "[...document.querySelectorAll('.actions button:not([hidden])')].map((one) => one.offsetHeight)"
        )
        assert min(sizes) >= 40


async def test_operation_can_be_found_and_sent_with_the_keyboard_alone(tmp_path: Path, chromium: Chromium) -> None:
    async with serving(tmp_path) as served, docs_page(chromium, served) as window:
        await window.press("Tab")
        assert await window.tab.run("document.activeElement.className") == "skip"
        for _ in range(20):
            if await window.tab.run("document.activeElement.id") == "filter":
                break
            await window.press("Tab")
        await window.type("submit events")
        await window.until("document.querySelectorAll('details.operation:not([hidden])').length", 1)
        await window.until("document.getElementById('found').textContent.startsWith('1 of ')")
        for wanted in ("#operation-submit > summary", "#operation-submit [data-action=send]"):
            for _ in range(60):
                if await window.tab.run(f"document.activeElement.matches({json.dumps(wanted)})"):
                    break
                await window.press("Tab")
            outline = await window.tab.run("getComputedStyle(document.activeElement).outlineStyle")
            assert outline != "none"
            await window.press("Enter")
        state = "document.querySelector('#operation-submit .output [role=status]')"
        await window.until(f"{state} !== null && {state}.textContent.startsWith('200 OK')")
        missing = await window.tab.run(
            "[...document.querySelectorAll('input, textarea')].filter((one) => !one.labels.length).length"
        )
        assert missing == 0
