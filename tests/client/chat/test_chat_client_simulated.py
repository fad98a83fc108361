"""Devices of several users against a model of the server, with random faults.

The network loses, duplicates, delays and reorders live frames and cuts connections. Clients crash and lose unsaved
changes. The server is busy, skips sequences, removes members and is restored from backups. No device ever shows a
message twice, out of order or after a gap. In the end every device has all messages of the server, and the server has
stored each sent message once or refused it.
"""

from collections import Counter
from pathlib import Path
from typing import Final

import pytest

from client.chat.model_chats import ModelServer
from client.chat.simulated_devices import Device
from client.simulation import Simulation

STEPS: Final = 2000
CHATS: Final = ("a", "b", "ç")


class World(Simulation):
    """Some devices, their server, and random faults."""

    def __init__(self, seed: int, *, directory: Path | None = None, backups: bool = False, leaving: bool = False):
        super().__init__(seed)
        chance = self.chance
        self.server = ModelServer()
        names = ("ann-phone", "ann-desk", "bob-phone", "carl-phone")[: chance.randint(2, 4)]
        self.devices = [Device(name, self.server, chance, directory and directory / f"{name}.db") for name in names]
        self.users = sorted({one.user for one in self.devices})
        for chat_id in CHATS[: chance.randint(1, 3)]:
            self.server.create(self.users[0], chat_id, self.users)
        self.actions = {
            self.connect: 60, self.request_list: 60, self.deliver_to_server: 90, self.deliver_to_client: 120,
            self.save_changes: 60, self.read: 40, self.send: 40, self.pass_time: 40, self.cut: 4, self.crash: 4,
            self.refuse_messages: 4, self.skip_sequence: 4, self.back_up: 4 if backups else 0,
            self.restore: 1 if backups else 0, self.change_membership: 6 if leaving else 0,
        }  # fmt: skip

    @property
    def any_device(self) -> Device:
        return self.chance.choice(self.devices)

    def connect(self) -> None:
        self.any_device.connect()

    def request_list(self) -> None:
        device = self.any_device
        device.request_list()
        if self.chance.random() < 0.7:  # otherwise other actions happen before the answer
            device.receive_list()

    def deliver_to_server(self) -> None:
        device = self.any_device
        for _ in range(self.chance.randint(1, 4)):
            device.deliver_to_server()

    def deliver_to_client(self) -> None:
        device = self.any_device
        for _ in range(self.chance.randint(1, 4)):
            device.deliver_to_client(is_faulty=True)

    def save_changes(self) -> None:
        self.any_device.save_changes()

    def read(self) -> None:
        self.any_device.read()

    def send(self) -> None:
        self.any_device.send(self.chance.choice(list(self.server.chats)), f"text {self.seen['send']}")

    def pass_time(self) -> None:
        self.any_device.pass_time(self.chance.choice((1, 10, 300)))

    def cut(self) -> None:
        self.any_device.cut()

    def crash(self) -> None:
        self.any_device.crash()

    def refuse_messages(self) -> None:
        self.server.refusals = [self.chance.choice(("BUSY", "RATE_LIMITED")) for _ in range(self.chance.randint(1, 5))]

    def skip_sequence(self) -> None:
        self.server.skip = 1

    def back_up(self) -> None:
        self.server.back_up()

    def restore(self) -> None:
        if self.server._backup:
            self.server.restore()

    def change_membership(self) -> None:
        chat_id, user = self.chance.choice(list(self.server.chats)), self.chance.choice(self.users)
        self.server.set_member(chat_id, user, present=user not in self.server.chats[chat_id].members)

    def settle(self) -> None:
        self.server.refusals = []
        for chat_id in self.server.chats:
            for user in self.users:
                self.server.set_member(chat_id, user, present=True)
        for device in self.devices:
            device.cut()
        for _ in range(2):  # the second pass delivers messages of later devices
            for device in self.devices:
                device.settle()

    def check(self) -> None:
        for chat in self.server.chats.values():
            names = [one["client_message_id"] for one in chat.log]
            assert len(names) == len(set(names)), "committed twice"
        for device in self.devices:
            device.check()


def seeds(first: int) -> range:
    return range(first, first + 10)


def seen_in(*worlds: World) -> Counter[str]:
    return sum((one.seen for world in worlds for one in world.devices), Counter())


@pytest.mark.rule("CH-7")
@pytest.mark.rule("CH-12")
@pytest.mark.parametrize("block", range(6))
def test_devices_show_the_same_messages_once_and_in_order(block: int) -> None:
    seen = seen_in(*(World(seed).run(STEPS) for seed in seeds(10 * block)))
    assert all(seen[name] for name in ("Sent", "Arrived", "Delivery", "lost")), seen


@pytest.mark.rule("CH-12")
@pytest.mark.parametrize("block", range(2))
def test_devices_converge_with_restored_backups(block: int) -> None:
    worlds = [World(seed, backups=True).run(STEPS) for seed in seeds(1000 + 10 * block)]
    seen = seen_in(*worlds)
    assert seen["HistoryChange"], seen
    assert any(world.server.lost for world in worlds)


@pytest.mark.rule("CH-12")
@pytest.mark.parametrize("block", range(2))
def test_devices_converge_with_changing_members(block: int) -> None:
    seen = seen_in(*(World(seed, leaving=True).run(STEPS) for seed in seeds(2000 + 10 * block)))
    assert all(seen[name] for name in ("Membership", "NOT_A_MEMBER")), seen


@pytest.mark.rule("CH-12")
def test_devices_converge_with_reopened_stores(tmp_path: Path) -> None:
    for seed in range(3000, 3004):
        directory = tmp_path / str(seed)
        directory.mkdir()
        world = World(seed, directory=directory, backups=bool(seed % 2), leaving=True).run(STEPS)
        for device in world.devices:
            device.store.close()
