from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WriteErrorCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WRITE_ERROR_CODE_UNSPECIFIED: _ClassVar[WriteErrorCode]
    WRITE_ERROR_CODE_KEY_EXISTS: _ClassVar[WriteErrorCode]
    WRITE_ERROR_CODE_KEY_NOT_FOUND: _ClassVar[WriteErrorCode]
    WRITE_ERROR_CODE_VERSION_MISMATCH: _ClassVar[WriteErrorCode]
    WRITE_ERROR_CODE_VALUE_MISMATCH: _ClassVar[WriteErrorCode]
    WRITE_ERROR_CODE_ALREADY_COMMITTED: _ClassVar[WriteErrorCode]
    WRITE_ERROR_CODE_IDEMPOTENCY_KEY_REUSED: _ClassVar[WriteErrorCode]
    WRITE_ERROR_CODE_SEQUENCE_GAP: _ClassVar[WriteErrorCode]
    WRITE_ERROR_CODE_SEQUENCE_REUSED: _ClassVar[WriteErrorCode]
WRITE_ERROR_CODE_UNSPECIFIED: WriteErrorCode
WRITE_ERROR_CODE_KEY_EXISTS: WriteErrorCode
WRITE_ERROR_CODE_KEY_NOT_FOUND: WriteErrorCode
WRITE_ERROR_CODE_VERSION_MISMATCH: WriteErrorCode
WRITE_ERROR_CODE_VALUE_MISMATCH: WriteErrorCode
WRITE_ERROR_CODE_ALREADY_COMMITTED: WriteErrorCode
WRITE_ERROR_CODE_IDEMPOTENCY_KEY_REUSED: WriteErrorCode
WRITE_ERROR_CODE_SEQUENCE_GAP: WriteErrorCode
WRITE_ERROR_CODE_SEQUENCE_REUSED: WriteErrorCode

class WriteRequest(_message.Message):
    __slots__ = ("organization", "vault", "client_id", "sequence", "idempotency_key", "operations")
    ORGANIZATION_FIELD_NUMBER: _ClassVar[int]
    VAULT_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    IDEMPOTENCY_KEY_FIELD_NUMBER: _ClassVar[int]
    OPERATIONS_FIELD_NUMBER: _ClassVar[int]
    organization: str
    vault: str
    client_id: str
    sequence: int
    idempotency_key: bytes
    operations: _containers.RepeatedCompositeFieldContainer[Operation]
    def __init__(self, organization: _Optional[str] = ..., vault: _Optional[str] = ..., client_id: _Optional[str] = ..., sequence: _Optional[int] = ..., idempotency_key: _Optional[bytes] = ..., operations: _Optional[_Iterable[_Union[Operation, _Mapping]]] = ...) -> None: ...

class BatchWriteRequest(_message.Message):
    __slots__ = ("organization", "vault", "client_id", "sequence", "idempotency_key", "writes")
    ORGANIZATION_FIELD_NUMBER: _ClassVar[int]
    VAULT_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    IDEMPOTENCY_KEY_FIELD_NUMBER: _ClassVar[int]
    WRITES_FIELD_NUMBER: _ClassVar[int]
    organization: str
    vault: str
    client_id: str
    sequence: int
    idempotency_key: bytes
    writes: _containers.RepeatedCompositeFieldContainer[BatchedWrite]
    def __init__(self, organization: _Optional[str] = ..., vault: _Optional[str] = ..., client_id: _Optional[str] = ..., sequence: _Optional[int] = ..., idempotency_key: _Optional[bytes] = ..., writes: _Optional[_Iterable[_Union[BatchedWrite, _Mapping]]] = ...) -> None: ...

class BatchedWrite(_message.Message):
    __slots__ = ("organization", "vault", "operations")
    ORGANIZATION_FIELD_NUMBER: _ClassVar[int]
    VAULT_FIELD_NUMBER: _ClassVar[int]
    OPERATIONS_FIELD_NUMBER: _ClassVar[int]
    organization: str
    vault: str
    operations: _containers.RepeatedCompositeFieldContainer[Operation]
    def __init__(self, organization: _Optional[str] = ..., vault: _Optional[str] = ..., operations: _Optional[_Iterable[_Union[Operation, _Mapping]]] = ...) -> None: ...

