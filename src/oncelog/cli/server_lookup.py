"""Look up a record on a server by its id, for `oncelog show`."""

from collections.abc import Sequence
from http import HTTPStatus
from typing import Final
from urllib.parse import quote, unquote, urlencode
from uuid import UUID

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from oncelog.cli.record_lookup import Finding, Place, parse_lane_position
from oncelog.cli.remote import check_text, open_client, translate_decode_errors
from oncelog.cli.server_options import Remote
from oncelog.client.runtime.http import EVENTS_PATH, HttpClient, HttpResponse, status_error
from oncelog.core.chat import CHAT_PREFIX, format_message_id
from oncelog.core.deltas import SCOPE_PREFIX as DELTAS_PREFIX
from oncelog.core.policy import EVENTS
from oncelog.core.transactions import SCOPE_PREFIX as LEDGER_PREFIX
from oncelog.core.transactions import format_tx_id, parse_tx_id
from oncelog.core.values import Record
from oncelog.engine.outcome import Outcome, Status
from oncelog.error_codes import HISTORY_CHANGED
from oncelog.errors import OncelogError, ProofError, ServerRefusedError
from oncelog.proof import build_record, decode, verify

_NOT_FOUND_CODE: Final = "not_found"


class ServerQuery(Struct, frozen=True):
    """The ID of a record, and the stream or the partitions in which a server searches for it."""

    id: str
    scope: str | None
    partitions: Sequence[str]
    client: str | None

    def build_path(self) -> str:
        """Return the path of the HTTP operation that looks up the record. Raises OncelogError."""
        for text, option in ((self.id, "ID"), (self.scope, "--scope"), (self.client, "--client")):
            check_text(text or "", option)
        kind, *names = map(unquote, (self.scope or "").split("/"))
        item = quote(self._format_id(kind), safe="")
        if self.client is not None and kind != LEDGER_PREFIX:
            raise OncelogError(f"--client needs the scope of a ledger: --scope {LEDGER_PREFIX}/ORGANIZATION")
        if not self.scope and self.partitions:
            return f"/v1/events/{item}?{urlencode([('partition', name) for name in self.partitions])}"
        if self.partitions:
            raise OncelogError("--partition is for events and cannot be combined with --scope")
        if kind == CHAT_PREFIX.rstrip("/") and len(names) == 1:
            return f"/v1/chats/{quote(names[0], safe='')}/messages/{item}"
        if kind == DELTAS_PREFIX and len(names) == 1:
            return f"/v1/sync/{quote(names[0], safe='')}/deltas/{item}"
        if kind == LEDGER_PREFIX and len(names) in {1, 2}:
            return f"/v1/ledger/outcome?{urlencode(self._build_ledger_query(names))}"
        raise OncelogError(
            "a server looks up an event with --partition NAME, and other records with --scope: "
            f"{CHAT_PREFIX}CHAT, {LEDGER_PREFIX}/ORGANIZATION, {LEDGER_PREFIX}/ORGANIZATION/VAULT or "
            f"{DELTAS_PREFIX}/GATEWAY. To search all records, read the log itself: oncelog show LOG {self.id}"
        )

    def _format_id(self, kind: str) -> str:
        """Return the ID for a scope of this kind. A place becomes the id of the message or transaction there."""
        place = parse_lane_position(self.id)
        if place is None:
            return self.id
        if kind == DELTAS_PREFIX:
            raise OncelogError(f"a server looks up a delta by its id, not by LANE:POSITION ({self.id})")
        if kind == LEDGER_PREFIX:
            return format_tx_id(*place)
        return format_message_id(*place) if kind == CHAT_PREFIX.rstrip("/") else self.id

    def _build_ledger_query(self, names: Sequence[str]) -> dict[str, str]:
        item = self._format_id(LEDGER_PREFIX)
        id_name = "idempotency_key" if parse_tx_id(item) is None else "tx_id"
        query = {"organization": names[0], id_name: item}
        if len(names) == 2:
            query["vault"] = names[1]
        if self.client is not None:
            query["client_id"] = self.client
        return query


