"""Look-ups by id: the outcome of a write, its reason, and its proof.

Callers authorize first (CO-22), and answer a record that the principal may not read like an absent one.
"""

from collections.abc import Callable
from typing import Any

import orjson

from oncelog import error_codes
from oncelog.core.policy import Policy
from oncelog.core.values import Record
from oncelog.engine.log import Log
from oncelog.engine.outcome import NEVER_COMMITTED, Outcome, Status, describe_stored
from oncelog.proof import encode as encode_document
from oncelog.proof import proof_document
from oncelog.server.errors import ApiError, field_error
from oncelog.server.json_schemas import TEXT_SCHEMA, Schema, object_schema, schema_ref, with_optional


async def find_outcome(log: Log, record: Record) -> Outcome:
    """Return the outcome of the identity of a stored record."""
    if not record.key:
        return describe_stored(record, None)
    policy = log.policies[record.policy]
    return describe_stored(
        record, await log.lookup(record.key, policy=policy, scope=record.scope, client=record.client)
    )


async def load_outcome(log: Log, field: str, key: bytes, *, policy: Policy, scope: str, client: str = "") -> Outcome:
    """Return the outcome of an identity. Raises ApiError with the name of the field if it has no record."""
    outcome = await log.lookup(key, policy=policy, scope=scope, client=client)
    if outcome.record is None:
        raise unknown_error(field)
    return outcome


async def describe_outcome(
    log: Log, outcome: Outcome, name: str, encode: Callable[[Record], bytes], *, with_proof: bool = True
) -> dict[str, Any]:
    """Return the answer to a look-up: the outcome of a record, its content under that name, and its proof."""
    record = outcome.record
    assert record is not None  # noqa: S101 - callers answer absent records with `unknown_error`
    answer = {"status": outcome.status.value, "reason": outcome.why, name: orjson.Fragment(encode(record))}
    if not with_proof:
        return answer
    proven = await log.prove(record.receipt)
    return {**answer, "proof": orjson.Fragment(encode_document(proof_document(proven)))}


def unknown_error(field: str) -> ApiError:
    """Return the error for an id without a record that the caller may read."""
    return field_error(field, NEVER_COMMITTED, error_codes.NOT_FOUND)


def outcome_schema(**content: Schema) -> Schema:
    """Return the schema of an answer to a look-up."""
    schema = object_schema(
        status={"enum": [Status.COMMITTED.value, Status.FORGOTTEN.value]},
        reason={
            **TEXT_SCHEMA,
            "description": "The place or the reason, in words: whether a retry is answered or is a new write.",
        },
        **content,
    )
    return with_optional(schema, proof=schema_ref("ProofDocument"))
