"""Idempotency for Python functions, runs of tools and HTTP requests, on top of `engine.leases`. `core.plan` decides."""
