"""The Chat API without its transport: authorization and requests to the log.

Nothing is decided here: whether a message is new or known, who is a member and how far a watermark moves, `core.plan`
says. Who is no member of a chat, or has no grant for it, gets one and the same answer, whether there is such a chat or
not (CH-9).
"""

import secrets
from collections.abc import Sequence
from typing import Final

from msgspec import Struct

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
from oncelog.engine.outcome import Outcome
from oncelog.errors import HistoryChangedError
from oncelog.server.api_service import ApiService, PageSizes, new_rate
from oncelog.server.auth.principal import Principal
from oncelog.server.auth_gate import AuthGate
from oncelog.server.chat.codec import MessagePage
from oncelog.server.chat.messages import ChatMessages, Send, decode_message_key
from oncelog.server.errors import RETRYABLE_CODES, ApiError, retryable_error, shutdown_error, translate_errors
from oncelog.server.limits import ApiLimits
from oncelog.server.lookups import find_outcome, load_outcome, unknown_error
from oncelog.server.metrics import Counts
from oncelog.storage.store import MemberPage, Membership

COMMITTED: Final = "committed"
KNOWN: Final = "known"
MISMATCH: Final = "known_with_other_content"
_CHAT_ID_BYTES: Final = 12
_ERROR_CODES: Final = {
    Reason.NOT_A_MEMBER: error_codes.NOT_A_MEMBER,
    Reason.NOT_AN_OWNER: error_codes.NOT_AN_OWNER,
    Reason.LAST_OWNER: error_codes.LAST_OWNER,
    Reason.INVALID: error_codes.INVALID_MESSAGE,
    Reason.MALFORMED: error_codes.INVALID_MESSAGE,
    Reason.INVALID_ACKNOWLEDGEMENT: error_codes.INVALID_ACK,
}
"""Error codes of the Chat API by the reason of a refusal. The others can be retried (`RETRYABLE_CODES`)."""


class ChatPage(Struct, frozen=True):
    """Some chats of a member."""

    memberships: list[Membership]
    following: str
    """After which to go on; empty behind the last."""


class ChatView(Struct, frozen=True):
    """A chat, and some of its members."""

    chat_id: str
    newest: int
    page: MemberPage


