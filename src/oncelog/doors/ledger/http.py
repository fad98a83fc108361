"""The ledger door over plain HTTP and JSON, under /v1/ledger/. Blocks are followed by server-sent events."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import Final

from aiohttp import web

from oncelog.doors import quick
from oncelog.doors.connections import Caller
from oncelog.doors.faults import stopping
from oncelog.doors.ledger import words
from oncelog.doors.ledger.door import LedgerDoor
from oncelog.doors.ledger.values import Scope, Write, WriteAnswer
from oncelog.doors.limits import LONG_FRAME_BYTES
from oncelog.doors.principal import Principal
from oncelog.doors.requests import JSON, body_of, credential_of, demand_json, number_of, parameters_of
from oncelog.doors.streams import Streams
from oncelog.proof import encode, proof_document
from oncelog.stores.protocol import RelationshipQuery

Given = dict[str, str]
Handler = Callable[[web.Request, Caller], Awaitable[web.StreamResponse]]
_SCOPE: Final = ("organization", "vault")


class LedgerHttp:
    """The handlers. Who comes is asked at every request."""

    def __init__(self, door: LedgerDoor) -> None:
        self.door = door
        self.streams = Streams(door.entrance, door.limits, door.counts)
        self.is_closing = False

    def routes(self) -> dict[str, tuple[str, Handler]]:
        """Method and handler of each path."""
        asked = {
            "client-state": (("client_id",), self._client_state),
            "entity": (("key",), self._entity),
            "entities": (("prefix", "page_token", "page_size"), self._entities),
            "relationships": (("resource", "relation", "subject", "page_token", "page_size"), self._relationships),
            "relationship": (("resource", "relation", "subject"), self._relationship),
            "transaction": (("tx_id",), self._transaction),
            "block": (("height",), self._block),
            "proof": (("tx_id",), self._proof),
        }
        return {
            "write": ("POST", partial(self._write, words.read_write)),
            "batch-write": ("POST", partial(self._write, words.read_batch)),
            **{name: ("GET", partial(self._get, names, answer)) for name, (names, answer) in asked.items()},
            "blocks/stream": ("GET", self._watch),
        }

    def quick_routes(self) -> dict[str, quick.Handler]:
        """Those that come by the thousand."""
        return {
            "write": partial(self.write_quickly, words.read_write),
            "batch-write": partial(self.write_quickly, words.read_batch),
        }

    # --- writing

    async def _write(self, read: Callable[[bytes], Write], request: web.Request, caller: Caller) -> web.Response:
        principal = self.door.entrance.authenticate(credential_of(request), caller)
        demand_json(request)
        body = await body_of(request)
        # What is long is read in a thread: others must not wait for it.
        asked = await asyncio.to_thread(read, body) if len(body) > LONG_FRAME_BYTES else read(body)
        principal = self.door.entrance.still(principal)
        if self.is_closing:
            raise stopping()
        answer = await self.door.write(asked, principal)
        return self._ok(words.answer_json(answer))

    def write_quickly(self, read: Callable[[bytes], Write], request: quick.Request) -> None:
        """The same without a task, for a body that has come as a whole and is not long."""
        principal = self.door.entrance.authenticate(request.credential, request.caller)
        asked = read(request.body)
        if self.is_closing:
            raise stopping()

        def answer(given: WriteAnswer) -> None:
            request.answer(self._counted(words.answer_json(given)))

        self.door.write_nowait(asked, principal, answer, request.fail)

    # --- reading

    async def _get(
        self,
        names: tuple[str, ...],
        answer: Callable[[Given, Principal], Awaitable[bytes]],
        request: web.Request,
        caller: Caller,
    ) -> web.Response:
        principal = self.door.entrance.authenticate(credential_of(request), caller)
        return self._ok(await answer(parameters_of(request, (*_SCOPE, *names)), principal))

    async def _client_state(self, given: Given, principal: Principal) -> bytes:
        return words.client_state_json(
            await self.door.client_state(*_scope(given), given.get("client_id", ""), principal)
        )

    async def _entity(self, given: Given, principal: Principal) -> bytes:
        return words.entity_json(await self.door.entity(*_scope(given), given.get("key", ""), principal))

    async def _entities(self, given: Given, principal: Principal) -> bytes:
        prefix, page_token = given.get("prefix", ""), given.get("page_token", "")
        page = await self.door.entities(*_scope(given), prefix, page_token, _page_size(given), principal)
        return words.entities_json(page)

    async def _relationships(self, given: Given, principal: Principal) -> bytes:
        organization, vault = _scope(given)
        query = RelationshipQuery(
            scope=organization,
            resource=given.get("resource", ""),
            relation=given.get("relation", ""),
            subject=given.get("subject", ""),
            limit=_page_size(given),
        )
        page = await self.door.relationships(query, vault, given.get("page_token", ""), principal)
        return words.relationships_json(page)

    async def _relationship(self, given: Given, principal: Principal) -> bytes:
        names = (given.get("resource", ""), given.get("relation", ""), given.get("subject", ""))
        return words.relationship_json(await self.door.relationship(*_scope(given), names, principal))

    async def _transaction(self, given: Given, principal: Principal) -> bytes:
        return words.transaction_json(await self.door.transaction(*_scope(given), given.get("tx_id", ""), principal))

    async def _block(self, given: Given, principal: Principal) -> bytes:
        height = number_of(given.get("height", ""), "height")
        return words.block_json(await self.door.block(*_scope(given), height, principal))

    async def _proof(self, given: Given, principal: Principal) -> bytes:
        proven = await self.door.proof(*_scope(given), given.get("tx_id", ""), principal)
        return encode(proof_document(proven))

    # --- watching

    async def _watch(self, request: web.Request, caller: Caller) -> web.StreamResponse:
        door = self.door
        principal = door.entrance.authenticate(credential_of(request), caller)
        given = parameters_of(request, (*_SCOPE, "after_height", "epoch"))
        resumed = request.headers.get("Last-Event-ID")
        name = "Last-Event-ID" if resumed else "after_height"
        after = number_of(resumed or given.get("after_height", "0"), name)
        scope = door.watched(*_scope(given), principal)
        await door.demand_height(scope, after, given.get("epoch", ""))
        door.counts.requests["ledger", "http", "ok"] += 1

        def may_read(current: Principal) -> bool:
            return current.grants.may_read(scope.name)

        return await self.streams.serve(request, principal, may_read, partial(self._chunks, scope, after))

    async def _chunks(self, scope: Scope, after: int) -> AsyncGenerator[bytes, None]:
        yield b"retry: 1000\n\n"
        async with aclosing(self.door.watch(scope, after)) as several:
            async for blocks in several:
                yield b"".join(b"id: %d\ndata: %b\n\n" % (one.block.height, words.block_json(one)) for one in blocks)

    def _ok(self, body: bytes) -> web.Response:
        return web.Response(body=self._counted(body), content_type=JSON, headers={"Cache-Control": "no-store"})

    def _counted(self, body: bytes) -> bytes:
        self.door.counts.requests["ledger", "http", "ok"] += 1
        self.door.counts.bytes_sent += len(body)
        return body


def _scope(given: Given) -> tuple[str, str]:
    return given.get("organization", ""), given.get("vault", "")


def _page_size(given: Given) -> int:
    return number_of(given["page_size"], "page_size") if "page_size" in given else 0
