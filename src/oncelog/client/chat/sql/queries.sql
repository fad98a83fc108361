-- name: make_client
INSERT INTO client (one, user_id, device_id, epoch) VALUES (1, '', ?, '');

-- name: client
SELECT user_id, device_id, epoch FROM client WHERE one = 1;

-- name: save_client
UPDATE client SET user_id = ?, epoch = ?;

-- name: chats
SELECT chat_id, is_member, complete_to, fetched_to, received_to FROM chats;

-- name: save_chat
INSERT INTO chats (chat_id, is_member, complete_to, fetched_to, received_to) VALUES (?, ?, ?, ?, ?)
ON CONFLICT (chat_id) DO UPDATE SET is_member = excluded.is_member, complete_to = excluded.complete_to,
    fetched_to = excluded.fetched_to, received_to = excluded.received_to;

-- name: save_message
INSERT OR IGNORE INTO messages
    (message_id, chat_id, sequence, sender_id, client_message_id, content, created_at, content_type)
VALUES (?, ?, ?, ?, ?, ?, ?, ?);

-- name: messages_after
SELECT message_id, chat_id, sequence, sender_id, client_message_id, content, created_at, content_type FROM messages
WHERE chat_id = ? AND sequence > ? AND sequence <= ? ORDER BY sequence LIMIT ?;

-- name: messages_before
SELECT message_id, chat_id, sequence, sender_id, client_message_id, content, created_at, content_type FROM messages
WHERE chat_id = :chat_id AND sequence < :before AND (sequence <= :complete_to OR sender_id = :user_id)
ORDER BY sequence DESC LIMIT :count;

-- name: forget_messages
DELETE FROM messages WHERE chat_id = ?;

-- name: forget_messages_to
DELETE FROM messages WHERE chat_id = ? AND sequence <= ?;

-- name: outbox
SELECT number, client_message_id, chat_id, content, content_type, accepted_at_ms FROM outbox ORDER BY number;

-- name: accept
INSERT INTO outbox (number, client_message_id, chat_id, content, content_type, accepted_at_ms)
VALUES (?, ?, ?, ?, ?, ?);

-- name: highest_number
SELECT coalesce((SELECT seq FROM sqlite_sequence WHERE name = 'outbox'), 0);

-- name: settle
DELETE FROM outbox WHERE number = ?;

-- name: refuse
INSERT OR REPLACE INTO refused
    (number, client_message_id, chat_id, content, content_type, accepted_at_ms, code, message, was_tried)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?);

-- name: refused
SELECT number, client_message_id, chat_id, content, content_type, accepted_at_ms, code, message, was_tried FROM refused
ORDER BY number;

-- name: forget_refused
DELETE FROM refused WHERE number = ?;

-- name: save_watermark
INSERT INTO watermarks (chat_id, user_id, last_acked_sequence) VALUES (?, ?, ?)
ON CONFLICT (chat_id, user_id) DO UPDATE
SET last_acked_sequence = max(last_acked_sequence, excluded.last_acked_sequence);

-- name: note_watermark
INSERT INTO watermarks (chat_id, user_id, last_acked_sequence)
SELECT :chat_id, :user_id, :sequence WHERE EXISTS (SELECT 1 FROM watermarks WHERE chat_id = :chat_id)
ON CONFLICT (chat_id, user_id) DO UPDATE
SET last_acked_sequence = max(last_acked_sequence, excluded.last_acked_sequence);

-- name: forget_watermark
DELETE FROM watermarks WHERE chat_id = ? AND user_id = ?;

-- name: forget_watermarks
DELETE FROM watermarks WHERE chat_id = ?;

-- name: watermarks
SELECT user_id, last_acked_sequence FROM watermarks WHERE chat_id = ? ORDER BY user_id;
