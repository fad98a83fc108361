"""Functions with annotated types, for tests. The annotations are strings, as in most modern modules."""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Awaitable, Callable
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated, Any, Literal
from uuid import UUID

import attrs
import msgspec
from pydantic import BaseModel, ConfigDict, Field, RootModel, SecretStr, computed_field, field_serializer

if TYPE_CHECKING:
    from elsewhere import Missing  # type: ignore[import-not-found]

WHEN = dt.datetime(2026, 11, 19, 12, 30, tzinfo=dt.UTC)
KEY = UUID("0198f3c2-7d55-7c1e-9a61-2f6f0c1b5a10")


class Item(BaseModel):
    name: str
    cents: Decimal


class Order(BaseModel):
    model_config = ConfigDict(strict=True)

    id: UUID
    at: dt.datetime
    items: list[Item] = []
    note: str | None = Field(None, alias="Note")

    @computed_field  # type: ignore[prop-decorator]
    @property
    def size(self) -> int:
        return len(self.items)


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int = 9


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"


class Login(BaseModel):
    user: str
    password: SecretStr


class StoredLogin(Login):
    @field_serializer("password", when_used="json")
    def show(self, password: SecretStr) -> str:
        return password.get_secret_value()


class Names(RootModel[list[str]]):
    pass


@dataclasses.dataclass
class Parcel:
    order: Order
    due: dt.date


@attrs.define
class Label:
    order: Order
    weight: Decimal


class Ticket(msgspec.Struct):
    order: Order
    seats: set[int]


ITEM = Item(name="tea", cents=Decimal("4.50"))
ORDER = Order(id=KEY, at=WHEN, items=[ITEM], Note="fragile")


CALLS: list[Any] = []
"""Arguments of all calls of the functions below."""


def return_model(value: Order) -> Order:
    CALLS.append(value)
    return value


def return_optional(value: Order | None) -> Order | None:
    CALLS.append(value)
    return value


def return_list(value: list[Order]) -> list[Order]:
    CALLS.append(value)
    return value


def return_dict(value: dict[str, Order]) -> dict[str, Order]:
    CALLS.append(value)
    return value


def return_by_id(value: Item) -> dict[UUID, Item]:
    return {KEY: value}


def return_union(value: Cat | Dog) -> Annotated[Cat | Dog, Field(discriminator="kind")]:
    CALLS.append(value)
    return value


def return_unions(value: list[Cat | Dog | None]) -> list[Cat | Dog | None]:
    CALLS.append(value)
    return value


def return_root(value: Names) -> Names:
    CALLS.append(value)
    return value


def return_secret(value: StoredLogin) -> StoredLogin:
    CALLS.append(value)
    return value


def return_dataclass(value: Parcel) -> Parcel:
    CALLS.append(value)
    return value


def return_attrs(value: Label) -> Label:
    CALLS.append(value)
    return value


def return_struct(value: Ticket) -> Ticket:
    CALLS.append(value)
    return value


def return_datetime(value: dt.datetime) -> dt.datetime:
    CALLS.append(value)
    return value


def return_uuid(value: UUID) -> UUID:
    CALLS.append(value)
    return value


def return_decimal(value: Decimal) -> Decimal:
    CALLS.append(value)
    return value


def return_times(value: dict[str, list[dt.date | None]]) -> dict[str, list[dt.date | None]]:
    CALLS.append(value)
    return value


def return_with_missing_parameter_type(value: Missing) -> Item:
    return ITEM


CASES: list[tuple[Any, Any]] = [
    (return_model, ORDER),
    (return_optional, ORDER),
    (return_optional, None),
    (return_list, [ORDER, ORDER]),
    (return_dict, {"a": ORDER}),
    (return_union, Cat(lives=7)),
    (return_union, Dog()),
    (return_unions, [Dog(), None, Cat()]),
    (return_root, Names(["ann", "bob"])),
    (return_secret, StoredLogin(user="ann", password=SecretStr("hunter2"))),
    (return_dataclass, Parcel(ORDER, dt.date(2026, 11, 20))),
    (return_attrs, Label(ORDER, Decimal("1.20"))),
    (return_struct, Ticket(ORDER, {3, 4})),
    (return_datetime, WHEN),
    (return_uuid, KEY),
    (return_decimal, Decimal("1.50")),
    (return_times, {"a": [dt.date(2026, 11, 20), None]}),
]
"""Functions that return their argument, and an argument of the annotated type."""


def make_async(function: Callable[[Any], Any]) -> Callable[[Any], Awaitable[Any]]:
    """Return an async function with the annotations of a blocking one."""

    async def call(value: Any) -> Any:
        return function(value)

    call.__annotations__ = function.__annotations__
    return call
