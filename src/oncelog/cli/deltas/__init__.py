"""`oncelog deltas`: commands for synced rows and their deltas."""

from oncelog.cli.deltas import compact, import_csv, pull, push, rows
from oncelog.cli.terminal import CommandGroup

app = CommandGroup(
    interrupts_on_sigterm=True,
    help="Deltas of a server's gateway: push and pull them, read the merged rows, import a CSV file, compact.",
)
app.command()(push.push)
app.command()(pull.pull)
app.command()(rows.rows)
app.command()(rows.snapshot)
app.command("import")(import_csv.import_)
app.command()(compact.compact)
