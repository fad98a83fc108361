-- From version 1 to version 2. Version 1 did not store these sequences, so the migration assumes the safe values.
ALTER TABLE scopes ADD COLUMN freed_sequence INTEGER NOT NULL DEFAULT 0;
ALTER TABLE scopes ADD COLUMN highest_sequence INTEGER NOT NULL DEFAULT 0;
ALTER TABLE pending ADD COLUMN lowest_sequence INTEGER NOT NULL DEFAULT 1;
UPDATE scopes SET
    freed_sequence = max(last_sequence + 1, coalesce((SELECT max(sequence) FROM pending WHERE scope_id = scopes.id), 0)),
    highest_sequence = max(last_sequence + 1, coalesce((SELECT max(sequence) FROM pending WHERE scope_id = scopes.id), 0));
