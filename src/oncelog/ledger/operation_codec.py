"""Codec of operations in messages of the gRPC service, for client and server."""

from oncelog.core.operations import Condition, DeleteEntity, Must, Operation, Relate, SetEntity, Unrelate
from oncelog.core.transactions import ONE_CONDITION, ONE_OPERATION, ONLY_TRUE
from oncelog.errors import CanonicalError
from oncelog.ledger.v1 import ledger_pb2 as pb


def encode_operation(operation: Operation) -> pb.Operation:
    """Encode an operation."""
    match operation:
        case SetEntity(key, value, expires_at_ms, condition):
            setting = pb.SetEntity(key=key, value=value, expires_at_ms=expires_at_ms)
            if condition is not None:
                setting.condition.CopyFrom(_encode_condition(condition))
            return pb.Operation(set_entity=setting)
        case DeleteEntity(key):
            return pb.Operation(delete_entity=pb.DeleteEntity(key=key))
        case Relate():
            return pb.Operation(create_relationship=_encode_relationship(operation))
        case Unrelate():
            return pb.Operation(delete_relationship=_encode_relationship(operation))


def _encode_relationship(operation: Relate | Unrelate) -> pb.Relationship:
    return pb.Relationship(resource=operation.resource, relation=operation.relation, subject=operation.subject)


def _encode_condition(condition: Condition) -> pb.Condition:
    match condition.must:
        case Must.NOT_EXIST:
            return pb.Condition(must_not_exist=True)
        case Must.EXIST:
            return pb.Condition(must_exist=True)
        case Must.HAVE_VERSION:
            return pb.Condition(version_is=condition.version)
        case Must.HAVE_VALUE:
            return pb.Condition(value_equals=condition.value)


def decode_operation(message: pb.Operation, index: int) -> Operation:
    """Decode the operation at an index of a request. Raises CanonicalError with the path of the fault."""
    match message.WhichOneof("operation"):
        case "set_entity":
            setting = message.set_entity
            condition = None
            if setting.HasField("condition"):
                condition = _decode_condition(setting.condition, f"operations[{index}].set_entity.condition")
            expires_at_ms = setting.expires_at_ms if setting.HasField("expires_at_ms") else None
            return SetEntity(setting.key, setting.value, expires_at_ms, condition)
        case "delete_entity":
            return DeleteEntity(message.delete_entity.key)
        case "create_relationship":
            related = message.create_relationship
            return Relate(related.resource, related.relation, related.subject)
        case "delete_relationship":
            related = message.delete_relationship
            return Unrelate(related.resource, related.relation, related.subject)
    raise CanonicalError(f"operations[{index}]", ONE_OPERATION)


def _decode_condition(message: pb.Condition, path: str) -> Condition:
    match message.WhichOneof("condition"):
        case "must_not_exist" | "must_exist" as name:
            if not getattr(message, name):
                raise CanonicalError(f"{path}.{name}", ONLY_TRUE)
            return Condition(Must.EXIST if name == "must_exist" else Must.NOT_EXIST)
        case "version_is":
            return Condition(Must.HAVE_VERSION, version=message.version_is)
        case "value_equals":
            return Condition(Must.HAVE_VALUE, value=message.value_equals)
    raise CanonicalError(path, ONE_CONDITION)
