"""The Chat API: one chat and a thousand chats compared with the Events API, latency between users, many connections."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Final

import uvloop

from bench.chat_load import (
    CONTENTS,
    FollowedChats,
    Pairs,
    Sends,
    SequenceCheck,
    check_newest,
    check_once,
    decoded,
    frame_to_send,
    make_chats,
    numbered_names,
    until,
    users,
)
from bench.disk import directory
from bench.measure import Effort
from bench.processes import allow_files, memory_bytes
from bench.report import Finding, Report, Table, findings_table
from bench.server import serving
from bench.server_report import Series, table
from bench.turns import SliceOf, in_turn, print_progress
from bench.wire import Slice, uuids
from bench.ws_load import Connection, Load, connected
from bench.ws_load import check_once as check_event_once

HOT: Final = "hot"
EVENTS_API: Final = "Events API"
ONE: Final = "one chat"
UNFOLLOWED: Final = ", without deliveries"
REACHED_ALL: Final = "time until one message in every chat has reached all members"
EVENTS_RATIO: Final = 0.6
MANY_RATIO: Final = 1.0
P50_MS: Final = 10
P99_MS: Final = 50
MEMORY_MIB: Final = 1024
MIB: Final = 2**20

HOW_TO_READ: Final = """\
The servers and their client, one process with one thread, share this machine. The contenders of the first table run
one after the other in every round, each for a slice of time, with {in_flight} requests in flight on each of
{connections} connections. An answer arrives when the write is synced to the disk. A request is one event of about 300
bytes, or one message of the same size, with a random UUID. Every sender of messages is a separate user. All senders are
members of the one chat. Each of the {chats} chats has {members_of_many} of them as members, and a sender writes to its
chats in turn. Both loads use one server and the same connections.

The server delivers each message to the other members of its chat. A slice ends when all senders have received all
messages, and one sender checks their order. A message to the one chat goes to {others} others and a message to the many
chats to {others_of_many}, so the many chats may be faster. The client reads all deliveries, and may limit the figure of
the one chat. The connections of the Events API have a separate server and follow nothing. After every slice, the
sequences of each chat must continue without a gap. At the end the server must have as many messages. `per second` is
the best round and `median` the median round. `ratio` is the best round of {one} divided by that of the other contender.
`median ratio` is the median of that ratio over the rounds.

`without deliveries` is the same load on a third server, by senders that request answers only (`"live": false`). The
remaining difference is the cost of many chats in the store. This ratio has the same target, and fails no run.

From one user to another: {connections} users in chats of two write to each other, {per_s} messages per second on a
fixed schedule. The latency of a message is the time from its scheduled moment until the other user has it.

Memory: {held} users in chats of {members}, each with a connection that follows its chats. The figure is the resident
set (RSS) of the server process. Then one message in every chat reaches all other members exactly once.

A missed ratio fails a run. Figures that depend on the machine are only shown."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the loads."""

    connections: int = 64
    in_flight: int = 16
    chats: int = 1000
    members_of_many: int = 4
    """Number of members in each of the many chats."""
    rounds: int = 6
    slice_s: float = 3
    per_s: int = 1000
    paced_rounds: int = 5
    paced_s: float = 5
    held: int = 5000
    members: int = 10
    """Number of members in each chat of the `held` users."""


QUICK_SIZES: Final = Sizes(
    connections=4,
    in_flight=4,
    chats=10,
    members_of_many=2,
    rounds=1,
    slice_s=0.3,
    per_s=100,
    paced_rounds=1,
    paced_s=0.5,
    held=40,
)


@dataclass
class Figures:
    """All measured figures."""

    sends: dict[str, Series] = field(default_factory=dict)
    deliveries: dict[str, list[Slice]] = field(default_factory=dict)
    """The same slices, counting deliveries instead of messages."""
    paced: list[Slice] = field(default_factory=list)
    memory: list[tuple[str, float]] = field(default_factory=list)
    """Server memory in MiB at several moments."""
    held_s: float = 0.0
    """Time until the messages have reached all members."""


def run(effort: Effort) -> Report:
    """Run all parts."""
    sizes = QUICK_SIZES if effort.is_quick else Sizes()
    allow_files(sizes.held + 1000)
    figures = Figures()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_sends(sizes, figures))
        runner.run(_to_another(sizes, figures))
        runner.run(_held(sizes, figures))
    return report_of(figures, sizes, judged=not effort.is_quick)


