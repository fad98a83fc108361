"""The Ledger API over plain HTTP and JSON, under /v1/ledger/. Blocks are followed by server-sent events."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any, Final

import orjson
from aiohttp import web

from oncelog.core.limits import ENTITY_KEY_CHARACTERS_MAX, NAME_CHARACTERS_MAX
from oncelog.core.transactions import decode_operations, format_tx_id
from oncelog.errors import CanonicalError
from oncelog.proof import encode, proof_document
from oncelog.server import http_fast_path
from oncelog.server.auth.principal import Principal
from oncelog.server.endpoint import Answer, Call, Endpoint, Parameter, RequestBody
from oncelog.server.errors import ApiError
from oncelog.server.http_requests import parse_number
from oncelog.server.json_schemas import (
    NO_NUL,
    SSE_RESPONSE,
    TEXT_SCHEMA,
    Schema,
    integer_schema,
    last_event_id_schema,
    positive_integer_schema,
    schema_response,
)
from oncelog.server.ledger import codec
from oncelog.server.ledger.message_schemas import IDEMPOTENCY_KEY, TX_ID
from oncelog.server.ledger.service import SCOPE_NAME_CHARACTERS_MAX, LedgerService, value_error
from oncelog.server.ledger.values import Scope, Transaction, Write, WriteAnswer
from oncelog.server.live_streams import LiveStreams
from oncelog.server.lookups import describe_outcome
from oncelog.storage.store import RelationshipQuery

PATH: Final = "/v1/ledger/"
_TX_ID_EXAMPLE: Final = format_tx_id(1, 1)
_NAME_EXAMPLES: Final = {
    "organization": "acme",
    "key": "stock/apples",
    "resource": "invoice/17",
    "relation": "owner",
    "subject": "ann",
}
_EXAMPLE: Final = {
    "organization": "acme",
    "sequence": 1,
    "operations": [{"set_entity": {"key": "stock/apples", "value": "NDI="}}],
}
_WRITE_DESCRIPTION: Final = (
    "A transaction is committed once, however often it is sent. The answer is the receipt. That of an earlier "
    "commit which is not in memory any more has `already_committed`. A gap or a reused sequence or key gets 409, a "
    "condition that is not met gets 412."
)
_RELATIONSHIPS_DESCRIPTION: Final = (
    "In the order of resource, relation and subject, page by page. A relation needs a resource or a subject."
)
_OUTCOME_DESCRIPTION: Final = (
    "Whether it was committed, where, and whether a retry under its key is still answered; with the proof of its "
    "record."
)
_STREAM_DESCRIPTION: Final = (
    "Server-sent events: every block of the scope's lane after a height, and those to come, each once and in order. "
    "The id of each is its height, so a browser resumes by itself where it was."
)
_AFTER_HEIGHT: Final = {**integer_schema("The cursor: blocks above this height."), "default": 0}
_EPOCH: Final = {
    **TEXT_SCHEMA,
    "description": "That of the block which the height is of. Another one gets 409.",
}
_AFTER: Final = {**TEXT_SCHEMA, "description": "`next_after` of the page before. Nothing else."}


class LedgerEndpoints:
    """The Ledger API of a server over HTTP."""

    def __init__(self, service: LedgerService) -> None:
        self.service = service
        self.streams = LiveStreams(service.auth_gate, service.limits, service.counts, "ledger")

    def list_endpoints(self) -> list[Endpoint]:
        """Return the declarations."""
        batch = {"organization": "acme", "sequence": 2, "writes": [{"operations": _EXAMPLE["operations"]}]}
        return [
            self._declare_write("write", "write", "Write", "a transaction", codec.decode_write, _EXAMPLE),
            self._declare_write(
                "batch-write", "batchWrite", "BatchWrite", "several writes as one", codec.decode_batch, batch
            ),
            *self._declare_reads(),
            Endpoint(
                method="GET",
                path=f"{PATH}blocks/stream",
                api="ledger",
                name="watchBlocks",
                summary="Follow blocks",
                description=_STREAM_DESCRIPTION,
                parameters=(
                    *_SCOPE_PARAMETERS,
                    Parameter(
                        name="after",
                        schema=_AFTER_HEIGHT,
                        parse=parse_number,
                        default=0,
                        previous_name="after_height",
                    ),
                    Parameter(name="epoch", schema=_EPOCH, default=""),
                    Parameter(
                        name="Last-Event-ID",
                        place="header",
                        schema=last_event_id_schema("height", "after"),
                        parse=parse_number,
                    ),
                ),
                handle=self._follow_blocks,
                responses={200: SSE_RESPONSE},
                errors=(409,),
                is_stream=True,
            ),
        ]

    def list_fast_routes(self) -> dict[str, http_fast_path.FastHandler]:
        """Return the handlers of the operations that are called most, by path."""
        return {
            f"{PATH}write": partial(self.write_fast, codec.decode_write),
            f"{PATH}batch-write": partial(self.write_fast, codec.decode_batch),
        }

    # --- writing

    def _declare_write(
        self, path: str, name: str, schema: str, what: str, decode: Callable[[bytes], Write], example: Any
    ) -> Endpoint:
        return Endpoint(
            method="POST",
            path=f"{PATH}{path}",
            api="ledger",
            name=name,
            summary=f"Commit {what}, once",
            description=_WRITE_DESCRIPTION,
            body=RequestBody(schema=schema, decode=lambda body, _: decode(body), example=example),
            handle=self._write,
            responses={200: schema_response("WriteAnswer", "The receipt.")},
            errors=(409, 412, 507),
        )

    async def _write(self, call: Call) -> Answer:
        return codec.encode_answer(await self.service.write(call.body, call.principal))

    def write_fast(self, decode: Callable[[bytes], Write], request: http_fast_path.FastRequest) -> None:
        """Do the same without a task, for a short body that has arrived as a whole."""
        principal = self.service.auth_gate.authenticate(request.credential, request.caller)
        write = decode(request.body)
        counts = self.service.counts

        def answer(write_answer: WriteAnswer) -> None:
            try:
                body = codec.encode_answer(write_answer)
            except ApiError as error:
                request.fail(error)
                return
            counts.requests["ledger", "http", "ok"] += 1
            counts.bytes_sent += len(body)
            request.answer(body)

        self.service.write_nowait(write, principal, answer, request.fail)

    # --- reading

    def _declare_reads(self) -> list[Endpoint]:
        page_size_max = self.service.limits.page_events_max
        limit = {**integer_schema(f"How many; at most {page_size_max}, and 0 is the server's default."), "default": 0}
        page = (
            Parameter(name="after", schema=_AFTER, default="", previous_name="page_token"),
            Parameter(name="limit", schema=limit, parse=parse_number, default=0, previous_name="page_size"),
        )
        names = ("resource", "relation", "subject")
        wanted = [_text_parameter(name, "What it must be; without it, any.") for name in names]
        exact = [_text_parameter(name, "Of the relationship.", is_required=True) for name in names]
        height_schema = {**positive_integer_schema(), "description": "Of the block."}
        height = Parameter(name="height", schema=height_schema, parse=parse_number, is_required=True, example=1)
        tx_id = Parameter(
            name="tx_id",
            schema={**TX_ID, "description": "Of the transaction."},
            is_required=True,
            example=_TX_ID_EXAMPLE,
        )
        optional_tx_id = Parameter(
            name="tx_id", schema={**TX_ID, "description": "Of the transaction."}, default="", example=_TX_ID_EXAMPLE
        )
        key_schema = {**IDEMPOTENCY_KEY, "description": "Of the transaction, in place of `tx_id`."}
        idempotency_key = Parameter(name="idempotency_key", schema=key_schema, parse=_parse_key, default=b"")
        client = _text_parameter(
            "client_id", "Whose. Without it, the credential's.", NAME_CHARACTERS_MAX - len("client:")
        )
        return [
            _declare_read(
                "client-state",
                "Where a client stands",
                ("ClientState", "0 for one never seen, or evicted."),
                self._get_client_state,
                client,
            ),
            _declare_read(
                "entity",
                "Read an entity",
                ("EntityFound", "Null where there is none, or it has expired."),
                self._get_entity,
                _text_parameter("key", "Of the entity.", is_required=True),
            ),
            _declare_read(
                "entities",
                "List entities by key",
                ("Entities", "Page by page."),
                self._list_entities,
                _text_parameter("prefix", "Only keys that begin with it."),
                *page,
            ),
            _declare_read(
                "relationships",
                "List relationships",
                ("Relationships", _RELATIONSHIPS_DESCRIPTION),
                self._list_relationships,
                *wanted,
                *page,
            ),
            _declare_read(
                "relationship",
                "Look for a relationship",
                ("RelationshipFound", "Whether it is there."),
                self._check_relationship,
                *exact,
            ),
            _declare_read(
                "transaction",
                "Read a transaction",
                ("Transaction", "As it was committed."),
                self._get_transaction,
                tx_id,
                errors=(404,),
            ),
            _declare_read(
                "outcome",
                "Look a transaction up by its id or key",
                ("TransactionOutcome", _OUTCOME_DESCRIPTION),
                self._get_outcome,
                optional_tx_id,
                idempotency_key,
                client,
                errors=(404,),
            ),
            _declare_read(
                "block",
                "Read a block",
                ("Block", "Of the scope's lane, with the scope's own transactions."),
                self._get_block,
                height,
                errors=(404,),
            ),
            _declare_read(
                "proof",
                "Prove a transaction",
                ("ProofDocument", "All that a verifier needs (docs/proofs.md)."),
                self._get_proof,
                tx_id,
                errors=(404,),
            ),
        ]

    async def _get_client_state(self, call: Call) -> bytes:
        return codec.encode_client_state(
            await self.service.load_client_state(*_get_scope(call), call["client_id"], call.principal)
        )

    async def _get_entity(self, call: Call) -> bytes:
        return codec.encode_entity(await self.service.load_entity(*_get_scope(call), call["key"], call.principal))

    async def _list_entities(self, call: Call) -> bytes:
        page = await self.service.list_entities(
            *_get_scope(call),
            call["prefix"],
            call["after"],
            call["limit"],
            call.principal,
            after_field=call.get_sent_name("after"),
        )
        return codec.encode_entities(page)

    async def _list_relationships(self, call: Call) -> bytes:
        organization, vault = _get_scope(call)
        query = RelationshipQuery(
            scope=organization,
            resource=call["resource"],
            relation=call["relation"],
            subject=call["subject"],
            limit=call["limit"],
        )
        page = await self.service.list_relationships(
            query, vault, call["after"], call.principal, after_field=call.get_sent_name("after")
        )
        return codec.encode_relationships(page)

    async def _check_relationship(self, call: Call) -> bytes:
        names = (call["resource"], call["relation"], call["subject"])
        return codec.encode_relationship(await self.service.find_relationship(*_get_scope(call), names, call.principal))

    async def _get_transaction(self, call: Call) -> bytes:
        return codec.encode_transaction(
            await self.service.load_transaction(*_get_scope(call), call["tx_id"], call.principal)
        )

    async def _get_outcome(self, call: Call) -> Mapping[str, Any]:
        outcome = await self.service.find_outcome(
            *_get_scope(call), call["tx_id"], call["idempotency_key"], call["client_id"], call.principal
        )
        record = outcome.record
        assert record is not None  # noqa: S101 - found
        tx_id = format_tx_id(record.lane, record.position)
        transaction = codec.encode_transaction(Transaction(tx_id, record, decode_operations(record)))
        return await describe_outcome(self.service.log, outcome, {"transaction": orjson.Fragment(transaction)})

    async def _get_block(self, call: Call) -> bytes:
        return codec.encode_block(await self.service.load_block(*_get_scope(call), call["height"], call.principal))

    async def _get_proof(self, call: Call) -> bytes:
        proof = await self.service.load_proof(*_get_scope(call), call["tx_id"], call.principal)
        return encode(proof_document(proof))

    # --- following

    async def _follow_blocks(self, call: Call) -> web.StreamResponse:
        last_event_id = call["Last-Event-ID"]
        after, after_field = call["after"], call.get_sent_name("after")
        if last_event_id is not None:
            after, after_field = last_event_id, "Last-Event-ID"
        scope = self.service.check_watchable(*_get_scope(call), call.principal)
        await self.service.check_height(scope, after, call["epoch"], after_field=after_field)

        def may_read(current: Principal) -> bool:
            return current.grants.may_read(scope.name)

        chunks = partial(self._iterate_chunks, scope, after)
        return await self.streams.serve(call.request, call.principal, may_read, chunks)

    async def _iterate_chunks(self, scope: Scope, after: int) -> AsyncGenerator[bytes, None]:
        yield b"retry: 1000\n\n"
        async with aclosing(self.service.follow_blocks(scope, after)) as batches:
            async for blocks in batches:
                yield b"".join(
                    b"id: %d\ndata: %b\n\n" % (scope_block.block.height, codec.encode_block(scope_block))
                    for scope_block in blocks
                )


def _declare_read(
    path: str,
    summary: str,
    response: tuple[str, str],
    handle: Callable[[Call], Awaitable[Answer]],
    *parameters: Parameter,
    errors: tuple[int, ...] = (),
) -> Endpoint:
    """Declare an endpoint whose response has that schema and description."""
    return Endpoint(
        method="GET",
        path=f"{PATH}{path}",
        api="ledger",
        name=f"get{''.join(word.capitalize() for word in path.split('-'))}",
        summary=summary,
        description=response[1],
        parameters=(*_SCOPE_PARAMETERS, *parameters),
        handle=handle,
        responses={200: schema_response(*response)},
        errors=errors,
    )


def _text_parameter(
    name: str, description: str, characters_max: int = ENTITY_KEY_CHARACTERS_MAX, *, is_required: bool = False
) -> Parameter:
    """Declare a name. `LedgerService` checks it, for gRPC too."""
    schema: Schema = {"type": "string", "maxLength": characters_max, "pattern": NO_NUL, "description": description}
    if is_required:
        schema["minLength"] = 1
    example = _NAME_EXAMPLES[name] if is_required else None
    return Parameter(name=name, schema=schema, default="", is_required=is_required, example=example)


_SCOPE_PARAMETERS: Final = (
    _text_parameter("organization", "Whose ledger.", SCOPE_NAME_CHARACTERS_MAX, is_required=True),
    _text_parameter(
        "vault", "One of the organization's. Without it, the organization itself.", SCOPE_NAME_CHARACTERS_MAX
    ),
)


def _parse_key(text: str, _: str) -> bytes:
    try:
        return codec.decode_key(text)
    except CanonicalError as error:
        raise value_error(error) from error


def _get_scope(call: Call) -> tuple[str, str]:
    return call["organization"], call["vault"]
