-- How oncelog_usage was counted (storage/tenants.py). Version 1 counted the bodies of records only. The process that opens
-- a log of an older version counts again.
ALTER TABLE oncelog_state ADD COLUMN usage_version INTEGER NOT NULL DEFAULT 1;
