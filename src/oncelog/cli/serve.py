"""`oncelog serve`: run the server."""

import asyncio
import gc
import os
import shlex
import signal
import sys
from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING, Annotated, Final
from uuid import uuid4

import typer

from oncelog.cli.server_options import CLIENT_VARIABLES, DEFAULT_URL
from oncelog.cli.terminal import EXIT_INTERRUPTED, discard_output
from oncelog.errors import SettingsError
from oncelog.extras import explain_missing_package
from oncelog.storage.address import redact_address

if TYPE_CHECKING:
    from oncelog.server.settings import ServerSettings

FORCE_AFTER_S: Final = 1.0
"""A signal that arrives at least this long after the first one stops the server immediately."""
SWITCH_INTERVAL_S: Final = 0.0005
"""How long a thread waits before it requests the interpreter lock from another thread. With Python's default of 5 ms,
each durable commit and each row of a read would wait that long while the event loop is busy."""
# Python starts a collection once it has created a certain number more objects than it has freed. A server that caches
# the newest answers frees an old one for each new one, so this difference hardly grows while 100,000 young objects
# accumulate, and the collection that finally runs stops the server for 50 ms. With the default threshold of 700,
# collections take 9 % of the time.
GC_THRESHOLD_OBJECTS: Final = 50_000
"""Threshold for automatic collections, in case the event loop cannot run the explicit ones."""
COLLECT_PAUSE_S: Final = 0.1
GENERATION_1_EVERY: Final = 20
GENERATION_2_EVERY: Final = 6000
"""Every 20th collection includes the second generation, and every 6,000th includes all objects."""
CLOSED_CONNECTIONS_MAX: Final = 500
"""A full collection runs after this many closed connections. Each leaves about 20 KiB in cycles, which are in an old
generation after a few seconds. Otherwise a client that keeps opening and closing connections would fill the memory
within ten minutes."""


