"""Parts that all clients share: the durable file, connections, retries and waiting for results."""
