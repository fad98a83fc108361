"""Idempotency for Python functions, tool runs and HTTP requests, on top of `engine.leases`. `core.plan` decides."""