class Operation(_message.Message):
    __slots__ = ("set_entity", "delete_entity", "create_relationship", "delete_relationship")
    SET_ENTITY_FIELD_NUMBER: _ClassVar[int]
    DELETE_ENTITY_FIELD_NUMBER: _ClassVar[int]
    CREATE_RELATIONSHIP_FIELD_NUMBER: _ClassVar[int]
    DELETE_RELATIONSHIP_FIELD_NUMBER: _ClassVar[int]
    set_entity: SetEntity
    delete_entity: DeleteEntity
    create_relationship: Relationship
    delete_relationship: Relationship
    def __init__(self, set_entity: _Optional[_Union[SetEntity, _Mapping]] = ..., delete_entity: _Optional[_Union[DeleteEntity, _Mapping]] = ..., create_relationship: _Optional[_Union[Relationship, _Mapping]] = ..., delete_relationship: _Optional[_Union[Relationship, _Mapping]] = ...) -> None: ...

class SetEntity(_message.Message):
    __slots__ = ("key", "value", "expires_at_ms", "condition")
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_MS_FIELD_NUMBER: _ClassVar[int]
    CONDITION_FIELD_NUMBER: _ClassVar[int]
    key: str
    value: bytes
    expires_at_ms: int
    condition: Condition
    def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ..., expires_at_ms: _Optional[int] = ..., condition: _Optional[_Union[Condition, _Mapping]] = ...) -> None: ...

class DeleteEntity(_message.Message):
    __slots__ = ("key",)
    KEY_FIELD_NUMBER: _ClassVar[int]
    key: str
    def __init__(self, key: _Optional[str] = ...) -> None: ...

class Condition(_message.Message):
    __slots__ = ("must_not_exist", "must_exist", "version_is", "value_equals")
    MUST_NOT_EXIST_FIELD_NUMBER: _ClassVar[int]
    MUST_EXIST_FIELD_NUMBER: _ClassVar[int]
    VERSION_IS_FIELD_NUMBER: _ClassVar[int]
    VALUE_EQUALS_FIELD_NUMBER: _ClassVar[int]
    must_not_exist: bool
    must_exist: bool
    version_is: int
    value_equals: bytes
    def __init__(self, must_not_exist: _Optional[bool] = ..., must_exist: _Optional[bool] = ..., version_is: _Optional[int] = ..., value_equals: _Optional[bytes] = ...) -> None: ...

class Relationship(_message.Message):
    __slots__ = ("resource", "relation", "subject")
    RESOURCE_FIELD_NUMBER: _ClassVar[int]
    RELATION_FIELD_NUMBER: _ClassVar[int]
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    resource: str
    relation: str
    subject: str
    def __init__(self, resource: _Optional[str] = ..., relation: _Optional[str] = ..., subject: _Optional[str] = ...) -> None: ...

class StreamWritesRequest(_message.Message):
    __slots__ = ("writes",)
    WRITES_FIELD_NUMBER: _ClassVar[int]
    writes: _containers.RepeatedCompositeFieldContainer[StreamedWrite]
    def __init__(self, writes: _Optional[_Iterable[_Union[StreamedWrite, _Mapping]]] = ...) -> None: ...

class StreamedWrite(_message.Message):
    __slots__ = ("write", "traceparent")
    WRITE_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    write: WriteRequest
    traceparent: str
    def __init__(self, write: _Optional[_Union[WriteRequest, _Mapping]] = ..., traceparent: _Optional[str] = ...) -> None: ...

class StreamWritesResponse(_message.Message):
    __slots__ = ("answers",)
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    answers: _containers.RepeatedCompositeFieldContainer[StreamedAnswer]
    def __init__(self, answers: _Optional[_Iterable[_Union[StreamedAnswer, _Mapping]]] = ...) -> None: ...

