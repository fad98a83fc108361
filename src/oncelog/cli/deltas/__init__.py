"""`oncelog deltas`: rows of tables that are synced, one file a command."""

import typer

from oncelog.cli.deltas import compact, import_csv, pull, push, rows, snapshot

app = typer.Typer(
    no_args_is_help=True,
    help="Deltas of a server's gateway: push and pull them, read the merged rows, import a CSV file, compact.",
)
app.command()(push.push)
app.command()(pull.pull)
app.command()(rows.rows)
app.command()(snapshot.snapshot)
app.command("import")(import_csv.import_)
app.command()(compact.compact)
