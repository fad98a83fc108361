"""Test tools, for the tests of Oncelog and of its users."""
