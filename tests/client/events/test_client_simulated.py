"""The protocols of several clients run against a model of the server, with random faults.

The faults are cut connections, crashes, duplicated frames and busy answers. Each client receives every event of its
partitions once and in order, each submission has one outcome, and a client's submissions are committed in order.
"""

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from client.events.model_server import POISON, REJECTED, Connection, ModelServer, entry_of
from oncelog.client.events import protocol as protocols
from oncelog.client.events.protocol import EventsPhase, EventsProtocol
from oncelog.client.events.values import Committed, OutboxEntry, Refused, SettledEntry
from oncelog.errors import ProtocolError, ServerRefusedError

PARTITIONS: Final = ("a", "b", "c")
STEPS: Final = 400
SMALL_LIMITS: Final = {"READY_EVENTS_MAX": 5, "REQUEST_EVENTS_MAX": 6}
"""Protocol limits small enough for a short simulation to reach."""


class Simulated:
    """A client: its protocol and the content of its store."""

    def __init__(self, name: str, partitions: tuple[str, ...]) -> None:
        self.name = name
        self.partitions = partitions
        self.outbox: dict[int, OutboxEntry] = {}
        self.offered: dict[int, OutboxEntry] = {}
        self.outcomes: dict[int, SettledEntry] = {}
        self.taken: list[tuple[int, str]] = []
        self.cursor = 0
        self.epoch = ""
        self.connection: Connection | None = None
        self.protocol = EventsProtocol(name, partitions, 0, "")

    def submit(self, entries: list[OutboxEntry]) -> None:
        self.outbox.update((one.number, one) for one in entries)
        self.offered.update((one.number, one) for one in entries)
        self.protocol.enqueue(entries)

    def restart(self) -> None:
        """Restart after a crash, which loses undelivered events and unsaved changes."""
        self.protocol = EventsProtocol(self.name, self.partitions, self.cursor, self.epoch)
        self.protocol.enqueue(list(self.outbox.values()))

    def take(self, count: int) -> None:
        before = self.cursor
        events, cursor = self.protocol.take_events(count)
        assert all(event.committed_id <= cursor for event in events)
        assert all(event.committed_id > before for event in events)
        self.taken += [(event.committed_id, event.id) for event in events]
        assert cursor >= before
        self.cursor, self.epoch = cursor, self.protocol.epoch

    def take_outcomes(self) -> None:
        for settled in self.protocol.take_settled():
            number = settled.entry.number
            assert number not in self.outcomes, "a submission has two outcomes"
            self.outcomes[number] = settled
            del self.outbox[number]


