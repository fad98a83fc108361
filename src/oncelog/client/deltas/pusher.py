"""The task that empties the outbox."""

import asyncio
import logging
import random
from collections.abc import Callable
from typing import Final

from oncelog.client.deltas.desk import Desk
from oncelog.client.deltas.messages import Acknowledged, Unanswered
from oncelog.client.deltas.pushing import Pushing
from oncelog.client.deltas.wire import Wire
from oncelog.client.patience import STORE_PAUSE, Patience, Pause
from oncelog.errors import StoreError

logger: Final = logging.getLogger("oncelog.client.deltas")


class Pusher:
    """`run` goes on until it is cancelled."""

    def __init__(self, desk: Desk, wire: Wire, chance: random.Random, on_acknowledged: Callable[[str], None]) -> None:
        self._desk = desk
        self._wire = wire
        self._on_acknowledged = on_acknowledged
        self._patience = Patience(desk.limits, chance)
        self._work = asyncio.Event()
        self._hurry = asyncio.Event()
        self.pushing = Pushing(desk.limits.push_deltas_max)

    def work(self) -> None:
        """There is something in the outbox."""
        self._work.set()

    def hurry(self) -> None:
        """What waits is tried at once."""
        self.pushing.release()
        self._hurry.set()
        self._work.set()

    def discarded(self) -> None:
        """Deltas were taken out of the outbox."""
        self.pushing.discarded()
        self.hurry()

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            try:
                pause = await self._push()
            except StoreError as error:
                logger.warning("%s", error)
                self.pushing.last_error = str(error)
                pause = STORE_PAUSE
            self._desk.wake()
            if pause is not None:
                await self._wait(pause)

    async def _push(self) -> Pause | None:
        """One push, or none if there is nothing to do: then it waits until there is."""
        desk, pushing = self._desk, self.pushing
        self._work.clear()
        bounds = pushing.bounds
        batch = await desk.in_store(desk.store.pending, bounds.before, bounds.deltas_max, desk.limits.push_bytes_max)
        if not batch:
            held = pushing.nothing_left()
            if held is None:
                await self._work.wait()
            return held
        self._hurry.clear()
        discards, before = pushing.discards, pushing.refusal
        answer = await self._wire.push(batch)
        if isinstance(answer, Acknowledged):
            is_ours = await desk.in_store(desk.store.acknowledge, batch[-1].number, answer)
            self._on_acknowledged(answer.epoch)
            if not is_ours:
                answer = Unanswered(f"the push was acknowledged in another history, of epoch {answer.epoch}")
        if isinstance(answer, Acknowledged):
            self._patience.renew()
        elif pushing.discards != discards:
            return None
        elif pushing.last_error is None:
            logger.info("not pushed: %s", answer)
        pause = pushing.answered(batch, answer)
        if pushing.refusal is not None and pushing.refusal != before:
            logger.warning("the gateway refuses a delta: %s", pushing.refusal)
        return pause

    async def _wait(self, pause: Pause) -> None:
        try:
            async with asyncio.timeout(self._patience.pause_s(pause)):
                await self._hurry.wait()
        except TimeoutError:
            pass
        self._hurry.clear()
        self.pushing.release()
