"""One connection through `oncelog.testing.proxy`: two sockets, and a task for each direction between them."""

import asyncio
import socket
import struct
from asyncio import StreamReader, StreamWriter
from contextlib import suppress
from typing import Final

from oncelog.testing.proxy_faults import NO_FAULT, Break, Direction, FaultSampler, FaultState, Incident
from oncelog.testing.proxy_frames import ANSWER, REQUEST, Piece, Splitter

CHUNK_BYTES: Final = 65_536
"""What is read at once; a stream keeps twice as much before its sender has to wait."""

_RESET: Final = struct.pack("ii", 1, 0)
"""SO_LINGER for no time: what was not sent is thrown away, and the other end gets a RST."""


class _CutError(Exception):
    """The connection is to be cut; not an error of anybody's."""

    def __init__(self, *, is_reset: bool, fin_writer: StreamWriter | None = None) -> None:
        super().__init__(is_reset, fin_writer)
        self.is_reset = is_reset
        self.fin_writer = fin_writer


class _Flow:
    """One direction: from where, to where, and what is decided about the frame that is on its way."""

    def __init__(self, reader: StreamReader, writer: StreamWriter, splitter: Splitter, sampler: FaultSampler) -> None:
        self.reader = reader
        self.writer = writer
        self.splitter = splitter
        self.sampler = sampler
        self.decision = NO_FAULT
        self.copy = bytearray()
        self.drops_bytes = False
        # Nothing may wait in our memory: what `drain` has waited for is with the kernel, even if we cut a moment later.
        writer.transport.set_write_buffer_limits(high=0)


