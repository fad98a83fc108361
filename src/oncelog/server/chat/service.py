"""The Chat API without its transports: authorization and requests to the log.

`core.plan` decides whether a message is new, whether a user is a member, and how far a watermark moves. A principal
without a membership or grant receives the same answer for existing and unknown chats (CH-9).
"""

import secrets
from collections.abc import Sequence
from typing import Final

from oncelog import error_codes
from oncelog.core.chat import CHAT_PREFIX, message, parse_chat_scope, parse_message_id
from oncelog.core.policy import CHAT
from oncelog.core.values import (
    Acknowledge,
    Applied,
    Committed,
    Item,
    Mode,
    OpenStream,
    Reason,
    Record,
    Refused,
    Replayed,
    Role,
    SetMember,
    Submission,
    Verdict,
)
from oncelog.engine.log import Log
from oncelog.errors import HistoryChangedError
from oncelog.server.api_service import (
    ApiService,
    PageSizes,
    describe_outcome,
    find_outcome,
    load_outcome,
    new_rate,
    unknown_error,
)
from oncelog.server.auth.principal import Principal
from oncelog.server.auth_gate import AuthGate
from oncelog.server.chat import codec
from oncelog.server.chat.codec import Members, MessagePage
from oncelog.server.chat.messages import ChatMessages, Send, decode_message_key
from oncelog.server.errors import RETRYABLE_CODES, ApiError, retryable_error, translate_errors
from oncelog.storage.store import Membership

_CHAT_ID_BYTES: Final = 12
_ERROR_CODES: Final = {
    Reason.NOT_A_MEMBER: error_codes.NOT_A_MEMBER,
    Reason.NOT_AN_OWNER: error_codes.NOT_AN_OWNER,
    Reason.LAST_OWNER: error_codes.LAST_OWNER,
    Reason.INVALID: error_codes.INVALID_MESSAGE,
    Reason.MALFORMED: error_codes.INVALID_MESSAGE,
    Reason.INVALID_ACKNOWLEDGEMENT: error_codes.INVALID_ACK,
}
"""Chat API error codes by refusal reason. Refusals for other reasons can be retried (`RETRYABLE_CODES`)."""


