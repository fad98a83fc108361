"""The Deltas API: push, pull, rows, snapshots, live delivery and compaction. docs/deltas.md."""
