"""The Ledger API's reads, for gRPC and HTTP: the fields and the answer of each operation.

CO-18 sets the order: the API checks a request's fields, then the right to read the scope, and only then reads the log.
An answer is a mapping whose names JSON and gRPC messages share. Binary values are bytes.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from oncelog.core.identity import compute_lane
from oncelog.core.limits import ENTITY_KEY_CHARACTERS_MAX, LANES_DEFAULT
from oncelog.core.operations import Entity
from oncelog.core.policy import LEDGER
from oncelog.core.transactions import decode_operations, format_tx_id, ledger_scope, parse_tx_id
from oncelog.core.values import Record
from oncelog.engine.read_results import Proven
from oncelog.error_codes import HISTORY_CHANGED, NOT_FOUND
from oncelog.server.api_service import (
    decode_page_token,
    describe_outcome,
    encode_page_token,
    find_outcome,
    load_outcome,
)
from oncelog.server.auth.principal import Principal
from oncelog.server.endpoint import Parameter, parse_number
from oncelog.server.errors import field_error
from oncelog.server.ledger.codec import IDEMPOTENCY_KEY as IDEMPOTENCY_KEY_SCHEMA
from oncelog.server.ledger.codec import TX_ID as TX_ID_SCHEMA
from oncelog.server.ledger.codec import decode_key, encode_transaction
from oncelog.server.ledger.service import (
    CLIENT_ID_CHARACTERS_MAX,
    SCOPE_NAME_CHARACTERS_MAX,
    LedgerService,
    check_key,
    check_name,
    check_text,
    forbidden_error,
    parse_scope,
)
from oncelog.server.ledger.values import Members, to_header_members
from oncelog.server.messages import NO_NUL, POSITIVE_INTEGER, TEXT_SCHEMA, Schema, integer_schema, new_decoder
from oncelog.storage.store import RelationshipQuery, ScopedBlock


class Read(Struct, frozen=True, kw_only=True):
    """One operation that reads a scope."""

    fields: tuple[Parameter, ...] = ()
    """The fields besides the scope, for HTTP and gRPC. gRPC messages use the previous names."""
    load: Callable[..., Awaitable[Any]]
    """Loads the answer, given the service, scope and fields. Raises ApiError or OncelogError."""
    is_for_writers: bool = False
    """Whether the right to write is also sufficient."""

    def authorize(self, organization: str, vault: str, principal: Principal) -> str:
        """Return the scope that these names identify. Raises ApiError if the principal may not read it."""
        scope, grants = parse_scope(organization, vault), principal.grants
        if not grants.may_read(scope) and not (self.is_for_writers and grants.may_write(scope)):
            raise forbidden_error("access" if self.is_for_writers else "read access")
        return scope

    async def run(self, ledger: LedgerService, scope: str, principal: Principal, values: Members) -> Any:
        """Load the answer for already checked field values. Raises ApiError or OncelogError."""
        if CLIENT in self.fields:
            values["client_id"] = ledger.check_client_id(values["client_id"], principal)
        return await self.load(ledger, scope, **values)


# --- fields --------------------------------------------------------------------------------------------

_NAME_EXAMPLES: Final = {
    "organization": "acme",
    "key": "stock/apples",
    "resource": "invoice/17",
    "relation": "owner",
    "subject": "ann",
}


def _text_field(
    name: str, description: str, characters_max: int = ENTITY_KEY_CHARACTERS_MAX, *, is_required: bool = False
) -> Parameter:
    schema: Schema = {"type": "string", "maxLength": characters_max, "pattern": NO_NUL, "description": description}
    return Parameter(
        name=name,
        schema={**schema, "minLength": 1} if is_required else schema,
        decode=partial(check_name if is_required else check_text, characters_max=characters_max),
        default="",
        is_required=is_required,
        example=_NAME_EXAMPLES[name] if is_required else None,
    )


def _token_field(decoder: msgspec.json.Decoder[Any], first: tuple[str, ...]) -> Parameter:
    def decode(token: str, name: str) -> Any:
        return decode_page_token(token, name, decoder) if token else first

    return Parameter(
        name="after",
        schema={**TEXT_SCHEMA, "description": "`next_after` of the previous page. No other value is valid."},
        decode=decode,
        default=first,
        previous_name="page_token",
    )


def _parse_number(value: str | int, name: str) -> int:
    """Return a number from a query or a gRPC message."""
    return value if isinstance(value, int) else parse_number(value, name)


def _parse_height(value: str | int, name: str) -> int:
    height = _parse_number(value, name)
    if height < 1:
        raise field_error(name, f"must be at least 1, not {height}")
    return height


def _parse_idempotency_key(text: str, _: str) -> bytes:
    key = decode_key(text)
    if key:
        check_key(key)
    return key


ORGANIZATION: Final = _text_field("organization", "The organization.", SCOPE_NAME_CHARACTERS_MAX, is_required=True)
VAULT: Final = _text_field(
    "vault", "A vault of the organization. Default: the organization itself.", SCOPE_NAME_CHARACTERS_MAX
)
CLIENT: Final = _text_field("client_id", "The client. Default: the credential's client.", CLIENT_ID_CHARACTERS_MAX)
ENTITY_POSITION: Final = msgspec.json.Decoder(tuple[str])
LIMIT: Final = Parameter(
    name="limit",
    schema={**integer_schema("Size of the page, at most {largest}. 0 means the server's default."), "default": 0},
    decode=_parse_number,
    default=0,
    previous_name="page_size",
)
"""The description is a template, because the maximum page size is a setting."""
TX_ID: Final = Parameter(
    name="tx_id",
    schema={**TX_ID_SCHEMA, "description": "Id of the transaction."},
    decode=new_decoder(parse_tx_id, "must have 16 hexadecimal digits, in lower case"),
    default="",
    is_required=True,
    example=format_tx_id(compute_lane(ledger_scope(_NAME_EXAMPLES["organization"]), LANES_DEFAULT), 1),
)
"""The example is the first transaction of the example organization in a new log."""
IDEMPOTENCY_KEY: Final = Parameter(
    name="idempotency_key",
    schema={**IDEMPOTENCY_KEY_SCHEMA, "description": "Key of the transaction, instead of `tx_id`."},
    decode=_parse_idempotency_key,
    default=b"",
)
_RELATIONSHIP_NAMES: Final = ("resource", "relation", "subject")


# --- entities and relationships ------------------------------------------------------------------------


async def _load_client_state(ledger: LedgerService, scope: str, client_id: str) -> Members:
    """Return a client's state (LG-8), which is zero and empty for an unknown or evicted client."""
    entry = await ledger.log.state.client(scope, client_id)
    return {
        "last_committed_sequence": 0 if entry is None else entry.sequence,
        "last_seen_ms": 0 if entry is None else entry.last_seen_ms,
        "last_idempotency_key": b"" if entry is None else entry.last_key,
        "last_request_hash": b"" if entry is None else entry.last_fingerprint,
    }


