"""The Deltas API: push, pull, rows, snapshots, live delivery and compaction. See docs/reference/deltas.md."""
