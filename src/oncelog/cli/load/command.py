"""The command `oncelog load`."""

import asyncio
from typing import Annotated, Final

import msgspec
import typer

from oncelog.cli.load.plan import PREFIX, SIZE_BYTES_MIN, LoadPlan
from oncelog.cli.load.runner import LoadRunner
from oncelog.cli.output import print_result
from oncelog.cli.remote import ClientId, check_client_id
from oncelog.cli.server_options import Remote, uses_explicit_server_as_client
from oncelog.cli.terminal import EXIT_FOUND_NOTHING, AsJson

RATE_MIN: Final = 0.01
RATE_MAX: Final = 1_000_000.0


@uses_explicit_server_as_client
def load(  # noqa: PLR0913 - one argument per option
    *,
    remote: Remote,
    client_id: ClientId = None,
    connections: Annotated[int, typer.Option(min=1, max=1000, help="Number of WebSocket connections.")] = 16,
    in_flight: Annotated[
        int,
        typer.Option(min=1, max=1000, help="Concurrent requests per connection. With --rate, the maximum."),
    ] = 16,
    rate: Annotated[
        float | None,
        typer.Option(
            metavar="EVENTS",
            min=RATE_MIN,
            max=RATE_MAX,
            help="Events per second on all connections together, at fixed times, without waiting for answers. "
            "Default: each connection sends the next request after an answer.",
        ),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, max=1000, help="Events per request.")] = 1,
    seconds: Annotated[float, typer.Option(min=0, help="Duration of the test.")] = 10.0,
    size: Annotated[int, typer.Option(min=SIZE_BYTES_MIN, max=1_000_000, help="Size of each event in bytes.")] = 300,
    partitions: Annotated[int, typer.Option(min=1, max=1_000_000, help="Number of partitions.")] = 100,
    retries: Annotated[
        float,
        typer.Option(
            metavar="PERCENT",
            min=0,
            max=100,
            help="Percentage of events to send twice. --rate does not count the second time.",
        ),
    ] = 5.0,
    as_json: AsJson = False,
) -> None:
    """Run a load test against a server and print the results.

    It writes real events into the partitions load/0, load/1, …. They remain in the log, so only --url or --profile
    selects a server other than the one at http://127.0.0.1:7171.

    Some events are sent twice and must get the same committed_id both times. The exit status is 1 if an event gets two
    different ids, if two events get the same id, or if an event is rejected or never answered.

    Without --rate, the test measures how many events per second the server can commit. With --rate, it measures the
    latency at this load. A request of --batch events is due every --batch / --rate seconds, and its latency counts from
    that time. It is late if its connection already has --in-flight requests in flight. If requests remain unsent
    because the server is too slow, the command reports them, and the exit status is 1.

    Examples:

      oncelog load --connections 4 --seconds 5

      oncelog load --rate 500 --seconds 30
    """
    plan = LoadPlan(connections, in_flight, batch, seconds, size, partitions, retries, rate)
    plan.check()
    warning = f"Writing real events to {remote.url}, into the partitions {PREFIX}0 to {PREFIX}{partitions - 1}."
    typer.echo(warning, err=True)
    tally = asyncio.run(LoadRunner(remote, check_client_id(client_id), plan).run())
    print_result({"url": remote.url, **msgspec.structs.asdict(plan), **tally.to_json()}, tally.format_lines(), as_json)
    if tally.has_failed:
        raise typer.Exit(EXIT_FOUND_NOTHING)
