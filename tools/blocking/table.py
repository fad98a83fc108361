"""The blocking classes to generate, and facts that the generator cannot derive from the async classes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tools.blocking.source import SOURCE


@dataclass(frozen=True, kw_only=True)
class Twin:
    """A class to generate."""

    source: str
    """Module and name of the async class."""
    docstring: str
    base: str
    """Module and name of the base class."""
    holds: str
    """Name of the async object: `pending` is in `self._pending`."""
    client: str = ""
    """Kind of client, if the constructor takes the parameters of the async class and creates the async object."""
    is_resource: bool = False
    """Whether the constructor takes only the async object."""
    is_base: bool = False
    """Whether blocking classes in other modules are derived from it."""
    omits: frozenset[str] = frozenset()
    """Public names without a blocking twin."""
    inherits: frozenset[str] = frozenset()
    """Methods of the base class."""
    translates: frozenset[str] = frozenset()
    """Methods whose steps run in the caller's thread: the async method without `await`."""
    immediate: frozenset[str] = frozenset()
    """Methods that any thread may call, even when the object is closed."""
    any_time: frozenset[str] = frozenset()
    """Methods that may be called before the object is open."""
    timeouts: frozenset[str] = frozenset()
    """Methods that get a `timeout_s` parameter."""
    attributes: Mapping[str, str] = field(default_factory=dict)
    """Attributes to provide as properties, and their types."""
    arguments: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Parameter and replacement function of an argument, by method."""
    texts: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Part of a docstring and its replacement, by method. `…` in the part matches the rest of the paragraph."""

    @property
    def module(self) -> str:
        """Module of the async class."""
        return self.source.partition(":")[0]

    @property
    def source_name(self) -> str:
        """Name of the async class."""
        return self.source.partition(":")[2]

    @property
    def name(self) -> str:
        """Name of the blocking class."""
        return f"Blocking{self.source_name}"


@dataclass(frozen=True, kw_only=True)
class Translation:
    """A function or class to generate that runs the steps of an async one in the caller's thread."""

    source: str
    """Module and name of the async function or class."""
    names: Mapping[str, str]
    """Names to replace, each with the module and the name of its replacement, or with a name of the new module."""
    texts: Mapping[str, str] = field(default_factory=dict)
    """Parts of docstrings to replace."""


@dataclass(frozen=True, kw_only=True)
class Module:
    """A module to generate."""

    name: str
    docstring: str
    twins: tuple[Twin, ...] = ()
    translations: tuple[Translation, ...] = ()
    names: tuple[str, ...] = ()
    """Modules and names that the table mentions."""
    ends_with: str = ""

    @property
    def path(self) -> Path:
        """Path of the module."""
        return SOURCE / f"{self.name.replace('.', '/')}.py"


