"""A shared to-do list in a terminal: python examples/todo/terminal.py --name ann

Everything that is done is in the outbox, and on the screen, at once; whether there is a server makes no difference but
for the mark beside it. Start several, each with a name of its own, and the page (serve_page.py) beside them.
"""

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, ClassVar, Final
from uuid import uuid4

from textual import on
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.widgets import Footer, Input, OptionList, Static
from textual.widgets.option_list import Option

import model
from oncelog.client import (
    Client,
    ClientLimits,
    Committed,
    ConnectionState,
    Pending,
    RefusedEvent,
    Socket,
    Status,
    WebSocketTransport,
)
from oncelog.client.runtime.websocket import normalize_url
from oncelog.errors import LostError, OncelogError

URL: Final = "http://127.0.0.1:7171"
STATES: Final = {
    ConnectionState.LIVE: "● live",
    ConnectionState.CATCHING_UP: "◐ catching up",
    ConnectionState.CONNECTING: "◌ connecting",
    ConnectionState.REFUSED: "✗ refused",
    ConnectionState.HISTORY_CHANGED: "↺ another history",
    ConnectionState.CLOSED: "✗ stopped",
}
_REJECTED: Final = "rejected/"


class Switch:
    """The network, with a switch: a transport that can be told to be away. The client notices as it would any loss."""

    def __init__(self, url: str, limits: ClientLimits) -> None:
        self._transport = WebSocketTransport(normalize_url(url), limits)
        self._socket: Socket | None = None
        self.is_off = False

    async def connect(self) -> Socket:
        """As the client's `Transport` says."""
        self._demand_on()
        socket = await self._transport.connect()
        try:
            self._demand_on()
        except LostError:
            await socket.close()
            raise
        self._socket = socket
        return socket

    def _demand_on(self) -> None:
        if self.is_off:
            raise LostError("switched off")

    async def turn_off(self) -> None:
        """Cuts the connection that there is; there will be no other one."""
        self.is_off = True
        if self._socket is not None:
            await self._socket.close()

    def turn_on(self) -> None:
        """The client is to be told (`reconnect_now`), or tries by itself after its pause."""
        self.is_off = False

    async def close(self) -> None:
        """As the client's `Transport` says."""
        await self._transport.close()


