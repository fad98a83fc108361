"""Idempotency for Python functions, tool runs and HTTP requests, built on `engine.leases` and `core.plan`."""