class ChatService(ApiService):
    """The Chat API of a server. Calls raise ApiError, or OncelogError if the log fails."""

    def __init__(self, log: Log, auth_gate: AuthGate, *, limits: ApiLimits, counts: Counts) -> None:
        super().__init__(log, auth_gate, limits=limits, counts=counts)
        self.messages = ChatMessages(limits)
        self.page_sizes = PageSizes(limits.page_messages_default, limits.page_messages_max)
        self._rate = new_rate(limits.user_messages_per_second_max)
        self._stream_rate = new_rate(limits.chat_messages_per_second_max)
        self._new_chats_rate = new_rate(limits.user_chats_per_second_max, burst=limits.user_chats_burst_max)

    # --- rights

    def check_writable(self, scope: str, principal: Principal) -> None:
        """Raises ApiError, the same that a stranger gets."""
        if not principal.grants.may_write(scope):
            raise membership_error()

    def check_readable(self, scope: str, principal: Principal) -> None:
        """Raises ApiError, the same that a stranger gets."""
        if not principal.grants.may_read(scope):
            raise membership_error()

    def check_not_stopping(self) -> None:
        """Raises ApiError once the server is being stopped."""
        if self.is_closing:
            raise shutdown_error(error_codes.SERVER_STOPPING)

    # --- send

    def to_submission(self, send: Send, principal: Principal) -> Submission:
        """A message as the log takes it."""
        return message(
            send.scope,
            send.key,
            send.body,
            sender=principal.actor,
            rate=self._rate,
            stream_rate=self._stream_rate,
        )

    async def send(self, send: Send, principal: Principal) -> Committed | Replayed:
        """Sends a message, and waits until it is durable."""
        self.check_writable(send.scope, principal)
        verdict = await self._submit(self.to_submission(send, principal))
        if isinstance(verdict, Committed | Replayed):
            self.count_verdict(verdict)
            return verdict
        raise refusal_error(verdict)

    def count_verdict(self, verdict: Committed | Replayed) -> None:
        """What became of a message, for those who watch the server."""
        if isinstance(verdict, Committed):
            self.counts.messages[COMMITTED] += 1
        else:
            self.counts.messages[MISMATCH if verdict.mismatch else KNOWN] += 1

    # --- read

    async def load_membership(self, scope: str, principal: Principal) -> Membership:
        """Return a chat as one of its members sees it. Raises ApiError for other principals."""
        self.check_readable(scope, principal)
        found = await self.log.state.find_membership(scope, principal.actor)
        if found is None:
            raise membership_error()
        return found

    async def find_message(self, scope: str, message_id: str, principal: Principal) -> Outcome:
        """Return what became of a message, by its id or its sender's. Raises ApiError if the chat has none."""
        await self.load_membership(scope, principal)
        place = parse_message_id(message_id)
        if place is None:
            key = decode_message_key(message_id)
            return await load_outcome(self.log, "message_id", key, policy=CHAT, scope=scope)
        record = await self.log.state.record(*place) if place[0] == self.log.state.lane(scope) else None
        if record is None or (record.scope, record.policy) != (scope, CHAT.name):
            raise unknown_error("message_id")
        return await find_outcome(self.log, record)

    def check_epoch(self, epoch: str | None) -> None:
        """Raises ApiError for a reader of another history (CO-40)."""
        if epoch is not None and epoch != self.log.epoch:
            message = "the epoch is another one: sync again from 0"
            raise ApiError(error_codes.HISTORY_CHANGED, message, epoch=self.log.epoch)

    async def load_after(self, scope: str, principal: Principal, after: int, limit: int | None) -> MessagePage:
        """Return messages after a sequence, in order (CH-6). A cursor ahead of the chat gets none, and is told so."""
        newest = (await self.load_membership(scope, principal)).newest
        if after > newest:
            return MessagePage([], has_more=False, following=newest, newest=newest, is_ahead=True)
        try:
            page = await self.log.read(stream=scope, after=after, limit=self.page_sizes.clamp(limit))
        except HistoryChangedError:  # the log was restored to an earlier state meanwhile
            return MessagePage([], has_more=False, following=0, newest=0, is_ahead=True)
        return MessagePage(self._select_messages(page.records), page.has_more, page.cursor.position, page.newest)

    async def load_before(self, scope: str, principal: Principal, before: int | None, limit: int | None) -> MessagePage:
        """Return the messages right before a sequence, or the newest, in ascending order."""
        newest = (await self.load_membership(scope, principal)).newest
        upto = newest if before is None else max(0, min(before - 1, newest))
        size = self.page_sizes.clamp(limit)
        records: list[Record] = []
        after = begin = await self.log.state.sequence_before(scope, upto, size + 1)
        has_more = upto > begin
        while has_more:  # a page ends early where messages are long
            page = await self.log.read(stream=scope, after=after, upto=upto, limit=size)
            records += page.records
            after, has_more = page.cursor.position, page.has_more
        return MessagePage(self._select_messages(records), begin > 0, upto, newest, beginning=begin + 1)

    def _select_messages(self, records: Sequence[Record]) -> list[Record]:
        found = [record for record in records if record.policy == CHAT.name]
        self.counts.deliveries += len(found)
        return found

    # --- chats and members

    async def create(self, scope: str | None, members: Sequence[str], principal: Principal) -> tuple[ChatView, bool]:
        """Create a chat, or add members to one that the caller owns; and whether it was created."""
        scope = scope or f"{CHAT_PREFIX}chat_{secrets.token_hex(_CHAT_ID_BYTES)}"
        self.check_writable(scope, principal)
        self.check_not_stopping()
        actor = principal.actor
        additions = [SetMember(scope, member, actor=actor) for member in dict.fromkeys(members) if member != actor]
        with translate_errors():
            # Admitted as a whole: a chat may have more members than a tenant may make new writes at once.
            verdicts = await self.log.submit_many(
                [OpenStream(scope, actor, self._new_chats_rate), *additions], Mode.ALL, is_admitted_whole=True
            )
        refused = [
            member for member in verdicts if isinstance(member, Refused) and member.reason is not Reason.NOT_PROCESSED
        ]
        if refused:
            raise refusal_error(refused[0])
        is_new = isinstance(verdicts[0], Applied) and verdicts[0].changed
        with translate_errors():
            newest = await self.log.state.newest(scope)
            page = await self.log.state.members(scope, limit=self.limits.page_messages_max)
        return ChatView(parse_chat_scope(scope), newest, page), is_new

    async def load_chat(self, scope: str, principal: Principal, after: str, limit: int | None) -> ChatView:
        """Return a chat with some of its members, and how far each has received it (CH-8)."""
        membership = await self.load_membership(scope, principal)
        page = await self.log.state.members(scope, after=after, limit=self.page_sizes.clamp(limit))
        return ChatView(parse_chat_scope(scope), membership.newest, page)

    async def list_chats(self, principal: Principal, after: str, limit: int | None) -> ChatPage:
        """Return chats of the principal that its grants let it read."""
        size = self.page_sizes.clamp(limit)
        page = await self.log.state.memberships(principal.actor, prefix=CHAT_PREFIX, after=after, limit=size)
        readable = [membership for membership in page.memberships if principal.grants.may_read(membership.scope)]
        return ChatPage(readable, parse_chat_scope(page.memberships[-1].scope) if page.has_more else "")

    async def add_member(
        self, scope: str, member: str, principal: Principal, role: Role | None, *, only_if_member: bool = False
    ) -> Role | None:
        """Add a member or set its role. Return the role that it has then; None if it was removed meanwhile."""
        self.check_writable(scope, principal)
        item = SetMember(scope, member, actor=principal.actor, role=role, only_if_member=only_if_member)
        await self._apply(item)
        with translate_errors():
            found = await self.log.state.find_membership(scope, member)
        return None if found is None else found.role

    async def remove_member(self, scope: str, member: str, principal: Principal) -> bool:
        """Remove a member, or the caller; whether that has changed anything."""
        self.check_writable(scope, principal)
        return await self._apply(SetMember(scope, member, present=False, actor=principal.actor))

    async def acknowledge(self, scope: str, sequence: int, principal: Principal) -> bool:
        """Moves the caller's watermark forward; whether it was behind."""
        self.check_readable(scope, principal)
        return await self._apply(Acknowledge(scope, principal.actor, sequence))

    async def _apply(self, item: SetMember | Acknowledge) -> bool:
        verdict = await self._submit(item)
        if isinstance(verdict, Applied):
            return verdict.changed
        raise refusal_error(verdict)

    async def _submit(self, item: Item) -> Verdict:
        self.check_not_stopping()
        return await self.log.submit(item)


