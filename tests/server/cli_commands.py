"""Commands of the CLI, run in this process."""

import asyncio

from cli.runner import COMMAND, RUNNER, Result


async def oncelog(*arguments: str) -> Result:
    """Run a command in another thread, because commands start their own event loop."""
    return await asyncio.to_thread(lambda: RUNNER.invoke(COMMAND, arguments))
