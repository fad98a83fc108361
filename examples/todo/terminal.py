"""A shared to-do list in a terminal: python examples/todo/terminal.py --name ann

The terminal stores every change in the outbox and shows it immediately. Without a server, the only difference is the
mark next to a pending item. Start several terminals with different names, and the page (serve_page.py).
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
from oncelog.client.runtime.http import normalize_url
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
    """A transport that the user can turn off. The client handles that like any lost connection."""

    def __init__(self, url: str, limits: ClientLimits) -> None:
        self._transport = WebSocketTransport(normalize_url(url), limits)
        self._socket: Socket | None = None
        self.is_off = False

    async def connect(self) -> Socket:
        """See `Transport`. Raises LostError while the switch is off."""
        self._check_on()
        socket = await self._transport.connect()
        try:
            self._check_on()
        except LostError:
            await socket.close()
            raise
        self._socket = socket
        return socket

    def _check_on(self) -> None:
        if self.is_off:
            raise LostError("switched off")

    async def turn_off(self) -> None:
        """Close the connection and refuse new ones."""
        self.is_off = True
        if self._socket is not None:
            await self._socket.close()

    def turn_on(self) -> None:
        """Allow connections. The client connects after its pause, or immediately after `reconnect_now`."""
        self.is_off = False

    async def close(self) -> None:
        """Close the transport."""
        await self._transport.close()


class TodoApp(App[None]):
    """Screen of one terminal."""

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
        Binding("ctrl+c", "quit", show=False, priority=True),
    ]
    ENABLE_COMMAND_PALETTE = False

    def __init__(self, client: Client, switch: Switch, table: model.Table, name: str, list_name: str) -> None:
        super().__init__()
        self._client = client
        self._switch = switch
        self._table = table
        self._user = name
        self._list_name = list_name
        self._own: dict[str, Pending] = {pending.id: pending for pending in client.pending()}
        """Submissions that the table does not show yet."""
        self._rejected: list[RefusedEvent] = []
        self.items: list[model.Item] = []
        """Items on the screen."""

    def compose(self) -> ComposeResult:
        """Create the widgets."""
        yield Static(f"{self._list_name}: {self._user}", id="title", markup=False)
        yield OptionList(id="items", markup=False)
        yield Input(placeholder="a: something to do", id="new")
        yield Static(id="status", markup=False)
        yield Footer()

    async def on_mount(self) -> None:
        """Draw the screen, and redraw it after each change in the client."""
        # The client calls the function in one of its tasks, but only the application's task may draw.
        self._client.on_status(lambda _: self._schedule_draw())
        self.query_one("#items").focus()
        await self._draw()

    def _schedule_draw(self) -> None:
        self.call_later(self._draw)

    # --- drawing

    async def _draw(self) -> None:
        status = self._client.status()
        # Read the cursor before the table: the table contains all events up to the cursor.
        self._own = {key: one for key, one in self._own.items() if not _is_finished(one, status.cursor)}
        self.items = model.build_list_with_pending(self._table.items(), [one.event for one in self._own.values()])
        if status.refused != len(self._rejected):
            self._rejected = await self._client.refused()
        if len(self.query("#items, #status")) < 2:
            return  # the application is closing, and the client still reports changes
        options = [Option(_format_item(item), item.id) for item in self.items]
        options += [Option(_format_rejected(one), _REJECTED + one.id) for one in self._rejected]
        self._replace_options(self.query_one("#items", OptionList), options)
        self.query_one("#status", Static).update(self._format_status(status))

    def _replace_options(self, widget: OptionList, options: list[Option]) -> None:
        """Replace the lines. The highlight stays on its item or, if the item is gone, at its position."""
        place, highlighted = widget.highlighted, widget.highlighted_option
        widget.set_options(options)
        ids = [option.id for option in options]
        if highlighted is not None and highlighted.id in ids:
            place = ids.index(highlighted.id)
        if options:
            widget.highlighted = min(place or 0, len(options) - 1)

    def _format_status(self, status: Status) -> str:
        state = "○ switched off" if self._switch.is_off else STATES.get(status.state, "○ offline")
        waiting = f" · {status.pending} waiting" if status.pending else ""
        rejected = f" · {status.refused} rejected" if status.refused else ""
        is_wrong = status.state in (ConnectionState.REFUSED, ConnectionState.CLOSED)
        reason = f" · {_make_printable(status.last_error)}" if is_wrong and status.last_error else ""
        return f"{state} · event {status.cursor}{waiting}{rejected}{reason}"

    # --- actions

    @on(Input.Submitted, "#new")
    async def _add_item(self, submitted: Input.Submitted) -> None:
        text = submitted.value.strip()
        submitted.input.clear()
        if text:
            await self._submit(model.build_event(model.ADDED, str(uuid4()), self._user, text))

    async def action_done(self) -> None:
        """Mark the highlighted item as done, or as not done."""
        item = self._get_highlighted()
        if item is not None:
            await self._submit(model.build_event(model.UNDONE if item.is_done else model.DONE, item.id, self._user))

    async def action_remove(self) -> None:
        """Remove the highlighted item, or forget a rejected one."""
        option = self.query_one("#items", OptionList).highlighted_option
        if option is not None and option.id is not None and option.id.startswith(_REJECTED):
            await self._client.forget_refused(option.id.removeprefix(_REJECTED))
        item = self._get_highlighted()
        if item is not None:
            await self._submit(model.build_event(model.REMOVED, item.id, self._user))

    def action_add(self) -> None:
        """Move to the input line."""
        self.query_one("#new").focus()

    def action_leave(self) -> None:
        """Move to the list."""
        self.query_one("#items").focus()

    async def action_offline(self) -> None:
        """Turn the network off or on."""
        if self._switch.is_off:
            self._switch.turn_on()
            self._client.reconnect_now()
        else:
            await self._switch.turn_off()
        await self._draw()

    def _get_highlighted(self) -> model.Item | None:
        option = self.query_one("#items", OptionList).highlighted_option
        return next((item for item in self.items if option is not None and item.id == option.id), None)

    async def _submit(self, event: Mapping[str, Any]) -> None:
        try:
            pending = await self._client.submit(dict(event), model.list_event_partitions(self._list_name))
        except OncelogError as error:  # the client has not accepted the event, for example because the disk is full
            self.notify(str(error), severity="error", markup=False)
            return
        self._own[pending.id] = pending
        await self._draw()


def _is_finished(pending: Pending, cursor: int) -> bool:
    """Whether the table is up to date with the submission: it contains the event, or the event was rejected."""
    outcome = pending.result
    return outcome.committed_id <= cursor if isinstance(outcome, Committed) else outcome is not None


def _format_item(item: model.Item) -> Content:
    text = _make_printable(item.text)
    return Content.assemble(
        ("✓ ", "$text-success") if item.is_done else "· ",
        (text, "dim strike") if item.is_done else text,
        (f"  {_make_printable(item.by)}", "dim"),
        ("  … not sent yet", "$text-warning") if item.is_pending else "",
    )


def _format_rejected(rejection: RefusedEvent) -> Content:
    change = model.parse_change(rejection.event)
    text = "?" if change is None else change.text or change.kind
    return Content.assemble((f"✗ {_make_printable(text)}  {_make_printable(str(rejection.outcome))}", "$text-error"))


def _make_printable(text: str) -> str:
    """Replace control characters, which other clients may have written and the terminal would interpret."""
    return "".join(character if character.isprintable() else "�" for character in text)


@asynccontextmanager
async def open_terminal(
    url: str, name: str, store: str, list_name: str = "home", limits: ClientLimits | None = None
) -> AsyncIterator[TodoApp]:
    """Open a client and yield its terminal. Raises StoreInUseError if another client has the file open."""
    limits = limits or ClientLimits(pause_ms_max=2000)  # short, because a user is waiting
    switch = Switch(url, limits)
    client = Client(
        url,
        path=store,
        partitions=[model.get_followed_partition(list_name)],
        client_id=name,
        apply=model.apply,
        reset=model.reset,
        limits=limits,
        transport=switch,
    )
    async with client:
        # The list is derived from the log alone, so the client can start over with a different log.
        client.on_history_changed(lambda _: client.start_over())
        table = model.Table(store)
        try:
            yield TodoApp(client, switch, table, name, list_name)
        finally:
            table.close()


def parse_name(text: str) -> str:
    """Parse the name of a list or of a user, for the command line."""
    if not model.NAME.fullmatch(text):
        raise argparse.ArgumentTypeError("must be at most 64 lower-case letters, digits and hyphens")
    return text


async def main(arguments: argparse.Namespace) -> None:
    """Run until the user quits."""
    store = arguments.store or f"todo-{arguments.name}.db"
    async with open_terminal(arguments.url, arguments.name, store, arguments.list) as app:
        await app.run_async()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A shared to-do list in a terminal.")
    parser.add_argument("--url", default=URL, help=f"address of the server, {URL} by default")
    parser.add_argument("--name", required=True, type=parse_name, help="your name, different in each terminal")
    parser.add_argument("--list", default="home", type=parse_name, help="name of the list, home by default")
    parser.add_argument("--store", help="file of the outbox and the list, todo-NAME.db by default")
    try:
        asyncio.run(main(parser.parse_args()))
    except KeyboardInterrupt:  # before the screen opens or after it closes; in between, Ctrl-C is a key
        sys.exit(130)
    except OncelogError as error:
        sys.exit(str(error))
