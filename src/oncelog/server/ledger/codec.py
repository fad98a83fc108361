"""JSON codec of the Ledger API over HTTP.

Hashes, salts and idempotency keys are hexadecimal, entity values are base64, and numbers are JSON numbers up to 2^53−1.
"""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

import msgspec
import orjson
from msgspec import Struct

from oncelog.core.canonical import INTEGER_MAX
from oncelog.core.limits import ENTITY_KEY_CHARACTERS_MAX, OPERATIONS_MAX
from oncelog.core.proof import Block
from oncelog.core.transactions import TX_ID_DIGITS, OperationJson, encode_operations, format_tx_id, operations_from_json
from oncelog.errors import CanonicalError
from oncelog.server.api_service import outcome_schema, page_members
from oncelog.server.errors import ApiError, field_error
from oncelog.server.ledger.service import SCOPE_NAME_CHARACTERS_MAX
from oncelog.server.ledger.values import (
    Members,
    Write,
    WriteAnswer,
    WriteErrorCode,
    WriteSuccess,
    to_header_members,
)
from oncelog.server.limits import ApiLimits
from oncelog.server.messages import (
    NO_NUL,
    POSITIVE_INTEGER,
    TEXT_SCHEMA,
    TIMESTAMP,
    Schema,
    decode_struct,
    integer_schema,
    object_schema,
    page_schema,
    schema_ref,
    value_error,
    with_optional,
)
from oncelog.server.problems import ProblemDialect, to_error_member
from oncelog.server.websocket_frames import encode_json_text

_OPERATIONS_SLICE: Final = slice(len('{"operations":'), -1)
"""Selects the array of operations in a record's body."""
_ASSIGNED: Final = ("actor",)
"""Transaction members that the server assigns."""
_UUID_CHARACTERS: Final = 36
_UUID_HYPHENS: Final = slice(8, 24, 5)

# --- requests ----------------------------------------------------------------------------------------


class _RequestJson(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, gc=False):
    # Forbid unknown fields: if a misspelt `vault` were ignored, the write would go to the organization (LG-22).

    organization: str
    sequence: int
    vault: str = ""
    client_id: str = ""
    idempotency_key: str = ""


class _WriteJson(_RequestJson, frozen=True, kw_only=True, gc=False):
    operations: list[OperationJson]


