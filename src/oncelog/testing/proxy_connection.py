"""A connection through `oncelog.testing.proxy`: two sockets, and a task for each direction."""

import asyncio
from asyncio import StreamReader, StreamWriter
from contextlib import suppress
from typing import Any

from oncelog.testing.proxy_faults import NO_FAULT, Break, Direction, Faults, FaultSampler, Incident
from oncelog.testing.proxy_frames import ANSWER, REQUEST, Piece, Splitter
from oncelog.testing.proxy_server import CHUNK_BYTES, ProxyServer, close_writer


class _CutError(Exception):
    """Cuts a connection on purpose."""

    def __init__(self, *, is_reset: bool, fin_writer: StreamWriter | None = None) -> None:
        super().__init__(is_reset, fin_writer)
        self.is_reset = is_reset
        self.fin_writer = fin_writer


class _Flow:
    """One direction: source, target, and the decision about the current frame."""

    def __init__(self, reader: StreamReader, writer: StreamWriter, splitter: Splitter, sampler: FaultSampler) -> None:
        self.reader = reader
        self.writer = writer
        self.splitter = splitter
        self.sampler = sampler
        self.decision = NO_FAULT
        self.copy = bytearray()
        self.drops_bytes = False
        # With this limit, `drain` waits until the kernel has all bytes, so that a cut does not lose them.
        writer.transport.set_write_buffer_limits(high=0)