def report_of(figures: Figures, sizes: Sizes, *, judged: bool) -> Report:
    """Return one table for each part, and the table of targets."""
    findings = _findings(figures, sizes)
    paced = Series(figures.paced)
    tables = (
        table("single requests", {ONE: figures.sends[ONE], **figures.sends}),
        table("deliveries", {name: Series(ones) for name, ones in figures.deliveries.items()}, compared=False),
        table("from one user to another", {f"{sizes.per_s} messages per second": paced}, compared=False),
        Table(("memory of the server", "MiB"), [(when, f"{mib:.0f}") for when, mib in figures.memory]),
        findings_table(findings, judged=judged),
    )
    is_met = not judged or all(one.is_met for one in findings if one.fails_run)
    how_to_read = HOW_TO_READ.format(
        one=ONE,
        connections=sizes.connections,
        in_flight=sizes.in_flight,
        chats=sizes.chats,
        members_of_many=sizes.members_of_many,
        others=sizes.connections - 1,
        others_of_many=sizes.members_of_many - 1,
        per_s=sizes.per_s,
        held=sizes.held,
        members=sizes.members,
    )
    return Report(tables, how_to_read, is_met)


def _findings(figures: Figures, sizes: Sizes) -> list[Finding]:
    sends, many = figures.sends, _many(sizes)
    findings = []
    for name, first, second, target in (
        (f"{ONE} / {EVENTS_API}", ONE, EVENTS_API, EVENTS_RATIO),
        (f"{many} / {ONE}", many, ONE, MANY_RATIO),
        (f"{many} / {ONE}{UNFOLLOWED}", f"{many}{UNFOLLOWED}", f"{ONE}{UNFOLLOWED}", MANY_RATIO),
    ):
        best, middle = sends[first].ratios(sends[second])
        fails_run = UNFOLLOWED not in first
        findings.append(Finding(name, best, "×", f"≥ {target}×", best >= target, fails_run=fails_run))
        findings.append(Finding(f"{name}, median of rounds", middle, "×", "", True))
    speeds = [Series([one]).speed for one in figures.paced]
    for name, waited_ms, most_ms in (
        ("p50", median(one.p50_ms for one in speeds), P50_MS),
        ("p99", median(one.p99_ms for one in speeds), P99_MS),
    ):
        what = f"from one user to another at {sizes.per_s} per second, {name}, median of rounds"
        findings.append(Finding(what, waited_ms, " ms", f"< {most_ms} ms", waited_ms < most_ms))
    most = max(mib for _, mib in figures.memory)
    what = f"memory with {sizes.held} connections"
    findings.append(Finding(what, most, " MiB", f"< {MEMORY_MIB} MiB", most < MEMORY_MIB))
    findings.append(Finding(REACHED_ALL, figures.held_s, " s", "", True))
    return findings


def _many(sizes: Sizes) -> str:
    return f"{sizes.chats} chats"


# --- full load -------------------------------------------------------------------------------------------


async def _sends(sizes: Sizes, figures: Figures) -> None:
    with directory() as place:
        async with AsyncExitStack() as stack:
            events = stack.enter_context(serving(place, place / "events.db"))
            publishers = await stack.enter_async_context(connected(events.host, events.port, sizes.connections))
            await check_event_once(publishers[0])

            async def of_events(seconds: float) -> Slice:
                return await Load(publishers, 1).keep_busy(events.pid, sizes.in_flight, seconds)

            chats = await stack.enter_async_context(_chats(place / "chats.db", sizes, figures, live=True))
            others = await stack.enter_async_context(_chats(place / "others.db", sizes, figures, live=False))
            unfollowed = {f"{name}{UNFOLLOWED}": load for name, load in others.items()}
            loads: dict[str, SliceOf] = {EVENTS_API: of_events, **chats, **unfollowed}
            figures.sends = await in_turn(loads, sizes.rounds, sizes.slice_s)
            for ones in figures.deliveries.values():
                del ones[0]  # the warm-up round