class StreamedAnswer(_message.Message):
    __slots__ = ("response", "error")
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    response: WriteResponse
    error: CallError
    def __init__(self, response: _Optional[_Union[WriteResponse, _Mapping]] = ..., error: _Optional[_Union[CallError, _Mapping]] = ...) -> None: ...

class CallError(_message.Message):
    __slots__ = ("code", "message", "reason", "details")
    class DetailsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    code: int
    message: str
    reason: str
    details: _containers.ScalarMap[str, str]
    def __init__(self, code: _Optional[int] = ..., message: _Optional[str] = ..., reason: _Optional[str] = ..., details: _Optional[_Mapping[str, str]] = ...) -> None: ...

class WriteResponse(_message.Message):
    __slots__ = ("success", "error")
    SUCCESS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    success: WriteSuccess
    error: WriteError
    def __init__(self, success: _Optional[_Union[WriteSuccess, _Mapping]] = ..., error: _Optional[_Union[WriteError, _Mapping]] = ...) -> None: ...

class WriteSuccess(_message.Message):
    __slots__ = ("committed_tx_id", "block_height", "block_header", "transaction_proof", "assigned_sequence", "version", "timestamp_ms", "actor")
    COMMITTED_TX_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HEIGHT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HEADER_FIELD_NUMBER: _ClassVar[int]
    TRANSACTION_PROOF_FIELD_NUMBER: _ClassVar[int]
    ASSIGNED_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMP_MS_FIELD_NUMBER: _ClassVar[int]
    ACTOR_FIELD_NUMBER: _ClassVar[int]
    committed_tx_id: str
    block_height: int
    block_header: BlockHeader
    transaction_proof: TransactionProof
    assigned_sequence: int
    version: int
    timestamp_ms: int
    actor: str
    def __init__(self, committed_tx_id: _Optional[str] = ..., block_height: _Optional[int] = ..., block_header: _Optional[_Union[BlockHeader, _Mapping]] = ..., transaction_proof: _Optional[_Union[TransactionProof, _Mapping]] = ..., assigned_sequence: _Optional[int] = ..., version: _Optional[int] = ..., timestamp_ms: _Optional[int] = ..., actor: _Optional[str] = ...) -> None: ...

class WriteError(_message.Message):
    __slots__ = ("code", "message", "key", "current_version", "current_value", "operation_index", "committed_tx_id", "block_height", "assigned_sequence", "erased", "last_committed_sequence")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    CURRENT_VERSION_FIELD_NUMBER: _ClassVar[int]
    CURRENT_VALUE_FIELD_NUMBER: _ClassVar[int]
    OPERATION_INDEX_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_TX_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HEIGHT_FIELD_NUMBER: _ClassVar[int]
    ASSIGNED_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    ERASED_FIELD_NUMBER: _ClassVar[int]
    LAST_COMMITTED_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    code: WriteErrorCode
    message: str
    key: str
    current_version: int
    current_value: bytes
    operation_index: int
    committed_tx_id: str
    block_height: int
    assigned_sequence: int
    erased: bool
    last_committed_sequence: int
    def __init__(self, code: _Optional[_Union[WriteErrorCode, str]] = ..., message: _Optional[str] = ..., key: _Optional[str] = ..., current_version: _Optional[int] = ..., current_value: _Optional[bytes] = ..., operation_index: _Optional[int] = ..., committed_tx_id: _Optional[str] = ..., block_height: _Optional[int] = ..., assigned_sequence: _Optional[int] = ..., erased: _Optional[bool] = ..., last_committed_sequence: _Optional[int] = ...) -> None: ...

class GetClientStateRequest(_message.Message):
    __slots__ = ("organization", "vault", "client_id")
    ORGANIZATION_FIELD_NUMBER: _ClassVar[int]
    VAULT_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    organization: str
    vault: str
    client_id: str
    def __init__(self, organization: _Optional[str] = ..., vault: _Optional[str] = ..., client_id: _Optional[str] = ...) -> None: ...

