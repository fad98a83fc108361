"""`oncelog clock`: does the log believe the machine's clock?"""

from typing import Annotated

import typer

from oncelog.cli.terminal import FOUND_NOTHING, AsJson, File, ending_well, print_json
from oncelog.cli.times import utc
from oncelog.errors import ClockJumpedError
from oncelog.stores.clock import JUMP_MS_MAX, ClockMark, SystemClock
from oncelog.stores.sqlite.looking import ExistingFile, looking_at
from oncelog.stores.sqlite.session import Session
from oncelog.stores.sqlite.statements import SQL

Confirm = Annotated[bool, typer.Option("--confirm", help="Believe the wall clock as it is.")]
JumpMsMax = Annotated[
    int,
    typer.Option(
        min=1,
        metavar="MILLISECONDS",
        help="What is believed: `Limits.clock_jump_ms_max` of the application, where it has set it.",
    ),
]


def clock(file: File, confirm: Confirm = False, jump_ms_max: JumpMsMax = JUMP_MS_MAX, as_json: AsJson = False) -> None:
    """Shows the wall clock, the time of the newest commit, and whether the clock has jumped; exit status 1 if it has.

    After a jump forward the log takes no new writes, because it would forget identities too early. Set the clock
    right, or confirm it here if it is right.

    Example:  oncelog clock orders.db --confirm
    """
    with ending_well():
        with looking_at(file) as (connection, _):
            _, _, *columns = connection.execute(SQL["state"]).fetchone()
        system = SystemClock()
        mark = ClockMark(*columns)
        has_jumped, sentence = judged(mark, system, jump_ms_max)
        if confirm:
            _confirm(file, system)
            sentence = "the wall clock is believed from now on"
        if as_json:
            said = {"wall_ms": system.wall_ms(), "log_ms": mark.time_ms, "expected_ms": mark.expected_ms(system)}
            print_json({**said, "jump_ms_max": jump_ms_max, "jumped": has_jumped, "confirmed": confirm})
        else:
            typer.echo(f"wall clock: {utc(system.wall_ms())}")
            typer.echo(f"the log:    {utc(mark.time_ms) if mark.time_ms else 'no commit yet'}")
            typer.echo(sentence)
        if has_jumped and not confirm:
            raise typer.Exit(FOUND_NOTHING)


def judged(mark: ClockMark, system: SystemClock, jump_ms_max: int) -> tuple[bool, str]:
    """Whether the clock has jumped since the newest commit, and what that means."""
    try:
        mark.after(system, jump_ms_max)
    except ClockJumpedError as jumped:
        return True, (
            f"the wall clock is {jumped.ahead_ms} ms ahead of where the machine's steady clock says it must be "
            f"(at most {jump_ms_max} are believed): no new write is taken until it is set right or confirmed"
        )
    behind_ms = mark.time_ms - system.wall_ms()
    if behind_ms > 0:
        return False, f"the wall clock is {behind_ms} ms behind the log, whose time stands still until then"
    if mark.time_ms and mark.boot != system.boot():
        return False, "no jump is seen, but the machine has been restarted since: it could not be"
    return False, "no jump is seen"


def _confirm(file: str, system: SystemClock) -> None:
    session = Session(file, ExistingFile(query_only=False), system, bytes, JUMP_MS_MAX)
    try:
        session.open(None)
        session.confirm_clock()
    finally:
        session.close()
