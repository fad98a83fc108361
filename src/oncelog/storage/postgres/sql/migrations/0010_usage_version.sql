-- Version of the counting rules of oncelog_usage (storage/tenants.py). Version 1 counted only the bodies of records.
-- The process that opens a log with an older version counts usage again.
ALTER TABLE oncelog_state ADD COLUMN usage_version integer NOT NULL DEFAULT 1;
