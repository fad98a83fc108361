"""Test tools, for Oncelog's own tests and those of its users."""