def serve(  # noqa: PLR0913, PLR0917 - the options of a command
    config: Annotated[str | None, typer.Option(metavar="FILE", help="File with settings, in TOML.")] = None,
    store: Annotated[
        str | None,
        typer.Option(metavar="LOG", help="The log: a file, or postgresql://…; created if it is missing."),
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on; default 127.0.0.1.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; default 7171, 0 for any free port.")] = None,
    development: Annotated[
        bool | None, typer.Option("--development", help="Give all callers on this machine full access.")
    ] = None,
    read_only: Annotated[
        bool | None, typer.Option("--read-only", help="Accept no new writes; answer retries and reads.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Any setting, such as limits.frame_bytes_max=1000000."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Do not print example commands in development mode.")] = False,
) -> None:
    """Serve a log: events, deltas and chats over WebSocket and HTTP, the ledger over HTTP and gRPC.

    Settings come from the file, the environment (ONCELOG_PORT, ONCELOG_LIMITS__QUEUE_ITEMS_MAX) and the command line;
    later ones win. SIGHUP reloads keys, grants, certificates and the settings read_only, disk and tenants; key files
    are also polled every second. SIGTERM finishes accepted requests and exits.

    Examples:

      oncelog serve --development --store app.db

      oncelog serve --config /etc/oncelog.toml --store postgresql://oncelog@db.example.org/app

      oncelog serve --config /etc/oncelog.toml --set log.format=json
    """
    # Until the server installs its signal handlers, there is nothing to reload or to finish.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    with explain_missing_package("the server", "server"):
        import uvloop  # noqa: F401, PLC0415 - checks that it is installed

        from oncelog.server import log_format  # noqa: PLC0415 - the library alone does not need it
        from oncelog.server.settings import load  # noqa: PLC0415
    flags = {"store": store, "host": host, "port": port, "development": development, "read_only": read_only}
    overrides = {name: _format_value(value) for name, value in flags.items() if value is not None}
    environment = get_settings_environment()
    flag_settings = {**overrides, **dict(map(_parse_pair, set_ or []))}
    settings = load(config, environment, flag_settings)
    log_format.configure(settings.log.level, settings.log.format)
    shows_examples = settings.development and not quiet
    _run_server(settings, lambda: load(config, environment, flag_settings), shows_examples=shows_examples)


def get_settings_environment() -> dict[str, str]:
    """Return the environment without the variables of commands that use a server: they are not server settings."""
    return {name: value for name, value in os.environ.items() if name not in CLIENT_VARIABLES}


def _run_server(
    settings: "ServerSettings", reload_settings: Callable[[], "ServerSettings"], *, shows_examples: bool
) -> None:
    with explain_missing_package("the server", "server"):
        import uvloop  # noqa: PLC0415 - as above

        from oncelog.server.app import Server  # noqa: PLC0415

    async def main() -> None:
        loop = asyncio.get_running_loop()
        stopped = asyncio.Event()
        since: list[float] = []
        server = Server(settings, load_settings=reload_settings)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, _stop, stopped, since)
        loop.add_signal_handler(signal.SIGHUP, server.reload)
        async with server:
            if shows_examples:
                try:
                    typer.echo(_format_examples(server.urls[0], redact_address(settings.store), server.grpc_address))
                except OSError:  # the reader of the output is gone; the server continues
                    discard_output(sys.stdout)
            collecting = loop.create_task(collect_forever(lambda: server.connections_closed))
            await stopped.wait()
            collecting.cancel()

    sys.setswitchinterval(SWITCH_INTERVAL_S)
    uvloop.run(main())


def _format_examples(url: str, store: str, grpc_address: str = "") -> str:
    """Return commands to paste into another terminal."""
    program = find_program()
    where = "" if url == DEFAULT_URL else f" --url {url}"
    event = f'{{"id":"{uuid4()}","partitions":["orders"],"event":{{"type":"order.placed","order":17}}}}'
    set_entity = '{"set_entity":{"key":"invoice/1","value":"cGFpZA=="}}'
    write = (
        f'{{"organization":"acme","client_id":"try-{uuid4().hex[:8]}","sequence":1,"idempotency_key":"{uuid4()}",'
        f'"operations":[{set_entity}]}}'
    )
    tea = '{"op":"INSERT","table":"products","rowId":"tea","columns":[{"column":"price","value":3.5}]}'
    ann = "-H 'Authorization: Bearer ann' -H 'Content-Type: application/json'"
    hello = f'{{"client_message_id":"{uuid4()}","content":"Hello, Bob!"}}'
    also = f" The same over gRPC: {grpc_address}." if grpc_address else ""
    return f"""
Oncelog listens on {url} and keeps its log in {store}.
All callers on this machine have full access (development mode). Ctrl-C stops the server.

The server's page, with a link to the API and forms to try it: {url}
A chat for your browser; open it in two windows: {url}/chat

In another terminal, try:

  # Submit an event. If you run the line again, the answer is the same and nothing is committed.
  curl -s '{url}/v1/events' -H 'Content-Type: application/json' -d '{{"events":[{event}]}}'

  # Read a page; follow new events.
  curl -s '{url}/v1/events?partition=orders'
  curl -N '{url}/v1/events/stream?partition=orders'

  # Write a ledger transaction, then read the entity. The write, too, can be repeated.{also}
  curl -s '{url}/v1/ledger/write' -H 'Content-Type: application/json' -d '{write}'
  curl -s '{url}/v1/ledger/entity?organization=acme&key=invoice/1'

  # Push a row change (the command adds the delta's clock and id), then read the merged rows.
  echo '{tea}' | {program} deltas push shop{where} --client-id till-1
  curl -s '{url}/v1/sync/shop/rows/products'

  # Create a chat with two users, send a message, and read it as Bob. The second command, too, can be repeated.
  curl -s '{url}/v1/chats' {ann} -d '{{"chat_id":"general","members":["user:bob"]}}'
  curl -s '{url}/v1/chats/general/messages' {ann} -d '{hello}'
  curl -s '{url}/v1/chats/general/messages' -H 'Authorization: Bearer bob'

  # Events with Oncelog's own commands, and a load test of ten seconds.
  {program} tail{where} --partition orders
  {program} submit{where} --partition orders '{{"type":"order.placed","order":18}}'
  {program} load{where}
"""


def find_program() -> str:
    """Return the command that started this program."""
    called = sys.argv[0]
    if called.endswith("__main__.py"):
        return f"{shlex.quote(sys.executable)} -m oncelog"
    return shlex.quote(called) if os.access(called, os.X_OK) else "oncelog"


def _stop(stopped: asyncio.Event, signal_times: list[float]) -> None:
    """Stop the server gracefully at the first signal, and immediately at a later one.

    A signal directly after the first one is ignored, because Ctrl-C in `make run` arrives from the terminal and from
    make.
    """
    now = asyncio.get_running_loop().time()
    signal_times.append(now)
    if now - signal_times[0] > FORCE_AFTER_S:
        os._exit(EXIT_INTERRUPTED)
    stopped.set()


def _format_value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _parse_pair(text: str) -> tuple[str, str]:
    name, is_there, value = text.partition("=")
    if not is_there:
        raise SettingsError(f"--set {text}: must be NAME=VALUE")
    return name, value


# --- garbage collection -----------------------------------------------------------------------------------


async def collect_forever(closed_connections: Callable[[], int] = int, pause_s: float = COLLECT_PAUSE_S) -> None:
    """Collect garbage at short intervals until cancelled. Objects that exist at the start are never collected."""
    gc.collect()  # otherwise the freeze would keep garbage from startup forever
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD_OBJECTS)
    closed_before = closed_connections()
    for number in count(1):
        await asyncio.sleep(pause_s)
        closed = closed_connections()
        chosen = 2 if closed - closed_before >= CLOSED_CONNECTIONS_MAX else choose_generation(number)
        if chosen == 2:
            closed_before = closed
        gc.collect(chosen)


def choose_generation(number: int) -> int:
    """Return the oldest generation to include in a collection."""
    if number % GENERATION_2_EVERY == 0:
        return 2
    return 1 if number % GENERATION_1_EVERY == 0 else 0