def refusal_error(verdict: Verdict) -> ApiError:
    """What somebody is told whose request was refused."""
    if not isinstance(verdict, Refused):
        raise TypeError(f"the log answered a message of the Chat API with {verdict!r}")
    if verdict.reason is Reason.NOT_A_MEMBER:
        if verdict.field == "member":  # the caller is an owner, the user of the request is not a member
            message = "the user is not a member of the chat; add the user first"
            return ApiError(error_codes.NOT_A_MEMBER, message, field="user_id")
        return membership_error()
    if verdict.reason is Reason.NOT_AN_OWNER:
        return ApiError(error_codes.NOT_AN_OWNER, "only owners of the chat may change its members; ask an owner")
    if verdict.reason in RETRYABLE_CODES:
        return retryable_error(verdict)
    code = _ERROR_CODES.get(verdict.reason, error_codes.BAD_REQUEST)
    if verdict.reason is Reason.INVALID_ACKNOWLEDGEMENT:
        return ApiError(code, verdict.message, last_sequence=verdict.current)
    return ApiError(code, verdict.message, field=verdict.field)


def membership_error() -> ApiError:
    """One text for all: no grant, no member, no more a member, no such chat."""
    return ApiError(error_codes.NOT_A_MEMBER, "only members of the chat may do this")
