-- The numbers above which numbering resumed after each restore (core/rules/leaps.py), as a JSON array in ascending
-- order. NULL in a log that was never restored.
ALTER TABLE oncelog_state ADD COLUMN leaps text;

-- The server's timeline when the log was last opened. PostgreSQL begins a new timeline when a standby takes over, and
-- when a backup is restored to an earlier time.
ALTER TABLE oncelog_state ADD COLUMN timeline text;

-- Streams that have not been written to since the last leap: their next sequence is above the floor. The table of
-- streams keeps the last sequence, which limits acknowledgements.
CREATE TABLE oncelog_floors (
    lane integer NOT NULL,
    scope text COLLATE "C" NOT NULL,
    floor bigint NOT NULL,
    PRIMARY KEY (lane, scope)
);