class ProxiedConnection:
    """Connection between a client and the target. `cut` works at any time; `task` finishes with the connection."""

    def __init__(
        self, number: int, proxy: ProxyServer[Any, Faults], reader: StreamReader, writer: StreamWriter
    ) -> None:
        self._number = number
        self._proxy = proxy
        self._reader = reader
        self._writers = [writer]
        self._flows: list[_Flow] = []
        self._is_breaking = False
        """Whether the connection is breaking: bytes are lost, or about to be lost."""
        self._answer: asyncio.Event | None = None
        """Event that is set when the server answers, while the connection waits for an answer to drop."""
        self.task: asyncio.Task[None]

    def start(self, target: tuple[str, int]) -> None:
        """Start the connection. Call this once, before any other method."""
        self.task = asyncio.get_running_loop().create_task(self._run(target))

    def cut(self, *, is_reset: bool = True) -> None:
        """Close the connection immediately, with a RST or a FIN at both ends."""
        # Close them here too, because a task that has not started does not.
        self._close_sockets(is_reset=is_reset)
        self.task.cancel()

    def calm(self) -> None:
        """Stop all faults. A connection that has lost bytes is cut."""
        if self._is_breaking:
            self.cut(is_reset=True)
        for flow in self._flows:
            flow.decision = NO_FAULT
            flow.copy.clear()

    async def _run(self, target: tuple[str, int]) -> None:
        try:
            await self._forward_all(target)
        finally:
            self._close_sockets(is_reset=False)
            for writer in self._writers:
                with suppress(OSError):
                    await writer.wait_closed()

    async def _forward_all(self, target: tuple[str, int]) -> None:
        try:
            server_reader, server_writer = await asyncio.open_connection(*target, limit=CHUNK_BYTES)
        except OSError:
            self._proxy.done[Incident.UNREACHABLE] += 1
            return
        (client_writer,) = self._writers
        self._writers.append(server_writer)
        to_server = _Flow(self._reader, server_writer, Splitter(REQUEST), self._build_sampler(Direction.TO_SERVER))
        to_client = _Flow(server_reader, client_writer, Splitter(ANSWER), self._build_sampler(Direction.TO_CLIENT))
        self._flows = [to_server, to_client]
        try:
            async with asyncio.TaskGroup() as directions:
                directions.create_task(self._forward_to_server(to_server))
                directions.create_task(self._forward_to_client(to_client, to_server.splitter))
        except* _CutError as cuts:
            cut = cuts.exceptions[0]
            if isinstance(cut, _CutError):  # `except*` guarantees this, but type checkers do not know it
                self._close_sockets(is_reset=cut.is_reset, fin_writer=cut.fin_writer)
        except* OSError:
            self._close_sockets(is_reset=True)  # one end was reset, so reset the other too

    def _build_sampler(self, direction: Direction) -> FaultSampler:
        return FaultSampler(self._proxy.seed, self._number, direction)

    # --- both directions --------------------------------------------------------------------------------

    async def _forward_to_server(self, flow: _Flow) -> None:
        while data := await flow.reader.read(CHUNK_BYTES):
            await self._forward_pieces(flow, flow.splitter.feed(data))
        await self._finish(flow)

    async def _forward_to_client(self, flow: _Flow, requests: Splitter) -> None:
        while data := await flow.reader.read(CHUNK_BYTES):
            if self._answer is not None:
                self._answer.set()  # the answer itself is dropped
                continue
            pieces = flow.splitter.feed(data)
            if flow.splitter.is_plain:
                requests.switch_to_plain()
            await self._forward_pieces(flow, pieces)
        await self._finish(flow)

    async def _finish(self, flow: _Flow) -> None:
        """Handle the end of the stream from one side. The other side may still send, unless it cannot be reached."""
        await self._forward_pieces(flow, flow.splitter.finish())
        if self._is_breaking:
            raise _CutError(is_reset=True)
        flow.writer.write_eof()

    async def _forward_pieces(self, flow: _Flow, pieces: list[Piece]) -> None:
        # Delays of all pieces in a chunk start now, so that they do not add up.
        now_s = asyncio.get_running_loop().time()
        for piece in pieces:
            if piece.offset == 0 and not flow.drops_bytes:
                await self._decide(flow, piece, now_s)
            if not flow.drops_bytes:
                await self._forward_piece(flow, piece)

    async def _decide(self, flow: _Flow, piece: Piece, now_s: float) -> None:
        """Decide the fault of a unit at its first byte, so that the fault does not depend on how the bytes arrive."""
        flow.decision = NO_FAULT
        if piece.unit is None:
            return
        flow.decision = flow.sampler.decide(piece.unit, self._proxy.faults)
        if flow.decision.delay_s:
            self._proxy.done[Incident.DELAYED] += 1
            await asyncio.sleep(now_s + flow.decision.delay_s - asyncio.get_running_loop().time())

    async def _forward_piece(self, flow: _Flow, piece: Piece) -> None:
        breaks = flow.decision.breaks
        if breaks is not None and piece.end >= breaks.at:
            await self._end(flow, breaks, piece.data[: breaks.at - piece.offset])
        await self._write(flow, piece.data)
        if flow.decision.is_duplicated:
            flow.copy += piece.data
            if piece.unit is not None and piece.end == piece.unit.size:
                self._proxy.done[Incident.DUPLICATED] += 1
                copy = bytes(flow.copy)
                flow.copy.clear()
                await self._write(flow, copy)

    async def _write(self, flow: _Flow, data: bytes) -> None:
        flow.writer.write(data)
        await flow.writer.drain()

    # --- end --------------------------------------------------------------------------------------------

    async def _end(self, flow: _Flow, breaks: Break, last: bytes) -> None:
        """Forward the last bytes and cut the connection, immediately or later. Raises `_CutError`."""
        incident = breaks.incident
        self._is_breaking = True
        if incident is Incident.CUT_AT_ANSWER:
            # Create the event before writing the last bytes, because an answer may arrive before `drain` returns.
            self._answer = asyncio.Event()
        await self._write(flow, last)
        if incident is Incident.STALLED:
            self._proxy.done[incident] += 1
            await self._stall(flow, breaks)
            raise _CutError(is_reset=breaks.is_reset)
        if self._answer is not None and not await _wait_event(self._answer, breaks.wait_s):
            incident = Incident.CUT_AFTER_FRAME
        self._proxy.done[incident] += 1
        # A RST can overtake unread bytes. If the frame must arrive, close the connection with a FIN.
        is_whole = incident in (Incident.CUT_AFTER_FRAME, Incident.CUT_AT_ANSWER)
        raise _CutError(is_reset=breaks.is_reset, fin_writer=flow.writer if is_whole else None)

    async def _stall(self, flow: _Flow, breaks: Break) -> None:
        """Drop bytes until the sender closes the connection or the time is up. The sender can continue to send."""
        for stalled_flow in self._flows if breaks.both_ways else [flow]:
            stalled_flow.drops_bytes = True
        with suppress(TimeoutError):
            async with asyncio.timeout(breaks.wait_s):
                while await flow.reader.read(CHUNK_BYTES):
                    pass

    def _close_sockets(self, *, is_reset: bool, fin_writer: StreamWriter | None = None) -> None:
        """Close both sockets, unless they have been cut already."""
        for writer in self._writers:
            close_writer(writer, is_reset=is_reset and writer is not fin_writer)


async def _wait_event(event: asyncio.Event, wait_s: float) -> bool:
    try:
        await asyncio.wait_for(event.wait(), wait_s)
    except TimeoutError:
        return False
    return True
