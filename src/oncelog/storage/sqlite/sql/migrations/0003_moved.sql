-- Where the log has been moved to, in JSON (moved_marker.py). NULL in a log that is written to here.
ALTER TABLE oncelog_state ADD COLUMN moved TEXT;
