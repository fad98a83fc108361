"""The Deltas API: push, pull, rows, snapshots, live delivery and compaction. docs/reference/deltas.md."""