OBJECT: Final = "oncelog.blocking_base:BlockingObject"
_CLIENT: Final = "oncelog.client.runtime.blocking_base:BlockingBaseClient"
_STATUS_SOURCE: Final = "oncelog.client.runtime.blocking:BlockingStatusSource"
_STATUS_METHODS: Final = frozenset({"until_live", "until_settled"})
_CLIENT_METHODS: Final = _STATUS_METHODS | {"close"}
_CONDITION: Final = ("meets a condition,", "meets a condition, which is called in another thread,")
MODULES: Final = (
    Module(
        name="oncelog.engine.blocking",
        docstring="""The blocking twin of `Log`: the same methods, each of which waits for its result.

    with oncelog.open_blocking("app.db") as log:
        verdict = log.append({"type": "order.placed", "order": 17}, id=id, partitions=["orders"])

Any number of threads may share one log; one group commit can contain the writes of several threads.
""",
        twins=(
            Twin(
                source="oncelog.engine.leases:LeaseManager",
                docstring="Leases for work that runs once, without an event loop: the methods of `LeaseManager`.",
                base="oncelog.engine.blocking_base:BlockingLeaseManagerBase",
                holds="lease_manager",
                omits=frozenset({"close", "shield"}),
                inherits=frozenset({"__init__", "begin", "recall"}),
                translates=frozenset({"run"}),
            ),
            Twin(
                source="oncelog.engine.state_reader:StateReader",
                docstring="The state of a log, for code without an event loop: the methods of `StateReader`.",
                base=OBJECT,
                holds="state_reader",
                immediate=frozenset({"lane"}),
                texts={"follow_blocks": ("Close the iterator with `aclosing`.", "Leave the loop with `break`.")},
            ),
            Twin(
                source="oncelog.engine.log:Log",
                docstring="A log opened in this process, for code without an event loop: the methods of `Log`.",
                base="oncelog.engine.blocking_base:BlockingLogBase",
                holds="log",
                is_resource=True,
                # These methods are for servers, which have many clients on one event loop.
                omits=frozenset(
                    [
                        "client_evictions",
                        "evictions",
                        "failed_batches",
                        "follow_several",
                        "listen",
                        "listen_members",
                        "measure_latency",
                        "queue_age_s",
                        "queue_length",
                        "read_untraced",
                        "read_views",
                        "recall",
                        "replays",
                        "submit_many_nowait",
                        "submit_nowait",
                        "subscribe",
                        "tracer",
                        "unlisten",
                        "wait_idle",
                        "watch_batches",
                        "watch_commits",
                        "write_gate",
                    ]
                ),
                immediate=frozenset({"audit_cursor"}),
                texts={"follow": ("until closed. Use …", "until the log is closed. Leave the loop with `break`.")},
            ),
        ),
        names=("oncelog.engine.blocking_base:wrap_opener", "oncelog.engine.log:open_log"),
        ends_with="""open_blocking = wrap_opener(open_log, BlockingLog)
\"\"\"Return the log in the file at `path`, for `with`. The parameters are those of `oncelog.open`.\"\"\"
""",
    ),
    Module(
        name="oncelog.idempotency.blocking_once_call",
        docstring="Calls to blocking functions that `once` decorates.",
        translations=(
            Translation(
                source="oncelog.idempotency.once_call:wrap_async",
                names={
                    "wrap_async": "wrap_blocking",
                    "Log": "oncelog.engine.blocking:BlockingLog",
                    "AsyncSharedLog": "oncelog.idempotency.share:SharedLog",
                    "AbstractAsyncContextManager": "contextlib:AbstractContextManager",
                },
            ),
        ),
    ),
    Module(
        name="oncelog.idempotency.blocking_runs",
        docstring="The runs of a log, for code without an event loop.",
        translations=(
            Translation(
                source="oncelog.idempotency.runs:Runs",
                names={
                    "Runs": "BlockingRuns",
                    "Log": "oncelog.engine.blocking:BlockingLog",
                    "prepare_tool": "oncelog.idempotency.runs:prepare_blocking_tool",
                    "AnyTool": "oncelog.idempotency.runs:BlockingTool",
                },
                texts={
                    """A sync tool runs in a thread and cannot be cancelled: if its caller is cancelled,
        the tool continues and its result is stored.""": "The tool runs in the caller's thread and must not be async.",
                },
            ),
        ),
    ),
    Module(
        name="oncelog.client.runtime.blocking",
        docstring="The blocking twin of `StatusSource`, the base class of clients and scopes.",
        twins=(
            Twin(
                source="oncelog.client.runtime.client:StatusSource",
                docstring="A client or one of its scopes, for code without an event loop.",
                base=OBJECT,
                holds="status_source",
                is_base=True,
                omits=frozenset({"until_status"}),
                timeouts=_STATUS_METHODS,
            ),
        ),
    ),
    Module(
        name="oncelog.client.events.blocking",
        docstring="""The blocking twin of `Client`: the same methods, each of which waits for its result.

    with BlockingClient("http://127.0.0.1:7171", path="todo.db", partitions=["list/1"]) as client:
        outcome = client.submit({"type": "todo.added", "text": "milk"}).outcome()

Any number of threads may share a client. Handlers are called in threads, one event after the other. `apply` is called
in the store's thread and must not use the client: such a call would deadlock.
""",
        twins=(
            Twin(
                source="oncelog.client.events.outbox:Pending",
                docstring="A submission in the outbox, with the methods of the async `Pending`.",
                base=OBJECT,
                holds="pending",
                omits=frozenset({"check_accepted", "has_same_content", "settle"}),
                timeouts=frozenset({"outcome"}),
            ),
            Twin(
                source="oncelog.client.events.client:Client",
                docstring="A blocking events client for one server, with the methods of `Client`.",
                base="oncelog.client.events.blocking_base:BlockingEventsBase",
                holds="client",
                client="events",
                inherits=_CLIENT_METHODS | {"forget_rejected"},
                immediate=frozenset({"status"}),
                any_time=frozenset({"on_event", "on_status", "on_history_changed", "reconnect_now"}),
                timeouts=frozenset({"reached"}),
                arguments={
                    "on_event": ("handler", "wrap_handler"),
                    "on_status": ("handler", "wrap_handler"),
                    "on_history_changed": ("handler", "wrap_handler"),
                },
                texts={
                    "until_status": _CONDITION,
                    "on_event": ("It may be async.", "It must not be async; it is called in a thread."),
                },
            ),
        ),
        names=("oncelog.client.events.blocking_base:wrap_handler",),
    ),
    Module(
        name="oncelog.client.ledger.blocking",
        docstring="""The blocking twin of `LedgerClient`: the same methods, each of which waits for its result.

    with BlockingLedgerClient("127.0.0.1:7271", path="pay.db", organization="acme", client_id="billing-1") as ledger:
        outcome = ledger.write([set_entity("user:1", b"…")], timeout_s=10)

Any number of threads may share a client.
""",
        twins=(
            Twin(
                source="oncelog.client.ledger.scope:LedgerScope",
                docstring="A scope of a ledger for blocking code, with the methods of `LedgerScope`.",
                base=_STATUS_SOURCE,
                holds="scope",
                inherits=_STATUS_METHODS,
                omits=frozenset({"open", "end"}),
                texts={"until_status": _CONDITION},
                attributes={"organization": "str", "vault": "str"},
            ),
            Twin(
                source="oncelog.client.ledger.client:LedgerClient",
                docstring="A blocking client for one ledger, with the methods of `LedgerClient`.",
                base=_CLIENT,
                holds="client",
                client="ledger",
                omits=frozenset({"scopes"}),
                inherits=_CLIENT_METHODS,
                texts={"until_status": _CONDITION},
            ),
        ),
    ),
    Module(
        name="oncelog.client.deltas.blocking",
        docstring="""The blocking twin of `DeltasClient`: the same methods, each of which waits for its result.

    with BlockingDeltasClient("http://127.0.0.1:7171", "shop", path="till.db", client_id="till-1") as client:
        client.put("products", "p1", {"name": "Tea"})
        client.synced(timeout_s=10)

Any number of threads may share a client.
""",
        twins=(
            Twin(
                source="oncelog.client.deltas.client:DeltasClient",
                docstring="A blocking client for one gateway, with the methods of `DeltasClient`.",
                base="oncelog.client.deltas.blocking_base:BlockingDeltasBase",
                holds="client",
                client="deltas",
                immediate=frozenset({"status"}),
                inherits=_CLIENT_METHODS,
                arguments={
                    "edit": ("function", "self._forbid_reentry"),
                    "transact": ("function", "self._forbid_reentry"),
                },
                texts={
                    "changes": ("`async for change in client.changes()`", "`for change in client.changes()`"),
                    "until_status": _CONDITION,
                },
            ),
        ),
    ),
    Module(
        name="oncelog.client.chat.blocking",
        docstring="""The blocking twin of `ChatClient`: the same methods, each of which waits for its result.

    with BlockingChatClient("http://127.0.0.1:7171", path="ann.db", token="ann") as client:
        client.create("tea", members=["user:bob"])
        print(client.send("tea", "hello").outcome(timeout_s=10))

Any number of threads may share a client.
""",
        twins=(
            Twin(
                source="oncelog.client.chat.outbox:Pending",
                docstring="A message in the outbox, with the methods of the async `Pending`.",
                base=OBJECT,
                holds="pending",
                omits=frozenset({"check_accepted", "has_same_content", "settle"}),
                timeouts=frozenset({"delivered", "outcome"}),
            ),
            Twin(
                source="oncelog.client.chat.client:ChatClient",
                docstring="A blocking chat client for one device of one user, with the methods of `ChatClient`.",
                base=_CLIENT,
                holds="client",
                client="chat",
                immediate=frozenset({"status"}),
                inherits=_CLIENT_METHODS,
                texts={"until_status": _CONDITION},
            ),
        ),
    ),
)
