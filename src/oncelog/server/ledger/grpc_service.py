"""The Ledger API over gRPC: the service `oncelog.ledger.v1.Ledger`, together with health and reflection services."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from functools import lru_cache, partial
from typing import Any, Final, NoReturn
from urllib.parse import unquote

import grpc
import grpc.aio
from google.protobuf.message import Message
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection

from oncelog import error_codes
from oncelog.engine.batch_report import RequestArrival
from oncelog.errors import SettingsError
from oncelog.ledger.v1 import ledger_pb2 as pb
from oncelog.server import logger
from oncelog.server.auth.principal import Principal
from oncelog.server.auth_gate import OpenConnections
from oncelog.server.connection_limiter import Caller, CountedStream
from oncelog.server.endpoint import check_single_authorization, parse_bearer
from oncelog.server.errors import ApiError, shutdown_error
from oncelog.server.ledger import grpc_codec, reads
from oncelog.server.ledger.grpc_codec import GRPC_STATUS, SERVICE, parse_message, to_call_error, to_error_metadata
from oncelog.server.ledger.grpc_tracing import end_call_span, get_trace_headers, start_call_span
from oncelog.server.ledger.grpc_write_stream import GrpcWriteStream
from oncelog.server.ledger.health_service import Health, Reflection, end_call
from oncelog.server.ledger.reads import Read
from oncelog.server.ledger.service import LedgerService
from oncelog.server.ledger.write_batcher import DecodeWrite, WriteBatcher
from oncelog.server.limits import LONG_FRAME_BYTES
from oncelog.server.live_streams import LiveStream
from oncelog.server.settings import ServerSettings

CALLS_MAX: Final = 1000
"""Maximum number of concurrent calls on one connection."""
IDLE_MS: Final = 60_000
"""Timeout of a connection without calls. gRPC does not reveal which connections are authenticated."""
METADATA_BYTES_MAX: Final = 32 * 1024
"""Large enough for the longest token that the server accepts."""
STOP_NOTICE_S: Final = 0.2
"""How long health watchers and new callers have to learn that the server is stopping."""
QUIET_S: Final = 0.03
"""Time without a new call after which the server assumes that no more calls are on their way."""
MESSAGE_TIMEOUT_S: Final = 60
"""Timeout for receiving a call's message."""
CLOSE_TIMEOUT_S: Final = 1.0
"""Timeout for closing a stream whose client does not read."""
Context = Any
"""A `grpc.aio.ServicerContext`, whose type annotations are incomplete."""
CallHandler = Callable[[Any, Principal], Awaitable[Message | bytes]]
"""Answers a call, given its message and principal. If the answer is bytes, it is an already encoded message."""
StreamHandler = Callable[[Any, Principal], Awaitable[None]]
"""Serves a stream, given its context and principal. Raises ApiError to end it with an error."""
Certificate = Callable[[], tuple[bytes, bytes] | None]
"""Returns the current private key and certificate chain as PEM, or None without TLS."""
AddressLookup = Callable[[str | None, str | None], str]
"""Returns the address under which failed attempts are counted, given the peer address and `X-Forwarded-For`."""


