"""The proxy's splitter finds frames regardless of TCP chunk boundaries, and changes no byte."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncelog.testing.proxy_frames import ANSWER, HEAD_BYTES_MAX, REQUEST, Piece, Splitter, Unit

UPGRADE_REQUEST = b"GET /v1/events HTTP/1.1\r\nHost: x\r\nUPGRADE: WebSocket\r\nConnection: Upgrade\r\n\r\n"
UPGRADE_ANSWER = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n"
LENGTHS = (0, 1, 2, 125, 126, 127, 300, 65_535, 65_536, 70_000)
TEXT, BINARY, CLOSE, PING = 1, 2, 8, 9


def frame(content: bytes, *, opcode: int = TEXT, final: bool = True, reserved: int = 0, mask: bytes = b"") -> bytes:
    """Return a frame as defined in RFC 6455, section 5.2. With a mask, the content must already be masked."""
    masked = 0x80 if mask else 0
    if len(content) < 126:
        length = bytes([masked | len(content)])
    elif len(content) < 2**16:
        length = bytes([masked | 126]) + len(content).to_bytes(2, "big")
    else:
        length = bytes([masked | 127]) + len(content).to_bytes(8, "big")
    return bytes([(0x80 if final else 0) | reserved << 4 | opcode]) + length + mask + content


def split(opening: bytes, chunks: list[bytes]) -> list[Piece]:
    splitter = Splitter(opening)
    pieces = [piece for chunk in chunks for piece in splitter.feed(chunk)]
    return pieces + splitter.finish()


def units(pieces: list[Piece]) -> list[Unit]:
    """Return the units to which the pieces belong. Assert that each unit is complete and has no gaps."""
    found: list[Unit] = []
    end = 0
    for piece in pieces:
        assert piece.unit is not None
        assert piece.data
        if piece.offset == 0:
            assert not found or end == found[-1].size
            found.append(piece.unit)
        else:
            assert piece.offset == end
            assert piece.unit == found[-1]
        end = piece.end
    assert end == found[-1].size
    return found


def joined(pieces: list[Piece]) -> bytes:
    return b"".join(piece.data for piece in pieces)


@st.composite
def messages(draw: st.DrawFn) -> tuple[list[bytes], list[bool]]:
    """Draw the frames of some messages, and a flag for each frame that is true for a whole text message."""
    frames: list[bytes] = []
    whole: list[bool] = []

    def add(is_whole_text: bool = False, **options: Any) -> None:
        length = draw(st.sampled_from(LENGTHS[:4] if options["opcode"] >= CLOSE else LENGTHS))
        mask = draw(st.sampled_from([b"", b"\x00\xff\x81\x05"]))
        # The content looks like headers, so that a splitter that has lost synchronization does not recover by chance.
        frames.append(frame((b"\x81\x7e\x00\x05" * (length // 4 + 1))[:length], mask=mask, **options))
        whole.append(is_whole_text)

    for kind in draw(st.lists(st.sampled_from(["text", "binary", "control", "compressed", "parts"]), max_size=6)):
        if kind == "text":
            add(is_whole_text=True, opcode=TEXT)
        elif kind == "binary":
            add(opcode=BINARY)
        elif kind == "control":
            add(opcode=PING)
        elif kind == "compressed":
            add(opcode=TEXT, reserved=4)
        else:
            add(opcode=draw(st.sampled_from([TEXT, BINARY])), final=False)
            add(opcode=PING)
            add(opcode=0, final=False)
            add(opcode=0)
    return frames, whole


@given(messages(), st.data())
def test_frames_are_split_regardless_of_chunk_boundaries(
    made: tuple[list[bytes], list[bool]], data: st.DataObject
) -> None:
    frames, whole = made
    opening, head = data.draw(st.sampled_from([(REQUEST, UPGRADE_REQUEST), (ANSWER, UPGRADE_ANSWER)]))
    stream = head + b"".join(frames)
    # Cut near the headers, which is where it matters most, and at arbitrary places.
    near = {len(head) + sum(map(len, frames[:count])) + offset for count in range(len(frames)) for offset in range(16)}
    places = st.sampled_from(sorted(near)) | st.integers(0, len(stream)) if near else st.integers(0, len(stream))
    cuts = sorted({0, len(stream), *(at for at in data.draw(st.lists(places, max_size=20)) if at <= len(stream))})
    pieces = split(opening, [stream[start:end] for start, end in pairwise(cuts)])
    assert joined(pieces) == stream
    found = units(pieces)
    assert found[0] == Unit(len(head), is_head=True)
    assert [(unit.size, unit.is_whole_text) for unit in found[1:]] == list(zip(map(len, frames), whole, strict=True))


def test_frames_are_split_byte_by_byte() -> None:
    frames = [frame(b"x" * length, mask=b"mask") for length in (0, 125, 126, 65_536)]
    stream = UPGRADE_REQUEST + b"".join(frames)
    pieces = split(REQUEST, [stream[at : at + 1] for at in range(len(stream))])
    assert joined(pieces) == stream
    assert [unit.size for unit in units(pieces)[1:]] == [len(one) for one in frames]


def test_frame_content_is_passed_on_in_parts() -> None:
    splitter = Splitter(ANSWER)
    splitter.feed(UPGRADE_ANSWER)
    begun = frame(b"x" * 100_000)[:20]
    assert splitter.feed(begun[:9]) == []
    (piece,) = splitter.feed(begun[9:])
    assert (piece.data, piece.offset) == (begun, 0)
    assert joined(splitter.feed(b"more")) == b"more"


def test_text_frame_within_a_fragmented_message_is_not_whole() -> None:
    stream = frame(b"a", final=False) + frame(b"b") + frame(b"c")
    found = units(split(ANSWER, [UPGRADE_ANSWER + stream]))
    assert [unit.is_whole_text for unit in found[1:]] == [False, False, True]


@given(st.binary(max_size=300), st.integers(0, 300))
def test_no_byte_of_any_stream_is_lost(stream: bytes, cut: int) -> None:
    for opening in (REQUEST, ANSWER):
        for head in (b"", opening, UPGRADE_REQUEST, UPGRADE_ANSWER):
            sent = head + stream
            assert joined(split(opening, [sent[:cut], sent[cut:]])) == sent


@pytest.mark.parametrize(
    ("opening", "stream"),
    [
        (REQUEST, b"POST /v1/events HTTP/1.1\r\n"),
        (REQUEST, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"),
        (REQUEST, b"\x16\x03\x01"),
        (ANSWER, b"HTTP/1.1 403 Forbidden\r\n"),
        (ANSWER, b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: h2c\r\n\r\n"),
        (REQUEST, b"GET /" + b"x" * HEAD_BYTES_MAX),
        (REQUEST, b"GET /" + b"x" * HEAD_BYTES_MAX + b"\r\nUpgrade: websocket\r\n\r\n"),
    ],
)
def test_traffic_other_than_websockets_is_not_buffered(opening: bytes, stream: bytes) -> None:
    splitter = Splitter(opening)
    assert splitter.feed(stream) == [Piece(stream)]
    assert splitter.is_plain
    assert splitter.feed(frame(b"x")) == [Piece(frame(b"x"))]


def test_head_is_buffered_until_complete() -> None:
    splitter = Splitter(REQUEST)
    assert splitter.feed(UPGRADE_REQUEST[:-1]) == []
    assert splitter.feed(UPGRADE_REQUEST[-1:]) == [Piece(UPGRADE_REQUEST, Unit(len(UPGRADE_REQUEST), is_head=True))]


def test_stream_with_a_refused_upgrade_is_treated_as_plain() -> None:
    splitter = Splitter(REQUEST)
    splitter.feed(UPGRADE_REQUEST)
    assert not splitter.is_plain
    splitter.switch_to_plain()
    assert splitter.feed(frame(b"x")) == [Piece(frame(b"x"))]
