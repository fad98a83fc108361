"""Oncelog: submit a write any number of times; it commits once."""
