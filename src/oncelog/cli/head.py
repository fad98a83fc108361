"""`oncelog head`: the newest hashes, for keeping elsewhere."""

import msgspec

from oncelog.cli.terminal import LogArgument, print_json, translate_errors
from oncelog.storage.inspect.factory import create_inspector
from oncelog.storage.queries.records import load_heads
from oncelog.storage.verify.verification import export_head


def head(log: LogArgument) -> None:
    """Prints the newest hash of every lane as JSON: {"epoch", "lanes": [{"lane", "position", "height", "block_hash"}]}.

    Keep it where whoever runs the log cannot change it, and give it to `oncelog verify --head`.

    Example:  oncelog head orders.db > orders-head.json

    Example:  oncelog head postgresql://oncelog@db.example.org/orders > orders-head.json
    """
    with translate_errors(), create_inspector(log).open_view() as view:
        print_json(msgspec.to_builtins(export_head(view.metadata, view.run_query(load_heads))))
