-- Audit and restore records (core/internal_records.py), so that `oncelog audit` finds them without a scan. Older versions
-- of Oncelog do not know audit records, and must not open the log for writing.
CREATE INDEX oncelog_records_internal ON oncelog_records (lane, position) WHERE policy >= 'oncelog.' AND policy < 'oncelog/';
