"""Audit API: the administrative acts that the log has recorded."""
