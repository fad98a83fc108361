"""The chat door: one chat and a thousand beside the events door, from one client to another, and a crowd."""

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
    Dense,
    Followed,
    Pairs,
    Sends,
    decoded,
    demand_newest,
    demand_once,
    make_chats,
    names,
    sending,
    until,
    users,
)
from bench.disk import directory
from bench.measure import Effort
from bench.processes import allow_files, memory_bytes
from bench.report import Finding, Report, Table, findings_table
from bench.server import serving
from bench.server_report import Series, table
from bench.turns import SliceOf, in_turn, say
from bench.wire import Slice, uuids
from bench.ws_load import Connection, Load, connected
from bench.ws_load import demand_once as demand_event_once

HOT: Final = "hot"
EVENTS_DOOR: Final = "events door"
ONE: Final = "one chat"
UNFOLLOWED: Final = ", which no sender follows"
EVENTS_RATIO: Final = 0.6
MANY_RATIO: Final = 1.0
P50_MS: Final = 10
P99_MS: Final = 50
MEMORY_MIB: Final = 1024
MIB: Final = 2**20

HOW_TO_READ: Final = """\
Servers and their client, one process with one thread, share this machine. Contenders of the first table have a slice
of time in every round, one right after the other, with {in_flight} requests in flight on each of {connections}
connections; an answer comes when the write is synced to the disk. A request is one event of about 300 bytes, or one
message of as many, with a random UUID. Every sender of messages is a user of its own. All are members of the one chat;
of {chats} chats each has {members_of_many} of them as members, and a sender writes to one of its chats after the other.
Both are on one server, by the same connections. As the door has it for whoever is connected, each sender is sent what
the others write to its chats: a slice is over when everybody has all of that, and one of them must have it in order.
So a message to the one chat goes to {others} others and one to the many to {others_of_many}, which is why the many may
be faster. The client reads all deliveries, and may be what limits the one chat. The connections of the events door,
which has a server of its own, follow nothing. After every slice the sequences that were told must go on from the one
before, in each chat without a gap, and in the end the server must have as many messages. `a second` is the best round,
`median` the median; `ratio` is the best round of {one} divided by the other's, and beside it the median of that ratio
round by round.

Beside it the same on a third server by senders who have asked for answers alone (`"live": false`). Then no message is
delivered to anybody, and what is left of the difference is what many chats cost the store. It has the same target, and
fails no run.

From one to another: {connections} users in chats of two write to each other, {per_s} messages a second at times set
beforehand; what a message waits is counted from the time when it was due until the other one has it.

Held: {held} users, each with a connection that follows its chats, in chats of {members}. Memory is what the system says
that the server's process has (RSS). Then one message in every chat reaches all its other members, each once.

Ratios fail a run. What depends on the machine is only shown."""


@dataclass(frozen=True)
class Sizes:
    """How much of everything."""

    connections: int = 64
    in_flight: int = 16
    chats: int = 1000
    members_of_many: int = 4
    """Of each of those chats."""
    rounds: int = 6
    slice_s: float = 3
    per_s: int = 1000
    paced_rounds: int = 5
    paced_s: float = 5
    held: int = 5000
    members: int = 10
    """Of a chat of those who are held."""


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
    """Everything that was seen."""

    sends: dict[str, Series] = field(default_factory=dict)
    deliveries: dict[str, list[Slice]] = field(default_factory=dict)
    """Of the same slices; what is counted is not messages but who got them."""
    paced: list[Slice] = field(default_factory=list)
    memory: list[tuple[str, float]] = field(default_factory=list)
    """In MiB, at several moments."""
    held_s: float = 0.0
    """Until the messages had reached all who are held."""


def run(effort: Effort) -> Report:
    """All parts."""
    sizes = QUICK_SIZES if effort.is_quick else Sizes()
    allow_files(sizes.held + 1000)
    figures = Figures()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_sends(sizes, figures))
        runner.run(_to_another(sizes, figures))
        runner.run(_held(sizes, figures))
    return report_of(figures, sizes, judged=not effort.is_quick)


