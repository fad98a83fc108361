"""The deltas door: push, pull, rows, snapshots, live delivery and compaction. docs/deltas.md."""
