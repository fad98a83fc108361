"""The Ledger API over HTTP and JSON, under /v1/ledger/, with blocks as server-sent events."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from aiohttp import web
from msgspec.structs import replace

from oncelog.proof import encode, proof_document
from oncelog.server import http_fast_path
from oncelog.server.api_service import resume_parameter
from oncelog.server.endpoint import TICKET, Answer, Call, Endpoint, Parameter, RequestBody, parse_number
from oncelog.server.errors import ApiError
from oncelog.server.ledger import codec, reads
from oncelog.server.ledger.reads import Read
from oncelog.server.ledger.service import LedgerService, parse_scope
from oncelog.server.ledger.values import Members, Write, WriteAnswer
from oncelog.server.live_streams import LiveStreams, encode_event
from oncelog.server.messages import SSE_RESPONSE, TEXT_SCHEMA, integer_schema, schema_response

PATH: Final = "/v1/ledger/"
_EXAMPLE: Final = {
    "organization": "acme",
    "sequence": 1,
    "operations": [{"set_entity": {"key": "stock/apples", "value": "NDI="}}],
}
_SCOPE_PARAMETERS: Final = (reads.ORGANIZATION, reads.VAULT)


class LedgerEndpoints:
    """The HTTP endpoints of a server's Ledger API."""

    def __init__(self, service: LedgerService) -> None:
        self.service = service
        self.streams = LiveStreams(service.auth_gate, "ledger")

    def list_endpoints(self) -> list[Endpoint]:
        """Return the endpoint declarations."""
        batch = {"organization": "acme", "sequence": 2, "writes": [{"operations": _EXAMPLE["operations"]}]}
        watch = Endpoint(
            method="GET",
            path=f"{PATH}blocks/stream",
            api="ledger",
            name="watchBlocks",
            summary="Follow blocks",
            description=(
                "Server-sent events: every block of the scope's lane after a height, and new blocks as they are "
                "committed, each once and in order. The id of a block is its height, so browsers resume "
                "automatically."
            ),
            parameters=(
                *_SCOPE_PARAMETERS,
                Parameter(
                    name="after",
                    schema={**integer_schema("Cursor: the answer has blocks above this height."), "default": 0},
                    decode=parse_number,
                    default=0,
                    previous_name="after_height",
                ),
                Parameter(
                    name="epoch",
                    schema={
                        **TEXT_SCHEMA,
                        "description": "Epoch of the block with that height. A different epoch gets 409.",
                    },
                    default="",
                ),
                resume_parameter("height", "after"),
                TICKET,
            ),
            authorize=partial(_authorize, reads.BLOCKS),
            handle=self._follow_blocks,
            responses={200: SSE_RESPONSE},
            errors=(409,),
            list_stream_names=lambda call: [parse_scope(call["organization"], call["vault"])],
        )
        return [
            self._declare_write("write", "write", "Write", "a transaction", codec.decode_write, _EXAMPLE),
            self._declare_write(
                "batch-write", "batchWrite", "BatchWrite", "several writes as one", codec.decode_batch, batch
            ),
            *self._declare_reads(),
            watch,
            self.streams.declare_ticket(watch, "createBlocksTicket", _SCOPE_PARAMETERS),
        ]

    def list_fast_routes(self) -> dict[str, http_fast_path.FastHandler]:
        """Return the fast-path handlers of the most frequent operations, by path."""
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
            description=(
                "The server commits a transaction once, even if the client sends it several times. The answer is the "
                "receipt. If the transaction was committed earlier and its receipt is no longer in memory, the answer "
                "has `already_committed`. A gap in the sequence and a reused sequence or key get 409. A condition that "
                "is not met gets 412."
            ),
            body=RequestBody(schema=schema, decode=lambda body, _: decode(body), example=example),
            handle=self._write,
            responses={200: schema_response("WriteAnswer", "The receipt.")},
            errors=(409, 412, 507),
        )

    async def _write(self, call: Call) -> Answer:
        return codec.encode_answer(await self.service.write(call.body, call.principal))

    def write_fast(self, decode: Callable[[bytes], Write], request: http_fast_path.FastRequest) -> None:
        """Serve a write with a short, fully received body, without creating a task."""
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
        declare, members = self._declare_read, codec.encode_members
        return [
            declare(
                reads.CLIENT_STATE,
                "client-state",
                "Read the state of a client",
                ("ClientState", "The state; zeros for an unknown or evicted client."),
                members,
            ),
            declare(
                reads.ENTITY,
                "entity",
                "Read an entity",
                ("EntityFound", "The entity; null if it does not exist or has expired."),
                codec.encode_entity,
            ),
            declare(
                reads.ENTITIES,
                "entities",
                "List entities by key",
                ("Entities", "A page of entities in the order of their keys."),
                codec.encode_entities,
            ),
            declare(
                reads.RELATIONSHIPS,
                "relationships",
                "List relationships",
                (
                    "Relationships",
                    (
                        "A page of relationships in the order of resource, relation and subject. The parameter "
                        "`relation` requires `resource` or `subject`."
                    ),
                ),
                codec.encode_page,
            ),
            declare(
                reads.RELATIONSHIP,
                "relationship",
                "Look up a relationship",
                ("RelationshipFound", "Returns whether the relationship exists."),
                members,
            ),
            declare(
                reads.TRANSACTION,
                "transaction",
                "Read a transaction",
                ("Transaction", "The committed transaction."),
                codec.encode_transaction,
                errors=(404,),
            ),
            declare(
                reads.OUTCOME,
                "outcome",
                "Look up a transaction by its id or key",
                (
                    "TransactionOutcome",
                    (
                        "Returns whether the transaction was committed, its position, and whether a retry under its "
                        "key still gets the first answer. Includes the proof of the record."
                    ),
                ),
                members,
                errors=(404,),
            ),
            declare(
                reads.BLOCK,
                "block",
                "Read a block",
                ("Block", "The block of the scope's lane, with the transactions of the scope."),
                members,
                errors=(404,),
            ),
            declare(
                reads.PROOF,
                "proof",
                "Prove a transaction",
                ("ProofDocument", "The document that a verifier needs (docs/reference/proofs.md)."),
                lambda proven: encode(proof_document(proven)),
                errors=(404,),
            ),
        ]

    def _declare_read(
        self,
        read: Read,
        path: str,
        summary: str,
        response: tuple[str, str],
        encode_answer: Callable[[Any], bytes],
        errors: tuple[int, ...] = (),
    ) -> Endpoint:
        """Declare the endpoint for a read, with the schema and the description of its response."""
        largest = self.service.page_sizes.largest
        return Endpoint(
            method="GET",
            path=f"{PATH}{path}",
            api="ledger",
            name=f"get{''.join(word.capitalize() for word in path.split('-'))}",
            summary=summary,
            description=response[1],
            parameters=(*_SCOPE_PARAMETERS, *(_describe_limit(field, largest) for field in read.fields)),
            authorize=partial(_authorize, read),
            handle=partial(self._serve_read, read, encode_answer),
            responses={200: schema_response(*response)},
            errors=errors,
        )

    async def _serve_read(self, read: Read, encode_answer: Callable[[Any], Answer], call: Call) -> Answer:
        values = {field.name: call[field.name] for field in read.fields}
        return encode_answer(await read.run(self.service, call.scope, call.principal, values))

    # --- following

    async def _follow_blocks(self, call: Call) -> web.StreamResponse:
        last_event_id = call["Last-Event-ID"]
        after, after_field = call["after"], call.get_sent_name("after")
        if last_event_id is not None:
            after, after_field = last_event_id, "Last-Event-ID"
        await reads.check_height(self.service, call.scope, after, call["epoch"], after_field=after_field)
        blocks = reads.follow_blocks(self.service, call.scope, after)
        return await self.streams.serve(call, [call.scope], b"retry: 1000\n\n", blocks, _encode_blocks)


def _authorize(read: Read, call: Call) -> str:
    return read.authorize(call["organization"], call["vault"], call.principal)


def _encode_blocks(blocks: Sequence[Members]) -> bytes:
    return b"".join([encode_event(block["header"]["height"], codec.encode_members(block)) for block in blocks])


def _describe_limit(field: Parameter, largest: int) -> Parameter:
    """Insert the maximum page size into the description of `LIMIT`."""
    if field is not reads.LIMIT:
        return field
    return replace(field, schema={**field.schema, "description": field.schema["description"].format(largest=largest)})