class _BatchItemJson(Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    operations: list[OperationJson]
    organization: str = ""
    vault: str = ""


class _BatchJson(_RequestJson, frozen=True, kw_only=True, gc=False):
    writes: list[_BatchItemJson]


_WRITE_DECODER: Final = msgspec.json.Decoder(_WriteJson)
_BATCH_DECODER: Final = msgspec.json.Decoder(_BatchJson)


def decode_write(body: bytes) -> Write:
    """Decode the body of a write. Raises ApiError if it is invalid."""
    decoded = decode_struct(body, _WRITE_DECODER, _ASSIGNED)
    return _to_write(decoded, decoded.operations)


def decode_batch(body: bytes) -> Write:
    """Decode the body of a batch into one write with all of its operations. Raises ApiError if it is invalid."""
    decoded = decode_struct(body, _BATCH_DECODER, _ASSIGNED)
    return _to_write(decoded, merge_operations(decoded), is_batch=True)


def merge_operations(batch: Any) -> list[Any]:
    """Return the operations of all writes in a batch decoded from JSON or from a gRPC message.

    Raises ApiError for a batch without writes, and for a write without operations or with a scope that differs from the
    batch's (LG-17).
    """
    if not batch.writes:
        raise field_error("writes", "must not be empty")
    for index, write in enumerate(batch.writes):
        if (write.organization, write.vault) not in (("", ""), (batch.organization, batch.vault)):
            raise field_error(f"writes[{index}]", "must have the same scope as the batch, or no scope")
        if not write.operations:
            raise field_error(f"writes[{index}].operations", "must not be empty")
    return [operation for write in batch.writes for operation in write.operations]


def _to_write(
    decoded: _WriteJson | _BatchJson, operations: Sequence[OperationJson], *, is_batch: bool = False
) -> Write:
    if decoded.sequence > INTEGER_MAX:
        raise field_error("sequence", f"must be at most {INTEGER_MAX} in JSON")
    try:
        return Write(
            decoded.organization,
            decoded.vault,
            decoded.client_id,
            decoded.sequence,
            decode_key(decoded.idempotency_key),
            operations_from_json(operations),
            is_batch,
        )
    except CanonicalError as error:
        raise value_error(error) from error


def decode_key(text: str) -> bytes:
    """Decode a UUID with or without hyphens into bytes. Raises CanonicalError if it is malformed."""
    digits = text
    if len(text) == _UUID_CHARACTERS and text[_UUID_HYPHENS] == "----":
        digits = text.replace("-", "")
    try:
        key = bytes.fromhex(digits)
    except ValueError:
        key = b""
    if len(key) * 2 != len(digits):
        raise CanonicalError("idempotency_key", "must be a UUID, or 32 hexadecimal digits")
    return key


# --- answers -----------------------------------------------------------------------------------------


def encode_answer(answer: WriteAnswer) -> bytes:
    """Encode the receipt of a write (LG-24). Raises ApiError for a refused write."""
    if isinstance(answer, WriteSuccess):
        return _encode_success(answer).encode()
    members = answer.members
    if answer.code is WriteErrorCode.ALREADY_COMMITTED:
        return encode_members({**members, "already_committed": True})
    if "current_value" in members:
        members = {**members, "current_value": b64encode(members["current_value"]).decode()}
    raise ApiError(answer.code.name.lower(), answer.message, number=answer.code.value, **members)


def spell_code(error: ApiError) -> str:
    """Return the code of an error. Codes of refused writes are spelled as in gRPC."""
    return error.code.upper() if "number" in error.details else error.code


def _to_previous_members(error: ApiError) -> dict[str, Any]:
    """Return the `error` member in the format that preceded problem documents, for older clients."""
    if "number" not in error.details:
        return to_error_member(error)
    return {"error": {"code": spell_code(error), "message": error.message, **error.details}}


PROBLEM_DIALECT: Final = ProblemDialect(spell_code, _to_previous_members)


def _encode_success(success: WriteSuccess) -> str:
    """Encode a receipt by hand, because every write needs one. Only the actor may need escapes."""
    receipt, attestation = success.receipt, success.attestation
    proof, block = attestation.proof, attestation.block
    path = ",".join([f'"{node.hex()}"' for node in proof.path])
    return (
        f'{{"committed_tx_id":"{format_tx_id(receipt.lane, receipt.position)}",'
        f'"assigned_sequence":{receipt.client_sequence},"version":{receipt.sequence},'
        f'"timestamp_ms":{receipt.log_time_ms},"actor":{encode_json_text(attestation.actor)},'
        f'"block_height":{block.height},"block_header":{_encode_header(block)},"transaction_proof":'
        f'{{"index":{proof.index},"count":{proof.count},"path":[{path}],"salt":"{attestation.salt.hex()}"}}}}'
    )


@lru_cache(maxsize=256)
def _encode_header(block: Block) -> str:
    """Encode a block's header. Cached, because all transactions of a group commit share it."""
    return encode_members(to_header_members(block)).decode()


def encode_members(members: Members) -> bytes:
    """Encode the answer to a read, with bytes in hexadecimal."""
    return orjson.dumps(members, default=bytes.hex)


def encode_entity(found: Members) -> bytes:
    """Encode an entity, or null if it does not exist."""
    return encode_members({"entity": None if found["entity"] is None else _to_entity(found["entity"])})


def encode_page(page: Members) -> bytes:
    """Encode a page of entities or relationships, with the paging members that all APIs share."""
    return encode_members({**page, **page_members(page["next_page_token"])})


def encode_entities(page: Members) -> bytes:
    """Encode a page of entities."""
    return encode_page({**page, "entities": list(map(_to_entity, page["entities"]))})


def _to_entity(entity: Members) -> Members:
    shown = {name: value for name, value in entity.items() if value is not None and value is not False}
    return {**shown, "value": b64encode(entity["value"]).decode()}


def encode_transaction(transaction: Members) -> bytes:
    """Encode a transaction."""
    operations = orjson.Fragment(encode_operations(transaction["operations"])[_OPERATIONS_SLICE])
    return encode_members({**transaction, "operations": operations})


# --- JSON schemas of the OpenAPI document ------------------------------------------------------------

_NEXT_PAGE_TOKEN: Final = {
    **TEXT_SCHEMA,
    "deprecated": True,
    "description": "Same value as `next_after`, but empty on the last page.",
}
_HEX: Final[Schema] = {"type": "string", "pattern": "^[0-9a-f]*$"}
_HASH: Final[Schema] = {"type": "string", "pattern": "^[0-9a-f]{64}$"}
TX_ID: Final[Schema] = {"type": "string", "pattern": f"^[0-9a-f]{{{TX_ID_DIGITS}}}$"}
IDEMPOTENCY_KEY: Final[Schema] = {
    "type": "string",
    "pattern": "^([0-9a-fA-F]{32}|[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12})?$",
}


def build_schemas(limits: ApiLimits) -> Schema:
    """Return the schemas of requests and answers."""
    operations = {
        "type": "array",
        "minItems": 1,
        "maxItems": OPERATIONS_MAX,
        "items": schema_ref("Operation"),
        "description": "Applied as a whole or not at all. Each operation sees the effects of the previous ones.",
    }
    batch_item = with_optional(
        {**object_schema(operations=operations), "additionalProperties": False},
        organization={**TEXT_SCHEMA, "description": "Organization of the batch. May be omitted."},
        vault={**TEXT_SCHEMA, "description": "Vault of the batch. May be omitted."},
    )
    earlier_receipt = with_optional(
        object_schema(assigned_sequence=POSITIVE_INTEGER, already_committed={"const": True}),
        committed_tx_id=TX_ID,
        block_height=POSITIVE_INTEGER,
        erased={"const": True},
    )
    return {
        "Write": _write_schema({"operations": operations}),
        "BatchWrite": _write_schema({"writes": {"type": "array", "minItems": 1, "items": batch_item}}),
        "Operation": _operation_schema(limits),
        "WriteAnswer": {"oneOf": [_success_schema(), earlier_receipt]},
        "ClientState": object_schema(
            last_committed_sequence=integer_schema(),
            last_seen_ms=integer_schema(),
            last_idempotency_key=_HEX,
            last_request_hash=_HEX,
        ),
        "Entity": with_optional(
            object_schema(key=TEXT_SCHEMA, value=_base64_schema(), version=POSITIVE_INTEGER),
            expires_at_ms=integer_schema(),
            erased={"const": True},
        ),
        "EntityFound": object_schema(entity={"anyOf": [schema_ref("Entity"), {"type": "null"}]}),
        "Entities": page_schema(
            entities={"type": "array", "items": schema_ref("Entity")}, next_page_token=_NEXT_PAGE_TOKEN
        ),
        "Relationship": object_schema(
            resource=TEXT_SCHEMA, relation=TEXT_SCHEMA, subject=TEXT_SCHEMA, version=POSITIVE_INTEGER
        ),
        "Relationships": page_schema(
            relationships={"type": "array", "items": schema_ref("Relationship")}, next_page_token=_NEXT_PAGE_TOKEN
        ),
        "RelationshipFound": object_schema(exists={"type": "boolean"}, version=integer_schema()),
        "Transaction": object_schema(
            tx_id=TX_ID,
            client_id=TEXT_SCHEMA,
            sequence=POSITIVE_INTEGER,
            idempotency_key=_HEX,
            operations={"type": "array", "items": schema_ref("Operation")},
            timestamp_ms=TIMESTAMP,
            actor=TEXT_SCHEMA,
            block_height=POSITIVE_INTEGER,
            version=POSITIVE_INTEGER,
            request_hash=_HASH,
            erased={"type": "boolean"},
        ),
        "TransactionOutcome": outcome_schema(transaction=schema_ref("Transaction")),
        "BlockHeader": object_schema(
            lane=integer_schema(),
            height=POSITIVE_INTEGER,
            first_position=POSITIVE_INTEGER,
            count=POSITIVE_INTEGER,
            timestamp_ms=TIMESTAMP,
            previous_hash=_HASH,
            merkle_root=_HASH,
            hash=_HASH,
        ),
        "Block": object_schema(
            header=schema_ref("BlockHeader"), tx_ids={"type": "array", "items": TX_ID}, epoch=TEXT_SCHEMA
        ),
        "ProofDocument": object_schema(
            record={"type": "object"},
            salt={"type": ["string", "null"]},
            body={"type": ["string", "null"]},
            body_hash=_HASH,
            index=integer_schema(),
            count=POSITIVE_INTEGER,
            path={"type": "array", "items": _HASH},
            block=schema_ref("BlockHeader"),
        ),
    }


def _write_schema(content: Mapping[str, Schema]) -> Schema:
    organization = {"type": "string", "minLength": 1, "maxLength": SCOPE_NAME_CHARACTERS_MAX, "pattern": NO_NUL}
    schema = object_schema(
        organization=organization,
        sequence={**POSITIVE_INTEGER, "description": "Sequence of this client: 1, 2, 3 and so on."},
    )
    schema["required"] += content
    schema["additionalProperties"] = False
    return with_optional(
        schema,
        **content,
        vault={"type": "string", "maxLength": SCOPE_NAME_CHARACTERS_MAX, "pattern": NO_NUL},
        client_id={**TEXT_SCHEMA, "description": "The credential's client. May be omitted."},
        idempotency_key={
            **IDEMPOTENCY_KEY,
            "description": "A UUID, or 32 hexadecimal digits, not all zero. Without a key, only the sequence "
            "identifies a retry.",
        },
    )


def _operation_schema(limits: ApiLimits) -> Schema:
    name = {"type": "string", "minLength": 1, "maxLength": ENTITY_KEY_CHARACTERS_MAX, "pattern": NO_NUL}
    related = {**object_schema(resource=name, relation=name, subject=name), "additionalProperties": False}
    conditions = {
        "must_not_exist": {"const": True},
        "must_exist": {"const": True},
        "version_is": integer_schema(),
        "value_equals": _base64_schema(),
    }
    condition = {"oneOf": [_single_member_schema(one, schema) for one, schema in conditions.items()]}
    setting = with_optional(
        object_schema(key=name),
        value={**_base64_schema(), "description": f"In base64; at most {limits.entity_value_bytes_max} bytes."},
        expires_at_ms=integer_schema("Log time at which the entity expires."),
        condition=condition,
    )
    kinds = {
        "set_entity": {**setting, "additionalProperties": False},
        "delete_entity": {**object_schema(key=name), "additionalProperties": False},
        "create_relationship": related,
        "delete_relationship": related,
    }
    return {"oneOf": [_single_member_schema(kind, schema) for kind, schema in kinds.items()]}


def _single_member_schema(name: str, schema: Schema) -> Schema:
    return {**object_schema(**{name: schema}), "additionalProperties": False}


def _success_schema() -> Schema:
    proof = object_schema(
        index=integer_schema(), count=POSITIVE_INTEGER, path={"type": "array", "items": _HASH}, salt=_HEX
    )
    return object_schema(
        committed_tx_id=TX_ID,
        assigned_sequence=POSITIVE_INTEGER,
        version=POSITIVE_INTEGER,
        timestamp_ms=TIMESTAMP,
        actor=TEXT_SCHEMA,
        block_height=POSITIVE_INTEGER,
        block_header=schema_ref("BlockHeader"),
        transaction_proof=proof,
    )


def _base64_schema() -> Schema:
    return {
        "type": "string",
        "contentEncoding": "base64",
        "pattern": "^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$",
    }
