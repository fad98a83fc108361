"""Tools for tests, for those of Oncelog and for yours."""