class ProxiedConnection:
    """Between a client and the target. `cut` it at any time; its `task` ends when it has ended."""

    def __init__(self, number: int, fault_state: FaultState, reader: StreamReader, writer: StreamWriter) -> None:
        self._number = number
        self._fault_state = fault_state
        self._reader = reader
        self._writers = [writer]
        self._flows: list[_Flow] = []
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
        self._close_sockets(is_reset=is_reset)
        self.task.cancel()

    def calm(self) -> None:
        """Nothing more happens to it. If bytes have vanished it cannot be mended, and is cut."""
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
            self._fault_state.done[Incident.UNREACHABLE] += 1
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
            if isinstance(cut, _CutError):  # as `except*` knows, and the types do not
                self._close_sockets(is_reset=cut.is_reset, fin_writer=cut.fin_writer)
        except* OSError:
            self._close_sockets(is_reset=True)  # one end was reset: the other gets to know

    def _build_sampler(self, direction: Direction) -> FaultSampler:
        return FaultSampler(self._fault_state.seed, self._number, direction)

    # --- the two directions -----------------------------------------------------------------------------

    async def _forward_to_server(self, flow: _Flow) -> None:
        while data := await flow.reader.read(CHUNK_BYTES):
            await self._forward_pieces(flow, flow.splitter.feed(data))
        await self._finish(flow)

    async def _forward_to_client(self, flow: _Flow, requests: Splitter) -> None:
        while data := await flow.reader.read(CHUNK_BYTES):
            if self._answer is not None:
                self._answer.set()  # and the answer is lost
                continue
            pieces = flow.splitter.feed(data)
            if flow.splitter.is_plain:
                requests.switch_to_plain()
            await self._forward_pieces(flow, pieces)
        await self._finish(flow)

    async def _finish(self, flow: _Flow) -> None:
        """One end has closed, and the other may still have something to say; not if it cannot be told."""
        await self._forward_pieces(flow, flow.splitter.finish())
        if self._is_breaking:
            raise _CutError(is_reset=True)
        flow.writer.write_eof()

    async def _forward_pieces(self, flow: _Flow, pieces: list[Piece]) -> None:
        # Delays count from here, for all pieces: many frames in a chunk are not later than one frame could be.
        now_s = asyncio.get_running_loop().time()
        for piece in pieces:
            if piece.offset == 0 and not flow.drops_bytes:
                await self._decide(flow, piece, now_s)
            if not flow.drops_bytes:
                await self._forward_piece(flow, piece)

    async def _decide(self, flow: _Flow, piece: Piece, now_s: float) -> None:
        """What happens to a unit is decided at its first bytes, so that it does not depend on how its bytes come."""
        flow.decision = NO_FAULT
        if piece.unit is None:
            return
        flow.decision = flow.sampler.decide(piece.unit, self._fault_state.faults)
        if flow.decision.delay_s:
            self._fault_state.done[Incident.DELAYED] += 1
            await asyncio.sleep(now_s + flow.decision.delay_s - asyncio.get_running_loop().time())

    async def _forward_piece(self, flow: _Flow, piece: Piece) -> None:
        breaks = flow.decision.breaks
        if breaks is not None and piece.end >= breaks.at:
            await self._end(flow, breaks, piece.data[: breaks.at - piece.offset])
        await self._write(flow, piece.data)
        if flow.decision.is_duplicated:
            flow.copy += piece.data
            if piece.unit is not None and piece.end == piece.unit.size:
                self._fault_state.done[Incident.DUPLICATED] += 1
                copy = bytes(flow.copy)
                flow.copy.clear()
                await self._write(flow, copy)

    async def _write(self, flow: _Flow, data: bytes) -> None:
        flow.writer.write(data)
        await flow.writer.drain()

    # --- the end ----------------------------------------------------------------------------------------

    async def _end(self, flow: _Flow, breaks: Break, last: bytes) -> None:
        """Passes the last bytes on and ends the connection, at once or after a while: raises `_CutError`."""
        incident = breaks.incident
        self._is_breaking = True
        if incident is Incident.CUT_AT_ANSWER:
            # Before the last bytes are written: an answer may be here before `drain` returns.
            self._answer = asyncio.Event()
        await self._write(flow, last)
        if incident is Incident.STALLED:
            self._fault_state.done[incident] += 1
            await self._stall(flow, breaks)
            raise _CutError(is_reset=breaks.is_reset)
        if self._answer is not None and not await _wait_event(self._answer, breaks.wait_s):
            incident = Incident.CUT_AFTER_FRAME
        self._fault_state.done[incident] += 1
        # A RST can overtake bytes that were not read yet. Where the frame is to arrive, the end is a FIN.
        is_whole = incident in (Incident.CUT_AFTER_FRAME, Incident.CUT_AT_ANSWER)
        raise _CutError(is_reset=breaks.is_reset, fin_writer=flow.writer if is_whole else None)

    async def _stall(self, flow: _Flow, breaks: Break) -> None:
        """Until the sender closes, or the time is over. The sender notices nothing: it can go on sending."""
        for stalled_flow in self._flows if breaks.both_ways else [flow]:
            stalled_flow.drops_bytes = True
        with suppress(TimeoutError):
            async with asyncio.timeout(breaks.wait_s):
                while await flow.reader.read(CHUNK_BYTES):
                    pass

    def _close_sockets(self, *, is_reset: bool, fin_writer: StreamWriter | None = None) -> None:
        """Closes both sockets; what was cut already stays as it is."""
        for writer in self._writers:
            close_writer(writer, is_reset=is_reset and writer is not fin_writer)


def close_writer(writer: StreamWriter, *, is_reset: bool) -> None:
    """Closes a connection now, with a RST or a FIN. What waits in our memory is not sent any more."""
    if writer.transport.is_closing():
        return
    with suppress(OSError):  # the other end was faster
        if is_reset:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        else:
            writer.write_eof()  # by itself, closing would be a RST if something had come that nobody has read
    writer.transport.abort()


async def _wait_event(event: asyncio.Event, wait_s: float) -> bool:
    try:
        await asyncio.wait_for(event.wait(), wait_s)
    except TimeoutError:
        return False
    return True