class GetClientStateResponse(_message.Message):
    __slots__ = ("last_committed_sequence", "last_seen_ms", "last_idempotency_key", "last_request_hash")
    LAST_COMMITTED_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    LAST_SEEN_MS_FIELD_NUMBER: _ClassVar[int]
    LAST_IDEMPOTENCY_KEY_FIELD_NUMBER: _ClassVar[int]
    LAST_REQUEST_HASH_FIELD_NUMBER: _ClassVar[int]
    last_committed_sequence: int
    last_seen_ms: int
    last_idempotency_key: bytes
    last_request_hash: bytes
    def __init__(self, last_committed_sequence: _Optional[int] = ..., last_seen_ms: _Optional[int] = ..., last_idempotency_key: _Optional[bytes] = ..., last_request_hash: _Optional[bytes] = ...) -> None: ...

class Entity(_message.Message):
    __slots__ = ("key", "value", "version", "expires_at_ms", "erased")
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_MS_FIELD_NUMBER: _ClassVar[int]
    ERASED_FIELD_NUMBER: _ClassVar[int]
    key: str
    value: bytes
    version: int
    expires_at_ms: int
    erased: bool
    def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ..., version: _Optional[int] = ..., expires_at_ms: _Optional[int] = ..., erased: _Optional[bool] = ...) -> None: ...

class GetEntityRequest(_message.Message):
    __slots__ = ("organization", "vault", "key")
    ORGANIZATION_FIELD_NUMBER: _ClassVar[int]
    VAULT_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    organization: str
    vault: str
    key: str
    def __init__(self, organization: _Optional[str] = ..., vault: _Optional[str] = ..., key: _Optional[str] = ...) -> None: ...

class GetEntityResponse(_message.Message):
    __slots__ = ("entity",)
    ENTITY_FIELD_NUMBER: _ClassVar[int]
    entity: Entity
    def __init__(self, entity: _Optional[_Union[Entity, _Mapping]] = ...) -> None: ...

class ListEntitiesRequest(_message.Message):
    __slots__ = ("organization", "vault", "prefix", "page_token", "page_size")
    ORGANIZATION_FIELD_NUMBER: _ClassVar[int]
    VAULT_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    organization: str
    vault: str
    prefix: str
    page_token: str
    page_size: int
    def __init__(self, organization: _Optional[str] = ..., vault: _Optional[str] = ..., prefix: _Optional[str] = ..., page_token: _Optional[str] = ..., page_size: _Optional[int] = ...) -> None: ...

