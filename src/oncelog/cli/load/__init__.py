"""`oncelog load`: a load test against a server, which also checks that retries do not commit again."""
