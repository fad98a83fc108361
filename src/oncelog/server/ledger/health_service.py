"""Health and reflection over gRPC. Nobody is asked for a credential there, so nobody may send much, or stay as many.

gRPC gathers a message before it is handed over, as long as those of the ledger may be. How many are gathered at a time
is what we can limit: so these calls are served as streams, and their messages taken one by one.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Any, Final, NoReturn
from weakref import WeakValueDictionary

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

Context = Any
"""grpc.aio.ServicerContext: its types are only half there."""

MESSAGE_BYTES_MAX: Final = 1024
"""They hold the name of a service, or of a type."""
READS_MAX: Final = 16
"""Messages that are taken at a time, over all callers of health."""
READS_PER_ADDRESS_MAX: Final = 4
"""The same of one address: who is slow makes no other wait."""
READ_TIMEOUT_S: Final = 2
"""How long a message for health may take to come. It comes with its call."""
READS_WAITING_MAX: Final = 400
"""Calls of health whose message has not arrived in full, over all callers. gRPC keeps up to 64 KiB for each."""
READS_WAITING_PER_ADDRESS_MAX: Final = 100
"""The same of one address, so that one address does not use up the calls of all."""
HEALTH_WATCHES_MAX: Final = 1000
REFLECTIONS_MAX: Final = 16
"""Streams at a time: each may have a message that comes."""
REFLECTION_TIMEOUT_S: Final = 60
"""How long one may ask nothing."""


class Health(health.aio.HealthServicer):
    """With limits of those who watch it, and of what they send."""

    def __init__(self, find_address: Callable[[Context], str]) -> None:
        super().__init__()
        self.watcher_count = 0
        self._find_address = find_address
        self._read_limit = asyncio.Semaphore(READS_MAX)
        self._read_limits: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._waiting: Counter[str] = Counter()
        """Calls of each address whose message has not arrived in full."""

    def new_handler(self) -> Any:
        """For a server."""
        serializer = health_pb2.HealthCheckResponse.SerializeToString
        handlers: dict[str, Any] = {
            "Check": grpc.stream_unary_rpc_method_handler(self._check, response_serializer=serializer),
            "Watch": grpc.stream_stream_rpc_method_handler(self._watch, response_serializer=serializer),
        }
        return grpc.method_handlers_generic_handler(health.SERVICE_NAME, handlers)

    async def _check(self, _: object, context: Context) -> Any:
        return await self.Check(await self._read_request(context), context)

    async def _watch(self, _: object, context: Context) -> None:
        if self.watcher_count >= HEALTH_WATCHES_MAX:
            message = f"at most {HEALTH_WATCHES_MAX} may watch at a time"
            await end_call(context, grpc.StatusCode.RESOURCE_EXHAUSTED, message)
        self.watcher_count += 1
        try:
            await self.Watch(await self._read_request(context), context)
        finally:
            self.watcher_count -= 1

    async def _read_request(self, context: Context) -> Any:
        address = self._find_address(context)
        if self._waiting.get(address, 0) >= READS_WAITING_PER_ADDRESS_MAX or self._waiting.total() >= READS_WAITING_MAX:
            message = "too many calls of health whose requests have not arrived in full"
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
    """What the services are, with a limit of those who ask, and of what they send."""

    def __init__(self, services: Sequence[str]) -> None:
        self._servicer: Any = reflection.aio.ReflectionServicer(services)
        self._stream_count = 0

    def new_handler(self) -> Any:
        """For a server."""
        serializer = reflection_pb2.ServerReflectionResponse.SerializeToString
        info: Any = grpc.stream_stream_rpc_method_handler(self._serve_info, response_serializer=serializer)
        return grpc.method_handlers_generic_handler(reflection.SERVICE_NAME, {"ServerReflectionInfo": info})

    async def _serve_info(self, _: object, context: Context) -> None:
        if self._stream_count >= REFLECTIONS_MAX:
            message = f"at most {REFLECTIONS_MAX} may ask at a time"
            await end_call(context, grpc.StatusCode.RESOURCE_EXHAUSTED, message)
        self._stream_count += 1
        try:
            async with aclosing(self._servicer.ServerReflectionInfo(_iterate_requests(context), context)) as answers:
                async for answer in answers:
                    async with asyncio.timeout(REFLECTION_TIMEOUT_S):
                        await context.write(answer)
        except TimeoutError:
            await end_call(context, grpc.StatusCode.DEADLINE_EXCEEDED, "the answers must be read")
        finally:
            self._stream_count -= 1


async def end_call(context: Context, *details: Any) -> NoReturn:
    """Ends a call with an error.

    gRPC keeps the exception by which it does that as long as the call, and the exception keeps all that it was raised
    in, the call too: nothing of it would go before a collection of garbage. So it must not know of any message.
    """
    try:
        await context.abort(*details)
    except grpc.aio.AbortError as ended:
        ended.__context__ = None
        raise
    raise AssertionError("an aborted call goes no further")


async def _iterate_requests(context: Context) -> AsyncIterator[Any]:
    while (data := await _read_message(context, REFLECTION_TIMEOUT_S)) is not None:
        yield await _parse_message(reflection_pb2.ServerReflectionRequest(), data, context)


async def _read_message(context: Context, seconds: float) -> bytes | None:
    """The next message of a call; None where there is none."""
    try:
        async with asyncio.timeout(seconds):
            data = await context.read()
    except TimeoutError:
        await end_call(context, grpc.StatusCode.DEADLINE_EXCEEDED, f"a message must come within {seconds} seconds")
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
        context, grpc.StatusCode.INVALID_ARGUMENT, f"the request must be a {message.DESCRIPTOR.full_name}"
    )
