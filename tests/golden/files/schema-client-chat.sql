-- application_id: 1330398019
-- user_version: 1
-- encoding: UTF-8
-- page_size: 4096
-- journal_mode: wal
-- auto_vacuum: 0

-- index sqlite_autoindex_outbox_1 on outbox
-- automatic

-- table chats on chats
CREATE TABLE chats (
    chat_id TEXT PRIMARY KEY,
    is_member INTEGER NOT NULL,
    complete_to INTEGER NOT NULL,
    fetched_to INTEGER NOT NULL,
    received_to INTEGER NOT NULL
) STRICT, WITHOUT ROWID

-- table client on client
CREATE TABLE client (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    user_id TEXT NOT NULL,
    device_id TEXT NOT NULL,
    epoch TEXT NOT NULL
) STRICT

-- table messages on messages
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
) STRICT, WITHOUT ROWID

-- table outbox on outbox
CREATE TABLE outbox (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    client_message_id TEXT NOT NULL,
    chat_id TEXT NOT NULL,
    content TEXT NOT NULL,
    content_type TEXT NOT NULL,
    accepted_at_ms INTEGER NOT NULL,
    UNIQUE (chat_id, client_message_id)
) STRICT

-- table refused on refused
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
) STRICT

-- table sqlite_sequence on sqlite_sequence
CREATE TABLE sqlite_sequence(name,seq)

-- table watermarks on watermarks
CREATE TABLE watermarks (
    chat_id TEXT NOT NULL,
    user_id TEXT NOT NULL,
    last_acked_sequence INTEGER NOT NULL,
    PRIMARY KEY (chat_id, user_id)
) STRICT, WITHOUT ROWID

