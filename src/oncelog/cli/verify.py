"""`oncelog verify`: is a log what it says it is?"""

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from oncelog.cli.terminal import FOUND_NOTHING, AsJson, Log, Meter, count_in_words, ending_well, print_json
from oncelog.stores.inspecting import inspector_of
from oncelog.stores.verifying.findings import Lie, Passed, Progress, exported_head

Head = Annotated[
    Path | None, typer.Option("--head", help="A head that `oncelog head` printed earlier.", dir_okay=False, exists=True)
]


def verify(log: Log, head: Head = None, as_json: AsJson = False) -> None:
    """Goes through a log and says whether it is whole: hashes, records, indexes, all that is kept of clients.

    The first lie that is found is told, and the exit status is 1. The loss of the newest records, or a history that
    was rewritten as a whole, is found only with --head.

    The log may be in use meanwhile: it is looked at as it is at this moment.

    Example:  oncelog verify orders.db --head orders-head.json

    Example:  oncelog verify postgresql://oncelog@db.example.org/orders
    """
    with ending_well():
        exported = None if head is None else exported_head(head.read_bytes())
        result: Lie | Passed = Lie("the verification did not come to an end")
        with Meter() as meter:
            for finding in inspector_of(log).verify(exported):
                if isinstance(finding, Progress):
                    meter(finding)
                else:
                    result = finding
        is_whole = isinstance(result, Passed)
        if as_json:
            print_json({"ok": is_whole, **msgspec.structs.asdict(result)})
        elif isinstance(result, Passed):
            typer.echo(summary(result))
        else:
            typer.echo(f"not whole: {result.message}")
        if not is_whole:
            raise typer.Exit(FOUND_NOTHING)


def summary(passed: Passed) -> str:
    """One line for people."""
    sealed = f" ({passed.sealed_keys} in {passed.segments} segments)" if passed.segments else ""
    return (
        f"ok: {count_in_words(passed.records, passed.restore_records)} in {passed.lanes} lanes, "
        f"{passed.blocks} blocks, {passed.erased} erased, "
        f"{passed.keys} keys{sealed}, epoch {passed.epoch}"
    )
