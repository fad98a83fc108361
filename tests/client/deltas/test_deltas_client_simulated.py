"""Deltas clients against a model of the gateway, with random faults.

The network loses, duplicates, delays and reorders requests and answers. Clients crash, and their clocks are seconds
apart. The gateway is busy, compacts, refuses deltas and is restored from backups. In the end all replicas have the rows
of the model, and the model has every edit.
"""

from collections import Counter
from pathlib import Path
from typing import Final

import pytest

from client.deltas.model_gateway import BAD, HORIZON_CLIENT, ModelGateway, Refusal
from client.deltas.replicas import Replica
from client.simulation import Simulation

STEPS: Final = 300
AHEAD_MS: Final = (-3000, 0, 3000, 7000)
LATE_AHEAD_MS: Final = (-60_000, -30_000, 0, 3000)
"""Clock offsets for runs that drop tombstones: edits of the slowest clocks are older than the horizon."""


class World(Simulation):
    """Some replicas, their gateway, and random faults."""

    def __init__(
        self,
        seed: int,
        *,
        directory: Path | None = None,
        backups: bool = False,
        refusals: bool = False,
        drops: bool = False,
    ):
        super().__init__(seed)
        chance = self.chance
        ahead_ms = LATE_AHEAD_MS if drops else AHEAD_MS
        self.gateway = ModelGateway()
        self.replicas = [
            Replica(name, self.gateway, chance, directory and directory / f"{name}.db", chance.choice(ahead_ms))
            for name in ("ann", "bob", "čarl", "\U0001f600")[: chance.randint(2, 4)]
        ]
        self.refusals = refusals
        self.copies: list[bytes] = []
        self.actions = {
            self.edit: 20, self.send: 20, self.deliver: 20, self.receive_push_reply: 20, self.send_pull: 20,
            self.receive_page: 20, self.keep_copy: 3, self.deliver_copy: 3, self.crash: 2, self.compact: 2,
            self.toggle_busy: 1, self.pass_time: 5, self.discard: 2 if refusals else 0,
            self.drop_tombstones: 12 if drops else 0, self.back_up: 2 if backups else 0,
            self.restore: 1 if backups else 0,
        }  # fmt: skip

    @property
    def any_replica(self) -> Replica:
        return self.chance.choice(self.replicas)

    def edit(self) -> None:
        chance = self.chance
        table, row_id = chance.choice(("notes", "things")), chance.choice("abcd")
        if chance.random() < 0.25:
            self.any_replica.edit(table, row_id, None)
            return
        values = [0, 1, "x", "é\U0001f600", None, [1, {"a": 2}], True]
        if self.refusals:
            values.append(BAD)
        names = chance.sample(("a", "b", "c"), chance.randint(0, 3))
        self.any_replica.edit(table, row_id, {name: chance.choice(values) for name in names})

    def send(self) -> None:
        self.any_replica.send()

    def deliver(self) -> None:
        self.any_replica.deliver(is_lost=self.chance.random() < 0.2, is_answer_lost=self.chance.random() < 0.2)

    def receive_push_reply(self) -> None:
        self.any_replica.receive_push_reply()

    def send_pull(self) -> None:
        self.any_replica.send_pull(is_lost=self.chance.random() < 0.1)

    def receive_page(self) -> None:
        self.any_replica.receive_page()

    def keep_copy(self) -> None:
        pushed = self.any_replica.pushed
        if pushed is not None:
            self.copies.append(pushed[1])

    def deliver_copy(self) -> None:
        """Deliver a copy of an earlier push; the same copy may be delivered several times."""
        if self.copies:
            body = self.copies[self.chance.randrange(len(self.copies))]
            try:
                self.gateway.push(body)
            except Refusal:
                self.seen["copy refused"] += 1

    def crash(self) -> None:
        self.any_replica.crash()

    def discard(self) -> None:
        self.any_replica.discard()

    def compact(self) -> None:
        self.gateway.compact(self.chance.randint(0, 5))

    def drop_tombstones(self) -> None:
        self.gateway.compact(self.chance.randint(0, 5))
        self.gateway.drop_tombstones(lambda: self.chance.random() < 0.7)

    def toggle_busy(self) -> None:
        self.gateway.busy = not self.gateway.busy

    def pass_time(self) -> None:
        self.gateway.now_ms += self.chance.choice((0, 1, 10, 1000))

    def back_up(self) -> None:
        self.gateway.back_up()

    def restore(self) -> None:
        # A copy that arrives later may restore deltas that other replicas have dropped. That is allowed.
        self.gateway.restore()

    def settle(self) -> None:
        self.gateway.busy = False
        self.gateway.now_ms += 100_000
        for replica in self.replicas:
            replica.send()
            replica.deliver(is_lost=False, is_answer_lost=False)
            replica.receive_push_reply()
        for _ in range(2):  # the second pass delivers pushes of later replicas
            for replica in self.replicas:
                replica.settle()

    def check(self) -> None:
        expected = self.gateway.rows()
        for replica in self.replicas:
            assert replica.rows() == expected, replica.name
            if not self.seen["drop_tombstones"]:  # otherwise replicas keep different tombstones
                assert replica.states() == self.replicas[0].states(), replica.name
            missing = set(replica.made) - self.gateway.known.keys() - replica.discarded - self.gateway.lost
            assert not missing, replica.name


