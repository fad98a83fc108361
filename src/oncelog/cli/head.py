"""`oncelog head`: the newest hashes, for keeping elsewhere."""

import msgspec

from oncelog.cli.terminal import File, ending_well, print_json
from oncelog.stores.sqlite.looking import looking_at
from oncelog.stores.sqlite.verifying import head_of


def head(file: File) -> None:
    """Prints the newest hash of every lane as JSON: {"epoch", "lanes": [{"lane", "position", "height", "block_hash"}]}.

    Keep it where whoever runs the log cannot change it, and give it to `oncelog verify --head`.

    Example:  oncelog head orders.db > orders-head.json
    """
    with ending_well(), looking_at(file) as (connection, found):
        print_json(msgspec.to_builtins(head_of(connection, found)))
