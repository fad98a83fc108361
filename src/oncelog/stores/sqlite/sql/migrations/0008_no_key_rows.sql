-- Its keys are in runs by now (files.py).
DROP TABLE oncelog_keys;
