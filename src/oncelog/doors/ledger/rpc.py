"""The ledger door over gRPC: the service `oncelog.ledger.v1.Ledger`, with health and reflection beside it."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import aclosing
from functools import lru_cache
from typing import Any, Final, NoReturn
from urllib.parse import unquote

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection
from msgspec import Struct

from oncelog import codes
from oncelog.doors.connections import Caller, CountedStream
from oncelog.doors.entrance import has_ended, renew_each
from oncelog.doors.faults import UNREADABLE, DoorError, error_of, stopping
from oncelog.doors.ledger import messages
from oncelog.doors.ledger.anyone import Health, Reflection, end_call
from oncelog.doors.ledger.door import LedgerDoor
from oncelog.doors.ledger.together import Read, Together
from oncelog.doors.limits import LONG_FRAME_BYTES
from oncelog.doors.principal import Principal
from oncelog.doors.requests import bearer_of, check_single_authorization
from oncelog.errors import OncelogError, SettingsError
from oncelog.ledger.v1 import ledger_pb2 as pb
from oncelog.stores.protocol import RelationshipQuery

logger: Final = logging.getLogger("oncelog.doors")

SERVICE: Final = "oncelog.ledger.v1.Ledger"
STATUS: Final = {
    codes.BAD_REQUEST: grpc.StatusCode.INVALID_ARGUMENT,
    codes.AUTH_FAILED: grpc.StatusCode.UNAUTHENTICATED,
    codes.FORBIDDEN: grpc.StatusCode.PERMISSION_DENIED,
    codes.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    codes.HISTORY_CHANGED: grpc.StatusCode.FAILED_PRECONDITION,
    codes.RATE_LIMITED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    codes.SERVER_BUSY: grpc.StatusCode.UNAVAILABLE,
    codes.READ_ONLY: grpc.StatusCode.UNAVAILABLE,
    codes.QUOTA_EXCEEDED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    codes.SERVER_ERROR: grpc.StatusCode.UNAVAILABLE,
}
"""The one table from the doors' errors to gRPC's."""
CALLS_MAX: Final = 1000
"""At a time, on one connection."""
IDLE_MS: Final = 60_000
"""Longest time that a connection without a call is kept. gRPC does not tell which connections are authenticated."""
METADATA_BYTES_MAX: Final = 32 * 1024
"""So that a token of the length that we allow comes through."""
TELLING_S: Final = 0.2
"""For those who watch our health, or have just called, to hear that we stop."""
SILENT_S: Final = 0.03
"""When nobody has called for so long, nobody is on his way."""
BODY_S: Final = 60
"""How long the message of a call may take to come."""
CLOSING_S: Final = 1.0
"""How long one who does not read may take to be closed."""
Context = Any
"""grpc.aio.ServicerContext: its types are only half there."""
Answer = Callable[[Any, Principal], Awaitable[Message | bytes]]
"""What a call is answered with, by its message and who sent it; bytes are a message as it is sent."""
Certificate = Callable[[], tuple[bytes, bytes] | None]
"""Key and chain, in PEM form, as they are now; None without TLS."""
AddressOf = Callable[[str | None, str | None], str]
"""What failed attempts are counted by: of the peer's address, and of what a proxy says about whom it speaks for."""