async def _load_entity(ledger: LedgerService, scope: str, key: str) -> Members:
    entity = await ledger.log.state.entity(scope, key)
    return {"entity": None if entity is None else _to_entity_members(key, entity)}


async def _list_entities(ledger: LedgerService, scope: str, prefix: str, after: tuple[str], limit: int) -> Members:
    size = ledger.page_sizes.clamp(limit or None)
    page = await ledger.log.state.entities(scope, prefix=prefix, after=after[0], limit=size)
    following = encode_page_token(page.entities[-1][0]) if page.has_more else ""
    return {"entities": [_to_entity_members(*found) for found in page.entities], "next_page_token": following}


def _to_entity_members(key: str, entity: Entity) -> Members:
    return {
        "key": key,
        "value": entity.value,
        "version": entity.version,
        "erased": entity.erased,
        "expires_at_ms": entity.expires_at_ms,
    }


async def _list_relationships(ledger: LedgerService, scope: str, **values: Any) -> Members:
    query = RelationshipQuery(scope=scope, **{**values, "limit": ledger.page_sizes.clamp(values["limit"] or None)})
    if query.relation and not (query.resource or query.subject):
        raise field_error("relation", "requires a resource or a subject")
    page = await ledger.log.state.relationships(query)
    names = (*_RELATIONSHIP_NAMES, "version")
    return {
        "relationships": [dict(zip(names, found, strict=True)) for found in page.relationships],
        "next_page_token": encode_page_token(*page.relationships[-1][:3]) if page.has_more else "",
    }


async def _find_relationship(ledger: LedgerService, scope: str, **names: str) -> Members:
    version = await ledger.log.state.relationship(scope, **names) or 0
    return {"exists": version > 0, "version": version}


# --- transactions, blocks, proofs ----------------------------------------------------------------------


async def _load_transaction(ledger: LedgerService, scope: str, tx_id: str) -> Members:
    return _to_transaction_members(await _load_record(ledger, scope, tx_id))


def _to_transaction_members(record: Record) -> Members:
    """Return a transaction's members. An erased transaction has no operations."""
    return {
        "tx_id": format_tx_id(record.lane, record.position),
        "client_id": record.client,
        "sequence": record.client_sequence,
        "idempotency_key": record.key,
        "operations": decode_operations(record),
        "timestamp_ms": record.log_time_ms,
        "actor": record.actor,
        "block_height": record.height,
        "version": record.sequence,
        "request_hash": record.fingerprint,
        "erased": record.erased,
    }