class TodoApp(App[None]):
    """One terminal."""

    CSS = """
    #title { padding: 0 1; text-style: bold; color: $text-primary; }
    #items { height: 1fr; border: none; padding: 0 1; background: $surface; }
    #new { border: round $primary; }
    #status { padding: 0 1; background: $panel; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("space", "done", "Done"),
        Binding("d", "remove", "Delete"),
        Binding("a", "add", "Add"),
        Binding("escape", "leave", "List", show=False),
        Binding("o", "offline", "Offline"),
        Binding("q", "quit", "Quit"),
    ]
    ENABLE_COMMAND_PALETTE = False

    def __init__(self, client: Client, switch: Switch, table: model.Table, name: str, list_name: str) -> None:
        super().__init__()
        self._client = client
        self._switch = switch
        self._table = table
        self._me = name
        self._list_name = list_name
        self._own: dict[str, Pending] = {pending.id: pending for pending in client.pending()}
        """Submissions that the table does not show yet."""
        self._rejected: list[RefusedEvent] = []
        self.items: list[model.Item] = []
        """What is on the screen."""

    def compose(self) -> ComposeResult:
        """The screen."""
        yield Static(f"{self._list_name}: {self._me}", id="title", markup=False)
        yield OptionList(id="items", markup=False)
        yield Input(placeholder="a: something to do", id="new")
        yield Static(id="status", markup=False)
        yield Footer()

    async def on_mount(self) -> None:
        """From now on the screen follows the client."""
        # The client calls in a task of its own: the screen's work is handed to the screen.
        self._client.on_status(lambda _: self._show_soon())
        self.query_one("#items").focus()
        await self._show()

    def _show_soon(self) -> None:
        self.call_later(self._show)

    # --- what is shown

    async def _show(self) -> None:
        status = self._client.status()
        # The cursor first: whatever is at or below it is in the table by now.
        self._own = {key: one for key, one in self._own.items() if not _is_in_table(one, status.cursor)}
        self.items = model.with_pending(self._table.items(), [one.event for one in self._own.values()])
        if status.refused != len(self._rejected):
            self._rejected = await self._client.refused()
        if len(self.query("#items, #status")) < 2:
            return  # the client goes on while the screen is being taken down
        options = [Option(_line(item), item.id) for item in self.items]
        options += [Option(_rejected_line(one), _REJECTED + one.id) for one in self._rejected]
        self._replace(self.query_one("#items", OptionList), options)
        self.query_one("#status", Static).update(self._status_line(status))

    def _replace(self, shown: OptionList, options: list[Option]) -> None:
        """The highlight stays with its item, or where that one was."""
        place, highlighted = shown.highlighted, shown.highlighted_option
        shown.set_options(options)
        ids = [option.id for option in options]
        if highlighted is not None and highlighted.id in ids:
            place = ids.index(highlighted.id)
        if options:
            shown.highlighted = min(place or 0, len(options) - 1)

    def _status_line(self, status: Status) -> str:
        state = "○ switched off" if self._switch.is_off else STATES.get(status.state, "○ offline")
        waiting = f" · {status.pending} waiting" if status.pending else ""
        rejected = f" · {status.refused} rejected" if status.refused else ""
        is_wrong = status.state in (ConnectionState.REFUSED, ConnectionState.CLOSED)
        why = f" · {_printable(status.last_error)}" if is_wrong and status.last_error else ""
        return f"{state} · event {status.cursor}{waiting}{rejected}{why}"

    # --- what is done

    @on(Input.Submitted, "#new")
    async def _added(self, submitted: Input.Submitted) -> None:
        text = submitted.value.strip()
        submitted.input.clear()
        if text:
            await self._submit(model.event_of(model.ADDED, str(uuid4()), self._me, text))

    async def action_done(self) -> None:
        """Done, or not done after all."""
        item = self._highlighted()
        if item is not None:
            await self._submit(model.event_of(model.UNDONE if item.is_done else model.DONE, item.id, self._me))

    async def action_remove(self) -> None:
        """Away with it; and a rejected one has been seen."""
        option = self.query_one("#items", OptionList).highlighted_option
        if option is not None and option.id is not None and option.id.startswith(_REJECTED):
            await self._client.forget_refused(option.id.removeprefix(_REJECTED))
        item = self._highlighted()
        if item is not None:
            await self._submit(model.event_of(model.REMOVED, item.id, self._me))

    def action_add(self) -> None:
        """To the line where one writes."""
        self.query_one("#new").focus()

    def action_leave(self) -> None:
        """Back to the list."""
        self.query_one("#items").focus()

    async def action_offline(self) -> None:
        """The network goes away, or comes back."""
        if self._switch.is_off:
            self._switch.turn_on()
            self._client.reconnect_now()
        else:
            await self._switch.turn_off()
        await self._show()

    def _highlighted(self) -> model.Item | None:
        option = self.query_one("#items", OptionList).highlighted_option
        return next((item for item in self.items if option is not None and item.id == option.id), None)

    async def _submit(self, event: Mapping[str, Any]) -> None:
        try:
            pending = await self._client.submit(dict(event), model.written(self._list_name))
        except OncelogError as error:  # it was not taken: a full disk, a full outbox
            self.notify(str(error), severity="error", markup=False)
            return
        self._own[pending.id] = pending
        await self._show()


def _is_in_table(pending: Pending, cursor: int) -> bool:
    """Or never will be: it was rejected."""
    outcome = pending.result
    return outcome.committed_id <= cursor if isinstance(outcome, Committed) else outcome is not None


def _line(item: model.Item) -> Content:
    text = _printable(item.text)
    return Content.assemble(
        ("✓ ", "$text-success") if item.is_done else "· ",
        (text, "dim strike") if item.is_done else text,
        (f"  {_printable(item.by)}", "dim"),
        ("  … not sent yet", "$text-warning") if item.is_pending else "",
    )


def _rejected_line(rejection: RefusedEvent) -> Content:
    change = model.change_of(rejection.event)
    text = "?" if change is None else change.text or change.kind
    return Content.assemble((f"✗ {_printable(text)}  {_printable(str(rejection.outcome))}", "$text-error"))


def _printable(text: str) -> str:
    """Others may have written anything, and a terminal obeys control characters."""
    return "".join(character if character.isprintable() else "�" for character in text)


@asynccontextmanager
async def terminal(
    url: str, name: str, store: str, list_name: str = "home", limits: ClientLimits | None = None
) -> AsyncIterator[TodoApp]:
    """A terminal with its client. Raises StoreInUseError if another one has the file open."""
    limits = limits or ClientLimits(pause_ms_max=2000)  # somebody is looking
    switch = Switch(url, limits)
    client = Client(
        url,
        path=store,
        partitions=[model.followed(list_name)],
        client_id=name,
        apply=model.apply,
        reset=model.reset,
        limits=limits,
        transport=switch,
    )
    async with client:
        # All that this program knows comes from the log, so with another log it begins anew.
        client.on_history_changed(lambda _: client.start_over())
        table = model.Table(store)
        try:
            yield TodoApp(client, switch, table, name, list_name)
        finally:
            table.close()


def name_of(text: str) -> str:
    """Of a list, or of a user: for the command line."""
    if not model.NAME.fullmatch(text):
        raise argparse.ArgumentTypeError("must be small letters, digits and hyphens, at most 64")
    return text


async def main(arguments: argparse.Namespace) -> None:
    """Runs until the user quits."""
    store = arguments.store or f"todo-{arguments.name}.db"
    async with terminal(arguments.url, arguments.name, store, arguments.list) as app:
        await app.run_async()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A shared to-do list in a terminal.")
    parser.add_argument("--url", default=URL, help=f"the server; {URL} unless told otherwise")
    parser.add_argument("--name", required=True, type=name_of, help="who you are; another one for each terminal")
    parser.add_argument("--list", default="home", type=name_of, help="which list; home unless told otherwise")
    parser.add_argument("--store", help="the file with the outbox and the list; todo-NAME.db unless told otherwise")
    try:
        asyncio.run(main(parser.parse_args()))
    except OncelogError as error:
        sys.exit(str(error))
