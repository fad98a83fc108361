"""An agent whose tools must not run twice: it is killed in the middle of its plan, and another one goes on.

Run it with `.venv/bin/python examples/agent.py`. It leaves agent.db behind, made anew by every run.

The model is a script here; what matters is the loop around it. Every tool call goes through `Runs`: its six fields
decide which run it is. So a plan can be carried out again from its first step, by any process: steps that were done
give their result back, and their tools are not touched.
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
"""What the tools do to the world: it must hold every effect once."""


async def search(query: str) -> dict[str, Any]:
    """Changes nothing, but costs money."""
    effect(f"searched for {query}")
    return {"flights": ["LH 400", "UA 961"]}


def book(flight: str) -> dict[str, Any]:
    """A tool that is not async runs in a thread."""
    effect(f"booked {flight}")
    return {"booking": f"{flight}-7"}


async def send_mail(to: str, text: str) -> dict[str, Any]:
    """The one that nobody wants twice."""
    effect(f"mailed {to}: {text}")
    return {"sent": True}


TOOLS: dict[str, Callable[..., Any]] = {"search": search, "book": book, "send_mail": send_mail}


def effect(what: str) -> None:
    """Something that happens outside of the log."""
    with OUTBOX.open("a") as file:
        file.write(f"{what}\n")


def next_call(results: list[Any]) -> tuple[str, dict[str, Any]] | None:
    """What a language model would say next, given the results so far."""
    match results:
        case []:
            return "search", {"query": "Frankfurt to New York"}
        case [found]:
            return "book", {"flight": found["flights"][0]}
        case [_, booked]:
            return "send_mail", {"to": "ada@example.org", "text": f"booked as {booked['booking']}"}
        case _:
            return None


async def carry_out(plan: str, die_after: int = 0) -> list[bool]:
    """The agent's loop, from the first step on. Gives which steps were reused."""
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


def until_killed() -> None:
    """The first agent."""
    asyncio.run(carry_out("trip-1", die_after=2))


def main() -> None:
    """Tells the story."""
    for name in (FILE, Path(f"{FILE}-wal"), Path(f"{FILE}-shm"), OUTBOX):
        name.unlink(missing_ok=True)
    agent = multiprocessing.get_context("spawn").Process(target=until_killed)
    agent.start()
    agent.join()
    print("an agent searched, booked, and was killed (SIGKILL) before it sent its mail")
    reused = asyncio.run(carry_out("trip-1"))
    for step, was_reused in zip(TOOLS, reused, strict=True):
        print(f"  another one: {step:10} {'reused' if was_reused else 'executed'}")
    effects = OUTBOX.read_text().splitlines()
    assert reused == [True, True, False]
    assert len(effects) == len(set(effects)) == 3, effects
    print("every effect happened once:", *effects, sep="\n  ")


if __name__ == "__main__":
    main()