class LedgerGrpcService(OpenConnections[LiveStream]):
    """The gRPC service, which authenticates every call. `connections` contains the open streams."""

    def __init__(
        self,
        service: LedgerService,
        settings: ServerSettings,
        *,
        certificate: Certificate,
        find_address: AddressLookup,
        open_stream: Callable[[str], CountedStream],
    ) -> None:
        super().__init__(service.auth_gate)
        self._service = service
        self._write_batcher = WriteBatcher(service)
        self._settings = settings
        self._certificate = certificate
        self._lookup_address = find_address
        self._open_stream = open_stream
        self.connections_max = min(service.limits.grpc_connections_max, service.limits.connections_max)
        self._server: Any = None
        self._health = Health(self._get_address)
        self._calls: set[asyncio.Task[Any]] = set()
        self._read_deadlines: dict[asyncio.Task[Any], float | None] = {}
        """Deadlines of calls whose message has not arrived. None once the deadline has passed."""
        self._call_count = 0
        """Number of calls so far."""
        self.port = 0
        """The port that the service listens on, or 0 if it is not listening."""

    # --- from start to stop

    async def start(self) -> None:
        """Start listening for calls. Raises SettingsError if the address cannot be used."""
        limits = self._service.limits
        self._server = grpc.aio.server(
            handlers=[grpc.method_handlers_generic_handler(SERVICE, self._new_handlers())],
            options=[
                ("grpc.max_receive_message_length", limits.frame_bytes_max),
                ("grpc.max_concurrent_streams", CALLS_MAX),
                ("grpc.max_allowed_incoming_connections", self.connections_max),
                ("grpc.server_handshake_timeout_ms", limits.connect_timeout_ms),
                ("grpc.max_connection_idle_ms", IDLE_MS),
                ("grpc.max_metadata_size", METADATA_BYTES_MAX),
                ("grpc.absolute_max_metadata_size", METADATA_BYTES_MAX),
                ("grpc.keepalive_time_ms", limits.heartbeat_ms),
                ("grpc.http2.min_recv_ping_interval_without_data_ms", 1000),
                ("grpc.so_reuseport", 0),
            ],
        )
        handlers = [self._health.new_handler()]
        if self._settings.openapi:
            handlers.append(Reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)).new_handler())
        self._server.add_generic_rpc_handlers(handlers)
        await self.set_ready(is_ready=True)
        host = self._settings.host
        place = f"[{host}]:{self._settings.ledger_port}" if ":" in host else f"{host}:{self._settings.ledger_port}"
        try:
            self.port = self._listen(place)
            await self._server.start()
        except RuntimeError as error:
            raise SettingsError(
                f"cannot listen on {place} for gRPC; stop the program that uses it, or set another grpc_port"
            ) from error

    def _listen(self, place: str) -> int:
        certificate = self._certificate()
        if certificate is None:
            return int(self._server.add_insecure_port(place))

        def current() -> Any:
            """Return the certificate for a handshake, or None to keep the previous one. Runs on a gRPC thread."""
            now = self._certificate()
            return None if now is None else grpc.ssl_server_certificate_configuration([now])

        initial = grpc.ssl_server_certificate_configuration([certificate])
        return int(self._server.add_secure_port(place, grpc.dynamic_ssl_server_credentials(initial, current)))

    async def set_ready(self, *, is_ready: bool) -> None:
        """Set the readiness that the health service reports."""
        response = health_pb2.HealthCheckResponse
        for name in ("", SERVICE):
            await self._health.set(name, response.SERVING if is_ready else response.NOT_SERVING)

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls and wait for running ones."""
        if self._server is None:
            return
        await self._health.enter_graceful_shutdown()
        for watcher in list(self.connections):
            watcher.stop(shutdown_error())
        # gRPC's own grace period would also wait for health watchers, which have already received the status.
        if self._calls:
            await asyncio.wait(self._calls, timeout=grace_s)
        await self._wait_for_quiet()
        await self._server.stop(
            CLOSE_TIMEOUT_S if self.connections else STOP_NOTICE_S if self._health.watchers.count else 0
        )

    async def _wait_for_quiet(self) -> None:
        """Wait until new calls stop arriving. gRPC would cancel the calls that it has not passed to the server yet."""
        until = asyncio.get_running_loop().time() + STOP_NOTICE_S
        previous_count = -1
        while previous_count != self._call_count and asyncio.get_running_loop().time() < until:
            previous_count = self._call_count
            await asyncio.sleep(QUIET_S)

    # --- calls

    def _new_handlers(self) -> dict[str, Any]:
        handlers: dict[str, tuple[type[Message], CallHandler]] = {
            "Write": (pb.WriteRequest, partial(self._submit_write, grpc_codec.decode_write)),
            "BatchWrite": (pb.BatchWriteRequest, partial(self._submit_write, grpc_codec.decode_batch)),
            **{name: (kind, partial(self._read, read, encode)) for name, (kind, read, encode) in _READS.items()},
        }
        # Without a deserializer, a malformed message gets an error of the Ledger API instead of gRPC's internal error.
        # On the wire, a stream with one message is the same as a unary call. Serving calls as streams makes it possible
        # to authenticate the caller before reading the message.
        unary: dict[str, Any] = {
            name: grpc.stream_unary_rpc_method_handler(self._new_handler(kind, answer))
            for name, (kind, answer) in handlers.items()
        }
        return {
            **unary,
            "StreamWrites": grpc.stream_stream_rpc_method_handler(self._stream_writes),
            "WatchBlocks": grpc.stream_stream_rpc_method_handler(self._watch_blocks),
        }

    def _new_handler(self, kind: type[Message], handle: CallHandler) -> Callable[[object, Context], Awaitable[bytes]]:
        """Return the handler of a method. It is a function, because gRPC would inspect a `partial` on every call."""

        async def call_traced(_: object, context: Context) -> bytes:
            with self._trace_call(kind, context):
                return await call(_, context)

        async def call(_: object, context: Context) -> bytes:
            self._count_call()
            try:
                answer = await self._serve_call(kind, handle, context)
            except Exception as error:  # noqa: BLE001 - not asyncio.CancelledError, which means that the caller is gone
                await self._abort(context, to_call_error(error))
            self._service.counts.requests["ledger", "grpc", "ok"] += 1
            return answer

        chosen = call if self.auth_gate.tracer is None else call_traced

        async def call_measured(_: object, context: Context) -> bytes:
            with RequestArrival():
                return await chosen(_, context)

        return call_measured if self.auth_gate.measures_latency else chosen

    def _count_call(self) -> None:
        """Register the current call, which a server that stops waits for."""
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - gRPC runs every call in a task
        self._call_count += 1
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    @contextmanager
    def _trace_call(self, kind: type[Message], context: Context) -> Iterator[None]:
        """Trace a call. Calls that fail end with an exception."""
        tracer = self.auth_gate.tracer
        assert tracer is not None  # noqa: S101 - `_new_handler` checks it
        span = start_call_span(tracer, kind.DESCRIPTOR.name.removesuffix("Request"), get_trace_headers(tracer, context))
        try:
            with span.activate():
                yield
        finally:
            end_call_span(span, context.code() or grpc.StatusCode.OK)

    async def _serve_call(self, kind: type[Message], handle: CallHandler, context: Context) -> bytes:
        """Serve a call. Not part of `call`, whose frame is kept alive by the error that it sends (see `end_call`)."""
        principal = self._authenticate(context)
        request = await self._read_message(kind, context)
        answer = await handle(request, self.auth_gate.recheck_principal(principal))
        return answer if isinstance(answer, bytes) else answer.SerializeToString()

    async def _abort(self, context: Context, error: ApiError) -> NoReturn:
        """End the call with an error. The trailing metadata contain the details that HTTP has in the body."""
        self._service.counts.requests["ledger", "grpc", error.code] += 1
        metadata = {"oncelog-code": error.code, **to_error_metadata(error)}
        status, message = GRPC_STATUS[error.code], error.message
        del error  # its traceback refers to the frames of the call
        await end_call(context, status, message, tuple(metadata.items()))

    def _authenticate(self, context: Context) -> Principal:
        """Return the principal of a call. Raises ApiError if its credential is missing or wrong."""
        headers = [value for name, value in context.invocation_metadata() or () if name == "authorization"]
        check_single_authorization(headers)
        credential = parse_bearer(headers[0]) if headers else None
        return self.auth_gate.authenticate(credential, Caller(self._get_address(context)))

    def _get_address(self, context: Context) -> str:
        forwarded = [value for name, value in context.invocation_metadata() or () if name == "x-forwarded-for"]
        return self._lookup_address(_parse_peer(context.peer()), ",".join(forwarded) if forwarded else None)

    async def _read_message(self, kind: type[Message], context: Context) -> Any:
        """Read a call's only message. Raises ApiError if it is malformed or does not arrive within MESSAGE_TIMEOUT_S.

        `cancel_overdue` enforces the timeout of all calls, because a timer per call would cost as much as the read.
        """
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - as in `_new_handler`
        self._read_deadlines[task] = time.monotonic() + MESSAGE_TIMEOUT_S
        try:
            data = await context.read()
        except asyncio.CancelledError:
            if self._read_deadlines[task] is not None:
                raise
            task.uncancel()
            raise ApiError(
                error_codes.BAD_REQUEST, f"the message must arrive within {MESSAGE_TIMEOUT_S} seconds"
            ) from None
        finally:
            del self._read_deadlines[task]
        return parse_message(kind, data)

    def cancel_overdue(self) -> None:
        """Cancel reads whose deadline has passed, and mark them with None. Called about once a second."""
        now_s = time.monotonic()
        for task, until_s in list(self._read_deadlines.items()):
            if until_s is not None and until_s < now_s:
                self._read_deadlines[task] = None
                task.cancel()

    def _submit_write(self, decode: DecodeWrite, request: Any, principal: Principal) -> Awaitable[bytes]:
        """Submit a write. The batcher encodes the answer when the verdict arrives, so the call waits only once."""
        self.auth_gate.check_open()
        if request.ByteSize() > LONG_FRAME_BYTES:
            self._write_batcher.flush()
            return self._submit_long_write(decode, request, principal)
        return self._write_batcher.write(decode, request, principal)

    async def _submit_long_write(self, decode: DecodeWrite, request: Any, principal: Principal) -> bytes:
        """Decode a long write in a thread, so that other calls do not wait for it."""
        write = await asyncio.to_thread(decode, request)
        answer = await self._service.write(write, principal)
        return grpc_codec.encode_response(answer)

    async def _read(self, read: Read, encode: Callable[[Any], Message], request: Any, principal: Principal) -> Message:
        values = {}
        for field in read.fields:
            name = field.previous_name or field.name
            values[field.name] = field.convert(getattr(request, name), name)
        scope = read.authorize(request.organization, request.vault, principal)
        return encode(await read.run(self._service, scope, principal, values))

    # --- streams

    async def _watch_blocks(self, _: object, context: Context) -> None:
        """Follow blocks."""
        await self._serve_stream(context, self._serve_block_stream)

    async def _stream_writes(self, _: object, context: Context) -> None:
        """Commit the writes of a stream. A server that stops waits for it, as for a call."""
        self._count_call()
        await self._serve_stream(context, self._serve_writes)

    async def _serve_stream(self, context: Context, serve: StreamHandler) -> None:
        """Authenticate and count a stream, and serve it until it ends."""
        stream: CountedStream | None = None
        try:
            # Streams are counted after authentication, so that anonymous calls do not use up an address's limit.
            principal = self._authenticate(context)
            stream = self._open_stream(self._get_address(context))
            stream.set_principal(principal)
            await serve(context, principal)
        except ApiError as error:
            await self._abort_stream(context, error)
        finally:
            if stream is not None:
                stream.close()

    async def _serve_writes(self, context: Context, principal: Principal) -> None:
        self.auth_gate.check_open()
        stream = GrpcWriteStream(
            self._service,
            self._write_batcher,
            context,
            principal,
            get_trace_headers(self.auth_gate.tracer, context),
        )
        self.connections.add(stream)
        try:
            error = await stream.serve()
        except Exception as raised:  # noqa: BLE001 - as in `_new_handler`
            error = to_call_error(raised)
        finally:
            self.connections.discard(stream)
        if error is not None:
            await self._abort_stream(context, error)

    async def _serve_block_stream(self, context: Context, principal: Principal) -> None:
        request = await self._read_message(pb.WatchBlocksRequest, context)
        self.auth_gate.check_open()
        scope = reads.BLOCKS.authorize(request.organization, request.vault, principal)
        await self._serve_blocks(context, principal, scope, request)

    async def _serve_blocks(self, context: Context, principal: Principal, scope: str, request: Any) -> None:
        watcher = LiveStream(principal, [scope], self._service.limits.heartbeat_ms)
        self.connections.add(watcher)
        try:
            error = await watcher.run(self._send_blocks(watcher, context, scope, request))
            if error is not None:
                await self._abort_stream(context, error)
        except TimeoutError:
            logger.warning("a slow reader is closed", extra={"actor": principal.actor})
            self._service.counts.slow_readers_closed += 1
            reason = "the client reads too slowly; follow again from the last height"
            await self._abort_stream(context, ApiError(error_codes.SERVER_BUSY, reason))
        finally:
            self.connections.discard(watcher)

    async def _send_blocks(self, watcher: LiveStream, context: Context, scope: str, request: Any) -> None:
        """Send blocks. Writes to the context instead of yielding, in order to time out slow readers."""
        await reads.check_height(self._service, scope, request.after_height, request.epoch)
        self._service.counts.requests["ledger", "grpc", "ok"] += 1
        async with aclosing(reads.follow_blocks(self._service, scope, request.after_height)) as batches:
            async for blocks in batches:
                for block in blocks:
                    await watcher.wait_bounded(context.write(pb.Block(**block).SerializeToString()))

    async def _abort_stream(self, context: Context, error: ApiError) -> NoReturn:
        """End a stream with an error, sent after the blocks.

        If the client does not read, the call ends without waiting for it. gRPC keeps the error until the client reads
        or disconnects.
        """
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._abort(context, error)
        except TimeoutError:
            raise asyncio.CancelledError from None


_READS: Final[dict[str, tuple[type[Message], Read, Callable[[Any], Message]]]] = {
    "GetClientState": (
        pb.GetClientStateRequest,
        reads.CLIENT_STATE,
        lambda members: pb.GetClientStateResponse(**members),
    ),
    "GetEntity": (pb.GetEntityRequest, reads.ENTITY, lambda members: pb.GetEntityResponse(**members)),
    "ListEntities": (pb.ListEntitiesRequest, reads.ENTITIES, lambda members: pb.ListEntitiesResponse(**members)),
    "ListRelationships": (
        pb.ListRelationshipsRequest,
        reads.RELATIONSHIPS,
        lambda members: pb.ListRelationshipsResponse(**members),
    ),
    "CheckRelationship": (
        pb.CheckRelationshipRequest,
        reads.RELATIONSHIP,
        lambda members: pb.CheckRelationshipResponse(**members),
    ),
    "GetTransaction": (pb.GetTransactionRequest, reads.TRANSACTION, grpc_codec.encode_transaction),
    "GetBlock": (pb.GetBlockRequest, reads.BLOCK, lambda members: pb.Block(**members)),
    "GetProof": (pb.GetProofRequest, reads.PROOF, grpc_codec.encode_proof),
}
"""Request type, operation and encoder of each read method."""


@lru_cache(maxsize=4096)  # many calls share a connection
def _parse_peer(peer: str) -> str | None:
    """Return the address in `ipv4:10.0.0.1:5000` or `ipv6:%5B::1%5D:5000`, or None for any other kind of peer."""
    kind, _, rest = peer.partition(":")
    return unquote(rest.rpartition(":")[0]).strip("[]") if kind in ("ipv4", "ipv6") else None
