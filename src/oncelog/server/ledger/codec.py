"""JSON codec of the Ledger API over HTTP.

Hashes, salts and idempotency keys are hexadecimal, values of entities base64, numbers are numbers up to 2^53−1.
"""

import re
from base64 import b64encode
from functools import lru_cache
from typing import Any, Final, TypeVar

import msgspec
import orjson
from msgspec import Struct

from oncelog.core.canonical import INTEGER_MAX, SEND_AS_STRING, canonical_text
from oncelog.core.operations import Entity
from oncelog.core.proof import Block
from oncelog.core.transactions import OperationJson, encode_operations, operations_from_json
from oncelog.error_codes import BAD_REQUEST
from oncelog.errors import CanonicalError
from oncelog.server.errors import ApiError
from oncelog.server.ledger.service import value_error
from oncelog.server.ledger.values import (
    ClientState,
    Entities,
    Relationships,
    ScopeBlock,
    Transaction,
    Write,
    WriteAnswer,
    WriteError,
    WriteErrorCode,
    WriteSuccess,
)
from oncelog.server.problems import ProblemDialect, to_error_member

_OPERATIONS_SLICE: Final = slice(len('{"operations":'), -1)
"""Of a body: the array alone."""
_MISSING_PATTERN: Final = re.compile("Object missing required field `(.+)`")
_UNKNOWN_PATTERN: Final = re.compile("Object contains unknown field `(.+)`", re.DOTALL)
_ACTOR_REASON: Final = "is assigned by the server and must be left out"
_UUID_CHARACTERS: Final = 36
_UUID_HYPHENS: Final = slice(8, 24, 5)

# --- what comes in -----------------------------------------------------------------------------------


