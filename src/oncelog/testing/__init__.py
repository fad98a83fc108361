"""Test tools for Oncelog's own tests and its users' tests."""