def report_of(figures: Figures, sizes: Sizes, *, judged: bool) -> Report:
    """Tables by part, and what was aimed at."""
    findings = _findings(figures, sizes)
    paced = Series(figures.paced)
    tables = (
        table("single requests", {ONE: figures.sends[ONE], **figures.sends}),
        table("deliveries", {name: Series(ones) for name, ones in figures.deliveries.items()}, compared=False),
        table("from one to another", {f"{sizes.per_s} messages a second": paced}, compared=False),
        Table(("the server's memory", "MiB"), [(when, f"{mib:.0f}") for when, mib in figures.memory]),
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
        (f"{ONE} / {EVENTS_DOOR}", ONE, EVENTS_DOOR, EVENTS_RATIO),
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
        what = f"from one to another at {sizes.per_s} a second, {name}, median of rounds"
        findings.append(Finding(what, waited_ms, " ms", f"< {most_ms} ms", waited_ms < most_ms))
    most = max(mib for _, mib in figures.memory)
    what = f"memory with {sizes.held} connections"
    findings.append(Finding(what, most, " MiB", f"< {MEMORY_MIB} MiB", most < MEMORY_MIB))
    findings.append(Finding("until a message had reached all who are held", figures.held_s, " s", "", True))
    return findings


def _many(sizes: Sizes) -> str:
    return f"{sizes.chats} chats"


# --- as many as it takes ---------------------------------------------------------------------------------


async def _sends(sizes: Sizes, figures: Figures) -> None:
    with directory() as place:
        async with AsyncExitStack() as stack:
            events = stack.enter_context(serving(place, place / "events.db"))
            publishers = await stack.enter_async_context(connected(events.host, events.port, sizes.connections))
            await demand_event_once(publishers[0])

            async def of_events(seconds: float) -> Slice:
                return await Load(publishers, 1).keep_busy(events.pid, sizes.in_flight, seconds)

            chats = await stack.enter_async_context(_chats(place / "chats.db", sizes, figures, live=True))
            others = await stack.enter_async_context(_chats(place / "others.db", sizes, figures, live=False))
            unfollowed = {f"{name}{UNFOLLOWED}": load for name, load in others.items()}
            loads: dict[str, SliceOf] = {EVENTS_DOOR: of_events, **chats, **unfollowed}
            figures.sends = await in_turn(loads, sizes.rounds, sizes.slice_s)
            for ones in figures.deliveries.values():
                del ones[0]  # of the round to warm up


@asynccontextmanager
async def _chats(store: Path, sizes: Sizes, figures: Figures, *, live: bool) -> AsyncIterator[dict[str, SliceOf]]:
    """One chat, and many, of the same senders on one server; `live` are those who are told what the others say."""
    who, many = names("sender", sizes.connections), names("chat", sizes.chats)
    members = [_members(number, sizes) for number in range(sizes.chats)]
    mine = [[chat_id for chat_id, ones in zip(many, members, strict=True) if one in ones] for one in range(len(who))]
    dense = Dense()
    with serving(store.parent, store) as server:
        say(f"{sizes.chats} chats are made …")
        make_chats(server, [(HOT, who)])
        make_chats(server, [(name, [who[one] for one in ones]) for name, ones in zip(many, members, strict=True)])
        async with users(server, who[:1], live=False) as (first,), users(server, ["stranger"], live=False) as (other,):
            dense.demand({HOT: [await demand_once(first, other, HOT)]})
        async with users(server, who, live=live) as senders:

            def load_of(name: str, chats: list[list[str]]) -> SliceOf:
                async def load(seconds: float) -> Slice:
                    sends = Followed(senders, chats) if live else Sends(senders, chats)
                    result = await sends.keep_busy(server.pid, sizes.in_flight, seconds)
                    dense.demand(sends.sequences)
                    if isinstance(sends, Followed):
                        figures.deliveries.setdefault(name, []).append(replace(result, events=sends.deliveries))
                    return result

                return load

            loads = {ONE: [[HOT]] * len(who), _many(sizes): mine}
            yield {name: load_of(name, chats) for name, chats in loads.items()}
            demand_newest(server, dense.newest)


def _members(number: int, sizes: Sizes) -> set[int]:
    """Who is in one of many chats, by the number of the sender."""
    apart = max(1, sizes.connections // sizes.members_of_many)
    return {(number + apart * one) % sizes.connections for one in range(sizes.members_of_many)}


# --- from one to another ---------------------------------------------------------------------------------


async def _to_another(sizes: Sizes, figures: Figures) -> None:
    who, chats = names("user", sizes.connections), names("chat", sizes.connections // 2)
    dense = Dense()
    with directory() as place, serving(place, place / "pairs.db") as server:
        make_chats(server, [(chat_id, who[2 * number : 2 * number + 2]) for number, chat_id in enumerate(chats)])
        async with users(server, who, live=True) as connections:
            for number in range(sizes.paced_rounds + 1):
                say(f"from one to another, {f'round {number} of {sizes.paced_rounds}' if number else 'to warm up'} …")
                pairs = Pairs(connections, chats)
                result = await pairs.pace(server.pid, sizes.per_s, sizes.paced_s if number else sizes.paced_s / 3)
                dense.demand(pairs.sequences)
                if number:
                    figures.paced.append(result)


# --- those who are held ----------------------------------------------------------------------------------


async def _held(sizes: Sizes, figures: Figures) -> None:
    who, chats = names("held", sizes.held), names("chat", sizes.held // sizes.members)
    groups = [range(number * sizes.members, (number + 1) * sizes.members) for number in range(len(chats))]
    with directory() as place, serving(place, place / "held.db") as server:
        make_chats(server, [(name, [who[one] for one in group]) for name, group in zip(chats, groups, strict=True)])

        def note(when: str) -> None:
            figures.memory.append((when, memory_bytes(server.pid) / MIB))

        note("with nobody connected")
        say(f"{sizes.held} users connect …")
        async with users(server, who, live=True) as connections:
            note(f"with {sizes.held} connections")
            figures.held_s = await _reaches_all(connections, chats, groups)
            note("after a message to every chat of theirs")


async def _reaches_all(connections: list[Connection], chats: list[str], groups: list[range]) -> float:
    """The first member of every chat says something. Gives how long it took. Raises ValueError if it does not reach
    all the others, each once, and nobody else.
    """
    got: list[list[bytes]] = [[] for _ in connections]
    arrived = 0

    def taker(texts: list[bytes]) -> Callable[[bytes], None]:
        def take(text: bytes) -> None:
            nonlocal arrived
            arrived += 1
            texts.append(text)

        return take

    for connection, texts in zip(connections, got, strict=True):
        connection.on_text = taker(texts)
    began = time.perf_counter()
    for chat_id, group, name in zip(chats, groups, uuids(), strict=False):
        connections[group[0]].send(sending(name, chat_id, CONTENTS[0]))
    await until(lambda: arrived >= sum(map(len, groups)))
    seconds = time.perf_counter() - began
    for chat_id, group in zip(chats, groups, strict=True):
        for number in group:
            told = [(one.type, one.chat_id, one.sequence) for one in map(decoded, got[number])]
            kind = "send_message_ack" if number == group[0] else "message"
            if told != [(kind, chat_id, 1)]:
                raise ValueError(f"a member of {chat_id} got {told}")
    return seconds