class LedgerRpc:
    """The service. Who comes is asked at every call."""

    def __init__(
        self,
        door: LedgerDoor,
        *,
        host: str,
        port: int,
        with_reflection: bool,
        certificate: Certificate,
        address_of: AddressOf,
        open_stream: Callable[[str], CountedStream],
    ) -> None:
        self._door = door
        self._together = Together(door)
        self._host = host
        self._wanted_port = port
        self._with_reflection = with_reflection
        self._certificate = certificate
        self._address_of = address_of
        self._open_stream = open_stream
        self.connections_max = door.limits.connections_max
        self._server: Any = None
        self._health: Any = None
        self._watchers: dict[asyncio.Task[Any], _Watcher] = {}
        self._calls: set[asyncio.Task[Any]] = set()
        self._reading: dict[asyncio.Task[Any], float | None] = {}
        """Who waits for a message, and until when; None for who has waited too long."""
        self._hurrying: asyncio.TimerHandle | None = None
        self._came = 0
        """How many calls there have been."""
        self._is_closing = False
        self.port = 0
        """Where it listens."""

    def __len__(self) -> int:
        """Readers who follow blocks."""
        return len(self._watchers)

    # --- from start to stop

    async def start(self) -> None:
        """Listens. Raises SettingsError."""
        limits = self._door.limits
        self._server = grpc.aio.server(
            handlers=[grpc.method_handlers_generic_handler(SERVICE, self._handlers())],
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
        self._health = Health(self._address)
        others = [self._health.handler()]
        if self._with_reflection:
            names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
            others.append(Reflection(names).handler())
        self._server.add_generic_rpc_handlers(others)
        await self.set_ready(is_ready=True)
        host = f"[{self._host}]" if ":" in self._host else self._host
        place = f"{host}:{self._wanted_port}"
        try:
            self.port = self._listen(place)
            await self._server.start()
        except RuntimeError as error:
            raise SettingsError(f"cannot listen on {place} for gRPC: is it taken? Set grpc_port") from error

    def _listen(self, place: str) -> int:
        certificate = self._certificate()
        if certificate is None:
            return int(self._server.add_insecure_port(place))

        def current() -> Any:
            """Asked for at every handshake, on a thread of gRPC's. None is the one that it has."""
            now = self._certificate()
            return None if now is None else grpc.ssl_server_certificate_configuration([now])

        initial = grpc.ssl_server_certificate_configuration([certificate])
        return int(self._server.add_secure_port(place, grpc.dynamic_ssl_server_credentials(initial, current)))

    async def set_ready(self, *, is_ready: bool) -> None:
        """What those are told who ask for health."""
        if self._health is not None:
            status = health_pb2.HealthCheckResponse
            now = status.SERVING if is_ready else status.NOT_SERVING
            for name in ("", SERVICE):
                await self._health.set(name, now)

    async def stop(self, grace_s: float) -> None:
        """Takes no more calls, and waits for those that are under way."""
        self._is_closing = True
        if self._server is None:
            return
        await self._health.enter_graceful_shutdown()
        for task in list(self._watchers):
            self._send_away(task, stopping())
        # Not gRPC's own grace: whoever watches our health would use it up, and is told enough already.
        if self._calls:
            await asyncio.wait(self._calls, timeout=grace_s)
        await self._tell_those_on_their_way()
        await self._server.stop(CLOSING_S if self._watchers else TELLING_S if self._health.watching else 0)

    async def _tell_those_on_their_way(self) -> None:
        """Who has called and not been heard yet would be told CANCELLED by gRPC, which says nothing."""
        until = asyncio.get_running_loop().time() + TELLING_S
        came = -1
        while came != self._came and asyncio.get_running_loop().time() < until:
            came = self._came
            await asyncio.sleep(SILENT_S)

    def renew(self) -> None:
        """Ends the streams of those whose rights have ended."""
        renew_each(self._watchers, self._renew_watcher, lambda task, _: self._send_away(task, has_ended()))

    def _renew_watcher(self, task: asyncio.Task[Any]) -> None:
        watcher = self._watchers[task]
        current = self._door.entrance.current(watcher.principal)
        if current is None or not current.grants.may_read(watcher.scope):
            self._send_away(task, has_ended())

    def _send_away(self, task: asyncio.Task[Any], error: DoorError) -> None:
        self._watchers[task].error = error
        task.cancel()

    # --- calls

    def _handlers(self) -> dict[str, Any]:
        calls: dict[str, tuple[type[Message], Answer]] = {
            "Write": (pb.WriteRequest, self._write),
            "BatchWrite": (pb.BatchWriteRequest, self._batch_write),
            "GetClientState": (pb.GetClientStateRequest, self._client_state),
            "GetEntity": (pb.GetEntityRequest, self._entity),
            "ListEntities": (pb.ListEntitiesRequest, self._entities),
            "ListRelationships": (pb.ListRelationshipsRequest, self._relationships),
            "CheckRelationship": (pb.CheckRelationshipRequest, self._relationship),
            "GetTransaction": (pb.GetTransactionRequest, self._transaction),
            "GetBlock": (pb.GetBlockRequest, self._block),
            "GetProof": (pb.GetProofRequest, self._proof),
        }
        # Without a deserializer: what cannot be read is told in the door's own words, and not as an accident of gRPC's.
        # And as streams, which on the wire is the same: so who it is is asked before the message is taken, and not
        # when gRPC has gathered all of it, of whomever.
        unary: dict[str, Any] = {
            name: grpc.stream_unary_rpc_method_handler(self._handler(kind, answer))
            for name, (kind, answer) in calls.items()
        }
        return {**unary, "WatchBlocks": grpc.stream_stream_rpc_method_handler(self._watch)}

    def _handler(self, kind: type[Message], answer: Answer) -> Callable[[object, Context], Awaitable[bytes]]:
        """A function, and no `partial` of one: gRPC asks at every call what kind it is, and looks long at that."""

        async def call(_: object, context: Context) -> bytes:
            task = asyncio.current_task()
            assert task is not None  # noqa: S101 - gRPC runs every call in one
            self._came += 1
            self._calls.add(task)
            task.add_done_callback(self._calls.discard)
            try:
                told = await self._answered(kind, answer, context)
            except DoorError as error:
                await self._abort(context, error)
            except Exception:  # asyncio.CancelledError is none: the caller has gone
                logger.exception("a call failed")
                await self._abort(context, DoorError(codes.SERVER_ERROR, "the server is at fault"))
            self._door.counts.requests["ledger", "grpc", "ok"] += 1
            return told

        return call

    async def _answered(self, kind: type[Message], answer: Answer, context: Context) -> bytes:
        """Apart from `call`, which an error is sent from and is kept with: see `end_call`."""
        principal = self._principal(context)
        request = await self._message(kind, context)
        told = await answer(request, self._door.entrance.still(principal))
        return told if isinstance(told, bytes) else told.SerializeToString()

    async def _abort(self, context: Context, error: DoorError) -> NoReturn:
        """Ends the call with an error; what HTTP has in its body is in the trailing metadata."""
        self._door.counts.requests["ledger", "grpc", error.code] += 1
        told = {"oncelog-code": error.code}
        for name in ("field", "tenant", "quota", "limit", "usage", "retry_after_ms", "epoch"):
            if name in error.details:
                told[name.replace("_", "-")] = _ascii(error.details[name])
        status, message = STATUS[error.code], error.message
        del error  # which knows where it was raised
        await end_call(context, status, message, tuple(told.items()))

    def _principal(self, context: Context) -> Principal:
        """Raises DoorError."""
        metadata = context.invocation_metadata() or ()  # made anew whenever it is asked for
        headers = [value for name, value in metadata if name == "authorization"]
        check_single_authorization(headers)
        credential = bearer_of(headers[0]) if headers else None
        return self._door.entrance.authenticate(credential, Caller(self._address_with(context, metadata)))

    def _address(self, context: Context) -> str:
        return self._address_with(context, context.invocation_metadata() or ())

    def _address_with(self, context: Context, metadata: Iterable[tuple[str, str]]) -> str:
        forwarded = [value for name, value in metadata if name == "x-forwarded-for"]
        return self._address_of(_address(context.peer()), ",".join(forwarded) if forwarded else None)

    async def _message(self, kind: type[Message], context: Context) -> Any:
        """The one message of a call, within BODY_S: by one timer for all, as one for each would take as long as the
        reading. Raises DoorError."""
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - as in `_handler`
        self._reading[task] = time.monotonic() + BODY_S
        if self._hurrying is None:
            self._hurry_later()
        try:
            data = await context.read()
        except asyncio.CancelledError:
            if self._reading[task] is not None:
                raise
            task.uncancel()
            raise DoorError(codes.BAD_REQUEST, f"the message must be there within {BODY_S} seconds") from None
        finally:
            del self._reading[task]
        try:
            if isinstance(data, bytes):  # and not grpc.aio.EOF
                return kind.FromString(data)
        except (DecodeError, RecursionError, UnicodeDecodeError):
            pass
        raise DoorError(codes.BAD_REQUEST, f"the request must be a {kind.DESCRIPTOR.full_name}")

    def _hurry_later(self) -> None:
        self._hurrying = asyncio.get_running_loop().call_later(BODY_S / 60, self._hurry)

    def _hurry(self) -> None:
        """Ends the reading of those whose time is over, who know it by the None."""
        self._hurrying = None
        now_s = time.monotonic()
        for task, until_s in list(self._reading.items()):
            if until_s is not None and until_s < now_s:
                self._reading[task] = None
                task.cancel()
        if self._reading:
            self._hurry_later()

    def _write(self, request: pb.WriteRequest, principal: Principal) -> Awaitable[bytes]:
        return self._written(messages.read_write, request, principal)

    def _batch_write(self, request: pb.BatchWriteRequest, principal: Principal) -> Awaitable[bytes]:
        return self._written(messages.read_batch, request, principal)

    def _written(self, read: Read, request: Any, principal: Principal) -> Awaitable[bytes]:
        """Calls of these come by the thousand: the answer is made where the verdict is told, and waited for once."""
        if self._is_closing:
            raise stopping()
        if request.ByteSize() > LONG_FRAME_BYTES:
            self._together.hand_over()
            return self._long_written(read, request, principal)
        return self._together.write(read, request, principal)

    async def _long_written(self, read: Read, request: Any, principal: Principal) -> bytes:
        """What is long is read in a thread: others must not wait for it."""
        asked = await asyncio.to_thread(read, request)
        answer = await self._door.write(asked, principal)
        return messages.answer(answer).SerializeToString()

    async def _client_state(self, request: pb.GetClientStateRequest, principal: Principal) -> Message:
        asked = (request.organization, request.vault, request.client_id)
        return messages.client_state(await self._door.client_state(*asked, principal))

    async def _entity(self, request: pb.GetEntityRequest, principal: Principal) -> Message:
        asked = (request.organization, request.vault, request.key)
        return messages.entity(await self._door.entity(*asked, principal))

    async def _entities(self, request: pb.ListEntitiesRequest, principal: Principal) -> Message:
        page = await self._door.entities(
            request.organization, request.vault, request.prefix, request.page_token, request.page_size, principal
        )
        return messages.entities(page)

    async def _relationships(self, request: pb.ListRelationshipsRequest, principal: Principal) -> Message:
        query = RelationshipQuery(
            scope=request.organization,
            resource=request.resource,
            relation=request.relation,
            subject=request.subject,
            limit=request.page_size,
        )
        return messages.relationships(
            await self._door.relationships(query, request.vault, request.page_token, principal)
        )

    async def _relationship(self, request: pb.CheckRelationshipRequest, principal: Principal) -> Message:
        names = (request.resource, request.relation, request.subject)
        version = await self._door.relationship(request.organization, request.vault, names, principal)
        return pb.CheckRelationshipResponse(exists=version > 0, version=version)

    async def _transaction(self, request: pb.GetTransactionRequest, principal: Principal) -> Message:
        asked = (request.organization, request.vault, request.tx_id)
        return messages.transaction(await self._door.transaction(*asked, principal))

    async def _block(self, request: pb.GetBlockRequest, principal: Principal) -> Message:
        return messages.block(await self._door.block(request.organization, request.vault, request.height, principal))

    async def _proof(self, request: pb.GetProofRequest, principal: Principal) -> Message:
        asked = (request.organization, request.vault, request.tx_id)
        return messages.proof(await self._door.proof(*asked, principal))

    # --- watching

    async def _watch(self, _: object, context: Context) -> None:
        """Writes, and does not yield: who does not read is waited for here, and can be sent away from here."""
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - gRPC runs every call in one
        stream: CountedStream | None = None
        try:
            # Streams are counted after authentication: anonymous calls take no place of an address.
            principal = self._principal(context)
            stream = self._open_stream(self._address(context))
            stream.authenticated(principal)
            request = await self._message(pb.WatchBlocksRequest, context)
            if self._is_closing:
                raise stopping()
            scope = self._door.watched(request.organization, request.vault, principal)
            self._watchers[task] = _Watcher(principal, scope.name)
            await self._door.demand_height(scope, request.after_height, request.epoch)
            self._door.counts.requests["ledger", "grpc", "ok"] += 1
            async with aclosing(self._door.watch(scope, request.after_height)) as several:
                async for blocks in several:
                    for one in blocks:
                        async with asyncio.timeout(2 * self._door.limits.heartbeat_ms / 1000):
                            await context.write(messages.block(one).SerializeToString())
        except DoorError as error:
            await self._dismiss(context, error)
        except OncelogError as error:
            await self._dismiss(context, error_of(error, UNREADABLE))
        except TimeoutError:
            logger.warning("a slow reader is closed", extra={"actor": self._watchers[task].principal.actor})
            self._door.counts.slow_readers_closed += 1
            await self._dismiss(context, DoorError(codes.SERVER_BUSY, "too slow: come back with the last height"))
        except asyncio.CancelledError:
            watcher = self._watchers.get(task)
            if watcher is None or watcher.error is None:
                raise  # the reader has gone
            task.uncancel()
            await self._dismiss(context, watcher.error)
        finally:
            self._watchers.pop(task, None)
            if stream is not None:
                stream.close()

    async def _dismiss(self, context: Context, error: DoorError) -> NoReturn:
        """Ends a stream. Its end stands behind what was sent, and one who does not read does not take it: then it is
        not waited for, and stays with gRPC until he reads, or his connection ends."""
        try:
            async with asyncio.timeout(CLOSING_S):
                await self._abort(context, error)
        except TimeoutError:
            raise asyncio.CancelledError from None


class _Watcher(Struct):
    """One who follows blocks."""

    principal: Principal
    scope: str
    error: DoorError | None = None
    """Why it is sent away."""


@lru_cache(maxsize=4096)  # one connection, many calls
def _address(peer: str) -> str | None:
    """Of `ipv4:10.0.0.1:5000` or `ipv6:%5B::1%5D:5000`, without the port; None for another kind of peer."""
    kind, _, rest = peer.partition(":")
    return unquote(rest.rpartition(":")[0]).strip("[]") if kind in ("ipv4", "ipv6") else None


def _ascii(value: object) -> str:
    return str(value).encode("ascii", "backslashreplace").decode()
