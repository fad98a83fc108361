"""One connection through `oncelog.testing.proxy`: two sockets, and a task for each direction between them."""

import asyncio
import socket
import struct
from asyncio import StreamReader, StreamWriter
from contextlib import suppress
from typing import Final

from oncelog.testing.proxy_faults import NOTHING, Break, Chance, Direction, Incident, Weather
from oncelog.testing.proxy_frames import ANSWER, REQUEST, Piece, Splitter

CHUNK_BYTES: Final = 65_536
"""What is read at once; a stream keeps twice as much before its sender has to wait."""

_RESET: Final = struct.pack("ii", 1, 0)
"""SO_LINGER for no time: what was not sent is thrown away, and the other end gets a RST."""


class _CutError(Exception):
    """The connection is to be cut; not an error of anybody's."""

    def __init__(self, *, is_reset: bool, spared: StreamWriter | None = None) -> None:
        super().__init__(is_reset, spared)
        self.is_reset = is_reset
        self.spared = spared


class _Way:
    """One direction: from where, to where, and what is decided about the frame that is on its way."""

    def __init__(self, reader: StreamReader, writer: StreamWriter, splitter: Splitter, chance: Chance) -> None:
        self.reader = reader
        self.writer = writer
        self.splitter = splitter
        self.chance = chance
        self.decision = NOTHING
        self.copy = bytearray()
        self.vanishes = False
        # Nothing may wait in our memory: what `drain` has waited for is with the kernel, even if we cut a moment later.
        writer.transport.set_write_buffer_limits(high=0)


