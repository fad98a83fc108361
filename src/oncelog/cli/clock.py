"""`oncelog clock`: show a log's clock and whether it has jumped."""

from typing import Annotated

import typer

from oncelog.cli.output import format_utc, print_result
from oncelog.cli.terminal import EXIT_FOUND_NOTHING, AsJson, LogArgument
from oncelog.errors import ClockJumpedError
from oncelog.storage.clock import JUMP_MS_MAX
from oncelog.storage.inspect.factory import create_inspector
from oncelog.storage.inspect.inspector import ClockStatus


def clock(
    log: LogArgument,
    confirm: Annotated[bool, typer.Option("--confirm", help="Accept the clock's current time.")] = False,
    jump_ms_max: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="MILLISECONDS",
            help="Largest accepted jump. Pass the application's `Limits.clock_jump_ms_max` if it sets one.",
        ),
    ] = JUMP_MS_MAX,
    as_json: AsJson = False,
) -> None:
    """Show the clock, the time of the newest commit, and whether the clock has jumped. The exit status is 1 if it has.

    A file uses this machine's clock; a database has its own. After a jump forward the log accepts no new writes,
    because it would forget identities too early. Correct the clock, or confirm it here if it is right.

    Example:  oncelog clock orders.db --confirm

    Example:  oncelog clock postgresql://oncelog@db.example.org/orders
    """
    inspector = create_inspector(log)
    with inspector.open_view() as view:
        status = view.get_clock_status()
    has_jumped, sentence = check_clock(status, jump_ms_max)
    if confirm:
        inspector.confirm_clock()
        sentence = f"the time of the {status.name} is accepted"
    wall_ms = status.now.time_ms
    width = len(status.name) + 2
    fields = {
        "wall_ms": wall_ms,
        "log_ms": status.newest_ms,
        "expected_ms": status.mark.predict_wall_ms(status.now),
        "jump_ms_max": jump_ms_max,
        "jumped": has_jumped,
        "confirmed": confirm,
    }
    lines = [
        f"{status.name + ':':<{width}}{format_utc(wall_ms)}",
        f"{'the log:':<{width}}{format_utc(status.newest_ms) if status.newest_ms else 'no commit yet'}",
        sentence,
    ]
    print_result(fields, lines, as_json)
    if has_jumped and not confirm:
        raise typer.Exit(EXIT_FOUND_NOTHING)


def check_clock(status: ClockStatus, jump_ms_max: int) -> tuple[bool, str]:
    """Return whether the clock has jumped since the newest commit, and what that means."""
    try:
        status.mark.advance(status.now, jump_ms_max)
    except ClockJumpedError as jumped:
        return True, (
            f"the {status.name} is {jumped.ahead_ms} ms ahead of the time that the machine's steady clock predicts "
            f"(at most {jump_ms_max} are accepted): the log accepts no new writes until the clock is corrected or "
            "confirmed with --confirm"
        )
    behind_ms = status.newest_ms - status.now.time_ms
    if behind_ms > 0:
        return (
            False,
            f"the {status.name} is {behind_ms} ms behind the log; log time stands still until the clock catches up",
        )
    if status.newest_ms and status.mark.boot != status.now.boot:
        return False, f"no jump was found, but {status.blind_reason}, so a jump may be undetected"
    return False, "no jump was found"
