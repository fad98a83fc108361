"""Health and reflection over gRPC. They need no credential, so the size and number of calls are limited.

gRPC buffers a whole message, up to the ledger's size limit, before handing it over. This service can only limit how
many messages gRPC buffers at a time. It therefore serves these calls as streams and reads messages one by one.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any, Final, NoReturn
from weakref import WeakValueDictionary

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

Context = Any
"""A `grpc.aio.ServicerContext`, whose type annotations are incomplete."""

MESSAGE_BYTES_MAX: Final = 1024
"""Maximum size of a request, which contains the name of a service or type."""
READS_MAX: Final = 16
"""Concurrent reads of health requests, across all addresses."""
READS_PER_ADDRESS_MAX: Final = 4
"""Concurrent reads per address, so that slow callers do not delay other addresses."""
READ_TIMEOUT_S: Final = 2
"""Timeout for a health call's message, which clients send together with the call."""
READS_WAITING_MAX: Final = 400
"""Health calls whose message has not fully arrived yet, across all addresses. gRPC buffers up to 64 KiB for each."""
READS_WAITING_PER_ADDRESS_MAX: Final = 100
"""The same limit per address, so that one address cannot use up the total."""
HEALTH_WATCHES_MAX: Final = 1000
"""Concurrent `Watch` calls."""
REFLECTIONS_MAX: Final = 16
"""Concurrent reflection streams, each with one buffered message."""
REFLECTION_TIMEOUT_S: Final = 60
"""Idle timeout of a reflection stream."""


class StreamLimit:
    """Limits how many streams of one kind are open at a time."""

    def __init__(self, name: str, count_max: int) -> None:
        self.count = 0
        self._name = name
        self._count_max = count_max

    @asynccontextmanager
    async def admit(self, context: Context) -> AsyncIterator[None]:
        """Count a stream while the block runs. Ends the call if too many are open."""
        if self.count >= self._count_max:
            message = f"too many {self._name}: at most {self._count_max} at a time"
            await end_call(context, grpc.StatusCode.RESOURCE_EXHAUSTED, message)
        self.count += 1
        try:
            yield
        finally:
            self.count -= 1


class Health(health.aio.HealthServicer):
    """The health service, with limits on watchers and messages."""

    def __init__(self, find_address: Callable[[Context], str]) -> None:
        super().__init__()
        self.watchers = StreamLimit("health watches", HEALTH_WATCHES_MAX)
        self._find_address = find_address
        self._read_limit = asyncio.Semaphore(READS_MAX)
        self._read_limits: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._waiting: Counter[str] = Counter()
        """How many calls of each address are waiting for the rest of their message."""

    def new_handler(self) -> Any:
        """Return the handler to add to a server."""
        serializer = health_pb2.HealthCheckResponse.SerializeToString
        handlers: dict[str, Any] = {
            "Check": grpc.stream_unary_rpc_method_handler(self._check, response_serializer=serializer),
            "Watch": grpc.stream_stream_rpc_method_handler(self._watch, response_serializer=serializer),
        }
        return grpc.method_handlers_generic_handler(health.SERVICE_NAME, handlers)

    async def _check(self, _: object, context: Context) -> Any:
        return await self.Check(await self._read_request(context), context)

    async def _watch(self, _: object, context: Context) -> None:
        async with self.watchers.admit(context):
            await self.Watch(await self._read_request(context), context)

    async def _read_request(self, context: Context) -> Any:
        address = self._find_address(context)
        if self._waiting.get(address, 0) >= READS_WAITING_PER_ADDRESS_MAX or self._waiting.total() >= READS_WAITING_MAX:
            message = "too many health calls with incomplete requests"
            await end_call(context, grpc.StatusCode.RESOURCE_EXHAUSTED, message)
        own = self._read_limits.get(address) or asyncio.Semaphore(READS_PER_ADDRESS_MAX)
        self._read_limits[address] = own
        self._waiting[address] += 1
        try:
            async with own, self._read_limit:
                data = await _read_message(context, READ_TIMEOUT_S)
        finally:
            self._waiting[address] -= 1
            if not self._waiting[address]:
                del self._waiting[address]
        return await _parse_message(health_pb2.HealthCheckRequest(), data, context)


class Reflection:
    """The reflection service, with limits on streams and messages."""

    def __init__(self, services: Sequence[str]) -> None:
        self._servicer: Any = reflection.aio.ReflectionServicer(services)
        self._streams = StreamLimit("reflection streams", REFLECTIONS_MAX)

    def new_handler(self) -> Any:
        """Return the handler to add to a server."""
        serializer = reflection_pb2.ServerReflectionResponse.SerializeToString
        info: Any = grpc.stream_stream_rpc_method_handler(self._serve_info, response_serializer=serializer)
        return grpc.method_handlers_generic_handler(reflection.SERVICE_NAME, {"ServerReflectionInfo": info})

    async def _serve_info(self, _: object, context: Context) -> None:
        async with self._streams.admit(context):
            info = self._servicer.ServerReflectionInfo(_iterate_requests(context), context)
            try:
                async with aclosing(info) as answers:
                    async for answer in answers:
                        async with asyncio.timeout(REFLECTION_TIMEOUT_S):
                            await context.write(answer)
            except TimeoutError:
                reason = f"the client did not read an answer within {REFLECTION_TIMEOUT_S} seconds"
                await end_call(context, grpc.StatusCode.DEADLINE_EXCEEDED, reason)


async def end_call(context: Context, *details: Any) -> NoReturn:
    """End a call with an error.

    gRPC keeps the exception that `abort` raises for as long as the call exists. The exception refers to the frames that
    raised it, and thus to the call. Only a garbage collection frees this cycle, so the exception must not refer to a
    message.
    """
    try:
        await context.abort(*details)
    except grpc.aio.AbortError as ended:
        ended.__context__ = None
        raise
    raise AssertionError("gRPC did not abort the call")


async def _iterate_requests(context: Context) -> AsyncIterator[Any]:
    while (data := await _read_message(context, REFLECTION_TIMEOUT_S)) is not None:
        yield await _parse_message(reflection_pb2.ServerReflectionRequest(), data, context)


async def _read_message(context: Context, seconds: float) -> bytes | None:
    """Return a call's next message, or None at the end of the stream."""
    try:
        async with asyncio.timeout(seconds):
            data = await context.read()
    except TimeoutError:
        await end_call(context, grpc.StatusCode.DEADLINE_EXCEEDED, f"no message arrived within {seconds} seconds")
    if not isinstance(data, bytes):  # grpc.aio.EOF
        return None
    if len(data) > MESSAGE_BYTES_MAX:
        del data
        reason = f"a message must have at most {MESSAGE_BYTES_MAX} bytes"
        await end_call(context, grpc.StatusCode.INVALID_ARGUMENT, reason)
    return data


async def _parse_message(message: Message, data: bytes | None, context: Context) -> Any:
    try:
        if data is not None:
            message.ParseFromString(data)
            return message
    except (DecodeError, UnicodeDecodeError):
        pass
    return await end_call(
        context,
        grpc.StatusCode.INVALID_ARGUMENT,
        f"the request must be a message of type {message.DESCRIPTOR.full_name}",
    )