class _WriteJson(Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    # A misspelt `vault` must not write to the organization (LG-22).

    organization: str
    sequence: int
    operations: list[OperationJson]
    vault: str = ""
    client_id: str = ""
    idempotency_key: str = ""


class _BatchItemJson(Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    operations: list[OperationJson]
    organization: str = ""
    vault: str = ""


class _BatchJson(Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    organization: str
    sequence: int
    writes: list[_BatchItemJson]
    vault: str = ""
    client_id: str = ""
    idempotency_key: str = ""


T = TypeVar("T")
_WRITE_DECODER: Final = msgspec.json.Decoder(_WriteJson)
_BATCH_DECODER: Final = msgspec.json.Decoder(_BatchJson)


def decode_write(body: bytes) -> Write:
    """The body of a write. Raises ApiError."""
    decoded = _decode(body, _WRITE_DECODER)
    return _to_write(decoded, tuple(decoded.operations), "operations")


def decode_batch(body: bytes) -> Write:
    """The body of a batch: one write of all its operations. Raises ApiError."""
    decoded = _decode(body, _BATCH_DECODER)
    scopes = [(item.organization, item.vault) for item in decoded.writes]
    check_one_scope((decoded.organization, decoded.vault), scopes)
    check_batch_operations([len(item.operations) for item in decoded.writes])
    operations = tuple(item for write in decoded.writes for item in write.operations)
    return _to_write(decoded, operations, "operations", is_batch=True)


def check_one_scope(scope: tuple[str, str], others: list[tuple[str, str]]) -> None:
    """Raises ApiError for a write of a batch that names another scope than the batch (LG-17)."""
    for index, other in enumerate(others):
        if other not in (("", ""), scope):
            message = f"writes[{index}]: must be of the batch's scope, or name none"
            raise ApiError(BAD_REQUEST, message, field=f"writes[{index}]")


def check_batch_operations(counts: list[int]) -> None:
    """Raises ApiError for a batch, or a write of one, without operations."""
    if not counts:
        raise ApiError(BAD_REQUEST, "writes: must hold at least one", field="writes")
    for index, count in enumerate(counts):
        if not count:
            field = f"writes[{index}].operations"
            raise ApiError(BAD_REQUEST, f"{field}: must hold at least one", field=field)


def _decode(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    # In canonical form first: then nothing is rounded, no key is there twice, and 1.0 is 1 (CO-1 to CO-3).
    try:
        return decoder.decode(canonical_text(body))
    except CanonicalError as error:
        # Numbers are numbers here: as a text none would be taken.
        raise value_error(CanonicalError(error.path, error.reason.removesuffix(SEND_AS_STRING))) from error
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `")
        field = path.rstrip("`").removeprefix("$").removeprefix(".")
        missing, unknown = _MISSING_PATTERN.fullmatch(reason), _UNKNOWN_PATTERN.fullmatch(reason)
        if missing is not None:
            field, reason = f"{field}.{missing[1]}".removeprefix("."), "is missing"
        elif unknown is not None:
            name = unknown[1]
            field = f"{field}.{name}".removeprefix(".")
            reason = _ACTOR_REASON if name == "actor" else "is not a member of this object; check its spelling"
        raise ApiError(BAD_REQUEST, f"{field or 'body'}: {reason}", field=field or "body") from error


def _to_write(
    decoded: _WriteJson | _BatchJson, operations: tuple[OperationJson, ...], path: str, *, is_batch: bool = False
) -> Write:
    if decoded.sequence > INTEGER_MAX:
        raise ApiError(BAD_REQUEST, f"sequence: must be at most {INTEGER_MAX} in JSON", field="sequence")
    try:
        return Write(
            decoded.organization,
            decoded.vault,
            decoded.client_id,
            decoded.sequence,
            decode_key(decoded.idempotency_key),
            operations_from_json(operations, path),
            is_batch,
        )
    except CanonicalError as error:
        raise value_error(error) from error


def decode_key(text: str) -> bytes:
    """Of a UUID, or of plain hexadecimal digits."""
    digits = text
    if len(text) == _UUID_CHARACTERS and text[_UUID_HYPHENS] == "----":
        digits = text.replace("-", "")
    try:
        key = bytes.fromhex(digits)
    except ValueError:
        key = b""
    if len(key) * 2 != len(digits):
        raise CanonicalError("idempotency_key", "must be a UUID, or its 32 hexadecimal digits")
    return key


# --- what goes out -----------------------------------------------------------------------------------


def encode_answer(answer: WriteAnswer) -> bytes:
    """Encode the receipt of a write (LG-24). Raises ApiError for a write that was refused."""
    if isinstance(answer, WriteSuccess):
        return _encode_success(answer).encode()
    members = _to_members(answer)
    if answer.code is not WriteErrorCode.ALREADY_COMMITTED:
        raise ApiError(answer.code.name.lower(), answer.message, number=answer.code.value, **members)
    return orjson.dumps({**members, "already_committed": True})


def spell_code(error: ApiError) -> str:
    """Return the code of an error: codes of refused writes are spelled as in gRPC."""
    return error.code.upper() if "number" in error.details else error.code


def _to_previous_members(error: ApiError) -> dict[str, Any]:
    """Return `error` with the members that it had before there were problem documents."""
    if "number" not in error.details:
        return to_error_member(error)
    return {"error": {"code": spell_code(error), "message": error.message, **error.details}}


PROBLEM_DIALECT: Final = ProblemDialect(spell_code, _to_previous_members)


def _encode_success(success: WriteSuccess) -> str:
    """By hand: this is on the way of every write. Its texts are ours but for the actor's name."""
    proof, block = success.proof, success.block
    path = ",".join([f'"{node.hex()}"' for node in proof.path])
    return (
        f'{{"committed_tx_id":"{success.tx_id}","assigned_sequence":{success.assigned_sequence},'
        f'"version":{success.version},"timestamp_ms":{success.timestamp_ms},"actor":{_quote(success.actor)},'
        f'"block_height":{block.height},"block_header":{_encode_header(block)},"transaction_proof":'
        f'{{"index":{proof.index},"count":{proof.count},"path":[{path}],"salt":"{success.salt.hex()}"}}}}'
    )


@lru_cache(maxsize=256)
def _encode_header(block: Block) -> str:
    """The same for all that were committed together."""
    return orjson.dumps(to_header(block)).decode()


@lru_cache(maxsize=4096)
def _quote(text: str) -> str:
    return orjson.dumps(text).decode()


def _to_members(error: WriteError) -> dict[str, Any]:
    members: dict[str, Any] = {
        "key": error.key or None,
        "operation_index": error.operation_index,
        "current_version": error.current_version,
        "current_value": None if error.current_value is None else b64encode(error.current_value).decode(),
        "committed_tx_id": error.tx_id,
        "block_height": error.block_height,
        "assigned_sequence": error.assigned_sequence,
        "erased": error.erased or None,
        "last_committed_sequence": error.last_committed_sequence,
    }
    return {name: value for name, value in members.items() if value is not None}


def to_header(block: Block) -> dict[str, Any]:
    """A block's header."""
    return {
        "lane": block.lane,
        "height": block.height,
        "first_position": block.first_position,
        "count": block.count,
        "timestamp_ms": block.log_time_ms,
        "previous_hash": block.previous.hex(),
        "merkle_root": block.root.hex(),
        "hash": block.hash.hex(),
    }


def encode_client_state(state: ClientState) -> bytes:
    """Where a client stands."""
    return orjson.dumps(
        {
            "last_committed_sequence": state.last_committed_sequence,
            "last_seen_ms": state.last_seen_ms,
            "last_idempotency_key": state.last_key.hex(),
            "last_request_hash": state.last_request_hash.hex(),
        }
    )


def encode_entity(found: tuple[str, Entity] | None) -> bytes:
    """An entity, or null."""
    return orjson.dumps({"entity": None if found is None else _to_entity(*found)})


def _to_entity(key: str, entity: Entity) -> dict[str, Any]:
    members = {"key": key, "value": b64encode(entity.value).decode(), "version": entity.version}
    if entity.erased:
        members["erased"] = True
    return members if entity.expires_at_ms is None else {**members, "expires_at_ms": entity.expires_at_ms}


def encode_entities(page: Entities) -> bytes:
    """A page of entities."""
    entities = [_to_entity(key, entity) for key, entity in page.entities]
    return orjson.dumps({"entities": entities, **_to_page_members(page.next_page_token)})


def _to_page_members(following: str) -> dict[str, Any]:
    members = {"next_page_token": following, "has_more": bool(following)}
    return {**members, "next_after": following} if following else members


def encode_relationships(page: Relationships) -> bytes:
    """A page of relationships."""
    names = ("resource", "relation", "subject", "version")
    relationships = [dict(zip(names, relationship, strict=True)) for relationship in page.relationships]
    return orjson.dumps({"relationships": relationships, **_to_page_members(page.next_page_token)})


def encode_relationship(version: int) -> bytes:
    """Whether a relationship is there."""
    return orjson.dumps({"exists": version > 0, "version": version})


def encode_transaction(transaction: Transaction) -> bytes:
    """A transaction as it was committed."""
    record = transaction.record
    return orjson.dumps(
        {
            "tx_id": transaction.tx_id,
            "client_id": record.client,
            "sequence": record.client_sequence,
            "idempotency_key": record.key.hex(),
            "operations": orjson.Fragment(encode_operations(transaction.operations)[_OPERATIONS_SLICE]),
            "timestamp_ms": record.log_time_ms,
            "actor": record.actor,
            "block_height": record.height,
            "version": record.sequence,
            "request_hash": record.fingerprint.hex(),
            "erased": record.erased,
        }
    )


def encode_block(block: ScopeBlock) -> bytes:
    """A block with the scope's own transactions."""
    return orjson.dumps({"header": to_header(block.block), "tx_ids": block.tx_ids, "epoch": block.epoch})
