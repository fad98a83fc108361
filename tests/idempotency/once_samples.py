"""Types and errors for tests of `once`."""

import dataclasses
import datetime as dt
from uuid import UUID

import msgspec


class CallCounter:
    """A counter of calls."""

    def __init__(self) -> None:
        self.times = 0


@dataclasses.dataclass
class Invoice:
    number: UUID
    at: dt.datetime
    lines: list[tuple[str, int]]


@dataclasses.dataclass(frozen=True)
class Refund:
    cents: int


@dataclasses.dataclass(frozen=True)
class Charge:
    cents: int


class Node(msgspec.Struct):
    children: "list[Node]"


class DeclinedError(Exception):
    def __init__(self, card: str, code: int) -> None:
        super().__init__(f"{card}: {code}")
        self.card = card
        self.code = code
