"""The Ledger API: writes of one entity over HTTP and gRPC, and a retry that is answered from memory."""

import asyncio
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

import uvloop

from bench.disk import directory
from bench.grpc_load import grpc_load, stream_load
from bench.http_caller import keep_calling
from bench.http_load import ORGANIZATIONS, answer_of, writers
from bench.measure import Effort
from bench.processes import process
from bench.report import Finding, Report, findings_table
from bench.server import ADDRESS, COMMAND, UNLIMITED, Serving, serving
from bench.server_report import Series, table
from bench.turns import in_turn, print_progress
from bench.wire import Slice
from oncelog.core.operations import SetEntity
from oncelog.core.values import key_identity
from oncelog.server.app import Server
from oncelog.server.auth.authenticator import DEVELOPER
from oncelog.server.ledger.values import Write, WriteSuccess
from oncelog.server.settings import ServerSettings

FEW: Final = 32
MANY: Final = 256
MOST: Final = 1000
STREAM: Final = f"one stream, {MANY} writers"
HTTP: Final = f"HTTP, {MANY} writers"
REPORTED: Final = {FEW: 1350, MANY: 9677}
"""Writes per second, by number of writers, that the design document reports for its own system."""
ECHO_RATIO: Final = 0.6
STREAM_RATIO: Final = 2
HIT_US: Final = 20
LOOK_UP_US: Final = 1
GRPC_ADDRESS: Final = r"grpc=(127\.0\.0\.1):([0-9]+)"
BOTH_ADDRESSES: Final = ADDRESS + r".*" + GRPC_ADDRESS
RETRIES: Final = 2000

HOW_TO_READ: Final = """\
The servers and their client, one process with one thread, share this machine. A write is a transaction of one entity of
100 bytes with a random key. Every writer is a separate client that waits for each answer; the writers are spread over
{organizations} organizations. An answer has the header of the block and the proof, and arrives when the write is synced
to the disk. The contenders run one after the other in every round, each for a slice of time. `per second` is the best
round and `median` the median round.

The targets over HTTP are the figures that the design document reports for its own system and machine. They depend on
the machine, so they are only shown. One stream carries the writes of all writers; the writers whose answers arrive
together send their next writes in one message. It is compared with HTTP on the same server. Over gRPC calls the other
contender is a server that answers the same calls with the same number of bytes and does nothing else. The calls come
from {many} callers on one channel.

From memory: a retry of one of {retries} known transactions inside the process of the server, from the decoded request
to the answer before encoding; and the look-up of that retry alone. Both are medians of {retries}."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the loads."""

    rounds: int = 6
    slice_s: float = 3


QUICK_SIZES: Final = Sizes(rounds=1, slice_s=0.3)


def run(effort: Effort) -> Report:
    """Run all parts."""
    sizes = QUICK_SIZES if effort.is_quick else Sizes()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        http = runner.run(_http(sizes))
        streams = runner.run(_stream(sizes))
        calls = runner.run(_grpc(sizes))
        hit_us, look_up_us = runner.run(_from_memory())
    ratio, _ = calls["Oncelog"].ratios(calls["an empty echo"])
    over_http = streams[HTTP]
    stream_ratio, _ = streams[STREAM].ratios(over_http)
    findings = [
        *(
            Finding(
                f"over HTTP, {count} writers",
                http[f"{count} writers"].best,
                " per second",
                f"> {reported}",
                http[f"{count} writers"].best > reported,
            )
            for count, reported in REPORTED.items()
        ),
        Finding(
            f"one gRPC stream / HTTP, {MANY} writers",
            stream_ratio,
            "×",
            f"≥ {STREAM_RATIO}×",
            stream_ratio >= STREAM_RATIO,
        ),
        Finding("over gRPC / an empty echo", ratio, "×", f"≥ {ECHO_RATIO}×", ratio >= ECHO_RATIO, fails_run=True),
        Finding("a retry from memory", hit_us, " µs", f"< {HIT_US} µs", hit_us < HIT_US),
        Finding("the look-up of that retry", look_up_us, " µs", f"< {LOOK_UP_US} µs", look_up_us < LOOK_UP_US),
    ]
    judged = not effort.is_quick
    is_met = not judged or all(one.is_met for one in findings if one.fails_run)
    tables = (
        table("writes over HTTP", http, compared=False),
        table("writes over one gRPC stream", streams),
        table(f"writes over gRPC, {MANY} callers", calls),
        findings_table(findings, judged=judged),
    )
    how_to_read = HOW_TO_READ.format(organizations=ORGANIZATIONS, many=MANY, retries=RETRIES)
    return Report(tables, how_to_read, is_met)


