"""The running log: committer, answer cache, tailers, leases, and the `Log` that an application opens."""
