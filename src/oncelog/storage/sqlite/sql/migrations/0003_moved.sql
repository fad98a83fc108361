-- Target of a move, in JSON (moved_marker.py). NULL in a log that has not moved.
ALTER TABLE oncelog_state ADD COLUMN moved TEXT;
