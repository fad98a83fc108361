-- Its keys are in runs by now (migrating.py).
DROP TABLE oncelog_key_rows;
