"""Whatever the order of arrival: the same rows, those of a model (DE-7, DE-4, DE-12)."""

import random
from collections.abc import Sequence
from itertools import permutations
from pathlib import Path
from typing import Any, Final

import pytest

from databases import BOTH_STORES
from doors.deltas.delta_doors import Gateway, House, Json, change, merged_of, opened, rows_of
from doors.deltas.row_model import modelled
from doors.serving import run

pytestmark = BOTH_STORES

# By code point the private use area comes before what is beyond the BMP; by UTF-16 code unit it comes after.
CLIENTS: Final = ("a", "b", "\ue000", "\U0001f600")
SETS: Final = {
    "columns": [change(1, a=1, b=1), change(2, a=2), change(2, client="b", b=2), change(2, client="b", b=3, c=0)],
    "clients": [change(5, client=client, a=client) for client in CLIENTS],
    "deletes": [
        change(3, op="DELETE"),
        change(2, op="INSERT", a=1, b=1),
        change(4, b=2),
        change(3, client="b", c=3),
    ],
    "ties": [
        change(3, client="b", op="DELETE"),
        change(3, client="a", a=1),
        change(3, client="\U0001f600", b=1),
        change(3, client="\ue000", op="DELETE"),
    ],
    "back": [change(1, a=1), change(2, op="DELETE"), change(3, op="INSERT"), change(1, client="b", b=1)],
}
"""Small ones, with all that makes a difference."""


def drawn(random_: random.Random, count: int) -> list[Json]:
    """Deltas of few rows, clocks and clients, so that every kind of tie comes up all the time."""
    found: dict[str, Json] = {}
    while len(found) < count:
        op = random_.choice(["INSERT", "UPDATE", "UPDATE", "DELETE"])
        names = [] if op == "DELETE" else random_.sample("abcd", random_.randint(0, 3))
        columns: Any = {name: random_.choice([None, 0, 1, "x", [1], {"k": 2.5}]) for name in names}
        delta = change(
            random_.randint(1, 6),
            f"r{random_.randint(1, 3)}",
            client=random_.choice(CLIENTS),
            op=op,
            table=random_.choice("tu"),
            **columns,
        )
        found.setdefault(delta["deltaId"], delta)
    return list(found.values())


async def state(gateway: Gateway) -> list[Any]:
    """All that a merge knows, byte for byte: not even the order of columns shows who came first."""
    bodies = [(await gateway.request("GET", f"rows/{table}")).body for table in "tu"]
    return [(await gateway.snapshot())[0], bodies]


async def agree(gateway: Gateway, deltas: Sequence[Json]) -> None:
    model = modelled(deltas)
    for table in "tu":
        assert await gateway.rows(table) == rows_of(model, table)


@pytest.mark.rule("DE-7", "DE-4")
@pytest.mark.parametrize("deltas", SETS.values(), ids=SETS)
def test_every_permutation_of_a_small_set_comes_to_the_same_rows(house: House, deltas: list[Json]) -> None:
    async def main() -> None:
        model, states = modelled(deltas), []
        for number, order in enumerate(permutations(deltas)):
            gateway = house.gateway(number)
            cut = number % 4
            await gateway.pushed(*order[:cut])
            await gateway.pushed(*order[: cut + 1], *order[cut:])  # some again, some twice at once
            assert await gateway.rows() == rows_of(model), order
            states.append(await state(gateway))
        assert states == [states[0]] * 24

    house.run(main())


@pytest.mark.rule("DE-7", "DE-4", "DE-6")
def test_a_delete_and_what_is_written_after_it_as_a_user_sees_it(house: House) -> None:
    async def main() -> None:
        gateway = house.gateway()
        await gateway.pushed(change(5, op="INSERT", name="Tea", price=1))
        await gateway.pushed(change(7, op="DELETE"))
        assert await gateway.rows() == {}
        await gateway.pushed(change(6, price=2))  # late, and older than the delete
        assert await gateway.rows() == {}
        await gateway.pushed(change(8, price=3))
        assert await gateway.rows() == {"r1": {"price": 3}}  # with the columns that it names
        one = await gateway.ok("GET", "rows/t", params={"rowId": "r1"})
        assert one == {"rows": [{"rowId": "r1", "columns": {"price": 3}, "hlc": "8"}], "next": ""}
        assert await gateway.ok("GET", "rows/t", params={"rowId": "r2"}) == {"rows": [], "next": ""}
        assert await gateway.ok("GET", "rows/nowhere") == {"rows": [], "next": ""}

    house.run(main())


@pytest.mark.rule("DE-7", "DE-4", "DE-12")
@pytest.mark.parametrize("seed", range(4))
def test_random_orders_with_duplicates_compactions_and_restarts(tmp_path: Path, seed: int) -> None:
    random_ = random.Random(seed)
    deltas = drawn(random_, 40)
    names = [f"g{number}" for number in range(5)]
    orders = {name: random_.sample(deltas, len(deltas)) for name in names}
    pushed: dict[str, list[Json]] = {name: [] for name in names}

    async def some(gateway: Gateway, name: str) -> None:
        """A few of those to come, among some that are known already."""
        count = random_.randint(4, 20)
        coming, orders[name] = orders[name][:count], orders[name][count:]
        pushed[name] += coming
        again = random_.sample(pushed[name], min(3, len(pushed[name])))
        batch = coming + again
        if random_.random() < 0.5:
            random_.shuffle(batch)
        await gateway.pushed(*batch)
        if random_.random() < 0.6:
            await gateway.compact(keep=random_.randint(0, 5))
            await gateway.pushed(*again)

    async def main() -> None:
        while any(orders.values()):
            async with opened(tmp_path) as door:
                for name in names:
                    gateway = door.gateway(name)
                    await some(gateway, name)
                    await agree(gateway, pushed[name])
        async with opened(tmp_path) as door:
            states = []
            for name in names:
                gateway = door.gateway(name)
                assert all(is_known for _, is_known in await gateway.pushed(*random_.sample(deltas, 40)))
                await agree(gateway, deltas)
                rows, cursor = await gateway.snapshot(limit=random_.randint(1, 4))
                assert cursor == len(deltas)
                assert modelled(merged_of(rows, [])) == modelled(deltas)
                states.append(await state(gateway))
            assert states == [states[0]] * len(names)

    run(main())