class ChatService(ApiService):
    """A server's Chat API. Calls raise ApiError, or OncelogError if the log fails."""

    def __init__(self, log: Log, auth_gate: AuthGate) -> None:
        super().__init__(log, auth_gate)
        limits = self.limits
        self.messages = ChatMessages(limits)
        self.page_sizes = PageSizes(limits.page_messages_default, limits.page_messages_max)
        self._rate = new_rate(limits.user_messages_per_second_max)
        self._stream_rate = new_rate(limits.chat_messages_per_second_max)
        self._new_chats_rate = new_rate(limits.user_chats_per_second_max, burst=limits.user_chats_burst_max)

    # --- rights

    def check_writable(self, scope: str, principal: Principal) -> str:
        """Return the scope. Without the grant to write, raises the same ApiError as for an unknown chat."""
        if not principal.grants.may_write(scope):
            raise membership_error()
        return scope

    def check_readable(self, scope: str, principal: Principal) -> str:
        """Return the scope. Without the grant to read, raises the same ApiError as for an unknown chat."""
        if not principal.grants.may_read(scope):
            raise membership_error()
        return scope

    def check_not_stopping(self) -> None:
        """Raise ApiError if the server is shutting down."""
        self.auth_gate.check_open(error_codes.SERVER_STOPPING)

    # --- send

    def to_submission(self, send: Send, principal: Principal) -> Submission:
        """Return the submission of a message."""
        return message(
            send.scope,
            send.key,
            send.body,
            sender=principal.actor,
            rate=self._rate,
            stream_rate=self._stream_rate,
        )

    async def send(self, send: Send, principal: Principal) -> Committed | Replayed:
        """Send a message and wait until it is durable."""
        verdict = await self._submit(self.to_submission(send, principal))
        if isinstance(verdict, Committed | Replayed):
            self.count_verdict(verdict)
            return verdict
        raise refusal_error(verdict)

    def count_verdict(self, verdict: Committed | Replayed) -> None:
        """Count a message's outcome in the metrics."""
        if isinstance(verdict, Committed):
            self.counts.messages["committed"] += 1
        else:
            self.counts.messages["known_with_other_content" if verdict.mismatch else "known"] += 1

    # --- read

    async def load_membership(self, scope: str, principal: Principal) -> Membership:
        """Return the principal's membership in a chat. Raises ApiError if the principal is not a member."""
        found = await self.log.state.find_membership(scope, principal.actor)
        if found is None:
            raise membership_error()
        return found

    async def find_message(self, scope: str, message_id: str, principal: Principal) -> Members:
        """Return the outcome of a message, by its id or `client_message_id`. Raises ApiError if it is unknown."""
        await self.load_membership(scope, principal)
        place = parse_message_id(message_id)
        if place is None:
            key = decode_message_key(message_id)
            outcome = await load_outcome(self.log, "message_id", key, policy=CHAT, scope=scope)
        else:
            record = await self.log.state.record(*place) if place[0] == self.log.state.lane(scope) else None
            if record is None or (record.scope, record.policy) != (scope, CHAT.name):
                raise unknown_error("message_id")
            outcome = await find_outcome(self.log, record)
        return await describe_outcome(self.log, outcome, "message", codec.encode_message)

    def check_epoch(self, epoch: str | None) -> None:
        """Raise ApiError if a reader's cursor belongs to a different history (CO-40)."""
        if epoch is not None and epoch != self.log.epoch:
            message = "the log has another epoch; sync again from 0"
            raise ApiError(error_codes.HISTORY_CHANGED, message, epoch=self.log.epoch)

    async def load_after(self, scope: str, principal: Principal, after: int, limit: int | None) -> MessagePage:
        """Return messages after a sequence, in order (CH-6). `is_ahead` marks a cursor beyond the end of the chat."""
        newest = (await self.load_membership(scope, principal)).newest
        if after > newest:
            return MessagePage([], has_more=False, following=newest, newest=newest, is_ahead=True)
        try:
            page = await self.log.read(stream=scope, after=after, limit=self.page_sizes.clamp(limit))
        except HistoryChangedError:  # the log was restored from a backup after the membership was read
            return MessagePage([], has_more=False, following=0, newest=0, is_ahead=True)
        return MessagePage(self._select_messages(page.records), page.has_more, page.cursor.position, page.newest)

    async def load_before(self, scope: str, principal: Principal, before: int | None, limit: int | None) -> MessagePage:
        """Return the messages directly before a sequence (None: the newest ones), in ascending order."""
        newest = (await self.load_membership(scope, principal)).newest
        upto = newest if before is None else max(0, min(before - 1, newest))
        size = self.page_sizes.clamp(limit)
        records: list[Record] = []
        after = begin = await self.log.state.sequence_before(scope, upto, size + 1)
        has_more = upto > begin
        while has_more:  # a page of long messages can be shorter than `limit`
            page = await self.log.read(stream=scope, after=after, upto=upto, limit=size)
            records += page.records
            after, has_more = page.cursor.position, page.has_more
        return MessagePage(self._select_messages(records), begin > 0, upto, newest, beginning=begin + 1)

    def _select_messages(self, records: Sequence[Record]) -> list[Record]:
        found = [record for record in records if record.policy == CHAT.name]
        self.counts.deliveries += len(found)
        return found

    # --- chats and members

    async def create(self, scope: str | None, members: Sequence[str], principal: Principal) -> tuple[Members, bool]:
        """Create a chat, or add members to one that the principal owns. Returns the chat and whether it was created."""
        scope = scope or f"{CHAT_PREFIX}chat_{secrets.token_hex(_CHAT_ID_BYTES)}"
        self.check_writable(scope, principal)
        self.check_not_stopping()
        actor = principal.actor
        additions = [SetMember(scope, member, actor=actor) for member in dict.fromkeys(members) if member != actor]
        with translate_errors():
            # Admit all at once, because a chat may have more members than a tenant's rate limit allows in one burst.
            verdicts = await self.log.submit_many(
                [OpenStream(scope, actor, self._new_chats_rate), *additions], Mode.ALL, is_admitted_whole=True
            )
            for verdict in verdicts:
                if isinstance(verdict, Refused) and verdict.reason is not Reason.NOT_PROCESSED:
                    raise refusal_error(verdict)
            newest = await self.log.state.newest(scope)
            page = await self.log.state.members(scope, limit=self.limits.page_messages_max)
        is_new = isinstance(verdicts[0], Applied) and verdicts[0].changed
        return codec.to_chat(scope, newest, page), is_new

    async def load_chat(self, scope: str, principal: Principal, after: str, limit: int | None) -> Members:
        """Return a chat with one page of its members and their watermarks (CH-8)."""
        membership = await self.load_membership(scope, principal)
        page = await self.log.state.members(scope, after=after, limit=self.page_sizes.clamp(limit))
        return codec.to_chat(scope, membership.newest, page)

    async def list_chats(self, principal: Principal, after: str, limit: int | None) -> Members:
        """Return a page of the principal's chats, without chats that its grants exclude."""
        size = self.page_sizes.clamp(limit)
        page = await self.log.state.memberships(principal.actor, prefix=CHAT_PREFIX, after=after, limit=size)
        return codec.to_chats(page, principal.grants.may_read)

    async def add_member(
        self, scope: str, member: str, principal: Principal, role: Role | None, *, only_if_member: bool = False
    ) -> Members:
        """Add a member or set its role. The answer contains no role if a concurrent request removed the member."""
        item = SetMember(scope, member, actor=principal.actor, role=role, only_if_member=only_if_member)
        await self._apply(item)
        with translate_errors():
            found = await self.log.state.find_membership(scope, member)
        answer = {"chat_id": parse_chat_scope(scope), "user_id": member, "present": True}
        return answer if found is None else {**answer, "role": found.role.value}

    async def remove_member(self, scope: str, member: str, principal: Principal) -> Members:
        """Remove a member, which may be the principal itself."""
        await self._apply(SetMember(scope, member, present=False, actor=principal.actor))
        return {"chat_id": parse_chat_scope(scope), "user_id": member, "present": False}

    async def acknowledge(self, scope: str, sequence: int, principal: Principal) -> Members:
        """Advance the principal's watermark. The answer shows whether the watermark changed."""
        changed = await self._apply(Acknowledge(scope, principal.actor, sequence))
        return {"chat_id": parse_chat_scope(scope), "changed": changed}

    async def _apply(self, item: SetMember | Acknowledge) -> bool:
        verdict = await self._submit(item)
        if isinstance(verdict, Applied):
            return verdict.changed
        raise refusal_error(verdict)

    async def _submit(self, item: Item) -> Verdict:
        self.check_not_stopping()
        return await self.log.submit(item)


def refusal_error(verdict: Verdict) -> ApiError:
    """Return the error for a request that the log refused."""
    assert isinstance(verdict, Refused)  # noqa: S101 - no other verdict is possible here
    code = _ERROR_CODES.get(verdict.reason, error_codes.BAD_REQUEST)
    match verdict.reason:
        case Reason.NOT_A_MEMBER if verdict.field == "member":  # the principal owns the chat; the user is not a member
            return ApiError(code, "the user is not a member of the chat; add the user first", field="user_id")
        case Reason.NOT_A_MEMBER:
            return membership_error()
        case Reason.NOT_AN_OWNER:
            return ApiError(code, "only owners of the chat may change its members; ask an owner")
        case Reason.INVALID_ACKNOWLEDGEMENT:
            return ApiError(code, verdict.message, last_sequence=verdict.current)
        case reason if reason in RETRYABLE_CODES:
            return retryable_error(verdict)
    return ApiError(code, verdict.message, field=verdict.field)


def membership_error() -> ApiError:
    """Return the error for a missing grant or membership, which is the same for unknown chats."""
    return ApiError(error_codes.NOT_A_MEMBER, "only members of the chat may do this")