class ListEntitiesResponse(_message.Message):
    __slots__ = ("entities", "next_page_token")
    ENTITIES_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    entities: _containers.RepeatedCompositeFieldContainer[Entity]
    next_page_token: str
    def __init__(self, entities: _Optional[_Iterable[_Union[Entity, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class ListRelationshipsRequest(_message.Message):
    __slots__ = ("organization", "vault", "resource", "relation", "subject", "page_token", "page_size")
    ORGANIZATION_FIELD_NUMBER: _ClassVar[int]
    VAULT_FIELD_NUMBER: _ClassVar[int]
    RESOURCE_FIELD_NUMBER: _ClassVar[int]
    RELATION_FIELD_NUMBER: _ClassVar[int]
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    organization: str
    vault: str
    resource: str
    relation: str
    subject: str
    page_token: str
    page_size: int
    def __init__(self, organization: _Optional[str] = ..., vault: _Optional[str] = ..., resource: _Optional[str] = ..., relation: _Optional[str] = ..., subject: _Optional[str] = ..., page_token: _Optional[str] = ..., page_size: _Optional[int] = ...) -> None: ...

class ListRelationshipsResponse(_message.Message):
    __slots__ = ("relationships", "next_page_token")
    RELATIONSHIPS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    relationships: _containers.RepeatedCompositeFieldContainer[StoredRelationship]
    next_page_token: str
    def __init__(self, relationships: _Optional[_Iterable[_Union[StoredRelationship, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class StoredRelationship(_message.Message):
    __slots__ = ("resource", "relation", "subject", "version")
    RESOURCE_FIELD_NUMBER: _ClassVar[int]
    RELATION_FIELD_NUMBER: _ClassVar[int]
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    resource: str
    relation: str
    subject: str
    version: int
    def __init__(self, resource: _Optional[str] = ..., relation: _Optional[str] = ..., subject: _Optional[str] = ..., version: _Optional[int] = ...) -> None: ...

class CheckRelationshipRequest(_message.Message):
    __slots__ = ("organization", "vault", "resource", "relation", "subject")
    ORGANIZATION_FIELD_NUMBER: _ClassVar[int]
    VAULT_FIELD_NUMBER: _ClassVar[int]
    RESOURCE_FIELD_NUMBER: _ClassVar[int]
    RELATION_FIELD_NUMBER: _ClassVar[int]
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    organization: str
    vault: str
    resource: str
    relation: str
    subject: str
    def __init__(self, organization: _Optional[str] = ..., vault: _Optional[str] = ..., resource: _Optional[str] = ..., relation: _Optional[str] = ..., subject: _Optional[str] = ...) -> None: ...

class CheckRelationshipResponse(_message.Message):
    __slots__ = ("exists", "version")
    EXISTS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    exists: bool
    version: int
    def __init__(self, exists: _Optional[bool] = ..., version: _Optional[int] = ...) -> None: ...

class GetTransactionRequest(_message.Message):
    __slots__ = ("organization", "vault", "tx_id")
    ORGANIZATION_FIELD_NUMBER: _ClassVar[int]
    VAULT_FIELD_NUMBER: _ClassVar[int]
    TX_ID_FIELD_NUMBER: _ClassVar[int]
    organization: str
    vault: str
    tx_id: str
    def __init__(self, organization: _Optional[str] = ..., vault: _Optional[str] = ..., tx_id: _Optional[str] = ...) -> None: ...

class Transaction(_message.Message):
    __slots__ = ("tx_id", "client_id", "sequence", "idempotency_key", "operations", "timestamp_ms", "actor", "block_height", "version", "request_hash", "erased")
    TX_ID_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    IDEMPOTENCY_KEY_FIELD_NUMBER: _ClassVar[int]
    OPERATIONS_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMP_MS_FIELD_NUMBER: _ClassVar[int]
    ACTOR_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HEIGHT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    REQUEST_HASH_FIELD_NUMBER: _ClassVar[int]
    ERASED_FIELD_NUMBER: _ClassVar[int]
    tx_id: str
    client_id: str
    sequence: int
    idempotency_key: bytes
    operations: _containers.RepeatedCompositeFieldContainer[Operation]
    timestamp_ms: int
    actor: str
    block_height: int
    version: int
    request_hash: bytes
    erased: bool
    def __init__(self, tx_id: _Optional[str] = ..., client_id: _Optional[str] = ..., sequence: _Optional[int] = ..., idempotency_key: _Optional[bytes] = ..., operations: _Optional[_Iterable[_Union[Operation, _Mapping]]] = ..., timestamp_ms: _Optional[int] = ..., actor: _Optional[str] = ..., block_height: _Optional[int] = ..., version: _Optional[int] = ..., request_hash: _Optional[bytes] = ..., erased: _Optional[bool] = ...) -> None: ...

class BlockHeader(_message.Message):
    __slots__ = ("lane", "height", "first_position", "count", "timestamp_ms", "previous_hash", "merkle_root", "hash")
    LANE_FIELD_NUMBER: _ClassVar[int]
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    FIRST_POSITION_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMP_MS_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_HASH_FIELD_NUMBER: _ClassVar[int]
    MERKLE_ROOT_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    lane: int
    height: int
    first_position: int
    count: int
    timestamp_ms: int
    previous_hash: bytes
    merkle_root: bytes
    hash: bytes
    def __init__(self, lane: _Optional[int] = ..., height: _Optional[int] = ..., first_position: _Optional[int] = ..., count: _Optional[int] = ..., timestamp_ms: _Optional[int] = ..., previous_hash: _Optional[bytes] = ..., merkle_root: _Optional[bytes] = ..., hash: _Optional[bytes] = ...) -> None: ...

class GetBlockRequest(_message.Message):
    __slots__ = ("organization", "vault", "height")
    ORGANIZATION_FIELD_NUMBER: _ClassVar[int]
    VAULT_FIELD_NUMBER: _ClassVar[int]
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    organization: str
    vault: str
    height: int
    def __init__(self, organization: _Optional[str] = ..., vault: _Optional[str] = ..., height: _Optional[int] = ...) -> None: ...

class Block(_message.Message):
    __slots__ = ("header", "tx_ids", "epoch")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    TX_IDS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    header: BlockHeader
    tx_ids: _containers.RepeatedScalarFieldContainer[str]
    epoch: str
    def __init__(self, header: _Optional[_Union[BlockHeader, _Mapping]] = ..., tx_ids: _Optional[_Iterable[str]] = ..., epoch: _Optional[str] = ...) -> None: ...

class WatchBlocksRequest(_message.Message):
    __slots__ = ("organization", "vault", "after_height", "epoch")
    ORGANIZATION_FIELD_NUMBER: _ClassVar[int]
    VAULT_FIELD_NUMBER: _ClassVar[int]
    AFTER_HEIGHT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    organization: str
    vault: str
    after_height: int
    epoch: str
    def __init__(self, organization: _Optional[str] = ..., vault: _Optional[str] = ..., after_height: _Optional[int] = ..., epoch: _Optional[str] = ...) -> None: ...

class TransactionProof(_message.Message):
    __slots__ = ("index", "count", "path", "salt")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    index: int
    count: int
    path: _containers.RepeatedScalarFieldContainer[bytes]
    salt: bytes
    def __init__(self, index: _Optional[int] = ..., count: _Optional[int] = ..., path: _Optional[_Iterable[bytes]] = ..., salt: _Optional[bytes] = ...) -> None: ...

class GetProofRequest(_message.Message):
    __slots__ = ("organization", "vault", "tx_id")
    ORGANIZATION_FIELD_NUMBER: _ClassVar[int]
    VAULT_FIELD_NUMBER: _ClassVar[int]
    TX_ID_FIELD_NUMBER: _ClassVar[int]
    organization: str
    vault: str
    tx_id: str
    def __init__(self, organization: _Optional[str] = ..., vault: _Optional[str] = ..., tx_id: _Optional[str] = ...) -> None: ...

class RecordHeader(_message.Message):
    __slots__ = ("lane", "position", "sequence", "log_time_ms", "height", "client_sequence", "policy", "scope", "key", "fingerprint", "actor", "client", "partitions")
    LANE_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    LOG_TIME_MS_FIELD_NUMBER: _ClassVar[int]
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    CLIENT_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    ACTOR_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    lane: int
    position: int
    sequence: int
    log_time_ms: int
    height: int
    client_sequence: int
    policy: str
    scope: str
    key: bytes
    fingerprint: bytes
    actor: str
    client: str
    partitions: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, lane: _Optional[int] = ..., position: _Optional[int] = ..., sequence: _Optional[int] = ..., log_time_ms: _Optional[int] = ..., height: _Optional[int] = ..., client_sequence: _Optional[int] = ..., policy: _Optional[str] = ..., scope: _Optional[str] = ..., key: _Optional[bytes] = ..., fingerprint: _Optional[bytes] = ..., actor: _Optional[str] = ..., client: _Optional[str] = ..., partitions: _Optional[_Iterable[str]] = ...) -> None: ...

class ProofDocument(_message.Message):
    __slots__ = ("record", "salt", "body", "body_hash", "index", "count", "path", "block")
    RECORD_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    BODY_HASH_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    record: RecordHeader
    salt: bytes
    body: bytes
    body_hash: bytes
    index: int
    count: int
    path: _containers.RepeatedScalarFieldContainer[bytes]
    block: BlockHeader
    def __init__(self, record: _Optional[_Union[RecordHeader, _Mapping]] = ..., salt: _Optional[bytes] = ..., body: _Optional[bytes] = ..., body_hash: _Optional[bytes] = ..., index: _Optional[int] = ..., count: _Optional[int] = ..., path: _Optional[_Iterable[bytes]] = ..., block: _Optional[_Union[BlockHeader, _Mapping]] = ...) -> None: ...
