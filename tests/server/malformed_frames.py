"""Malformed WebSocket frames, derived from valid ones with a seeded random generator."""

import random
from collections.abc import Iterator

import orjson

Frame = tuple[bool, bytes]
"""Whether the frame is a text frame, and its content."""

_NUMBERS = ["1e999", "-0", "1" * 400, "9007199254740993", "1.0000000000000000000001", "NaN", "-Infinity", "0x10", "01"]
_TEXTS = ['"\\u0000"', '"\\ud800"', '"\\udfff\\ud800"', '"\\x"', '"\t"', '""', '"' + "é" * 300 + '"', '"\\u00"']
VALUES = [*_NUMBERS, *_TEXTS, "null", "true", "[]", "{}", "[[]]", '{"a":1,"a":2}', "[" * 300 + "]" * 300]
_KINDS = ["submit_events", "sync", "connect", "ping", "", "SUBMIT_EVENTS", "event_broadcast", "\u0000"]


def malformed_frames(seed: int, count: int) -> Iterator[Frame]:
    """Generate `count` frames of at most a few kilobytes. A few of them may be valid."""
    chance = random.Random(seed)
    for _ in range(count):
        yield _MAKERS[chance.randrange(len(_MAKERS))](chance)


def _message(chance: random.Random) -> bytes:
    """Return a valid message."""
    if chance.random() < 0.5:
        payload: object = {"partitions": ["fuzz"], "since_committed_id": 0, "limit": 3}
        kind = "sync"
    else:
        kind = "submit_events"
        items = [
            {
                "id": str(_uuid(chance)),
                "partitions": ["fuzz"],
                "event": {"type": "fuzz", "n": chance.random(), "deep": [{"x": [1, 2, {"y": None}]}]},
            }
            for _ in range(chance.randint(1, 3))
        ]
        payload = {"events": items}
    return orjson.dumps({"type": kind, "protocol_version": "1.0", "msg_id": "fuzz", "payload": payload})


def _uuid(chance: random.Random) -> str:
    digits = f"{chance.getrandbits(128):032x}"
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


def _truncated(chance: random.Random) -> Frame:
    data = _message(chance)
    return True, data[: chance.randrange(len(data))]


def _flipped(chance: random.Random) -> Frame:
    """Change some bytes. The result is usually invalid JSON and often invalid UTF-8."""
    data = bytearray(_message(chance))
    for _ in range(chance.randint(1, 6)):
        data[chance.randrange(len(data))] = chance.randrange(256)
    return True, bytes(data)


def _of_wrong_types(chance: random.Random) -> Frame:
    """Replace one value with another."""
    data = _message(chance).decode()
    spots = [
        index
        for index, character in enumerate(data)
        if character == ":" and '"protocol_version"' not in data[:index][-20:]
    ]
    at = chance.choice(spots) + 1
    end = at
    while end < len(data) and data[end] not in ",}]":
        end += 1
    return True, (data[:at] + chance.choice(VALUES) + data[end:]).encode("utf-8", "surrogatepass")


def _deep(chance: random.Random) -> Frame:
    levels = chance.choice([60, 200, 511, 513, 900])
    opening, closing = chance.choice([("[", "]"), ('{"a":', "}")])
    nested = opening * levels + "1" + closing * levels
    item = f'{{"id":"{_uuid(chance)}","partitions":["fuzz"],"event":{{"type":"t","x":{nested}}}}}'
    return True, f'{{"type":"submit_events","protocol_version":"1.0","payload":{{"events":[{item}]}}}}'.encode()


def _unknown(chance: random.Random) -> Frame:
    return True, orjson.dumps({"type": chance.choice(_KINDS[2:]), "protocol_version": "1.0", "payload": {}})


def _garbage(chance: random.Random) -> Frame:
    return chance.random() < 0.5, chance.randbytes(chance.randrange(400))


def _huge(chance: random.Random) -> Frame:
    value = chance.choice(["9" * chance.randint(1, 5000), "-" + "1" * 4400, "1e" + "9" * 300, "0." + "0" * 3000 + "1"])
    item = f'{{"id":"{_uuid(chance)}","partitions":["fuzz"],"event":{{"type":"t","x":{value}}}}}'
    return True, f'{{"type":"submit_events","protocol_version":"1.0","payload":{{"events":[{item}]}}}}'.encode()


def _binary(chance: random.Random) -> Frame:
    return False, _message(chance)


_MAKERS = [_truncated, _flipped, _of_wrong_types, _of_wrong_types, _deep, _unknown, _garbage, _huge, _binary]
