-- Numbers above which numbering resumed after each restore (core/rules/leaps.py), as a JSON array in ascending order.
-- NULL in a log that was never restored.
ALTER TABLE oncelog_state ADD COLUMN leaps TEXT;

-- Streams that have not been written to since the last leap: their next sequence is above the floor. The table of
-- streams keeps the last sequence, which limits acknowledgements.
CREATE TABLE oncelog_floors (
    lane INTEGER NOT NULL,
    scope TEXT NOT NULL,
    floor INTEGER NOT NULL,
    PRIMARY KEY (lane, scope)
) STRICT, WITHOUT ROWID;
