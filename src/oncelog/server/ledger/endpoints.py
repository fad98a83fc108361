"""The ledger door over plain HTTP and JSON, under /v1/ledger/. Blocks are followed by server-sent events."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import Final

from aiohttp import web

from oncelog.proof import encode, proof_document
from oncelog.server import http_fast_path
from oncelog.server.auth.principal import Principal
from oncelog.server.connection_limiter import Caller
from oncelog.server.errors import shutdown_error
from oncelog.server.http_requests import JSON, check_json, get_credential, parse_number, parse_parameters, read_body
from oncelog.server.ledger import codec
from oncelog.server.ledger.service import LedgerService
from oncelog.server.ledger.values import Scope, Write, WriteAnswer
from oncelog.server.limits import LONG_FRAME_BYTES
from oncelog.server.live_streams import LiveStreams
from oncelog.storage.store import RelationshipQuery

QueryParameters = dict[str, str]
Handler = Callable[[web.Request, Caller], Awaitable[web.StreamResponse]]
_SCOPE_PARAMETERS: Final = ("organization", "vault")


class LedgerEndpoints:
    """The handlers. Who comes is asked at every request."""

    def __init__(self, service: LedgerService) -> None:
        self.service = service
        self.streams = LiveStreams(service.auth_gate, service.limits, service.counts)
        self.is_closing = False

    def list_routes(self) -> dict[str, tuple[str, Handler]]:
        """Method and handler of each path."""
        asked = {
            "client-state": (("client_id",), self._get_client_state),
            "entity": (("key",), self._get_entity),
            "entities": (("prefix", "page_token", "page_size"), self._list_entities),
            "relationships": (("resource", "relation", "subject", "page_token", "page_size"), self._list_relationships),
            "relationship": (("resource", "relation", "subject"), self._check_relationship),
            "transaction": (("tx_id",), self._get_transaction),
            "block": (("height",), self._get_block),
            "proof": (("tx_id",), self._get_proof),
        }
        return {
            "write": ("POST", partial(self._write, codec.decode_write)),
            "batch-write": ("POST", partial(self._write, codec.decode_batch)),
            **{name: ("GET", partial(self._get, names, answer)) for name, (names, answer) in asked.items()},
            "blocks/stream": ("GET", self._follow_blocks),
        }

    def list_fast_routes(self) -> dict[str, http_fast_path.FastHandler]:
        """Those that come by the thousand."""
        return {
            "write": partial(self.write_fast, codec.decode_write),
            "batch-write": partial(self.write_fast, codec.decode_batch),
        }

    # --- writing

    async def _write(self, decode: Callable[[bytes], Write], request: web.Request, caller: Caller) -> web.Response:
        principal = self.service.auth_gate.authenticate(get_credential(request), caller)
        check_json(request)
        body = await read_body(request)
        # What is long is read in a thread: others must not wait for it.
        asked = await asyncio.to_thread(decode, body) if len(body) > LONG_FRAME_BYTES else decode(body)
        principal = self.service.auth_gate.recheck_principal(principal)
        if self.is_closing:
            raise shutdown_error()
        answer = await self.service.write(asked, principal)
        return self._respond(codec.encode_answer(answer))

    def write_fast(self, decode: Callable[[bytes], Write], request: http_fast_path.FastRequest) -> None:
        """The same without a task, for a body that has come as a whole and is not long."""
        principal = self.service.auth_gate.authenticate(request.credential, request.caller)
        asked = decode(request.body)
        if self.is_closing:
            raise shutdown_error()

        def answer(given: WriteAnswer) -> None:
            request.answer(self._count_response(codec.encode_answer(given)))

        self.service.write_nowait(asked, principal, answer, request.fail)

    # --- reading

    async def _get(
        self,
        names: tuple[str, ...],
        load: Callable[[QueryParameters, Principal], Awaitable[bytes]],
        request: web.Request,
        caller: Caller,
    ) -> web.Response:
        principal = self.service.auth_gate.authenticate(get_credential(request), caller)
        return self._respond(await load(parse_parameters(request, (*_SCOPE_PARAMETERS, *names)), principal))

    async def _get_client_state(self, parameters: QueryParameters, principal: Principal) -> bytes:
        return codec.encode_client_state(
            await self.service.load_client_state(*_get_scope(parameters), parameters.get("client_id", ""), principal)
        )

    async def _get_entity(self, parameters: QueryParameters, principal: Principal) -> bytes:
        return codec.encode_entity(
            await self.service.load_entity(*_get_scope(parameters), parameters.get("key", ""), principal)
        )

    async def _list_entities(self, parameters: QueryParameters, principal: Principal) -> bytes:
        prefix, page_token = parameters.get("prefix", ""), parameters.get("page_token", "")
        page = await self.service.list_entities(
            *_get_scope(parameters), prefix, page_token, _get_page_size(parameters), principal
        )
        return codec.encode_entities(page)

    async def _list_relationships(self, parameters: QueryParameters, principal: Principal) -> bytes:
        organization, vault = _get_scope(parameters)
        query = RelationshipQuery(
            scope=organization,
            resource=parameters.get("resource", ""),
            relation=parameters.get("relation", ""),
            subject=parameters.get("subject", ""),
            limit=_get_page_size(parameters),
        )
        page = await self.service.list_relationships(query, vault, parameters.get("page_token", ""), principal)
        return codec.encode_relationships(page)

    async def _check_relationship(self, parameters: QueryParameters, principal: Principal) -> bytes:
        names = (parameters.get("resource", ""), parameters.get("relation", ""), parameters.get("subject", ""))
        return codec.encode_relationship(
            await self.service.find_relationship(*_get_scope(parameters), names, principal)
        )

    async def _get_transaction(self, parameters: QueryParameters, principal: Principal) -> bytes:
        return codec.encode_transaction(
            await self.service.load_transaction(*_get_scope(parameters), parameters.get("tx_id", ""), principal)
        )

    async def _get_block(self, parameters: QueryParameters, principal: Principal) -> bytes:
        height = parse_number(parameters.get("height", ""), "height")
        return codec.encode_block(await self.service.load_block(*_get_scope(parameters), height, principal))

    async def _get_proof(self, parameters: QueryParameters, principal: Principal) -> bytes:
        proven = await self.service.load_proof(*_get_scope(parameters), parameters.get("tx_id", ""), principal)
        return encode(proof_document(proven))

    # --- watching

    async def _follow_blocks(self, request: web.Request, caller: Caller) -> web.StreamResponse:
        door = self.service
        principal = door.auth_gate.authenticate(get_credential(request), caller)
        given = parse_parameters(request, (*_SCOPE_PARAMETERS, "after_height", "epoch"))
        resumed = request.headers.get("Last-Event-ID")
        name = "Last-Event-ID" if resumed else "after_height"
        after = parse_number(resumed or given.get("after_height", "0"), name)
        scope = door.check_watchable(*_get_scope(given), principal)
        await door.check_height(scope, after, given.get("epoch", ""))
        door.counts.requests["ledger", "http", "ok"] += 1

        def may_read(current: Principal) -> bool:
            return current.grants.may_read(scope.name)

        return await self.streams.serve(request, principal, may_read, partial(self._iterate_chunks, scope, after))

    async def _iterate_chunks(self, scope: Scope, after: int) -> AsyncGenerator[bytes, None]:
        yield b"retry: 1000\n\n"
        async with aclosing(self.service.follow_blocks(scope, after)) as several:
            async for blocks in several:
                yield b"".join(b"id: %d\ndata: %b\n\n" % (one.block.height, codec.encode_block(one)) for one in blocks)

    def _respond(self, body: bytes) -> web.Response:
        return web.Response(body=self._count_response(body), content_type=JSON, headers={"Cache-Control": "no-store"})

    def _count_response(self, body: bytes) -> bytes:
        self.service.counts.requests["ledger", "http", "ok"] += 1
        self.service.counts.bytes_sent += len(body)
        return body


def _get_scope(parameters: QueryParameters) -> tuple[str, str]:
    return parameters.get("organization", ""), parameters.get("vault", "")


def _get_page_size(parameters: QueryParameters) -> int:
    return parse_number(parameters["page_size"], "page_size") if "page_size" in parameters else 0
