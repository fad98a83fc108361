-- The keys of this table are in runs now (database_file.py).
DROP TABLE oncelog_key_rows;
