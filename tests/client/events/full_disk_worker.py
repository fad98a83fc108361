"""Submit until the file size limit is reached, and once more after the limit is raised: python full_disk_worker.py FILE

Prints the error, the number of accepted submissions, the number that are pending at the end, and whether the status
reported the error at the limit and at the end.
"""

import asyncio
import resource
import sys

from oncelog.client import Client
from oncelog.client.runtime import backoff
from oncelog.errors import StoreUnavailableError

backoff.STORE_PAUSE = backoff.RetryPause(1)  # type: ignore[misc]


async def main() -> None:
    async with Client("http://127.0.0.1:9", path=sys.argv[1], partitions=["a"]) as client:
        await client.submit({"type": "first"})
        _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, most))
        taken = 1
        try:
            while True:
                await client.submit({"type": "t", "text": "x" * 10_000})
                taken += 1
        except StoreUnavailableError as error:
            raised = type(error).__name__
        was_reported = "I/O error" in str(client.status().last_error)
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        await client.submit({"type": "last"})
        is_still_reported = "I/O error" in str(client.status().last_error)
        sys.stdout.write(f"{raised} {taken} {len(client.pending())} {was_reported} {is_still_reported}\n")


asyncio.run(main())
