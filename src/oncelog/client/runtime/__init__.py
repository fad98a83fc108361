"""Shared parts of all clients: the durable file, connections, retries and waiting for results."""