async def _load_outcome(
    ledger: LedgerService, scope: str, tx_id: str, idempotency_key: bytes, client_id: str
) -> Members:
    """Return the outcome of a transaction by its id or idempotency key. Raises ApiError if it is unknown."""
    if bool(tx_id) == bool(idempotency_key):
        raise field_error("tx_id", "exactly one of tx_id and idempotency_key is required")
    log = ledger.log
    if tx_id:
        outcome = await find_outcome(log, await _load_record(ledger, scope, tx_id))
    else:
        policy = log.policies[LEDGER.name]
        outcome = await load_outcome(
            log, "idempotency_key", idempotency_key, policy=policy, scope=scope, client=client_id
        )
    return await describe_outcome(log, outcome, "transaction", _encode_record)


def _encode_record(record: Record) -> bytes:
    return encode_transaction(_to_transaction_members(record))


async def _load_proof(ledger: LedgerService, scope: str, tx_id: str) -> Proven:
    return await ledger.log.prove((await _load_record(ledger, scope, tx_id)).receipt)


async def _load_record(ledger: LedgerService, scope: str, tx_id: str) -> Record:
    place = parse_tx_id(tx_id)
    assert place is not None  # noqa: S101 - checked by `TX_ID`
    state = ledger.log.state
    record = await state.record(*place) if place[0] == state.lane(scope) else None
    if record is None or record.scope != scope or record.policy != LEDGER.name:
        raise field_error("tx_id", "the scope has no such transaction", NOT_FOUND)
    return record


async def _load_block(ledger: LedgerService, scope: str, height: int) -> Members:
    found = await ledger.log.state.blocks(scope, min(height, 2**62) - 1, 1)
    if not found or found[0].block.height != height:
        raise field_error("height", "the scope's lane has no such block", NOT_FOUND)
    return to_block_members(found[0], ledger.log.epoch)


def to_block_members(found: ScopedBlock, epoch: str) -> Members:
    """Return a block's members, with the ids of the scope's transactions."""
    tx_ids = [format_tx_id(found.block.lane, position) for position in found.positions]
    return {"header": to_header_members(found.block), "tx_ids": tx_ids, "epoch": epoch}


async def check_height(
    ledger: LedgerService, scope: str, after: int, epoch: str, *, after_field: str = "after_height"
) -> None:
    """Raise ApiError for a height above the lane's newest block, or for a height in a different history (CO-40)."""
    heads = await ledger.log.heads()
    lane = ledger.log.state.lane(scope)
    height = heads[lane].height if lane in heads else 0
    if (epoch and epoch != ledger.log.epoch) or after > height:
        reason = (
            f"must be from 0 to {height}, the newest height of the scope's lane, and belong to the log's epoch; "
            "read again from a known height"
        )
        raise field_error(after_field, reason, HISTORY_CHANGED, epoch=ledger.log.epoch, height=height)


async def follow_blocks(ledger: LedgerService, scope: str, after: int) -> AsyncGenerator[Sequence[Members], None]:
    """Yield the blocks after a height that `check_height` has accepted, then new blocks."""
    async with aclosing(ledger.log.state.follow_blocks(scope, after)) as batches:
        async for blocks in batches:
            yield [to_block_members(block, ledger.log.epoch) for block in blocks]


# --- operations ----------------------------------------------------------------------------------------

CLIENT_STATE: Final = Read(fields=(CLIENT,), load=_load_client_state, is_for_writers=True)
ENTITY: Final = Read(fields=(_text_field("key", "Key of the entity.", is_required=True),), load=_load_entity)
ENTITIES: Final = Read(
    fields=(_text_field("prefix", "Only keys with this prefix."), _token_field(ENTITY_POSITION, ("",)), LIMIT),
    load=_list_entities,
)
RELATIONSHIPS: Final = Read(
    fields=(
        *(_text_field(name, f"Only this {name}. Default: any.") for name in _RELATIONSHIP_NAMES),
        _token_field(msgspec.json.Decoder(tuple[str, str, str]), ("", "", "")),
        LIMIT,
    ),
    load=_list_relationships,
)
RELATIONSHIP: Final = Read(
    fields=tuple(_text_field(name, f"The {name} to look up.", is_required=True) for name in _RELATIONSHIP_NAMES),
    load=_find_relationship,
)
TRANSACTION: Final = Read(fields=(TX_ID,), load=_load_transaction)
OUTCOME: Final = Read(fields=(replace(TX_ID, is_required=False), IDEMPOTENCY_KEY, CLIENT), load=_load_outcome)
BLOCK: Final = Read(
    fields=(
        Parameter(
            name="height",
            schema={**POSITIVE_INTEGER, "description": "Height of the block."},
            decode=_parse_height,
            is_required=True,
            example=1,
        ),
    ),
    load=_load_block,
)
PROOF: Final = Read(fields=(TX_ID,), load=_load_proof)
BLOCKS: Final = Read(load=check_height)
"""Checks a request to follow blocks. `follow_blocks` then reads them."""
