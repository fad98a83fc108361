-- Its keys are in runs by now (schema_migration.py).
DROP TABLE oncelog_key_rows;
