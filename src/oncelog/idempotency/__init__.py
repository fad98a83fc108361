"""Idempotency for any Python code: functions, runs of tools, HTTP requests. All of it stands on `engine.working`."""
