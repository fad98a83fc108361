"""An agent whose tools must not run twice: it is killed in the middle of its plan, and a second agent continues.

Run it with `.venv/bin/python examples/agent.py`. Each run recreates agent.db.

A script replaces the language model, because the example is about the loop around it. Every tool call goes through
`Runs`, whose six fields identify the call. Any process can therefore execute a plan again from its first step: `Runs`
returns the stored results of finished steps and does not run their tools.
"""

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oncelog

FILE = Path("agent.db")
OUTBOX = Path("agent-outbox.txt")
"""The effects of the tools on the outside world. The file must contain each effect once."""


async def search(query: str) -> dict[str, Any]:
    """Return flights. A search changes nothing, but costs money."""
    record_effect(f"searched for {query}")
    return {"flights": ["LH 400", "UA 961"]}


def book(flight: str) -> dict[str, Any]:
    """Book a flight. `Runs` calls a tool that is not async in a thread."""
    record_effect(f"booked {flight}")
    return {"booking": f"{flight}-7"}


async def send_mail(to: str, text: str) -> dict[str, Any]:
    """Send a mail, which must not arrive twice."""
    record_effect(f"mailed {to}: {text}")
    return {"sent": True}


TOOLS: dict[str, Callable[..., Any]] = {"search": search, "book": book, "send_mail": send_mail}


def record_effect(effect: str) -> None:
    """Write an effect to a file outside of the log."""
    with OUTBOX.open("a") as file:
        file.write(f"{effect}\n")


def next_call(results: list[Any]) -> tuple[str, dict[str, Any]] | None:
    """Return the tool call that a language model would choose next, given the results so far."""
    match results:
        case []:
            return "search", {"query": "Frankfurt to New York"}
        case [offers]:
            return "book", {"flight": offers["flights"][0]}
        case [_, booking]:
            return "send_mail", {"to": "ada@example.org", "text": f"booked as {booking['booking']}"}
        case _:
            return None


async def execute_plan(plan: str, die_after: int = 0) -> list[bool]:
    """Run the loop of the agent from the first step. Return for each step whether its result was reused.

    The process kills itself after `die_after` steps.
    """
    reused = []
    async with oncelog.open(FILE) as log:
        runs = oncelog.Runs(log)
        results: list[Any] = []
        while (call := next_call(results)) is not None:
            tool_name, args = call
            run = await runs.execute(
                plan_id=plan,
                campaign_id=1,
                event_type="tool.execute",
                tool_name=tool_name,
                ruleset_version="v1",
                args=args,
                tool=TOOLS[tool_name],
            )
            results.append(run.event.output)
            reused.append(run.reused)
            if len(results) == die_after:
                os.kill(os.getpid(), signal.SIGKILL)
    return reused


def run_first_agent() -> None:
    """Run the first agent, which is killed after two steps."""
    asyncio.run(execute_plan("trip-1", die_after=2))


def main() -> None:
    """Run two agents one after the other, and check that every effect happened once."""
    for name in (FILE, Path(f"{FILE}-wal"), Path(f"{FILE}-shm"), OUTBOX):
        name.unlink(missing_ok=True)
    agent = multiprocessing.get_context("spawn").Process(target=run_first_agent)
    agent.start()
    agent.join()
    print("the first agent searched, booked, and was killed (SIGKILL) before it sent its mail")
    reused = asyncio.run(execute_plan("trip-1"))
    for step, was_reused in zip(TOOLS, reused, strict=True):
        print(f"  second agent: {step:10} {'reused' if was_reused else 'executed'}")
    effects = OUTBOX.read_text().splitlines()
    assert reused == [True, True, False]
    assert len(effects) == len(set(effects)) == 3, effects
    print("every effect happened once:", *effects, sep="\n  ")


if __name__ == "__main__":
    main()