@asynccontextmanager
async def _chats(store: Path, sizes: Sizes, figures: Figures, *, live: bool) -> AsyncIterator[dict[str, SliceOf]]:
    """Yield the loads of one chat and of many chats, with the same senders on one server.

    With `live`, the server delivers each message to the other members.
    """
    who, many = numbered_names("sender", sizes.connections), numbered_names("chat", sizes.chats)
    members = [_members(number, sizes) for number in range(sizes.chats)]
    mine = [[chat_id for chat_id, ones in zip(many, members, strict=True) if one in ones] for one in range(len(who))]
    sequences = SequenceCheck()
    with serving(store.parent, store) as server:
        print_progress(f"creating {sizes.chats} chats …")
        make_chats(server, [(HOT, who)])
        make_chats(server, [(name, [who[one] for one in ones]) for name, ones in zip(many, members, strict=True)])
        async with users(server, who[:1], live=False) as (first,), users(server, ["stranger"], live=False) as (other,):
            sequences.check({HOT: [await check_once(first, other, HOT)]})
        async with users(server, who, live=live) as senders:

            def load_of(name: str, chats: list[list[str]]) -> SliceOf:
                async def load(seconds: float) -> Slice:
                    sends = FollowedChats(senders, chats) if live else Sends(senders, chats)
                    result = await sends.keep_busy(server.pid, sizes.in_flight, seconds)
                    sequences.check(sends.sequences)
                    if isinstance(sends, FollowedChats):
                        figures.deliveries.setdefault(name, []).append(replace(result, events=sends.deliveries))
                    return result

                return load

            loads = {ONE: [[HOT]] * len(who), _many(sizes): mine}
            yield {name: load_of(name, chats) for name, chats in loads.items()}
            check_newest(server, sequences.newest)


def _members(number: int, sizes: Sizes) -> set[int]:
    """Return the numbers of the senders in one of the many chats."""
    apart = max(1, sizes.connections // sizes.members_of_many)
    return {(number + apart * one) % sizes.connections for one in range(sizes.members_of_many)}


# --- from one user to another ----------------------------------------------------------------------------


async def _to_another(sizes: Sizes, figures: Figures) -> None:
    who, chats = numbered_names("user", sizes.connections), numbered_names("chat", sizes.connections // 2)
    sequences = SequenceCheck()
    with directory() as place, serving(place, place / "pairs.db") as server:
        make_chats(server, [(chat_id, who[2 * number : 2 * number + 2]) for number, chat_id in enumerate(chats)])
        async with users(server, who, live=True) as connections:
            for number in range(sizes.paced_rounds + 1):
                print_progress(
                    f"from one user to another, {f'round {number} of {sizes.paced_rounds}' if number else 'warm-up'} …"
                )
                pairs = Pairs(connections, chats)
                result = await pairs.pace(server.pid, sizes.per_s, sizes.paced_s if number else sizes.paced_s / 3)
                sequences.check(pairs.sequences)
                if number:
                    figures.paced.append(result)


# --- many connections ------------------------------------------------------------------------------------


async def _held(sizes: Sizes, figures: Figures) -> None:
    who, chats = numbered_names("held", sizes.held), numbered_names("chat", sizes.held // sizes.members)
    groups = [range(number * sizes.members, (number + 1) * sizes.members) for number in range(len(chats))]
    with directory() as place, serving(place, place / "held.db") as server:
        make_chats(server, [(name, [who[one] for one in group]) for name, group in zip(chats, groups, strict=True)])

        def note(when: str) -> None:
            figures.memory.append((when, memory_bytes(server.pid) / MIB))

        note("without connections")
        print_progress(f"{sizes.held} users connect …")
        async with users(server, who, live=True) as connections:
            note(f"with {sizes.held} connections")
            figures.held_s = await _reaches_all(connections, chats, groups)
            note("after one message in every chat")


async def _reaches_all(connections: list[Connection], chats: list[str], groups: list[range]) -> float:
    """Send a message from the first member of every chat. Return the time until all members have it.

    Raises ValueError unless every other member gets it exactly once.
    """
    got: list[list[bytes]] = [[] for _ in connections]
    arrived = 0

    def receiver(texts: list[bytes]) -> Callable[[bytes], None]:
        def receive(text: bytes) -> None:
            nonlocal arrived
            arrived += 1
            texts.append(text)

        return receive

    for connection, texts in zip(connections, got, strict=True):
        connection.on_text = receiver(texts)
    began = time.perf_counter()
    for chat_id, group, name in zip(chats, groups, uuids(), strict=False):
        connections[group[0]].send(frame_to_send(name, chat_id, CONTENTS[0]))
    await until(lambda: arrived >= sum(map(len, groups)))
    seconds = time.perf_counter() - began
    for chat_id, group in zip(chats, groups, strict=True):
        for number in group:
            received = [(one.type, one.chat_id, one.sequence) for one in map(decoded, got[number])]
            kind = "send_message_ack" if number == group[0] else "message"
            if received != [(kind, chat_id, 1)]:
                raise ValueError(f"a member of {chat_id} received {received}")
    return seconds
