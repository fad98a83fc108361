"""The part of the description that speaks of the ledger."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from oncelog.core.limits import ENTITY_KEY_CHARACTERS_MAX, NAME_CHARACTERS_MAX, OPERATIONS_MAX
from oncelog.core.transactions import TX_ID_DIGITS
from oncelog.server.ledger.service import SCOPE_NAME_CHARACTERS_MAX
from oncelog.server.ledger.values import WriteErrorCode
from oncelog.server.limits import ApiLimits
from oncelog.server.openapi.parts import (
    JSON,
    NO_NUL,
    TEXT_SCHEMA,
    Schema,
    integer_schema,
    object_schema,
    operation,
    parameter,
    positive_integer_schema,
    schema_ref,
    schema_response,
    timestamp_schema,
)

_HEX: Final[Schema] = {"type": "string", "pattern": "^[0-9a-f]*$"}
_HASH: Final[Schema] = {"type": "string", "pattern": "^[0-9a-f]{64}$"}
_TX_ID: Final[Schema] = {"type": "string", "pattern": f"^[0-9a-f]{{{TX_ID_DIGITS}}}$"}
_KEY: Final = "^([0-9a-fA-F]{32}|[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12})?$"
_READ_ERRORS: Final = (400, 401, 429)


def build_paths(limits: ApiLimits) -> Schema:
    """The paths under /v1/ledger/."""
    page = (_page_token_parameter(), _page_size_parameter(limits))
    named = [
        _query_parameter(name, "What it must be; without it, any.") for name in ("resource", "relation", "subject")
    ]
    exact = [_mandatory_parameter(name, "Of the relationship.") for name in ("resource", "relation", "subject")]
    tx_id = {**parameter("tx_id", {**_TX_ID, "description": "Of the transaction."}), "required": True}
    height = {**parameter("height", {**positive_integer_schema(), "description": "Of the block."}), "required": True}
    client = _query_parameter("client_id", "Whose. Without it, the credential's.", NAME_CHARACTERS_MAX - len("client:"))
    gets: Sequence[tuple[str, str, str, str, Sequence[Schema], Sequence[int]]] = (
        ("client-state", "ClientState", "Where a client stands", "0 for one never seen, or evicted.", [client], ()),
        (
            "entity",
            "EntityFound",
            "Read an entity",
            "Null where there is none, or it has expired.",
            [_mandatory_parameter("key", "Of the entity.")],
            (),
        ),
        (
            "entities",
            "Entities",
            "List entities by key",
            "Page by page.",
            [_query_parameter("prefix", "Only keys that begin with it."), *page],
            (),
        ),
        (
            "relationships",
            "Relationships",
            "List relationships",
            "In the order of resource, relation and subject, page by page. A relation needs a resource or a subject.",
            [*named, *page],
            (),
        ),
        ("relationship", "RelationshipFound", "Look for a relationship", "Whether it is there.", exact, ()),
        ("transaction", "Transaction", "Read a transaction", "As it was committed.", [tx_id], (404,)),
        ("block", "Block", "Read a block", "Of the scope's lane, with the scope's own transactions.", [height], (404,)),
        (
            "proof",
            "ProofDocument",
            "Prove a transaction",
            "All that a verifier needs (docs/proofs.md).",
            [tx_id],
            (404,),
        ),
    )
    return {
        "/v1/ledger/write": {"post": _write_operation("write", "Write", "a transaction", limits)},
        "/v1/ledger/batch-write": {
            "post": _write_operation("batchWrite", "BatchWrite", "several writes as one", limits)
        },
        **{
            f"/v1/ledger/{path}": {"get": _get_operation(path, schema, summary, about, parameters, errors)}
            for path, schema, summary, about, parameters, errors in gets
        },
        "/v1/ledger/blocks/stream": {"get": _stream_operation()},
    }


def _write_operation(name: str, schema: str, what: str, limits: ApiLimits) -> Schema:
    about = (
        "A transaction is committed once, however often it is sent. The answer has what became of it: a success, or an "
        "`error` with a code, as data."
    )
    told = schema_response("WriteAnswer", "What became of it.")
    body = {
        "required": True,
        "description": f"At most {limits.frame_bytes_max} bytes.",
        "content": {JSON: {"schema": schema_ref(schema)}},
    }
    return {
        **operation(name, f"Commit {what}, once", about, told, (400, 401, 408, 413, 415, 429, 503, 507), tag="ledger"),
        "requestBody": body,
    }


def _get_operation(
    path: str, schema: str, summary: str, description: str, parameters: Sequence[Schema], errors: Sequence[int]
) -> Schema:
    told = schema_response(schema, description)
    name = "".join(word.capitalize() for word in path.split("-"))
    return {
        **operation(f"get{name}", summary, description, told, (*_READ_ERRORS, *errors), tag="ledger"),
        "parameters": [*_scope_parameters(), *parameters],
    }


def _stream_operation() -> Schema:
    about = (
        "Server-sent events: every block of the scope's lane after a height, and those to come, each once and in "
        "order. The id of each is its height, so a browser resumes by itself where it was."
    )
    told = {
        "description": "A stream that does not end by itself.",
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
    }
    resumed = {
        "anyOf": [integer_schema(), {"type": "string", "maxLength": 0}],
        "description": "The last height that was received. It goes before `after_height`. An empty one is none.",
    }
    epoch = parameter(
        "epoch", {**TEXT_SCHEMA, "description": "That of the block which the height is of. Another one gets 409."}
    )
    after = parameter("after_height", {**integer_schema("The cursor: blocks above this height."), "default": 0})
    return {
        **operation("watchBlocks", "Follow blocks", about, told, (*_READ_ERRORS, 409, 503), tag="ledger"),
        "parameters": [*_scope_parameters(), after, epoch, {**parameter("Last-Event-ID", resumed), "in": "header"}],
    }


def _scope_parameters() -> list[Schema]:
    vault = _query_parameter(
        "vault", "One of the organization's. Without it, the organization itself.", SCOPE_NAME_CHARACTERS_MAX
    )
    return [_mandatory_parameter("organization", "Whose ledger.", SCOPE_NAME_CHARACTERS_MAX), vault]


def _query_parameter(name: str, description: str, characters_max: int = ENTITY_KEY_CHARACTERS_MAX) -> Schema:
    schema = {"type": "string", "maxLength": characters_max, "pattern": NO_NUL, "description": description}
    return parameter(name, schema)


def _mandatory_parameter(name: str, description: str, characters_max: int = ENTITY_KEY_CHARACTERS_MAX) -> Schema:
    found = {**_query_parameter(name, description, characters_max), "required": True}
    found["schema"]["minLength"] = 1
    return found


def _page_token_parameter() -> Schema:
    return parameter(
        "page_token", {**TEXT_SCHEMA, "description": "`next_page_token` of the page before. Nothing else."}
    )


def _page_size_parameter(limits: ApiLimits) -> Schema:
    about = f"How many; at most {limits.page_events_max}, and 0 is the server's default."
    return parameter("page_size", {**integer_schema(about), "default": 0})


# --- schemas -----------------------------------------------------------------------------------------------


def build_schemas(limits: ApiLimits) -> Schema:
    """What is sent and answered there."""
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
        "WriteAnswer": {"oneOf": [_success_schema(), object_schema(error=_write_error_schema())]},
        "ClientState": object_schema(
            last_committed_sequence=integer_schema(),
            last_seen_ms=integer_schema(),
            last_idempotency_key=_HEX,
            last_request_hash=_HEX,
        ),
        "Entity": _with_optional(
            object_schema(key=TEXT_SCHEMA, value=_base64_schema(), version=positive_integer_schema()),
            expires_at_ms=integer_schema(),
            erased={"const": True},
        ),
        "EntityFound": object_schema(entity={"anyOf": [schema_ref("Entity"), {"type": "null"}]}),
        "Entities": object_schema(
            entities={"type": "array", "items": schema_ref("Entity")}, next_page_token=TEXT_SCHEMA
        ),
        "Relationship": object_schema(
            resource=TEXT_SCHEMA, relation=TEXT_SCHEMA, subject=TEXT_SCHEMA, version=positive_integer_schema()
        ),
        "Relationships": object_schema(
            relationships={"type": "array", "items": schema_ref("Relationship")}, next_page_token=TEXT_SCHEMA
        ),
        "RelationshipFound": object_schema(exists={"type": "boolean"}, version=integer_schema()),
        "Transaction": object_schema(
            tx_id=_TX_ID,
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
        "BlockHeader": object_schema(
            lane=positive_integer_schema(),
            height=positive_integer_schema(),
            first_position=positive_integer_schema(),
            count=positive_integer_schema(),
            timestamp_ms=timestamp_schema(),
            previous_hash=_HASH,
            merkle_root=_HASH,
            hash=_HASH,
        ),
        "Block": object_schema(
            header=schema_ref("BlockHeader"), tx_ids={"type": "array", "items": _TX_ID}, epoch=TEXT_SCHEMA
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
    return _with_optional(
        schema,
        **content,
        vault={"type": "string", "maxLength": SCOPE_NAME_CHARACTERS_MAX, "pattern": NO_NUL},
        client_id={**TEXT_SCHEMA, "description": "The credential's own; may be left out, and is then that."},
        idempotency_key={
            "type": "string",
            "pattern": _KEY,
            "description": "A UUID, or its 32 hexadecimal digits, not all zero. Without it a retry is known by its "
            "sequence alone.",
        },
    )


def _batch_item_schema(operations: Schema) -> Schema:
    return _with_optional(
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
    setting = _with_optional(
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
        committed_tx_id=_TX_ID,
        assigned_sequence=positive_integer_schema(),
        version=positive_integer_schema(),
        timestamp_ms=timestamp_schema(),
        actor=TEXT_SCHEMA,
        block_height=positive_integer_schema(),
        block_header=schema_ref("BlockHeader"),
        transaction_proof=proof,
    )


def _write_error_schema() -> Schema:
    codes = {"enum": [code.name for code in WriteErrorCode]}
    numbers = {"enum": [code.value for code in WriteErrorCode]}
    return _with_optional(
        object_schema(code=codes, number=numbers, message=TEXT_SCHEMA),
        key={**TEXT_SCHEMA, "description": "The entity of a failed condition."},
        operation_index=integer_schema("The operation that it stood in."),
        current_version=positive_integer_schema(),
        current_value=_base64_schema(),
        committed_tx_id=_TX_ID,
        block_height=positive_integer_schema(),
        assigned_sequence=positive_integer_schema(),
        erased={"const": True},
        last_committed_sequence=integer_schema(),
    )


def _base64_schema() -> Schema:
    return {
        "type": "string",
        "contentEncoding": "base64",
        "pattern": "^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$",
    }


def _with_optional(schema: Schema, **properties: Any) -> Schema:
    """The same with properties that may be left out."""
    return {**schema, "properties": {**schema["properties"], **properties}}