class Connection:
    """Between a client and the target. `cut` it at any time; its `task` ends when it has ended."""

    def __init__(self, number: int, weather: Weather, reader: StreamReader, writer: StreamWriter) -> None:
        self._number = number
        self._weather = weather
        self._reader = reader
        self._writers = [writer]
        self._ways: list[_Way] = []
        self._is_breaking = False
        """Its end has begun: bytes are lost, or about to be."""
        self._answer: asyncio.Event | None = None
        """Set when something comes from the server, while an answer is waited for that is to be lost."""
        self.task: asyncio.Task[None]

    def start(self, target: tuple[str, int]) -> None:
        """Begins; once, and nothing else before."""
        self.task = asyncio.get_running_loop().create_task(self._run(target))

    def cut(self, *, is_reset: bool) -> None:
        """Ends it now, with a RST or a FIN to both ends."""
        # Here and not in the task alone: one that was never begun would not get as far.
        self._hang_up(is_reset=is_reset)
        self.task.cancel()

    def calm(self) -> None:
        """Nothing more happens to it. If bytes have vanished it cannot be mended, and is cut."""
        if self._is_breaking:
            self.cut(is_reset=True)
        for way in self._ways:
            way.decision = NOTHING
            way.copy.clear()

    async def _run(self, target: tuple[str, int]) -> None:
        try:
            await self._carry_all(target)
        finally:
            self._hang_up(is_reset=False)
            for writer in self._writers:
                with suppress(OSError):
                    await writer.wait_closed()

    async def _carry_all(self, target: tuple[str, int]) -> None:
        try:
            server_reader, server_writer = await asyncio.open_connection(*target, limit=CHUNK_BYTES)
        except OSError:
            self._weather.done[Incident.UNREACHABLE] += 1
            return
        (client_writer,) = self._writers
        self._writers.append(server_writer)
        to_server = _Way(self._reader, server_writer, Splitter(REQUEST), self._chance(Direction.TO_SERVER))
        to_client = _Way(server_reader, client_writer, Splitter(ANSWER), self._chance(Direction.TO_CLIENT))
        self._ways = [to_server, to_client]
        try:
            async with asyncio.TaskGroup() as directions:
                directions.create_task(self._carry_to_server(to_server))
                directions.create_task(self._carry_to_client(to_client, to_server.splitter))
        except* _CutError as cuts:
            cut = cuts.exceptions[0]
            if isinstance(cut, _CutError):  # as `except*` knows, and the types do not
                self._hang_up(is_reset=cut.is_reset, spared=cut.spared)
        except* OSError:
            self._hang_up(is_reset=True)  # one end was reset: the other gets to know

    def _chance(self, direction: Direction) -> Chance:
        return Chance(self._weather.seed, self._number, direction)

    # --- the two directions -----------------------------------------------------------------------------

    async def _carry_to_server(self, way: _Way) -> None:
        while data := await way.reader.read(CHUNK_BYTES):
            await self._pass_on(way, way.splitter.feed(data))
        await self._finish(way)

    async def _carry_to_client(self, way: _Way, requests: Splitter) -> None:
        while data := await way.reader.read(CHUNK_BYTES):
            if self._answer is not None:
                self._answer.set()  # and the answer is lost
                continue
            pieces = way.splitter.feed(data)
            if way.splitter.is_plain:
                requests.give_up()
            await self._pass_on(way, pieces)
        await self._finish(way)

    async def _finish(self, way: _Way) -> None:
        """One end has closed, and the other may still have something to say; not if it cannot be told."""
        await self._pass_on(way, way.splitter.finish())
        if self._is_breaking:
            raise _CutError(is_reset=True)
        way.writer.write_eof()

    async def _pass_on(self, way: _Way, pieces: list[Piece]) -> None:
        # Delays count from here, for all pieces: many frames in a chunk are not later than one frame could be.
        now_s = asyncio.get_running_loop().time()
        for piece in pieces:
            if piece.offset == 0 and not way.vanishes:
                await self._decide(way, piece, now_s)
            if not way.vanishes:
                await self._pass(way, piece)

    async def _decide(self, way: _Way, piece: Piece, now_s: float) -> None:
        """What happens to a unit is decided at its first bytes, so that it does not depend on how its bytes come."""
        way.decision = NOTHING
        if piece.unit is None:
            return
        way.decision = way.chance.decide(piece.unit, self._weather.faults)
        if way.decision.delay_s:
            self._weather.done[Incident.DELAYED] += 1
            await asyncio.sleep(now_s + way.decision.delay_s - asyncio.get_running_loop().time())

    async def _pass(self, way: _Way, piece: Piece) -> None:
        breaks = way.decision.breaks
        if breaks is not None and piece.end >= breaks.at:
            await self._break(way, breaks, piece.data[: breaks.at - piece.offset])
        await self._write(way, piece.data)
        if way.decision.is_duplicated:
            way.copy += piece.data
            if piece.unit is not None and piece.end == piece.unit.size:
                self._weather.done[Incident.DUPLICATED] += 1
                copy = bytes(way.copy)
                way.copy.clear()
                await self._write(way, copy)

    async def _write(self, way: _Way, data: bytes) -> None:
        way.writer.write(data)
        await way.writer.drain()

    # --- the end ----------------------------------------------------------------------------------------

    async def _break(self, way: _Way, breaks: Break, last: bytes) -> None:
        """Passes the last bytes on and ends the connection, at once or after a while: raises `_CutError`."""
        incident = breaks.incident
        self._is_breaking = True
        if incident is Incident.CUT_AT_ANSWER:
            # Before the last bytes are written: an answer may be here before `drain` returns.
            self._answer = asyncio.Event()
        await self._write(way, last)
        if incident is Incident.STALLED:
            self._weather.done[incident] += 1
            await self._stall(way, breaks)
            raise _CutError(is_reset=breaks.is_reset)
        if self._answer is not None and not await _comes(self._answer, breaks.wait_s):
            incident = Incident.CUT_AFTER_FRAME
        self._weather.done[incident] += 1
        # A RST can overtake bytes that were not read yet. Where the frame is to arrive, the end is a FIN.
        is_whole = incident in (Incident.CUT_AFTER_FRAME, Incident.CUT_AT_ANSWER)
        raise _CutError(is_reset=breaks.is_reset, spared=way.writer if is_whole else None)

    async def _stall(self, way: _Way, breaks: Break) -> None:
        """Until the sender closes, or the time is over. The sender notices nothing: it can go on sending."""
        for one in self._ways if breaks.both_ways else [way]:
            one.vanishes = True
        with suppress(TimeoutError):
            async with asyncio.timeout(breaks.wait_s):
                while await way.reader.read(CHUNK_BYTES):
                    pass

    def _hang_up(self, *, is_reset: bool, spared: StreamWriter | None = None) -> None:
        """Closes both sockets; what was cut already stays as it is."""
        for writer in self._writers:
            close(writer, is_reset=is_reset and writer is not spared)


def close(writer: StreamWriter, *, is_reset: bool) -> None:
    """Closes a connection now, with a RST or a FIN. What waits in our memory is not sent any more."""
    if writer.transport.is_closing():
        return
    with suppress(OSError):  # the other end was faster
        if is_reset:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        else:
            writer.write_eof()  # by itself, closing would be a RST if something had come that nobody has read
    writer.transport.abort()


async def _comes(event: asyncio.Event, wait_s: float) -> bool:
    try:
        await asyncio.wait_for(event.wait(), wait_s)
    except TimeoutError:
        return False
    return True