def seeds(first: int) -> range:
    return range(first, first + 20)


@pytest.mark.rule("DE-7")
@pytest.mark.rule("DE-8")
@pytest.mark.rule("DE-9")
@pytest.mark.rule("DE-12")
@pytest.mark.parametrize("block", range(10))
def test_replicas_converge_to_the_rows_of_the_gateway(block: int) -> None:
    seen: Counter[str] = Counter()
    for seed in seeds(20 * block):
        world = World(seed).run(STEPS)
        seen += sum((one.seen for one in world.replicas), world.seen)
    happened = (
        "crash",
        "deliver_copy",
        "LostError",
        "server_busy",
        "clock_drift",
        "DeltaPage",
        "SnapshotPage",
        "RestartSnapshot",
    )
    assert all(seen[name] for name in happened), seen


@pytest.mark.parametrize("block", range(5))
def test_replicas_converge_with_refused_and_discarded_deltas(block: int) -> None:
    discarded = 0
    for seed in seeds(1000 + 20 * block):
        discarded += sum(len(one.discarded) for one in World(seed, refusals=True).run(STEPS).replicas)
    assert discarded


@pytest.mark.parametrize("block", range(5))
def test_replicas_converge_with_restored_backups(block: int) -> None:
    lost, seen = 0, Counter[str]()
    for seed in seeds(2000 + 20 * block):
        world = World(seed, backups=True, refusals=bool(seed % 2)).run(STEPS)
        lost += len(world.gateway.lost)
        seen += sum((one.seen for one in world.replicas), world.seen)
    assert lost
    assert all(seen[name] for name in ("ResetRows", "StageRows", "SnapshotPage", "invalid")), seen


@pytest.mark.rule("DE-7")
@pytest.mark.parametrize("seed", [20044, 20064, 20234])
def test_backup_restored_between_the_first_push_and_the_first_pull_is_detected(seed: int) -> None:
    World(seed, backups=True, refusals=bool(seed % 2)).run(STEPS)


@pytest.mark.rule("DE-7")
def test_backup_restored_between_the_pages_of_the_first_snapshot_is_detected() -> None:
    World(3_000_001_497, drops=True, backups=True).run(STEPS)


@pytest.mark.rule("DE-7")
def test_late_acknowledgement_of_an_earlier_history_is_ignored() -> None:
    World(5001, drops=True, backups=True, refusals=True).run(STEPS)


@pytest.mark.rule("DE-13", "DE-7", "DE-12")
@pytest.mark.parametrize("block", range(5))
def test_replicas_converge_with_dropped_tombstones(block: int) -> None:
    lost, seen = 0, Counter[str]()
    for seed in seeds(4000 + 20 * block):
        world = World(seed, drops=True, backups=bool(seed % 3 == 0), refusals=bool(seed % 2)).run(STEPS)
        lost += sum(one["clientId"] == HORIZON_CLIENT for one in world.gateway.log)
        seen += sum((one.seen for one in world.replicas), world.seen)
    assert lost
    assert all(seen[name] for name in ("drop_tombstones", "ResetRows", "StageRows", "DeltaPage", "RestartSnapshot")), (
        seen
    )


@pytest.mark.rule("DE-11")
def test_replicas_converge_with_reopened_stores(tmp_path: Path) -> None:
    for seed in range(3000, 3006):
        directory = tmp_path / str(seed)
        directory.mkdir()
        world = World(seed, directory=directory, backups=bool(seed % 2), refusals=True).run(STEPS)
        for replica in world.replicas:
            replica.store.close()
