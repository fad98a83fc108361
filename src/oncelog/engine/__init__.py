"""Where core and stores meet: committer, answer cache, tailers, and the log that an application opens."""