class _Answer(Struct, frozen=True):
    status: str
    reason: str
    proof: Raw = Raw()
    event: "_Event | None" = None


class _Event(Struct, frozen=True):
    id: UUID
    committed_id: int
    partitions: tuple[str, ...]
    event: Raw
    client_id: str
    status_updated_at: int

    def to_record(self) -> Record:
        """Return the record of an event whose server hides actors. The hidden fields are empty."""
        is_erased = bytes(self.event) == b"null"
        return Record(
            lane=0,
            position=self.committed_id,
            sequence=0,
            log_time_ms=self.status_updated_at,
            height=0,
            policy=EVENTS.name,
            scope="",
            key=self.id.bytes,
            fingerprint=b"",
            actor="",
            client=self.client_id,
            client_sequence=0,
            partitions=self.partitions,
            body=b"" if is_erased else bytes(self.event),
            erased=is_erased,
        )


class _EventId(Struct, frozen=True):
    id: str
    committed_id: int


class _EventPage(Struct, frozen=True):
    events: tuple[_EventId, ...]


class _Problem(Struct, frozen=True):
    code: str
    detail: str


async def find_on_server(remote: Remote, query: ServerQuery) -> Finding:
    """Look up a record. If the server has none, the finding explains why.

    Checks that the record matches the block in its proof. Raises OncelogError.
    """
    query.build_path()  # raises the error for a wrong query before the client connects
    async with open_client(remote) as client:
        place = None if query.scope else parse_lane_position(query.id)
        if place is not None:
            event_id = await _find_event_at(client, remote, query.partitions, place)
            if event_id is None:
                why = f"no record: no event in the partitions has the position {place[1]} in lane {place[0]}"
                return Finding(Outcome(Status.UNKNOWN, why))
            query = replace(query, id=event_id)
        response = await client.request("GET", query.build_path())
    if response.status != HTTPStatus.OK:
        return Finding(Outcome(Status.UNKNOWN, _explain_missing(response, remote.url)))
    with translate_decode_errors(remote):
        answer = msgspec.json.decode(response.body, type=_Answer)
        status = msgspec.convert(answer.status, Status)
    if not answer.proof and answer.event is not None:  # show_actors is off
        record = answer.event.to_record()
        return Finding(Outcome(status, answer.reason, record), record.identity)
    try:
        document = decode(bytes(answer.proof))
    except ProofError as error:
        raise OncelogError(f"{remote.url} does not answer like an Oncelog server: {error}") from error
    result = verify(document)
    if not result.is_valid:
        raise OncelogError(f"the record does not match its block: {'; '.join(result.findings)}")
    record = build_record(document)
    block_hash = bytes.fromhex(document.block.hash)
    return Finding(Outcome(status, answer.reason, record), record.identity, block_hash)


async def _find_event_at(client: HttpClient, remote: Remote, partitions: Sequence[str], place: Place) -> str | None:
    """Return the id of the event at a place, or None. All events are in lane 0."""
    lane, position = place
    if lane != 0 or position == 0:
        return None
    parameters = [*(("partition", name) for name in partitions), ("since", str(position - 1)), ("limit", "1")]
    try:
        body = await client.send("GET", f"{EVENTS_PATH}?{urlencode(parameters)}")
    except ServerRefusedError as error:
        if error.code != HISTORY_CHANGED:  # the position is beyond the end of the log
            raise
        return None
    with translate_decode_errors(remote):
        events = msgspec.json.decode(body, type=_EventPage).events
    return next((event.id for event in events if event.committed_id == position), None)


def _explain_missing(response: HttpResponse, url: str) -> str:
    """Return why the server has no record. Raises ServerRefusedError if the request failed for another reason."""
    try:
        problem = msgspec.json.decode(response.body, type=_Problem)
    except msgspec.MsgspecError:
        raise status_error(response.status, url) from None
    if response.status == HTTPStatus.NOT_FOUND and problem.code.lower() == _NOT_FOUND_CODE:
        return problem.detail.partition(": ")[2]
    raise ServerRefusedError(problem.code, problem.detail)
