"""JSON Schemas of the Ledger API."""

from collections.abc import Mapping
from typing import Final

from oncelog.core.limits import ENTITY_KEY_CHARACTERS_MAX, OPERATIONS_MAX
from oncelog.core.transactions import TX_ID_DIGITS
from oncelog.server.json_schemas import (
    NO_NUL,
    TEXT_SCHEMA,
    Schema,
    integer_schema,
    object_schema,
    page_schema,
    positive_integer_schema,
    schema_ref,
    timestamp_schema,
    with_optional,
)
from oncelog.server.ledger.service import SCOPE_NAME_CHARACTERS_MAX
from oncelog.server.limits import ApiLimits
from oncelog.server.lookups import outcome_schema

_NEXT_PAGE_TOKEN: Final = {**TEXT_SCHEMA, "deprecated": True, "description": "As `next_after`; empty at the end."}
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
        "description": "Applied all or none, each seeing what the ones before it did.",
    }
    return {
        "Write": _write_schema({"operations": operations}),
        "BatchWrite": _write_schema(
            {"writes": {"type": "array", "minItems": 1, "items": _batch_item_schema(operations)}}
        ),
        "Operation": _operation_schema(limits),
        "WriteAnswer": {"oneOf": [_success_schema(), _earlier_receipt_schema()]},
        "ClientState": object_schema(
            last_committed_sequence=integer_schema(),
            last_seen_ms=integer_schema(),
            last_idempotency_key=_HEX,
            last_request_hash=_HEX,
        ),
        "Entity": with_optional(
            object_schema(key=TEXT_SCHEMA, value=_base64_schema(), version=positive_integer_schema()),
            expires_at_ms=integer_schema(),
            erased={"const": True},
        ),
        "EntityFound": object_schema(entity={"anyOf": [schema_ref("Entity"), {"type": "null"}]}),
        "Entities": page_schema(
            entities={"type": "array", "items": schema_ref("Entity")}, next_page_token=_NEXT_PAGE_TOKEN
        ),
        "Relationship": object_schema(
            resource=TEXT_SCHEMA, relation=TEXT_SCHEMA, subject=TEXT_SCHEMA, version=positive_integer_schema()
        ),
        "Relationships": page_schema(
            relationships={"type": "array", "items": schema_ref("Relationship")}, next_page_token=_NEXT_PAGE_TOKEN
        ),
        "RelationshipFound": object_schema(exists={"type": "boolean"}, version=integer_schema()),
        "Transaction": object_schema(
            tx_id=TX_ID,
            client_id=TEXT_SCHEMA,
            sequence=positive_integer_schema(),
            idempotency_key=_HEX,
            operations={"type": "array", "items": schema_ref("Operation")},
            timestamp_ms=timestamp_schema(),
            actor=TEXT_SCHEMA,
            block_height=positive_integer_schema(),
            version=positive_integer_schema(),
            request_hash=_HASH,
            erased={"type": "boolean"},
        ),
        "TransactionOutcome": outcome_schema(transaction=schema_ref("Transaction")),
        "BlockHeader": object_schema(
            lane=integer_schema(),
            height=positive_integer_schema(),
            first_position=positive_integer_schema(),
            count=positive_integer_schema(),
            timestamp_ms=timestamp_schema(),
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
            count=positive_integer_schema(),
            path={"type": "array", "items": _HASH},
            block=schema_ref("BlockHeader"),
        ),
    }


def _write_schema(content: Mapping[str, Schema]) -> Schema:
    organization = {"type": "string", "minLength": 1, "maxLength": SCOPE_NAME_CHARACTERS_MAX, "pattern": NO_NUL}
    schema = object_schema(
        organization=organization, sequence={**positive_integer_schema(), "description": "1, 2, 3 … of this client."}
    )
    schema["required"] += content
    schema["additionalProperties"] = False
    return with_optional(
        schema,
        **content,
        vault={"type": "string", "maxLength": SCOPE_NAME_CHARACTERS_MAX, "pattern": NO_NUL},
        client_id={**TEXT_SCHEMA, "description": "The credential's own; may be left out, and is then that."},
        idempotency_key={
            **IDEMPOTENCY_KEY,
            "description": "A UUID, or its 32 hexadecimal digits, not all zero. Without it a retry is known by its "
            "sequence alone.",
        },
    )


def _batch_item_schema(operations: Schema) -> Schema:
    return with_optional(
        {**object_schema(operations=operations), "additionalProperties": False},
        organization={**TEXT_SCHEMA, "description": "The batch's, or left out."},
        vault={**TEXT_SCHEMA, "description": "The batch's, or left out."},
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
        expires_at_ms=integer_schema("Log time, from which on it counts as absent."),
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
        index=integer_schema(), count=positive_integer_schema(), path={"type": "array", "items": _HASH}, salt=_HEX
    )
    return object_schema(
        committed_tx_id=TX_ID,
        assigned_sequence=positive_integer_schema(),
        version=positive_integer_schema(),
        timestamp_ms=timestamp_schema(),
        actor=TEXT_SCHEMA,
        block_height=positive_integer_schema(),
        block_header=schema_ref("BlockHeader"),
        transaction_proof=proof,
    )


def _earlier_receipt_schema() -> Schema:
    return with_optional(
        object_schema(assigned_sequence=positive_integer_schema(), already_committed={"const": True}),
        committed_tx_id=TX_ID,
        block_height=positive_integer_schema(),
        erased={"const": True},
    )


def _base64_schema() -> Schema:
    return {
        "type": "string",
        "contentEncoding": "base64",
        "pattern": "^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$",
    }
