-- The file of a client of chats: its own, nobody else's tables are in it. Version 1.
-- Whose it is: the user that the server has said at the first connection, the device, and the history that all
-- cursors belong to.
CREATE TABLE client (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    user_id TEXT NOT NULL,
    device_id TEXT NOT NULL,
    epoch TEXT NOT NULL
) STRICT;
-- Everything up to complete_to has arrived; a catch-up that is not at its end has come to fetched_to; the application
-- has received everything up to received_to.
CREATE TABLE chats (
    chat_id TEXT PRIMARY KEY,
    is_member INTEGER NOT NULL,
    complete_to INTEGER NOT NULL,
    fetched_to INTEGER NOT NULL,
    received_to INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
-- What has arrived. What is beyond its chat's complete_to has arrived before what is missing, and is not shown unless it
-- is our own.
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
-- Own messages without an outcome. Nothing is sent that is not here. Numbers are not used twice.
CREATE TABLE outbox (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    client_message_id TEXT NOT NULL,
    chat_id TEXT NOT NULL,
    content TEXT NOT NULL,
    content_type TEXT NOT NULL,
    accepted_at_ms INTEGER NOT NULL,
    UNIQUE (chat_id, client_message_id)
) STRICT;
-- Own messages that are not sent again, until the application has seen to them.
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
-- How far the members of a chat have acknowledged: all of them, or none while nobody has asked for all.
CREATE TABLE watermarks (
    chat_id TEXT NOT NULL,
    user_id TEXT NOT NULL,
    last_acked_sequence INTEGER NOT NULL,
    PRIMARY KEY (chat_id, user_id)
) STRICT, WITHOUT ROWID;
