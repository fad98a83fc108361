"""A client of `StreamWrites`, whose answers have the same form as those of the other clients."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final

import grpc
import grpc.aio

from deadlines import soon
from oncelog.ledger.v1 import ledger_pb2 as pb
from server.ledger.ledger_servers import Connections, key
from server.ledger.ledger_transports import (
    GRPC,
    CallError,
    GrpcWire,
    Json,
    members_of,
    message_of,
    normalize,
    put,
    rpc_error,
)

_STATUS_NAMES: Final = {status.value[0]: status.name for status in grpc.StatusCode}


class WriteStream:
    """One open stream."""

    def __init__(self, wire: GrpcWire, *, metadata: Sequence[tuple[str, str]] = ()) -> None:
        self.call: Any = wire.stub.StreamWrites(metadata=(*wire.metadata, *metadata))
        self._received: list[Any] = []
        self.message_sizes: list[int] = []
        """Number of answers in each received message."""

    async def send(self, *writes: Mapping[str, Any]) -> None:
        """Send writes in one message. A write may have a `traceparent`."""
        await soon(self.call.write(pb.StreamWritesRequest(writes=[streamed_write(one) for one in writes])))

    async def answers(self, count: int) -> list[Json | CallError]:
        """Return the next answers: like those of `Ledger.write`, or the error that it would raise."""
        while len(self._received) < count:
            message = await soon(self.call.read())
            if message is grpc.aio.EOF:
                raise EOFError(f"the stream has ended after {len(self._received)} of {count} answers")
            self.message_sizes.append(len(message.answers))
            self._received += message.answers
        found, self._received = self._received[:count], self._received[count:]
        return [_to_answer(one) for one in found]

    async def request(self, *writes: Mapping[str, Any]) -> list[Json | CallError]:
        """Send writes in one message and return their answers."""
        await self.send(*writes)
        return await self.answers(len(writes))

    async def finish(self) -> None:
        """Tell the server that no more writes follow."""
        await soon(self.call.done_writing())

    async def end(self) -> CallError | None:
        """Wait for the end of the stream, which has no more answers. Return its error, if any."""
        assert self._received == []
        try:
            assert await soon(self.call.read()) is grpc.aio.EOF
        except grpc.aio.AioRpcError as error:
            return rpc_error(error)
        if await soon(self.call.code()) is grpc.StatusCode.OK:
            return None
        return rpc_error(
            grpc.aio.AioRpcError(
                await self.call.code(),
                await self.call.initial_metadata(),
                await self.call.trailing_metadata(),
                await self.call.details(),
            )
        )

    async def cancel(self) -> None:
        self.call.cancel()
        await asyncio.wait([asyncio.ensure_future(self.call.code())])


def open_stream(server: Connections, credential: str | None = None, **options: Any) -> WriteStream:
    return WriteStream(server.wire(GRPC, credential), **options)


def write_of(sequence: int, *operations: Json, client_id: str = "app", **members: Any) -> Json:
    """Return a write. The sequence determines its key, and by default its operation."""
    made = {
        "organization": "acme",
        "client_id": client_id,
        "sequence": sequence,
        "idempotency_key": key(sequence),
        "operations": list(operations) or [put(f"entity/{sequence}", b"v")],
        **members,
    }
    return {name: value for name, value in made.items() if value not in ("", b"")}


def streamed_write(members: Mapping[str, Any]) -> pb.StreamedWrite:
    write = message_of(pb.WriteRequest, members)
    return pb.StreamedWrite(write=write, traceparent=members.get("traceparent", ""))


def _to_answer(answer: pb.StreamedAnswer) -> Json | CallError:
    if answer.WhichOneof("answer") == "response":
        return normalize(members_of(answer.response))
    error = answer.error
    details = dict(error.details)
    retry = details.get("retry-after-ms")
    found = CallError(
        _STATUS_NAMES[error.code],
        error.message,
        details.get("field"),
        error.reason,
        None if retry is None else int(retry),
    )
    found.details = {name.replace("-", "_"): value for name, value in {**details, "oncelog-code": error.reason}.items()}
    return found
