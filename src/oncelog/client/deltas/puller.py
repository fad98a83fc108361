"""The task that reads the gateway: pages until it has caught up, then what is live."""

import asyncio
import logging
import random
import time
from typing import Final

from oncelog.client.deltas.desk import Desk
from oncelog.client.deltas.messages import (
    Fault,
    LiveCompacted,
    LiveDeltas,
    PulledPage,
    SnapshotPage,
    Unanswered,
)
from oncelog.client.deltas.pulling import (
    Apply,
    Effect,
    Follow,
    Join,
    Pull,
    Pulling,
    ReadAnew,
    ReadSnapshot,
    Request,
    Reset,
    Stage,
)
from oncelog.client.deltas.values import HistoryChange
from oncelog.client.deltas.wire import Live, Wire
from oncelog.client.patience import STORE_PAUSE, Patience, Pause
from oncelog.errors import ProtocolError, StoreError

logger: Final = logging.getLogger("oncelog.client.deltas")

_Message = LiveDeltas | LiveCompacted | Fault | Unanswered


class Puller:
    """`run` goes on until it is cancelled."""

    def __init__(self, desk: Desk, wire: Wire, chance: random.Random) -> None:
        self._desk = desk
        self._wire = wire
        self._patience = Patience(desk.limits, chance)
        self._hurry = asyncio.Event()
        self._live: Live | None = None
        self._live_since = 0.0
        self._receiving: asyncio.Task[_Message] | None = None
        self._rounds_asked = 0
        self._rounds_done = 0
        self._anew = 0
        """How often in a row a snapshot had to be begun."""
        self._left: tuple[str, int] | None = None
        """Epoch and cursor of a history that is no more the gateway's."""
        standing = desk.store.standing
        self.pulling = Pulling(standing.cursor, standing.epoch)
        self.history_change: HistoryChange | None = None

    @property
    def is_live(self) -> bool:
        """Whether what is committed arrives at once."""
        return self._live is not None and self.pulling.is_caught_up

    def hurry(self) -> None:
        """Ends a pause, or looks whether there is something else to do."""
        self._hurry.set()

    def look_at(self, epoch: str) -> None:
        """A push was acknowledged in this history: if it is another one, nobody need wait to be told so."""
        self.pulling.acknowledged(epoch)
        if self.pulling.epoch != epoch:
            self._rounds_asked += 1
            self.hurry()

    async def round(self) -> None:
        """Returns when all that the gateway has at this moment has arrived."""
        self._rounds_asked += 1
        wanted = self._rounds_asked
        self.hurry()
        await self._desk.until(lambda: self._rounds_done >= wanted)

    async def run(self) -> None:
        """Until it is cancelled."""
        try:
            while True:
                try:
                    pause = await self._step()
                except StoreError as error:
                    logger.warning("%s", error)
                    self.pulling.last_error = str(error)
                    pause = STORE_PAUSE
                except ProtocolError as error:
                    logger.warning("%s", error)
                    self.pulling.last_error = str(error)
                    pause = Pause()
                if pause is not None:
                    await self._hang_up()
                    self._desk.wake()
                    await self._wait(pause)
                self._desk.wake()
        finally:
            await self._hang_up()

    async def _step(self) -> Pause | None:
        """One request, or one message of what is live."""
        pulling = self.pulling
        asked = self._rounds_asked
        if asked > self._rounds_done:
            pulling.pull_again()
        request = pulling.next_request(is_reset_wanted=self._desk.store.standing.is_reset_wanted)
        answer = await self._answer(request)
        if answer is None:
            return None
        had_error = pulling.last_error is not None
        effect = pulling.answered(request, answer)
        if isinstance(effect, Pause):
            if not had_error:
                logger.info("not connected: %s", answer)
            return effect
        await self._carry_out(effect)
        if isinstance(effect, ReadAnew):
            self._anew += 1
            return Pause() if self._anew > 1 else None
        if not isinstance(effect, Apply) or effect.deltas:
            self._patience.renew()
        if isinstance(effect, Apply):
            self._anew = 0
            if isinstance(request, Pull) and effect.is_caught_up:
                self._rounds_done = asked
        return None

    async def _answer(self, request: Request) -> PulledPage | SnapshotPage | _Message | None:
        """None if there is something else to do, or nothing has come of it."""
        limits = self._desk.limits
        match request:
            case Pull(since, epoch):
                return await self._wire.pull(since, epoch, limits.page_deltas)
            case ReadSnapshot(page):
                await self._hang_up()
                return await self._wire.snapshot(page, limits.page_rows)
            case Follow():
                if self._live is None:
                    return await self._connect(request)
                return await self._message()

    async def _connect(self, request: Follow) -> Fault | Unanswered | None:
        live = await self._wire.follow(request.since, request.epoch)
        if isinstance(live, Fault | Unanswered):
            return live
        self._live = live
        self._live_since = time.monotonic()
        self._receiving = asyncio.create_task(live.receive(), name="oncelog deltas: live")
        other = self.pulling.connected(live.epoch)
        if other is not None:
            await self._carry_out(other)
        return None

    async def _message(self) -> _Message | None:
        """The next one; None if there is something else to do."""
        receiving, live = self._receiving, self._live
        if receiving is None or live is None:
            return None
        hurrying = asyncio.create_task(self._hurry.wait())
        try:
            await asyncio.wait((receiving, hurrying), return_when=asyncio.FIRST_COMPLETED)
        finally:
            hurrying.cancel()
        self._hurry.clear()
        if not receiving.done():
            return None
        message = receiving.result()
        if isinstance(message, LiveDeltas):
            self._receiving = asyncio.create_task(live.receive(), name="oncelog deltas: live")
        return message

    async def _carry_out(self, effect: Effect) -> None:
        desk, store, pulling = self._desk, self._desk.store, self.pulling
        match effect:
            case Apply():
                if effect.deltas or (effect.cursor, effect.epoch) != (pulling.cursor, pulling.epoch):
                    await desk.changed(store.apply, effect.deltas, effect.cursor, effect.epoch, tell=desk.tell)
            case Join():
                cursor = None if effect.next else effect.cursor
                await desk.changed(store.join, effect.rows, cursor, effect.epoch, tell=desk.tell)
            case Stage():
                await desk.in_store(store.stage, effect.rows, effect.is_first, effect.horizon)
                if not effect.next:
                    await self._replace(effect)
            case Reset():
                if effect.is_compacted:
                    logger.info("all rows are read again: %s", effect.message)
                else:
                    logger.warning("the gateway's history is another one than before: %s", effect.message)
                    self._left = (pulling.epoch, pulling.cursor)
                await desk.in_store(store.want_reset)
            case ReadAnew():
                pass
        pulling.done(effect)

    async def _replace(self, effect: Stage) -> None:
        desk, pulling = self._desk, self.pulling
        told_max = desk.limits.changes_max if desk.streams else 0
        await desk.changed(
            desk.store.replace, effect.cursor, effect.epoch, told_max, effect.horizon, tell=desk.tell_replaced
        )
        left = self._left
        if left is None and pulling.epoch not in ("", effect.epoch):
            left = (pulling.epoch, pulling.cursor)
        if left is not None:
            self.history_change = HistoryChange(left[0], effect.epoch, left[1], effect.cursor)
            logger.warning("all rows are the gateway's again: %s", self.history_change)
        self._left = None

    async def _hang_up(self) -> None:
        live, self._live = self._live, None
        if live is not None and time.monotonic() - self._live_since > self._desk.limits.pause_ms_max / 1000:
            self._patience.renew()  # it was more than a greeting: the next pause is a short one again
        receiving, self._receiving = self._receiving, None
        if receiving is not None:
            receiving.cancel()
            await asyncio.gather(receiving, return_exceptions=True)
        if live is not None:
            await live.close()

    async def _wait(self, pause: Pause) -> None:
        try:
            async with asyncio.timeout(self._patience.pause_s(pause)):
                await self._hurry.wait()
        except TimeoutError:
            pass
        self._hurry.clear()
