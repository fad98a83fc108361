-- Tables of a chat client, in a separate file. Version 1.
-- Owner of the file: the user that the server reported over the first connection, the device, and the epoch of the
-- history that all cursors belong to.
CREATE TABLE client (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    user_id TEXT NOT NULL,
    device_id TEXT NOT NULL,
    epoch TEXT NOT NULL
) STRICT;
-- All messages up to complete_to have arrived. An unfinished sync has loaded the pages up to fetched_to. The
-- application has received all messages up to received_to.
CREATE TABLE chats (
    chat_id TEXT PRIMARY KEY,
    is_member INTEGER NOT NULL,
    complete_to INTEGER NOT NULL,
    fetched_to INTEGER NOT NULL,
    received_to INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
-- Messages that have arrived. After the chat's complete_to, readers see only the user's own messages, because earlier
-- messages are missing.
CREATE TABLE messages (
    chat_id TEXT NOT NULL,
    sequence INTEGER NOT NULL,
    message_id TEXT NOT NULL,
    sender_id TEXT NOT NULL,
    client_message_id TEXT NOT NULL,
    content TEXT,
    content_type TEXT,
    created_at TEXT NOT NULL,
    PRIMARY KEY (chat_id, sequence)
) STRICT, WITHOUT ROWID;
-- The user's messages without an outcome. The client sends only messages in this table and never reuses a number.
CREATE TABLE outbox (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    client_message_id TEXT NOT NULL,
    chat_id TEXT NOT NULL,
    content TEXT NOT NULL,
    content_type TEXT NOT NULL,
    accepted_at_ms INTEGER NOT NULL,
    UNIQUE (chat_id, client_message_id)
) STRICT;
-- The user's refused messages, until the application sends them again or forgets them.
CREATE TABLE refused (
    number INTEGER PRIMARY KEY,
    client_message_id TEXT NOT NULL,
    chat_id TEXT NOT NULL,
    content TEXT NOT NULL,
    content_type TEXT NOT NULL,
    accepted_at_ms INTEGER NOT NULL,
    code TEXT NOT NULL,
    message TEXT NOT NULL,
    was_tried INTEGER NOT NULL
) STRICT;
-- Watermarks of the members of a chat. A chat has a row for every member, or no rows until the client requests them.
CREATE TABLE watermarks (
    chat_id TEXT NOT NULL,
    user_id TEXT NOT NULL,
    last_acked_sequence INTEGER NOT NULL,
    PRIMARY KEY (chat_id, user_id)
) STRICT, WITHOUT ROWID;
