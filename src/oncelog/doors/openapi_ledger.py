"""The part of the description that speaks of the ledger."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from oncelog.core.limits import ENTITY_KEY_CHARACTERS_MAX, NAME_CHARACTERS_MAX, OPERATIONS_MAX
from oncelog.core.transactions import TX_ID_DIGITS
from oncelog.doors.ledger.door import SCOPE_NAME_CHARACTERS_MAX
from oncelog.doors.ledger.values import WriteErrorCode
from oncelog.doors.limits import DoorLimits
from oncelog.doors.openapi_parts import (
    JSON,
    NO_NUL,
    TEXT,
    Schema,
    answer,
    number,
    object_of,
    operation,
    parameter,
    ref,
    time,
    whole,
)

_HEX: Final[Schema] = {"type": "string", "pattern": "^[0-9a-f]*$"}
_HASH: Final[Schema] = {"type": "string", "pattern": "^[0-9a-f]{64}$"}
_TX_ID: Final[Schema] = {"type": "string", "pattern": f"^[0-9a-f]{{{TX_ID_DIGITS}}}$"}
_KEY: Final = "^([0-9a-fA-F]{32}|[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12})?$"
_READ: Final = (400, 401, 429)


def paths(limits: DoorLimits) -> Schema:
    """The paths under /v1/ledger/."""
    page = (_page_token(), _page_size(limits))
    named = [_query(name, "What it must be; without it, any.") for name in ("resource", "relation", "subject")]
    exact = [_required(name, "Of the relationship.") for name in ("resource", "relation", "subject")]
    tx_id = {**parameter("tx_id", {**_TX_ID, "description": "Of the transaction."}), "required": True}
    height = {**parameter("height", {**number(), "description": "Of the block."}), "required": True}
    client = _query("client_id", "Whose. Without it, the credential's.", NAME_CHARACTERS_MAX - len("client:"))
    gets: Sequence[tuple[str, str, str, str, Sequence[Schema], Sequence[int]]] = (
        ("client-state", "ClientState", "Where a client stands", "0 for one never seen, or evicted.", [client], ()),
        (
            "entity",
            "EntityFound",
            "Read an entity",
            "Null where there is none, or it has expired.",
            [_required("key", "Of the entity.")],
            (),
        ),
        (
            "entities",
            "Entities",
            "List entities by key",
            "Page by page.",
            [_query("prefix", "Only keys that begin with it."), *page],
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
        "/v1/ledger/write": {"post": _write("write", "Write", "a transaction", limits)},
        "/v1/ledger/batch-write": {"post": _write("batchWrite", "BatchWrite", "several writes as one", limits)},
        **{
            f"/v1/ledger/{path}": {"get": _get(path, schema, summary, about, parameters, errors)}
            for path, schema, summary, about, parameters, errors in gets
        },
        "/v1/ledger/blocks/stream": {"get": _stream()},
    }


def _write(name: str, schema: str, what: str, limits: DoorLimits) -> Schema:
    about = (
        "A transaction is committed once, however often it is sent. The answer has what became of it: a success, or an "
        "`error` with a code, as data."
    )
    told = answer("WriteAnswer", "What became of it.")
    body = {
        "required": True,
        "description": f"At most {limits.frame_bytes_max} bytes.",
        "content": {JSON: {"schema": ref(schema)}},
    }
    return {
        **operation(name, f"Commit {what}, once", about, told, (400, 401, 408, 413, 415, 429, 503, 507), tag="ledger"),
        "requestBody": body,
    }


def _get(
    path: str, schema: str, summary: str, about: str, parameters: Sequence[Schema], errors: Sequence[int]
) -> Schema:
    told = answer(schema, about)
    name = "".join(word.capitalize() for word in path.split("-"))
    return {
        **operation(f"get{name}", summary, about, told, (*_READ, *errors), tag="ledger"),
        "parameters": [*_scope(), *parameters],
    }


def _stream() -> Schema:
    about = (
        "Server-sent events: every block of the scope's lane after a height, and those to come, each once and in "
        "order. The id of each is its height, so a browser resumes by itself where it was."
    )
    told = {
        "description": "A stream that does not end by itself.",
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
    }
    resumed = {
        "anyOf": [whole(), {"type": "string", "maxLength": 0}],
        "description": "The last height that was received. It goes before `after_height`. An empty one is none.",
    }
    epoch = parameter(
        "epoch", {**TEXT, "description": "That of the block which the height is of. Another one gets 409."}
    )
    after = parameter("after_height", {**whole("The cursor: blocks above this height."), "default": 0})
    return {
        **operation("watchBlocks", "Follow blocks", about, told, (*_READ, 409, 503), tag="ledger"),
        "parameters": [*_scope(), after, epoch, {**parameter("Last-Event-ID", resumed), "in": "header"}],
    }


def _scope() -> list[Schema]:
    vault = _query(
        "vault", "One of the organization's. Without it, the organization itself.", SCOPE_NAME_CHARACTERS_MAX
    )
    return [_required("organization", "Whose ledger.", SCOPE_NAME_CHARACTERS_MAX), vault]


def _query(name: str, about: str, characters_max: int = ENTITY_KEY_CHARACTERS_MAX) -> Schema:
    schema = {"type": "string", "maxLength": characters_max, "pattern": NO_NUL, "description": about}
    return parameter(name, schema)


def _required(name: str, about: str, characters_max: int = ENTITY_KEY_CHARACTERS_MAX) -> Schema:
    found = {**_query(name, about, characters_max), "required": True}
    found["schema"]["minLength"] = 1
    return found


def _page_token() -> Schema:
    return parameter("page_token", {**TEXT, "description": "`next_page_token` of the page before. Nothing else."})


def _page_size(limits: DoorLimits) -> Schema:
    about = f"How many; at most {limits.page_events_max}, and 0 is the server's default."
    return parameter("page_size", {**whole(about), "default": 0})


# --- schemas -----------------------------------------------------------------------------------------------


def schemas(limits: DoorLimits) -> Schema:
    """What is sent and answered there."""
    operations = {
        "type": "array",
        "minItems": 1,
        "maxItems": OPERATIONS_MAX,
        "items": ref("Operation"),
        "description": "Applied all or none, each seeing what the ones before it did.",
    }
    return {
        "Write": _written({"operations": operations}),
        "BatchWrite": _written({"writes": {"type": "array", "minItems": 1, "items": _batched(operations)}}),
        "Operation": _operation(limits),
        "WriteAnswer": {"oneOf": [_success(), object_of(error=_write_error())]},
        "ClientState": object_of(
            last_committed_sequence=whole(), last_seen_ms=whole(), last_idempotency_key=_HEX, last_request_hash=_HEX
        ),
        "Entity": _optional(
            object_of(key=TEXT, value=_base64(), version=number()), expires_at_ms=whole(), erased={"const": True}
        ),
        "EntityFound": object_of(entity={"anyOf": [ref("Entity"), {"type": "null"}]}),
        "Entities": object_of(entities={"type": "array", "items": ref("Entity")}, next_page_token=TEXT),
        "Relationship": object_of(resource=TEXT, relation=TEXT, subject=TEXT, version=number()),
        "Relationships": object_of(relationships={"type": "array", "items": ref("Relationship")}, next_page_token=TEXT),
        "RelationshipFound": object_of(exists={"type": "boolean"}, version=whole()),
        "Transaction": object_of(
            tx_id=_TX_ID,
            client_id=TEXT,
            sequence=number(),
            idempotency_key=_HEX,
            operations={"type": "array", "items": ref("Operation")},
            timestamp_ms=time(),
            actor=TEXT,
            block_height=number(),
            version=number(),
            request_hash=_HASH,
            erased={"type": "boolean"},
        ),
        "BlockHeader": object_of(
            lane=number(),
            height=number(),
            first_position=number(),
            count=number(),
            timestamp_ms=time(),
            previous_hash=_HASH,
            merkle_root=_HASH,
            hash=_HASH,
        ),
        "Block": object_of(header=ref("BlockHeader"), tx_ids={"type": "array", "items": _TX_ID}, epoch=TEXT),
        "ProofDocument": object_of(
            record={"type": "object"},
            salt={"type": ["string", "null"]},
            body={"type": ["string", "null"]},
            body_hash=_HASH,
            index=whole(),
            count=number(),
            path={"type": "array", "items": _HASH},
            block=ref("BlockHeader"),
        ),
    }


def _written(content: Mapping[str, Schema]) -> Schema:
    organization = {"type": "string", "minLength": 1, "maxLength": SCOPE_NAME_CHARACTERS_MAX, "pattern": NO_NUL}
    schema = object_of(organization=organization, sequence={**number(), "description": "1, 2, 3 … of this client."})
    schema["required"] += content
    schema["additionalProperties"] = False
    return _optional(
        schema,
        **content,
        vault={"type": "string", "maxLength": SCOPE_NAME_CHARACTERS_MAX, "pattern": NO_NUL},
        client_id={**TEXT, "description": "The credential's own; may be left out, and is then that."},
        idempotency_key={
            "type": "string",
            "pattern": _KEY,
            "description": "A UUID, or its 32 hexadecimal digits, not all zero. Without it a retry is known by its "
            "sequence alone.",
        },
    )


def _batched(operations: Schema) -> Schema:
    return _optional(
        {**object_of(operations=operations), "additionalProperties": False},
        organization={**TEXT, "description": "The batch's, or left out."},
        vault={**TEXT, "description": "The batch's, or left out."},
    )


def _operation(limits: DoorLimits) -> Schema:
    name = {"type": "string", "minLength": 1, "maxLength": ENTITY_KEY_CHARACTERS_MAX, "pattern": NO_NUL}
    related = {**object_of(resource=name, relation=name, subject=name), "additionalProperties": False}
    conditions = {
        "must_not_exist": {"const": True},
        "must_exist": {"const": True},
        "version_is": whole(),
        "value_equals": _base64(),
    }
    condition = {"oneOf": [_only(one, schema) for one, schema in conditions.items()]}
    setting = _optional(
        object_of(key=name),
        value={**_base64(), "description": f"In base64; at most {limits.entity_value_bytes_max} bytes."},
        expires_at_ms=whole("Log time, from which on it counts as absent."),
        condition=condition,
    )
    kinds = {
        "set_entity": {**setting, "additionalProperties": False},
        "delete_entity": {**object_of(key=name), "additionalProperties": False},
        "create_relationship": related,
        "delete_relationship": related,
    }
    return {"oneOf": [_only(kind, schema) for kind, schema in kinds.items()]}


def _only(name: str, schema: Schema) -> Schema:
    return {**object_of(**{name: schema}), "additionalProperties": False}


def _success() -> Schema:
    proof = object_of(index=whole(), count=number(), path={"type": "array", "items": _HASH}, salt=_HEX)
    return object_of(
        committed_tx_id=_TX_ID,
        assigned_sequence=number(),
        version=number(),
        timestamp_ms=time(),
        actor=TEXT,
        block_height=number(),
        block_header=ref("BlockHeader"),
        transaction_proof=proof,
    )


def _write_error() -> Schema:
    codes = {"enum": [code.name for code in WriteErrorCode]}
    numbers = {"enum": [code.value for code in WriteErrorCode]}
    return _optional(
        object_of(code=codes, number=numbers, message=TEXT),
        key={**TEXT, "description": "The entity of a failed condition."},
        operation_index=whole("The operation that it stood in."),
        current_version=number(),
        current_value=_base64(),
        committed_tx_id=_TX_ID,
        block_height=number(),
        assigned_sequence=number(),
        erased={"const": True},
        last_committed_sequence=whole(),
    )


def _base64() -> Schema:
    return {
        "type": "string",
        "contentEncoding": "base64",
        "pattern": "^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$",
    }


def _optional(schema: Schema, **properties: Any) -> Schema:
    """The same with properties that may be left out."""
    return {**schema, "properties": {**schema["properties"], **properties}}
