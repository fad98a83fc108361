"""`oncelog head`: the newest hashes, for keeping elsewhere."""

import msgspec

from oncelog.cli.terminal import Log, ending_well, print_json
from oncelog.stores.inspecting import inspector_of
from oncelog.stores.verifying.whole import exported


def head(log: Log) -> None:
    """Prints the newest hash of every lane as JSON: {"epoch", "lanes": [{"lane", "position", "height", "block_hash"}]}.

    Keep it where whoever runs the log cannot change it, and give it to `oncelog verify --head`.

    Example:  oncelog head orders.db > orders-head.json

    Example:  oncelog head postgresql://oncelog@db.example.org/orders > orders-head.json
    """
    with ending_well(), inspector_of(log).looking() as view:
        print_json(msgspec.to_builtins(exported(view.about, view.heads())))
