"""The SQLite file of a chat client: messages, the state of each chat, the outbox and refused messages.

All methods block, and only one thread may call them at a time.
"""

import sqlite3
from collections.abc import Sequence
from typing import Final
from uuid import uuid4

from msgspec import Struct
from msgspec.structs import astuple

from oncelog.client.chat.chat_state import ChangeSet, ChatState
from oncelog.client.chat.values import Message, OutboxMessage, Refused, RefusedMessage, to_refused_message
from oncelog.client.runtime.outbox import OutboxStore
from oncelog.client.runtime.store_file import StoreSchema

SCHEMA: Final = StoreSchema("chat client", "oncelog.client.chat", 1, application_id=0x4F4C4343)  # "OLCC"
SQL: Final = SCHEMA.load_queries()


class StoredChatClient(Struct, frozen=True):
    """State that a client loads from its file when it is opened."""

    user_id: str
    device_id: str
    epoch: str
    chats: list[ChatState]
    outbox: list[OutboxMessage]
    refused: list[tuple[int, RefusedMessage]]


class ChatStore(OutboxStore):
    """Store of one chat client."""

    _schema = SCHEMA

    # --- opening

    def open(self, device_id: str | None) -> StoredChatClient:
        """Open the file and load its content.

        Raises StoreInUseError or another StoreError, or SettingsError if the file belongs to a different device.
        """

        with self._file.open() as (connection, is_new):
            if is_new:
                connection.execute(SQL["make_client"], (device_id or f"device-{uuid4()}",))
            return self._load(connection, device_id)

    def _load(self, connection: sqlite3.Connection, device_id: str | None) -> StoredChatClient:
        user_id, known, epoch = connection.execute(SQL["client"]).fetchone()
        self._check_owner("device", known, device_id or known)
        self._next_number = connection.execute(SQL["highest_number"]).fetchone()[0] + 1
        chats = [
            ChatState(
                chat_id, is_member=bool(is_member), complete_to=complete, fetched_to=fetched, received_to=received
            )
            for chat_id, is_member, complete, fetched, received in connection.execute(SQL["chats"])
        ]
        outbox = [OutboxMessage(*row) for row in connection.execute(SQL["outbox"])]
        return StoredChatClient(user_id, known, epoch, chats, outbox, self._load_refused(connection))

    # --- writing

    def save(self, accepted: Sequence[OutboxMessage], withdrawn: Sequence[int], changes: ChangeSet) -> None:
        """Save outbox messages and protocol changes in one transaction.

        `withdrawn` lists the numbers of refused messages to remove. The commit is durable if it contains anything that
        the server cannot send again.
        """
        refused = [
            (*astuple(entry), *astuple(outcome)) for entry, outcome in changes.settled if isinstance(outcome, Refused)
        ]
        # Losing any other transaction in a crash is harmless, because the server sends its changes again.
        is_durable = bool(accepted or withdrawn or refused or changes.reset_chats)
        with self._file.transaction(is_durable=is_durable) as connection:
            connection.executemany(SQL["accept"], map(astuple, accepted))
            connection.executemany(SQL["forget_refused"], [(number,) for number in withdrawn])
            for chat_id in changes.reset_chats:
                connection.execute(SQL["forget_messages"], (chat_id,))
                connection.execute(SQL["forget_watermarks"], (chat_id,))
            if changes.user_and_epoch is not None:
                connection.execute(SQL["save_client"], changes.user_and_epoch)
            connection.executemany(SQL["save_message"], map(astuple, changes.messages))
            connection.executemany(SQL["save_chat"], [chat[:5] for chat in changes.chats.values()])
            connection.executemany(SQL["refuse"], refused)
            connection.executemany(SQL["settle"], [(settled.entry.number,) for settled in changes.settled])
            self._save_watermarks(connection, changes)

    @staticmethod
    def _save_watermarks(connection: sqlite3.Connection, changes: ChangeSet) -> None:
        for chat_id, members in changes.members.items():
            # `save_watermark` never lowers a watermark, because a later frame may have raised it.
            present = {member.user_id for member in members}
            known = connection.execute(SQL["watermarks"], (chat_id,)).fetchall()
            removed = [(chat_id, user_id) for user_id, _ in known if user_id not in present]
            connection.executemany(SQL["forget_watermark"], removed)
            rows = [(chat_id, member.user_id, member.last_acked_sequence) for member in members]
            connection.executemany(SQL["save_watermark"], rows)
        for chat_id, user_id, sequence in changes.watermarks:
            if sequence is None:
                connection.execute(SQL["forget_watermark"], (chat_id, user_id))
            else:
                # `note_watermark` changes only chats whose members are all in the file.
                parameters = {"chat_id": chat_id, "user_id": user_id, "sequence": sequence}
                connection.execute(SQL["note_watermark"], parameters)

    # --- reading

    def load_messages_after(self, chat_id: str, after: int, up_to: int, count: int) -> list[Message]:
        """Return messages after a sequence, in order."""
        with self._file.translate_errors():
            rows = self._file.connection.execute(SQL["messages_after"], (chat_id, after, up_to, count)).fetchall()
        return [Message(*row) for row in rows]

    def load_messages_before(
        self, chat_id: str, before: int, complete_to: int, user_id: str, count: int
    ) -> tuple[list[Message], dict[str, int]]:
        """Return the last visible messages before a sequence, in order, and the watermarks."""
        parameters = {
            "chat_id": chat_id, "before": before, "complete_to": complete_to, "user_id": user_id, "count": count
        }  # fmt: skip
        with self._file.translate_errors():
            rows = self._file.connection.execute(SQL["messages_before"], parameters).fetchall()
        return [Message(*row) for row in reversed(rows)], self.load_watermarks(chat_id)

    def load_watermarks(self, chat_id: str) -> dict[str, int]:
        """Return the members' last known watermarks."""
        with self._file.translate_errors():
            return dict(self._file.connection.execute(SQL["watermarks"], (chat_id,)).fetchall())

    def forget_messages(self, chat_id: str, up_to: int) -> None:
        """Remove messages up to a sequence."""
        with self._file.transaction(is_durable=False) as connection:
            connection.execute(SQL["forget_messages_to"], (chat_id, up_to))

    @staticmethod
    def _load_refused(connection: sqlite3.Connection) -> list[tuple[int, RefusedMessage]]:
        return [
            (number, to_refused_message(OutboxMessage(number, *message), Refused(code, reason, bool(was_tried))))
            for number, *message, code, reason, was_tried in connection.execute(SQL["refused"])
        ]