class World:
    """All clients, their server, and random faults."""

    def __init__(self, seed: int, *, duplicates: float, busy: float, cuts: int, clients: int = 3) -> None:
        self.chance = Random(seed)
        self.server = ModelServer(self.chance, busy_rate=busy)
        self.duplicates = duplicates
        self.clients = [
            Simulated(f"client-{number}", tuple(sorted(self.chance.sample(PARTITIONS, self.chance.randint(0, 3)))))
            for number in range(clients)
        ]
        self.ids = 0
        self.shared: set[str] = set()
        self.errors: Counter[str] = Counter()
        self.closed_when_full = 0
        """Number of connections that were closed because the event queue was full."""
        self.actions: list[Callable[[Simulated], None]] = [
            self.submit, self.to_server, self.to_client, self.commit, self.take, self.want_events, self.resume,
            self.cut, self.crash
        ]  # fmt: skip
        self.weights = [10, 25, 40, 8, 12, 4, 4, cuts, cuts / 2]

    # --- actions

    def act(self) -> None:
        client = self.chance.choice(self.clients)
        if client.connection is None and self.chance.random() < 0.5:
            self.connect(client)
            return
        self.chance.choices(self.actions, self.weights)[0](client)

    def take(self, client: Simulated) -> None:
        client.take(self.chance.randint(1, 4))
        client.take_outcomes()

    def crash(self, client: Simulated) -> None:
        self.cut(client)
        client.restart()

    def submit(self, client: Simulated) -> None:
        entries: list[OutboxEntry] = []
        for _ in range(self.chance.randint(1, 4)):
            number = len(client.offered) + len(entries) + 1
            kind = self.chance.choices(("counted", REJECTED, POISON), (20, 1, 1))[0]
            partitions = self.chance.sample(PARTITIONS, self.chance.randint(1, 2))
            self.ids += 1
            made = entry_of(self.ids, *partitions, kind=kind)
            known = [one for other in self.clients if other is not client for one in other.outbox.values()]
            if known and self.chance.random() < 0.1:  # submit a different client's event
                made = self.chance.choice(known)
                self.shared.add(made.id)
            if all(made.id != one.id for one in [*client.offered.values(), *entries]):
                entries.append(replace(made, number=number))
        client.submit(entries)

    def connect(self, client: Simulated) -> None:
        client.connection = self.server.connect(client.name)
        client.protocol.wants_events = self.chance.random() < 0.8
        client.protocol.connect("token")

    @staticmethod
    def want_events(client: Simulated) -> None:
        client.protocol.want_events()

    def to_server(self, client: Simulated) -> None:
        connection, outgoing = client.connection, client.protocol.outgoing
        if connection is None:
            assert not outgoing
            return
        if outgoing:
            frame = outgoing.pop(0)
            connection.to_server.extend([frame] * self.copies())
        for _ in range(self.chance.randint(0, len(connection.to_server))):
            self.server.receive(connection)

    def to_client(self, client: Simulated) -> None:
        connection = client.connection
        if connection is None or not connection.to_client:
            return
        frame = connection.to_client.popleft()
        try:
            for _ in range(self.copies()):
                client.protocol.receive(frame)
            if client.protocol.is_flooded or (client.protocol.is_page_due and self.chance.random() < 0.2):
                self.closed_when_full += 1
                self.cut(client)
        except (ProtocolError, ServerRefusedError) as error:
            self.errors[type(error).__name__] += 1
            self.cut(client)

    def copies(self) -> int:
        return 2 if self.chance.random() < self.duplicates else 1

    def commit(self, _client: Simulated) -> None:
        if self.server.requests:
            self.server.commit()

    @staticmethod
    def resume(client: Simulated) -> None:
        client.protocol.resume()

    def cut(self, client: Simulated) -> None:
        if client.connection is not None:
            self.server.cut(client.connection)
            client.connection = None
            client.protocol.disconnect()

    # --- final checks

    def settle(self) -> None:
        """Run without faults until all clients are idle."""
        self.duplicates = self.server.busy_rate = 0
        for _ in range(5000):
            for client in self.clients:
                if client.connection is None:
                    self.connect(client)
                client.protocol.resume()
                client.protocol.want_events()
                while client.protocol.outgoing or (client.connection is not None and client.connection.to_server):
                    self.to_server(client)
                while client.connection is not None and client.connection.to_client:
                    self.to_client(client)
                client.take(100)
                client.take_outcomes()
            if self.server.requests:
                self.server.commit()
            elif all(self.is_idle(client) for client in self.clients):
                return
        raise AssertionError("the clients do not become idle")

    @staticmethod
    def is_idle(client: Simulated) -> bool:
        connection, protocol = client.connection, client.protocol
        return (
            connection is not None
            and not (connection.to_client or connection.to_server or protocol.outgoing or client.outbox)
            and protocol.phase is EventsPhase.LIVE
        )

    def check(self) -> None:
        numbers = [one.number for one in self.server.log]
        assert numbers == list(range(1, len(numbers) + 1))
        for client in self.clients:
            expected = [(one.number, one.id) for one in self.server.log if set(client.partitions) & set(one.partitions)]
            assert client.taken == expected, client.name
            assert client.cursor <= len(self.server.log)
            assert client.outcomes.keys() == client.offered.keys()
            for settled in client.outcomes.values():
                self.check_outcome(settled)
            own = [
                one.outcome.committed_id
                for _, one in sorted(client.outcomes.items())
                if isinstance(one.outcome, Committed) and one.entry.id not in self.shared
            ]
            assert own == sorted(own), client.name

    def check_outcome(self, settled: SettledEntry) -> None:
        kind = settled.entry.body.decode()
        committed = self.server.by_id.get(settled.entry.id)
        if POISON in kind:
            assert isinstance(settled.outcome, Refused)
            assert settled.outcome.reason == "bad_request"
        elif REJECTED in kind:
            assert isinstance(settled.outcome, Refused)
            assert settled.outcome.reason == "validation_failed"
        else:
            assert committed is not None
            assert settled.outcome == Committed(committed.number, 1000 + committed.number)


def simulate(seed: int, *, duplicates: float, busy: float, cuts: int) -> World:
    print(f"seed {seed}, duplicates {duplicates}, busy {busy}, cuts {cuts}")  # noqa: T201 - shown with a failure
    world = World(seed, duplicates=duplicates, busy=busy, cuts=cuts)
    for _ in range(STEPS):
        world.act()
    world.settle()
    world.check()
    return world


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SMALL_LIMITS.items():
        monkeypatch.setattr(protocols, name, value)


@pytest.mark.rule("EV-17")
@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("duplicates", [0.0, 0.15])
@pytest.mark.parametrize("busy", [0.0, 0.4])
@pytest.mark.parametrize("cuts", [1, 6])
def test_every_client_receives_every_event_once_and_in_order(
    seed: int, duplicates: float, busy: float, cuts: int
) -> None:
    world = simulate(seed, duplicates=duplicates, busy=busy, cuts=cuts)
    assert world.server.log
    if not duplicates:
        assert not world.errors


def test_simulation_covers_flooded_clients() -> None:
    seeds = range(40)
    worlds = [simulate(seed, duplicates=0, busy=0, cuts=1) for seed in seeds]
    assert sum(world.closed_when_full for world in worlds) > len(seeds) / 2


@pytest.mark.rule("EV-17")
def test_duplicated_request_with_one_busy_answer_keeps_its_events_in_order() -> None:
    simulate(12653279, duplicates=0.1, busy=0.4, cuts=0)


@given(st.integers(0, 2**32), st.sampled_from([0.0, 0.1]), st.sampled_from([0.0, 0.4]), st.integers(0, 8))
def test_every_client_receives_every_event_for_generated_seeds(
    seed: int, duplicates: float, busy: float, cuts: int
) -> None:
    simulate(seed, duplicates=duplicates, busy=busy, cuts=cuts)
