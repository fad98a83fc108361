"""Loads of a ledger over gRPC: many callers on one channel, and one stream of writes."""

import asyncio
import itertools
import os
import time
from collections.abc import Iterator
from typing import Any

import grpc
import grpc.aio

from bench.http_load import ORGANIZATIONS
from bench.server import Serving
from bench.turns import SliceOf
from bench.wire import Slice, Watch
from oncelog.ledger.v1 import ledger_pb2 as pb


def grpc_load(server: Serving, callers: int) -> SliceOf:
    """Return a load of callers on one channel. Each caller numbers its transactions."""
    sequences: list[Iterator[int]] = [itertools.count(1) for _ in range(callers)]

    async def load(seconds: float) -> Slice:
        async with grpc.aio.insecure_channel(f"{server.host}:{server.port}") as channel:
            call: Any = channel.unary_unary("/oncelog.ledger.v1.Ledger/Write")
            await channel.channel_ready()
            waited: list[float] = []
            watch = Watch(server.pid)
            until = watch.began + seconds

            async def caller(number: int) -> None:
                now = time.perf_counter()
                while now < until:
                    began = now
                    answer = await call(_request(number, next(sequences[number])).SerializeToString())
                    now = time.perf_counter()
                    waited.append(now - began)
                    if answer[:1] != b"\x0a":  # the field `success`
                        raise RuntimeError(str(pb.WriteResponse.FromString(answer)))

            await asyncio.gather(*(caller(number) for number in range(callers)))
            return watch.slice(len(waited), waited)

    return load


def stream_load(server: Serving, writers: int, first: int = 0) -> SliceOf:
    """Return a load of writers, numbered from `first`, that share one stream. Each waits for the answer to its write.

    The writers whose answers have arrived together send their next writes in one message.
    """
    numbers = range(first, first + writers)
    sequences: dict[int, Iterator[int]] = {number: itertools.count(1) for number in numbers}

    async def load(seconds: float) -> Slice:
        async with grpc.aio.insecure_channel(f"{server.host}:{server.port}") as channel:
            await channel.channel_ready()
            call: Any = channel.stream_stream("/oncelog.ledger.v1.Ledger/StreamWrites")()
            waited: list[float] = []
            watch = Watch(server.pid)
            until = watch.began + seconds
            ready = list(numbers)
            in_flight: list[tuple[int, float]] = []
            answered = 0
            while True:
                now = time.perf_counter()
                if now < until:
                    writes = [pb.StreamedWrite(write=_request(number, next(sequences[number]))) for number in ready]
                    in_flight += [(number, now) for number in ready]
                    await call.write(pb.StreamWritesRequest(writes=writes).SerializeToString())
                elif answered == len(in_flight):
                    break
                answers = pb.StreamWritesResponse.FromString(await call.read()).answers
                now = time.perf_counter()
                for answer in answers:
                    if not answer.response.HasField("success"):
                        raise RuntimeError(str(answer))
                ended = in_flight[answered : answered + len(answers)]
                answered += len(answers)
                waited += [now - began for _, began in ended]
                ready = [number for number, _ in ended]
            await call.done_writing()
            return watch.slice(len(waited), waited)

    return load


def _request(number: int, sequence: int) -> pb.WriteRequest:
    setting = pb.SetEntity(key=f"entity/{number}/{sequence % 10}", value=b"v" * 100)
    return pb.WriteRequest(
        organization=f"org-{number % ORGANIZATIONS}",
        client_id=f"writer-{number}",
        sequence=sequence,
        idempotency_key=os.urandom(16),
        operations=[pb.Operation(set_entity=setting)],
    )