# --- over HTTP -----------------------------------------------------------------------------------------


async def _http(sizes: Sizes) -> dict[str, Series]:
    with directory() as place, serving(place, place / "ledger.db") as server:
        async with (
            writers(server.host, server.port, FEW, 0) as few,
            writers(server.host, server.port, MANY, FEW) as many,
        ):

            async def by_few(seconds: float) -> Slice:
                return await keep_calling(few, server.pid, seconds)

            async def by_many(seconds: float) -> Slice:
                return await keep_calling(many, server.pid, seconds)

            loads = {f"{FEW} writers": by_few, f"{MANY} writers": by_many}
            series = await in_turn(loads, sizes.rounds, sizes.slice_s)
            assert "transaction_proof" in answer_of(many[0])
            return series


# --- over gRPC -----------------------------------------------------------------------------------------


@contextmanager
def _server(place: Path) -> Iterator[Serving]:
    with process([*COMMAND, str(place / "grpc.db"), *UNLIMITED], place / "ledger.log", GRPC_ADDRESS) as (pid, said):
        yield Serving(said[1], int(said[2]), pid)


@contextmanager
def _both_servers(place: Path) -> Iterator[tuple[Serving, Serving]]:
    """Run one server, and yield its HTTP address and its gRPC address."""
    with process([*COMMAND, str(place / "both.db"), *UNLIMITED], place / "both.log", BOTH_ADDRESSES) as (pid, said):
        yield Serving(said[1], int(said[2]), pid), Serving(said[3], int(said[4]), pid)


@contextmanager
def _echo(place: Path) -> Iterator[Serving]:
    with process([sys.executable, "-m", "bench.grpc_echo"], place / "echo.log", GRPC_ADDRESS) as (pid, said):
        yield Serving(said[1], int(said[2]), pid)


async def _stream(sizes: Sizes) -> dict[str, Series]:
    """Compare one stream with HTTP. The same server serves both."""
    with directory() as place, _both_servers(place) as (http, grpc_server):
        async with writers(http.host, http.port, MANY, MANY) as many:

            async def over_http(seconds: float) -> Slice:
                return await keep_calling(many, http.pid, seconds)

            loads = {
                STREAM: stream_load(grpc_server, MANY),
                f"one stream, {MOST} writers": stream_load(grpc_server, MOST, first=2 * MANY),
                HTTP: over_http,
            }
            return await in_turn(loads, sizes.rounds, sizes.slice_s)


async def _grpc(sizes: Sizes) -> dict[str, Series]:
    with directory() as place, _server(place) as ours, _echo(place) as echo:
        loads = {"Oncelog": grpc_load(ours, MANY), "an empty echo": grpc_load(echo, MANY)}
        return await in_turn(loads, sizes.rounds, sizes.slice_s)


# --- from memory ---------------------------------------------------------------------------------------


async def _from_memory() -> tuple[float, float]:
    print_progress("retries from memory …")
    with directory() as place:
        settings = ServerSettings(store=str(place / "memory.db"), port=0, grpc=False, development=True)
        async with Server(settings) as server:
            service = server.apis.ledger.service
            asked = [
                Write("acme", "", f"client-{number}", 1, os.urandom(16), (SetEntity(f"entity/{number}", b"v" * 100),))
                for number in range(RETRIES)
            ]
            first = await asyncio.gather(*(service.write(one, DEVELOPER) for one in asked))
            hits, look_ups = [], []
            clock = time.perf_counter_ns
            for one, told in zip(asked, first, strict=True):
                began = clock()
                again = await service.write(one, DEVELOPER)
                hits.append(clock() - began)
                assert isinstance(again, WriteSuccess)
                assert again == told
            cache, policy = server.log._cache, service.to_submission(asked[0], DEVELOPER).policy  # noqa: SLF001
            now_ms = time.time_ns() // 1_000_000
            for one in asked:
                identity = key_identity(service.to_submission(one, DEVELOPER))
                began = clock()
                found = cache.get(policy, identity, now_ms)
                look_ups.append(clock() - began)
                assert found is not None
            return median(hits) / 1000, median(look_ups) / 1000
